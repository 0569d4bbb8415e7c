"""Status of runs, from their files alone; works on every machine that mounts the directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from steepen.errors import SteepenError, UsageError, nearest
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.utils.files import open_regular
from steepen.utils.formatting import is_number
from steepen.utils.json_io import parse_json, read_json
from steepen.utils.series import corpus_name, recipe_name
from steepen.utils.validate import is_whole

if TYPE_CHECKING:
    from steepen.runs.store import RunDirectory

Status = Literal["finished", "running", "failed", "interrupted", "waiting", "unknown"]
STATUSES: tuple[Status, ...] = ("finished", "running", "failed", "interrupted", "waiting", "unknown")
CANNOT_TELL = (
    "cannot tell from here whether a process is at it: its lock cannot be read, or it was begun on another "
    "machine whose locks this file system does not show."
)
SORT_KEYS = ("arm", "depth", "seed", "tokens", "flops", "loss", "speed", "status", "finished")


@dataclass(frozen=True)
class RunRow:
    """A run as one row of a table."""

    run: str
    arm: str
    depth: int
    seed: int
    tokens: int
    flops: float  # of the whole run, expected until it has finished; 0: only custom code could count them
    status: Status
    cause: str = ""  # of a failure, with its kind
    failure_kind: str = ""  # Diverged, OutOfMemory, DamagedRecord, …
    loss: float | None = None  # validation loss; until the run has finished, the last training loss
    step: int | None = None  # steps done, until the run has finished
    steps: int | None = None
    tokens_per_second: float | None = None
    finished: str = ""  # UTC
    corpus: str = ""  # content hash of the data, shortened; with the size of a pool
    recipe: str = ""  # digest of the hyperparameters; see `utils.series.recipe_name`

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for --json."""
        return asdict(self)


def last_metrics(run: RunDirectory) -> dict[str, Any]:
    """The last complete line of metrics.jsonl; empty if there is none yet."""
    try:
        with open(run.metrics_file, "rb", opener=open_regular) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8192))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value = parse_json(line)
        except ValueError:  # the first or last line of the window, cut off
            continue
        if isinstance(value, dict) and is_number(value.get("loss")) and is_whole(value.get("step")):
            return value
    return {}


def status_of(run: RunDirectory) -> tuple[Status, tuple[str, str] | None]:
    """Status and, if failed or unknown, kind and message of the cause, from the run's files and its lock."""
    if run.record_file.exists():
        return "finished", None
    if (busy := run.busy()) is True:
        return "running", None
    failure = run.failure()
    if failure is not None:
        return "failed", failure
    if busy is None:
        return "unknown", ("", CANNOT_TELL)
    begun = run.metrics_file.exists() or run.checkpoints.exists()
    return ("interrupted" if begun else "waiting"), None


def run_row(run: RunDirectory, *, validate: bool = True) -> RunRow | None:
    """The row of a run, finished or not; None for a directory that holds no run.

    With `validate`, every field of the record is checked; otherwise only those shown in the row.
    """
    row: RunRow | None = None
    try:
        record = read_json(run.record_file)
        row = _finished_row(run.path.name, record)
        run.check_name(record["run"])
        if validate:
            RunRecord.from_dict(record)
        return row
    except FileNotFoundError:
        return _unfinished_row(run)
    except (OSError, ValueError, LookupError, TypeError, SteepenError) as error:
        row = row or RunRow(run.path.name, "?", 0, 0, 0, 0.0, "failed")
        cause = str(run.unreadable(error))
        return replace(row, status="failed", cause=cause, failure_kind="DamagedRecord", loss=None)


def _finished_row(name: str, record: dict[str, Any]) -> RunRow:
    # From JSON values: decoding the whole record takes four times as long (benchmarks/runs_store.py).
    spec = record["spec"]
    numbers = (spec["shape"]["depth"], spec["seed"], record["tokens"], record["flops"])
    numbers = (*numbers, record["validation_loss"], record["tokens_per_second"])
    if not (all(map(is_number, numbers)) and isinstance(spec["arm"]["name"], str)):
        raise TypeError("a field has a wrong type")
    return RunRow(
        run=name,
        arm=spec["arm"]["name"],
        depth=spec["shape"]["depth"],
        seed=spec["seed"],
        tokens=record["tokens"],
        flops=record["flops"],
        status="finished",
        loss=record["validation_loss"],
        tokens_per_second=record["tokens_per_second"],
        finished=record["finished"],
        corpus=corpus_name(spec["data"]),
        recipe=recipe_name(spec),
    )


def _unfinished_row(run: RunDirectory) -> RunRow | None:
    status, failure = status_of(run)
    try:
        spec = RunSpec.from_dict(read_json(run.spec_file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SteepenError) as error:
        return RunRow(
            run.path.name, "?", 0, 0, 0, 0.0, "failed", f"spec.json cannot be read: {error}", "DamagedSpec"
        )
    last = last_metrics(run)
    return RunRow(
        run=run.path.name,
        arm=spec.arm.name,
        depth=spec.shape.depth,
        seed=spec.seed,
        tokens=spec.tokens,
        flops=_expected_flops(spec),
        status=status,
        cause="" if failure is None else ": ".join(filter(None, failure)),
        failure_kind="" if failure is None else failure[0],
        loss=last.get("loss"),
        step=last.get("step", 0),
        steps=spec.steps,
        tokens_per_second=speed if is_number(speed := last.get("tokens_per_second")) else None,
    )


def _expected_flops(spec: RunSpec) -> float:
    """FLOPs of a run; 0 if counting them would run a custom block's code, which a listing must not do."""
    try:
        return expected_flops(spec)
    except SteepenError:
        return 0.0


def is_row_key(key: str) -> bool:
    """Whether rows can be sorted by a key; other fields need whole records."""
    return key.removeprefix("-") in SORT_KEYS


def sort_rows(rows: Iterable[RunRow], key: str) -> list[RunRow]:
    """Sort rows by one of SORT_KEYS, descending with a leading "-"; rows without a value come last."""
    name = key.removeprefix("-")
    if name not in SORT_KEYS:
        raise UsageError(f"--sort {key!r} is not known; the nearest are {nearest(name, SORT_KEYS)}.")
    field = "tokens_per_second" if name == "speed" else name
    ordered = sorted(rows, key=lambda row: (row.arm, row.depth, row.seed, row.run))
    with_value = [row for row in ordered if getattr(row, field) is not None]
    without_value = [row for row in ordered if getattr(row, field) is None]
    with_value.sort(key=lambda row: getattr(row, field), reverse=key.startswith("-"))
    return with_value + without_value


def check_status(status: str) -> Status:
    """A status by its name."""
    for known in STATUSES:
        if status == known:
            return known
    raise UsageError(f"--status {status!r} is not known: use {', '.join(STATUSES)}.")
