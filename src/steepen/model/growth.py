"""Growth: more core passes from some step on.

Tied growth changes only the number of passes. Untied growth stacks copies of the trained cores: core k of
the grown network starts as core (k mod K₀) of the old one (Algorithm 1). Their
optimizer state is zero, or copied too (`OptimizerConfig.growth_state`).
"""

from __future__ import annotations

import copy

from steepen.errors import UsageError
from steepen.model.network import Network


def grow(network: Network, passes: int) -> dict[str, str]:
    """Grow a network to `passes` core passes; returns new parameter name → name of the copied parameter."""
    if passes < network.passes:
        raise UsageError(f"cannot grow from {network.passes} to {passes} passes: growth only adds passes.")
    sources: dict[str, str] = {}
    if not network.arm.tied:
        sources = _stack_cores(network, passes)
        if network.fused is not None:
            network.fused.install_in_new_blocks()
    network.passes = passes
    return sources


def _stack_cores(network: Network, passes: int) -> dict[str, str]:
    first = len(network.cores)
    sources: dict[str, str] = {}
    for index in range(first, passes):
        origin = index % first
        # A deep copy keeps dtype, device and the compiled forward; the parameters are new.
        network.cores.append(copy.deepcopy(network.cores[origin]))
        for name, _ in network.cores[index].named_parameters():
            sources[f"cores.{index}.{name}"] = f"cores.{origin}.{name}"
    return sources
