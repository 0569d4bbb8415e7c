"""The number of ranks is no part of a run: same losses, checkpoints that any number of ranks can read."""

from __future__ import annotations

import json
import shutil
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
from steepen.runs.trunk import share
from steepen.training.run import train
from steepen.training.stopping import StopSignals
from steepen.training.train_options import TrainOptions

TOLERANCE = 5e-7
# The same micro-batches on any number of ranks up to four: their sums then differ in the last bits of fp64.
OPTIONS = TrainOptions(device="cpu", quiet=True, micro_batch=2, checkpoint_every=4, validate_every=5)
MakeSpec = Callable[..., RunSpec]


def losses(store: Path, spec: RunSpec) -> list[float]:
    """Training and validation losses that a run has logged, in order."""
    lines = (store / spec.hash / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    kinds = ("loss", "validation_loss", "growth_loss_after")
    return [next(value[kind] for kind in kinds if kind in value) for value in values]


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


AUTHORS = OptimizerConfig.named("authors")
# Growth on four ranks; on two the other arms and optimizers too. tests/distributed/all_arms.py has every arm.
GROWING = [("untied-grow", AUTHORS), ("random-loop-grow", AUTHORS)]
OTHERS = [
    ("vanilla", AUTHORS),
    ("loop-2", AUTHORS),
    ("untied-2+experts=4+kv_heads=1+window=9", AUTHORS),
    ("vanilla+streams=2+parallel=true+activation=relu2", AUTHORS),
]
OTHER_OPTIMIZERS = [
    ("untied-grow", OptimizerConfig(kind="adamw", clip=0.5)),
    ("untied-grow", OptimizerConfig(clip=0.5, growth_state="copy")),
]


@pytest.mark.parametrize(
    ("size", "cases"), [(2, GROWING + OTHERS + OTHER_OPTIMIZERS), (4, GROWING)], ids=["2", "4"]
)
def test_losses_do_not_depend_on_the_number_of_ranks(
    size: int, cases: list[Any], make_spec: MakeSpec, tiny_data: Dataset, alone: Path, tmp_path: Path
) -> None:
    specs = [make_spec(arm, steps=6, optimizer=optimizer) for arm, optimizer in cases]
    train_all(World(), specs, tiny_data, alone, OPTIONS)
    on_ranks(size, train_all, specs, tiny_data, tmp_path, OPTIONS)
    for spec in specs:
        apart = difference(losses(alone, spec), losses(tmp_path, spec))
        assert apart <= TOLERANCE, f"{spec.arm.name}: {apart:.1e} at {size} ranks"
        record = RunStore(tmp_path).record(spec)
        assert record is not None and record.hardware["ranks"] == size


@pytest.mark.parametrize(("size", "cases"), [(2, OTHERS), (4, GROWING)], ids=["2", "4"])
def test_full_sharding_gives_the_same_losses(
    size: int, cases: list[Any], make_spec: MakeSpec, tiny_data: Dataset, alone: Path, tmp_path: Path
) -> None:
    specs = [make_spec(arm, steps=6, optimizer=optimizer) for arm, optimizer in cases]
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


STOPS = (2, 4, 6)  # before growth, at it, after it
RESUMED = replace(OPTIONS, micro_batch=1)


def train_with_stops(world: World, spec: RunSpec, data: Dataset, folder: Path) -> None:
    """Train a run; at each of the stops every rank is told to stop, and a copy of what is saved is kept."""
    from steepen.training.stopping import Interrupted
    from steepen.training.trainer import Trainer

    for stop in STOPS:
        Trainer._agree = stop_at(stop)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(Interrupted):
            train(spec, data, RunStore(folder / "runs"), RESUMED, world=world)
        world.barrier()
        if world.is_main:
            shutil.copytree(folder / "runs", folder / str(stop))
        world.barrier()


@pytest.fixture(scope="module")
def grown(make_spec: MakeSpec) -> RunSpec:
    return make_spec("untied-grow", steps=8, seed=7, optimizer=AUTHORS)


@pytest.fixture(scope="module")
def saved(grown: RunSpec, tiny_data: Dataset, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs directory of four ranks at each of the stops; `alone` has the whole run."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(4, train_with_stops, grown, tiny_data, folder)
    train_all(World(), [grown], tiny_data, alone, RESUMED)
    return folder


def resume_all(world: World, spec: RunSpec, data: Dataset, folder: Path) -> None:
    for stop in STOPS:
        train(spec, data, RunStore(folder / str(stop)), RESUMED, world=world)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_run_saved_on_four_ranks_resumes_on_others(
    size: int, grown: RunSpec, tiny_data: Dataset, saved: Path, alone: Path, tmp_path: Path
) -> None:
    for stop in STOPS:
        shutil.copytree(saved / str(stop), tmp_path / str(stop))
        checkpoints = (tmp_path / str(stop) / grown.hash / "checkpoints").iterdir()
        (newest,) = [path for path in checkpoints if int(path.name) == stop]
        assert len(list(newest.glob("*.safetensors"))) == 4
    on_ranks(size, resume_all, grown, tiny_data, tmp_path)
    for stop in STOPS:
        assert difference(losses(alone, grown), losses(tmp_path / str(stop), grown)) <= TOLERANCE, stop
        record = RunStore(tmp_path / str(stop)).record(grown)
        assert record is not None and record.resumed > 0


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4)])
def test_a_branch_starts_from_a_trunk_that_other_ranks_have_trained(
    sizes: tuple[int, int], make_spec: MakeSpec, tiny_data: Dataset, alone: Path, tmp_path: Path
) -> None:
    specs: list[RunSpec] = []
    for steps in (14, 8):
        spec = make_spec("untied-grow", steps=steps)
        hyper = replace(spec.hyperparameters, warmdown_fraction=0.25)
        specs.append(replace(spec, hyperparameters=hyper, data=replace(spec.data, pool_tokens=7_000)))
    share(RunStore(tmp_path), specs)
    for spec, size in zip(specs, sizes, strict=True):
        on_ranks(size, train_all, [spec], tiny_data, tmp_path, OPTIONS)
    train_all(World(), specs, tiny_data, alone, OPTIONS)
    for spec in specs:
        assert difference(losses(alone, spec), losses(tmp_path, spec)) <= TOLERANCE
    record = RunStore(tmp_path).record(specs[1])
    assert record is not None and (record.trunk, record.trunk_steps) == (specs[0].hash, 4)


def test_stop_signal_of_one_rank_stops_all_at_the_same_step(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("vanilla")

    def run(world: World) -> int:
        from steepen.training.stopping import Interrupted

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
