"""The number of ranks is no part of a run: same losses, checkpoints that any number of ranks can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranks import on_ranks
from steepen.data import Dataset
from steepen.distributed.world import World
from steepen.optim.config import OptimizerConfig
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.training.signals import StopSignals
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import train

TOLERANCE = 5e-7
# The same micro-batches on any number of ranks up to four: their sums then differ in the last bits of fp64.
OPTIONS = TrainOptions(device="cpu", quiet=True, micro_batch=2, checkpoint_every=4, validate_every=5)
ARMS = ("vanilla", "loop-2", "untied-grow", "random-loop-grow")
MakeSpec = Callable[..., RunSpec]


def losses(store: Path, spec: RunSpec) -> list[float]:
    """Training and validation losses that a run has logged, in order."""
    lines = (store / spec.hash / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return [value.get("loss", value.get("validation_loss")) for value in values]


def train_all(world: World, specs: list[RunSpec], data: Dataset, store: Path, options: TrainOptions) -> None:
    """Train runs one after another, on the ranks of a world."""
    for spec in specs:
        train(spec, data, RunStore(store), options, world=world)


def difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of runs that one process has trained."""
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("size", [2, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(
    size: int, make_spec: MakeSpec, tiny_data: Dataset, alone: Path, tmp_path: Path
) -> None:
    specs = [make_spec(arm, optimizer=OptimizerConfig.named("authors")) for arm in ARMS]
    specs += [
        make_spec("untied-grow", optimizer=OptimizerConfig(kind="adamw", clip=0.5)),
        make_spec("untied-grow", optimizer=OptimizerConfig(clip=0.5, growth_state="copy")),
    ]
    train_all(World(), specs, tiny_data, alone, OPTIONS)
    on_ranks(size, train_all, specs, tiny_data, tmp_path, OPTIONS)
    for spec in specs:
        apart = difference(losses(alone, spec), losses(tmp_path, spec))
        assert apart <= TOLERANCE, f"{spec.arm.name}: {apart:.1e} at {size} ranks"
        record = RunStore(tmp_path).record(spec)
        assert record is not None and record.hardware["ranks"] == size


@pytest.mark.parametrize("size", [2, 4])
def test_full_sharding_gives_the_same_losses(
    size: int, make_spec: MakeSpec, tiny_data: Dataset, alone: Path, tmp_path: Path
) -> None:
    specs = [make_spec(arm, optimizer=OptimizerConfig.named("authors")) for arm in ARMS]
    reference = replace(OPTIONS, fused=False)
    train_all(World(), specs, tiny_data, alone / "reference", reference)
    on_ranks(size, train_all, specs, tiny_data, tmp_path, replace(reference, shard="full"))
    for spec in specs:
        apart = difference(losses(alone / "reference", spec), losses(tmp_path, spec))
        assert apart <= TOLERANCE, f"{spec.arm.name}: {apart:.1e} at {size} ranks"


def stop_at(step: int) -> Callable[..., None]:
    """A replacement of the trainer's agreement that makes every rank see SIGTERM after a step."""

    def agree(self: Any, signal: int, overdue: bool, affordable: bool) -> tuple[int, bool, bool]:
        return (15 if self.step == step else 0), overdue, affordable

    return agree  # pyright: ignore[reportReturnType]


def train_until(world: World, step: int, spec: RunSpec, data: Dataset, store: Path) -> None:
    """Train a run to a step, at which every rank is told to stop."""
    from steepen.training.signals import Interrupted
    from steepen.training.trainer import Trainer

    original = Trainer._agree
    Trainer._agree = stop_at(step)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with pytest.raises(Interrupted):
            train(spec, data, RunStore(store), replace(OPTIONS, micro_batch=1), world=world)
    finally:
        Trainer._agree = original


# Before growth, at it, after it.
@pytest.mark.parametrize(("stop", "size"), [(3, 1), (3, 8), (6, 2), (9, 1), (9, 2), (9, 8)])
def test_run_saved_on_four_ranks_resumes_on_others(
    stop: int, size: int, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, alone: Path
) -> None:
    spec = make_spec("untied-grow", seed=7, optimizer=OptimizerConfig.named("authors"))
    options = replace(OPTIONS, micro_batch=1)
    train_all(World(), [spec], tiny_data, alone, options)
    on_ranks(4, train_until, stop, spec, tiny_data, tmp_path)
    (saved,) = [path for path in (tmp_path / spec.hash / "checkpoints").iterdir() if int(path.name) == stop]
    assert len(list(saved.glob("*.safetensors"))) == 4
    on_ranks(size, train_all, [spec], tiny_data, tmp_path, options)
    assert difference(losses(alone, spec), losses(tmp_path, spec)) <= TOLERANCE


def test_stop_signal_of_one_rank_stops_all_at_the_same_step(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("vanilla")

    def run(world: World) -> int:
        from steepen.training.signals import Interrupted

        def listening(self: StopSignals) -> Any:
            import contextlib

            self.signal = 15 if world.rank == 1 else None
            return contextlib.nullcontext()

        StopSignals.listening = listening
        with pytest.raises(Interrupted) as stopped:
            train(spec, tiny_data, RunStore(tmp_path), OPTIONS, world=world)
        assert stopped.value.exit_code == 143
        return world.step

    steps = on_ranks(2, run)
    assert steps[0] == steps[1] == 2
    assert [int(path.name) for path in (tmp_path / spec.hash / "checkpoints").iterdir()] == [2]
