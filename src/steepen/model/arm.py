"""An arm: allocation rule, two boundary operators, tied or untied cores, and a stage schedule."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError, is_whole, nearest, require, require_count
from steepen.model.block_options import BlockOptions
from steepen.model.shape import MAX_BLOCKS, BlockAllocation, Blocks, Shape, SizeRule
from steepen.model.stages import Stage, StageSchedule
from steepen.utils.codec import Checked, Range
from steepen.utils.formatting import printable
from steepen.utils.imports import object_name

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDARIES = ("identity", "norm", "inject", "norm+inject")
BLOCKS = ("transformer",)
# The same objects by "module:attribute", as an arm holds them that was given the object itself.
OWN_CODE = {
    "steepen.model.block:TransformerBlock",
    "steepen.model.boundary:identity",
    "steepen.model.boundary:normalize",
    "steepen.model.boundary:inject",
    "steepen.model.boundary:normalize_and_inject",
}


@dataclass(frozen=True)
class AllocationRule(Checked):
    """How many blocks a nominal depth has, and how many go to prelude, core and coda."""

    # Blocks per unit of nominal depth (2 makes the 1:64 shapes), or a fixed number (width-only ladders).
    per_depth: Annotated[int, Range(1, MAX_BLOCKS)] = 1
    blocks: Annotated[int, Range(1, MAX_BLOCKS)] | None = None
    prelude: Blocks | None = None  # fixed sizes of prelude and coda, as in 2/C/3; None divides evenly
    coda: Blocks | None = None
    unsplit: bool = False  # a vanilla stack: every block in the prelude

    def __post_init__(self) -> None:
        super().__post_init__()
        paired = (self.prelude is None) == (self.coda is None)
        require(paired, "AllocationRule", "coda", self.coda, "given together with prelude, or neither")

    def at(self, depth: int) -> BlockAllocation:
        """The block allocation at a nominal depth."""
        require(is_whole(depth) and depth >= 1, "Shape", "depth", depth, "a whole number of at least 1")
        blocks = self.blocks if self.blocks is not None else self.per_depth * depth
        if self.unsplit:
            return BlockAllocation(blocks, 0, 0)
        if self.prelude is None or self.coda is None:
            return BlockAllocation.even(blocks)
        core = blocks - self.prelude - self.coda
        if core < 1:
            raise UsageError(
                f"depth {depth} is too small for the allocation {self.prelude}/C/{self.coda}: "
                f"it needs a depth of at least {self.prelude + self.coda + 1}."
            )
        return BlockAllocation(self.prelude, core, self.coda)


@dataclass(frozen=True)
class Arm:
    """One row of the table of arms.

    A boundary or block is a built-in name, "module:attribute" for a custom one, or the function or class
    itself, which is replaced by its name: an arm can be hashed, stored and sent to another process.
    """

    name: str
    title: str = ""
    core_boundary: str = "identity"  # φ, between two core passes
    coda_boundary: str = "identity"  # before the coda; ρ in the paper's equation
    tied: bool = True
    passes: StageSchedule = field(default_factory=StageSchedule)
    allocation: AllocationRule = field(default_factory=AllocationRule)
    block: str = "transformer"
    recipe: str = "vanilla"  # name of the recipe in the paper's tables
    about: str = ""
    norm_prelude: bool = False  # e ← Norm(e) after the prelude
    backprop_passes: int | None = None  # of a tied core: gradients flow through the last so many passes only
    block_options: BlockOptions = field(default_factory=BlockOptions)  # of the built-in block

    if TYPE_CHECKING:

        def __init__(
            self,
            name: str,
            title: str = "",
            core_boundary: str | Callable[..., Any] = "identity",
            coda_boundary: str | Callable[..., Any] = "identity",
            tied: bool = True,
            passes: StageSchedule = ...,
            allocation: AllocationRule = ...,
            block: str | type = "transformer",
            recipe: str = "vanilla",
            about: str = "",
            norm_prelude: bool = False,
            backprop_passes: int | None = None,
            block_options: BlockOptions = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, known in (("core_boundary", BOUNDARIES), ("coda_boundary", BOUNDARIES), ("block", BLOCKS)):
            value = object_name(getattr(self, name), name.removeprefix("core_").removeprefix("coda_"))
            object.__setattr__(self, name, value)
            if value not in known and ":" not in value:
                raise UsageError(
                    f"Arm.{name} = {value!r} is not known: use one of {nearest(value, known, 4)}, "
                    'or "module:attribute" for a custom one.'
                )
        accepted = "text without control characters"
        require(printable(self.name) == self.name, "Arm", "name", self.name, accepted)
        require_count("Arm", "backprop_passes", self.backprop_passes)
        trained = self.tied or self.backprop_passes is None
        require(
            trained, "Arm", "backprop_passes", self.backprop_passes, "null for untied cores: none is skipped"
        )
        accepted = f"left out: the custom block {self.block} decides"
        options = self.block == "transformer" or self.block_options.standard
        require(options, "Arm", "block_options", self.block_options, accepted)
        if not self.title:
            object.__setattr__(self, "title", self.name)

    @property
    def fused_block(self) -> bool:
        """Whether a GPU runs the blocks with fused kernels: the paper's, or with grouped-query attention."""
        return self.block == "transformer" and self.block_options.only_grouped

    @property
    def custom_code(self) -> tuple[str, ...]:
        """The "module:attribute" names of the arm's block and boundaries that are not built in."""
        return tuple(name for name in (self.block, self.core_boundary, self.coda_boundary) if ":" in name)

    def shape(self, depth: int, size_rule: SizeRule | None = None) -> Shape:
        """The shape of this arm at a nominal depth."""
        return Shape.at(depth, self.allocation.at(depth), size_rule)

    def at(self, stage: Stage, shape: Shape) -> tuple[Arm, Shape]:
        """The arm and shape of a stage of growth whose last stage has this shape."""
        options = self.block_options
        if stage.experts is None:
            return self, stage.shape(shape)
        if options.experts is None:
            raise UsageError(f"{self.name} has no experts: say how many it ends with, as in experts=1-8.")
        number = stage.number(stage.experts, options.experts)
        if number > options.experts:
            raise UsageError(f"an arm of {options.experts} experts cannot start with {number}.")
        if number == 1:  # the dense MLP
            options = replace(options, experts=None, active_experts=2, shared_experts=0, balance="bias")
        else:
            options = replace(options, experts=number)
        return replace(self, block_options=options), stage.shape(shape)

    def networks(self, shape: Shape, schedule: StageSchedule) -> tuple[StageNetwork, ...]:
        """The network of each stage of a schedule; it keeps the cores that a later stage does not use."""
        found: list[StageNetwork] = []
        passes = 0
        for stage in schedule.stages:
            passes = max(passes, stage.max_passes)
            found.append(StageNetwork(*self.at(stage, shape), passes))
        for before, after in pairwise(found):
            require_growth(before, after, schedule)
        return tuple(found)

    def passes_without_gradient(self, passes: int) -> int:
        """Core passes, the first ones, that truncated backpropagation leaves out."""
        return 0 if self.backprop_passes is None else max(0, passes - self.backprop_passes)

    def stored_cores(self, passes: int) -> int:
        """Cores stored to run this many passes."""
        return 1 if self.tied else passes

    def block_paths(self, allocation: BlockAllocation, passes: int) -> list[str]:
        """The stored blocks in the order of their execution, as parameters are named after them."""
        cores = range(self.stored_cores(passes))
        return [
            *(f"prelude.{index}" for index in range(allocation.prelude)),
            *(f"cores.{core}.{index}" for core in cores for index in range(allocation.core)),
            *(f"coda.{index}" for index in range(allocation.coda)),
        ]

    def stored_blocks(self, allocation: BlockAllocation, passes: int) -> int:
        """Blocks stored to run this many passes."""
        return allocation.executed(self.stored_cores(passes))


