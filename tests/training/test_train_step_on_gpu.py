"""On a GPU, optimizer steps replayed as CUDA graphs equal steps launched kernel by kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grown_networks import grow
from steepen.execution.select import apply_execution_mode
from steepen.model.arms import ARMS
from steepen.model.config import ModelOptions, StreamPrecision
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.training.device import configure_backends
from steepen.training.train_step import GradientAccumulator, TrainStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCALE = SizeRule(aspect=64, head_dim=64, mlp_multiple=64, context=256, vocabulary=1024)


def build(name: str, stream: StreamPrecision = "bf16") -> Network:
    arm, options = ARMS[name], ModelOptions(residual_stream=stream)
    bare = build_on_meta(arm.shape(6, SCALE), arm, options=options)
    network = materialize(bare, "cuda", embedding_std=0.2, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in network.parameters():  # some weights are initialized to zero
        scale = 0.5 * parameter.shape[-1] ** -0.5
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return network


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(0, 1024, (4, 257), generator=generator, device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_step(
    name: str, *, cuda_graphs: bool, precision: str = "bf16", stream: StreamPrecision = "bf16"
) -> TrainStep:
    network = build(name, stream)
    apply_execution_mode(network, precision, fused=True, compiled=False)
    hyperparameters = replace(recipe_of(network.arm).base, learning_rate=3e-3)
    optimizer = Optimizer(network.named_parameters(), hyperparameters, OptimizerConfig(), network.refresh)
    accumulator = GradientAccumulator(network, 4, 2, pytest.fail)
    return TrainStep(network, optimizer, accumulator, cuda_graphs=cuda_graphs, print_message=pytest.fail)


@pytest.mark.parametrize(("precision", "stream"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp8", "fp32")])
@pytest.mark.parametrize("name", ["untied-2", "loop-2"])
def test_replayed_steps_equal_launched_steps_through_growth(
    name: str, precision: str, stream: StreamPrecision
) -> None:
    """Compares losses and gradient norms of 30 steps; passes and learning rate change, the network grows."""
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8 tensor cores")
    measured: dict[bool, list[float]] = {}  # by use of CUDA graphs: loss and norm of every step
    with configure_backends(torch.device("cuda")):
        for cuda_graphs in (False, True):
            train_step = make_step(name, cuda_graphs=cuda_graphs, precision=precision, stream=stream)
            values: list[float] = []
            for step in range(30):
                if step == 20:
                    sources = grow(train_step.network, 4)
                    assert isinstance(train_step.optimizer, Optimizer)
                    train_step.optimizer.grow(train_step.network.named_parameters(), sources)
                    train_step.reset()
                passes = (2, 1, 2, 2)[step % 4] if step < 20 else 4
                loss, norm = train_step(*batch(step % 3), passes, 1.0 - step / 60)
                values += [loss.item(), norm.item()]
            assert len(train_step.captured) == (1 if cuda_graphs else 0)
            measured[cuda_graphs] = values
    assert measured[False][-2] < measured[False][0] - 0.1  # the loss falls, so a wrong step would show
    # Summation order differs, and 30 steps amplify the rounding errors.
    replayed, launched = torch.tensor(measured[True]), torch.tensor(measured[False])
    torch.testing.assert_close(replayed, launched, rtol=2e-2, atol=2e-2)


def test_replayed_step_leaves_unused_cores_unchanged() -> None:
    """With one pass of two untied cores the second has no gradient: neither decay nor momentum moves it."""
    train_step = make_step("untied-2", cuda_graphs=True)
    with configure_backends(torch.device("cuda")):
        before = [p.detach().clone() for p in train_step.network.cores[1].parameters()]
        for step in range(4):
            train_step(*batch(step), 1, 1.0)
        assert train_step.captured
        for old, new in zip(before, train_step.network.cores[1].parameters(), strict=True):
            assert torch.equal(old, new)
