"""torch.compile of a network's blocks, for custom blocks and for networks without fused kernels."""

from __future__ import annotations

from typing import Any

import torch

from steepen.model.network import Network

# All blocks share one compiled program, and each micro-batch size adds one with gradients and one without.
MIN_RECOMPILE_LIMIT = 64


def compile_network(network: Network) -> None:
    """Compile the blocks, the boundary operators and the loss one by one.

    The number of passes is outside of every compiled function, so a change of passes recompiles nothing.
    """
    dynamo: Any = torch._dynamo  # pyright: ignore[reportPrivateUsage]
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MIN_RECOMPILE_LIMIT)
    compile_blocks(network)
    if network.fused is None:
        for name in ("core_boundary", "coda_boundary", "loss"):
            setattr(network, name, torch.compile(getattr(network, name), dynamic=False))


def compile_blocks(network: Network) -> None:
    """Compile every block without a fused forward; blocks added by growth reuse the cached program."""
    for block in network.blocks():
        if getattr(block, "fused_forward", None) is None:
            block.compile(dynamic=False)
