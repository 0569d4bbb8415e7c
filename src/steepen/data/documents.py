"""Where the documents of a split end in its token stream: 8 bytes a document, in a file beside the shards.

documents_SPLIT.bin holds one little-endian int64 per document, the position after its last token; document i
is the tokens [ends[i-1], ends[i]) of the split, with ends[-1] = 0. Its first token is <|endoftext|>.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steepen.errors import SteepenError
from steepen.utils.files import open_without_links, read_file

ENTRY = np.dtype("<i8")


def documents_file(directory: Path, split: str) -> Path:
    """The file with the document ends of one split."""
    return directory / f"documents_{split}.bin"


class DocumentEndsWriter:
    """Appends the end of each document; can be restored to any number of documents a journal recorded."""

    def __init__(self, path: Path, documents: int = 0) -> None:
        size = documents * ENTRY.itemsize
        self._stream = open(path, "ab", opener=open_without_links)  # noqa: SIM115
        if path.stat().st_size < size:
            self._stream.close()
            raise SteepenError(f"{path} is shorter than the journal says; use `restart` to begin again.")
        self._stream.truncate(size)

    def append(self, end: int) -> None:
        """Add a document that ends at position `end` of the split."""
        self._stream.write(end.to_bytes(ENTRY.itemsize, "little"))

    def sync(self) -> None:
        """Flush to the disk; called before a journal records the number of documents."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def check_document_ends(path: Path, documents: int) -> None:
    """Compare the file's size with the manifest."""
    expected = documents * ENTRY.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SteepenError(f"{path} cannot be read ({error.strerror}); prepare it again.") from None
    if size != expected:
        raise SteepenError(
            f"{path} has {size:,} bytes where the manifest says {expected:,}; "
            "restore it or prepare the data again."
        )


def read_document_ends(path: Path, documents: int, sha256: str) -> npt.NDArray[np.int64]:
    """The ends of all documents, int64, read-only; raises if the file's SHA-256 is another."""
    content = read_file(path, limit=sys.maxsize) if documents else b""
    if documents and hashlib.sha256(content).hexdigest() != sha256:
        raise SteepenError(
            f"{path} was altered: its SHA-256 is not the manifest's; restore it or prepare the data again."
        )
    return np.frombuffer(content, ENTRY)
