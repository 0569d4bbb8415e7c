"""Runs of experiment trackers as one table: settings, and the metrics of the step that counts.

Every tracker gives `TrackedRun`s; which of a run's values enter the table is decided here, once for all.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steepen.errors import MAX_WHOLE, SteepenError, UsageError, show
from steepen.tables.table import Table, table_from

TRACKERS = (
    "runs of a tracker (wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, trackio:PROJECT, or a folder of W&B, MLflow "
    "or TensorBoard)"
)
READERS = ("wandb", "mlflow", "trackio", "tensorboard")  # `read` of NAME_runs.py beside this file
Points = Sequence[tuple[int, float]]  # (step, value), by increasing step


@dataclass(frozen=True)
class TrackedRun:
    """One run of a tracker: its name, state, settings under dotted names, and logged metrics."""

    name: str
    settings: Mapping[str, Any]
    metrics: Sequence[str]
    history: Callable[[str], Points]  # of one metric
    state: str = ""
    final: Mapping[str, float] | None = None  # last values, where the tracker has them without the history

    def last(self, metric: str) -> float | None:
        """The last value of a metric."""
        if self.final is not None:
            return self.final.get(metric)
        points = self.history(metric)
        return points[-1][1] if points else None


def tracked_table(source: str, columns: Mapping[str, str], at: str) -> Table | None:
    """The table of a tracker's runs; None for a source that is no tracker's.

    `at` is final, best (the lowest loss) or a step. It chooses the value of the loss; every other metric
    (tokens, FLOPs, hours) has the value that it had by then.
    """
    step = _parse_at(at)
    try:
        runs = _read_runs(source)
        if runs is None:
            return None
        if not runs:
            raise UsageError(f"{source} has no runs.")
        metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
        loss = _loss_metric(source, columns, metrics)
        rows = [_row(run, loss, at, step) for run in runs]
    except SteepenError:
        raise
    except Exception as error:  # of a tracker's library, the network, the account, or damaged files
        raise UsageError(f"{source} cannot be read ({type(error).__name__}: {error}).") from None
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table_from({name: [row.get(name) for row in rows] for name in names}, source)


def _parse_at(at: str) -> int | None:
    if at in ("final", "best"):
        return None
    if not at.isdecimal() or len(at) > len(str(MAX_WHOLE)):
        raise UsageError(f"`at` is {show(at)}; write final, best, or a step such as 10000.")
    return int(at)


def _loss_metric(source: str, columns: Mapping[str, str], metrics: Sequence[str]) -> str | None:
    """The metric that is the loss, as the columns of a table are found."""
    names = Table(source, "row", (), dict.fromkeys(metrics, ()))
    wanted = columns.get("loss") or columns.get("perplexity")
    found = names.name_of(wanted) if wanted else names.name_of("loss") or names.name_of("perplexity")
    if wanted and found is None:
        names.require([wanted])
    return found


def _row(run: TrackedRun, loss: str | None, at: str, step: int | None) -> dict[str, Any]:
    """The settings of a run, and its metrics when the loss that counts was logged."""
    row: dict[str, Any] = {"name": run.name, **({"state": run.state} if run.state else {}), **run.settings}
    if at == "final":
        return row | {name: _number(run.last(name), name == loss) for name in run.metrics}
    points = run.history(loss) if loss is not None and loss in run.metrics else ()
    finite = [(value, when) for when, value in points if math.isfinite(value)]
    if step is None:
        step = min(finite)[1] if finite else None
    elif not points or points[-1][0] < step:
        step = None  # the run ended before
    if step is None:
        return row | dict.fromkeys(run.metrics)
    for name in run.metrics:  # the last value at or before the step
        before = [value for when, value in run.history(name) if when <= step]
        row[name] = _number(before[-1] if before else None, name == loss)
    return row


def _number(value: float | None, is_loss: bool) -> float | None:
    """A metric's value; a loss that became NaN is that of a diverged run."""
    if value is None or not math.isnan(value):
        return value
    return math.inf if is_loss else None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; lists and other values as text."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif not str(key).startswith("_"):
            found[f"{prefix}{key}"] = value if isinstance(value, str | int | float | None) else str(value)
    return found


def by_metric(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, list[tuple[int, float]]]:
    """The points of every metric, from rows of values by step; what is no number is left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, values in rows:
        for name, value in values.items():
            number = _float(value)
            if number is not None:
                found.setdefault(name, []).append((step, number))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def _float(value: Any) -> float | None:
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def import_tracker(module: str, package: str, source: str) -> Any:
    """A module of a tracker's library; raises UsageError, with what to install, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{source} is read with {package}, which is not installed ({error}): "
            f"pip install 'steepen[{package}]'."
        ) from None


def _read_runs(source: str) -> list[TrackedRun] | None:
    """The runs of a tracker by prefix, or by what a folder or file holds; None if it is no tracker's."""
    kind, colon, place = source.partition(":")
    if not colon or kind not in READERS:
        kind, place = _tracker_of(Path(source)), source
    if not kind:
        return None
    if not place:
        raise UsageError(f"{source} names no runs; give {TRACKERS}.")
    return importlib.import_module(f"steepen.tables.sources.{kind}_runs").read(place)


def _tracker_of(path: Path) -> str:
    """Whose runs a file or folder holds; "" for no tracker's."""
    if path.is_file():
        return "mlflow" if _head(path).startswith(b"SQLite format 3") else ""  # MLflow's default store
    if not path.is_dir():
        return ""
    if next(path.rglob("*.wandb"), None) is not None:
        return "wandb"
    # A folder mlruns has one for each experiment.
    if any(b"experiment_id" in _head(file) for file in path.glob("*/meta.yaml") if file.is_file()):
        return "mlflow"
    return "tensorboard" if any(file.is_file() for file in path.rglob("*tfevents*")) else ""


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(4096)
