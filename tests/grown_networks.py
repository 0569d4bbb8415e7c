"""Growth in passes of a network that is there, for tests of execution and optimizers."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from steepen.model.arm import StageNetwork
from steepen.model.growth import Growth
from steepen.model.network import Network


def grow(network: Network, passes: int) -> dict[str, str]:
    """Grow a network in place to `passes` core passes; returns new parameter name → copied one.

    The weights come from `Growth`, as those of a run do.
    """
    before = StageNetwork(network.arm, network.shape, network.passes)
    growth = Growth(before, replace(before, passes=passes), network.arm.passes)
    old = dict(network.named_parameters())
    for index in () if network.arm.tied else range(network.passes, passes):
        # A deep copy keeps dtype, device and the compiled forward.
        network.cores.append(copy.deepcopy(network.cores[index % network.passes]))
    sources: dict[str, str] = {}
    for name, parameter in network.named_parameters():
        if name not in old:
            source = growth.origin(name).name
            assert source is not None
            sources[name] = source
            with torch.no_grad():
                growth.fill(name, parameter.zero_(), old.__getitem__, no_fresh_weights)
    if network.fused is not None and not network.arm.tied:
        network.fused.install_in_new_blocks()
    network.passes = passes
    return sources


def no_fresh_weights(name: str, parameter: Tensor) -> None:
    raise AssertionError(f"growth in passes only copies, but {name} is as at initialization")
