"""The run store: a directory of run directories. All status comes from their files.

A run directory is named by its spec's hash and holds spec.json, tokenizer.json, metrics.jsonl, log.txt,
checkpoints/ and, once the run has finished, record.json; failure.json says why it could not. Every file
except metrics and log is written atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steepen.errors import Failure, SteepenError, UsageError, is_whole
from steepen.runs.index import RunIndex
from steepen.runs.record import RunRecord
from steepen.runs.row import RunRow, with_status
from steepen.runs.spec import RunSpec
from steepen.utils.files import file_lock, is_locked, read_file
from steepen.utils.formatting import is_number
from steepen.utils.json_io import read_json, write_json

_HASH = re.compile(r"[0-9a-f]{16}")  # name of a run's directory


def checkpoint_step(name: str) -> int:
    """The step of the checkpoint in a directory of that name; −1 if it is not a checkpoint's."""
    step = int(name) if name.isascii() and name.isdigit() else -1
    return step if name == f"{step:08d}" else -1


class RunBusy(SteepenError):
    """Another process is training this run."""


class RunLost(SteepenError):
    """The directory of a run was deleted or moved while the run was trained."""


class _Inside:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, kind: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    spec_file = _Inside("spec.json")
    record_file = _Inside("record.json")  # exists once the run has finished
    failure_file = _Inside("failure.json")  # why the run could not finish
    lock_file = _Inside("lock")  # held by the process that trains the run
    tokenizer_file = _Inside("tokenizer.json")  # of the data the run is trained on
    metrics_file = _Inside("metrics.jsonl")  # one line per step
    samples_file = _Inside("samples.jsonl")  # texts generated during training, if requested (`sample_every`)
    checkpoints = _Inside("checkpoints")  # one directory per saved step

    def saved_step(self) -> int:
        """The step of the newest complete checkpoint, −1 if there is none."""
        try:
            names = [entry.name for entry in self.checkpoints.iterdir()]
        except OSError:
            return -1
        return max(map(checkpoint_step, names), default=-1)

    def record(self) -> RunRecord | None:
        """The record, or None until the run has finished."""
        try:
            record = RunRecord.from_dict(read_json(self.record_file))
            self.check_name(record.run)
            return record
        except FileNotFoundError:
            return None
        except (OSError, ValueError, SteepenError) as error:
            raise self.unreadable(error) from error

    def check_name(self, run: str) -> None:
        """Raise if the directory has the name of another run than its record; a copy may have any name."""
        name = self.path.resolve().name
        if name != run and _HASH.fullmatch(name):
            raise UsageError(f"it is of run {run}, and belongs into a directory of that name")

    def unreadable(self, error: Exception) -> SteepenError:
        """The error to raise for a record that cannot be decoded."""
        return SteepenError(
            f"the record {self.record_file} cannot be read ({str(error).rstrip('.')}); "
            "move it aside, and the run is finished again from its newest checkpoint."
        )

    def failure(self) -> tuple[str, str] | None:
        """Kind and message of the failure that stopped this run, if one did."""
        try:
            value = read_json(self.failure_file)
            return str(value["kind"]), str(value["message"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_failure(self, failure: Failure) -> None:
        """Write failure.json."""
        with contextlib.suppress(OSError):  # a full disk must not hide the failure
            write_json(self.failure_file, {"kind": failure.kind, "message": failure.message})

    @contextlib.contextmanager
    def lock(self, wait: bool = False, poll_seconds: float = 1.0) -> Generator[None]:
        """Hold this run's lock; where another process holds it, wait or raise `RunBusy`."""
        with file_lock(self.lock_file, wait=wait, poll_seconds=poll_seconds) as holder:
            if holder is not None:
                raise RunBusy(
                    f"run {self.path.name} is being trained by {holder}; let it finish, "
                    "or wait for it with `wait`."
                )
            yield

    def busy(self) -> bool | None:
        """Whether a process, on this machine or another, is training this run; None if it cannot be told."""
        return is_locked(self.lock_file)


@dataclass(frozen=True)
class RunStore:
    """A directory of run directories."""

    root: Path

    def run(self, spec: RunSpec) -> RunDirectory:
        """The directory of a spec's run, whether or not it exists yet."""
        return RunDirectory(self.root / spec.hash)

    def record(self, spec: RunSpec) -> RunRecord | None:
        """The record of a finished run."""
        return self.run(spec).record()

    def runs(self) -> list[RunDirectory]:
        """Every run directory, sorted by name."""
        try:
            with os.scandir(self.root) as entries:
                names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
        except OSError:
            return []
        return [RunDirectory(self.root / name) for name in sorted(names)]

    def rows(self, runs: Collection[str] | None = None) -> list[RunRow]:
        """Every run as a table row, sorted by name; a run with a damaged record is listed as failed.

        `runs` restricts them to these names.
        """
        index = RunIndex.of(self.root)
        found = self.runs() if runs is None else [RunDirectory(self.root / name) for name in sorted({*runs})]
        rows = [row for run in found if (row := _row(index, run)) is not None]
        index.save()
        return rows

    def records(self) -> list[RunRecord]:
        """Records of finished runs, sorted by name."""
        return [record for run in self.runs() if (record := run.record()) is not None]


def _row(index: RunIndex, run: RunDirectory) -> RunRow | None:
    """The row of a run, finished or not; None for a directory that holds no run."""
    row = index.row(run)
    if row is None or row.status != "waiting":
        return row
    row = with_status(row, run)
    return row if row.status != "finished" else index.row(run)  # it has just written its record


TEXTS = frozenset({"prompt", "text"})  # fields of a sample


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, one dict per line; damaged lines, as a killed process leaves, are dropped."""
    return read_lines(path)[0]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Lines of samples.jsonl with step, prompt and text, in order; empty if there is no such file."""
    lines, _ = read_lines(path)
    return [
        line for line in lines if isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str)
    ]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Lines that have a step and only numbers (and texts, of samples); how many others before the last."""
    try:
        texts = read_file(path).split(b"\n")
    except FileNotFoundError:
        return [], 0
    lines: list[dict[str, Any]] = []
    damaged = 0
    for number, text in enumerate(texts):
        value = _parse(text)
        if value is not None:
            lines.append(value)
        elif number < len(texts) - 1:  # a killed process cuts the last line short
            damaged += 1
    return lines, damaged


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not is_whole(value.get("step")):
        return None
    good = (isinstance(item, str) if name in TEXTS else is_number(item) for name, item in value.items())
    return value if all(good) else None
