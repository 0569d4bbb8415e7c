"""Tables: rows under column names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows under column names. Cells hold numbers; the report formats them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""
    per_run: bool = False  # one row per run: written to the report, not to the terminal
    arm_column: int | None = None  # the column of arm names, which the report colours
