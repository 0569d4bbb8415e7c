"""Tables: rows under column names, made from typed rows whose fields say how they are shown."""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Column:
    """How one column is shown: its heading, the format of its values, what it means.

    In a class of rows it annotates a field, `gamma: Annotated[float, Column("γ")]`; with `value` it is a
    column by itself, computed from a row.
    """

    header: str = ""  # "": the field's name, with spaces
    format: str | Callable[[Any], str] = ""  # ".4f" or a function; "": one number of decimals for the column
    help: str = ""
    value: Callable[[Any], Any] | None = None
    shown: bool = True  # False: only where every column is wanted, as in CSV and frames
    stored: bool = True  # False: only where people read it
    align: Literal["", "left", "right"] = ""  # "": numbers to the right
    whole: bool = False  # text that is never broken over lines, such as a hash
    styles: Mapping[str, str] = field(default_factory=dict)  # colours of words in a terminal

    def of(self, row: Any) -> Any:
        """The column's value of a row."""
        assert self.value is not None
        return self.value(row)


@dataclass(frozen=True)
class Table:
    """Rows under column names. Cells hold numbers; renderers format them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""
    per_run: bool = False  # one row per run: written to the report, not to the terminal
    arm_column: int | None = None  # the column of arm names, which the report colours
    # How the columns are shown, where it is not left to the values; not part of the JSON.
    shown: tuple[Column, ...] = field(default=(), compare=False, metadata={"transient": True})
    rule: bool = field(default=True, compare=False, metadata={"transient": True})  # a line below the head


@functools.cache
def columns_of(kind: type) -> dict[str, Column]:
    """The columns of a class of rows, by field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Column] = {}
    for one in dataclasses.fields(kind):
        extras = typing.get_args(hints[one.name])[1:]
        column = next((extra for extra in extras if isinstance(extra, Column)), Column())
        header = column.header or one.name.replace("_", " ")
        found[one.name] = replace(column, header=header, value=column.value or operator.attrgetter(one.name))
    return found


def table_of(
    rows: Sequence[Any], columns: Sequence[Column], title: str = "", caption: str = "", rule: bool = True
) -> Table:
    """A table of typed rows."""
    cells = tuple(tuple(column.of(row) for column in columns) for row in rows)
    heads = tuple(column.header for column in columns)
    return Table(title, heads, cells, caption, shown=tuple(columns), rule=rule)


def row_dict(row: Any) -> dict[str, Any]:
    """A typed row as a dict of Python values, every stored field of it."""
    return {name: getattr(row, name) for name, column in columns_of(type(row)).items() if column.stored}
