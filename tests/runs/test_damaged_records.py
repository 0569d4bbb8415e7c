"""A record is believed only in its own run directory, unaltered and with finite losses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_trainer import record_of
from run_fixtures import make_spec as spec
from steepen.errors import SteepenError
from steepen.runs.store import RunStore
from steepen.utils.json_io import with_checksum, write_json

DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another loss": lambda value: {**value, "validation_loss": 3.0},
    "no checksum": lambda value: {name: item for name, item in value.items() if name != "checksum"},
    "NaN loss": lambda value: with_checksum({**value, "validation_loss": float("nan")}),
    "another hash": lambda value: with_checksum({**value, "run": "0" * 16}),
    "a newer version": lambda value: with_checksum({**value, "version": 99}),
    "null": lambda value: None,
    "a list": lambda value: [value],
}


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path / "runs")
    for seed in (1, 2):
        write_json(store.run(spec(seed)).record_file, record_of(spec(seed), 3.5).to_dict())
    return store


def assert_only_the_first_is_damaged(store: RunStore) -> None:
    with pytest.raises(SteepenError, match="cannot be read"):
        store.record(spec(1))
    assert store.record(spec(2)) is not None
    status = {row.run: (row.status, row.failure_kind) for row in store.rows()}
    assert status == {spec(1).hash: ("failed", "DamagedRecord"), spec(2).hash: ("finished", "")}


@pytest.mark.parametrize("damage", DAMAGE)
def test_altered_record_is_rejected_and_listed_as_damaged(damage: str, store: RunStore) -> None:
    file = store.run(spec(1)).record_file
    write_json(file, DAMAGE[damage](json.loads(file.read_text())))
    assert_only_the_first_is_damaged(store)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b""])
def test_record_that_is_no_json_affects_its_run_alone(content: bytes, store: RunStore) -> None:
    store.run(spec(1)).record_file.write_bytes(content)
    assert_only_the_first_is_damaged(store)


def test_record_of_another_run_is_rejected(store: RunStore) -> None:
    shutil.copy(store.run(spec(2)).record_file, store.run(spec(1)).record_file)
    assert_only_the_first_is_damaged(store)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_record_affects_its_run_alone(store: RunStore) -> None:
    store.run(spec(1)).record_file.chmod(0)
    assert_only_the_first_is_damaged(store)


def test_record_in_place_of_which_is_a_directory_affects_its_run_alone(store: RunStore) -> None:
    file = store.run(spec(1)).record_file
    file.unlink()
    file.mkdir()
    assert_only_the_first_is_damaged(store)


def test_run_directory_may_be_copied_under_another_name(store: RunStore) -> None:
    copy = store.root / "my-copy"
    shutil.copytree(store.run(spec(1)).path, copy)
    assert {row.status for row in store.rows()} == {"finished"}
