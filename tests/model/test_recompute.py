"""Blocks that are computed again in the backward give the same bits as blocks that keep their activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from steepen.execution.cpu_fused import install_fused_cpu
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=40)


class Noisy(TransformerBlock):
    """A custom block that draws random numbers, and counts its calls."""

    calls = 0

    def mlp(self, x: Tensor) -> Tensor:
        Noisy.calls += 1
        return super().mlp(torch.nn.functional.dropout(x, 0.5))


def reference(network: Network) -> None:
    """Nothing is installed."""


INSTALL: dict[str, Callable[[Network], None]] = {
    "reference": reference,
    "cpu": install_fused_cpu,
    "gpu": partial(install_fused_gpu, make_linear=partial(FusedLinear, dtype=torch.float64)),
}


def gradients(arm: str, install: str, *, recompute: bool) -> list[Tensor]:
    found = find_arm(arm) if ":" not in arm else replace(find_arm("loop-2"), name="noisy", block=arm)
    network = build_on_meta(found.shape(4, SCALE), found)
    materialize(network, dtype=torch.float64, embedding_std=0.3)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    INSTALL[install](network)
    network.refresh()
    network.recompute = recompute
    complete: list[torch.nn.Parameter] = []
    if network.fused is not None:
        network.fused.signal.listener = complete.append
    torch.manual_seed(3)
    tokens = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(2))
    loss = network(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    if network.fused is not None:  # each parameter that the fused path writes is announced once
        copies = network.fused.compute_copies()
        assert len(complete) == len(set(complete)) and set(copies) <= set(complete)
    return [loss.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]


@pytest.mark.parametrize("install", INSTALL)
@pytest.mark.parametrize(
    "arm",
    ["vanilla", "loop-2", "untied-2", "vanilla+kv_heads=2", "vanilla+window=3", "loop-2+experts=4",
     "vanilla+experts=4+balance=loss", "untied-2+streams=2", "vanilla+parallel=true", f"{__name__}:Noisy"],
)  # fmt: skip
def test_recomputed_blocks_give_the_same_bits(arm: str, install: str) -> None:
    kept, again = (gradients(arm, install, recompute=recompute) for recompute in (False, True))
    assert len(kept) == len(again) > 5
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_every_block_is_computed_twice() -> None:
    counts: list[int] = []
    for recompute in (False, True):
        Noisy.calls = 0
        gradients(f"{__name__}:Noisy", "reference", recompute=recompute)
        counts.append(Noisy.calls)
    assert counts[1] == 2 * counts[0] > 0
