"""What `status` returns: the progress of one study, or of all in a directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from steepen.results.result import Result
from steepen.results.runs import run_blocks
from steepen.results.table import Column
from steepen.results.text import Block, Lines
from steepen.studies.driver.study_status import StudyStatus, done_fraction
from steepen.utils.formatting import format_duration

NOT_ENDED = ("running", "failed", "interrupted", "unknown")


@dataclass(frozen=True)
class StatusRow:
    """One study: how far it is."""

    study: str
    state: str
    done: Annotated[float, Column("done (FLOPs)", ".0%")]
    runs: int
    finished: int
    flops_left: Annotated[float, Column("FLOPs left")]
    seconds_left: Annotated[float | None, Column("time left")]
    message: Annotated[str, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class Status(Result):
    """The progress of studies; `alone`: one was asked for by name."""

    studies: tuple[StudyStatus, ...]
    preparing: tuple[str, ...] = ()  # studies whose data is being prepared: they have no runs yet
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])  # why, by name
    alone: bool = False
    directory: str = "studies"

    @property
    def rows(self) -> list[StatusRow]:
        """One row per study."""
        return [
            StatusRow(
                one.name, one.state, done_fraction(one), len(one.runs), one.counts["finished"],
                one.flops_left, one.seconds_left, one.message,
            )
            for one in self.studies
        ]  # fmt: skip

    @property
    def state(self) -> Literal["preparing", "running", "ended"]:
        """Whether it is worth looking again."""
        if self.preparing:
            return "preparing"
        return "running" if any(one.state == "running" for one in self.studies) else "ended"

    def headline(self) -> str:
        """How many studies there are."""
        return f"{len(self.studies)} studies: {', '.join(f'{one.name} {one.state}' for one in self.studies)}"

    def to_dict(self) -> dict[str, Any]:
        """The study that was asked for, or all of them."""
        if self.alone and self.preparing:
            return {"name": self.preparing[0], "state": "preparing"}
        if self.alone:
            return self.studies[0].to_dict()
        return {"studies": [one.to_dict() for one in self.studies], "unreadable": dict(self.unreadable)}

    def blocks(self, width: int) -> Iterable[Block]:
        """One paragraph per study; of one alone also its message, and the runs that have not finished."""
        yield from (Lines(_line(one)) for one in self.studies)
        yield from (
            Lines(f"{name}: its data is being prepared; no runs requested yet.") for name in self.preparing
        )
        yield from (Lines(f"{name}: {why}") for name, why in self.unreadable.items())
        if not (self.studies or self.preparing or self.unreadable):
            yield Lines(f"No study in {self.directory} yet.")
        for one in self.studies if self.alone else ():
            yield from (Lines(text) for text in (one.message,) if text)
            if rows := [vars(row) for row in one.runs if row.status in NOT_ENDED]:
                yield from run_blocks(rows, width)


def _line(study: StudyStatus) -> str:
    """State, runs by status, FLOPs done and left, ETA."""
    counts = ", ".join(f"{count} {name}" for name, count in study.counts.items() if count)
    line = f"{study.name}: {study.state}, batch {study.batches}; {len(study.runs)} runs requested"
    line += f" ({counts})" if counts else ""
    line += f"; {study.flops_done:.3g} FLOPs done, {study.flops_left:.3g} left"
    if study.flops_left and study.seconds_left is not None:
        left = format_duration(study.seconds_left)
        line += f", ETA {left}" if study.state == "running" else f", about {left} of work"
    return line + "."
