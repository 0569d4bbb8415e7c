"""Tables of runs in memory: frames of pandas, polars and Arrow, dicts of columns, and lists of dicts."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steepen.errors import UsageError

ACCEPTED = "a file, a pandas, polars or Arrow frame, a dict of columns, or a list of dicts"


def columns_in_memory(data: Any) -> dict[str, Sequence[Any]]:
    """The columns of a table by name; raises UsageError for what is none."""
    if isinstance(data, Mapping):
        return {str(key): list(values) for key, values in data.items()}
    if isinstance(data, list | tuple):
        wrong = next((row for row in data if not isinstance(row, Mapping)), None)
        if wrong is not None:
            raise UsageError(f"a list with a {type(wrong).__name__} is not a table of runs; give {ACCEPTED}.")
        keys = dict.fromkeys(map(str, itertools.chain.from_iterable(data)))
        return {key: [row.get(key) for row in data] for key in keys}
    if not _is_arrow(data) and hasattr(data, "columns") and hasattr(data, "__getitem__"):  # pandas, polars
        _require_different(map(str, data.columns))
        return {str(name): [_scalar(value) for value in data[name]] for name in data.columns}
    arrow = _arrow(data)
    _require_different(arrow.column_names)
    return arrow.to_pydict()


def _is_arrow(data: Any) -> bool:
    return callable(getattr(data, "to_pydict", None))


def _arrow(data: Any) -> Any:
    """A pyarrow table, of an object with the Arrow PyCapsule or the interchange protocol too."""
    if _is_arrow(data):
        return data
    if hasattr(data, "__arrow_c_stream__"):
        import pyarrow as pa

        with contextlib.suppress(pa.ArrowInvalid):  # of a single column, as a pandas Series is
            return pa.table(data)
    elif hasattr(data, "__dataframe__"):
        return importlib.import_module("pyarrow.interchange").from_dataframe(data)
    raise UsageError(f"a {type(data).__name__} is not a table of runs; give {ACCEPTED}.")


def _require_different(names: Iterable[str]) -> None:
    names = list(names)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"the table names a column twice: {', '.join(repeated)}.")


def _scalar(value: Any) -> Any:
    """A Python value; NaN and the missing values of a frame are None."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value
