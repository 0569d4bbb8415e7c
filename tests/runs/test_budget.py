"""A budget makes the runs that fit and says when it never will; what is left is the same wherever told."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from steepen.launch.batch_progress import BatchProgress
from steepen.launch.budget import Budget, BudgetReached
from steepen.launch.cost_estimate import Speed
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import drive
from steepen.studies.driver.dry_run import study_status
from steepen.studies.driver.journal import Journal
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]


def asks(*specs: RunSpec) -> Generator[list[RunSpec], Any, Any]:
    return (yield list(specs))


def sizes(spec: Spec) -> list[RunSpec]:
    """Four runs, the largest first, as studies ask for them; the seed is the size."""
    return [spec(size, steps=2 * size) for size in (40, 30, 2, 1)]


def test_runs_that_fit_into_a_budget_are_made_behind_one_that_does_not(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    budget = Budget(flops=1.1 * expected_flops(specs[1]))
    with pytest.raises(BudgetReached, match="3 runs of this batch were made, 1 run is left") as error:
        drive(asks(*specs), store, instant, budget=budget)
    assert instant.ran == [30, 2, 1]
    # The largest never fits: the same budget will not do, and what would is said.
    assert "command continues" not in str(error.value) and "raise --budget" in str(error.value)


def test_runs_that_fit_into_the_time_are_made_behind_one_that_does_not(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    slow = Speed((), expected_flops(specs[-1]) / 10, "assumed")  # ten seconds per size, and the start
    progress = BatchProgress(store, speed=slow, quiet=True)
    with pytest.raises(BudgetReached, match="1 run of this batch was made, 1 run is left"):
        drive(asks(*specs[1:3]), store, SlowToTell(instant), budget=Budget(seconds=60), progress=progress)
    assert instant.ran == [2]


class SlowToTell:
    """Takes all specs before the first ends, so that nothing is measured yet when the last is chosen."""

    slots = 9

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher

    def launch(self, specs: Any) -> Any:
        return self.launcher.launch(list(specs))


def test_a_run_that_seemed_too_long_is_made_once_measured_speed_says_it_fits(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    slow = Speed((), expected_flops(specs[-1]) / 10, "assumed")
    progress = BatchProgress(store, speed=slow, quiet=True)
    drive(asks(*specs), store, instant, budget=Budget(seconds=120), progress=progress)
    assert instant.ran == [2, 40, 30, 1]  # all of a record take two seconds


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_budget_too_small_for_any_run_says_what_the_smallest_needs_and_that_is_enough(
    share: float, instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    budget = Budget(flops=share * expected_flops(specs[-1]))
    with pytest.raises(BudgetReached) as error:
        drive(asks(*specs), store, instant, budget=budget)
    said = str(error.value)
    assert instant.ran == [] and "0 runs of this batch were made, 4 runs are left" in said
    assert "command continues" not in said and error.value.exit_code == 3
    needed = re.search(r"the smallest needs (\S+) FLOPs; raise --budget", said)
    assert needed is not None
    with pytest.raises(BudgetReached):
        drive(asks(*specs), store, instant, budget=Budget.parse(needed[1]))
    assert instant.ran == [1]


def test_a_time_too_short_for_any_run_says_what_the_smallest_needs(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    # 6 s by the estimate, and something is gone already when the first run is chosen.
    one = spec(1)
    progress = BatchProgress(store, speed=Speed((), expected_flops(one), "assumed"), quiet=True)
    with pytest.raises(BudgetReached, match="the smallest needs 7 s; raise --budget"):
        drive(asks(one), store, instant, budget=Budget(seconds=6), progress=progress)
    assert instant.ran == []


def test_a_budget_that_only_ran_out_goes_on_with_the_same_command(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = [spec(1), spec(2)]
    for _ in range(2):
        budget = Budget(flops=1.5 * expected_flops(specs[0]))
        try:
            drive(asks(*specs), store, instant, budget=budget)
        except BudgetReached as error:
            assert "1 run of this batch was made, 1 run is left" in str(error)
            assert "the same command continues" in str(error)
    assert instant.ran == [1, 2]


def test_status_and_the_resumed_study_agree_on_what_is_left(
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
