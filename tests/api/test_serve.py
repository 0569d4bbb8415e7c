"""`steepen serve`: a read-only page of a study while it runs, on this machine only."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steepen
from steepen.data import Dataset
from steepen.report import serve
from steepen.report.live import CURVE_POINTS, thin_curve
from steepen.report.serve import ADDRESS, Handler, StudyPages, make_server
from steepen.requests.app import main
from steepen.studies.driver.journal import Journal
from steepen.utils.files import file_lock
from steepen.utils.json_io import with_checksum, write_json

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NAME = "ladder-tiny-vanilla-operator-1"


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a ladder of six rungs, filled by the first test."""
    return tmp_path_factory.mktemp("answered") / "ladder"


@pytest.fixture
def half_done(launcher: type, tiny_data: Dataset, tmp_path: Path, answered: Path) -> Iterator[Path]:
    """A running study of six rungs: the highest of each arm has not finished, and one is under way."""
    if not answered.exists():
        steepen.ladder(
            ["vanilla", "operator-1"], rungs=[2, 3, 4, 5, 6, 7], data=tiny_data.directory, epochs=10_000,
            launcher=launcher, device="cpu",
        )  # fmt: skip
        shutil.copytree(tmp_path, answered)
    shutil.copytree(answered, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "studies" / NAME / "study.json"
    journal = {**json.loads(file.read_text()), "runs_directory": str(tmp_path / "runs")}
    write_json(file, with_checksum({name: value for name, value in journal.items() if name != "checksum"}))
    study: Any = steepen.open_study(NAME)
    shutil.copy(study.journal.file, tmp_path / "finished.json")
    Journal.read(study.folder)._write(status="running", answer=None)
    for run in study.runs.filter("depth == 7"):
        (run.path / "record.json").rename(run.path / "later.json")
        if run["arm"] == "vanilla":
            lines = [{"step": i + 1, "tokens": (i + 1) * 256, "loss": 5.0 - i / 1000} for i in range(1000)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (run.path / "metrics.jsonl").write_text(text)
    with file_lock(study.folder / "lock", shared=True, wait=False):
        yield study.folder


def finish(folder: Path) -> None:
    """What the study's process does at its end."""
    for record in folder.parent.parent.glob("runs/*/later.json"):
        record.rename(record.parent / "record.json")
    shutil.copy(folder.parent.parent / "finished.json", folder / "study.json")


def test_a_running_study_shows_progress_curves_and_the_verdict_so_far(half_done: Path) -> None:
    pages = StudyPages(half_done.parent)
    listed = pages.reply("/")
    assert NAME in listed.body and "running" in listed.body and listed.reload
    page = pages.reply(f"/{NAME}")
    assert page.reload and page.status == 200
    assert "Verdict so far, from 10 of 12 runs" in page.body and "10 finished" in page.body
    assert "Training loss" in page.body and "Loss against compute" in page.body
    assert '<article class="verdict' in page.body
    options = json.loads((half_done / "study.json").read_text())["options"]
    assert options["recipes"] == [] and len(options["data"]) == 64  # neither empty nor whole on the page
    assert "option recipes" not in page.body and "option epochs" in page.body
    assert f"<dt>option data</dt><dd>{options['data'][:12]}…</dd>" in page.body
    status = json.loads(pages.reply(f"/{NAME}/status.json").body)
    assert status["state"] == "running" and status["counts"]["finished"] == 10
    assert pages.reply(f"/{NAME}/report").status == 409  # no answer yet
    finish(half_done)
    done = pages.reply(f"/{NAME}")
    assert not done.reload and "Verdict so far" not in done.body
    assert done.body == pages.reply(f"/{NAME}/report").body


def test_the_verdict_is_fitted_again_only_when_a_run_has_finished(
    half_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steepen.report import live

    calls: list[int] = []
    analyse = live.analyse
    monkeypatch.setattr(live, "analyse", lambda *a: calls.append(1) or analyse(*a))
    pages = StudyPages(half_done.parent, only="ladder")
    assert pages.reply("/").body == pages.reply("/").body and len(calls) == 1
    record = next(half_done.parent.parent.glob("runs/*/later.json"))
    record.rename(record.parent / "record.json")
    assert "from 11 of 12 runs" in pages.reply("/").body and len(calls) == 2


def test_too_few_rungs_give_no_verdict_and_say_what_is_missing(half_done: Path) -> None:
    for run in steepen.open_runs("runs").filter("depth > 4 and status == 'finished'"):
        (run.path / "record.json").rename(run.path / "later.json")
    page = StudyPages(half_done.parent).reply(f"/{NAME}").body
    assert "No verdict yet: it needs 4 finished rungs of" in page and '<article class="verdict' not in page


@pytest.fixture
def server(half_done: Path) -> Iterator[Any]:
    found = make_server(StudyPages(half_done.parent), 0)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()


def ask(server: Any, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    """Status and body of a raw request: the path is sent as it is."""
    with socket.create_connection((ADDRESS, server.server_port), timeout=20) as connection:
        name = host or f"localhost:{server.server_port}"
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
        reply = http.client.HTTPResponse(connection, method=method)
        reply.begin()
        return reply.status, reply.read()


def test_no_path_leaves_the_pages(server: Any) -> None:
    for path in (
        *(
            "/..",
            "/../../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2fetc%2fpasswd",
            "//etc/passwd",
        ),
        *(f"/{NAME}/../../runs", f"/{NAME}/study.json", f"/{NAME}/report/x", "/study.json", "/%00", "/."),
        *("/..\\..\\etc\\passwd", f"/studies/{NAME}", "/%ff%fe"),
    ):
        assert ask(server, path) == (404, b"There is no such page."), path


def test_other_hosts_and_methods_are_refused_and_the_address_is_local(server: Any) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/")[0] == 200 and ask(server, "/", "HEAD") == (200, b"")
    assert ask(server, "/", host="evil.example:80")[0] == 403
    assert ask(server, "/", host="evil.example")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0] == 501


def open_connection(server: Any, sent: bytes = b"") -> socket.socket:
    found = socket.create_connection((ADDRESS, server.server_port), timeout=20)
    found.sendall(sent)
    return found


def test_half_open_requests_end_and_threads_are_bounded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 4.0)
    before, threads, idle = threading.active_count(), [0], list[socket.socket]()
    try:
        for _ in range(100):
            idle.append(open_connection(server, b"GET / HTTP/1.1\r\nHost: loc"))
            threads.append(threading.active_count() - before)
        refused = 0
        for connection in idle:  # all end, without sending more
            try:
                refused += b" 503 " in connection.recv(100)
            except ConnectionResetError:
                refused += 1
        assert max(threads) <= serve.THREADS + 1 and refused >= 100 - serve.THREADS - 1
        assert ask(server, "/")[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_request_that_arrives_a_byte_at_a_time_ends_too(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "READ_SECONDS", 1.0)
    begun = time.monotonic()
    with open_connection(server) as connection, pytest.raises(OSError, match=r"reset|pipe"):
        while time.monotonic() - begun < 30:
            connection.sendall(b"G")
            time.sleep(0.1)


def test_a_page_is_made_again_only_when_what_it_shows_has_changed(
    half_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = StudyPages._page

    def page(self: StudyPages, study: Any, what: str) -> Any:
        made.append(what)
        return real(self, study, what)

    monkeypatch.setattr(StudyPages, "_page", page)
    pages = StudyPages(half_done.parent)
    for what in ("", "/status.json"):
        bodies = {pages.reply(f"/{NAME}{what}").body for _ in range(5)}
        assert len(bodies) == 1
    assert made == ["", "status.json"]
    # New steps are shown, but a page that took long to make is not made for each of them.
    metrics = next(half_done.parent.parent.glob("runs/*/metrics.jsonl"))
    for again, pause in ((2, 1e9), (3, 0.0)):
        monkeypatch.setattr("steepen.report.serve.PAUSE", pause)
        with metrics.open("a") as file:
            file.write('{"step": 1001, "tokens": 256256, "loss": 3.0}\n')
        pages.reply(f"/{NAME}")
        assert len(made) == again
    finish(half_done)
    for _ in range(5):
        assert not pages.reply(f"/{NAME}").reload
    assert len(made) == 4
    monkeypatch.setattr("steepen.report.serve.MAX_PAGES", 1)
    pages.reply(f"/{NAME}/report")
    assert list(pages.made) == [f"{NAME}/report"]


def test_a_damaged_journal_is_shown_with_the_reason(half_done: Path) -> None:
    pages = StudyPages(half_done.parent)
    assert pages.reply(f"/{NAME}").status == 200
    (half_done / "study.json").write_text("{")
    for path in (f"/{NAME}", f"/{NAME}/status.json"):
        reply = pages.reply(path)
        assert reply.status == 409 and "study.json can't be read" in reply.body
    listed = pages.reply("/").body
    assert "unreadable" in listed and "study.json can&#x27;t be read" in listed
    assert StudyPages(half_done.parent, only=NAME).reply("/").status == 409


def test_a_browser_shows_the_page_and_loads_it_again(server: Any, half_done: Path, tmp_path: Path) -> None:
    browser = os.environ.get("STEEPEN_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)}, or set STEEPEN_BROWSER")
    asked: list[str] = []
    answer = Handler.do_GET

    def count(self: Handler) -> None:
        asked.append(self.path)
        if len(asked) == 2:  # the study ends while the page is open
            finish(half_done)
        answer(self)

    Handler.do_GET = count  # type: ignore[method-assign]
    try:
        done = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom",
                "--virtual-time-budget=12000", f"http://localhost:{server.server_port}/{NAME}",
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    finally:
        Handler.do_GET = answer  # type: ignore[method-assign]
    assert asked.count(f"/{NAME}") == 2  # once more after five seconds; the finished page stays
    assert "Verdicts against vanilla" in done.stdout and "Verdict so far" not in done.stdout
    assert "CONSOLE" not in done.stderr


def test_wrong_studies_and_ports_are_refused(
    half_done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "nothing"]) == 2 and "there is no study 'nothing'" in capsys.readouterr().err
    assert main(["serve", "--studies", "absent"]) == 2 and "--studies" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capsys.readouterr().err


def test_a_curve_is_thinned_to_means() -> None:
    logged = [(step * 100.0, 7.0) for step in range(1, 5001)]
    tokens, losses = thin_curve([*logged, (500_000.0, math.nan)], CURVE_POINTS)
    assert len(tokens) <= CURVE_POINTS and tokens[0] == 100 and tokens[-1] == 500_000
    assert set(losses) == {7.0} and list(tokens) == sorted(tokens)
    assert thin_curve([], CURVE_POINTS) == ((), ())
