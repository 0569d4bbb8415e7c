"""CUDA graphs on several ranks (imitated): forward and backward are replayed, the exchange is not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from steepen.data import Dataset
from steepen.distributed.world import World
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore, read_metrics
from steepen.training import run as training_run
from steepen.training import trainer
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import TrainStep

OPTIONS = TrainOptions(device="cpu", quiet=True, micro_batch=2)
replays: list[Hashable] = []


@dataclass
class ImitatedGraph:
    """Runs the captured function again and writes into the tensors of the capture, as a graph does."""

    key: Hashable
    function: Callable[..., tuple[Tensor, ...]]
    step: TrainStep

    def replay(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        replays.append(self.key)
        outputs = self.function(*inputs)
        for parameter, static in self.step.written[int(self.key)]:  # pyright: ignore[reportArgumentType]
            assert parameter.grad is not None
            static.copy_(parameter.grad)
            parameter.grad = None
        return tuple(output.clone() for output in outputs)


class ImitatedGraphs:
    """Stands in for `CudaGraphCache`."""

    def __init__(self, step: TrainStep) -> None:
        self.step, self.graphs = step, dict[Hashable, ImitatedGraph]()

    def get(self, key: Hashable) -> ImitatedGraph | None:
        return self.graphs.get(key)

    def capture(self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        function(*inputs)
        self.graphs[key] = ImitatedGraph(key, function, self.step)

    def clear(self) -> None:
        self.graphs.clear()


def run(world: World, spec: RunSpec, data: Dataset, store: Path, graphs: bool) -> list[Hashable]:
    replays.clear()
    if graphs:
        original_mode, original_init = trainer.execution_mode, TrainStep.__init__

        def with_graphs(*arguments: Any) -> Any:
            return replace(original_mode(*arguments), cuda_graphs=True)

        def imitate(self: TrainStep, *arguments: Any, **options: Any) -> None:
            original_init(self, *arguments, **options)
            self.captured = ImitatedGraphs(self)  # pyright: ignore[reportAttributeAccessIssue]

        trainer.execution_mode = with_graphs
        TrainStep.__init__ = imitate
    training_run.train(spec, data, RunStore(store), OPTIONS, world=world)
    return list(replays)


def run_where_one_rank_cannot_capture(world: World, spec: RunSpec, data: Dataset, store: Path) -> int:
    if world.rank == 1:

        def fail(self: ImitatedGraphs, *arguments: Any) -> None:
            raise RuntimeError("not enough memory for a graph")

        ImitatedGraphs.capture = fail  # pyright: ignore[reportAttributeAccessIssue]
    return len(run(world, spec, data, store, graphs=True))


def test_ranks_go_on_without_graphs_where_one_cannot_capture(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("vanilla", steps=4)
    assert on_ranks(2, run_where_one_rank_cannot_capture, spec, tiny_data, tmp_path) == [0, 0]


def losses(store: Path, spec: RunSpec) -> list[float]:
    return [line["loss"] for line in read_metrics(RunStore(store).run(spec).metrics_file) if "loss" in line]


@pytest.mark.parametrize("arm", ["untied-grow", "random-loop-grow"])
def test_replayed_gradients_give_the_losses_of_eager_steps(
    arm: str, make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec(arm, steps=8)
    assert run(World(), spec, tiny_data, tmp_path / "eager", graphs=False) == []
    found = on_ranks(2, run, spec, tiny_data, tmp_path / "graphs", True)
    passes = {line["passes"] for line in read_metrics(RunStore(tmp_path / "eager").run(spec).metrics_file)
              if "loss" in line}  # fmt: skip
    # Every step but the first of each number of passes, after growth too, is a replay.
    assert found[0] == found[1] and spec.steps - len(found[0]) <= 2 * len(passes) and found[0]
    torch.testing.assert_close(
        losses(tmp_path / "graphs", spec), losses(tmp_path / "eager", spec), rtol=0, atol=2e-5
    )
