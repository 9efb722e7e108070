"""The daemon as root's service, in a mount namespace of its own: /run/tilework, /var/lib and /var/log are private to the test."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import python_for_all

PLACES = r"""
set -e
for place in /run /var/lib /var/log /dev/shm; do mount -t tmpfs -o mode=0755 tmpfs $place; done
chmod 1777 /dev/shm
if [ -d /etc/systemd ]; then mount -t tmpfs tmpfs /etc/systemd; fi
mkdir -p /run/tilework /var/lib/tilework /var/log/tilework
chmod 700 /var/lib/tilework
set +e
"""
SCRIPT = r"""
set -e
$ROOT_PYTHON -m tilework.tiles.service --platform SN10-8 & daemon=$!
for i in $(seq 200); do [ -s /run/tilework/daemon.address ] && break; sleep 0.05; done
cat > /run/user.py <<'EOF'
import os, sys
os.setgid(65534); os.setuid(65534)
from tilework.tiles import client, holding
from tilework.tiles.asks import Ask
from tilework.errors import TileworkError
mine = client.lease(Ask(count=4))
seen = client.view()
print(seen.daemon.user, seen.daemon.installed, seen.platform, len(mine.tiles), seen.leases[0].user)
for path in ("/run/tilework/daemon.lock", "/run/tilework/daemon.address", "/var/lib/tilework/state.db"):
    try:
        os.open(path, os.O_RDWR)
        print("opened", path)
    except OSError:
        pass
for name in os.listdir("/run/tilework"):
    if name.startswith("lease-") and not name.endswith(".json"):
        try:
            os.open(f"/run/tilework/{name}", os.O_RDONLY)
            print("opened", name)
        except OSError:
            pass
sys.stdout.flush()
sys.stdin.readline()  # the daemon is killed and started again meanwhile
print([x.pid == os.getpid() for x in client.view().leases])
mine.release()
print(client.view().leases)
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
service; wait $daemon; echo "service: $?"
session older; exec 6> /run/older; sleep 1
echo >&5; echo >&6; sleep 1
before=$(cat /dev/shm/tilework/daemon.address)
service
[ -S /dev/shm/tilework/$before ] || echo "the shared daemon has gone"
session new; exec 7> /run/new; sleep 1
remove
kill $daemon; wait $daemon
remove
echo >&7; sleep 1
remove
session last; exec 8> /run/last; sleep 1
echo >&8
$ROOT_PYTHON -m tilework daemon stop
"""


def in_namespace(script: str) -> tuple[list[str], object]:
    """The lines that a script prints, with places of its own."""
    python, env = python_for_all()
    env = {k: v for k, v in env.items() if not k.startswith("TILEWORK_")} | {"ROOT_PYTHON": sys.executable, "USER_PYTHON": python}
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(["unshare", "-m", "bash", "-c", PLACES + script], capture_output=True, text=True, env=env, timeout=120)
    return [line.strip() for line in done.stdout.splitlines() if line], done


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_tiles_never_have_two_masters() -> None:
    lines, done = in_namespace(MOVING)
    assert lines[:4] == ["held in /dev/shm/tilework", "service: 3", "held in /dev/shm/tilework", "the shared daemon has gone"], (
        done
    )
    assert lines[4] == "held in /run/tilework" and "the service still runs" in lines[5], done
    assert "sessions still hold tiles" in lines[6] and "pid" in lines[7] and lines[8].startswith("there was no"), done
    assert lines[9] == "held in /dev/shm/tilework", done


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_service() -> None:
    lines, done = in_namespace(SCRIPT)
    assert lines[:3] == ["root True SN10-8 4 nobody", "[True]", "[]"], done
    assert lines[3].startswith("tiles-daemon systemctl start tilework"), done
    assert len(lines) == 4, done
