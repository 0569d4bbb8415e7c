"""Steps on the fast path, and rehearsed ones, change weights exactly as plain steps do."""

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
from steepen.model.init import materialise, on_meta
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.training.gradient_accumulation import GradientAccumulator
from steepen.training.train_step import TrainStep, warm_up

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=40)
DEFAULT = OptimizerConfig()
CHOICES = [DEFAULT, OptimizerConfig(neuron_norm=True), OptimizerConfig(cautious_decay=True, clip=0.5)]


def make(fast: bool, graphs: bool = False, choice: OptimizerConfig = DEFAULT) -> TrainStep:
    arm = ARMS["untied-2"]
    network = materialise(on_meta(arm.shape(4, SCALE), arm), dtype=torch.float64, embedding_std=0.3)
    if fast:
        install_fused_gpu(network, partial(FusedLinear, dtype=torch.float64))
    optimizer = Optimizer(
        network.named_parameters(), replace(recipe_of(arm).base, learning_rate=0.05), choice, network.refresh
    )
    return TrainStep(
        network, optimizer, GradientAccumulator(network, 4, 2, print), cuda_graphs=graphs, say=print
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def run(stepper: TrainStep, steps: int) -> list[Tensor]:
    losses = [stepper(*batch(step % 2), 2, 1 - step / 20)[0] for step in range(steps)]
    assert losses[-1] < losses[0] - 0.3  # it learns: a step that changed nothing would show
    return [*losses, *(p.detach() for p in stepper.network.parameters())]


def test_fast_steps_equal_plain_ones() -> None:
    for one, two in zip(run(make(fast=True), 12), run(make(fast=False), 12), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("done", [0, 3])
def test_a_rehearsal_leaves_no_trace(
    done: int, choice: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainStep, "_capture", lambda *_: None)  # capture needs a GPU
    rehearsed, other = make(fast=True, graphs=True, choice=choice), make(fast=True, choice=choice)
    for stepper in (rehearsed, other):
        for step in range(done):
            stepper(*batch(step), 2, 1.0)
    rehearsed.warmup_and_capture(*batch(7), 2)
    for one, two in zip(run(rehearsed, 12), run(other, 12), strict=True):
        assert torch.equal(one, two)


def test_warming_up_leaves_no_trace_and_has_the_optimizers_kernels_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed, other = make(fast=True), make(fast=True)
    calls: list[str] = []
    monkeypatch.setattr(warmed.optimizer, "warm_up", lambda: calls.append("optimizer"))
    spec: Any = SimpleNamespace(batch_sequences=4, shape=warmed.network.shape)
    warm_up(warmed, spec, 2, calls.append)
    assert calls[0] == "optimizer" and calls[1].startswith("kernels ready in")
    for one, two in zip(run(warmed, 12), run(other, 12), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("at", [3, 4])
def test_memory_that_runs_out_while_recording_leaves_plain_steps(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first micro-batch of the recording or in the second, when it has made gradients already."""
    for name in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    recording, plain = make(fast=True, graphs=True), make(fast=True)
    forward, calls = recording.network.forward, 0

    def full(*words: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:  # both micro-batches of the step fit; their repetition for the recording does not
            raise torch.OutOfMemoryError("no memory for a graph")
        return forward(*words, **options)

    monkeypatch.setattr(recording.network, "forward", full)
    said: list[str] = []
    monkeypatch.setattr(recording, "say", said.append)
    for stepper in (recording, plain):
        stepper(*batch(0), 2, 1.0)
    assert recording.accumulator.micro_batch == 2 and not recording.cuda_graphs and not recording.captured
    assert len(said) == 1 and "no memory for a graph" in said[0]
    for one, two in zip(run(recording, 12), run(plain, 12), strict=True):
        assert torch.equal(one, two)
