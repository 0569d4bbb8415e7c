"""`forecast` and `downstream`: scores of ladders, and what they will be at larger compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from steepen.errors import UsageError
from steepen.report.colours import ARM_TITLES
from steepen.requests.report import FormatsField
from steepen.requests.request import Argument, Option, Request, function
from steepen.requests.tables import TABLE, as_table
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Lines, Paragraph
from steepen.utils.codec import Range, option
from steepen.utils.values import Pairs, Several, Words

if TYPE_CHECKING:
    from steepen.evaluation.forecast import Forecast as RunForecast
    from steepen.laws.downstream_table import TaskForecast, TaskForecasts
    from steepen.studies.answer import Answer
    from steepen.studies.scores.score_ladders import MultiplierRow

ArmsField: TypeAlias = Annotated[Words | None, Option("Only these arms, comma-separated.")]


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

    forecast: RunForecast

    @property
    def rows(self) -> list[ForecastRow]:
        """Held-out runs, then the forecasts at the targets."""
        found = self.forecast
        return [
            *(ForecastRow(run.arm, run.run, run.flops, r.forecast, r.observed, r.error)
              for run, r in found.hold_out_scores),
            *(ForecastRow(arm, "", flops, score) for arm, flops, score in found.at_targets()),
        ]  # fmt: skip

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

        found = self.forecast
        name = "CORE" if found.is_core else "mean centred accuracy"
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


@dataclass(frozen=True)
class Forecast(Request["ForecastResult | TaskForecastResult"]):
    """Forecast CORE at a larger compute, and check the method on held-out runs.

    Each arm's task losses follow a power law in compute, a sigmoid per task maps loss to centred accuracy,
    and one factor maps the mean of the tasks to CORE. A run named by `hold_out` takes no part in the fit, so
    the forecast, the crossings and the figure do not know it.

    For a table, compute gives loss by a power law and loss gives accuracy by the chain.
    """

    examples = (
        "steepen forecast runs --target 1.2e21 --figure forecast.png",
        "steepen forecast table.csv --chain olmo --target 1e21",
    )
    figure = tables = True

    paths: Annotated[
        Several,
        Argument(
            "Stores, run directories or record.json files with CORE scores; or one table with columns "
            "accuracy or error, and flops, loss or both (and arm).",
            metavar="RUNS",
            python="Also a frame.",
        ),
    ]
    _: KW_ONLY
    targets: tuple[Annotated[float, Range(1e-9, 1e60)], ...] = option(
        "Compute in FLOPs to forecast at (a loss, for a table without flops). Repeatable.",
        (),
        flag="--target",
    )
    tasks: Words = option(
        "core17, all, comma-separated labels, or a file of `steepen eval filter --out`. If a run lacks some "
        "of CORE's 22 tasks, the mean of the named ones is forecast instead.",
        ("core17",),
    )
    hold_out: tuple[str, ...] = option(
        "Hold a run (a unique prefix of its name; FLOPS or ARM:FLOPS of a table) out of every fit, forecast "
        "and figure; none for no run. Default: forecast from all runs, and check the method on the largest "
        "run of each arm. Repeatable.",
        (),
    )
    residuals: Literal["raw-nll", "log-nll"] = option(
        "Residuals that the task laws are fitted to: raw-nll (the paper's authors) or log-nll.", "raw-nll"
    )
    ratio: Literal["measured", "predicted"] = option(
        "What the factor from the tasks to CORE is fitted to: the measured mean accuracy of the tasks (the "
        "paper's authors) or the predicted one.",
        "measured",
    )
    arms: ArmsField = None
    chain: Literal["gadre", "olmo", "paper", "direct"] = TABLE(
        "How accuracy follows loss: gadre (exponential), olmo (sigmoid of four parameters), paper (sigmoid "
        "of two), or direct (a power law of the error in compute).",
        "gadre",
    )
    columns: Pairs | None = TABLE("Names of its columns, e.g. loss=answer_nll,accuracy=core_accuracy.")
    where: tuple[str, ...] = TABLE("Only rows with arm=a,b or params>=1e8. Repeatable.", ())

    def run(self) -> ForecastResult | TaskForecastResult:
        """Fit the runs or the table, check the fit, and forecast."""
        hold_out = list(self.hold_out) if self.hold_out else None
        if len(self.paths) == 1 and _is_table(self.paths[0]):
            from steepen.laws.downstream_table import forecast_table

            table = as_table(self.paths[0], columns=self.columns, where=self.where)
            found = forecast_table(table, self.chain, targets=self.targets, hold_out=hold_out)
            return TaskForecastResult(found)
        if self.columns or self.where:
            raise UsageError("`columns` and `where` are for a table.")
        from steepen.evaluation.forecast import forecast as forecast_runs
        from steepen.evaluation.scored_runs import group_series, read_scored_runs, require_core

        runs = require_core(read_scored_runs(list(map(Path, self.paths))))
        found = forecast_runs(
            group_series(runs, self.arms or ()), tasks=self._labels(),
            held_out=[] if hold_out == ["none"] else hold_out, targets=self.targets,
            residuals=self.residuals, ratio=self.ratio,
        )  # fmt: skip
        return ForecastResult(found)

    def _labels(self) -> str | list[str]:
        """core17 and all as they are; else the labels, of a file where one is named."""
        from steepen.utils.files import read_text

        labels = list(self.tasks)
        if labels in (["core17"], ["all"]):
            return labels[0]
        if len(labels) == 1 and Path(labels[0]).is_file():
            try:
                labels = read_text(Path(labels[0])).split()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"`tasks`: {labels[0]} cannot be read ({error}).") from None
        if not labels:
            raise UsageError("`tasks` names no task; name one or more.")
        return labels


def _is_table(one: Any) -> bool:
    """Whether it is a table of runs, and not a record or a directory."""
    if not isinstance(one, str | Path):
        return True
    return str(one).startswith("paper:") or (Path(one).is_file() and Path(one).name != "record.json")


@dataclass(frozen=True)
class Downstream(Request[DownstreamResult]):
    """Do gains in loss carry over to downstream scores?

    Answer NLL and CORE along the ladders with compute multipliers at equal scores, what the loss does not
    explain (one pooled line, and task by task), the task sigmoids, and forecasts of loss, answer NLL and CORE
    with held-out runs. KL effective depth and passes at test time where they were evaluated. Several corpora
    are compared with one another.
    """

    examples = (
        "steepen downstream runs --out downstream",
        "steepen downstream core_scores.csv core_task_scores.csv --hold-out untied-grow-d26",
    )
    tables = True

    paths: Annotated[
        Several,
        Argument(
            "Stores, run directories or record.json files with scores; or tables with columns arm, flops, "
            "loss, answer_nll, core22, core17, depth, corpus, and one with a column task.",
            metavar="RUNS",
        ),
    ]
    _: KW_ONLY
    reference: str = option("The arm that multipliers compare with.", "vanilla")
    arms: ArmsField = None
    hold_out: tuple[str, ...] = option(
        "Leave a run (the beginning of its name) out of every fit. Repeatable.", ()
    )
    targets: tuple[Annotated[float, Range(1, 1e40)], ...] = option(
        "Compute in FLOPs to forecast CORE at. Repeatable.", (), flag="--target"
    )
    corpora: tuple[str, ...] = option(
        "Name a corpus, with the beginning of its hash. Repeatable.",
        (),
        flag="--corpus",
        metavar="HASH=NAME",
        python="Also a dict.",
    )
    out: Path | None = option("Write a page, figures and tables to this directory.")
    formats: FormatsField = ("pdf", "svg", "png")

    def run(self) -> DownstreamResult:
        """Read the scores, analyse them, and write the report where one is asked for."""
        from steepen.evaluation.scored_runs import read_scored_runs
        from steepen.studies.scores.downstream import analyse_downstream

        found = analyse_downstream(
            read_scored_runs(list(map(Path, self.paths))), reference=self.reference,
            held_out=self.hold_out, targets=self.targets, arms=self.arms or (), corpora=self._corpora(),
        )  # fmt: skip
        answer = found.answer()
        written: list[Path] = []
        if self.out is not None:
            from steepen.report.load_studies import LoadedStudy
            from steepen.report.write import write_report

            study = LoadedStudy("downstream", answer, {}, tuple(found.records))
            written = write_report([study], self.out, self.formats)
        return DownstreamResult(answer, tuple(found.multipliers), tuple(written))

    def _corpora(self) -> dict[str, str]:
        from steepen.utils.series import DIGITS

        found: dict[str, str] = {}
        for word in self.corpora:
            key, equals, name = word.partition("=")
            if not (key and equals and name):
                raise UsageError(f"`corpora` {word!r}: write HASH=NAME, e.g. 1a2b3c4d=fineweb-edu.")
            found[key[:DIGITS]] = name
        return found


forecast = function(Forecast)
downstream = function(Downstream)
