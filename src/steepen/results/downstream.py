"""What `downstream` returns: multipliers at equal scores as rows, and the whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.text import Block, Paragraph

if TYPE_CHECKING:
    from steepen.studies.answer import Answer
    from steepen.studies.scores.score_ladders import MultiplierRow


@dataclass(frozen=True, eq=False, repr=False)
class DownstreamResult(Result):
    """Scores along ladders, at equal loss, and forecast beyond the runs; `answer` has everything."""

    answer: Answer
    multipliers: tuple[MultiplierRow, ...]
    written: tuple[Path, ...] = ()  # the page first, then figures and tables

    @property
    def rows(self) -> Sequence[MultiplierRow]:
        """A row for each series and metric: multipliers at the lowest and highest common budget."""
        return self.multipliers

    def headline(self) -> str:
        """The question in few words."""
        return f"downstream scores: {len(self.answer.findings)} findings, {len(self.answer.panels)} panels"

    def to_dict(self) -> dict[str, Any]:
        """The answer, as a study's."""
        return self.answer.to_dict()

    def panels(self) -> Sequence[Panel]:
        """Every panel; multipliers at equal answer NLL first."""
        first = [panel for panel in self.answer.panels if panel.title.startswith("at equal answer NLL")]
        return [*first, *(panel for panel in self.answer.panels if panel not in first)]

    def plot(self, ax: Any = None, panel: str = "") -> Any:
        """Draw one panel, by the beginning of its title; returns the Axes."""
        from steepen.report.colours import ARM_TITLES
        from steepen.report.figure import plot_panel

        for one in self.panels():
            if one.title.startswith(panel):
                if ax is None:
                    from matplotlib import pyplot

                    ax = pyplot.subplots(figsize=(5.0, 3.6), layout="constrained")[1]
                plot_panel(ax, one, ARM_TITLES)
                return ax
        titles = ", ".join(dict.fromkeys(one.title for one in self.answer.panels))
        raise UsageError(f"there is no panel {panel!r}; there are {titles}.")

    def blocks(self, width: int) -> Iterable[Block]:
        """The findings, a line each."""
        yield from map(Paragraph, self.answer.findings)

    def print(self) -> None:
        """Print the whole answer: findings, tables and warnings."""
        from steepen.results.study import answer_blocks
        from steepen.results.text import print_blocks

        print_blocks(lambda width: answer_blocks(self.answer, width))
        if self.written:
            print(f"\n{self.written[0]}, and {len(self.written) - 1} files of figures and tables.")
