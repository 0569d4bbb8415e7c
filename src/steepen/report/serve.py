"""A local, read-only web page of studies, which reloads while they run.

Its server is for this machine only: it answers GET, bounds its threads and ends slow requests.
"""

from __future__ import annotations

import contextlib
import html
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from steepen.errors import SteepenError, UsageError
from steepen.report.live import LiveStudy, progress_sentence
from steepen.report.load_studies import load_study
from steepen.report.page import render_page
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import (
    Journal,
    find_preparing,
    find_study_folder,
    list_preparing,
    read_journals,
)
from steepen.studies.driver.study_status import done_fraction, study_status
from steepen.utils.files import ReadOnce, file_version

ADDRESS = "127.0.0.1"  # never another: the pages are for this machine, or for a tunnel of ssh
THREADS = 32  # requests that are answered at a time; others get 503
READ_SECONDS = 10.0  # the longest that a request may take to arrive, and its answer to be read
RELOAD_SECONDS = 5
TEXT = "text/plain; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
}  # fmt: skip
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
        headers = {"Content-Type": reply.kind, "Content-Length": str(len(body)), **HEADERS}
        for name, value in (headers | ({"Refresh": str(RELOAD_SECONDS)} if reply.reload else {})).items():
            self.send_header(name, value)
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


PORT = 8642
PAUSE = 4  # times as long as a page took to make, it is not made again for new steps of its runs
MAX_SECONDS = 60.0  # for which a page is kept at most
MAX_PAGES = 16  # kept in memory
PREPARING = "Its data is being prepared; no runs requested yet."
STYLE = """
body{font:1rem/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem;line-height:1.25}ul{list-style:none;padding:0}a{color:#0b57a4;font-weight:600}
li{margin:.8rem 0;padding:.8rem 1rem;border:1px solid #dfe3e8;border-radius:6px;background:#f5f6f8}
progress{width:100%;accent-color:#0b57a4}small{color:#59616b}
@media(prefers-color-scheme:dark){body{background:#16181d;color:#e8eaed}a{color:#8ab8f0}small{color:#a4acb6}
li{background:#1e2329;border-color:#333a42}progress{accent-color:#8ab8f0}}
"""


@dataclass(frozen=True)
class _Made:
    """A page, when it was made and how long that took, and what it was made of."""

    reply: Reply
    results: Any  # of files that hold results: the page is made again once they differ
    progress: Any  # of files that change all the time while a study runs: not more often than `PAUSE` allows
    at: float
    seconds: float


