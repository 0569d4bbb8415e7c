"""`--shard full` keeps the residual stream in fp32 where the weights are in bf16."""

from __future__ import annotations

import torch

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
