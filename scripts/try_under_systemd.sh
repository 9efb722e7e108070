#!/usr/bin/env bash
# Tries the service under a real systemd, in namespaces of its own: nothing of this machine's /run, /etc, /var or /tmp is changed.
# For root on a machine that has systemd's files but does not run it (a container). Use: scripts/try_under_systemd.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python="${PYTHON:-$root/.venv/bin/python}"
[ "$(id -u)" = 0 ] || { echo "only root can make the namespaces" >&2; exit 2; }
[ "$(cat /proc/1/comm)" != systemd ] || { echo "systemd runs this machine: try the service itself, with docs/tiles.md" >&2; exit 2; }
work=$(mktemp -d -p "$root")  # not below /tmp: that is covered in the namespace
inside="" pid=""
cleanup() {
  [ -z "$inside" ] || kill -9 "$inside" 2>/dev/null || true
  [ -z "$pid" ] || wait "$pid" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

cat > "$work/boot.sh" <<'BOOT'
set -e
mount --make-rprivate /
for folder in /run /tmp /dev/shm; do mount -t tmpfs tmpfs "$folder"; done
for folder in /etc /var; do
  mkdir -p "/run/over$folder/up" "/run/over$folder/work"
  mount -t overlay overlay -o "lowerdir=$folder,upperdir=/run/over$folder/up,workdir=/run/over$folder/work" "$folder"
done
mkdir -p /etc/systemd/system
for unit in systemd-tmpfiles-{setup,setup-dev,clean} systemd-udevd systemd-udev-trigger systemd-sysctl systemd-modules-load \
            systemd-remount-fs systemd-update-utmp console-getty getty@tty1; do
  ln -sf /dev/null "/etc/systemd/system/$unit.service"
done
export container=tilework
exec "$(command -v systemd || echo /usr/lib/systemd/systemd)" --system --unit=basic.target --log-target=console --show-status=0
BOOT
unshare --fork --pid --mount --uts --ipc --cgroup --mount-proc bash "$work/boot.sh" > "$work/boot.log" 2>&1 &
pid=$!
for _ in $(seq 50); do
  inside=$(pgrep -P "$pid" || true)
  if [ -n "$inside" ] && nsenter -t "$inside" -m -p systemctl is-system-running 2>/dev/null | grep -qE "running|degraded"; then break; fi
  sleep 0.2
done
within() { nsenter -t "$inside" -m -p -u -i -C env -u TILEWORK_RUN "$@"; }
tilework() { within "$python" -m tilework "$@"; }
check() { # what is expected, then a command whose output must have it
  local words=$1; shift
  local found; found=$("$@" 2>&1 || true)
  if grep -q -- "$words" <<< "$found"; then echo "ok: $words"; else echo "FAILED: '$words' is not in: $found"; exit 1; fi
}
holder() { # a process that holds one tile, for so many seconds
  within "$python" -c "import time; from tilework.tiles import holding; holding.hold(1); print('held', flush=True); time.sleep($1)" &
}
leases() { check "1 lease," tilework daemon status; }

echo "a session from before the install keeps its own daemon; new ones go to the service"
holder 8; sleep 3
check "folder /tmp/tilework-0" tilework daemon status
within sh -c 'echo 0123456789abcdef > /etc/tilework-token'
tilework daemon install --listen 127.0.0.1:9464 --token-file /etc/tilework-token --platform SN10-8
check "listen=127.0.0.1:9464" within cat /etc/systemd/system/tilework.service
within systemctl daemon-reload
within systemctl enable --now tilework
check "active (running)" within systemctl status --no-pager snd
check "platform SN10-8" tilework daemon status
check "journalctl -u tilework" tilework daemon log
check "200 OK" within "$python" -c "import urllib.request as u; r = u.urlopen(u.Request('http://127.0.0.1:9464/metrics', \
  headers={'Authorization': 'Bearer 0123456789abcdef'})); print(r.status, r.reason)"
if within sh -c 'command -v journalctl' > /dev/null && within systemctl is-active --quiet systemd-journald; then
  check "leases found" within journalctl --no-pager -u tilework
fi
check "folder /run/tilework" tilework daemon status
echo "leases outlive a restart, a crash and an upgrade of the daemon"
holder 30; sleep 2
leases
within systemctl restart tilework; leases
within systemctl kill -s KILL tilework; sleep 2.5; leases
within systemctl stop tilework; check "systemctl start" tilework tiles
within systemctl start tilework; leases
echo "uninstall"
check "the service still runs" tilework daemon remove
within systemctl disable --now tilework
check "still hold tiles" tilework daemon remove
sleep 25
check "removed" tilework daemon remove
within systemctl daemon-reload
check "folder /tmp/tilework-0" tilework daemon status
echo "all well"
