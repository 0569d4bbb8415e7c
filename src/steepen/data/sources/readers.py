"""Documents of local files: text, JSON lines and Parquet; text and JSON lines may be gzip or zstd compressed.

Every reader yields one item per unit (a section of text, a line, a row) from unit `start` on, in a fixed
order, so that reading can resume at a unit number. An item is None if the unit has no text.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from steepen.data.sources.source import Part, Source
from steepen.errors import SteepenError, UsageError
from steepen.utils.json_io import canonical_json

FORMATS = ("text", "jsonl", "parquet")
BLOCK_BYTES = 1 << 20  # read at a time
MAX_TEXT_CHARACTERS = 1 << 18  # of a document in a text file; longer texts are cut at blank lines
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class ReadOptions:
    """How files are read."""

    format: str = "auto"
    field: str = "text"  # of JSON lines and Parquet
    separator: str = "<|endoftext|>"  # between the documents of a text file
    replace_invalid: bool = False  # read invalid UTF-8 as U+FFFD

    def __post_init__(self) -> None:
        if self.format not in {"auto", *FORMATS}:
            raise UsageError(f"unknown format {self.format!r}; accepted are auto, {', '.join(FORMATS)}.")
        if not self.separator:
            raise UsageError("the document separator is empty; give at least one character.")

    @property
    def errors(self) -> str:
        """The codec's error handler."""
        return "replace" if self.replace_invalid else "strict"


def detect_format(path: Path) -> str:
    """text, jsonl or parquet, by the first bytes and the name of a file; text if unknown."""
    if _first_bytes(path) == PARQUET_MAGIC or path.suffix == ".parquet":
        return "parquet"
    suffixes = [suffix for suffix in path.suffixes if suffix not in {".gz", ".zst", ".zstd", ".gzip"}]
    suffix = suffixes[-1] if suffixes else ""
    is_jsonl = suffix in {".jsonl", ".ndjson"}
    if suffix == ".json":  # JSON lines too, if the first line is a complete object
        with contextlib.suppress(ValueError, RecursionError):
            is_jsonl = isinstance(json.loads(next(_blocks(path), b"").split(b"\n", 1)[0]), dict)
    return "jsonl" if is_jsonl else "text"


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(4)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}).") from None


def detect_compression(path: Path) -> str | None:
    """gzip, zstd or None, by the first bytes of a file."""
    start = _first_bytes(path)
    return next((name for magic, name in COMPRESSIONS.items() if start.startswith(magic)), None)


def estimate_text_bytes(path: Path, options: ReadOptions) -> int:
    """Estimate the bytes of text in a file, for the progress bar and the size of the validation split."""
    if _format(path, options) == "parquet":
        metadata = _parquet(path).metadata
        column = _parquet_column(path, options.field)
        groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
        return sum(group.column(column).total_uncompressed_size for group in groups)
    return path.stat().st_size * (3 if detect_compression(path) else 1)


def _format(path: Path, options: ReadOptions) -> str:
    return detect_format(path) if options.format == "auto" else options.format


def read_documents(path: Path, options: ReadOptions, start: int = 0) -> Iterator[str | None]:
    """The documents of one file from unit `start` on."""
    readers: dict[str, Callable[[Path, ReadOptions, int], Iterator[str | None]]] = {
        "text": _read_text,
        "jsonl": _read_lines,
        "parquet": _read_parquet,
    }
    return readers[_format(path, options)](path, options, start)


