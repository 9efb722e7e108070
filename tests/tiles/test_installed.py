"""The daemon as root's service, in a mount namespace of its own: /run/tilework, /var/lib and /var/log are private to the test."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from daemons import ROOT, python_for_all

pytestmark = pytest.mark.slow

PLACES = r"""
set -e
case $CHECKOUT in /tmp/*) mount --bind $CHECKOUT /mnt;; esac
for place in /run /var/lib /var/log /tmp; do mount -t tmpfs -o mode=0755 tmpfs $place; done
chmod 1777 /tmp
case $CHECKOUT in /tmp/*) mkdir -p $CHECKOUT; mount --bind /mnt $CHECKOUT;; esac
cd /
unset XDG_RUNTIME_DIR
if [ -d /etc/systemd ]; then mount -t tmpfs tmpfs /etc/systemd; fi
mkdir -p /run/tilework /var/lib/tilework
chmod 700 /var/lib/tilework
set +e
"""
SCRIPT = r"""
set -e
$ROOT_PYTHON -m tilework.tiles.service --platform SN10-8 & daemon=$!
for i in $(seq 200); do [ -S /run/tilework/daemon.sock ] && break; sleep 0.05; done
cat > /run/user.py <<'EOF'
import os, sys
os.setgid(65534); os.setuid(65534)
from tilework.tiles import client, holding
from tilework.tiles.asks import Ask
from tilework.errors import TileworkError
mine = client.lease(Ask(count=4))
seen = client.view()
print(seen.daemon.user, seen.daemon.installed, seen.platform, len(mine.tiles), seen.leases[0].user)
for path in ("/var/lib/tilework/state.db", *(f"/run/tilework/{name}" for name in os.listdir("/run/tilework"))):
    try:
        os.open(path, os.O_RDONLY)
        print("opened", path)
    except OSError:
        pass
page, stack = client.files()
client.share(page, stack, command="sharing")
print(client.view().shared[0].command, flush=True)
sys.stdin.readline()  # the daemon is killed and started again meanwhile
seen = client.view()
print([x.pid == os.getpid() for x in seen.leases], [x.pid == os.getpid() for x in seen.shared])
mine.release()
page.close()
print(client.view().leases, client.view().shared)
EOF
mkfifo /run/go
$USER_PYTHON /run/user.py < /run/go & user=$!
exec 5> /run/go
sleep 1.5
kill -9 $daemon; wait $daemon || true
$ROOT_PYTHON -m tilework.tiles.service --platform SN10-8 & daemon=$!
sleep 1
echo >&5
wait $user
kill -9 $daemon; wait $daemon || true
$USER_PYTHON -c 'import os; os.setgid(65534); os.setuid(65534)
from tilework.tiles import client
try:
    client.view()
except Exception as e:
    print(e.id, e.fix)'
"""


MOVING = r"""
hold='from tilework.tiles import client; mine = client.lease(); print("held in", client.run_folder(), flush=True); input()'
session() { mkfifo /run/$1; $ROOT_PYTHON -c "$hold" < /run/$1 & sleep 1; }
service() { $ROOT_PYTHON -m tilework.tiles.service & daemon=$!; sleep 1; }
remove() { $ROOT_PYTHON -m tilework daemon remove 2>&1 | grep -E "tilework: error|found|there was no"; }
session old; exec 5> /run/old; sleep 1
service
session new; exec 7> /run/new; sleep 1
remove
kill $daemon; wait $daemon
$ROOT_PYTHON -m tilework daemon log
remove
echo >&7; sleep 1
remove
session last; exec 8> /run/last; sleep 1
echo >&5; echo >&8
$ROOT_PYTHON -m tilework daemon stop
"""


def in_namespace(script: str) -> tuple[list[str], object]:
    """The lines that a script prints, with places of its own."""
    python, env = python_for_all()
    env = {k: v for k, v in env.items() if not k.startswith("TILEWORK_")}
    env |= {"ROOT_PYTHON": sys.executable, "USER_PYTHON": python, "CHECKOUT": str(ROOT)}
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(["unshare", "-m", "bash", "-c", PLACES + script], capture_output=True, text=True, env=env, timeout=120)
    return [line.strip() for line in done.stdout.splitlines() if line], done


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_installing_and_removing() -> None:
    """Sessions from before keep the daemon that they have; while sessions hold tiles of the service, it is not removed."""
    lines, done = in_namespace(MOVING)
    own = f"held in /tmp/tilework-{os.getuid()}"
    assert lines[:2] == [own, "held in /run/tilework"] and "the service still runs" in lines[2], done
    assert lines[3].endswith("journalctl -u tilework"), done
    assert "sessions still hold tiles" in lines[4] and "pid" in lines[5] and lines[6].startswith("there was no"), done
    assert lines[7] == own and len(lines) == 9, done


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_service() -> None:
    lines, done = in_namespace(SCRIPT)
    assert lines[:4] == ["root True SN10-8 4 nobody", "sharing", "[True] [True]", "[] []"], done
    assert lines[4].startswith("tiles-daemon systemctl start tilework"), done
    assert len(lines) == 5, done
