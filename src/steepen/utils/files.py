"""Files: atomic writes, SHA-256 of a file, fsync of a directory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"  # of the file that a process killed inside `write_atomically` leaves behind

# The umask can only be read by setting it; do so at import, before there are threads.
_UMASK = os.umask(0o022)
os.umask(_UMASK)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` (text as UTF-8); readers and crashes see the old file or the new one.

    The content is on disk (fsync) before it gets its name. Parent directories are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(
                handle, 0o666 & ~_UMASK
            )  # mkstemp makes it private; other users may share the directory
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
