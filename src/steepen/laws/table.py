"""Read tables of runs (CSV, JSON lines, Parquet), with errors that name the row."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.solver import Array

MIN_REFERENCE_RUNGS = 4
MIN_ARM_RUNGS = 3


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of a file, with the line or row number of every row for error messages."""

    source: str
    row_word: str  # "line" or "row"
    lines: tuple[int, ...]
    columns: dict[str, tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """The file and line of a row, for messages."""
        return f"{self.source}, {self.row_word} {self.lines[row]}"

    def numbers(self, column: str, *, positive: bool = True) -> Array:
        """A required column as finite (and, by default, positive) numbers."""
        values = np.empty(len(self))
        for row, cell in enumerate(self._column(column)):
            try:
                values[row] = float(cell) if not isinstance(cell, bool) else math.nan
            except (TypeError, ValueError):
                values[row] = math.nan
                if not isinstance(cell, float):
                    shown = "empty" if cell in (None, "") else f"{cell!r}, which is not a number"
                    raise UsageError(
                        f"{self.place(row)}: {column} is {shown}; give a number such as 3.2 or 1e18."
                    ) from None
            if not math.isfinite(values[row]):
                raise UsageError(
                    f"{self.place(row)}: {column} is {cell}; remove the row or give a finite number."
                )
            if positive and values[row] <= 0:
                raise UsageError(f"{self.place(row)}: {column} is {cell}; it must be greater than zero.")
        return values

    def names(self, column: str) -> list[str]:
        """A required column as non-empty text."""
        names: list[str] = []
        for row, cell in enumerate(self._column(column)):
            name = "" if cell is None else str(cell).strip()
            if not name:
                raise UsageError(f"{self.place(row)}: {column} is empty; every row needs one.")
            names.append(name)
        return names

    def seeds(self) -> list[str]:
        """The seed column as text; empty where there is none."""
        if not self.has("seed"):
            return [""] * len(self)
        return ["" if cell is None else str(cell) for cell in self._column("seed")]

    def require_unique_rows(self, keys: Sequence[tuple[Any, ...]], what: str) -> None:
        """Raise UsageError for rows with the same key and seed: a duplicated run would count twice."""
        seen: dict[tuple[Any, ...], int] = {}
        for row, key in enumerate(zip(keys, self.seeds(), strict=True)):
            if key in seen:
                raise UsageError(
                    f"{self.place(row)}: the same {what} is already at {self.row_word}"
                    f" {self.lines[seen[key]]}; keep one, or tell repeats apart in a seed column."
                )
            seen[key] = row

    def has(self, column: str) -> bool:
        """Whether the table has the column."""
        return self._name(column) is not None

    def require(self, columns: Sequence[str]) -> None:
        """Raise UsageError unless the table has all of these columns."""
        missing = [column for column in columns if not self.has(column)]
        if missing:
            raise UsageError(
                f"{self.source} has no column {', '.join(map(repr, missing))}; it needs {', '.join(columns)}"
                f" and has {', '.join(self.columns) or 'none'}."
            )

    def _column(self, column: str) -> tuple[Any, ...]:
        self.require([column])
        return self.columns[self._name(column) or column]

    def _name(self, column: str) -> str | None:
        """The file's own spelling of a column: FLOPs is flops, unless two columns differ only in case."""
        if column in self.columns:
            return column
        alike = [name for name in self.columns if name.strip().casefold() == column.casefold()]
        if len(alike) > 1:
            raise UsageError(
                f"{self.source} has columns {', '.join(alike)}, which differ only in case; keep one {column}."
            )
        return alike[0] if alike else None


def read_table(path: Path | str) -> Table:
    """Read a table; the suffix decides: .csv, .jsonl/.ndjson/.json or .parquet."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no table at {path}; give a CSV, JSON-lines or Parquet file.")
    ending = path.suffix.lower()
    if ending == ".csv":
        table = _read_csv(path)
    elif ending in (".jsonl", ".ndjson", ".json"):
        table = _read_json_lines(path)
    elif ending in (".parquet", ".pq"):
        table = _read_parquet(path)
    else:
        raise UsageError(
            f"{path.name} ends in {ending or 'nothing'}; tables end in .csv, .jsonl or .parquet."
        )
    if not len(table):
        raise UsageError(f"{path.name} has no rows of data.")
    return table


def table_from(columns: dict[str, Sequence[Any]], source: str = "table") -> Table:
    """A table from columns in memory (records of a study, a notebook); rows are counted from 1."""
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise UsageError(f"the columns of {source} differ in length: {sorted(lengths)}.")
    rows = lengths.pop()
    return Table(source, "row", tuple(range(1, rows + 1)), {name: tuple(v) for name, v in columns.items()})


def _read_csv(path: Path) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None:
                raise UsageError(f"{path.name} is empty; its first line must name the columns.")
            names = [name.strip() for name in header]
            if len(set(names)) < len(names):
                raise UsageError(f"{path.name} names a column twice: {', '.join(names)}.")
            rows: list[list[str]] = []
            lines: list[int] = []
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if len(row) != len(names):
                    raise UsageError(
                        f"{path.name}, line {reader.line_num}: {len(row)} cells where the header names"
                        f" {len(names)}."
                    )
                rows.append([cell.strip() for cell in row])
                lines.append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path.name} is not a readable CSV file ({error}).") from None
    columns = {name: tuple(row[i] for row in rows) for i, name in enumerate(names)}
    return Table(path.name, "line", tuple(lines), columns)


def _read_json_lines(path: Path) -> Table:
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    try:
        numbered = list(enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not a readable text file ({error}).") from None
    for number, record in _records(path, numbered):
        records.append(record)
        lines.append(number)
    names = list(dict.fromkeys(key for record in records for key in record))
    columns = {name: tuple(record.get(name) for record in records) for name in names}
    return Table(path.name, "line", tuple(lines), columns)


def _records(path: Path, numbered: list[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path.name}, line {number}: not JSON ({error.msg}); write one object a line."
            ) from None
        if not isinstance(record, dict):
            raise UsageError(f"{path.name}, line {number}: not a JSON object; write one object a line.")
        yield number, record


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(path).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path.name} is not a readable Parquet file ({str(error).splitlines()[0]})."
        ) from None
    rows = len(next(iter(columns.values()), []))
    return Table(path.name, "row", tuple(range(1, rows + 1)), {str(k): tuple(v) for k, v in columns.items()})
