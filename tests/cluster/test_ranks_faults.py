"""One of four ranks goes wrong: somebody says which, everybody ends, and the exit code is the one of the rank at fault."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import pytest
from launchers import IN_FULL, Ranks
from training import compile_for

from tilework.parallel import segment

CODES = {"die": 137, "raise": 1, "exit": 5}


SAMPLE = {("die", "device"): (), ("raise", "host"): pytest.mark.slow}


@pytest.mark.parametrize(
    ("fault", "reduce"),
    [
        pytest.param(f, r, marks=SAMPLE.get((f, r), IN_FULL))
        for f in ("die", "freeze", "raise", "exit")
        for r in ("device", "host")
    ],
)
def test_a_rank_that_goes_wrong(fault: str, reduce: str, ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "sgd", 1)
    ranks(4, "fault", path, fault, reduce, code=CODES.get(fault, 76))
    assert ranks.done is not None
    said = ranks.done.stderr
    assert "rank 2" in said, said
    assert said.count("Traceback") == (1 if fault == "raise" else 0), said
    if fault == "raise":
        assert "rank 2 of 4 failed" in said and "a mistake of the program's own" in said
    nothing_left_behind()


def nothing_left_behind() -> None:
    """No shared memory. Another test beside this one may have some for a moment, between making it and opening it."""
    mine = f"tilework-{os.getuid()}-*"
    kept = set(Path("/dev/shm").glob(mine))
    for _ in range(100):
        if not kept:
            return
        time.sleep(0.1)
        kept &= set(Path("/dev/shm").glob(mine))
    raise AssertionError(f"shared memory was left behind: {kept}")


def test_more_ranks_than_asked_for(ranks: Ranks) -> None:
    ranks(2, "asked", 3, code=2)
    assert ranks.done is not None and "2 ranks were started, and 3 were asked for" in ranks.done.stderr


@IN_FULL
def test_a_port_in_use(ranks: Ranks) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks(2, "asked", 2, code=None, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TILEWORK_TIMEOUT="5")
    assert ranks.done is not None and ranks.done.returncode and "the port is in use" in ranks.done.stderr


def test_what_was_left_long_ago_is_removed() -> None:
    old, young = (Path("/dev/shm") / f"tilework-{os.getuid()}-{secrets.token_hex(8)}" for _ in range(2))
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    made = Path(segment._created(4096)[0])
    assert not old.exists() and young.exists() and made.stat().st_size == 4096
    young.unlink()
    made.unlink()
