"""A study while it runs, as a study that the report can draw: progress, curves, and the verdict so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepen.errors import SteepenError
from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse
from steepen.laws.ladder import read_ladders
from steepen.report.load_studies import LoadedStudy
from steepen.report.run_panels import thin_curve
from steepen.runs.record import RunRecord
from steepen.runs.row import RunRow
from steepen.runs.store import RunDirectory, read_metrics
from steepen.studies.answer import Answer, Axis, Panel, Series, StudyVerdict, Table
from steepen.studies.driver.journal import Journal
from steepen.studies.driver.study_status import StudyStatus, done_fraction
from steepen.studies.plotting import family_curve, line, points
from steepen.tables.table import table_from
from steepen.utils.files import ReadOnce
from steepen.utils.formatting import format_duration
from steepen.utils.rows import grouped

CURVE_POINTS = 120  # of a training curve: means over equal ratios of tokens
CURVES = 24  # the most curves of one panel; running ones first, then the newest
MIN_RUNGS = 4  # of the reference and an arm, from which a verdict is tried


@dataclass
class LiveStudy:
    """Draws a study again and again; the verdict is fitted again only when more runs have finished."""

    _fitted: dict[str, tuple[tuple[str, ...], LadderAnalysis | str]] = field(default_factory=dict)
    _records: ReadOnce[RunRecord | None] = field(default_factory=lambda: ReadOnce(_record))

    def load(self, study: Journal, status: StudyStatus) -> LoadedStudy:
        """The study as it is now, with an answer made of what has finished."""
        directory = status.runs_directory
        records = [
            record
            for row in status.runs
            if row.status == "finished"
            and (record := self._records(RunDirectory(Path(directory, row.run)).record_file)) is not None
        ]
        law, note = self._law(study, records)
        verdicts = {} if law is None else law.verdicts
        answer = Answer(
            study=str(status.options.get("study", status.name)),
            question=f"{status.state}, {math.floor(100 * done_fraction(status))}% done".capitalize(),
            section="",
            findings=tuple(text for text in (progress_sentence(status), note, status.message) if text),
            values={},
            verdicts=tuple(StudyVerdict(verdict, arm) for arm, verdict in verdicts.items()),
            panels=(*_curves(status, directory), *_loss_panel(records, law)),
            tables=(_run_table(status.runs),),
            method=(
                "This page is made of the study's files as they are now and reloads while it runs. Losses of "
                "running runs are training losses.",
            ),
            runs=tuple(record.run for record in records),
        )
        failures = tuple((row.run, row.cause) for row in status.runs if row.status == "failed")
        return LoadedStudy(status.name, answer, status.options, tuple(records), failures)

    def _law(self, study: Journal, records: Sequence[RunRecord]) -> tuple[LadderAnalysis | None, str]:
        """Laws and verdicts of the finished runs of a ladder, and what there is to say about them."""
        options = study.entry.options
        if options.get("study") != "ladder":
            return None, "The answer follows when all runs have finished."
        by_arm = grouped(records, lambda record: record.arm)
        first = "vanilla" if "vanilla" in by_arm else next(iter(by_arm), "")
        reference = str(options.get("reference") or first)
        ready = [arm for arm, own in by_arm.items() if len({run.flops for run in own}) >= MIN_RUNGS]
        if reference not in ready or len(ready) < 2:
            needed = f"{MIN_RUNGS} finished rungs of {reference or 'the reference'} and of another arm"
            return None, f"No verdict yet: it needs {needed}."
        key = tuple(sorted(record.run for record in records if record.spec.arm.name in ready))
        if self._fitted.get(study.entry.name, ((), ""))[0] != key:
            self._fitted[study.entry.name] = (key, _fit(records, ready, reference))
        found = self._fitted[study.entry.name][1]
        if isinstance(found, str):
            return None, f"No verdict yet: {found}"
        asked = len(study.entry.runs)
        return found, f"Verdict so far, from {len(key)} of {asked} runs: it may change with the others."


def _fit(records: Sequence[RunRecord], arms: Sequence[str], reference: str) -> LadderAnalysis | str:
    """The laws and verdicts of some arms' runs, as `steepen fit` gives them; or why there are none."""
    own = [record for record in records if record.spec.arm.name in arms]
    columns: dict[str, Sequence[Any]] = {
        "arm": [record.spec.arm.name for record in own],
        "flops": [record.flops for record in own],
        "loss": [record.validation_loss for record in own],
    }
    try:
        return analyse(read_ladders(table_from(columns, "the study's runs")), AnalysisRequest(reference))
    except SteepenError as error:
        return str(error)


