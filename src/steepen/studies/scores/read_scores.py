"""Read runs with scores: from stores, run directories and records, or from tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.laws.read_table import read_table
from steepen.laws.table import Table
from steepen.runs.record import RunRecord
from steepen.studies.scores.score_series import ScoredCheckpoint, checkpoint_of
from steepen.utils.json_io import read_json

# Columns of a table of scores, by our names of them, besides arm, flops and loss.
SCORE_COLUMNS = {
    "nll": ("nll", "answer_nll", "nll22"),
    "core22": ("core22", "core", "core_accuracy"),
    "core17": ("core17", "core17_accuracy"),
    "core22_sd": ("core22_sd", "core_accuracy_std", "core22_seed_sd"),
    "kl_depth": ("kl_depth", "effective_depth", "kl_effective_depth"),
}
TASK_COLUMNS = {"task_nll": ("nll", "answer_nll"), "task_centered": ("centered", "centered_accuracy")}


def read_scores(paths: Sequence[Path]) -> tuple[list[ScoredCheckpoint], list[RunRecord]]:
    """Runs with their scores, and the records they come from (none for tables).

    A path is a store, a run directory, a record.json, or a table of scores: one row for each run, or, where
    it has a column `task`, for each run and task of the runs of another table.
    """
    records: list[RunRecord] = []
    runs: list[ScoredCheckpoint] = []
    tasks: list[Table] = []
    for path in paths:
        if path.is_file() and path.name != "record.json":
            table = read_table(path)
            if table.has("task", aliases=False):
                tasks.append(table)
            else:
                runs += _from_table(table)
            continue
        records += [_record(file) for file in _record_files(path)]
    for table in tasks:
        runs = _with_tasks(runs, table)
    return runs + [checkpoint_of(record) for record in _once(records)], _once(records)


def _once(records: Sequence[RunRecord]) -> list[RunRecord]:
    return list({record.run: record for record in records}.values())


def _record_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / "record.json").is_file():
        return [path / "record.json"]
    if path.is_dir():
        return sorted(path.glob("*/record.json"))
    raise UsageError(f"{path} does not exist; give a store, a run directory, a record.json or a table.")


def _record(file: Path) -> RunRecord:
    try:
        return RunRecord.from_dict(read_json(file))
    except (OSError, ValueError, SteepenError) as error:
        raise SteepenError(f"the record {file} cannot be read ({error}).") from error


def _from_table(table: Table) -> list[ScoredCheckpoint]:
    flops, loss, arms = table.numbers("flops"), table.numbers("loss"), table.names("arm")
    given = {ours: _optional(table, names) for ours, names in SCORE_COLUMNS.items()}
    depths = _optional(table, ("depth",))
    corpora = _texts(table, "corpus")
    found: list[ScoredCheckpoint] = []
    for i, arm in enumerate(arms):
        depth = int(depths[i] or 0) if depths else 0
        scores: dict[str, Any] = {name: column[i] for name, column in given.items() if column}
        corpus = corpora[i] if corpora else ""
        name = "-".join(filter(None, (arm, f"d{depth}" if depth else f"{flops[i]:.3g}", corpus)))
        found.append(
            ScoredCheckpoint(name, arm, depth or i, float(flops[i]), float(loss[i]), corpus, **scores)
        )
    return found


def _with_tasks(runs: Sequence[ScoredCheckpoint], table: Table) -> list[ScoredCheckpoint]:
    """The runs with the task scores of a table, joined by corpus, arm and depth."""
    table.require(["arm", "task"])
    arms, tasks, corpora = table.names("arm"), _texts(table, "task"), _texts(table, "corpus")
    depths = _optional(table, ("depth",))
    columns = {ours: _optional(table, names) for ours, names in TASK_COLUMNS.items()}
    if not depths or not columns["task_nll"]:
        raise UsageError(f"{table.source} needs columns arm, depth, task and answer_nll.")
    found: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}
    for i, arm in enumerate(arms):
        own = found.setdefault((corpora[i] if corpora else "", arm, int(depths[i] or 0)), {})
        for ours, column in columns.items():
            if column and (value := column[i]) is not None:
                own.setdefault(ours, {})[tasks[i]] = value
    return [replace(run, **found.get((run.corpus, run.arm, run.depth), {})) for run in runs]


def _optional(table: Table, names: Sequence[str]) -> list[float | None]:
    """A column of numbers under one of these names, None where a cell is empty; [] without the column."""
    for name in names:
        if name in table.columns:
            return [_number(table, name, i, cell) for i, cell in enumerate(table.columns[name])]
    return []


def _number(table: Table, name: str, row: int, cell: Any) -> float | None:
    if cell is None or str(cell).strip() == "":
        return None
    try:
        return float(cell)
    except ValueError:
        raise UsageError(f"{table.place(row)}: {name} is {cell!r}, not a number.") from None


def _texts(table: Table, name: str) -> list[str]:
    return [str(cell or "") for cell in table.columns[name]] if name in table.columns else []
