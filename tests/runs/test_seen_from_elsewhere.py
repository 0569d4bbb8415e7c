"""Runs and studies as someone sees them who may only read: running is running, and "unknown" where it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from run_fixtures import make_spec
from steepen.report.serve import StudyPages
from steepen.requests.app import main
from steepen.runs import disk
from steepen.runs.disk import removable_checkpoints, removable_run
from steepen.runs.store import RunDirectory, RunStore
from steepen.studies.driver.journal import Journal
from steepen.utils.files import file_lock
from steepen.utils.json_io import write_json


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """A run that has begun, and a study that has requested it."""
    monkeypatch.chdir(tmp_path)
    store, spec = RunStore(tmp_path / "runs"), make_spec(1)
    run = store.run(spec)
    write_json(run.spec_file, spec.to_dict())
    (run.checkpoints / "00000004").mkdir(parents=True)
    run.metrics_file.write_text('{"step": 4, "loss": 3.0}\n')
    journal = Journal.open(tmp_path / "studies", "s", {}, store.root)
    with journal.driving():
        journal.add_batch([spec])
    journal._write(status="running")
    return store


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process may only read."""
    original = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)


@pytest.fixture
def held(store: RunStore) -> Any:
    with store.runs()[0].lock(), file_lock(Path("studies/s/lock"), shared=True):
        yield


def seen(capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """Status of the run and state of the study in --json, and what the page of the study says."""
    assert main(["runs", "--runs", "runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert main(["status", "s", "--json"]) == 0
    study = json.loads(capsys.readouterr().out)
    assert study["counts"][row["status"]] == 1
    page = StudyPages().reply("/s").body
    return row["status"], study["state"], page


def test_running_is_running_to_a_reader(held: None, reader: None, capsys: pytest.CaptureFixture[str]) -> None:
    run, study, page = seen(capsys)
    assert (run, study) == ("running", "running")
    assert "killed" not in page and "interrupted" not in page


def test_interrupted_is_interrupted_to_a_reader(
    store: RunStore, reader: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, study, _ = seen(capsys)
    assert (run, study) == ("interrupted", "killed")


def test_unknown_is_said(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lock in (store.runs()[0].lock_file, Path("studies/s/lock")):
        lock.write_text("process 7 on another-machine")
    monkeypatch.setattr("steepen.utils.files._shows_locks_of_others", lambda *_: False)
    run, study, page = seen(capsys)
    assert (run, study) == ("unknown", "unknown") and "unknown" in page
    for words in (["runs"], ["status", "s"]):
        assert main(words) == 0
        assert "cannot tell from here whether a process is at it" in " ".join(capsys.readouterr().out.split())
    assert main(["runs", "--status", "unknown", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1
    assert removable_run(store.runs()[0]) is None and removable_checkpoints(store.runs()[0]) is None
    assert main(["report", "s"]) == 1
    assert "it may be running" in capsys.readouterr().err
    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    assert seen(capsys)[:2] == ("interrupted", "killed")


def test_whole_run_is_removed_under_its_lock(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = store.runs()
    removal = removable_run(run)
    assert removal is not None
    original, seen_paths = shutil.rmtree, list[Path]()

    def remove(path: Path, **options: Any) -> None:
        seen_paths.append(path)
        assert RunDirectory(path).busy() is True  # the lock has moved with the directory
        assert not run.path.exists()
        with RunDirectory(run.path).lock():  # another process begins the run again meanwhile
            write_json(run.spec_file, {"new": True})
            original(path, **options)

    monkeypatch.setattr(disk.shutil, "rmtree", remove)
    removal.apply()
    assert len(seen_paths) == 1 and not seen_paths[0].exists()
    assert run.spec_file.exists() and not run.metrics_file.exists()


def test_run_that_is_trained_is_not_removed(store: RunStore) -> None:
    (run,) = store.runs()
    removal = removable_run(run)
    assert removal is not None
    with run.lock():
        assert not removal.apply()
    assert run.metrics_file.exists()


def test_run_that_was_trained_since_is_not_removed(store: RunStore) -> None:
    (run,) = store.runs()
    removal = removable_run(run)
    assert removal is not None
    write_json(run.record_file, {"finished": "meanwhile"})
    assert not removal.apply() and run.record_file.exists()
    removal = removable_run(run)
    assert removal is not None and removal.apply() and not run.path.exists()


def test_leftover_of_a_killed_removal_is_removed_by_the_next(store: RunStore) -> None:
    (run,) = store.runs()
    (store.root / ".removing-0123456789abcdef" / "checkpoints").mkdir(parents=True)
    removal = removable_run(run)
    assert removal is not None
    removal.apply()
    assert list(store.root.iterdir()) == []
