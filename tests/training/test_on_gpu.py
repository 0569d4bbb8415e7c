"""What only a GPU can show: compiled equals eager for every arm and K, in bf16."""

from __future__ import annotations

import pytest
import torch

from steepen.model.arms import ARMS
from steepen.model.growth import grow
from steepen.model.init import materialise, on_meta
from steepen.model.network import Network
from steepen.model.shape import Scale
from steepen.training.device import compile_blocks, compile_network, fast_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCALE = Scale(aspect=64, head_dim=64, mlp_multiple=64, context=256, vocabulary=1024)


def build(name: str) -> Network:
    arm = ARMS[name]
    network = materialise(on_meta(arm.shape(6, SCALE), arm), "cuda", embedding_std=0.2, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in network.parameters():  # away from the zeros of the start
        scale = 0.5 * parameter.shape[-1] ** -0.5
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return network


def loss_and_gradients(network: Network, passes: int) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 1024, (4, 257), generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    network.zero_grad()
    loss = network(tokens[:, :-1], tokens[:, 1:], passes=passes)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARMS)
def test_compiled_equals_eager_within_bf16(name: str) -> None:
    exact, eager, compiled = build(name), build(name), build(name)
    for network in (eager, compiled):
        network.compute_dtype = torch.bfloat16
    compile_network(compiled)
    arm = ARMS[name]
    with fast_kernels(torch.device("cuda")):
        for passes in sorted({1, arm.passes.initial, arm.passes.most}):
            for network in (exact, eager, compiled):
                if passes > network.passes:
                    grow(network, {}, passes)
            compile_blocks(compiled)
            reference, expected = loss_and_gradients(exact, passes)
            (first, one), (second, two) = (loss_and_gradients(n, passes) for n in (eager, compiled))
            # Both are bf16 roundings of the same fp32 function: compiled may be no further off.
            assert second == pytest.approx(reference, abs=max(2 * abs(first - reference), 2e-2))
            for key, gradient in expected.items():
                size = gradient.norm() + 1e-12
                off = [(g[key] - gradient).norm() / size for g in (one, two)]
                assert off[1] <= max(2 * off[0].item(), 2e-2), key


def test_growth_and_random_passes_compile_nothing_new() -> None:
    from torch._dynamo.utils import counters

    network = build("untied-grow")
    network.compute_dtype = torch.bfloat16
    compile_network(network)
    with fast_kernels(torch.device("cuda")):
        loss_and_gradients(network, 2)
        loss_and_gradients(network, 2)
        counters.clear()
        grow(network, {}, 4)
        compile_blocks(network)
        for passes in (4, 3, 1, 2, 4):
            loss_and_gradients(network, passes)
    assert counters["stats"]["unique_graphs"] == 0