def _blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed."""
    import pyarrow as pa

    compression = detect_compression(path)
    try:
        with pa.input_stream(str(path), compression=compression, buffer_size=BLOCK_BYTES) as stream:
            while block := cast("bytes", stream.read(BLOCK_BYTES)):
                yield block
    except (OSError, pa.ArrowException) as error:
        as_what = f" as {compression}" if compression else ""
        raise SteepenError(
            f"cannot read {path}{as_what} ({_one_line(error)}); it may be truncated."
        ) from None


def _read_text(path: Path, options: ReadOptions, start: int) -> Iterator[str | None]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(options.errors)
    buffer, unit, offset = "", 0, 0
    for block in chain(_blocks(path), [b""]):
        try:
            buffer += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _invalid_utf8(f"{path} near byte {offset + error.start:,}") from None
        offset += len(block)
        used = 0
        for text, used in _cut(buffer, options.separator, final=not block):  # noqa: B007 (used after)
            if unit >= start:
                yield text.strip() or None
            unit += 1
        buffer = buffer[used:]


def _cut(text: str, separator: str, final: bool) -> Iterator[tuple[str, int]]:
    """The complete documents at the front of a text, each with the position where the next begins.

    Unless `final`, a document is cut at the maximum length only when a separator's length beyond it is known,
    so that documents do not depend on the block size.
    """
    position, ahead = 0, 0 if final else len(separator)
    while position < len(text):
        limit = position + MAX_TEXT_CHARACTERS
        end = text.find(separator, position, limit + len(separator))
        if end >= 0:
            following = end + len(separator)
        elif len(text) > limit + ahead:
            end = following = position + _last_break(text[position:limit])
        elif final:
            end = following = len(text)
        else:
            return
        yield text[position:end], following
        position = following


def _last_break(text: str) -> int:
    """Where to cut a long text: after the last blank line, else line, else space, of its second half."""
    limit = len(text)
    for mark in ("\n\n", "\n", " "):
        end = text.rfind(mark, limit // 2, limit)
        if end >= 0:
            return end + len(mark)
    return limit


def _read_lines(path: Path, options: ReadOptions, start: int) -> Iterator[str | None]:
    rest, unit = b"", 0
    for block in chain(_blocks(path), [b""]):
        *lines, rest = (rest + block).split(b"\n")
        if rest and not block:  # a last line without a line break
            lines.append(rest)
        for line in lines:
            if unit >= start:
                yield _document_of_line(path, unit + 1, line, options)
            unit += 1


def _document_of_line(path: Path, number: int, line: bytes, options: ReadOptions) -> str | None:
    if not line.strip():
        return None
    where = f"{path} line {number:,}"
    try:
        row = json.loads(line.decode("utf-8-sig", options.errors))
    except UnicodeDecodeError:
        raise _invalid_utf8(where) from None
    except (ValueError, RecursionError) as error:
        raise SteepenError(f"{where} is not JSON ({_one_line(error)}).") from None
    if not isinstance(row, dict):
        raise SteepenError(f"{where} is not a JSON object with a field {options.field!r}.")
    fields = cast("dict[str, Any]", row)
    if options.field not in fields:
        raise _missing_field(where, options.field, list(fields))
    text = fields[options.field]
    if text is not None and not isinstance(text, str):
        raise SteepenError(f"{where} has {type(text).__name__}, not text, in field {options.field!r}.")
    if text and b"\\u" in line:  # JSON can contain half a surrogate pair, which is not a character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return (text or "").strip() and text


def _read_parquet(path: Path, options: ReadOptions, start: int) -> Iterator[str | None]:
    import pyarrow as pa

    file = _parquet(path)
    _parquet_column(path, options.field)
    groups: list[int] = []
    before = 0  # rows in the row groups before `start`
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if not groups and before + rows <= start:
            before += rows
        else:
            groups.append(group)
    unit = before
    try:
        for batch in file.iter_batches(256, row_groups=groups, columns=[options.field], use_threads=False):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for value in column.cast(pa.large_binary()).to_pylist():
                text = None if value is None else cast("bytes", value).decode("utf-8", options.errors)
                if unit >= start:
                    yield (text or "").strip() and text
                unit += 1
    except UnicodeDecodeError:
        raise _invalid_utf8(f"{path} row {unit + 1:,}") from None
    except (OSError, pa.ArrowException) as error:
        raise SteepenError(f"cannot read {path} after row {unit:,} ({_one_line(error)}).") from None


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)  # not mapped: a file that becomes shorter must not end the process
    except (OSError, pa.ArrowException) as error:
        raise SteepenError(f"cannot read {path} as Parquet ({_one_line(error)}).") from None


def _parquet_column(path: Path, field: str) -> int:
    """The index of the text column among the leaf columns of a file."""
    import pyarrow as pa

    schema = _parquet(path).schema_arrow
    if field not in schema.names:
        raise _missing_field(str(path), field, schema.names)
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(is_text(kind) for is_text in texts):
        raise SteepenError(f"{path} has {kind}, not text, in field {field!r}.")
    return [column.path.split(".")[0] for column in _parquet(path).schema].index(field)


def _missing_field(where: str, field: str, fields: list[str]) -> SteepenError:
    listed = ", ".join(fields[:8]) or "none"
    return SteepenError(f"{where} has no field {field!r}; its fields are {listed} (choose one with `field`).")


def _invalid_utf8(where: str) -> SteepenError:
    return SteepenError(
        f"{where} is not valid UTF-8; convert it, or read invalid bytes as U+FFFD with `replace_invalid`."
    )


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")
COMPRESSION_SUFFIXES = ("", ".gz", ".zst")


def file_source(names: Sequence[str], options: ReadOptions) -> Source:
    """The files that paths, globs and directories name, sorted by path, without duplicates."""
    files = sorted({file for name in names for file in _match(name)}, key=lambda file: file.as_posix())
    for file in files:
        _first_bytes(file)  # raise before an hour of work, not after it
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
