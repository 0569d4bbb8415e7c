"""Disk space of runs, and its release: checkpoints, failed runs, runs that no study requested."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steepen.runs.store import RunDirectory, checkpoint_step

REMOVING = ".removing-"
What = Literal["checkpoints", "old checkpoints", "run"]


@dataclass(frozen=True)
class Removal:
    """Something that can be removed from a run directory, with its size in bytes."""

    run: RunDirectory
    what: What
    paths: tuple[Path, ...]
    bytes: int

    def apply(self) -> None:
        """Remove it; the run's lock is held meanwhile, so that no process starts to train it.

        A whole run first gets a hidden name: who waits for its lock begins in a new directory.
        """
        root = self.run.path.parent
        for left in root.glob(f"{REMOVING}*"):
            if RunDirectory(left).busy() is False:  # it belongs to a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        with self.run.lock():
            for path in self.paths:
                hidden = root / f"{REMOVING}{path.name}"
                shutil.rmtree(path.rename(hidden) if path == self.run.path else path)


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
    return Removal(run, what, tuple(saved), sum(map(directory_bytes, saved)))


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, damaged or half written too; nothing else is ever removed.

    `checkpoints` may be a link to a directory that holds other things.
    """
    known = path.name.startswith((".writing-", REMOVING)) or path.name.endswith(".corrupt")
    return (known or checkpoint_step(path.name) >= 0) and path.is_dir() and not path.is_symlink()


def removable_run(run: RunDirectory) -> Removal | None:
    """The whole directory of a run; None while it is being trained."""
    if run.busy() is not False:
        return None
    return Removal(run, "run", (run.path,), directory_bytes(run.path))


def total_bytes(removals: Iterable[Removal]) -> int:
    """Bytes of all removals together."""
    return sum(removal.bytes for removal in removals)
