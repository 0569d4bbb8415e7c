"""`steepen.downstream`: scores along ladders, at equal loss, and forecast beyond the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.errors import UsageError
from steepen.results.table import row_dict

if TYPE_CHECKING:
    from steepen.studies.answer import Answer
    from steepen.studies.scores.downstream import Downstream as Analysis
    from steepen.studies.scores.score_ladders import MultiplierRow


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
    found = analyse_scores(
        [Path(path) for path in paths], reference=reference, arms=arms, hold_out=hold_out, targets=targets,
        corpora=corpora,
    )  # fmt: skip
    return Downstream(found.answer(), tuple(found.multipliers))


def analyse_scores(
    paths: Sequence[Path],
    *,
    reference: str,
    arms: Sequence[str],
    hold_out: Sequence[str],
    targets: Sequence[float],
    corpora: Mapping[str, str] | None,
) -> Analysis:
    """The analysis of the runs at some paths."""
    from steepen.evaluation.scored_runs import read_scored_runs
    from steepen.studies.scores.downstream import analyse_downstream

    return analyse_downstream(
        read_scored_runs(paths), reference=reference, held_out=hold_out, targets=targets, arms=arms,
        corpora=corpora,
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Downstream(Result):
    """The downstream analysis: its answer, with multipliers as rows and its panels by title."""

    answer: Answer
    rows: tuple[MultiplierRow, ...]

    def summary(self) -> str:
        """The findings, a line each."""
        return "\n".join(self.answer.findings)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each series and metric: multipliers at the lowest and highest common budget."""
        return [row_dict(row) for row in self.rows]

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
