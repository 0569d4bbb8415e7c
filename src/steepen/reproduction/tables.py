"""The tables that the paper's authors publish (MIT; assets/authors_tables.LICENSE), one copy of each."""

from __future__ import annotations

import csv
import functools
import io
import zipfile
from pathlib import Path
from typing import Any

from steepen.tables.paper_ladders import ASSETS as LADDERS
from steepen.utils.rows import Rows

ARCHIVE = Path(__file__).parent / "assets" / "authors_tables.zip"
Row = dict[str, Any]


@functools.cache
def table(name: str) -> Rows[Row]:
    """The rows of a table: numbers, words, and None where nothing was published."""
    if (path := LADDERS / f"{name}.csv").exists():  # the ladders of `steepen fit paper:…`
        text = path.read_text(encoding="utf-8")
    else:
        with zipfile.ZipFile(ARCHIVE) as archive:
            text = archive.read(f"{name}.csv").decode()
    return Rows({key: _value(cell) for key, cell in row.items()} for row in csv.DictReader(io.StringIO(text)))


def _value(cell: str) -> Any:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return {"": None, "true": True, "false": False}.get(cell, cell)
