"""Read tables of runs from files: delimited text, JSON, Parquet and Excel, recognized by their content."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from steepen.errors import UsageError
from steepen.tables.paper_ladders import PREFIX, paper_ladders
from steepen.tables.sources.tracked_runs import TRACKERS, tracked_table
from steepen.tables.table import Table, table_from

DELIMITERS = (",", ";", "\t", "|")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
MAX_MEGABYTES = 256  # of a table, unpacked
FORMATS = "CSV, TSV, JSON, Parquet or Excel"


def read_table(
    path: Path | str,
    *,
    columns: Mapping[str, str] | None = None,
    where: Sequence[str] = (),
    at: str = "final",
) -> Table:
    """Read a table of runs.

    `path` is a file, `-` for standard input, `paper:fineweb` or `paper:fineweb-edu` for the ladders of the
    paper, or the runs of a tracker (`sources.tracked_runs`). `columns` maps our names to the file's
    (`{"loss": "loss_c4_val"}`), `where` keeps the rows that satisfy every condition (`"dataset=c4"`,
    `"params>=1e8"`). `at` is which value of a tracker's metric counts.
    """
    if str(path).startswith(PREFIX):
        path = paper_ladders(str(path)).path
    table = tracked_table(str(path), columns or {}, at)
    if table is None:
        if at != "final":
            raise UsageError(f"`at` is for {TRACKERS}; {path} has one value for each run.")
        path = Path(path)
        if str(path) != "-" and not path.is_file():
            raise UsageError(
                f"there is no table at {path}; give a file ({FORMATS}), - for standard input, or {TRACKERS}."
            )
        table = _read(path)
    if not len(table):
        raise UsageError(f"{table.source} has no rows of data.")
    return table.rename(columns or {}).where(where)


def _read(path: Path) -> Table:
    if str(path) == "-":
        path, data = Path("standard input"), _read_bounded(path, sys.stdin.buffer)
    else:
        with path.open("rb") as file:
            data = _read_bounded(path, file)
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = _read_bounded(path, file)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{path.name} is not a readable gzip file ({error}).") from None
    if data[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(path.name, data)
    if data[:4] == b"PK\x03\x04":
        return _read_excel(path.name, data)
    if data[:4] == b"\xd0\xcf\x11\xe0":
        raise UsageError(f"{path.name} is a file of Excel 97; save it as .xlsx or .csv.")
    text = _decode(path.name, data)
    if text.lstrip()[:1] in ("{", "["):
        return _read_json(path.name, text)
    if path.suffix.lower() in (".json", ".jsonl", ".ndjson") and text.strip():
        raise UsageError(f"{path.name}, line 1: not JSON; write one object a line, or an array of objects.")
    return _read_delimited(path.name, text)


def _read_bounded(path: Path, file: io.BufferedIOBase | BinaryIO) -> bytes:
    """What a file or archive holds; raises if that is too much for a table."""
    blocks: list[bytes] = []
    while block := file.read(1 << 20):
        blocks.append(block)
        if len(blocks) > MAX_MEGABYTES:
            raise UsageError(f"{path.name} is larger than {MAX_MEGABYTES} MiB; a table of runs is not.")
    return b"".join(blocks)


def _decode(name: str, data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 with a byte-order mark or with every second byte zero."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif b"\0" in data[:200]:
        encoding = "utf-16-be" if data[:1] == b"\0" else "utf-16-le"
    else:
        encoding = "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not a readable text file ({error.reason} at byte {error.start}); save it as UTF-8."
        ) from None


def _read_delimited(name: str, text: str) -> Table:
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(DELIMITERS, key=first.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        header = next((row for row in reader if any(cell.strip() for cell in row)), None)
        if header is None:
            raise UsageError(f"{name} is empty; its first line must name the columns.")
        names = _unique(name, header)
        rows: list[list[str]] = []
        lines: list[int] = []
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(names):
                raise UsageError(
                    f"{name}, line {reader.line_num}: {len(row)} cells where the header names {len(names)}."
                )
            cells = [cell.strip() for cell in row]
            if delimiter != ",":  # a decimal comma
                cells = [c.replace(",", ".") if DECIMAL_COMMA.fullmatch(c) else c for c in cells]
            rows.append(cells)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise UsageError(f"{name} is not a readable CSV file ({error}).") from None
    columns = {column: tuple(row[i] for row in rows) for i, column in enumerate(names)}
    return Table(name, "line", tuple(lines), columns)


def _unique(name: str, header: Sequence[Any]) -> list[str]:
    names = ["" if cell is None else str(cell).strip() for cell in header]
    if len(set(names)) < len(names):
        raise UsageError(f"{name} names a column twice: {', '.join(names)}.")
    return names


def _read_json(name: str, text: str) -> Table:
    """JSON lines, an array of objects, or an object of columns."""
    try:
        whole = json.loads(text)
    except ValueError:  # lines of JSON, which are read below, or a number of too many digits
        whole = None
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply for a table.") from None
    if isinstance(whole, dict) and whole and all(isinstance(v, list | dict) for v in whole.values()):
        columns = {str(k): list(v.values() if isinstance(v, dict) else v) for k, v in whole.items()}
        return table_from(columns, name)
    if isinstance(whole, list) and all(isinstance(record, dict) for record in whole):
        return _from_records(name, "row", list(enumerate(whole, start=1)))
    return _from_records(name, "line", list(_json_lines(name, text)))


def _from_records(name: str, row_word: str, numbered: Sequence[tuple[int, dict[str, Any]]]) -> Table:
    names = list(dict.fromkeys(key for _, record in numbered for key in record))
    columns = {column: tuple(record.get(column) for _, record in numbered) for column in names}
    return Table(name, row_word, tuple(number for number, _ in numbered), columns)


def _json_lines(name: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{name}, line {number}: not JSON ({getattr(error, 'msg', error)}); write one object a line."
            ) from None
        if not isinstance(record, dict):
            raise UsageError(f"{name}, line {number}: not a JSON object; write one object a line.")
        yield number, record


def _read_parquet(name: str, data: bytes) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(pa.BufferReader(data)).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{name} is not a readable Parquet file ({str(error).splitlines()[0]}).") from None
    rows = len(next(iter(columns.values()), []))
    return Table(name, "row", tuple(range(1, rows + 1)), {str(k): tuple(v) for k, v in columns.items()})


def _read_excel(name: str, data: bytes) -> Table:
    """The first sheet of an .xlsx file, with the values that Excel last computed."""
    try:
        openpyxl = importlib.import_module("openpyxl")
    except ImportError:
        raise UsageError(
            f"{name} is an Excel file, which openpyxl reads: install it with `pip install openpyxl`, or save"
            " the sheet as .csv."
        ) from None
    try:
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        sheet = list(book.worksheets[0].iter_rows(values_only=True))
    except Exception as error:  # a damaged file fails in many ways
        raise UsageError(f"{name} is not a readable Excel file ({error}).") from None
    filled = [
        (number, row)
        for number, row in enumerate(sheet, start=1)
        if any(cell is not None and str(cell).strip() for cell in row)
    ]
    if not filled:
        raise UsageError(f"{name} is empty; the first row of its first sheet must name the columns.")
    width = max(i + 1 for i, cell in enumerate(filled[0][1]) if cell is not None)
    names = _unique(name, filled[0][1][:width])
    columns = {column: tuple(row[i] for _, row in filled[1:]) for i, column in enumerate(names)}
    return Table(name, "row", tuple(number for number, _ in filled[1:]), columns)
