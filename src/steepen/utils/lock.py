"""File locks between processes, by flock: the kernel releases the lock of a process that is killed.

On network file systems flock works across machines where the mount supports it (NFS 4 does; Lustre needs the
mount option `flock`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

from steepen.errors import SteepenError
from steepen.utils.files import open_without_links

GPU_LOCKS_VARIABLE = "STEEPEN_GPU_LOCKS"  # environment: lock files of the runs on one GPU, without suffix
_ATTEMPTS = 5  # without `wait`: retry, because `is_locked` of another process holds the lock briefly


@contextlib.contextmanager
def file_lock(
    path: Path, *, shared: bool = False, wait: bool = False, poll_seconds: float = 1.0
) -> Generator[str | None]:
    """Hold a lock on the file `path`. Yields None while it is held, or, without `wait`, the current holder.

    Shared locks exclude exclusive ones, but not each other.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    attempts = 0
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8", errors="replace", opener=open_without_links) as file:
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                attempts += 1
                if wait or attempts < _ATTEMPTS:
                    time.sleep(poll_seconds if wait else 0.02)
                    continue
                file.seek(0)
                yield file.read().strip() or "another process"
                return
            if not _is_current(file, path):  # its holder has deleted or moved the file
                continue
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield None
            return


def _is_current(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one that has the name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def is_locked(path: Path) -> bool:
    """Whether some process, on this machine or another, holds a lock on `path`."""
    try:
        file = open(path, "r+", opener=open_without_links)  # noqa: SIM115
    except (OSError, SteepenError):
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
