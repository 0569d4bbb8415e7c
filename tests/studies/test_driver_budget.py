"""Studies with a budget: which runs are made, and what the error says about the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

import pytest

from steepen.launch.batch_progress import BatchProgress
from steepen.launch.cost_estimate import Budget, BudgetReached, Speed
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory, RunStore
from steepen.studies.driver.drive import drive

Spec = Callable[..., RunSpec]


Study = Generator[list[RunSpec], Any, Any]


def seeds_of(*batches: list[int], spec: Spec) -> Study:
    """Batches of seeds, whatever comes out; returns what came."""
    found: list[Any] = []
    for batch in batches:
        found += yield [spec(seed) for seed in batch]
    return found


def test_a_flops_budget_stops_before_the_run_that_exceeds_it(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    cost = expected_flops(spec(1))
    with pytest.raises(BudgetReached) as error:
        drive(seeds_of([1, 2, 3, 4], spec=spec), store, instant, budget=Budget(flops=2.5 * cost))
    assert instant.ran == [1, 2] and "2 runs are left" in str(error.value)
    assert error.value.exit_code == 3
    # What is finished costs nothing; the same call goes on.
    found = drive(seeds_of([1, 2, 3, 4], spec=spec), store, instant, budget=Budget(flops=2.5 * cost))
    assert instant.ran == [1, 2, 3, 4] and len(found) == 4


def test_a_time_budget_stops_before_the_run_that_exceeds_it(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    slow = Speed((), expected_flops(spec(1)) / 100, "assumed")  # a run takes 100 s and the start
    progress = BatchProgress(store, speed=slow, quiet=True)
    with pytest.raises(BudgetReached):
        drive(seeds_of([1], spec=spec), store, instant, budget=Budget(seconds=60), progress=progress)
    assert instant.ran == []
    drive(seeds_of([1], spec=spec), store, instant, budget=Budget(seconds=600), progress=progress)
    assert instant.ran == [1]


def test_a_run_with_a_checkpoint_costs_only_its_remaining_flops(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    wanted = spec(1, steps=10)
    (store.run(wanted).checkpoints / "00000006").mkdir(parents=True)
    budget = Budget(flops=0.5 * expected_flops(wanted))

    def study() -> Study:
        return (yield [wanted])

    drive(study(), store, instant, budget=budget)
    assert budget.spent == pytest.approx(0.4 * expected_flops(wanted))


def asks(*specs: RunSpec) -> Generator[list[RunSpec], Any, Any]:
    return (yield list(specs))


def sizes(spec: Spec) -> list[RunSpec]:
    """Four runs, the largest first, as studies ask for them; the seed is the size."""
    return [spec(size, steps=2 * size) for size in (40, 30, 2, 1)]


def test_smaller_runs_are_made_after_one_that_exceeds_the_flops_budget(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    budget = Budget(flops=1.1 * expected_flops(specs[1]))
    with pytest.raises(BudgetReached, match="3 runs of this batch were made, 1 run is left") as error:
        drive(asks(*specs), store, instant, budget=budget)
    assert instant.ran == [30, 2, 1]
    # The largest never fits: the same budget will not do, and what would is said.
    assert "command continues" not in str(error.value) and "raise `budget`" in str(error.value)


def test_smaller_runs_are_made_after_one_that_exceeds_the_time_budget(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    slow = Speed((), expected_flops(specs[-1]) / 10, "assumed")  # ten seconds per size, and the start
    progress = BatchProgress(store, speed=slow, quiet=True)
    with pytest.raises(BudgetReached, match="1 run of this batch was made, 1 run is left"):
        drive(asks(*specs[1:3]), store, EagerLauncher(instant), budget=Budget(seconds=60), progress=progress)
    assert instant.ran == [2]


@pytest.mark.parametrize(("slots", "made"), [(1, 1), (2, 2), (9, 3)])
def test_a_time_budget_counts_the_wait_of_runs_that_are_set_up_ahead(
    slots: int, made: int, instant: Any, store: RunStore, spec: Spec
) -> None:
    slow = Speed((), expected_flops(spec(seed=1)) / 40, "assumed")  # forty seconds a run, and the start
    progress = BatchProgress(store, speed=slow, quiet=True)
    study = seeds_of([1, 2, 3], spec=spec)
    launcher = EagerLauncher(instant, slots)
    if made == 3:
        drive(study, store, launcher, budget=Budget(seconds=70), progress=progress)
    else:
        with pytest.raises(BudgetReached, match=f"{made} runs? of this batch"):
            drive(study, store, launcher, budget=Budget(seconds=70), progress=progress)
    assert len(instant.ran) == made


class EagerLauncher:
    """Takes all specs before the first run ends, so that no speed is measured when the last is chosen."""

    def __init__(self, launcher: Any, slots: int = 9) -> None:
        self.launcher, self.slots = launcher, slots

    def launch(self, specs: Any) -> Any:
        return self.launcher.launch(list(specs))


def test_a_run_is_made_once_the_measured_speed_shows_that_it_fits(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    slow = Speed((), expected_flops(specs[-1]) / 10, "assumed")
    progress = BatchProgress(store, speed=slow, quiet=True)
    drive(asks(*specs), store, instant, budget=Budget(seconds=120), progress=progress)
    assert instant.ran == [2, 40, 30, 1]  # all of a record take two seconds


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_flops_budget_too_small_for_any_run_names_a_sufficient_one(
    share: float, instant: Any, store: RunStore, spec: Spec
) -> None:
    specs = sizes(spec)
    budget = Budget(flops=share * expected_flops(specs[-1]))
    with pytest.raises(BudgetReached) as error:
        drive(asks(*specs), store, instant, budget=budget)
    said = str(error.value)
    assert instant.ran == [] and "0 runs of this batch were made, 4 runs are left" in said
    assert "command continues" not in said and error.value.exit_code == 3
    needed = re.search(r"the smallest needs (\S+) FLOPs; raise `budget`", said)
    assert needed is not None
    with pytest.raises(BudgetReached):
        drive(asks(*specs), store, instant, budget=Budget.parse(needed[1]))
    assert instant.ran == [1]


def test_a_time_budget_too_small_for_any_run_names_a_sufficient_one(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    # 6 s by the estimate, and something is gone already when the first run is chosen.
    one = spec(1)
    progress = BatchProgress(store, speed=Speed((), expected_flops(one), "assumed"), quiet=True)
    with pytest.raises(BudgetReached, match="the smallest needs 7 s; raise `budget`"):
        drive(asks(one), store, instant, budget=Budget(seconds=6), progress=progress)
    assert instant.ran == []


def test_the_same_command_continues_after_the_budget_is_reached(
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


def test_the_eta_counts_a_run_set_up_ahead_as_waiting(
    store: RunStore, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec(1), spec(2)]
    monkeypatch.setattr(RunDirectory, "busy", lambda _: True)
    speed = Speed((), expected_flops(specs[0]) / 55, "assumed")  # 60 s a run with its start
    etas: list[str] = []
    for slots in (1, 2):
        progress = BatchProgress(store, speed=speed, quiet=True)
        progress.start_batch(specs, specs, slots)
        for one in specs:
            progress.run_started(one)
        etas.append(progress.summary())
    assert etas == ["0/2 runs done, 2 running, ETA 2 min", "0/2 runs done, 2 running, ETA 1 min"]
