"""Growth: the network of the next stage, from that of the stage before.

Passes: tied growth changes only their number; untied growth stacks copies of the trained cores: core k of the
grown network starts as core (k mod K₀) of the old one (Algorithm 1). Blocks: new ones are as at
initialization, where their output is zero, or copies of others. Width: units are repeated, and the weights
that read them divided among the repetitions; these start as different as at initialization, in directions
that cancel, or they would stay equal. Or new units are added whose output is zero, and the residual stream is
scaled so that its norm does not notice the new channels. Context: longer rows, no new parameters. Experts:
the dense MLP is divided into as many parts as a token uses experts, and every part becomes several of them
(`_Experts`); experts become several equal ones, whose rows of the router differ in directions that cancel.

Tied passes and a longer context change what the network computes, and so do copies of blocks and of experts.
Experts of a dense MLP keep it where a token uses two or more, of which their number is a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steepen.model.arm import StageNetwork
from steepen.model.init import allocate, build_on_meta, initializer
from steepen.model.network import Network
from steepen.model.stages import BlockOrder, NewWidth, StageSchedule

Fill = Callable[[str, Tensor], None]

# Dimension (from the last) of a parameter along which its rows or columns are heads.
_HEADS = {"qkv": -2, "query": -2, "key_value": -2, "out": -1}
# Parameters that write to the residual stream; all others read it. Both have the stream's width last, but
# for the output projections, whose rows are the stream's channels.
_WRITERS = {"embedding", "out", "down", "expert_down"}
# Dimension of a parameter along which it is divided into experts.
_OF_EXPERTS = {"choice_bias": -1, "router": -2, "expert_gate_up": -3, "expert_down": -3}
# What a dense MLP becomes where experts begin, and from what; None: as at initialization.
_OF_DENSE = {
    "choice_bias": None, "router": None, "expert_gate_up": "gate_up", "expert_down": "down",
    "gate_up": "gate_up", "down": "down",
}  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """The parameter that one of the grown network continues or copies."""

    name: str | None  # None: it starts as at initialization
    kept: bool  # it is the same parameter, not a copy


class Growth:
    """What the parameters of a grown network and their optimizer state are made from."""

    def __init__(self, before: StageNetwork, after: StageNetwork, schedule: StageSchedule) -> None:
        self.before, self.after, self.schedule = before, after, schedule
        self._blocks = _block_origins(before, after, schedule)
        self.widens = before.shape.width != after.shape.width
        self._experts = _Experts(before, after)

    def origin(self, name: str) -> Origin:
        """Where a parameter of the grown network comes from."""
        parts = name.split(".")
        prefix = 3 if parts[0] == "cores" else 2
        path = ".".join(parts[:prefix])
        if path not in self._blocks:  # embedding, head and the parameters of a custom boundary
            return Origin(name, kept=not self.widens)
        block, kept = self._blocks[path]
        changed = parts[-1] in self._experts.changed
        leaf = self._experts.changed[parts[-1]] if changed else parts[-1]
        source = None if block is None or leaf is None else ".".join([block, *parts[prefix:-1], leaf])
        return Origin(source, kept and not self.widens and not changed)

    def fill(self, name: str, parameter: Tensor, read: Callable[[str], Tensor], fresh: Fill) -> None:
        """Fill a grown parameter; `read` gives an old one, `fresh` fills a tensor as at initialization."""
        source = self.origin(name).name
        if source is not None:
            parameter.copy_(self._weight(name, source, read(source), parameter.shape, fresh))
            return
        fresh(name, parameter)
        path, _, leaf = name.rpartition(".")
        if leaf == "router" and self._blocks.get(path, (None, False))[0] is not None:
            # Of a block whose MLP was dense: a token chooses the parts of one copy of it together.
            parts = self._experts.options.active_experts
            parameter.copy_(parameter[::parts].repeat_interleave(parts, 0)[: len(parameter)])

    def _weight(self, name: str, source: str, old: Tensor, shape: torch.Size, fresh: Fill) -> Tensor:
        leaf = _leaf(name)
        if leaf not in self._experts.changed:
            return self._widened(name, old, shape, fresh)
        wider = self._widened(source, old, self._experts.between(leaf, old.shape, shape), fresh)
        new = self._experts.take(leaf, wider) * self._experts.scale(leaf).to(old)
        if leaf == "router":
            initial = torch.empty(shape, dtype=old.dtype, device=old.device)
            fresh(name, initial)
            new = new + _apart(initial, self._experts.sources.to(old.device), -2, len(old))
        return new

    def _widened(self, name: str, old: Tensor, shape: torch.Size, fresh: Fill) -> Tensor:
        """A parameter of the next stage's width."""
        if old.shape == shape:
            return old
        changed = {
            dim: self._index(name, dim, old.shape, shape, old.device) for dim in _changed(old.shape, shape)
        }
        taken = old
        for dim, index in changed.items():
            taken = taken.index_select(dim, index.clamp(min=0))
        initial = torch.empty(shape, dtype=old.dtype, device=old.device)
        fresh(name, initial)
        if self.schedule.new_width == "zero":
            new = initial if _leaf(name) not in _WRITERS else torch.zeros_like(initial)
            return _where_old(changed, taken * self._scale(name), new)
        index = changed.get(-1)
        if index is None or _leaf(name) == "embedding":
            return taken
        copies = torch.bincount(index, minlength=old.shape[-1]).to(old.dtype)
        return (taken / copies[index]) + _apart(initial, index, -1, old.shape[-1])

    def state(self, name: str, key: str, old: Tensor, before: torch.Size, after: torch.Size) -> Tensor:
        """Optimizer state of a grown parameter from that of its origin, as the gradient changes.

        A unit's repetitions share its gradient where its weights are repeated, and each have all of it where
        they are divided; experts share the tokens. State of another shape (of rows, or one number) is
        repeated.
        """
        power = {"exp_avg": 1, "momentum": 1, "momentum_buffer": 1, "exp_avg_sq": 2}.get(key, 0)
        leaf, experts = _leaf(name), self._experts
        if leaf not in experts.changed:
            return self._widened_state(name, power, old, before, after)
        source = experts.changed[leaf] or leaf
        wider = self._widened_state(source, power, old, before, experts.between(leaf, before, after))
        return experts.take(leaf, wider) * experts.gradient(leaf) ** power

    def _widened_state(
        self, name: str, power: int, old: Tensor, before: torch.Size, after: torch.Size
    ) -> Tensor:
        changed = {dim: size for dim, size in _changed(before, after).items() if old.ndim >= -dim}
        value, scale = old, self._scale(name) ** -power
        indices: dict[int, Tensor] = {}
        for dim, size in changed.items():
            if value.shape[dim] != size:  # one number for all of them
                continue
            index = indices[dim] = self._index(name, dim, before, after, old.device)
            value = value.index_select(dim, index.clamp(min=0))
            if self.schedule.new_width == "copy" and (dim != -1 or _leaf(name) == "embedding"):
                copies = torch.bincount(index, minlength=size)[index].to(old.dtype) ** power
                value = value / _along(dim, copies, value)
        value = value * scale
        return _where_old(indices, value, torch.zeros_like(value))

    def _scale(self, name: str) -> float:
        """Factor of the old weights where new channels of the residual stream are zero, but for `copy`."""
        if self.schedule.new_width == "copy" or not self.widens:
            return 1.0
        ratio = math.sqrt(self.after.shape.width / self.before.shape.width)
        return ratio if _leaf(name) in _WRITERS else 1 / ratio

    def _index(self, name: str, dim: int, old: torch.Size, new: torch.Size, device: torch.device) -> Tensor:
        """Of each index along a dimension of the grown parameter, the old one it repeats; −1 for none."""
        leaf = _leaf(name)
        of_heads = _HEADS.get(leaf) == dim
        unit = self.before.shape.head_dim if of_heads else 1
        # Queries that share a head of keys stay together.
        groups = self.before.arm.block_options.kv_heads if of_heads and leaf != "key_value" else None
        units, wanted = old[dim] // unit, new[dim] // unit
        index = repeated_units(units, wanted, groups or 1, self.schedule.new_width).to(device)
        inside = index.unsqueeze(-1) * unit + torch.arange(unit, device=index.device)
        return torch.where(index.unsqueeze(-1) < 0, -1, inside).flatten()


