"""A small local server with the API of the Hugging Face Hub, which serves a folder laid out like it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit


class HubServer(ThreadingHTTPServer):
    """The responses of the Hub that a download needs: revision, tree, file. Use it in a `with` block."""

    def __init__(self, root: Path, repository: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root, self.repository = root, repository
        self.commits = {"main": "a" * 40}  # of the branches, tags and commits that exist
        self.fetched: list[str] = []
        self.authorizations: set[str] = set()  # tokens that requests carried
        self.failures = 0  # how many requests to answer with an error first
        self.break_after: int | None = None  # file downloads to serve before the hub goes away

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.authorizations.add(self.headers.get("authorization", "").removeprefix("Bearer "))
        if hub.failures:
            hub.failures -= 1
            return self.send_error(503)
        repository, api = hub.root / hub.repository, f"/api/datasets/{hub.repository}"
        if listing := re.fullmatch(rf"{api}/tree/([0-9a-f]{{40}})(?:/(.+))?", path):
            every = (repository / (listing[2] or "")).rglob("*")
            found = sorted((file for file in every if file.is_file()), reverse=True)
            listed = [
                {
                    "type": "file",
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                    "size": file.stat().st_size,
                    "path": file.relative_to(repository).as_posix(),
                }
                for file in found
            ]
            return self.reply(json.dumps(listed).encode(), body, listing[1])
        if info := re.fullmatch(rf"{api}(?:/revision/(.+))?", path):
            commit = hub.commits.get(info[1] or "main")
            if commit is None:
                return self.send_error(404)
            return self.reply(json.dumps({"id": hub.repository, "sha": commit}).encode(), body, commit)
        if info := re.fullmatch(rf"/api/models/{hub.repository}(?:/revision/(.+))?", path):
            commit = hub.commits.get(info[1] or "main")
            if commit is None:
                return self.send_error(404)
            files = [{"rfilename": file.name} for file in repository.iterdir()]
            answer = {"id": hub.repository, "sha": commit, "siblings": files}
            return self.reply(json.dumps(answer).encode(), body, commit)
        if file := re.fullmatch(rf"/{hub.repository}/resolve/([0-9a-f]{{40}})/(.+)", path):  # of a model
            return self.reply((repository / file[2]).read_bytes(), body, file[1])
        if file := re.fullmatch(rf"/datasets/{hub.repository}/resolve/([0-9a-f]{{40}})/(.+)", path):
            if hub.break_after is not None and len(hub.fetched) >= hub.break_after:
                return self.send_error(403)  # on a 5xx the library itself waits for half a minute
            if body:
                hub.fetched.append(file[2])
            return self.reply((repository / file[2]).read_bytes(), body, file[1])
        return self.send_error(404)

    def reply(self, content: bytes, body: bool, commit: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)