@dataclass(frozen=True)
class StageNetwork:
    """What the network of a stage of training is built from."""

    arm: Arm
    shape: Shape
    passes: int  # the most it has had to run so far: so many untied cores are stored

    @property
    def sizes(self) -> dict[str, int]:
        """Its size along the axes other than passes and blocks, by their names."""
        experts = self.arm.block_options.experts
        sizes = {"width": self.shape.width, "context": self.shape.context}
        return sizes if experts is None else sizes | {"experts": experts}

    def __str__(self) -> str:
        return (
            f"{self.shape.allocation.executed(self.passes)} executed blocks in {self.passes} core "
            f"{'pass' if self.passes == 1 else 'passes'}, "
            f"{', '.join(f'{name} {size:,}' for name, size in self.sizes.items())}"
        )


def require_growth(before: StageNetwork, after: StageNetwork, schedule: StageSchedule) -> None:
    """Raise UsageError unless the second network can grow from the first."""
    old, new = before.shape, after.shape
    sections = zip(astuple(old.allocation), astuple(new.allocation), strict=True)
    experts = tuple(one.arm.block_options.experts or 1 for one in (before, after))
    pairs = [*sections, (old.width, new.width), (old.context, new.context), experts]
    if any(first > last for first, last in pairs):
        raise UsageError(f"growth only adds: {after} cannot follow {before}.")
    if old.width == new.width:
        return
    if ":" in before.arm.block:
        raise UsageError(f"the custom block {before.arm.block} cannot grow in width.")
    if schedule.new_width == "copy" and new.width % old.width:
        raise UsageError(
            f"width {old.width:,} cannot grow to {new.width:,} by copies, which keep what the network "
            "computes only at a whole multiple: choose another fraction or depth, or new_width=zero."
        )
