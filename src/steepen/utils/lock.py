"""File locks between processes, by flock: the kernel releases the lock of a process that is killed.

On network file systems flock works across machines where the mount supports it (NFS 4 does; Lustre needs the
mount option `flock`).
"""

from __future__ import annotations

import contextlib
import errno
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
RUNS_PER_GPU_VARIABLE = "STEEPEN_RUNS_PER_GPU"  # environment: how many runs may train on it at the same time
_MOUNTS = Path("/proc/self/mountinfo")
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


def is_locked(path: Path, *, shared: bool = False) -> bool | None:
    """Whether some process, on this machine or another, holds a lock on `path`; None if it cannot be told.

    `shared`: its holders have shared locks. A file that may only be read is enough, except for shared locks
    on NFS.
    """
    try:
        handle = _open_to_read(path)
    except (FileNotFoundError, NotADirectoryError, SteepenError):
        return False
    except OSError:
        return None
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks at all or, on NFS, no exclusive ones of a file that is not open to write
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return None
            if shared:
                return None
        host = file.read(1000).rpartition(" on ")[2].strip()
        elsewhere = host not in ("", socket.gethostname())
        return None if elsewhere and not _shows_locks_of_others(file.fileno(), path) else False


def _open_to_read(path: Path) -> int:
    try:
        return open_without_links(path, os.O_RDWR)  # NFS wants this for an exclusive lock
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return open_without_links(path, os.O_RDONLY)


def _shows_locks_of_others(handle: int, path: Path) -> bool:
    """Whether locks that other machines hold show here, if other machines have this file at all."""
    device = os.fstat(handle).st_dev
    if device not in _devices:
        _devices[device] = _mount(path.resolve())
    kind, options = _devices[device]
    if kind in ("nfs", "nfs4"):
        return not {"nolock", "local_lock=flock", "local_lock=all"} & options
    if kind == "lustre":
        return "flock" in options
    return kind not in ("9p", "virtiofs", "vboxsf", "cifs", "smb3", "beegfs", "afs") and "fuse" not in kind


_devices: dict[int, tuple[str, set[str]]] = {}


def _mount(path: Path) -> tuple[str, set[str]]:
    """Type and options of the file system of a path; ("", {}) where the system does not say."""
    found = (0, "", set[str]())
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(before.split()[4].replace("\\040", " "))
            if point in (path, *path.parents) and len(point.parts) >= found[0]:
                kind, _, options = after.split()
                found = (len(point.parts), kind, {*before.split()[5].split(","), *options.split(",")})
    return found[1:]
