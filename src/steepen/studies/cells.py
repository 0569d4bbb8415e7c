"""Cells: the runs of a study, each with what was varied, its spec and its record.

A study plans runs, measures them (`measure`), finds the optima of its sweeps (`sweeps.py`), and makes its
tables and panels from cells and optima: a table has a row for each (`table`), a panel a curve for each value
of what was varied (`plotting.py`). `Draft` in `answer.py` collects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self, TypeVar, cast

from steepen.errors import SteepenError
from steepen.recipe.recipe import PlannedRun
from steepen.results.table import Table
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Work
from steepen.studies.context import StudyContext
from steepen.studies.driver.journal import Batch
from steepen.utils.json_io import json_safe
from steepen.utils.rows import Named, Rows

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """Named values; a subclass adds its own properties. `row["depth"]` is either."""

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else getattr(self, name)

    def plus(self, **values: Any) -> Self:
        """The row with further values."""
        return replace(self, values={**self.values, **values})


@dataclass(frozen=True)
class Cell(Row):
    """One run of a study. `values` are what was varied and what follows from it."""

    spec: RunSpec
    record: RunRecord | None  # None: it diverged

    @property
    def run(self) -> str:
        """The run's hash."""
        return self.spec.hash

    @property
    def trunk(self) -> str:
        """The run that trained its first steps; itself, where it shares them with none."""
        return (self.record.trunk if self.record is not None else "") or self.run

    @property
    def loss(self) -> float:
        """Validation loss; infinite where the run diverged."""
        return math.inf if self.record is None else self.record.validation_loss

    @property
    def kl_depth(self) -> float | None:
        """KL effective depth, where `steepen eval --kl-depth` has joined it to the record."""
        if self.record is None or "kl_depth" not in self.record.evaluation:
            return None
        return float(self.record.evaluation["kl_depth"]["depth"])


Cells = Rows[Cell]
Plan = tuple[PlannedRun | RunSpec, Mapping[str, Any]]  # a run, and what was varied


def measure(
    context: StudyContext,
    planned: Iterable[Plan],
    *,
    branches: bool = False,
    required: bool = False,
    note: dict[str, Any] | None = None,
) -> Work[Cells]:
    """Request the runs, and return their cells. The FLOPs of a planned run are counted as sweeps do.

    With `branches` they start from common first steps, where the preset says so. Where every run is
    `required`, one that diverged is an error that names it. The journal has the `note` before the runs.
    """
    plans = [
        (run, values) if isinstance(run, RunSpec)
        else (context.spec(run, branch=branches), {"flops": context.sweep_flops(run), **values})
        for run, values in planned
    ]  # fmt: skip
    specs = [spec for spec, _ in plans]
    records = yield specs if note is None else Batch(specs, note)
    for spec, record in zip(specs, records, strict=True):
        if record is None and required:
            raise SteepenError(
                f"run {spec.hash} ({spec.arm.name} d{spec.shape.depth}) diverged, and this study needs every "
                "run; lower its learning rate (a preset file, or `steepen study fit-recipe`)."
            )
    return Rows(Cell(values, spec, record) for (spec, values), record in zip(plans, records, strict=True))


def records_of(cells: Cells) -> list[RunRecord]:
    """The records of the runs that finished."""
    return [cell.record for cell in cells if cell.record is not None]


def plan_grid(plan: Callable[..., Plan], **axes: Iterable[Any]) -> list[Plan]:
    """The plans of every combination of values, the last axis varying fastest.

    What was varied are the values of the axes, arms by their names, and what `plan` adds to or puts in the
    place of them.
    """
    plans: list[Plan] = []
    for point in product(*axes.values()):
        varied = dict(zip(axes, point, strict=True))
        run, more = plan(**varied)
        named = {name: getattr(value, "name", value) for name, value in varied.items()}
        plans.append((run, {**named, **more}))
    return plans


def table(
    title: str, rows: Sequence[Named], caption: str = "", columns: Mapping[str, str] | None = None
) -> Table:
    """A table of rows; numbers that are not finite are empty.

    `columns` are names of values by heading; without them the rows are dicts of values by heading. A first
    column `arm` has the names that the report colours.
    """
    named = columns or {heading: heading for heading in cast("Iterable[str]", rows[0] if rows else ())}
    cells = tuple(tuple(json_safe(row[name]) for name in named.values()) for row in rows)
    return Table(title, tuple(named), cells, caption, arm_column=0 if [*named][:1] == ["arm"] else None)


def lead(study: Work[T], answer: Callable[[Sequence[RunSpec]], Sequence[RunRecord | None]]) -> T:
    """Send a study the records that `answer` gives for each batch, until it returns."""
    try:
        specs = next(study)
        while True:
            specs = study.send(answer(specs))
    except StopIteration as end:
        return end.value


def run_concurrently(parts: Sequence[Work[Any]]) -> Work[Any]:
    """Run the parts in lockstep, each step's batches as one so that all slots are used; the results."""
    results: list[Any] = [None] * len(parts)
    requested: dict[int, Sequence[RunSpec]] = {}
    answers: dict[int, Sequence[RunRecord | None] | None] = dict.fromkeys(range(len(parts)))
    while True:
        for i, answer in answers.items():
            try:
                requested[i] = next(parts[i]) if answer is None else parts[i].send(answer)
            except StopIteration as end:
                results[i] = end.value
                requested.pop(i, None)
        if not requested:
            return results
        records = yield [spec for specs in requested.values() for spec in specs]
        answers, start = {}, 0
        for i, specs in requested.items():
            answers[i] = records[start : start + len(specs)]
            start += len(specs)
