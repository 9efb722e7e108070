"""What clients and the daemon say to each other: one JSON object a packet, over a Unix socket that keeps packets apart."""

from __future__ import annotations

import socket
import struct
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .asks import Ask

LARGEST_REQUEST = 32 * 1024  # bytes; a longer packet ends the connection
LARGEST_REPLY = 64 * 1024  # a longer one comes in a memory file


class LeaseRequest(msgspec.Struct, tag="lease", forbid_unknown_fields=True):
    """For the process that asks, which has locked its page."""

    text: str = ""  # what to lease, as asks.py reads it; empty: one chip
    ask: Ask | None = None  # the same, already read
    cpus: str = ""  # that the process may use, as the kernel writes lists; empty: all
    page: int = -1  # the numbers of two memory files in the client: its page, and the file for its stacks
    stack: int = -1
    command: str = ""
    label: str = ""  # what the process calls its job
    platform: str | None = None
    wait: float | None = None  # seconds; None: as the site says
    keeps: str = ""  # a job's id: the tiles are for this process's descendants, who ask for `job`
    part: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1, le=4096)]] = (
        0,
        1,
    )  # which of how many parts of a job's tiles
    chosen: str = ""  # or those of them that it names, as the kernel writes lists
    request: str = ""  # the client's name for it: where a daemon dies, the next one is asked the same again


class Share(msgspec.Struct, tag="share", forbid_unknown_fields=True):
    """A process that takes no tiles, but wants to be seen. There is no answer: nobody waits for one."""

    page: int = -1
    stack: int = -1
    command: str = ""
    label: str = ""


class Release(msgspec.Struct, tag="release", forbid_unknown_fields=True):
    """A process has given its lease up: the daemon looks at once. Of a job: its processes and root may give it up."""

    lease: str


class Look(msgspec.Struct, tag="view", forbid_unknown_fields=True):
    window: float = 2.0  # seconds to average over
    platform: str | None = None


class Drain(msgspec.Struct, tag="drain", forbid_unknown_fields=True):
    path: str
    on: bool = True
    reason: str = ""
    platform: str | None = None  # whose tile of that name it is


class Stop(msgspec.Struct, tag="stop", forbid_unknown_fields=True):
    pass


class History(msgspec.Struct, tag="history", forbid_unknown_fields=True):
    """The last leases that have ended or begun."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20


class Metrics(msgspec.Struct, tag="metrics", forbid_unknown_fields=True):
    pass


Request = LeaseRequest | Share | Release | Look | Drain | Stop | History | Metrics
_decoder = msgspec.json.Decoder(Request)
encode = msgspec.json.encode


def decode(packet: bytes) -> Request:
    """msgspec.DecodeError (or ValidationError, which is one) for anything that is not a request."""
    try:
        return _decoder.decode(packet)
    except (RecursionError, UnicodeDecodeError) as e:
        raise msgspec.DecodeError(str(e)) from e


def printable(text: str, length: int) -> str:
    """For anybody's terminal: no control characters, one line, not too long."""
    return "".join(c if c.isprintable() else "?" for c in text[:length])


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, by the kernel's word."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def receive(connection: socket.socket) -> bytes:
    """The next answer. ConnectionError where the daemon has gone."""
    packet, fds, _, _ = socket.recv_fds(connection, LARGEST_REPLY, 1, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        raise ConnectionError("the daemon has closed the connection")
    if fds:  # a long answer: the packet only says so
        with open(fds[0], "rb") as f:
            return f.read()
    return packet


def loads(packet: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(packet)
    return found