@dataclass
class StudyPages:
    """The pages of the studies in a directory, by address. Reads files; never takes a path from a request."""

    studies: Path = Path("studies")
    runs: Path | None = None
    only: str | None = None  # the name of the one study to show
    live: LiveStudy = field(default_factory=LiveStudy)
    lock: threading.Lock = field(default_factory=threading.Lock)
    journals: ReadOnce[Journal] = field(
        default_factory=lambda: ReadOnce(lambda file: Journal.read(file.parent))
    )
    made: dict[str, _Made] = field(default_factory=dict[str, _Made])

    def __post_init__(self) -> None:
        if self.only is not None:
            try:
                folder = find_study_folder(self.only, self.studies)
            except UsageError:
                name = find_preparing(self.only, self.studies)
                if name is None:
                    raise
                folder = self.studies / name
            self.studies, self.only = folder.parent, folder.name

    def known(self) -> tuple[dict[str, Journal], dict[str, str]]:
        """The studies by name, and the reasons for those that cannot be read.

        A request is looked up here and nowhere else.
        """
        journals, unreadable = read_journals(self.studies, self.journals)
        found = {journal.folder.name: journal for journal in journals}
        return (
            {name: study for name, study in found.items() if self.only in (None, name)},
            {name: why for name, why in unreadable.items() if self.only in (None, name)},
        )

    def reply(self, path: str) -> Reply:
        """The page of an address: /, /NAME, /NAME/report or /NAME/status.json."""
        known, unreadable = self.known()
        words = [unquote(word) for word in urlsplit(path).path.split("/") if word]
        words = words or ([] if self.only is None else [self.only])
        if not words:
            return self._cached("", (*known, *unreadable), object(), lambda: self._list(known, unreadable))
        name, *rest = words
        study = known.get(name)
        if name in unreadable and len(rest) <= 1:
            return Reply(HTTPStatus.CONFLICT, unreadable[name], TEXT, reload=True)
        if study is not None and rest in ([], ["report"], ["status.json"]):
            try:
                return self._study(study, "".join(rest))
            except SteepenError as error:
                return Reply(HTTPStatus.CONFLICT, str(error), TEXT)
        preparing = study is None and name in self._preparing()
        if study is None and not rest and (preparing or name == self.only):
            text = PREPARING if preparing else "It has no runs yet."
            body = f"<h1>{html.escape(name)}</h1><p>{text}</p>"
            return Reply(HTTPStatus.OK, _plain_page(name, body), reload=True)
        return Reply(HTTPStatus.NOT_FOUND, "There is no such page.", TEXT)

    def _cached(self, name: str, results: Any, progress: Any, make: Callable[[], Reply]) -> Reply:
        """The page of that name as it was made before, if what it shows has not changed since."""
        with self.lock:  # one page at a time: fits and figures share the processor with the runs
            now, old = time.monotonic(), self.made.pop(name, None)
            if (
                old is None
                or old.results != results
                or (old.progress != progress and now - old.at > PAUSE * old.seconds)
                or now - old.at > MAX_SECONDS
            ):
                reply = make()
                old = _Made(reply, results, progress, now, time.monotonic() - now)
            self.made[name] = old  # the last of the dictionary: used last
            while len(self.made) > MAX_PAGES:
                del self.made[next(iter(self.made))]
            return old.reply

    def _study(self, study: Journal, what: str) -> Reply:
        runs = study.runs_directory(self.runs)
        asked = [RunDirectory(runs / one.run) for one in study.entry.runs]
        results = [(file_version(run.record_file), file_version(run.failure_file)) for run in asked]
        progress = [(file_version(run.metrics_file), file_version(run.samples_file)) for run in asked]
        made_of = (file_version(study.file), study.live_status, results)
        name = f"{study.folder.name}/{what}"
        return self._cached(name, made_of, progress, lambda: self._page(study, what))

    def _page(self, study: Journal, what: str) -> Reply:
        if what == "status.json":
            text = json.dumps(study_status(study, self.runs).to_dict(), ensure_ascii=False)
            return Reply(HTTPStatus.OK, text, "application/json")
        finished = study.entry.answer is not None and study.live_status == "finished"
        if what == "report" or finished:
            return Reply(HTTPStatus.OK, render_page([load_study(str(study.folder), self.studies, self.runs)]))
        now = self.live.load(study, study_status(study, self.runs))
        return Reply(HTTPStatus.OK, render_page([now]), reload=True)

    def _list(self, known: dict[str, Journal], unreadable: dict[str, str]) -> Reply:
        rows: list[str] = []
        for name, study in known.items():
            status = study_status(study, self.runs)
            link = f'<a href="/{quote(name, safe="")}">{html.escape(name)}</a>'
            rows.append(
                f"<li>{link}: {html.escape(status.state)}<br>"
                f'<progress max="1" value="{done_fraction(status):.4f}"></progress><br>'
                f"<small>{html.escape(progress_sentence(status))}</small></li>"
            )
        for name in self._preparing():
            link = f'<a href="/{quote(name, safe="")}">{html.escape(name)}</a>'
            rows.append(f"<li>{link}: preparing<br><small>{PREPARING}</small></li>")
        for name, why in unreadable.items():
            rows.append(f"<li>{html.escape(name)}: unreadable<br><small>{html.escape(why)}</small></li>")
        body = f"<ul>{''.join(rows)}</ul>" if rows else "<p>There is no study here yet.</p>"
        return Reply(HTTPStatus.OK, _plain_page("Studies", f"<h1>Studies</h1>{body}"), reload=True)

    def _preparing(self) -> list[str]:
        return [name for name in list_preparing(self.studies) if self.only in (None, name)]


def _plain_page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )


def make_server(pages: StudyPages, port: int = PORT) -> LocalServer:
    """A server bound to this machine only; port 0 takes a free one."""
    try:
        return LocalServer(pages.reply, port)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used ({error.strerror}); choose another with `port`."
        ) from error
