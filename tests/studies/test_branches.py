"""Sweeps whose runs share first steps: trained once by any launcher, counted once, killed at any moment."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from run_fixtures import InstantLauncher, Spec
from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.launch.base import Outcome
from steepen.launch.cost_estimate import Budget, BudgetReached, Speed
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.cells import measure
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.drive import drive
from steepen.studies.driver.dry_run import dry_run
from steepen.studies.driver.journal import Journal
from steepen.studies.driver.study_status import study_status
from steepen.studies.preset import RecipeOverride, load_preset
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from training_fixtures import assert_same_result, prepare_words


@dataclass
class InProcess:
    """Trains in this process and notes the order; `slots` specs are taken before the first is trained."""

    data: Dataset
    store: RunStore
    slots: int = 1
    order: list[list[int]] = field(default_factory=list[list[int]])

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        self.order.append([])
        iterator = iter(specs)
        while taken := list(itertools.islice(iterator, self.slots)):
            for spec in taken:
                self.order[-1].append(spec.steps)
                options = TrainOptions(device="cpu", quiet=True, checkpoint_every=4)
                yield Outcome(spec, record=train(spec, self.data, self.store, options))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare_words(tmp_path_factory.mktemp("words"), documents=600, val_tokens=1_000, seed=1)


def small_context(data: Dataset, branches: float | None = 0.25) -> StudyContext:
    changes = {"learning_rate": 0.1, "warmup_steps": 2}
    preset = replace(
        load_preset("tiny"), context=16, batch_tokens=64, validation_tokens=512, branches=branches,
        pool="prefix",
        recipes=(RecipeOverride("all", changes), RecipeOverride("untied-grow", {"rho": 0.4})),
    )  # fmt: skip
    facts = DatasetInfo(
        data.identity, data.padded_vocabulary, len(data.tokens("train")), len(data.tokens("val"))
    )
    return StudyContext(preset, facts)


def specs_of(context: StudyContext, steps: Sequence[int] = (16, 20, 24, 28)) -> list[RunSpec]:
    from steepen.model.arms import find_arm

    arm = find_arm("untied-grow")
    recipe = context.constant_recipe(arm)
    runs = [
        recipe.at_budget(arm, 3, context.size_rule, tokens=64 * count, rho=rho)
        for count in steps
        for rho in (0.2, 0.4)
    ]
    asked = next(measure(context, [(run, {}) for run in runs], branches=True))
    return list(asked)


def sweep(specs: Sequence[RunSpec]) -> Generator[Sequence[RunSpec], Any, list[RunRecord]]:
    return (yield specs)


def test_a_preset_without_branches_asks_for_the_runs_of_before(data: Dataset) -> None:
    context = small_context(data, None)
    for spec in specs_of(context):
        assert spec.data.pool == "prefix" and spec.trunk is None
        assert spec.hyperparameters.warmdown_fraction == 1.0
    with pytest.raises(UsageError, match="branches"):
        load_preset("tiny+branches=1.5")
    with pytest.raises(UsageError, match="wsd"):
        load_preset("tiny+branches=0.2+lr_schedule={name: cosine}")


def test_a_sweep_is_counted_as_spent_and_as_if_alone(data: Dataset, tmp_path: Path) -> None:
    specs, store = specs_of(small_context(data)), RunStore(tmp_path / "runs")
    assert len({spec.trunk for spec in specs}) == 1
    forecast = dry_run(lambda: sweep(specs), store, Speed((), 1e9, "assumed"), 2)
    alone = sum(map(expected_flops, specs))
    assert forecast.flops < 0.7 * alone == pytest.approx(0.7 * (forecast.flops + forecast.shared_flops))
    launcher, journal = (
        InProcess(data, store, slots=2),
        Journal.open(tmp_path / "studies", "sweep", {}, store.root),
    )
    records = drive(sweep(specs), store, launcher, journal=journal)
    # The run that branches off last comes first and alone; then all others at once.
    assert [len(wave) for wave in launcher.order] == [1, 7] and launcher.order[0] == [28]
    assert sum(record.flops for record in records) == pytest.approx(alone)
    spent = sum(record.spent_flops for record in records)
    assert spent == pytest.approx(forecast.flops)
    status = study_status(Journal.read(tmp_path / "studies" / "sweep"))
    assert (status.flops_done, status.flops_left) == (pytest.approx(spent), 0)
    assert status.flops_shared == pytest.approx(alone - spent)
    rows = store.rows()
    trunks = {row.more["trunk"] for row in rows}
    assert len(trunks) == 1 and sum(row.more["spent_flops"] for row in rows) == pytest.approx(spent)
    assert not dry_run(lambda: sweep(specs), store, Speed((), 1e9, "assumed"), 2).runs


def test_status_of_a_sweep_under_way_counts_no_step_twice(data: Dataset, tmp_path: Path) -> None:
    specs, store = specs_of(small_context(data)), RunStore(tmp_path / "runs")
    forecast = dry_run(lambda: sweep(specs), store, Speed((), 1e9, "assumed"), 2)
    journal = Journal.open(tmp_path / "studies", "sweep", {}, store.root)
    first = max(map(expected_flops, specs))
    with pytest.raises(BudgetReached):
        drive(sweep(specs), store, InProcess(data, store), journal=journal, budget=Budget(flops=1.05 * first))
    status = study_status(Journal.read(tmp_path / "studies" / "sweep"))
    total = status.flops_done + status.flops_left
    # Steps before growth are cheaper than those after, and what is left is counted by steps.
    assert status.flops_done > 0 and total == pytest.approx(forecast.flops, rel=0.35)
    assert total + status.flops_shared == pytest.approx(sum(map(expected_flops, specs)))


def test_a_trunk_that_leaves_no_checkpoint_or_does_not_fit_holds_no_one_for_ever(
    spec: Spec, store: RunStore, instant: InstantLauncher
) -> None:
    base = spec(steps=6)
    data = replace(base.data, pool_tokens=7_000)
    hyper = replace(base.hyperparameters, warmdown_fraction=0.3, warmup_steps=1)
    specs = [replace(base, steps=steps, data=data, hyperparameters=hyper) for steps in (6, 8, 12)]
    assert specs[0].trunk == specs[2].trunk is not None
    tight = Budget(flops=0.5 * expected_flops(specs[-1]))
    with pytest.raises(BudgetReached, match=r"too small"):
        drive(sweep(specs), store, instant, budget=tight)
    assert not instant.ran
    assert len(drive(sweep(specs), store, instant)) == len(instant.ran) == 3


def in_a_child(work: Any) -> int:
    """Fork a driver; torch is imported already, so that it starts at once."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_sweep_killed_at_ten_random_moments_equals_separate_runs(data: Dataset, tmp_path: Path) -> None:
    specs, choose = specs_of(small_context(data), (16, 24)), random.Random(20261118)
    alone, disturbed = RunStore(tmp_path / "alone"), RunStore(tmp_path / "disturbed")
    began = time.monotonic()
    for one in specs:
        drive(sweep([one]), alone, InProcess(data, alone))
    whole = time.monotonic() - began

    def work() -> list[RunRecord]:
        return drive(sweep(specs), disturbed, InProcess(data, disturbed))

    kills = 0
    for _ in range(10):
        child = in_a_child(work)
        time.sleep(choose.uniform(0.01, 0.12) * whole)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
    assert kills >= 4
    records = work()
    for one in specs:
        assert_same_result(alone, disturbed, one)
    assert sum(record.trunk != "" for record in records) == len(specs) - 1
    spent = sum(record.spent_flops for record in records)
    assert spent < 0.8 * sum(record.flops for record in records)


def test_runs_of_one_trunk_are_clustered_by_the_fits(data: Dataset, tmp_path: Path) -> None:
    from steepen.laws.ladder import read_ladders
    from steepen.tables.table import table_from

    columns: dict[str, Sequence[Any]] = {
        "arm": ["a"] * 4, "flops": [1e18, 2e18, 4e18, 8e18], "loss": [3.0, 2.8, 2.7, 2.6],
        "run": ["p", "q", "r", "s"], "trunk": ["p", "p", "r", "s"],
    }  # fmt: skip
    assert read_ladders(table_from(columns))["a"].clusters == ("p", "p", "r", "s")
    del columns["trunk"]
    assert read_ladders(table_from(columns))["a"].clusters == ("p", "q", "r", "s")
