"""Status of runs, from their files alone; works on every machine that mounts the directory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from steepen.errors import is_whole
from steepen.runs.row import RunRow, Status
from steepen.utils.files import open_regular
from steepen.utils.formatting import is_number
from steepen.utils.json_io import parse_json

if TYPE_CHECKING:
    from steepen.runs.store import RunDirectory

STATUSES: tuple[Status, ...] = get_args(Status)
CANNOT_TELL = (
    "cannot tell from here whether a process is at it: its lock cannot be read, or it was begun on another "
    "machine whose locks this file system does not show."
)


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
    busy = run.busy()  # asked first: a run writes its record before it releases its lock
    if run.record_file.exists():
        return "finished", None
    if busy is True:
        return "running", None
    failure = run.failure()
    if failure is not None:
        return "failed", failure
    if busy is None:
        return "unknown", ("", CANNOT_TELL)
    begun = run.metrics_file.exists() or run.checkpoints.exists()
    return ("interrupted" if begun else "waiting"), None


def with_status(row: RunRow, run: RunDirectory) -> RunRow:
    """The row of a run that had no record, with its status, last loss and step as they are now."""
    status, failure = status_of(run)
    last = last_metrics(run)
    return replace(
        row,
        status=status,
        cause="" if failure is None else ": ".join(filter(None, failure)),
        failure_kind="" if failure is None else failure[0],
        loss=last.get("loss"),
        step=last.get("step", 0),
        tokens_per_second=speed if is_number(speed := last.get("tokens_per_second")) else None,
    )
