"""What every data source provides: named parts that yield documents, and a description for the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

HASH_BYTES = 16  # length of a document's content hash


@dataclass(frozen=True)
class Part:
    """A section of a source with a fixed order, such as one file.

    `documents(start)` yields its documents (lines, rows or texts) from number `start` on, None for an empty
    one. The order must be the same in every call: an interrupted preparation resumes at a document's number.
    """

    name: str
    documents: Callable[[int], Iterator[str | None]]
    file: Path | None = None  # from which it is read, and which must stay as it is meanwhile

    @property
    def version(self) -> list[int] | None:
        """Size and modification time of its file; None without one."""
        if self.file is None:
            return None
        found = self.file.stat()
        return [found.st_size, found.st_mtime_ns]


@dataclass(frozen=True)
class Source:
    """A resolved data source.

    `description` goes into the manifest and needs a "name"; preparations with equal descriptions and equal
    options are the same preparation. `size` is an estimate of the text in bytes.
    """

    description: dict[str, Any]
    size: int
    parts: Sequence[Part]

    def repeated(self, times: int) -> Source:
        """The source read so many times, one pass after the other."""
        return replace(self, size=times * self.size, parts=[*self.parts] * times)


# A user-defined source: called without arguments, returns its documents or a Source.
SourceFunction: TypeAlias = Callable[[], Iterable[str | None] | Source]


def document_hash(text: str) -> bytes:
    """Content hash of a document, which decides its split; equal texts have equal hashes."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()
