"""`forecast` and `downstream`: scores of ladders, and what they will be at larger compute."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from steepen.errors import UsageError
from steepen.requests.report import FormatsField
from steepen.requests.request import Argument, Option, Request, function
from steepen.requests.tables import TABLE, as_table
from steepen.results.forecast import DownstreamResult, ForecastResult, TaskForecastResult
from steepen.utils.codec import Range, option
from steepen.utils.values import Pairs, Several, Words

ArmsField: TypeAlias = Annotated[Words | None, Option("Only these arms, comma-separated.")]


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

        runs = require_core(read_scored_runs([Path(one) for one in self.paths]))
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


forecast = function(Forecast)


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
            read_scored_runs([Path(one) for one in self.paths]), reference=self.reference,
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


downstream = function(Downstream)
