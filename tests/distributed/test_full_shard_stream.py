"""`--shard full` keeps the residual stream in fp32 where the weights are in bf16."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from ranks import on_ranks
from steepen.distributed.full_shard import shard_network
from steepen.distributed.world import World
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule

SIZE = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=384)


def dtypes_of_the_stream(world: World) -> list[str]:
    """Dtypes of the blocks' outputs in a sharded bf16 network."""
    arm = find_arm("untied-2")
    network = materialize(build_on_meta(arm.shape(3, SIZE), arm), torch.device("cpu"), embedding_std=0.1)
    network.compute_dtype = torch.bfloat16
    shard_network(network, world, compute_dtype=torch.bfloat16)
    seen: list[str] = []
    for block in network.blocks():
        block.register_forward_hook(lambda block, inputs, output: seen.append(str(output.dtype)))
    tokens = torch.zeros(1, 32, dtype=torch.long)
    network(tokens, tokens).backward()
    return seen


def test_full_sharding_keeps_the_residual_stream_in_fp32() -> None:
    for found in on_ranks(2, dtypes_of_the_stream):
        assert len(found) == 4 and set(found) == {"torch.float32"}


def gradients(world: World, arm_name: str) -> dict[str, float]:
    """Checksums of the gradients of one batch, which every rank computes alike; sharded on several ranks."""
    arm = find_arm(arm_name)
    network = materialize(build_on_meta(arm.shape(6, SIZE), arm), torch.device("cpu"), embedding_std=0.1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():  # output projections start at zero, which hides differences
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens = torch.randint(384, (2, 33), generator=generator)
    if world.size > 1:
        shard_network(network, world, compute_dtype=None)
    network(tokens[:, :-1], tokens[:, 1:], loss_scale=1.0).backward()
    found: dict[str, float] = {}
    for name, parameter in network.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        weights = torch.arange(1, whole.numel() + 1, dtype=torch.float64).remainder_(1009)
        found[name] = float((whole.double().reshape(-1) / world.size * weights).sum())
    return found


@pytest.mark.parametrize("arm", ["operator-1", "untied-2", "loop-2-inject-only"])
def test_full_sharding_sums_the_gradient_of_the_prelude_in_the_order_of_one_process(arm: str) -> None:
    # The prelude's output goes to the first core and to every injection. Their gradients added in another
    # order had moved losses by 3e-5 within 50 steps.
    (alone,) = on_ranks(1, gradients, arm)
    assert on_ranks(2, gradients, arm) == [alone, alone]
