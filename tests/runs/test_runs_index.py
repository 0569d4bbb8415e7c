"""The store lists and loads exactly what its files hold, whatever has happened to files and index."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steepen.errors import SteepenError, UsageError
from steepen.runs import index as index_module
from steepen.runs.index import Index
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]
ACTIONS = ["write", "edit", "delete", "spoil", "index", "cut index", "flip index", "lose index", "waiting"]


def truth(root: Path) -> dict[str, RunRecord]:
    """What the files say, without any index."""
    found: dict[str, RunRecord] = {}
    for file in root.glob("*/record.json"):
        try:
            found[file.parent.name] = RunRecord.from_dict(json.loads(file.read_text()))
        except (ValueError, SteepenError):
            continue
    return found


class Changes:
    """Changes a store's files, each change at a time of its own, long ago."""

    def __init__(self, root: Path, record_of: Callable[..., RunRecord], spec: Spec) -> None:
        self.root, self.record_of, self.spec = root, record_of, spec
        self.clock = time.time() - 10**6

    def settle(self, file: Path) -> None:
        self.clock += 1
        os.utime(file, (self.clock, self.clock))

    def make(self, action: str, seed: int, loss: float) -> None:
        spec = self.spec(seed)
        file = self.root / spec.hash / "record.json"
        store = self.root / index_module.NAME
        if action == "write":
            write_json(file, self.record_of(spec, loss).to_dict())
            self.settle(file)
        elif action == "edit" and file.exists():  # in place: the inode stays
            file.write_text(json.dumps(self.record_of(spec, loss).to_dict()))
            self.settle(file)
        elif action == "delete":
            file.unlink(missing_ok=True)
        elif action == "spoil" and file.exists():
            file.write_text(file.read_text()[:-20])
            self.settle(file)
        elif action == "index":
            Index(self.root).rebuild()
        elif action == "cut index" and store.exists():
            store.write_bytes(store.read_bytes()[:-30])
        elif action == "flip index" and store.exists():
            whole = bytearray(store.read_bytes())
            whole[int(loss * 1000) % len(whole)] ^= 1
            store.write_bytes(bytes(whole))
        elif action == "lose index":
            store.unlink(missing_ok=True)
        elif action == "waiting":
            write_json(file.with_name("spec.json"), spec.to_dict())


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
    deadline=None,
)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.floats(1, 9)), max_size=14))
def test_after_any_changes_the_store_shows_what_the_files_hold(
    tmp_path_factory: pytest.TempPathFactory, trainer: ModuleType, spec: Spec, changes: list[Any]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    store, change = RunStore(root), Changes(root, trainer.record_of, spec)
    for action in changes:
        change.make(*action)
        expected = truth(root)
        rows = store.rows()
        assert {row.run: row.loss for row in rows if row.status == "finished"} == {
            name: record.validation_loss for name, record in expected.items()
        }
        unreadable = {file.parent.name for file in root.glob("*/record.json")} - expected.keys()
        assert {row.run for row in rows if row.status == "failed"} == unreadable
        if unreadable:
            with pytest.raises(SteepenError, match="cannot be read"):
                store.records()
        assert store.records(runs=expected.keys()) == [expected[name] for name in sorted(expected)]


def fill(root: Path, spec: Spec, trainer: ModuleType, count: int) -> list[RunRecord]:
    old = time.time() - 1000
    records: list[RunRecord] = []
    for seed in range(count):
        arm, depth = ("vanilla", "untied-grow")[seed % 2], 2 + seed % 3
        record = trainer.record_of(spec(seed, arm=arm, depth=depth))
        write_json(root / record.run / "record.json", record.to_dict())
        os.utime(root / record.run / "record.json", (old, old))
        records.append(record)
    return sorted(records, key=lambda record: record.run)


def test_records_are_filtered_by_arm_depth_and_name(store: RunStore, spec: Spec, trainer: ModuleType) -> None:
    records = fill(store.root, spec, trainer, 18)
    for _ in range(2):  # from the files, then from the index
        assert store.records() == records
        chosen = [r for r in records if r.spec.arm.name == "untied-grow" and r.spec.shape.depth == 3]
        assert chosen and store.records(arm="untied-grow", depth=3) == chosen
        assert [row.run for row in store.rows(arm="untied-grow", depth=3)] == [r.run for r in chosen]
        assert store.records(runs=[records[4].run]) == [records[4]]
    assert (store.root / index_module.NAME).exists()


def test_the_index_serves_what_it_holds(
    store: RunStore, spec: Spec, trainer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = fill(store.root, spec, trainer, 12)
    Index(store.root).rebuild()

    def never(*_: Any) -> Any:
        raise AssertionError("a record was read from its file although the index has it")

    monkeypatch.setattr(index_module, "_read", never)
    assert store.records() == records and len(store.rows()) == 12


def test_a_damaged_index_is_never_believed(store: RunStore, spec: Spec, trainer: ModuleType) -> None:
    records = fill(store.root, spec, trainer, 4)
    index = store.root / index_module.NAME
    Index(store.root).rebuild()
    whole = index.read_bytes()
    losses = [record.validation_loss for record in records]
    places = [whole.index(str(losses[0]).encode()) + 3, whole.index(b"\n") + 4, whole.index(b"\t") + 2, 5]
    for place in places:  # a digit of a loss, of a name, of a stamp, and a letter of the first line
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert [row.loss for row in store.rows()] == losses and store.records() == records
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        index.write_bytes(whole[:size])
        assert [row.loss for row in store.rows()] == losses and store.records() == records


def test_a_file_too_new_to_have_a_stamp_of_its_own_is_read_again(
    store: RunStore, spec: Spec, trainer: ModuleType
) -> None:
    record = trainer.record_of(spec(1), 1.25)
    file = store.root / record.run / "record.json"
    write_json(file, record.to_dict())
    Index(store.root).rebuild()
    facts = file.stat()
    # The same size, inode and time: no stamp can tell these two files apart.
    file.write_text(file.read_text().replace("1.25", "1.75"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert [row.loss for row in store.rows()] == [1.75]


def test_many_readers_and_writers_at_once_all_see_every_record(
    store: RunStore, spec: Spec, trainer: ModuleType
) -> None:
    records = fill(store.root, spec, trainer, 12)
    wrong: list[Any] = []

    def look() -> None:
        for turn in range(6):
            if turn % 2:
                Index(store.root).rebuild()
            if store.records() != records:
                wrong.append(turn)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_store_that_cannot_be_written_is_read_without_an_index(
    store: RunStore, spec: Spec, trainer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = fill(store.root, spec, trainer, 12)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(index_module, "write_atomically", refuse)
    assert store.records() == records


def test_others_may_read_what_is_written(store: RunStore, spec: Spec, trainer: ModuleType) -> None:
    (record,) = fill(store.root, spec, trainer, 1)
    umask = os.umask(0)
    os.umask(umask)
    assert (store.root / record.run / "record.json").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda r: r.update(validation_scores=[{"step": "1"}]),
            "record.validation_scores[0].step = '1' is not valid",
        ),
        (
            lambda r: r["validation_scores"][0].pop("loss"),
            "record.validation_scores[0] lacks the field 'loss'",
        ),
        (lambda r: r["spec"]["shape"].update(width=1.5), "record.spec.shape.width = 1.5 is not valid"),
        (lambda r: r["spec"]["arm"].update(tyed=1), "record.spec.arm has no field 'tyed'"),
        (lambda r: r.update(mfu="fast"), "record.mfu = 'fast' is not valid: it must be a number"),
        (lambda r: r.update(parameters=3), "record.parameters = 3 is not valid: it must be an object"),
    ],
)
def test_a_wrong_value_in_a_record_is_named_by_its_path(
    spoil: Callable[[Any], Any], says: str, spec: Spec, trainer: ModuleType
) -> None:
    plain = trainer.record_of(spec()).to_dict()
    spoil(plain)
    with pytest.raises(UsageError) as error:
        RunRecord.from_dict(plain)
    assert says in str(error.value)


def test_a_record_survives_a_round_trip(spec: Spec, trainer: ModuleType) -> None:
    record = replace(trainer.record_of(spec(arm="untied-grow")), evaluation={"core": {"score": 0.1}})
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
