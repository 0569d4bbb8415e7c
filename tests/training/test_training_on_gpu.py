"""What only a GPU can show: the fast path, the compiled one and recorded steps compute what plain ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steepen.execution.compile import compile_blocks, compile_network
from steepen.execution.select import apply_execution_mode
from steepen.model.arms import ARMS
from steepen.model.growth import grow
from steepen.model.init import materialise, on_meta
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.training.device import fast_kernels
from steepen.training.gradient_accumulation import GradientAccumulator
from steepen.training.train_step import TrainStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCALE = SizeRule(aspect=64, head_dim=64, mlp_multiple=64, context=256, vocabulary=1024)


def build(name: str) -> Network:
    arm = ARMS[name]
    network = materialise(on_meta(arm.shape(6, SCALE), arm), "cuda", embedding_std=0.2, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in network.parameters():  # away from the zeros of the start
        scale = 0.5 * parameter.shape[-1] ** -0.5
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return network


def batch(seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(0, 1024, (4, 257), generator=generator, device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_and_gradients(network: Network, passes: int) -> tuple[float, dict[str, Tensor]]:
    network.zero_grad()
    loss = network(*batch(), passes=passes)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def no_further_off(name: str, exact: Network, eager: Network, other: Network) -> None:
    """Both are bf16 roundings of the same fp32 function: the other may be no further off than the eager."""
    arm = ARMS[name]
    with fast_kernels(torch.device("cuda")):
        for passes in sorted({1, arm.passes.initial, arm.passes.max_passes}):
            for network in (exact, eager, other):
                if passes > network.passes:
                    grow(network, passes)
            if other.fused is None:
                compile_blocks(other)
            reference, expected = loss_and_gradients(exact, passes)
            (first, one), (second, two) = (loss_and_gradients(n, passes) for n in (eager, other))
            assert second == pytest.approx(reference, abs=max(2 * abs(first - reference), 2e-2))
            assert two.keys() == expected.keys()
            for key, gradient in expected.items():
                size = gradient.norm() + 1e-12
                off = [(g[key] - gradient).norm() / size for g in (one, two)]
                assert off[1] <= max(1.5 * off[0].item(), 5e-3), key


@pytest.mark.parametrize("name", ARMS)
def test_fast_is_no_further_from_fp32_than_eager_bf16(name: str) -> None:
    exact, eager, fast = build(name), build(name), build(name)
    eager.compute_dtype = torch.bfloat16
    apply_execution_mode(fast, "bf16", fused=True, compiled=False)
    no_further_off(name, exact, eager, fast)


@pytest.mark.parametrize("name", ["vanilla", "loop-grow", "untied-grow"])
def test_compiled_is_no_further_from_fp32_than_eager_bf16(name: str) -> None:
    exact, eager, compiled = build(name), build(name), build(name)
    eager.compute_dtype = torch.bfloat16
    apply_execution_mode(compiled, "bf16", fused=False, compiled=True)
    no_further_off(name, exact, eager, compiled)


def test_growth_and_random_passes_compile_nothing_new() -> None:
    from torch._dynamo.utils import counters

    network = build("untied-grow")
    network.compute_dtype = torch.bfloat16
    compile_network(network)
    with fast_kernels(torch.device("cuda")):
        loss_and_gradients(network, 2)
        loss_and_gradients(network, 2)
        counters.clear()
        grow(network, 4)
        compile_blocks(network)
        for passes in (4, 3, 1, 2, 4):
            loss_and_gradients(network, passes)
    assert counters["stats"]["unique_graphs"] == 0


def stepper(name: str, graphs: bool, precision: str = "bf16") -> TrainStep:
    network = build(name)
    apply_execution_mode(network, precision, fused=True, compiled=False)
    hyper = replace(recipe_of(network.arm).base, learning_rate=3e-3)
    optimizer = Optimizer(network.named_parameters(), hyper, OptimizerConfig(), network.refresh)
    accumulator = GradientAccumulator(network, 4, 2, pytest.fail)
    return TrainStep(network, optimizer, accumulator, cuda_graphs=graphs, say=pytest.fail)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["untied-2", "loop-2"])
def test_recorded_steps_equal_plain_ones_through_growth_and_other_passes(name: str, precision: str) -> None:
    """Losses and norms of thirty steps: passes change, the rate changes, the network grows."""
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with eight-bit products")
    found: dict[bool, list[float]] = {}
    with fast_kernels(torch.device("cuda")):
        for graphs in (False, True):
            make = stepper(name, graphs, precision)
            seen: list[float] = []
            for step in range(30):
                if step == 20:
                    sources = grow(make.network, 4)
                    make.optimizer.grow(make.network.named_parameters(), sources)
                    make.reset()
                passes = (2, 1, 2, 2)[step % 4] if step < 20 else 4
                loss, norm = make(*batch(step % 3), passes, 1.0 - step / 60)
                seen += [loss.item(), norm.item()]
            assert len(make.captured) == (1 if graphs else 0)
            found[graphs] = seen
    assert found[False][-2] < found[False][0] - 0.1  # it learns, so a wrong step would show
    # Sums in another order round otherwise, and thirty steps let that grow.
    torch.testing.assert_close(torch.tensor(found[True]), torch.tensor(found[False]), rtol=2e-2, atol=2e-2)


def test_a_recorded_step_leaves_unused_cores_alone() -> None:
    """With one pass of two untied cores the second has no gradient: neither decay nor momentum moves it."""
    make = stepper("untied-2", graphs=True)
    with fast_kernels(torch.device("cuda")):
        before = [p.detach().clone() for p in make.network.cores[1].parameters()]
        for step in range(4):
            make(*batch(step), 1, 1.0)
        assert make.captured
        for old, new in zip(before, make.network.cores[1].parameters(), strict=True):
            assert torch.equal(old, new)
