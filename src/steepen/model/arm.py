"""An arm: allocation rule, two boundary operators, tied or untied cores, and a pass schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError, nearest, require, require_count, require_positive
from steepen.model.block_options import BlockOptions
from steepen.model.shape import MAX_BLOCKS, BlockAllocation, Shape, SizeRule
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

MAX_PASSES = 10_000  # of the core


@dataclass(frozen=True)
class Stage:
    """A stage of training with one rule for the number of core passes.

    `passes` holds one count, or several from which one is drawn uniformly at every optimizer step.
    `start` is the fraction of tokens at which the stage begins; None leaves it to the recipe (1 − ρ).
    """

    passes: tuple[int, ...]
    start: float | None = 0.0

    def __post_init__(self) -> None:
        valid = bool(self.passes) and all(isinstance(k, int) and 1 <= k <= MAX_PASSES for k in self.passes)
        require(valid, "Stage", "passes", self.passes, f"one or more whole numbers from 1 to {MAX_PASSES:,}")
        inside = self.start is None or 0.0 <= self.start < 1.0
        require(
            inside, "Stage", "start", self.start, "a fraction of tokens in [0, 1), or None for the recipe's"
        )

    @property
    def max_passes(self) -> int:
        """Largest number of passes this stage can draw."""
        return max(self.passes)

    @property
    def median_passes(self) -> int:
        """Number of passes a network of this stage is evaluated at."""
        return sorted(self.passes)[len(self.passes) // 2]


@dataclass(frozen=True)
class PassSchedule:
    """The number of core passes over the course of training. Growth and random recurrence are schedules."""

    stages: tuple[Stage, ...] = (Stage((1,)),)

    def __post_init__(self) -> None:
        require(bool(self.stages), "PassSchedule", "stages", self.stages, "at least one stage")
        require(
            self.stages[0].start == 0.0,
            "PassSchedule",
            "stages",
            self.stages,
            "a sequence whose first stage starts at 0",
        )
        starts = [stage.start for stage in self.stages[1:]]
        open_starts = starts.count(None)
        alone = open_starts == 0 or len(starts) == 1
        require(
            alone,
            "PassSchedule",
            "stages",
            self.stages,
            "a sequence with every start given when there are several changes",
        )
        known = [0.0, *[start for start in starts if start is not None]]
        require(known == sorted(set(known)), "PassSchedule", "stages", self.stages, "sorted by start")

    @staticmethod
    def fixed(passes: int) -> PassSchedule:
        """The same number of passes throughout."""
        return PassSchedule((Stage((passes,)),))

    @staticmethod
    def growing(first: int, *then: int, start: float | None = None) -> PassSchedule:
        """Start with `first` passes; after growth use `then`, drawn uniformly at every step if several."""
        return PassSchedule((Stage((first,)), Stage(then, start)))

    @staticmethod
    def staged(*steps: tuple[float, int]) -> PassSchedule:
        """Pass counts by the fraction of tokens at which each begins: staged((0, 2), (0.5, 4), (0.8, 6))."""
        return PassSchedule(tuple(Stage((passes,), float(start)) for start, passes in steps))

    @property
    def grows(self) -> bool:
        """Whether the count changes between stages."""
        return len(self.stages) > 1

    @property
    def initial(self) -> int:
        """Passes the network is built with."""
        return self.stages[0].max_passes

    @property
    def final(self) -> int:
        """Passes a finished network is evaluated at: the last stage's median."""
        return self.stages[-1].median_passes

    @property
    def max_passes(self) -> int:
        """The largest count of all stages."""
        return max(stage.max_passes for stage in self.stages)

    def resolve(self, rho: float | None) -> PassSchedule:
        """Fill in a start left to the recipe: 1 − ρ, with ρ the fraction of tokens after growth."""
        if all(stage.start is not None for stage in self.stages):
            return self
        if rho is None or not 0.0 < rho <= 1.0:
            raise UsageError(
                f"rho = {rho!r} is not valid: a growing schedule needs a fraction of tokens in (0, 1]."
            )
        # With ρ = 1 the second stage is the whole run.
        if rho == 1.0:
            return PassSchedule((Stage(self.stages[-1].passes, 0.0),))
        start = round(1.0 - rho, 12)  # 1 − 0.18 is 0.82, without an error in the last binary digit
        return PassSchedule((self.stages[0], Stage(self.stages[1].passes, start)))


@dataclass(frozen=True)
class AllocationRule:
    """How many blocks a nominal depth has, and how many go to prelude, core and coda."""

    per_depth: int = 1  # blocks per unit of nominal depth (2 makes the 1:64 shapes)
    blocks: int | None = None  # a fixed number of blocks whatever the depth (width-only ladders)
    prelude: int | None = None  # fixed sizes of prelude and coda, as in 2/C/3; None divides evenly
    coda: int | None = None
    unsplit: bool = False  # a vanilla stack: every block in the prelude

    def __post_init__(self) -> None:
        paired = (self.prelude is None) == (self.coda is None)
        require(paired, "AllocationRule", "coda", self.coda, "given together with prelude, or neither")
        require_positive(self, ("per_depth",), MAX_BLOCKS)
        for name in ("blocks", "prelude", "coda"):
            require_count("AllocationRule", name, getattr(self, name), int(name == "blocks"), MAX_BLOCKS)

    def at(self, depth: int) -> BlockAllocation:
        """The block allocation at a nominal depth."""
        require(
            isinstance(depth, int) and depth >= 1, "Shape", "depth", depth, "a whole number of at least 1"
        )
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
    passes: PassSchedule = field(default_factory=PassSchedule)
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
            passes: PassSchedule = ...,
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

    def passes_without_gradient(self, passes: int) -> int:
        """Core passes, the first ones, that truncated backpropagation leaves out."""
        return 0 if self.backprop_passes is None else max(0, passes - self.backprop_passes)

    def stored_cores(self, passes: int) -> int:
        """Cores stored to run this many passes."""
        return 1 if self.tied else passes

    def stored_blocks(self, allocation: BlockAllocation, passes: int) -> int:
        """Blocks stored to run this many passes."""
        return allocation.executed(self.stored_cores(passes))
