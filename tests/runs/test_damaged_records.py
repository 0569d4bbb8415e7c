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
from steepen.requests.app import main
from steepen.runs.store import RunStore
from steepen.training.checkpoint import list_checkpoints
from steepen.utils.json_io import with_checksum, write_json


def infinite_score() -> dict[str, Any]:
    return {"validation": {"loss": float("inf")}}


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another loss": lambda value: {**value, "validation_loss": 3.0},
    "no checksum": lambda value: {name: item for name, item in value.items() if name != "checksum"},
    "NaN loss": lambda value: with_checksum({**value, "validation_loss": float("nan")}),
    "another hash": lambda value: with_checksum({**value, "run": "0" * 16}),
    "a newer version": lambda value: with_checksum({**value, "version": 99}),
    "scores of a wrong type": lambda value: with_checksum({**value, "evaluation": {"kl_depth": 0.5}}),
    "an infinite score": lambda value: with_checksum({**value, "evaluation": infinite_score()}),
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


def test_record_in_place_of_which_is_a_pipe_affects_its_run_alone(store: RunStore) -> None:
    file = store.run(spec(1)).record_file
    file.unlink()
    os.mkfifo(file)
    assert_only_the_first_is_damaged(store)


@pytest.mark.parametrize("damage", [{"shape": True}, {"data": None}, {"arm": "x"}, {}])
def test_damaged_spec_of_an_unfinished_run_hides_no_other(
    damage: dict[str, Any], store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    run = store.run(spec(1))
    run.record_file.unlink()
    write_json(run.spec_file, {**spec(1).to_dict(), **damage} if damage else {"steps": 3})
    assert main(["runs", "--runs", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert f"{spec(1).hash} failed: spec.json cannot be read" in out and spec(2).hash in out
    (row,) = (row for row in store.rows() if row.status == "failed")
    assert (row.run, row.arm, row.depth, row.seed, row.tokens, row.flops) == (spec(1).hash, "?", 0, 0, 0, 0)


@pytest.mark.parametrize("name", ["²", "٣", "7", "+0000007", "0000000007"])
def test_only_directories_named_by_a_step_are_checkpoints(name: str, store: RunStore) -> None:
    run = store.run(spec(1))
    for folder in (name, "00000003"):
        (run.checkpoints / folder).mkdir(parents=True)
    assert run.saved_step() == 3
    assert [saved.step for saved in list_checkpoints(run.checkpoints)] == [3]


def test_cleaning_keeps_a_run_that_can_be_finished_again(store: RunStore) -> None:
    store.run(spec(1)).record_file.write_text("damaged")
    assert main(["runs", "clean", "--failed", "--yes", "--runs", str(store.root)]) == 0
    assert store.run(spec(1)).record_file.exists()


def test_cleaning_never_leaves_the_checkpoints(store: RunStore, tmp_path: Path) -> None:
    """`checkpoints` of a directory from elsewhere may be a link to one with other things in it."""
    run, home = store.run(spec(1)), tmp_path / "home"
    for folder in ("documents", "00000003", "00000005"):
        (home / folder).mkdir(parents=True)
    run.checkpoints.symlink_to(home)
    assert main(["runs", "clean", "--checkpoints", "--yes", "--runs", str(store.root)]) == 0
    assert (home / "documents").is_dir() and not (home / "00000003").exists()


def test_run_directory_may_be_copied_under_another_name(store: RunStore) -> None:
    copy = store.root / "my-copy"
    shutil.copytree(store.run(spec(1)).path, copy)
    assert {row.status for row in store.rows()} == {"finished"}