def progress_sentence(status: StudyStatus) -> str:
    """How far the study is: fraction of its FLOPs, runs by status, and the time left."""
    counts = ", ".join(f"{count} {name}" for name, count in status.counts.items() if count)
    left = ""
    if status.flops_left and status.seconds_left is not None:
        left = f"; about {format_duration(status.seconds_left)} left"
    percent = math.floor(100 * done_fraction(status))
    return f"{percent}% of the FLOPs of the {len(status.runs)} requested runs are done ({counts}){left}."


def _record(file: Path) -> RunRecord | None:
    try:
        return RunDirectory(file.parent).record()
    except SteepenError:  # damaged: the table of runs says so
        return None


def _curves(status: StudyStatus, directory: str) -> list[Panel]:
    """Training loss over tokens of the running runs and of some finished ones."""
    order = {"running": 0, "unknown": 1, "interrupted": 2, "finished": 3}
    rows = sorted((row for row in status.runs if row.status in order), key=lambda row: order[row.status])
    shown = rows[:CURVES]
    series: list[Series] = []
    for row in shown:
        metrics = read_metrics(Path(directory) / row.run / "metrics.jsonl")
        logged = [(one["tokens"], one["loss"]) for one in metrics if one.get("tokens") and "loss" in one]
        tokens, losses = thin_curve(logged, CURVE_POINTS)
        if len(tokens) > 1:
            label = f"{row.arm} d{row.depth}" + (f" seed {row.seed}" if row.seed else "")
            _, curve = family_curve("depth", row.depth)
            series.append(line(label, tokens, losses, arm=row.arm, variant=label, **curve))
    left_out = f" {len(rows) - len(shown)} runs are left out." if len(rows) > len(shown) else ""
    caption = f"Means over equal ratios of tokens; running runs end where they are now.{left_out}"
    axes = Axis("tokens", "log"), Axis("training loss (nats per token)")
    return [Panel("Training loss", *axes, tuple(series), caption=caption)] if series else []


def _loss_panel(records: Sequence[RunRecord], law: LadderAnalysis | None) -> list[Panel]:
    """Validation loss against compute of the finished runs, with the laws of the verdict so far."""
    import numpy as np

    series: list[Series] = []
    for arm, own in grouped(records, lambda record: record.arm).items():
        x, y = [one.flops for one in own], [one.validation_loss for one in own]
        series.append(points(arm, x, y, [one.run for one in own], arm=arm))
        if law is not None and (fitted := law.primary_fit.arms.get(arm)) is not None:
            grid = np.geomspace(min(x), max(x), 50)
            series.append(line(arm, grid, fitted.predict(grid), arm=arm, role="fit"))
    caption = "Finished runs." + ("" if law is None else " Lines are the laws fitted so far.")
    axes = Axis("training compute (FLOPs)", "log"), Axis("validation loss (nats per token)", "log")
    return [Panel("Loss against compute", *axes, tuple(series), caption=caption)] if series else []


def _run_table(rows: Sequence[RunRow]) -> Table:
    """Every requested run, the running ones first; the seed only where it differs."""
    order = {"running": 0, "unknown": 1, "failed": 2, "interrupted": 3, "finished": 4, "waiting": 5}
    ordered = sorted(rows, key=lambda row: (order[row.status], row.arm, row.flops))
    seeds = len({row.seed for row in rows}) > 1
    columns = ("status", "done", "arm", "depth", *(("seed",) if seeds else ()), "FLOPs", "loss", "tokens/s")
    cells = tuple(
        (
            row.status, _done(row), row.arm, row.depth, *((row.seed,) if seeds else ()), row.flops, row.loss,
            None if row.tokens_per_second is None else round(row.tokens_per_second), row.run,
        )
        for row in ordered
    )  # fmt: skip
    return Table("Runs", (*columns, "run"), cells, per_run=True, arm_column=2)


def _done(row: RunRow) -> str | None:
    if row.status == "finished":
        return "100%"
    return f"{row.step / row.steps:.0%}" if row.step and row.steps else None
