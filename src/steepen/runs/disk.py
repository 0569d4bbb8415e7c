"""Disk space of runs, and its release: checkpoints, failed runs, runs that no study requested."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from steepen.runs.store import RunBusy, RunDirectory, checkpoint_step
from steepen.utils.files import file_version

REMOVING = ".removing-"
What = Literal["checkpoints", "old checkpoints", "run"]


@dataclass(frozen=True)
class Removal:
    """Something that can be removed from a run directory, with its size in bytes."""

    run: RunDirectory
    what: What
    paths: tuple[Path, ...]
    bytes: int
    state: tuple[Any, ...] = ()  # of the run when it was looked at, see `_state`

    @property
    def key(self) -> tuple[Any, ...]:
        """What is removed, and of which state of the run."""
        return self.run.path, self.what, self.state

    def apply(self) -> bool:
        """Remove it, unless the run was trained since: returns whether it was removed.

        The run's lock is held meanwhile, so that no process starts to train it. What is removed first gets
        a hidden name: nothing is left half under its own, and who waits for the lock of a whole run begins in
        a new directory.
        """
        for left in self.run.path.parent.glob(f"{REMOVING}*"):
            if RunDirectory(left).busy() is False:  # it belongs to a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        try:
            with self.run.lock():
                if _state(self.run) != self.state:
                    return False
                for path in self.paths:
                    hidden = path if path.name.startswith(".") else path.with_name(f"{REMOVING}{path.name}")
                    shutil.rmtree(path.rename(hidden))
        except RunBusy:
            return False
        return True


def _state(run: RunDirectory) -> tuple[Any, ...]:
    """What differs once a run has been trained on."""
    return (*map(file_version, (run.record_file, run.failure_file, run.metrics_file)), run.saved_step())


def directory_bytes(path: Path) -> int:
    """Bytes of the files of a directory and its subdirectories; 0 if there is none."""
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += directory_bytes(Path(entry.path))
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        return total
    return total


def removable_checkpoints(run: RunDirectory, *, keep_final: bool = False) -> Removal | None:
    """The checkpoints of a run, or all but its newest; None if there are none, or it is being trained."""
    if run.busy() is not False:
        return None
    try:
        saved = sorted(path for path in run.checkpoints.iterdir() if _is_checkpoint(path))
    except OSError:
        return None
    if keep_final:
        final = [path for path in saved if checkpoint_step(path.name) >= 0][-1:]
        saved = [path for path in saved if path not in final]
    if not saved:
        return None
    what: What = "old checkpoints" if keep_final else "checkpoints"
    return Removal(run, what, tuple(saved), sum(map(directory_bytes, saved)), _state(run))


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, damaged or half written too; nothing else is ever removed.

    `checkpoints` may be a link to a directory that holds other things.
    """
    known = path.name.startswith((".writing-", ".replaced-", REMOVING)) or path.name.endswith(".corrupt")
    return (known or checkpoint_step(path.name) >= 0) and path.is_dir() and not path.is_symlink()


def removable_run(run: RunDirectory) -> Removal | None:
    """The whole directory of a run; None while it is being trained."""
    if run.busy() is not False:
        return None
    return Removal(run, "run", (run.path,), directory_bytes(run.path), _state(run))
