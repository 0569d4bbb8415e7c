"""Tables of runs as verbs take them: a file, or a frame of pandas, polars and others in memory."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError
from steepen.requests.request import Argument, Option
from steepen.utils.values import Pairs

if TYPE_CHECKING:
    from steepen.laws.table import Table

ACCEPTED = "a file, a pandas, polars or Arrow frame, a dict of columns, or a list of dicts"


TABLE = "Table"  # panel of --help


@dataclass(frozen=True)
class ReadsTable:
    """The fields of a verb that reads a table of runs."""

    table: Annotated[
        Any,
        Argument(
            "CSV, TSV, JSON, Parquet or Excel, or the paper's own runs: paper:fineweb, paper:fineweb-edu.",
            python="Also a pandas, polars or Arrow frame, a dict of columns, a list of dicts, or open_runs.",
        ),
    ]
    _: KW_ONLY
    columns: Annotated[
        Pairs | None,
        Option(
            "Names of the table's columns: loss=loss_c4_val,arm=dataset. Usual names (C, compute, params, N, "
            "D, val_loss) are recognized.",
            TABLE,
        ),
    ] = None
    where: Annotated[
        tuple[str, ...],
        Option(
            "Use only the rows with dataset=c4, arm=a,b, arm!=c, params>=1e8 or 'loss < 3 and depth > 4'. "
            "Repeatable.",
            TABLE,
        ),
    ] = ()

    def read_table(self) -> Table:
        """The table's rows that satisfy every condition, with columns under our names."""
        return as_table(self.table, columns=self.columns, where=self.where)


def as_table(
    data: Any, *, columns: Mapping[str, str] | None = None, where: Sequence[str] = (), name: str = "table"
) -> Table:
    """A table of runs from a file's path or from data in memory.

    `data` is a path, `paper:fineweb`, a frame (of pandas, of polars, or anything with the Arrow PyCapsule or
    the dataframe interchange protocol), a dict of columns, a list of dicts, or `Runs`. `columns` maps our
    names to the data's own: `{"loss": "val_loss"}`. `where` keeps the rows that satisfy every condition.
    """
    from steepen.laws.read_table import read_table
    from steepen.laws.table import table_from

    if isinstance(data, str | Path):
        table = read_table(data)
    else:
        found = _columns(data)
        if not found:
            raise UsageError(f"the {name} has no columns.")
        table = table_from(found, name)
    return table.rename(columns or {}).where(where)


def _columns(data: Any) -> dict[str, Sequence[Any]]:
    """The columns of data in memory, by name."""
    if hasattr(data, "to_rows"):  # Runs, or another result of this package
        data = data.to_rows()
    if isinstance(data, Mapping):
        return {str(key): list(values) for key, values in data.items()}
    if isinstance(data, list | tuple):
        return _columns_of_rows(list(data))
    if callable(getattr(data, "to_pydict", None)):  # pyarrow
        return _unique(data.column_names, data.to_pydict())
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):  # pandas, polars: iterates the values
        names = [str(name) for name in data.columns]
        _unique(names, {})
        return {str(name): [_scalar(value) for value in data[name]] for name in data.columns}
    arrow = _arrow(data)
    if arrow is None:
        raise UsageError(f"a {type(data).__name__} is not a table of runs; give {ACCEPTED}.")
    return _unique(arrow.column_names, arrow.to_pydict())


def _columns_of_rows(rows: list[Any]) -> dict[str, Sequence[Any]]:
    wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise UsageError(f"a list with a {type(wrong).__name__} is not a table of runs; give {ACCEPTED}.")
    names = list(dict.fromkeys(str(key) for row in rows for key in row))
    return {key: [row.get(key) for row in rows] for key in names}


def _arrow(data: Any) -> Any:
    """A pyarrow table from an object with the Arrow PyCapsule or the interchange protocol, else None."""
    if hasattr(data, "__arrow_c_stream__"):
        import pyarrow as pa

        return pa.table(data)
    if hasattr(data, "__dataframe__"):
        return importlib.import_module("pyarrow.interchange").from_dataframe(data)
    return None


def _unique(names: Sequence[str], columns: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise UsageError(f"the table names a column twice: {', '.join(repeated)}.")
    return columns


def _scalar(value: Any) -> Any:
    """A Python value; NaN and the missing values of a frame are None."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value
