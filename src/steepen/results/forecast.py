"""What `forecast` and `downstream` return: scores of runs or of a table, now and at a larger compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steepen.report.colours import ARM_TITLES
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Lines, Paragraph

if TYPE_CHECKING:
    from steepen.evaluation.forecast import Forecast
    from steepen.laws.downstream_table import TaskForecast, TaskForecasts
    from steepen.studies.answer import Answer
    from steepen.studies.scores.score_ladders import MultiplierRow


@dataclass(frozen=True)
class ForecastRow:
    """A score forecast at a compute; `observed` where a run was held out there."""

    arm: str
    run: Annotated[str, Column(shown=False)]
    flops: Annotated[float, Column("FLOPs", ".3e")]
    forecast: Annotated[float, Column(format=".4f")]
    observed: Annotated[float | None, Column(format=".4f", align="right")] = None
    error: Annotated[float | None, Column("observed − forecast", "+.4f", align="right")] = None


@dataclass(frozen=True, eq=False, repr=False)
class ForecastResult(Result):
    """CORE (or the mean of some tasks) of scored runs at larger compute, checked on held-out runs."""

    forecast: Forecast

    @property
    def rows(self) -> list[ForecastRow]:
        """Held-out runs, then the forecasts at the targets."""
        found = self.forecast
        return [
            *(ForecastRow(run.arm, run.run, run.flops, r.forecast, r.observed, r.error)
              for run, r in found.hold_out_scores),
            *(ForecastRow(arm, "", flops, score) for arm, flops, score in found.at_targets()),
        ]  # fmt: skip

    @property
    def score_title(self) -> str:
        """What is forecast."""
        return "CORE" if self.forecast.is_core else "mean centred accuracy"

    def headline(self) -> str:
        """What was fitted, and how well."""
        found, fit = self.forecast, self.forecast.fit
        counts = ", ".join(f"{len(one.runs)} of {one.label}" for one in found.series)
        tasks = f"{len(found.tasks)} tasks"
        return f"fitted to {counts}; {tasks}; r = {fit.r:.4f}; residual SD {fit.sigma:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Runs, tasks, held-out runs, forecasts and crossings."""
        found = self.forecast
        return {
            "score": found.score_name,
            "tasks": list(found.tasks),
            "runs": {one.label: [run.run for run in one.runs] for one in found.series},
            "hold_out": [{"run": run.run, **asdict(result)} for run, result in found.hold_out_scores],
            "forecast": [
                {"arm": label, "flops": flops, found.score_name: score}
                for label, flops, score in found.at_targets()
            ],
            "compute_for": [
                {"reference": reference, "core": found.references[reference], "arm": label, "flops": flops}
                for reference, own in found.crossings.items()
                for label, flops in own.items()
            ],
            "r": found.fit.r,
            "scatter": found.fit.sigma,
        }

    def panels(self) -> list[Panel]:
        """The score against compute: measured, held out, forecast, and where it reaches references."""
        from steepen.report.score_panels import forecast_panel

        return [forecast_panel(self.forecast)]

    def blocks(self, width: int) -> Iterable[Block]:
        """The fit, the check on held-out runs, the forecasts, and the compute to match GPT-3."""
        from steepen.evaluation.forecast import MIN_RUNS

        found, name = self.forecast, self.score_title
        yield Lines(self.headline())
        for run, result in found.hold_out_scores:
            yield Lines(
                f"held out {run.run} ({run.arm}, {run.flops:.3e} FLOPs): {name} {result.observed:.4f}, "
                f"forecast without it {result.forecast:.4f}, error {result.error:+.4f} "
                f"({result.error_in_sigma:+.1f} residual SD)"
            )
        if not found.hold_out_scores:
            default = f"by default the largest run of each arm with more than {MIN_RUNS} runs"
            yield Lines(f"nothing held out ({default}).")
        for arm, flops, score in found.at_targets():
            yield Lines(f"{arm} at {flops:.3e} FLOPs: {name} {score:.4f}")
        if not found.is_core:
            yield Lines(
                f"the score is the mean of {', '.join(found.tasks)}, not CORE: some of its 22 tasks were not "
                "evaluated, so GPT-3's CORE is left out."
            )
        for reference, own in found.crossings.items():
            for arm, flops in own.items():
                far = "out of reach" if flops > 0 else "below any forecast"
                need = f"{flops:.2e} FLOPs" if math.isfinite(flops) else far
                yield Lines(f"{arm} to match {reference} (CORE {found.references[reference]:.4f}): {need}")


@dataclass(frozen=True)
class TaskForecastRow:
    """The accuracy (or error) forecast at a compute or loss, with its interval."""

    arm: str
    at: Annotated[float, Column(format=".4g")]
    forecast: Annotated[float, Column(format=".4f")]
    low: Annotated[float, Column(format=".4f")]
    high: Annotated[float, Column(format=".4f")]
    observed: Annotated[float | None, Column(format=".4f", align="right")] = None


@dataclass(frozen=True, eq=False, repr=False)
class TaskForecastResult(Result):
    """The accuracy (or error) of a table's task at larger compute, by a chain of laws."""

    forecasts: TaskForecasts

    @property
    def rows(self) -> list[TaskForecastRow]:
        """Held-out runs, then the forecasts at the targets."""
        return [self._row(one) for one in (*self.forecasts.hold_out, *self.forecasts.targets)]

    def _row(self, one: TaskForecast) -> TaskForecastRow:
        def shown(accuracy: float) -> float:
            return 1 - accuracy if self.forecasts.is_error else accuracy

        low, high = sorted(map(shown, one.interval))
        observed = None if one.observed is None else shown(one.observed)
        return TaskForecastRow(one.arm, one.at, shown(one.accuracy), low, high, observed)

    @property
    def quantity(self) -> str:
        """What the table has: accuracy or error."""
        return "error" if self.forecasts.is_error else "accuracy"

    def headline(self) -> str:
        """The chain, what it was fitted to, and the scatter about it."""
        found = self.forecasts
        counts = ", ".join(
            f"{count} of {arm}" if arm else f"{count} runs" for arm, count in found.runs.items()
        )
        fitted = f"{found.chain} chain, fitted to {counts}"
        return f"{fitted}; residual SD of the {self.quantity} {found.residual_sd:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Laws, link, held-out runs and forecasts; accuracies, also where the table has errors."""
        return asdict(self.forecasts)

    def blocks(self, width: int) -> Iterator[Block]:
        """The chain, held-out runs and forecasts."""
        yield Lines(self.headline())
        for row in self.rows:
            where = f"loss {row.at:.4g}" if self.forecasts.by_loss else f"{row.at:.3e} FLOPs"
            who = f"{row.arm} at {where}" if row.arm else f"at {where}"
            value = f"{row.forecast:.4f} ({row.low:.4f} to {row.high:.4f})"
            if row.observed is None:
                yield Lines(f"{who}: {self.quantity} {value}")
            else:
                yield Lines(
                    f"held out {who}: {self.quantity} {row.observed:.4f}, forecast without it {value}, "
                    f"error {row.observed - row.forecast:+.4f}"
                )


@dataclass(frozen=True, eq=False, repr=False)
class DownstreamResult(Result):
    """Scores along ladders, at equal loss, and forecast beyond the runs; `answer` has everything."""

    arm_titles = ARM_TITLES

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
