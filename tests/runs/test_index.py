"""The index of a store: listings read no record twice, and never differ from what the files say."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from steepen.requests.app import main
from steepen.runs import index
from steepen.runs.fields import all_run_fields
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, RunStore
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]


@pytest.fixture
def many(store: RunStore, spec: Spec, trainer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """A store with an index: finished runs, one with scores, and unfinished ones of every status."""
    monkeypatch.setattr(index, "MIN_NEW", 1)
    monkeypatch.setattr(index, "SETTLED_SECONDS", 0.0)
    for seed in range(1, 9):
        own = spec(seed, arm="vanilla" if seed % 2 else "untied-grow")
        record = trainer.record_of(own, loss=3.0 + seed).to_dict()
        write_json(store.run(own).record_file, record)
    for seed in (11, 12, 13):
        write_json(store.run(spec(seed)).spec_file, spec(seed).to_dict())
    write_json(store.run(spec(12)).failure_file, {"kind": "Diverged", "message": "the loss is nan."})
    store.run(spec(13)).metrics_file.write_text('{"step": 2, "loss": 5.5, "tokens_per_second": 100.0}\n')
    time.sleep(0.02)
    assert len(store.rows()) == 11 and (store.root / index.FILE).is_file()
    return store


def forget() -> None:
    """What a new process knows."""
    index._indexes.clear()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose files are read from now on."""
    read: list[str] = []
    real = index.read_row

    def read_row(run: RunDirectory) -> Any:
        read.append(run.path.name)
        return real(run)

    monkeypatch.setattr(index, "read_row", read_row)
    return read


def test_rows_of_the_index_are_those_of_the_files_and_no_file_is_read_again(
    many: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (many.root / index.FILE).rename(many.root / ".aside")
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(index, "MIN_NEW", 1000)  # not written
        fresh = all_run_fields(many, many.rows())
    (many.root / ".aside").rename(many.root / index.FILE)
    forget()
    read = counted(monkeypatch)
    assert all_run_fields(many, many.rows()) == fresh and read == []
    assert {row["status"] for row in fresh} == {"finished", "waiting", "failed", "interrupted"}


def test_what_changes_in_a_run_is_shown(many: RunStore, spec: Spec, trainer: ModuleType) -> None:
    forget()
    replaced, edited, removed, finished = spec(1), spec(3), spec(5), spec(11)
    write_json(many.run(replaced).record_file, trainer.record_of(replaced, loss=1.25).to_dict())
    file = many.run(edited).record_file
    before = file.stat()
    text = file.read_text()
    file.write_text(re.sub(r'"validation_loss": \d', '"validation_loss": 1', text, count=1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of the change itself stays
    assert file.stat().st_size == before.st_size
    many.run(removed).record_file.unlink()
    many.run(removed).path.rmdir()
    write_json(many.run(finished).record_file, trainer.record_of(finished, loss=2.5).to_dict())
    with many.run(spec(13)).lock():
        rows = {row.run: row for row in many.rows()}
    assert rows[replaced.hash].loss == 1.25 and removed.hash not in rows
    assert rows[edited.hash].failure_kind == "DamagedRecord" and "altered" in rows[edited.hash].cause
    assert (rows[finished.hash].status, rows[finished.hash].loss) == ("finished", 2.5)
    assert rows[spec(13).hash].status == "running"


def test_a_damaged_index_or_one_of_another_format_is_made_again(
    many: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = many.root / index.FILE
    whole = file.read_bytes()
    for damaged in (b"", b"x", whole[:-10], whole.replace(b"vanilla", b"forged!"), b"\0" * 1000):
        file.write_bytes(damaged)
        forget()
        read = counted(monkeypatch)
        assert len(many.rows()) == 11 and len(read) == 11
        assert {row.arm for row in many.rows()} == {"vanilla", "untied-grow"}
        assert json.loads(file.read_bytes().partition(b"\n")[2]) == json.loads(whole.partition(b"\n")[2])
    with monkeypatch.context() as patch:
        patch.setattr(index, "FORMAT", index.FORMAT + 1)
        forget()
        read = counted(monkeypatch)
        assert len(many.rows()) == 11 and len(read) == 11


def test_a_store_that_cannot_be_written_to_is_listed_without_an_index(
    many: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (many.root / index.FILE).unlink()
    forget()

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "write_atomically", full)
    assert len(many.rows()) == 11 and not (many.root / index.FILE).exists()


def test_a_record_that_was_just_written_is_read_again(
    many: RunStore, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times may not tell the next change from this one."""
    monkeypatch.setattr(index, "SETTLED_SECONDS", 60.0)
    (many.root / index.FILE).unlink()
    forget()
    read = counted(monkeypatch)
    assert many.rows() == many.rows() and len(read) == 22


def test_a_listing_checks_every_field_of_every_record(
    many: RunStore, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    file = many.run(spec(7)).record_file
    file.write_text(json.dumps({**json.loads(file.read_text()), "mfu": "fast"}))
    assert main(["runs", "--runs", str(many.root)]) == 0
    assert "record.mfu = 'fast' is not valid" in capsys.readouterr().out


def test_status_reads_only_the_runs_of_the_study(many: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    (many.root / index.FILE).unlink()
    read = counted(monkeypatch)
    names = [run.path.name for run in many.runs()][:3]
    assert [row.run for row in many.rows(runs=[*names, "absent"])] == names and read == [*names, "absent"]


def test_a_long_table_has_the_cells_of_a_short_one(
    many: RunStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[list[list[str]]] = []
    for limit in (500, 3):
        monkeypatch.setattr("steepen.utils.console.MANY_ROWS", limit)
        for words in ([], ["--columns", "run,arm,loss,status"]):
            assert main(["runs", "--runs", str(many.root), *words]) == 0
            tables.append([line.split() for line in capsys.readouterr().out.splitlines()])
    assert tables[:2] == tables[2:] and len(tables[0]) > 11
