"""Load finished studies and their run records for a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from steepen.errors import SteepenError
from steepen.laws.ladder import make_ladder
from steepen.laws.registered_forecasts import read_registered, score_registered
from steepen.report.colours import ARM_TITLES, ArmStyles, arm_key, own_arm_styles
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory, read_samples
from steepen.studies.answer import Answer
from steepen.studies.cells import table
from steepen.studies.driver.journal import JOURNAL, Journal, find_study_folder, read_journals
from steepen.utils.formatting import percent, printable, printable_values
from steepen.utils.rows import grouped


@dataclass(frozen=True)
class LoadedStudy:
    """A study that has its answer, with its records in the answer's order."""

    name: str
    answer: Answer
    options: dict[str, Any]
    records: tuple[RunRecord, ...]
    failures: tuple[tuple[str, str], ...] = ()  # runs that gave no record, each with the reason
    runs_directory: Path | None = None
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # step, prompt, text, by run


def expand_studies(names: Sequence[str]) -> list[str]:
    """Study names; a directory with studies/*/study.json stands for those with an answer, as they began."""
    found: list[str] = []
    for name in names:
        folder = Path(name) / "studies"
        journals = [] if (Path(name) / JOURNAL).is_file() else read_journals(folder)[0]
        answered = [journal for journal in journals if journal.entry.answer is not None]
        if journals and not answered:
            raise SteepenError(f"no study in {folder} has an answer yet; let one finish first.")
        answered.sort(key=lambda journal: journal.entry.began)
        found += [str(journal.folder) for journal in answered] or [name]
    return list(dict.fromkeys(found))


def load_study(study: str, studies: Path, runs: Path | None = None) -> LoadedStudy:
    """A study by directory, name in `studies` or unique prefix of it; `runs` overrides where its runs are."""
    folder = find_study_folder(study, studies)
    journal = Journal.read(folder)
    entry = journal.entry
    if entry.answer is None:
        live = {"running": "is still running", "killed": "was killed", "unknown": "may be running"}
        why = f"it {live.get(journal.live_status, entry.status)}"
        message = f": {entry.message.rstrip('.')}" if entry.message else ""
        raise SteepenError(
            f"the study {entry.name} has no answer yet ({why}{message}); "
            "let it finish, or run it again to continue it."
        )
    try:
        answer = Answer.from_dict(printable_values(entry.answer))
    except SteepenError as error:
        raise SteepenError(f"the answer in {journal.file} can't be read: {error}") from error
    _check(answer, journal.file)
    directory = journal.runs_directory(runs)
    records, failures = _records(entry.name, answer, directory)
    texts = {record.run: read_samples(directory / record.run / "samples.jsonl") for record in records}
    samples = {run: printable_values(lines) for run, lines in texts.items() if lines}
    name, options = printable(entry.name), printable_values(entry.options)
    return LoadedStudy(name, answer, options, records, failures, directory, samples)


def with_registered_forecasts(study: LoadedStudy, file: Path) -> LoadedStudy:
    """The study with a table of registered forecasts, scored against its own runs."""
    forecasts = read_registered(file)
    if not forecasts:
        raise SteepenError(f"{file} has no registered forecasts; `steepen fit --register` writes them.")
    measured = {
        name: make_ladder(name, *np.array([(r.flops, r.validation_loss) for r in runs], float).T)
        for name, runs in grouped(study.records, lambda record: record.arm).items()
    }
    rows: list[dict[str, Any]] = []
    for one in score_registered(forecasts, measured):
        low, high = one.interval or one.registered.interval
        rows.append({
            "arm": one.registered.arm, "registered": one.registered.registered[:10],
            "FLOPs": one.flops or one.registered.flops, "forecast": one.forecast or one.registered.forecast,
            "low": low, "high": high, "observed": one.observed, "error": one.error,
            "error (standard errors)": one.error_in_standard_errors,
            "result": {None: "not measured yet", True: "inside", False: "outside"}[one.inside],
        })  # fmt: skip
    caption = (
        f"Forecast before the runs existed, from data with SHA-256 {forecasts[0].data_sha256[:12]}…; "
        f"intervals have {percent(forecasts[0].confidence)} confidence for one run."
    )
    own = table("Registered forecasts", rows, caption)
    return replace(study, answer=replace(study.answer, tables=(own, *study.answer.tables)))


def arm_titles(studies: Sequence[LoadedStudy]) -> dict[str, str]:
    """Display names by arm key: the eight main arms', and those of the records."""
    found = dict(ARM_TITLES)
    for study in studies:
        for record in study.records:
            found.setdefault(arm_key(record.spec.arm.name), record.spec.arm.title)
    return found


def study_arm_styles(studies: Sequence[LoadedStudy]) -> ArmStyles:
    """Styles of the arms of some studies that are not the paper's: the same on all of their figures."""
    of_records = [record.spec.arm.name for study in studies for record in study.records]
    drawn = [s.arm for study in studies for panel in study.answer.panels for s in panel.series if s.arm]
    return own_arm_styles([*of_records, *drawn])


def _check(answer: Answer, file: Path) -> None:
    """Raise SteepenError if the coordinates of a series differ in length."""
    for panel in answer.panels:
        for series in panel.series:
            high = len(series.y_high) if series.kind == "band" else len(series.x)
            ends = {len(series.low), len(series.high)} - {0}
            if not len(series.x) == len(series.y) == high or ends - {len(series.x)}:
                raise SteepenError(
                    f"the series {series.label!r} of the panel {panel.title!r} in {file} has coordinates of "
                    "different lengths; run the study again."
                )


def _records(
    name: str, answer: Answer, runs: Path
) -> tuple[tuple[RunRecord, ...], tuple[tuple[str, str], ...]]:
    if answer.runs and not runs.is_dir():
        raise SteepenError(
            f"the runs of the study {name} are not in {runs}, which does not exist; "
            "say where they are with `runs`."
        )
    records: list[RunRecord] = []
    failures: list[tuple[str, str]] = []
    for run in dict.fromkeys(answer.runs):
        folder = RunDirectory(runs / run)
        record = folder.record()
        failure = folder.failure() if record is None else None
        if record is not None:
            records.append(record)
        elif failure is not None:
            failures.append((run, failure[1]))
        else:
            raise SteepenError(
                f"the run {run} of the study {name} has no record in {runs}; "
                "say where the runs are with `runs`, or run the study again."
            )
    return tuple(records), tuple(failures)
