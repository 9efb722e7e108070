"""The daemon's end of its socket: clients come and go, one packet is one request. What is malformed, oversized, silent or does
not read its answers is cut off."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from typing import Any

import msgspec

from .. import __version__
from ..errors import TileworkError
from . import messages
from .ledger import Waiting
from .messages import printable

log = logging.getLogger("tilework.tiles")
CONNECTIONS_PER_USER = 128
SILENT_SECONDS = 10.0  # a connection that waits for nothing is closed after this


class Connection:
    """A client, known by the kernel's word."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid, self.uid = messages.peer(sock)
        self.heard = time.monotonic()
        self.waiting: Waiting | None = None


class Server:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.connections: dict[int, Connection] = {}  # by file descriptor
        self.used = time.monotonic()  # when somebody last needed us

    def handle(self, connection: Connection, request: messages.Request) -> None:
        raise NotImplementedError

    def left(self, connection: Connection) -> None:
        """A client has gone."""
        raise NotImplementedError

    def accept_at(self, listener: socket.socket) -> None:
        if listener not in self.selector.get_map():  # a new one, or left out because descriptors had run out
            self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as e:  # no descriptors left: those who are connected are served first
            log.error("a client could not be let in: %s", e)
            self.selector.unregister(listener)
            return
        sock.setblocking(False)
        connection = Connection(sock)
        self.connections[sock.fileno()] = connection
        self.selector.register(sock, selectors.EVENT_READ, self._packet)
        if connection.uid and sum(c.uid == connection.uid for c in self.connections.values()) > CONNECTIONS_PER_USER:
            self._refuse_and_close(connection, "tiles-limit", f"more than {CONNECTIONS_PER_USER} connections of one user")

    def close(self, sock: socket.socket) -> None:
        connection = self.connections.pop(sock.fileno(), None)
        if connection is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(sock)
            sock.close()
            self.left(connection)

    def close_the_silent(self, now: float) -> None:
        for connection in list(self.connections.values()):
            if connection.waiting is None and now - connection.heard > SILENT_SECONDS:
                self.close(connection.sock)

    def say(self, connection: Connection, what: Any) -> bool:
        """A client that does not read what it is told is cut off: False."""
        data, fds = what if isinstance(what, bytes) else messages.encode(what), []
        try:
            if len(data) > messages.LARGEST_REPLY:
                fds = [os.memfd_create("tilework-answer", os.MFD_CLOEXEC)]
                with open(fds[0], "wb", closefd=False) as f:
                    f.write(data)
                os.lseek(fds[0], 0, os.SEEK_SET)
                data = messages.encode({"state": "in memory"})
            socket.send_fds(connection.sock, [data], fds, socket.MSG_NOSIGNAL)
            return True
        except OSError:
            self.close(connection.sock)
            return False
        finally:
            for fd in fds:
                os.close(fd)

    def refuse(self, connection: Connection, error: TileworkError) -> None:
        self.say(connection, {"state": "refused", **error.as_json(), "id": error.id})

    def _refuse_and_close(self, connection: Connection, id: str, summary: str) -> None:
        what = {"state": "refused", "id": id, "summary": summary}
        if id == "tiles-protocol":
            what |= {"found": f"the daemon is version {__version__}", "fix": "if yours is another: tilework daemon stop"}
        if self.say(connection, what):
            self.close(connection.sock)

    def _packet(self, sock: socket.socket) -> None:
        connection = self.connections.get(sock.fileno())
        if connection is None:  # closed meanwhile
            return
        try:
            packet, _, flags, _ = sock.recvmsg(messages.LARGEST_REQUEST)  # without room for descriptors: we take none
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet:
            self.close(sock)
            return
        if flags & socket.MSG_TRUNC:
            self._refuse_and_close(connection, "tiles-protocol", f"a request is at most {messages.LARGEST_REQUEST} bytes")
            return
        connection.heard = self.used = time.monotonic()
        try:
            request = messages.decode(packet)
        except msgspec.DecodeError as e:
            self._refuse_and_close(connection, "tiles-protocol", f"not a request: {printable(str(e), 200)}")
            return
        try:
            self.handle(connection, request)
        except TileworkError as e:
            self.refuse(connection, e)
