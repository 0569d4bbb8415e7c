"""Dry runs: the next runs with FLOPs, time and cost; nothing is started or written."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from steepen.cli.launch_options import launch_study
from steepen.errors import UsageError
from steepen.launch.cost_estimate import ASSUMED_CPU_FLOPS, Speed
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import drive, simulate_study
from steepen.studies.driver.dry_run import DryRunReport

Spec = Callable[..., RunSpec]


Study = Generator[list[RunSpec], Any, Any]


def adaptive(spec: Spec) -> Study:
    """Two seeds, then more of them at whichever did better."""
    first = yield [spec(1), spec(2)]
    better = min(first, key=lambda record: record.validation_loss).spec.seed
    second = yield [spec(10 * better + 1), spec(10 * better), spec(better)]
    return [record.spec.seed for record in (*first, *second)]


def test_a_dry_run_returns_the_next_runs_and_writes_nothing(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    first = simulate_study(adaptive(spec), store)
    assert [one.seed for one in first.batch] == [1, 2] and not first.complete
    assert sorted(tmp_path.rglob("*")) == before
    list(instant.launch(first.batch))
    second = simulate_study(adaptive(spec), store)
    assert second.finished == 2 and len(second.batch) == 2  # the third of the batch is finished
    list(instant.launch(second.batch))
    last = simulate_study(adaptive(spec), store)
    assert last.complete and last.batch == [] and last.answer == drive(adaptive(spec), store, instant)


def test_totals_of_a_dry_run_are_sums_over_its_runs(instant: Any, store: RunStore, spec: Spec) -> None:
    speed = Speed.from_records([])
    assert f"{ASSUMED_CPU_FLOPS:.0e}" in speed.assumption
    forecast = DryRunReport.from_simulation(
        simulate_study(adaptive(spec), store), store, speed, 2, dollars_per_hour=3.6
    )
    assert forecast.flops == pytest.approx(2 * expected_flops(spec(1)))
    assert forecast.seconds == pytest.approx(forecast.machine_seconds / 2)
    assert forecast.dollars == pytest.approx(forecast.machine_seconds / 1000)
    assert json.loads(json.dumps(forecast.to_dict()))["flops"] == forecast.flops


def seeds(spec: Spec) -> Generator[list[RunSpec], Any, Any]:
    records = yield [spec(1), spec(2)]
    return {"losses": [record.validation_loss for record in records]}


def test_a_dry_run_prints_runs_with_flops_time_and_cost(
    store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = {"data": tmp_path, "runs": store.root, "studies": tmp_path / "studies"}
    options: dict[str, Any] = {"name": "pair", "options": {}, "dry_run": True, **context}
    assert launch_study(lambda: seeds(spec), dollars_per_hour=2.0, jobs=2, **options) is None
    text = capsys.readouterr().out
    assert spec(1).hash in text and spec(2).hash in text and "2 runs" in text and "Cost: $" in text
    assert f"{2 * expected_flops(spec(1)):.3g} FLOPs" in text and "assuming" in text
    assert "GPUs" not in text
    launch_study(lambda: seeds(spec), gpus_per_run="2", **options)
    text = capsys.readouterr().out
    assert text.splitlines()[0].split()[-2:] == ["GPUs", "time"]
    assert text.splitlines()[1].split()[-3] == "2"  # 5 s
    launch_study(lambda: seeds(spec), as_json=True, **options)
    assert json.loads(capsys.readouterr().out)["flops"] == pytest.approx(2 * expected_flops(spec(1)))
    assert not (tmp_path / "studies").exists() and not store.root.exists()


def test_a_wrong_budget_or_launcher_is_rejected_before_anything_starts(
    store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    context: dict[str, Any] = {"name": "pair", "options": {}, "data": tmp_path, "runs": store.root}
    context["studies"] = tmp_path / "s"
    mistakes: list[dict[str, Any]] = [
        {"budget": "lots"},
        {"launcher": "cloud"},
        {"jobs": 0},
        {"gpu": "abacus"},
    ]
    for wrong in mistakes:
        with pytest.raises(UsageError):
            launch_study(lambda: seeds(spec), **context, **wrong)
    assert not (tmp_path / "s").exists()
