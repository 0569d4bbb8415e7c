"""A web server for this machine only: answers GET, bounds its threads, ends slow requests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ADDRESS = "127.0.0.1"  # never another: the pages are for this machine, or for a tunnel of ssh
THREADS = 32  # requests that are answered at a time; others get 503
READ_SECONDS = 10.0  # the longest that a request may take to arrive, and its answer to be read
RELOAD_SECONDS = 5
TEXT = "text/plain; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Reply:
    """What the server sends."""

    status: HTTPStatus
    body: str
    kind: str = "text/html; charset=utf-8"
    reload: bool = False  # ask the browser to load it again in a few seconds


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD from this machine; refuses every other method and host."""

    server_version, sys_version = "steepen", ""
    timeout = READ_SECONDS  # of each read, and of the whole answer

    def __init__(
        self, reply: Callable[[str], Reply], arrived: Callable[[Any], None], *arguments: Any
    ) -> None:
        self.reply, self.arrived = reply, arrived
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send a page."""
        self.arrived(self.request)
        # A page elsewhere may point its own host name at this address (DNS rebinding).
        host = (self.headers.get("Host") or "").rpartition(":")[0] or (self.headers.get("Host") or "")
        if host not in (ADDRESS, "localhost"):
            reply = Reply(HTTPStatus.FORBIDDEN, "Open this as http://localhost.", TEXT)
        else:
            try:
                reply = self.reply(self.path)
            except Exception as error:  # the server goes on
                text = f"This page could not be made: {type(error).__name__}: {error}"
                reply = Reply(HTTPStatus.INTERNAL_SERVER_ERROR, text, TEXT, reload=True)
        body = reply.body.encode("utf-8", "replace")  # half a surrogate pair in a name
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header(
            "Content-Security-Policy", "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
        )
        if reply.reload:
            self.send_header("Refresh", str(RELOAD_SECONDS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing for each request."""


class LocalServer(ThreadingHTTPServer):
    """Serves what a function replies to the path of a request; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 4 * THREADS

    def __init__(self, reply: Callable[[str], Reply], port: int) -> None:
        self._free = threading.BoundedSemaphore(THREADS)
        self._arriving: dict[socket.socket, float] = {}  # requests that are being read, and since when
        super().__init__((ADDRESS, port), partial(Handler, reply, self.arrived))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or at once that there are too many."""
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.send(_BUSY, socket.MSG_DONTWAIT)
            self.shutdown_request(request)
            return
        self._arriving[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            self.arrived(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.arrived(request)
            self._free.release()

    def arrived(self, request: Any) -> None:
        """Note that a request has been read whole, or has ended."""
        self._arriving.pop(request, None)

    def service_actions(self) -> None:
        """End requests that arrive too slowly, however steadily: called twice a second."""
        limit = time.monotonic() - READ_SECONDS
        for request in [request for request, begun in list(self._arriving.items()) if begun < limit]:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client has gone, or was too slow."""
