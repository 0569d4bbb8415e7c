"""Types of the arrays that laws are fitted to, and rows of dataclasses of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.intp]
Columns = TypeVar("Columns")  # a dataclass


def take_rows(columns: Columns, which: Mask | Index) -> Columns:
    """Some of the rows of a dataclass whose arrays, tuples and dataclasses have one entry a row.

    Empty tuples, and fields that are no columns, stay as they are.
    """

    def taken(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[which]
        if isinstance(value, tuple):
            return tuple(value[i] for i in np.arange(len(value))[which]) if len(value) else value
        if is_dataclass(value) and not isinstance(value, type):
            return take_rows(value, which)
        return value

    known: Any = columns  # Python has no public type of dataclasses
    return replace(known, **{one.name: taken(getattr(known, one.name)) for one in fields(known)})
