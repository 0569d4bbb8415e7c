"""What a study returns: findings in words, tables, and panels that the report draws. Plain data."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.utils.codec import from_builtins, to_builtins

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Axis:
    """One axis of a panel."""

    label: str
    scale: Scale = "linear"
    reverse: bool = False


@dataclass(frozen=True)
class Series:
    """Points, a line or a band. `arm` decides the colour, the same everywhere; `runs` the hover's details."""

    label: str
    kind: Literal["points", "line", "band"]
    x: tuple[float, ...]
    y: tuple[float, ...]  # of a band: its lower edge
    y_high: tuple[float, ...] = ()  # of a band: its upper edge; of points: unused
    arm: str | None = None
    level: float | None = None  # a shade within a family of curves (depth, budget, K), instead of an arm
    style: Literal["solid", "dashed", "dotted"] = "solid"  # dashed: extrapolated
    filled: bool = True  # hollow points: censored, fixed controls
    marker: Literal["circle", "star", "square"] = "circle"
    runs: tuple[str, ...] = ()  # run hashes, point by point


@dataclass(frozen=True)
class Panel:
    """One set of axes. `lines` are vertical or horizontal marks with a label."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    lines: tuple[tuple[Literal["x", "y"], float, str], ...] = ()
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under headings, numbers kept as numbers; the report formats them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Answer:
    """A study's answer. `findings` begin with the verdicts; `values` holds every number under its name."""

    study: str
    question: str
    section: str  # of the paper
    findings: tuple[str, ...]
    values: dict[str, Any]
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    warnings: tuple[str, ...] = ()
    method: tuple[str, ...] = ()  # how it was measured, a sentence each
    runs: tuple[str, ...] = field(default=())  # hashes of every run it rests on

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return to_builtins(self)

    @staticmethod
    def from_dict(value: Any) -> Answer:
        """The answer of plain values."""
        return from_builtins(Answer, value, "answer")


# A study yields a batch of specs and is sent their records, in the same order, until it returns its answer.
# In place of a record stands None where the run diverged and the study accepts that as a result.
Study: TypeAlias = Generator[Sequence[RunSpec], Sequence[RunRecord | None], Answer]
