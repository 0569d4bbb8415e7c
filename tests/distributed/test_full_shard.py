"""`--shard full`: its residual stream in fp32, its order of sums, and what a rank has at the start."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from ranks import on_ranks
from steepen.distributed.full_shard import FullyShardedOptimizer, shard_network
from steepen.distributed.world import World
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, initializer, materialize
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import recipe_of

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


def gradients(world: World, arm_name: str, recompute: bool = False) -> dict[str, float]:
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
    network.recompute = recompute and world.size > 1
    network(tokens[:, :-1], tokens[:, 1:], loss_weight=1.0).backward()
    found: dict[str, float] = {}
    for name, parameter in network.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        weights = torch.arange(1, whole.numel() + 1, dtype=torch.float64).remainder_(1009)
        found[name] = float((whole.double().reshape(-1) / world.size * weights).sum())
    return found


@pytest.mark.parametrize(
    ("arm", "recompute"),
    [("operator-1", False), ("untied-2", False), ("loop-2-inject-only", False), ("untied-2", True)],
)
def test_full_sharding_sums_the_gradient_of_the_prelude_in_the_order_of_one_process(
    arm: str, recompute: bool
) -> None:
    # The prelude's output goes to the first core and to every injection. Their gradients added in another
    # order had moved losses by 3e-5 within 50 steps.
    (alone,) = on_ranks(1, gradients, arm)
    assert on_ranks(2, gradients, arm, recompute) == [alone, alone]


def start_of(world: World, arm_name: str) -> dict[str, int]:
    """Most elements that a rank has in whole parameters while a network gets its weights; and a block's."""
    arm = find_arm(arm_name)
    shape = arm.shape(6, SIZE)
    network = build_on_meta(shape, arm)
    tied = arm.tied and network.passes > 1
    repeated = [block for core in network.cores for block in cast("Any", core)] if tied else []
    initial = initializer(network, embedding_std=0.1, init_scale=1.0, seed=3)
    most = 0

    def fill(name: str, tensor: torch.Tensor) -> None:
        nonlocal most
        initial(name, tensor)
        whole = [p for p in network.parameters() if not p.is_meta and not isinstance(p, DTensor)]
        most = max(most, sum(p.numel() for p in whole))

    hyper = recipe_of(arm).at(arm, 6, SIZE).hyperparameters
    FullyShardedOptimizer(network, hyper, OptimizerConfig(), world, repeated=repeated, fill=fill)
    expected = materialize(build_on_meta(shape, arm), embedding_std=0.1, init_scale=1.0, seed=3)
    for (name, parameter), other in zip(network.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), other), name
    assert torch.equal(network.rotary, expected.rotary)
    block = sum(p.numel() for p in next(iter(expected.blocks())).parameters())
    return {"most": most, "block": block, "tables": 2 * expected.embedding.numel(), "repeated": len(repeated)}


@pytest.mark.parametrize("arm", ["untied-2", "loop-2"])
def test_no_rank_has_the_whole_network_at_the_start(arm: str) -> None:
    for found in on_ranks(2, start_of, arm):
        assert found["repeated"] == (2 if arm == "loop-2" else 0)
        assert found["most"] == max(found["block"], found["tables"] + found["repeated"] * found["block"])
