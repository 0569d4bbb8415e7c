"""Locks between processes: flock on a file, so that a killed holder's lock is gone with it.

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

_LOOKS = 5  # a second look, a moment later: `held` below takes the lock for an instant to see if it is free


@contextlib.contextmanager
def hold(path: Path, *, shared: bool = False, wait: bool = False, poll: float = 1.0) -> Generator[str | None]:
    """Hold a lock file. Yields None once it is held, or, without `wait`, who holds it already.

    A shared hold goes together with other shared ones.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with path.open("a+") as file:
        looks = 0
        while True:
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                looks += 1
                if wait or looks < _LOOKS:
                    time.sleep(poll if wait else 0.02)
                    continue
                file.seek(0)
                yield file.read().strip() or "another process"
                return
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield None


def held(path: Path) -> bool:
    """Whether some process, here or on another machine, holds this lock."""
    try:
        file = path.open("r+")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
