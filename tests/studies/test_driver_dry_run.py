"""Dry runs: the next runs with FLOPs, time and cost; nothing is started or written."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import steepen
from steepen.errors import UsageError
from steepen.launch.cost_estimate import ASSUMED_CPU_FLOPS, GpusPerRun, Speed, makespan
from steepen.requests.app import main
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import drive
from steepen.studies.driver.dry_run import dry_run, simulate_study
from steepen.studies.preset import load_preset

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
    assert [one.seed for one in first.unfinished.values()] == [1, 2] and not first.complete
    assert sorted(tmp_path.rglob("*")) == before
    list(instant.launch(first.unfinished.values()))
    second = simulate_study(adaptive(spec), store)
    assert len(second.finished) == len(second.unfinished) == 2  # the third of the batch is finished
    list(instant.launch(second.unfinished.values()))
    last = simulate_study(adaptive(spec), store)
    assert last.complete and not last.unfinished and last.answer == drive(adaptive(spec), store, instant)


def test_totals_of_a_dry_run_are_sums_over_its_runs(instant: Any, store: RunStore, spec: Spec) -> None:
    speed = Speed.from_records([])
    assert f"{ASSUMED_CPU_FLOPS:.0e}" in speed.assumption
    forecast = dry_run(lambda: adaptive(spec), store, speed, 2, dollars_per_hour=3.6)
    assert forecast.flops == pytest.approx(2 * expected_flops(spec(1)))
    assert forecast.seconds == pytest.approx(forecast.machine_seconds / 2)
    assert forecast.dollars == pytest.approx(forecast.machine_seconds / 1000)
    assert json.loads(json.dumps(forecast.to_dict()))["flops"] == forecast.flops


def seeds(spec: Spec) -> Generator[list[RunSpec], Any, Any]:
    records = yield [spec(1), spec(2)]
    return {"losses": [record.validation_loss for record in records]}


def test_a_dry_run_prints_runs_with_flops_time_and_cost(store: RunStore, spec: Spec) -> None:
    speed = Speed.from_records([])
    text = dry_run(lambda: seeds(spec), store, speed, 2, dollars_per_hour=2.0).summary()
    assert spec(1).hash in text and spec(2).hash in text and "2 runs" in text and "Cost: $" in text
    assert f"{2 * expected_flops(spec(1)):.3g} FLOPs" in text and "assuming" in text and "GPUs" not in text
    text = dry_run(
        lambda: seeds(spec), store, Speed.from_records([], gpus_per_run=GpusPerRun(2)), 1
    ).summary()
    assert text.splitlines()[1].split()[-2:] == ["GPUs", "time"]
    assert text.splitlines()[3].split()[-3] == "2"  # 5 s
    assert not store.root.exists()


def test_the_price_is_of_a_gpu_hour_and_counts_every_stage(store: RunStore, spec: Spec) -> None:
    def cost(gpus: int) -> Any:
        speed = Speed.from_records([], gpus_per_run=GpusPerRun(gpus))
        return dry_run(lambda: adaptive(spec), store, speed, 1, stand_ins=(instant_record,),
                       dollars_per_hour=3.6)  # fmt: skip

    one, two = cost(1), cost(2)
    assert two.gpu_seconds == pytest.approx(2 * two.machine_seconds) and two.dollars > one.dollars
    assert one.dollars == pytest.approx(one.gpu_seconds / 1000)
    assert one.later_runs == 0 and len(one.runs) == 4  # certain, as one stand-in leads there


def instant_record(spec: RunSpec) -> Any:
    from steepen.studies.synthetic import fabricate_record

    return fabricate_record(spec, float(spec.seed))


def test_a_wrong_budget_or_launcher_is_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mistakes: list[dict[str, Any]] = [
        {"budget": "lots"},
        {"launcher": "cloud"},
        {"jobs": 0},
        {"gpu": "abacus"},
    ]
    for wrong in mistakes:
        with pytest.raises(UsageError):
            steepen.dry_run_study("ladder", **wrong)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_is_varied_among_runs_of_one_arm_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    swept = {row.varied for row in steepen.dry_run_study("lr-rule").rows}
    assert {"learning rate 0.04", "output multiplier 0.125", ""} <= swept
    assert not any("," in words for words in swept)  # one at a time around the base values
    timed = [row.varied for row in steepen.dry_run_study("growth-timing").rows if row.arm == "loop-grow"]
    assert timed and all("growth at" in words for words in timed)
    assert not any(row.varied for row in steepen.dry_run_study("ladder").rows)


def test_runs_share_the_gpus_that_are_named() -> None:
    assert makespan([4.0, 3.0, 2.0, 1.0], 2) == 5.0
    assert makespan([4.0, 3.0, 2.0], 3, [8, 4, 4], 8) == 4.0 + 3.0
    assert makespan([4.0, 3.0, 2.0], 3, [1, 1, 1], 8) == 4.0
    assert makespan([], 2) == 0.0


def test_named_gpus_bound_what_a_dry_run_expects(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "ladder", "--preset", "paper", "--arms", "vanilla,untied-grow", "--dry-run",
             "--gpus-per-run", "auto", "--json", "--gpu"]  # fmt: skip
    found = {}
    for gpu in ("h100", "8xh100", "2xh100"):
        assert main([*words, gpu]) == 0
        found[gpu] = json.loads(capsys.readouterr().out)
    assert max(run["gpus"] for run in found["h100"]["runs"]) == 8
    assert max(run["gpus"] for run in found["2xh100"]["runs"]) == 2
    for gpu, count in (("8xh100", 8), ("2xh100", 2)):
        hours = found[gpu]["gpu_seconds"] / count
        assert hours <= found[gpu]["seconds"] < 2.2 * hours, "no more GPUs at a time than were named"
    assert main(["study", "ladder", "--preset", "paper", "--dry-run", "--gpu", "2xh100",
                 "--gpus-per-run", "4"]) == 2  # fmt: skip
    assert "is more than --gpu 2xh100 has" in " ".join(capsys.readouterr().err.split())


def test_preset_with_other_fields() -> None:
    assert load_preset("tiny+context=128").context == 128
    assert load_preset("tiny+context=128").name == "tiny+context=128"
    assert load_preset("tiny+seeds=[0, 1]").seeds == (0, 1)
    with pytest.raises(UsageError, match="no field 'contxt'"):
        load_preset("tiny+contxt=1")
