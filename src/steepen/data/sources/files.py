"""Documents from local files: paths, globs and directories of text, JSON lines and Parquet."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from steepen.data.sources.readers import ReadOptions, check_readable, estimate_text_bytes, read_documents
from steepen.data.sources.source import Part, Source
from steepen.errors import UsageError
from steepen.utils.json_io import canonical_json

SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")
COMPRESSION_SUFFIXES = ("", ".gz", ".zst")


def file_source(names: Sequence[str], options: ReadOptions) -> Source:
    """The files that paths, globs and directories name, sorted by path, without duplicates."""
    files = sorted({file for name in names for file in _match(name)}, key=lambda file: file.as_posix())
    for file in files:
        check_readable(file)  # raise before an hour of work, not after it
    parts = [Part(file.name, partial(read_documents, file, options), file) for file in files]
    listing = [[file.name, file.stat().st_size] for file in files]
    description = {
        "kind": "files",
        "name": " ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "listing_sha256": hashlib.sha256(canonical_json(listing)).hexdigest(),
    }
    return Source(description, sum(estimate_text_bytes(file, options) for file in files), parts)


def _match(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        endings = tuple(suffix + packed for suffix in SUFFIXES for packed in COMPRESSION_SUFFIXES)
        found = [file for file in path.rglob("*") if file.name.endswith(endings) and file.is_file()]
        if not found:
            raise UsageError(
                f"directory {name} has no {', '.join(SUFFIXES)} file (uncompressed, .gz or .zst)."
            )
        return found
    if path.exists() or path.is_symlink():
        return [path]
    found = [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207 (absolute too)
    matched = [match for match in found if match.is_file() or match.is_symlink()]
    if not matched:
        raise UsageError(
            f"nothing matches source {name!r}; a source is files or a glob of them, a directory, "
            "builtin[:PART], hf:OWNER/NAME, fineweb[:CONFIG], fineweb-edu[:CONFIG], or module:attribute."
        )
    return matched
