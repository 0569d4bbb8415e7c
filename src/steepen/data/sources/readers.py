"""Documents out of files: plain text, JSON lines and Parquet; text and JSON lines also gzip or zstd.

Every reader yields one item per unit (a piece of text, a line, a row) from unit `start` on, in a fixed order,
so that a unit number is a position one can return to. An item is None where the unit has no text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from steepen.errors import SteepenError, UsageError

FORMATS = ("text", "jsonl", "parquet")
BLOCK = 1 << 20  # bytes read at a time
LONGEST = 1 << 18  # characters of a plain-text document; a longer file is cut at blank lines
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Reading:
    """How files are read: `field` of JSON lines and Parquet, `separator` of plain text, and invalid UTF-8."""

    format: str = "auto"
    field: str = "text"
    separator: str = "<|endoftext|>"
    replace_invalid: bool = False

    def __post_init__(self) -> None:
        if self.format not in {"auto", *FORMATS}:
            raise UsageError(f"unknown format {self.format!r}; accepted are auto, {', '.join(FORMATS)}.")
        if not self.separator:
            raise UsageError("the separator of documents is empty; give at least one character.")

    @property
    def errors(self) -> str:
        """The codec's error handler."""
        return "replace" if self.replace_invalid else "strict"


def format_of(path: Path) -> str:
    """The format of a file, by its first bytes and its name; any other file is read as plain text."""
    if first_bytes(path) == PARQUET_MAGIC or path.suffix == ".parquet":
        return "parquet"
    suffixes = [suffix for suffix in path.suffixes if suffix not in {".gz", ".zst", ".zstd", ".gzip"}]
    kind = suffixes[-1] if suffixes else ""
    lines = kind in {".jsonl", ".ndjson"} or (kind == ".json" and _begins_with_an_object(path))
    return "jsonl" if lines else "text"


def _begins_with_an_object(path: Path) -> bool:
    """Whether the first line is a JSON object by itself, as in lines of JSON that are named .json."""
    line = next(_blocks(path), b"").split(b"\n", 1)[0]
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def first_bytes(path: Path) -> bytes:
    """The first four bytes, which also tells whether a file can be read at all."""
    try:
        with path.open("rb") as stream:
            return stream.read(4)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}).") from None


def compression_of(path: Path) -> str | None:
    """gzip, zstd or None, by the file's first bytes."""
    start = first_bytes(path)
    return next((name for magic, name in COMPRESSIONS.items() if start.startswith(magic)), None)


def text_bytes(path: Path, reading: Reading) -> int:
    """Roughly how many bytes of text a file holds, for the progress bar and the size of the split."""
    if kind_of(path, reading) == "parquet":
        metadata = _parquet(path).metadata
        column = _parquet_column(path, reading.field)
        groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
        return sum(group.column(column).total_uncompressed_size for group in groups)
    return path.stat().st_size * (3 if compression_of(path) else 1)


def kind_of(path: Path, reading: Reading) -> str:
    """The format a file will be read in."""
    return format_of(path) if reading.format == "auto" else reading.format


