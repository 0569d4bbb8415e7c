"""Fixtures for tests of runs: small specs, a store, a fake trainer, and launchers that use it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fake_trainer
from steepen.launch.base import Failure, LaunchContext, Outcome
from steepen.launch.local import LocalLauncher
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.utils.json_io import write_json

TRAINER = Path(fake_trainer.__file__)
Spec = Callable[..., RunSpec]


def make_spec(
    seed: int = 0,
    *,
    arm: str = "vanilla",
    depth: int = 2,
    steps: int = 6,
    identity: str = "d",
    **changes: Any,
) -> RunSpec:
    """A very small spec; its vocabulary fits a BPE of 300."""
    found = find_arm(arm)
    recipe = replace(recipe_of(found), batch_tokens=256, base_depth=depth)
    scale = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=384)
    rung = recipe.at_budget(found, depth, scale, tokens=256 * steps, rho=0.5 if found.passes.grows else None)
    spec = RunSpec.from_plan(rung, DataConfig(identity), validation_tokens=256, seed=seed)
    return replace(spec, **changes)


@pytest.fixture(scope="session")
def spec() -> Spec:
    """The function that makes specs."""
    return make_spec


@pytest.fixture(scope="session")
def trainer() -> ModuleType:
    """The module of the fake trainer; `record_of` makes the record that it would write."""
    return fake_trainer


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


@pytest.fixture
def context(tmp_path: Path, store: RunStore) -> LaunchContext:
    """A launch context that runs the fake trainer."""
    return LaunchContext(tmp_path, store, program=(str(TRAINER),))


@pytest.fixture
def local(context: LaunchContext) -> LocalLauncher:
    return LocalLauncher(context, 3)


class InstantLauncher:
    """Writes synthetic records at once and lists its seeds. 13 diverges, 14 runs out of memory."""

    slots = 2

    def __init__(self, store: RunStore, record_of: Callable[[RunSpec], Any]) -> None:
        self.store, self.record_of = store, record_of
        self.ran: list[int] = []

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        for spec in specs:
            self.ran.append(spec.seed)
            run = self.store.run(spec)
            if spec.seed == 13:
                failure: dict[str, Any] = {"kind": "Diverged", "message": "the loss is nan."}
                write_json(run.failure_file, failure)
                yield Outcome(spec, failure=Failure(**failure))
            elif spec.seed == 14:
                yield Outcome(spec, failure=Failure("OutOfMemory", "too large."))
            else:
                record = self.record_of(spec)
                write_json(run.spec_file, spec.to_dict())
                write_json(run.record_file, record.to_dict())
                yield Outcome(spec, record=record)


@pytest.fixture
def instant(store: RunStore, trainer: ModuleType) -> InstantLauncher:
    return InstantLauncher(store, trainer.record_of)
