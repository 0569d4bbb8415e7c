"""Rows of named values, and their groups and columns: runs of a study, optima of sweeps, runs with scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class Named(Protocol):
    """A row: `row["depth"]` is its depth."""

    def __getitem__(self, name: str, /) -> Any: ...


R = TypeVar("R", bound=Named)
S = TypeVar("S", bound=Named)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by a key, in the order in which keys and items come first."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


class Rows(tuple[R, ...]):
    """Some rows, in order."""

    def where(self, **values: Any) -> Rows[R]:
        """Those with these values."""
        return Rows(row for row in self if all(row[name] == value for name, value in values.items()))

    def having(self, name: str) -> Rows[R]:
        """Those where a value is known and finite: having("loss") leaves out runs that diverged."""
        return Rows(row for row in self if row[name] is not None and math.isfinite(row[name]))

    def by(self, *names: str) -> dict[Any, Rows[R]]:
        """Those of each value of a name (of several names: each tuple of values), in rising order."""
        key = itemgetter(*names)
        levels = sorted({key(row) for row in self})
        return {level: Rows(row for row in self if key(row) == level) for level in levels}

    def map(self, change: Callable[[R], S]) -> Rows[S]:
        """Another row for each."""
        return Rows(map(change, self))

    def column(self, name: str) -> list[Any]:
        """One value of each."""
        return [row[name] for row in self]

    def array(self, name: str) -> NDArray[np.float64]:
        """One number of each."""
        return np.array(self.column(name), float)

    def dicts(self, *names: str, **renamed: str) -> list[dict[str, Any]]:
        """Some values of each as JSON objects; `renamed` are pairs of a key and a name."""
        pairs: Mapping[str, str] = {name: name for name in names} | renamed
        return [{key: row[name] for key, name in pairs.items()} for row in self]