def read_documents(path: Path, reading: Reading, start: int = 0) -> Iterator[str | None]:
    """The documents of one file from unit `start` on."""
    readers: dict[str, Callable[[Path, Reading, int], Iterator[str | None]]] = {
        "text": _read_text,
        "jsonl": _read_lines,
        "parquet": _read_parquet,
    }
    return readers[kind_of(path, reading)](path, reading, start)


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes, decompressed."""
    import pyarrow as pa

    compression = compression_of(path)
    try:
        with pa.input_stream(str(path), compression=compression, buffer_size=BLOCK) as stream:
            while block := cast("bytes", stream.read(BLOCK)):
                yield block
    except (OSError, pa.ArrowException) as error:
        how = f" as {compression}" if compression else ""
        raise SteepenError(f"cannot read {path}{how} ({_one_line(error)}); it may be cut short.") from None


def _read_text(path: Path, reading: Reading, start: int) -> Iterator[str | None]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(reading.errors)
    buffer, unit, offset = "", 0, 0
    for block in chain(_blocks(path), [b""]):
        try:
            buffer += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _invalid_utf8(f"{path} near byte {offset + error.start:,}") from None
        offset += len(block)
        used = 0
        for piece, used in _cut(buffer, reading.separator, final=not block):  # noqa: B007 (used after)
            if unit >= start:
                yield piece.strip() or None
            unit += 1
        buffer = buffer[used:]


def _cut(text: str, separator: str, final: bool) -> Iterator[tuple[str, int]]:
    """Whole documents from the front of a text, each with the place where the next begins.

    Unless the text is the final one, it looks a separator's length beyond the longest document before it cuts
    one, so that the pieces do not depend on how a file came in blocks.
    """
    place, ahead = 0, 0 if final else len(separator)
    while place < len(text):
        end = text.find(separator, place, place + LONGEST + len(separator))
        if end >= 0:
            following = end + len(separator)
        elif len(text) - place > LONGEST + ahead:
            end = following = place + _break_before(text[place : place + LONGEST], LONGEST)
        elif final:
            end = following = len(text)
        else:
            return
        yield text[place:end], following
        place = following


def _break_before(text: str, limit: int) -> int:
    """Where to cut a long text: after the last blank line, else line, else space, of its second half."""
    for mark in ("\n\n", "\n", " "):
        end = text.rfind(mark, limit // 2, limit)
        if end >= 0:
            return end + len(mark)
    return limit


def _read_lines(path: Path, reading: Reading, start: int) -> Iterator[str | None]:
    rest, unit = b"", 0
    for block in chain(_blocks(path), [b""]):
        *lines, rest = (rest + block).split(b"\n")
        if rest and not block:  # the last line has no line break
            lines.append(rest)
        for line in lines:
            if unit >= start:
                yield _document_of_line(path, unit + 1, line, reading)
            unit += 1


def _document_of_line(path: Path, number: int, line: bytes, reading: Reading) -> str | None:
    if not line.strip():
        return None
    where = f"{path} line {number:,}"
    try:
        row = json.loads(line.decode("utf-8-sig", reading.errors))
    except UnicodeDecodeError:
        raise _invalid_utf8(where) from None
    except (ValueError, RecursionError) as error:
        raise SteepenError(f"{where} is no JSON ({_one_line(error)}).") from None
    if not isinstance(row, dict):
        raise SteepenError(f"{where} is no JSON object with a field {reading.field!r}.")
    fields = cast("dict[str, Any]", row)
    if reading.field not in fields:
        raise _missing_field(where, reading.field, list(fields))
    text = fields[reading.field]
    if text is not None and not isinstance(text, str):
        raise SteepenError(f"{where} has no text in field {reading.field!r} but {type(text).__name__}.")
    if text and b"\\u" in line:  # JSON can spell half a surrogate pair, which is no character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return (text or "").strip() and text


def _read_parquet(path: Path, reading: Reading, start: int) -> Iterator[str | None]:
    import pyarrow as pa

    file = _parquet(path)
    _parquet_column(path, reading.field)
    groups: list[int] = []
    before = 0  # rows in the row groups that `start` lies behind
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if not groups and before + rows <= start:
            before += rows
        else:
            groups.append(group)
    unit = before
    try:
        for batch in file.iter_batches(256, row_groups=groups, columns=[reading.field], use_threads=False):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for value in column.cast(pa.large_binary()).to_pylist():
                text = None if value is None else cast("bytes", value).decode("utf-8", reading.errors)
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
        return pq.ParquetFile(path, memory_map=True)
    except (OSError, pa.ArrowException) as error:
        raise SteepenError(f"cannot read {path} as Parquet ({_one_line(error)}).") from None


def _parquet_column(path: Path, field: str) -> int:
    """The index of the text column among the file's leaves."""
    import pyarrow as pa

    schema = _parquet(path).schema_arrow
    if field not in schema.names:
        raise _missing_field(str(path), field, schema.names)
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(is_text(kind) for is_text in texts):
        raise SteepenError(f"{path} has no text in field {field!r} but {kind}.")
    return [column.path.split(".")[0] for column in _parquet(path).schema].index(field)


def _missing_field(where: str, field: str, fields: list[str]) -> SteepenError:
    listed = ", ".join(fields[:8]) or "none"
    return SteepenError(f"{where} has no field {field!r}; its fields are {listed} (choose one with --field).")


def _invalid_utf8(where: str) -> SteepenError:
    return SteepenError(
        f"{where} is not valid UTF-8; convert the file, or use --replace-invalid to read bad bytes as U+FFFD."
    )


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
