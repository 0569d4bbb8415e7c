"""`steepen.downstream`: scores along ladders, at equal loss, and forecast beyond the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.runs.record import RunRecord
    from steepen.studies.answer import Answer


def downstream(
    runs: str | Path | Sequence[str | Path],
    *,
    reference: str = "vanilla",
    arms: Sequence[str] = (),
    hold_out: Sequence[str] = (),
    targets: Sequence[float] = (),
    corpora: Mapping[str, str] | None = None,
) -> Downstream:
    """Ladders of answer NLL and CORE with multipliers over `reference`, residuals about the loss, forecasts.

    `runs` are stores, run directories, records, or tables of scores. Runs named by `hold_out` (beginnings of
    their names) take part in no fit; `targets` are FLOPs to forecast CORE at; `corpora` maps content hashes
    to names.
    """
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    answer, _ = analyse_scores(
        [Path(path) for path in paths], reference=reference, arms=arms, hold_out=hold_out, targets=targets,
        corpora=corpora,
    )  # fmt: skip
    return Downstream(answer)


def analyse_scores(
    paths: Sequence[Path],
    *,
    reference: str,
    arms: Sequence[str],
    hold_out: Sequence[str],
    targets: Sequence[float],
    corpora: Mapping[str, str] | None,
) -> tuple[Answer, list[RunRecord]]:
    """The answer, and the records of the runs it is about; points of a table carry names, not runs."""
    from steepen.studies.scores.downstream import downstream_answer
    from steepen.studies.scores.read_scores import read_scores

    found, records = read_scores(paths)
    answer = downstream_answer(
        found, reference=reference, held_out=hold_out, targets=targets, arms=arms, corpora=corpora
    )
    known = {record.run for record in records}
    if not known.issuperset(answer.runs):
        panels = tuple(
            replace(panel, series=tuple(replace(s, runs=(), texts=s.texts or s.runs) for s in panel.series))
            for panel in answer.panels
        )
        answer = replace(answer, runs=(), panels=panels)
    return answer, [record for record in records if record.run in set(answer.runs)]


@dataclass(frozen=True, repr=False)
class Downstream(Result):
    """The downstream analysis: its answer, with multipliers as rows and its panels by title."""

    answer: Answer

    def summary(self) -> str:
        """The findings, a line each."""
        return "\n".join(self.answer.findings)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each series and metric: multipliers at the lowest and highest common budget."""
        tables = [table for table in self.answer.tables if table.title.startswith("Multipliers over")]
        return [dict(zip(table.columns, row, strict=True)) for table in tables for row in table.rows]

    def plot(self, ax: Any = None, panel: str = "at equal answer NLL") -> Any:
        """Draw one panel, by the beginning of its title."""
        from steepen.report.colours import ARM_TITLES
        from steepen.report.figure import plot_panel

        for one in self.answer.panels:
            if one.title.startswith(panel):
                axes = new_axes(ax)
                plot_panel(axes, one, dict(ARM_TITLES))
                return axes
        titles = ", ".join(dict.fromkeys(one.title for one in self.answer.panels))
        raise UsageError(f"there is no panel {panel!r}; there are {titles}.")

    def headline(self) -> str:
        """The question in few words."""
        return f"downstream scores: {len(self.answer.findings)} findings, {len(self.answer.panels)} panels"
