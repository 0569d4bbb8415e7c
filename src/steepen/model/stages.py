"""The stages of training: what grows, and when.

A stage says at which fraction of the tokens it begins and how large the network is from then on, along every
axis: core passes, blocks, width, context and experts. What it does not say has the size of the arm, which is
that of the last stage unless it says otherwise. `growth` makes the larger network; a stage costs what a run
of its network would cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from steepen.errors import UsageError, require, show
from steepen.model.shape import MAX_BLOCKS, Shape
from steepen.utils.codec import Checked, Range

MAX_PASSES = 10_000  # of the core
NewBlocks = Literal["identity", "copy"]
BlockOrder = Literal["stacked", "interleaved"]
NewWidth = Literal["copy", "zero"]
AXES = ("passes", "blocks", "width", "context", "experts")
# What a schedule says besides its stages, and how an arm is given it: vanilla+blocks=1-all+new_blocks=copy.
CHOICES = ("new_blocks", "block_order", "new_width")


Share: TypeAlias = Annotated[float, Range(0, 1, above=True)]


@dataclass(frozen=True)
class Stage(Checked):
    """A stage of training: its size along every axis, None being the arm's own.

    `passes` holds one count, or several from which one is drawn uniformly at every optimizer step.
    `start` is the fraction of tokens at which the stage begins; None leaves it to the recipe (1 − ρ).
    """

    passes: tuple[Annotated[int, Range(1, MAX_PASSES)], ...]
    start: Annotated[float, Range(0, 1, below=True)] | None = 0.0
    blocks: float | None = None  # how many, if a whole number; below 1 a fraction of the arm's
    width: Share | None = None  # fraction of the arm's, with as wide heads
    context: Share | None = None  # fraction of the arm's; a batch has the same tokens, in shorter rows
    experts: float | None = None  # how many, or a fraction of the arm's; one is the dense MLP

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.passes), "Stage", "passes", self.passes, "one or more numbers")
        for name, value in (("blocks", self.blocks), ("experts", self.experts)):
            good = value is None or 0 <= value < 1 or (1 <= value <= MAX_BLOCKS and value == int(value))
            require(good, "Stage", name, value, "a whole number, or a fraction of the arm's below 1")
        for name in ("width", "context"):
            if getattr(self, name) == 1:  # one way to say that it is the arm's
                object.__setattr__(self, name, None)

    @property
    def max_passes(self) -> int:
        """Largest number of passes this stage can draw."""
        return max(self.passes)

    @property
    def median_passes(self) -> int:
        """Number of passes a network of this stage is evaluated at."""
        return sorted(self.passes)[len(self.passes) // 2]

    def shape(self, full: Shape) -> Shape:
        """The shape of this stage's network, of an arm with this shape."""
        allocation, heads = full.allocation, full.heads
        if self.blocks is not None:
            allocation = allocation.reduced_to(self.number(self.blocks, allocation.blocks))
        if self.width is not None:
            heads = _whole(self.width * heads, f"width {self.width:g} of {heads} heads")
        parts = 1 if self.context is None else _whole(1 / self.context, f"context {self.context:g}, as 1/n")
        if full.context % parts:
            raise UsageError(f"a context of {full.context:,} cannot be divided into {parts} equal parts.")
        return replace(
            full,
            allocation=allocation,
            heads=heads,
            width=heads * full.head_dim,
            mlp_width=-(-full.mlp_width * heads // full.heads),
            context=full.context // parts,
        )

    @staticmethod
    def number(size: float, full: int) -> int:
        """Blocks or experts of a stage, of an arm with so many."""
        return int(size) if size == int(size) else max(1, round(size * full))


def _whole(value: float, words: str) -> int:
    """The whole number that a value is but for rounding."""
    number = round(value)
    if number < 1 or not math.isclose(value, number, rel_tol=1e-6):
        raise UsageError(f"{words} is {value:.4g}, which is not a whole number: choose another fraction.")
    return number


@dataclass(frozen=True)
class StageSchedule(Checked):
    """The stages of a run. Growth along any axis and random recurrence are schedules."""

    stages: tuple[Stage, ...] = (Stage((1,)),)
    # New blocks are as at initialization, so that they change nothing, or copies of old ones; they come after
    # those of their section, or between them.
    new_blocks: NewBlocks = "identity"
    block_order: BlockOrder = "stacked"
    # Wider layers repeat their units and divide what these pass on, or have new units that pass on nothing.
    new_width: NewWidth = "copy"

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = [stage.start for stage in self.stages]
        later = starts[1:]
        known = [start for start in starts if start is not None]
        for holds, accepted in (
            (bool(self.stages), "at least one stage"),
            (starts[:1] == [0.0], "a sequence whose first stage starts at 0"),
            (
                later.count(None) in (0, len(later)),
                "a sequence with every start given, or none after the first",
            ),
            (known == sorted(set(known)), "sorted by start"),
        ):
            require(holds, "StageSchedule", "stages", self.stages, accepted)

    @staticmethod
    def fixed(passes: int) -> StageSchedule:
        """The same number of passes throughout."""
        return StageSchedule((Stage((passes,)),))

    @staticmethod
    def growing(first: int, *then: int, start: float | None = None) -> StageSchedule:
        """Start with `first` passes; after growth use `then`, drawn uniformly at every step if several."""
        return StageSchedule((Stage((first,)), Stage(then, start)))

    @staticmethod
    def staged(*steps: tuple[float, int]) -> StageSchedule:
        """Pass counts by the fraction of tokens at which each begins: staged((0, 2), (0.5, 4), (0.8, 6))."""
        return StageSchedule(tuple(Stage((passes,), float(start)) for start, passes in steps))

    @property
    def grows(self) -> bool:
        """Whether anything changes between stages."""
        return len(self.stages) > 1

    @property
    def axes(self) -> tuple[str, ...]:
        """What changes between stages."""
        return tuple(axis for axis in AXES if len({getattr(stage, axis) for stage in self.stages}) > 1)

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

    def resolve(self, rho: float | None) -> StageSchedule:
        """Fill in starts left to the recipe: from 1 − ρ on at equal distances, ρ the tokens after growth."""
        if all(stage.start is not None for stage in self.stages):
            return self
        if rho is None or not 0.0 < rho <= 1.0:
            raise UsageError(
                f"rho = {rho!r} is not valid: a growing schedule needs a fraction of tokens in (0, 1]."
            )
        first, *later = self.stages
        # 1 − 0.18 is 0.82, without an error in the last binary digit
        starts = [round(1.0 - rho + rho * index / len(later), 12) for index in range(len(later))]
        grown = tuple(replace(stage, start=start) for stage, start in zip(later, starts, strict=True))
        # With ρ = 1 the second stage is the beginning of the run.
        return replace(self, stages=grown if rho == 1.0 else (first, *grown))


@dataclass(frozen=True)
class _Track:
    """The sizes of an axis over a schedule, and the starts of all but the first (None: the recipe's)."""

    sizes: list[Any]
    starts: list[float] | None

    @property
    def grows(self) -> bool:
        return len(self.sizes) > 1

    def at(self, index: int, time: float | None) -> Any:
        """The size in the stage of an index, which begins at a fraction of the tokens."""
        if time is None or self.starts is None:  # all axes that grow have as many stages
            return self.sizes[index] if self.grows else self.sizes[0]
        return self.sizes[sum(start <= time for start in self.starts)]

    @staticmethod
    def of(schedule: StageSchedule, axis: str) -> _Track:
        """The track of an axis in a schedule."""
        sizes = [getattr(stage, axis) for stage in schedule.stages]
        changes = [i for i, (before, after) in enumerate(pairwise(sizes), 1) if before != after]
        known = [start for i in changes if (start := schedule.stages[i].start) is not None]
        starts = known if len(known) == len(changes) else None
        return _Track([sizes[0], *(sizes[i] for i in changes)], starts)

    @staticmethod
    def parse(axis: str, text: str) -> _Track:
        """From 1-all@0.3: sizes, and the starts of all but the first, or none."""
        words, at, starts = text.partition("@")
        sizes = [_size(axis, word) for word in words.split("-")]
        known = [_number(axis, start) for start in starts.split("-")] if at else None
        if len(sizes) < 2 or (known is not None and len(known) != len(sizes) - 1):
            raise UsageError(
                f"the growth {axis}={text} is not valid: give the sizes of two or more stages, and the start "
                f"of all but the first or none, as in passes=2-4-6@0.5-0.8 or blocks=1-all."
            )
        return _Track(sizes, known)


def parse_growth(schedule: StageSchedule, settings: Sequence[str]) -> StageSchedule:
    """Read growth settings, as in the arm vanilla+blocks=1-all@0.3+width=0.5-1@0.6, into an arm's schedule.

    The sizes of an axis are joined by hyphens, and so are the starts of all but the first, after @. "all" is
    the arm's own size. Without starts they are the recipe's, and all axes grow together.
    """
    chosen: dict[str, Any] = {}
    tracks = {axis: _Track.of(schedule, axis) for axis in AXES}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name in CHOICES:
            chosen[name] = text
        else:
            tracks[name] = _Track.parse(name, text)
    stages = [
        Stage(start=time, **{axis: track.at(index, time) for axis, track in tracks.items()})
        for index, time in enumerate(_stage_starts([track for track in tracks.values() if track.grows]))
    ]
    return replace(schedule, stages=tuple(stages), **chosen)


def _stage_starts(growing: Sequence[_Track]) -> list[float | None]:
    """When the stages begin in which some axes grow; None where the recipe decides it."""
    given = [track.starts for track in growing if track.starts is not None]
    if len(given) not in (0, len(growing)):
        raise UsageError("give the starts of every axis that grows, or of none.")
    if given:
        return [0.0, *sorted({start for starts in given for start in starts})]
    lengths = {len(track.sizes) for track in growing}
    if len(lengths) > 1:
        raise UsageError("axes that grow together need as many stages each: give their starts with @.")
    return [0.0, *[None] * (max(lengths, default=1) - 1)]


def _size(axis: str, text: str) -> Any:
    if axis == "passes":
        if not text.isdecimal():
            raise UsageError(f"{show(text)} is not a number of passes.")
        return (int(text),)
    if text == "all" or (axis in ("width", "context") and text == "1"):
        return None
    return _number(axis, text)


def _number(name: str, text: str) -> float:
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{show(text)} is not a number in the growth of {name}.") from None
