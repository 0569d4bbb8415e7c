"""Small file habits shared by the room: write whole or not at all, hash in one pass."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"  # the ending of a file that a kill in the middle of `write_atomically` leaves behind


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`; a reader, or a crash, sees the old file or the new one, no mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def canonical_json(value: Any) -> bytes:
    """The one JSON spelling of a value, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256_of_file(path: Path) -> str:
    """The hex SHA-256 of a file, the same `sha256sum` prints."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
