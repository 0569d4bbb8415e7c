"""Status of a study, from its journal and run directories: `steepen status`."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from steepen.errors import UsageError
from steepen.launch.batch_progress import BatchProgress
from steepen.launch.cost_estimate import Budget, BudgetReached
from steepen.requests.app import main
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.studies.driver.study_status import study_status
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]


def seeds(spec: Spec) -> Generator[list[RunSpec], Any, Any]:
    records = yield [spec(1), spec(2)]
    return {"losses": [record.validation_loss for record in records]}


def test_status_shows_finished_runs_and_remaining_flops(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal.open(tmp_path / "studies", "pair", {}, store.root)
    drive(seeds(spec), store, instant, journal=journal)
    store.run(spec(2)).record_file.unlink()
    where = ["--studies", str(tmp_path / "studies")]
    assert main(["status", "pair", "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["finished"] == 1 and found["flops_left"] == pytest.approx(expected_flops(spec(2)))
    assert main(["status", *where]) == 0 and main(["status", str(tmp_path / "studies" / "pair")]) == 0
    assert capsys.readouterr().out.count("pair: finished, batch 1; 2 runs requested") == 2


def test_an_unreadable_journal_is_reported_beside_the_other_studies(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = tmp_path / "studies"
    drive(seeds(spec), store, instant, journal=Journal.open(studies, "pair", {}, store.root))
    for name, text in (("aaa", "{"), ("bbb", '{"name": "bbb", "status": "thriving"}')):
        (studies / name).mkdir()
        (studies / name / "study.json").write_text(text)
    assert main(["status", "--studies", str(studies)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].startswith("pair: finished")
    for name, line in zip(("aaa", "bbb"), lines[1:], strict=True):
        assert line.startswith(f"{name}: the journal {studies / name / 'study.json'} can't be read: ")
    assert main(["status", "--studies", str(studies), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["studies"]] == ["pair"] and list(found["unreadable"]) == [
        "aaa",
        "bbb",
    ]
    # Asked for by name, it is an error.
    assert main(["status", "aaa", "--studies", str(studies)]) == 1
    assert "can't be read" in capsys.readouterr().err


Study = Generator[list[RunSpec], Any, Any]


def seeds_of(*batches: list[int], spec: Spec) -> Study:
    """Batches of seeds, whatever comes out; returns what came."""
    found: list[Any] = []
    for batch in batches:
        found += yield [spec(seed) for seed in batch]
    return found


def test_the_journal_holds_progress_message_and_answer(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    options = {"arm": "vanilla", "grid": (1, 2)}
    cost = expected_flops(spec(1))
    with pytest.raises(BudgetReached):
        journal = Journal.open(tmp_path, "s", options, store.root)
        study = seeds_of([1, 2, 3], spec=spec)
        drive(study, store, instant, journal=journal, budget=Budget(flops=2.5 * cost))
    status = study_status(Journal.read(tmp_path / "s"))
    assert status.state == "stopped" and "budget" in status.message
    assert (status.counts["finished"], status.counts["waiting"]) == (2, 1)
    assert status.flops_done == pytest.approx(2 * cost) and status.flops_left == pytest.approx(cost)
    assert status.seconds_left == pytest.approx(2.0)  # as long as each of the others took
    journal = Journal.open(tmp_path, "s", options, store.root)
    drive(seeds_of([1, 2, 3], spec=spec), store, instant, journal=journal)
    status = study_status(Journal.read(tmp_path / "s"))
    assert status.state == "finished" and len(status.answer) == 3 and status.flops_left == 0


def test_a_study_of_the_same_name_with_other_options_is_rejected(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    drive(seeds_of([1], spec=spec), store, instant, journal=Journal.open(tmp_path, "s", {"k": 1}, store.root))
    with pytest.raises(UsageError, match="k was 1"):
        Journal.open(tmp_path, "s", {"k": 2}, store.root)
    with pytest.raises(UsageError, match="can't be named"):
        Journal.open(tmp_path, "../s", {}, store.root)


def test_a_killed_driver_is_shown_as_killed_and_a_live_one_as_running(
    store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path, "s", {}, store.root)
    with journal.driving():
        assert Journal.read(tmp_path / "s").live_status == "running"
    assert Journal.read(tmp_path / "s").live_status == "killed"


def asks(*specs: RunSpec) -> Generator[list[RunSpec], Any, Any]:
    return (yield list(specs))


def test_status_and_the_resumed_study_agree_on_remaining_flops(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = [spec(seed, steps=10) for seed in (1, 2, 3, 4, 13)]
    whole = expected_flops(specs[0])
    list(instant.launch(specs[:1]))  # finished
    for one, step, seen in ((specs[1], 6, 6), (specs[2], 3, 5)):  # stopped, and killed after it had saved
        run = store.run(one)
        write_json(run.spec_file, one.to_dict())
        (run.checkpoints / f"{step:08d}").mkdir(parents=True)
        run.metrics_file.write_text(f'{{"step": {seen}, "loss": 5.5, "tokens_per_second": 100.0}}\n')
    write_json(store.run(specs[4]).spec_file, specs[4].to_dict())  # diverged: not trained again
    write_json(store.run(specs[4]).failure_file, {"kind": "Diverged", "message": "the loss is nan."})
    journal = Journal.open(tmp_path, "s", {}, store.root)
    with journal.driving():
        journal.add_batch(specs)
    left = study_status(Journal.read(tmp_path / "s")).flops_left
    assert left == pytest.approx((0.4 + 0.7 + 1) * whole)
    drive(asks(*specs), store, instant, accept_diverged=True, progress=BatchProgress(store))
    assert f"batch 1: 5 runs, 2 already finished, {left:.3g} FLOPs to go." in capsys.readouterr().err
