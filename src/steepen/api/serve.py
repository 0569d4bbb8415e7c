"""A local, read-only web page of studies, which reloads while they run."""

from __future__ import annotations

import html
import json
import threading
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from steepen.api.live import LiveStudy, done_fraction, progress_sentence
from steepen.api.studies import Study
from steepen.errors import SteepenError, UsageError
from steepen.report.load_studies import load_study
from steepen.report.page import render_page
from steepen.studies.driver.journal import (
    find_preparing,
    find_study_folder,
    list_preparing,
    read_journals,
)

ADDRESS = "127.0.0.1"  # never another: the page is for this machine, or for a tunnel of ssh
PORT = 8642
RELOAD_SECONDS = 5
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
class Reply:
    """What the server sends."""

    status: HTTPStatus
    body: str
    kind: str = "text/html; charset=utf-8"
    reload: bool = False  # ask the browser to load it again in a few seconds


@dataclass
class StudyPages:
    """The pages of the studies in a directory, by address. Reads files; never takes a path from a request."""

    studies: Path = Path("studies")
    runs: Path | None = None
    only: str | None = None  # the name of the one study to show
    live: LiveStudy = field(default_factory=LiveStudy)
    lock: threading.Lock = field(default_factory=threading.Lock)

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
        elif not self.studies.is_dir():
            raise UsageError(
                f"there is no directory {self.studies}; name the directory of your studies with --studies."
            )

    def known(self) -> dict[str, Study]:
        """The studies by name; a request is looked up here and nowhere else."""
        journals, _ = read_journals(self.studies)
        found = {journal.folder.name: Study(journal, self.runs) for journal in journals}
        return {name: study for name, study in found.items() if self.only in (None, name)}

    def reply(self, path: str) -> Reply:
        """The page of an address: /, /NAME, /NAME/report or /NAME/status.json."""
        known = self.known()
        words = [unquote(word) for word in urlsplit(path).path.split("/") if word]
        if not words:
            words = [self.only] if self.only is not None else []
        if not words:
            return self._list(known)
        study = known.get(words[0])
        preparing = self._preparing() if study is None and len(words) == 1 else []
        if study is None and len(words) == 1 and words[0] in (*preparing, self.only):
            text = PREPARING if words[0] in preparing else "It has no runs yet."
            body = f"<h1>{html.escape(words[0])}</h1><p>{text}</p>"
            return Reply(HTTPStatus.OK, _plain_page(words[0], body), reload=True)
        if study is None or len(words) > 2:
            return Reply(HTTPStatus.NOT_FOUND, "There is no such page.", "text/plain; charset=utf-8")
        try:
            with self.lock:  # one page at a time: fits and figures share the processor with the runs
                return self._page(study, words[1] if len(words) == 2 else "")
        except SteepenError as error:
            return Reply(HTTPStatus.CONFLICT, str(error), "text/plain; charset=utf-8")

    def _page(self, study: Study, what: str) -> Reply:
        if what == "status.json":
            text = json.dumps(study.status().to_dict(), ensure_ascii=False)
            return Reply(HTTPStatus.OK, text, "application/json")
        finished = study.journal.entry.answer is not None and study.journal.live_status == "finished"
        if what == "report" or (what == "" and finished):
            return Reply(HTTPStatus.OK, render_page([load_study(str(study.folder), self.studies, self.runs)]))
        if what:
            return Reply(HTTPStatus.NOT_FOUND, "There is no such page.", "text/plain; charset=utf-8")
        return Reply(HTTPStatus.OK, render_page([self.live.load(study)]), reload=not finished)

    def _list(self, known: dict[str, Study]) -> Reply:
        rows: list[str] = []
        for name, study in known.items():
            status = study.status()
            link = f'<a href="/{quote(name, safe="")}">{html.escape(name)}</a>'
            rows.append(
                f"<li>{link}: {html.escape(status.state)}<br>"
                f'<progress max="1" value="{done_fraction(status):.4f}"></progress><br>'
                f"<small>{html.escape(progress_sentence(status))}</small></li>"
            )
        for name in self._preparing():
            link = f'<a href="/{quote(name, safe="")}">{html.escape(name)}</a>'
            rows.append(f"<li>{link}: preparing<br><small>{PREPARING}</small></li>")
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


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD from this machine; refuses every other method and host."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "steepen", ""

    def __init__(self, pages: StudyPages, *arguments: Any) -> None:
        self.pages = pages
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send a page."""
        # A page elsewhere may point its own host name at this address (DNS rebinding).
        host = (self.headers.get("Host") or "").rpartition(":")[0] or (self.headers.get("Host") or "")
        if host not in (ADDRESS, "localhost"):
            reply = Reply(HTTPStatus.FORBIDDEN, "Open this as http://localhost.", "text/plain; charset=utf-8")
        else:
            try:
                reply = self.pages.reply(self.path)
            except Exception as error:  # the server goes on
                text = f"This page could not be made: {type(error).__name__}: {error}"
                reply = Reply(
                    HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain; charset=utf-8", reload=True
                )
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


def make_server(pages: StudyPages, port: int = PORT) -> ThreadingHTTPServer:
    """A server bound to this machine only; port 0 takes a free one."""
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(Handler, pages))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used ({error.strerror}); choose another with --port."
        ) from error
    server.daemon_threads = True
    return server
