"""Fused and warmed-up steps change the weights exactly as reference steps do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.arms import ARMS
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.training.train_step import GradientAccumulator, TrainStep, warm_up

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=40)
DEFAULT = OptimizerConfig()
CONFIGS = [
    DEFAULT,
    OptimizerConfig.named("muon"),
    OptimizerConfig.named("normuon"),
    OptimizerConfig(cautious_decay="all", clip=0.5),
]


def make(fused: bool, graphs: bool = False, config: OptimizerConfig = DEFAULT) -> TrainStep:
    arm = ARMS["untied-2"]
    network = materialize(build_on_meta(arm.shape(4, SCALE), arm), dtype=torch.float64, embedding_std=0.3)
    if fused:
        install_fused_gpu(network, partial(FusedLinear, dtype=torch.float64))
    optimizer = Optimizer(
        network.named_parameters(), replace(recipe_of(arm).base, learning_rate=0.05), config, network.refresh
    )
    return TrainStep(
        network, optimizer, GradientAccumulator(network, 4, 2, print), cuda_graphs=graphs, print_message=print
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def run(stepper: TrainStep, steps: int) -> list[Tensor]:
    losses = [stepper(*batch(step % 2), 2, 1 - step / 20)[0] for step in range(steps)]
    assert losses[-1] < losses[0] - 0.3  # it learns: a step that changed nothing would show
    return [*losses, *(p.detach() for p in stepper.network.parameters())]


def test_fused_steps_equal_reference_steps() -> None:
    for one, two in zip(run(make(fused=True), 12), run(make(fused=False), 12), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("done", [0, 3])
def test_warm_up_and_capture_leave_the_state_unchanged(
    done: int, config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainStep, "_capture", lambda *_: None)  # capture needs a GPU
    warmed, other = make(fused=True, graphs=True, config=config), make(fused=True, config=config)
    for stepper in (warmed, other):
        for step in range(done):
            stepper(*batch(step), 2, 1.0)
    warmed.warmup_and_capture(*batch(7), 2)
    for one, two in zip(run(warmed, 12), run(other, 12), strict=True):
        assert torch.equal(one, two)


def test_warm_up_leaves_the_state_unchanged_and_compiles_optimizer_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed, other = make(fused=True), make(fused=True)
    calls: list[str] = []
    monkeypatch.setattr(warmed.optimizer, "warm_up", lambda: calls.append("optimizer"))
    spec: Any = SimpleNamespace(batch_tokens=4 * warmed.network.shape.context)
    warm_up(warmed, spec, 2, calls.append)
    assert calls[0] == "optimizer" and calls[1].startswith("kernels ready in")
    for one, two in zip(run(warmed, 12), run(other, 12), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("at", [3, 4])
def test_out_of_memory_during_capture_falls_back_to_uncaptured_steps(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first captured micro-batch, or in the second, when gradients exist already."""
    for name in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    captured, eager = make(fused=True, graphs=True), make(fused=True)
    forward, calls = captured.network.forward, 0

    def full(*words: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:  # both micro-batches of the step fit; their repetition for the capture does not
            raise torch.OutOfMemoryError("no memory for a graph")
        return forward(*words, **options)

    monkeypatch.setattr(captured.network, "forward", full)
    messages: list[str] = []
    monkeypatch.setattr(captured, "print_message", messages.append)
    for stepper in (captured, eager):
        stepper(*batch(0), 2, 1.0)
    assert captured.accumulator.micro_batch == 2 and not captured.cuda_graphs and not captured.captured
    assert len(messages) == 1 and "no memory for a graph" in messages[0]
    for one, two in zip(run(captured, 12), run(eager, 12), strict=True):
        assert torch.equal(one, two)