def repeated_units(old: int, new: int, groups: int, new_width: NewWidth) -> Tensor:
    """For each of `new` units the old one that it repeats, evenly and in order, or −1 (at a group's end)."""
    if new_width == "copy":
        return torch.arange(new) * old // new
    each, wider = old // groups, new // groups
    place = torch.arange(wider).expand(groups, wider)
    return torch.where(place < each, place + each * torch.arange(groups).unsqueeze(-1), -1).flatten()


def _apart(initial: Tensor, index: Tensor, dim: int, old: int) -> Tensor:
    """Initial values less their mean over the repetitions of each of the `old` indices along a dimension."""
    copies = torch.bincount(index, minlength=old).to(initial.dtype)
    shape = list(initial.shape)
    shape[dim] = old
    mean = torch.zeros(shape, dtype=initial.dtype, device=initial.device).index_add(dim, index, initial)
    mean = mean / _along(dim, copies, initial)
    return initial - mean.index_select(dim, index)


class _Experts:
    """Experts from fewer experts, which are repeated, or from the dense MLP.

    Of the latter, shared experts are the first parts, and the experts e that a token chooses have the parts
    e modulo their number. Their rows of the router are equal in each copy of the MLP, so that a token
    chooses all parts of a copy; each is weighted by 1 / parts, for which its output is scaled.
    """

    def __init__(self, before: StageNetwork, after: StageNetwork) -> None:
        old, self.options = before.arm.block_options, after.arm.block_options
        self.old, self.number = old.experts or 1, self.options.experts or 1
        self.dense = old.experts is None
        names = _OF_DENSE if self.dense else {leaf: leaf for leaf in _OF_EXPERTS}
        # Parameters that more experts change, and what they are made from.
        self.changed: Mapping[str, str | None] = {} if self.options.experts == old.experts else names
        self.sources = repeated_units(self.old, self.number, 1, "copy")
        self.units, self.width = old.mlp_width(after.shape), self.options.mlp_width(after.shape)

    def between(self, leaf: str, old: torch.Size, new: torch.Size) -> torch.Size:
        """The shape of what a parameter is made from, in the next stage's width."""
        if not self.dense:
            dim = _OF_EXPERTS[leaf]
            return torch.Size(old[i] if i == len(new) + dim else size for i, size in enumerate(new))
        return torch.Size((old[0], self.units, new[-1]) if "gate" in leaf else (new[-2], self.units))

    def take(self, leaf: str, old: Tensor) -> Tensor:
        """Values of each expert's origin; a dimension of one value for all has it again."""
        dim = _OF_EXPERTS[leaf] if not self.dense else -2 if "gate" in leaf else -1
        if old.ndim < -dim or (old.shape[dim] == 1 and not self.dense):
            return old
        if not self.dense:
            each = old.unflatten(dim, (self.old, -1))
            return each.index_select(dim - 1, self.sources.to(old.device)).flatten(dim - 1, dim)
        units = self._units(leaf) % self.units
        if old.shape[dim] == 1:
            units = torch.zeros(len(units) if leaf in _OF_EXPERTS else 1, 1, dtype=torch.long)
        parts = old.index_select(dim, units.flatten().to(old.device)).unflatten(dim, units.shape)
        if leaf not in _OF_EXPERTS:
            return parts.flatten(dim - 1, dim)
        return parts.movedim(dim - 1, 0).flatten(0, -3)

    def scale(self, leaf: str) -> Tensor:
        """What the values are multiplied by; units beyond those of the dense MLP are zero."""
        if not (self.dense and leaf.endswith("down")):
            return torch.ones(())
        known = self._units(leaf) < self.units
        return known.unsqueeze(-2) * self._weighted() if leaf in _OF_EXPERTS else known.flatten()

    def gradient(self, leaf: str) -> float:
        """The gradient of a parameter over that of its origin, if all experts get as many tokens."""
        if leaf not in _OF_EXPERTS:
            return 1.0
        used = self.options.active_experts if self.dense else self.old
        return used / self.number / (self._weighted() if self.dense and leaf == "expert_down" else 1)

    def _weighted(self) -> int:
        """One over the weight of an expert: together they are 1, but a single one has its probability."""
        active = self.options.active_experts
        return active if active > 1 else self.number

    def _units(self, leaf: str) -> Tensor:
        """Units of the dense MLP that each expert, or shared expert, has: (experts, units)."""
        shared = self.options.shared_experts
        routed = shared + torch.arange(self.number) % self.options.active_experts
        parts = routed if leaf in _OF_EXPERTS else torch.arange(shared)
        return parts.unsqueeze(-1) * self.width + torch.arange(self.width)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _changed(old: torch.Size, new: torch.Size) -> dict[int, int]:
    """Dimensions, counted from the last, whose size changes, and their old size."""
    return {dim: old[dim] for dim in range(-len(old), 0) if old[dim] != new[dim]}


