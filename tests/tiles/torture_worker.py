"""One client of the torture test: leases, checks from outside the daemon that nobody else has those tiles, releases, again.

Arguments: folder for the check, seed, how many operations. It may be killed at any moment."""

from __future__ import annotations

import fcntl
import os
import random
import sys
import time

from tilework.errors import MachineError, UserError
from tilework.tiles import alive, client
from tilework.tiles.asks import Ask


def main() -> None:
    folder, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND)
    # Opened before any lease, and locked by the process: when it is killed, the kernel closes these before the lease's page.
    check = [os.open(f"{folder}/tile-{i}", os.O_RDWR) for i in range(32)]
    for _ in range(count):
        ask = random.choice([Ask(count=random.randint(1, 6)), Ask(count=1), Ask(chips=random.randint(1, 2)),
                             Ask(tiles=tuple(sorted(random.sample(range(32), 3)))), Ask(count=24)])  # fmt: skip
        begin = time.monotonic()
        try:
            lease = client.lease(ask, wait=60, platform="SN10-8")
        except UserError as e:
            os.write(log, f"starved {os.getpid()} {e.id} {ask}\n".encode())
            continue
        except MachineError as e:
            os.write(log, f"trouble {os.getpid()} {e.id} {e.found}\n".encode())
            continue
        waited = time.monotonic() - begin
        for i in lease.tiles:
            try:
                fcntl.lockf(check[i], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.write(log, f"twice {i} {os.getpid()} {lease.id} beside {alive.holder(check[i])}\n".encode())
        time.sleep(random.random() * 0.01)
        for i in lease.tiles:
            fcntl.lockf(check[i], fcntl.LOCK_UN)
        how = random.random()
        if how < 0.05:
            os.write(log, f"done {waited:.3f}\n".encode())
            os._exit(0)  # without a word
        lease.release()
        os.write(log, f"done {waited:.3f}\n".encode())


main()
