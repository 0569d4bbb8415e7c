"""A network of the next stage from one that is there, as a run's growth makes it from a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from steepen.model.arm import StageNetwork
from steepen.model.growth import Growth
from steepen.model.init import allocate, build_on_meta, initializer
from steepen.model.network import Network
from steepen.model.stages import StageSchedule


def grown(
    network: Network, after: StageNetwork, schedule: StageSchedule, *, init_scale: float = 1.0, seed: int = 0
) -> Network:
    """A network of the next stage on the same device, in the same dtype, with the weights of this one."""
    before = StageNetwork(network.arm, network.shape, network.passes)
    growth = Growth(before, after, schedule)
    multipliers, options = network.multipliers, network.options
    larger = build_on_meta(after.shape, after.arm, multipliers, options, passes=after.passes)
    allocate(larger, network.embedding.device, network.embedding.dtype)
    fresh = initializer(larger, embedding_std=1.0, init_scale=init_scale, seed=seed)
    old = dict(network.named_parameters())
    with torch.no_grad():
        for name, parameter in larger.named_parameters():
            growth.fill(name, parameter, old.__getitem__, fresh)
    larger.refresh()
    return larger


def grow(network: Network, passes: int) -> dict[str, str]:
    """Grow a network in place to `passes` core passes; returns new parameter name → copied one.

    For tests of execution and optimizers. The weights come from `Growth`, as those of a run do.
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
