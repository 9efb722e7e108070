#!/bin/sh
# What the project needs of the machine: Python 3.11+ with venv, and g++. Missing packages are installed when run as root;
# otherwise they are named in one line with the command that installs them.
python=${PYTHON:-python3}
missing=""
command -v g++ >/dev/null 2>&1 || missing="$missing g++"
command -v "$python" >/dev/null 2>&1 || missing="$missing python3"
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || missing="$missing python3-venv"
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing:$missing"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null || exit 1
  else
    echo "missing:$missing   install with: sudo apt-get install$missing" >&2
    exit 1
  fi
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Python 3.11 or later is needed, found $("$python" --version)   name another one with: make PYTHON=python3.11 ..." >&2
  exit 1
}
