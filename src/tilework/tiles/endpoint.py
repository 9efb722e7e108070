"""The daemon over HTTP, only where an administrator asks for it: read-only, with a token. It asks as any client does."""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from ..errors import TileworkError, UserError
from . import client, messages

ROOM = 16  # requests at a time
ASKING_SECONDS = 5.0  # for a whole request, however it is dripped


def listen(address: str, token_file: str | None) -> ThreadingHTTPServer:
    """GET /metrics and GET /tiles, for who sends `Authorization: Bearer TOKEN`."""
    host, port, token = check_listener(address, token_file)
    try:
        server = _Server(host, port, type("Handler", (_Handler,), {"token": token}))
    except (OSError, UnicodeError) as e:  # UnicodeError: a name that no host can have
        raise UserError("tiles-listen", f"{address}: cannot listen there", found=str(e)) from e
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def check_listener(address: str | None, token_file: str | None) -> tuple[str, int, str]:
    """(host, port, token). UserError where they will not do."""
    found = re.fullmatch(r"(?:\[([^\]\s]*:[^\]\s]*)\]|([^:\[\]\s]+)):([0-9]{1,5})", address or "")
    if not found or int(found[3]) > 65535:
        raise UserError("tiles-listen", f"{address!r} is no address", expected="HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    if token_file is None:
        raise UserError("tiles-listen", "a network listener needs a token", fix="--token-file FILE, readable by the daemon alone")
    return found[1] or found[2], int(found[3]), _token(token_file)


def _token(path: str) -> str:
    try:
        token = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as e:  # ValueError: not UTF-8
        raise UserError("tiles-listen", f"{path}: the token cannot be read", found=str(e), expected="one line of text") from e
    if len(token) < 16:
        raise UserError("tiles-listen", f"{path}: the token is too short", found=f"{len(token)} characters",
                        expected="16 or more")  # fmt: skip
    if token.split() != [token]:  # no client could send it
        raise UserError("tiles-listen", f"{path}: the token has spaces or several lines", expected="one word")
    return token


class _Server(ThreadingHTTPServer):
    """A few requests at a time, and a thread only for those. Broken clients are nobody's business."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(ROOM)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # who has not shown the token yet -> until when; the oldest first
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._cut(time.monotonic() + ASKING_SECONDS, 1)  # the oldest stranger gives way: who has the token shows it at once
            if not self._room.acquire(timeout=0.1):
                self.shutdown_request(request)
                return
        with self._lock:
            self._strangers[request] = time.monotonic() + ASKING_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        self.known(request)  # before it is closed: its number may be another file's afterwards
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second and after every request."""
        self._cut(time.monotonic(), ROOM)

    def known(self, request: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(request, None)

    def _cut(self, until: float, most: int) -> None:
        """Ends the oldest strangers whose time is over by then; their threads see the end of the connection."""
        with self._lock:
            for request in [r for r, end in self._strangers.items() if end <= until][:most]:
                del self._strangers[request]
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    token = ""
    timeout = 5  # seconds, for one that does not read its answer

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {self.token}".encode()):
            self._answer(401, b"a token is needed\n", "text/plain")
            return
        assert isinstance(self.server, _Server)
        self.server.known(self.connection)
        try:
            status, body, kind = self._found()
        except (TileworkError, OSError, msgspec.DecodeError) as e:  # the daemon is stopped, or on its way up
            status, body, kind = 503, f"{e.summary if isinstance(e, TileworkError) else e}\n".encode(), "text/plain"
        self._answer(status, body, kind)

    def _found(self) -> tuple[int, bytes, str]:
        if self.path == "/metrics":
            with client.talking(start=False) as ask:
                return 200, ask(messages.Metrics())["text"].encode(), "text/plain; version=0.0.4"
        if self.path == "/tiles":
            seen = client.view(start=False)
            for session in (*seen.leases, *seen.shared):
                session.stack = ""  # for its owner alone
            return 200, msgspec.json.encode(seen), "application/json"
        return 404, b"/metrics or /tiles\n", "text/plain"

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not to stderr."""
