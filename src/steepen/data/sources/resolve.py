"""What SOURCE means: files and globs, the embedded corpus, or a set of the Hugging Face hub by name."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steepen.data.sources.readers import Reading, first_bytes, read_documents, text_bytes
from steepen.errors import UsageError
from steepen.utils.json_io import canonical_json

SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")
COMPRESSED = ("", ".gz", ".zst")


@dataclass(frozen=True)
class Part:
    """A stretch of the source that is read in order; `documents(unit)` starts at a unit."""

    name: str
    documents: Callable[[int], Iterator[str | None]]


@dataclass(frozen=True)
class Source:
    """A resolved source. `description` goes into the manifest; two preparations with equal descriptions and
    options are the same preparation. `size` estimates its bytes of text."""

    description: dict[str, Any]
    size: int
    parts: Sequence[Part]


def resolve(
    words: Sequence[str], reading: Reading, hub: str | None, staging: Path, say: Callable[[str], None]
) -> Source:
    """Find what the words of SOURCE name; raises where there is nothing to read."""
    from steepen.data.sources import builtin as embedded
    from steepen.data.sources import hub as hugging_face

    if not words:
        raise UsageError("no source given; name files, a glob, embedded, fineweb or fineweb-edu.")
    first, _, config = words[0].partition(":")
    named = first == embedded.NAME or first in hugging_face.REPOSITORIES
    if named and len(words) > 1:
        raise UsageError(
            f"source {words[0]!r} cannot be mixed with others; prepare each into its own directory."
        )
    if first == embedded.NAME:
        say("gathering the embedded corpus")
        return embedded.source(config)
    if first in hugging_face.REPOSITORIES:
        return hugging_face.source(first, config, reading, hub=hub, staging=staging, say=say)
    return files(words, reading)


def files(words: Sequence[str], reading: Reading) -> Source:
    """The files that paths, globs and directories name, in the order of their paths, each once."""
    found = sorted({file for word in words for file in _matches(word)}, key=lambda file: file.as_posix())
    for file in found:
        first_bytes(file)  # an unreadable one is refused now rather than after an hour
    parts = [Part(file.name, partial(read_documents, file, reading)) for file in found]
    listing = [[file.name, file.stat().st_size] for file in found]
    description = {
        "kind": "files",
        "name": " ".join(words) if len(words) <= 3 else f"{words[0]} … {words[-1]}",
        "files": len(found),
        "bytes": sum(file.stat().st_size for file in found),
        "listing_sha256": hashlib.sha256(canonical_json(listing)).hexdigest(),
    }
    return Source(description, sum(text_bytes(file, reading) for file in found), parts)


def _matches(word: str) -> list[Path]:
    path = Path(word)
    if path.is_dir():
        endings = tuple(suffix + packed for suffix in SUFFIXES for packed in COMPRESSED)
        found = [file for file in path.rglob("*") if file.name.endswith(endings) and file.is_file()]
        if not found:
            raise UsageError(f"directory {word} holds no {', '.join(SUFFIXES)} file (plain, .gz or .zst).")
        return found
    if path.exists() or path.is_symlink():
        return [path]
    found = [Path(match) for match in glob.glob(word, recursive=True)]  # noqa: PTH207 (absolute too)
    matched = [match for match in found if match.is_file() or match.is_symlink()]
    if not matched:
        raise UsageError(
            f"nothing matches source {word!r}; a source is files or a glob of them, a directory, embedded, "
            "fineweb[:CONFIG] or fineweb-edu[:CONFIG]."
        )
    return matched
