"""The run store lists and loads what its files hold, also when they are damaged."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steepen.errors import SteepenError
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.utils.json_io import with_checksum, write_json

Spec = Callable[..., RunSpec]


ACTIONS = ["write", "edit", "delete", "truncate", "damage", "waiting"]


def readable_records(root: Path) -> dict[str, RunRecord]:
    """The readable records, each decoded from its file."""
    found: dict[str, RunRecord] = {}
    for file in root.glob("*/record.json"):
        try:
            found[file.parent.name] = RunRecord.from_dict(json.loads(file.read_text()))
        except (ValueError, SteepenError):
            continue
    return found


class Changes:
    """Changes a store's files."""

    def __init__(self, root: Path, record_of: Callable[..., RunRecord], spec: Spec) -> None:
        self.root, self.record_of, self.spec = root, record_of, spec

    def make(self, action: str, seed: int, loss: float) -> None:
        spec = self.spec(seed)
        file = self.root / spec.hash / "record.json"
        if action == "write":
            write_json(file, self.record_of(spec, loss).to_dict())
        elif action == "edit" and file.exists():
            file.write_text(json.dumps(self.record_of(spec, loss).to_dict()))
        elif action == "delete":
            file.unlink(missing_ok=True)
        elif action == "truncate" and file.exists():
            file.write_text(file.read_text()[:-20])
        elif action == "damage":  # a field that no row shows
            write_json(file, {**self.record_of(spec, loss).to_dict(), "mfu": "fast"})
        elif action == "waiting":
            write_json(file.with_name("spec.json"), spec.to_dict())


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.floats(1, 9)), max_size=14))
def test_after_any_file_changes_rows_and_records_match_the_files(
    tmp_path_factory: pytest.TempPathFactory, trainer: ModuleType, spec: Spec, changes: list[Any]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    store, change = RunStore(root), Changes(root, trainer.record_of, spec)
    for action in changes:
        change.make(*action)
        expected = readable_records(root)
        rows = store.rows()
        assert {row.run: row.loss for row in rows if row.status == "finished"} == {
            name: record.validation_loss for name, record in expected.items()
        }
        unreadable = {file.parent.name for file in root.glob("*/record.json")} - expected.keys()
        assert {row.run for row in rows if row.status == "failed"} == unreadable
        if unreadable:
            with pytest.raises(SteepenError, match="cannot be read"):
                store.records()
        else:
            assert store.records() == [expected[name] for name in sorted(expected)]


def test_runs_are_the_directories_that_are_not_hidden(store: RunStore, spec: Spec) -> None:
    run = store.run(spec(1))
    run.path.mkdir(parents=True)
    (store.root / ".trunks").mkdir()
    (store.root / "notes.txt").write_text("which runs are good")
    assert store.runs() == [run]


def fill(root: Path, spec: Spec, trainer: ModuleType, count: int) -> list[RunRecord]:
    records: list[RunRecord] = []
    for seed in range(count):
        arm, depth = ("vanilla", "untied-grow")[seed % 2], 2 + seed % 3
        record = trainer.record_of(spec(seed, arm=arm, depth=depth))
        write_json(root / record.run / "record.json", record.to_dict())
        records.append(record)
    return sorted(records, key=lambda record: record.run)


def test_record_without_the_fields_of_later_versions_is_of_a_run_that_trained_every_step(
    spec: Spec, trainer: ModuleType
) -> None:
    later = ("resumed", "recompute", "trunk", "trunk_steps", "trunk_flops", "evaluation")
    value = trainer.record_of(spec(1)).to_dict()
    early = {name: item for name, item in value.items() if name not in (*later, "checksum")}
    found = RunRecord.from_dict(with_checksum(early))
    assert [getattr(found, name) for name in later] == [0, False, "", 0, 0.0, {}]
    assert found.spent_flops == found.flops


def test_records_and_rows_come_by_name(store: RunStore, spec: Spec, trainer: ModuleType) -> None:
    records = fill(store.root, spec, trainer, 18)
    names = [record.run for record in records]
    assert store.records() == records and [row.run for row in store.rows()] == names
    assert [row.run for row in store.rows([names[4], names[2]])] == [names[2], names[4]]


def test_concurrent_readers_see_only_complete_records(
    store: RunStore, spec: Spec, trainer: ModuleType
) -> None:
    records = fill(store.root, spec, trainer, 12)
    wrong: list[Any] = []

    def read_and_rewrite() -> None:
        for attempt in range(6):
            write_json(store.root / records[attempt].run / "record.json", records[attempt].to_dict())
            done = [row for row in store.rows() if row.status == "finished"]
            if store.records() != records or len(done) != 12:
                wrong.append(attempt)

    threads = [threading.Thread(target=read_and_rewrite) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_checking_whether_a_run_is_busy_does_not_block_training(store: RunStore, spec: Spec) -> None:
    run = store.run(spec(1))
    with run.lock():
        assert run.busy()
    # Checking holds the lock for an instant; training that starts in that instant must not fail.
    looking = run.lock_file.open("r+")
    fcntl.flock(looking, fcntl.LOCK_EX)
    threading.Timer(0.03, looking.close).start()
    with run.lock():
        pass


def test_a_run_with_only_a_spec_is_waiting(store: RunStore, spec: Spec) -> None:
    write_json(store.run(spec(1)).spec_file, spec(1).to_dict())
    (row,) = store.rows()
    assert (row.status, row.flops) == ("waiting", expected_flops(spec(1)))