def _along(dim: int, values: Tensor, of: Tensor) -> Tensor:
    """A vector as a view that is broadcast along one dimension, from the last, of another tensor."""
    return values.view([-1 if d == dim else 1 for d in range(-of.ndim, 0)])


def _where_old(indices: Mapping[int, Tensor], old: Tensor, new: Tensor) -> Tensor:
    """`old` where all indices name an old unit, else `new`."""
    known = torch.ones((), dtype=torch.bool, device=old.device)
    for dim, index in indices.items():
        known = known & _along(dim, index >= 0, old)
    return torch.where(known, old, new)


def _block_origins(
    before: StageNetwork, after: StageNetwork, schedule: StageSchedule
) -> dict[str, tuple[str | None, bool]]:
    """For each block of the grown network the block that it continues (True) or copies, by their paths."""
    old_cores, new_cores = (one.arm.stored_cores(one.passes) for one in (before, after))
    old, new = before.shape.allocation, after.shape.allocation
    known = before.arm.block_paths(old, before.passes)
    found: dict[str, tuple[str | None, bool]] = {}
    sections = [("prelude", "prelude", old.prelude, new.prelude, True)]
    sections += [
        (f"cores.{k}", f"cores.{k % old_cores}", old.core, new.core, k < old_cores) for k in range(new_cores)
    ]
    sections += [("coda", "coda", old.coda, new.coda, True)]
    for section, source, count, wanted, same in sections:
        origins = block_origins(count, wanted, schedule.block_order)
        for index, (origin, continued) in enumerate(origins):
            kept = same and continued
            path = None if origin is None else f"{source}.{origin}"
            if not continued and schedule.new_blocks == "identity":
                path = None
            elif origin is None and known:  # a section that was empty copies the nearest block
                path = known[0 if section == "prelude" else -1]
            found[f"{section}.{index}"] = path, kept
    return found


def block_origins(old: int, new: int, order: BlockOrder) -> list[tuple[int | None, bool]]:
    """For each of `new` blocks of a section the old one it comes from, and whether it is that block."""
    if old == 0:
        return [(None, False)] * new
    if order == "stacked":
        return [(index % old, index < old) for index in range(new)]
    sources = [index * old // new for index in range(new)]
    return [(source, source not in sources[:index]) for index, source in enumerate(sources)]


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
