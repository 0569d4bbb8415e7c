"""The store: a directory of run directories. Files are the truth.

A run directory is named by its spec's hash and holds spec.json, metrics.jsonl, log.txt, checkpoints/ and,
once the run has finished, record.json; failure.json says why it could not. Every file but metrics and log is
written whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steepen.errors import SteepenError
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.utils.lock import file_lock, is_locked

if TYPE_CHECKING:
    from steepen.runs.status import Row, Status


class RunBusy(SteepenError):
    """Another process holds this run."""


@dataclass(frozen=True)
class RunDirectory:
    """Where one run's files are."""

    path: Path

    @property
    def spec_file(self) -> Path:
        """spec.json."""
        return self.path / "spec.json"

    @property
    def record_file(self) -> Path:
        """record.json: its presence means the run has finished."""
        return self.path / "record.json"

    @property
    def failure_file(self) -> Path:
        """failure.json: why the run could not go on."""
        return self.path / "failure.json"

    @property
    def lock_file(self) -> Path:
        """lock: held by the process that trains the run."""
        return self.path / "lock"

    @property
    def metrics_file(self) -> Path:
        """metrics.jsonl: one line per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def record(self) -> RunRecord | None:
        """The record, or None while the run has not finished."""
        try:
            text = self.record_file.read_text()
        except FileNotFoundError:
            return None
        try:
            return RunRecord.from_dict(json.loads(text))
        except (ValueError, SteepenError) as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> SteepenError:
        """What to say of a record that makes no sense."""
        return SteepenError(
            f"the record {self.record_file} cannot be read ({error}); "
            "move it aside to let the run be finished again."
        )

    def failure(self) -> tuple[str, str] | None:
        """The kind and the sentence of the failure that stopped this run, if one did."""
        try:
            value = json.loads(self.failure_file.read_text())
            return str(value["kind"]), str(value["message"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @contextlib.contextmanager
    def lock(self, wait: bool = False, poll: float = 1.0) -> Generator[None]:
        """Hold this run; a second process waits, or is told who holds it. A killed holder's lock is gone."""
        with file_lock(self.lock_file, wait=wait, poll_seconds=poll) as holder:
            if holder is not None:
                raise RunBusy(
                    f"run {self.path.name} is being trained by {holder}; let it finish, "
                    "or add --wait to wait for it."
                )
            yield

    def busy(self) -> bool:
        """Whether a process, here or on another machine, is training this run."""
        return is_locked(self.lock_file)


@dataclass(frozen=True)
class RunStore:
    """A directory of run directories."""

    root: Path

    def run(self, spec: RunSpec) -> RunDirectory:
        """Where a spec's run lives, whether or not it exists yet."""
        return RunDirectory(self.root / spec.hash)

    def record(self, spec: RunSpec) -> RunRecord | None:
        """The record of a finished run."""
        return self.run(spec).record()

    def runs(self) -> list[RunDirectory]:
        """Every run directory, in the order of their names."""
        if not self.root.is_dir():
            return []
        return [RunDirectory(file.parent) for file in sorted(self.root.glob("*/spec.json"))]

    def rows(
        self, *, arm: str | None = None, depth: int | None = None, status: Status | None = None
    ) -> list[Row]:
        """Every run as a row of a table, whatever its status; ten thousand take a fraction of a second."""
        from steepen.runs.index import Index

        return Index(self.root).rows(arm=arm, depth=depth, status=status)

    def records(
        self,
        *,
        arm: str | None = None,
        depth: int | None = None,
        runs: Collection[str] | None = None,
    ) -> list[RunRecord]:
        """Records of finished runs, in the order of their names; `runs` are names to choose from."""
        from steepen.runs.index import Index

        return Index(self.root).records(arm=arm, depth=depth, runs=runs)
