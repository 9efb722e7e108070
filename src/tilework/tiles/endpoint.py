"""The daemon over HTTP, only where an administrator asks for it: read-only, with a token. It asks as any client does."""

from __future__ import annotations

import hmac
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from ..errors import UserError
from . import client, messages


def listen(address: str, token_file: str | None) -> ThreadingHTTPServer:
    """GET /metrics and GET /tiles, for who sends `Authorization: Bearer TOKEN`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UserError("tiles-listen", f"{address!r} is no address", expected="HOST:PORT, such as 127.0.0.1:9464")
    if token_file is None:
        raise UserError("tiles-listen", "a network listener needs a token", fix="--token-file FILE, readable by the daemon alone")
    try:
        token = Path(token_file).read_text().strip()
    except OSError as e:
        raise UserError("tiles-listen", f"{token_file}: the token cannot be read", found=str(e)) from e
    if len(token) < 16:
        raise UserError(
            "tiles-listen", f"{token_file}: the token is too short", found=f"{len(token)} characters", expected="16 or more"
        )
    try:
        server = _Server((host, int(port)), type("Handler", (_Handler,), {"token": token}))
    except OSError as e:
        raise UserError("tiles-listen", f"{address}: cannot listen there", found=str(e)) from e
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    """At most a few requests at a time; broken clients are nobody's business."""

    _room = threading.BoundedSemaphore(16)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._room:
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    token = ""
    timeout = 5  # seconds, for slow clients

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            self._answer(401, b"a token is needed\n", "text/plain")
        elif self.path == "/metrics":
            self._answer(200, self._ask(messages.Metrics())["text"].encode(), "text/plain; version=0.0.4")
        elif self.path == "/tiles":
            seen = self._ask(messages.View())
            for lease in seen["leases"]:
                lease.pop("stack", None)  # for its owner alone
            self._answer(200, msgspec.json.encode(seen), "application/json")
        else:
            self._answer(404, b"/metrics or /tiles\n", "text/plain")

    def _ask(self, request: messages.Request) -> dict[str, Any]:
        with client.talking(start=False) as ask:
            return ask(request)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not to stderr."""
