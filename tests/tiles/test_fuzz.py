"""The daemon's protocol under random packets: it answers or cuts off, and goes on serving."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from pathlib import Path

from tilework.tiles import alive, client
from tilework.tiles.asks import Ask

FULL = os.environ.get("TILEWORK_FULL") == "1"
WORDS = ["type", "lease", "share", "release", "view", "drain", "stop", "metrics", "ask", "count", "chips", "tiles", "gpu", "path",
         "on", "reason", "window", "platform", "wait", "command", "label", "page", "stack", "cpus", "request",
         "SN30-8", "host", "..", "\0", "\ud800", "/"]  # fmt: skip


def value(r: random.Random, depth: int = 0) -> object:
    kinds = [lambda: r.choice(WORDS), lambda: r.randint(-(2**70), 2**70), lambda: r.uniform(-1e300, 1e300), lambda: None,
             lambda: r.random() < 0.5, lambda: r.randint(0, 5), lambda: "x" * r.randint(0, 3000)]  # fmt: skip
    if depth < 4:
        kinds += [lambda: [value(r, depth + 1) for _ in range(r.randint(0, 4))],
                  lambda: {r.choice(WORDS): value(r, depth + 1) for _ in range(r.randint(0, 4))}]  # fmt: skip
    return r.choice(kinds)()


def packet(r: random.Random, page: int) -> bytes:
    how = r.random()
    if how < 0.2:
        return r.randbytes(r.randint(1, 5000))
    body = {"type": r.choice(WORDS[1:8]), **{r.choice(WORDS): value(r) for _ in range(r.randint(0, 5))}}
    if body["type"] == "stop":
        body["type"] = "view"  # we are allowed to stop it; that is not what is tested
    if body["type"] == "drain" and r.random() < 0.9:
        body["type"] = "lease"
    if r.random() < 0.5:
        body["page"] = page
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if how < 0.4:  # bytes turned over, cut off, doubled
        cut = bytearray(data)
        for _ in range(r.randint(1, 4)):
            cut[r.randrange(len(cut))] = r.randrange(256)
        data = bytes(cut[: r.randint(1, len(cut))])
    return data


def test_random_packets(run_folder: Path) -> None:
    r = random.Random(3)
    client.view()
    pid = client.view().daemon.pid
    at_first = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    connection = client.connect().sock
    memory, null = os.memfd_create("page"), os.open("/dev/null", os.O_RDWR)
    alive.lock(memory)
    for i in range(20_000 if FULL else 2_000):
        try:
            connection.settimeout(0.1)  # a session that only wants to be seen gets no answer
            sent = [memory, null][: r.randint(0, 2)] if r.random() < 0.5 else [memory, memory]
            socket.send_fds(connection, [packet(r, memory)], sent)
            if r.random() < 0.9:
                connection.recv(200_000)
        except (OSError, ConnectionError):
            connection.close()
            connection = client.connect().sock
        if r.random() < 0.05:
            connection.close()
            connection = client.connect().sock
        if i % 200 == 0:
            assert client.view().daemon.pid == pid, "the daemon did not survive"
    connection.close()
    os.close(memory)
    with contextlib.suppress(Exception), client.talking() as ask:
        from tilework.tiles import messages

        ask(messages.Drain("/", False))
    assert client.view().daemon.pid == pid
    assert client.lease(Ask(count=1), wait=10).tiles, "tiles are free again"
    fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    assert fds < at_first + 20, f"{at_first} descriptors, then {fds}: the daemon keeps what it was sent"
    log = (run_folder / "daemon.log").read_text()
    assert "Traceback" not in log, log[-3000:]
