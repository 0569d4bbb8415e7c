"""Where a run stands, from its files alone: the same answer on every machine that sees the directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from steepen.errors import SteepenError, UsageError
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory

Status = Literal["finished", "running", "failed", "interrupted", "waiting"]
STATUSES: tuple[Status, ...] = ("finished", "running", "failed", "interrupted", "waiting")


@dataclass(frozen=True)
class Row:
    """A run as a table shows it."""

    run: str
    arm: str
    depth: int
    seed: int
    tokens: int
    flops: float  # of the whole run; expected while it is not finished
    status: Status
    cause: str = ""  # why it failed
    loss: float | None = None  # validation loss; while unfinished, the last training loss seen
    step: int | None = None  # steps done, while unfinished
    steps: int | None = None
    tokens_per_second: float | None = None
    finished: str = ""  # UTC

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def last_metrics(run: RunDirectory) -> dict[str, Any]:
    """The last complete line of training metrics; empty where there is none yet."""
    try:
        with run.metrics_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8192))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except ValueError:  # cut off at either end of what was read
            continue
        if isinstance(value, dict) and "loss" in value and "step" in value:
            return value
    return {}


def status_of(run: RunDirectory) -> tuple[Status, str]:
    """Status and, for a failure, its cause. Looks at files only, and at the lock."""
    if run.record_file.exists():
        return "finished", ""
    if run.busy():
        return "running", ""
    failure = run.failure()
    if failure is not None:
        return "failed", f"{failure[0]}: {failure[1]}"
    begun = run.metrics_file.exists() or run.checkpoints.exists()
    return ("interrupted" if begun else "waiting"), ""


def unfinished_row(run: RunDirectory) -> Row | None:
    """The row of a run without a record; None for a folder that holds no run."""
    status, cause = status_of(run)
    try:
        spec = RunSpec.from_dict(json.loads(run.spec_file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SteepenError) as error:
        return Row(run.path.name, "?", 0, 0, 0, 0.0, "failed", f"spec.json cannot be read: {error}")
    last = last_metrics(run)
    return Row(
        run=run.path.name,
        arm=spec.arm.name,
        depth=spec.shape.depth,
        seed=spec.seed,
        tokens=spec.tokens,
        flops=expected_flops(spec),
        status=status,
        cause=cause,
        loss=last.get("loss"),
        step=last.get("step", 0),
        steps=spec.steps,
        tokens_per_second=last.get("tokens_per_second"),
    )


def check_status(status: str) -> Status:
    """A status by name."""
    for known in STATUSES:
        if status == known:
            return known
    raise UsageError(f"--status {status!r} is not known: use {', '.join(STATUSES)}.")
