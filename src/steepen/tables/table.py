"""A table of runs: columns by name or alias, rows by condition, and errors that name the row."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from steepen.errors import UsageError, shorten
from steepen.tables.units import NO_VALUE, read_number, split_unit
from steepen.utils.arrays import Array
from steepen.utils.expression import number_of, parse_condition
from steepen.utils.formatting import FLOPS, CostAxis, printable

if TYPE_CHECKING:
    from steepen.tables.clean_table import Cleaning, Problem

MIN_REFERENCE_RUNGS = 4
MIN_ARM_RUNGS = 3
# Other names of a column, as tables have them; spaces, hyphens, dots and slashes count as underscores.
ALIASES = {
    "arm": ("model", "architecture", "method", "series", "family"),
    "flops": (
        *("c", "compute", "flop", "compute_flops", "training_flops", "training_flop", "train_flops"),
        *("total_flops", "training_compute"),
    ),
    "loss": (
        *("l", "val_loss", "validation_loss", "valid_loss", "eval_loss", "final_loss", "test_loss"),
        *("loss_val", "val_cross_entropy", "cross_entropy"),
    ),
    "parameters": (
        *("n", "params", "n_params", "num_params", "parameter_count", "num_parameters", "n_parameters"),
        *("model_size", "params_stored", "non_embedding_params"),
    ),
    "tokens": (
        *("d", "n_tokens", "num_tokens", "training_tokens", "train_tokens", "total_tokens", "token_count"),
    ),
    "n_once": ("params_once", "parameters_once", "once", "n_unique", "non_recurrent_parameters"),
    "n_rec": ("params_recurrent", "parameters_recurrent", "recurrent", "recurrent_parameters", "n_loop"),
    "passes": ("loops", "recurrences", "recurrence", "n_loops", "n_passes", "k", "r"),
    "budget": ("flops", "c", "compute", "compute_budget", "flop_budget", "flops_budget", "training_flop"),
    "seed": ("random_seed", "rng_seed"),
    "dataset": ("data_set", "data", "corpus_name", "training_data", "train_data", "dataset_name"),
    "hours": (
        *("gpu_hours", "wall_clock_hours", "wallclock_hours", "train_hours", "training_hours", "wall_clock"),
        *("wallclock", "walltime", "wall_time", "runtime", "_runtime", "time", "training_time", "train_time"),
    ),
    "seconds": ("train_seconds", "training_seconds", "wall_clock_seconds", "seconds_training", "runtime"),
    "dollars": ("usd", "cost", "price", "cost_usd", "training_cost"),
    "perplexity": ("ppl", "val_ppl", "val_perplexity", "validation_perplexity", "eval_perplexity"),
    "bits_per_byte": ("bpb", "val_bpb", "bits_per_char", "bpc"),
    "accuracy": ("acc", "task_accuracy", "score"),
    "error": ("task_error", "downstream_error", "err"),
}
# Names that are taken only where none of the above is there.
LESS_USUAL = {"arm": ("model_name", "arch", "variant"), "parameters": ("size",)}
MAX_COLUMNS_SHOWN = 8
NOT_USED = "none"  # in place of a column's name: the table has none


# Numbers beyond these are mistakes, and would overflow in the fits; counts may be in any unit.
RANGES = {
    "loss": (1e-9, 1e6),
    "parameters": (1e-6, 1e30),
    "tokens": (1e-6, 1e30),
    "flops": (1e-9, 1e60),
}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of a file, with the line or row number of every row for error messages.

    `problems` are what `clean` found and did, `axis` is what its column `flops` holds.
    """

    source: str
    row_word: str  # "line" or "row"
    lines: tuple[int, ...]
    columns: dict[str, tuple[Any, ...]]
    renamed: Mapping[str, str] = field(default_factory=dict)  # the file's names of columns, by ours
    problems: tuple[Problem, ...] = ()
    cleaning: Cleaning | None = None
    axis: CostAxis = FLOPS

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """The file and line of a row, for messages."""
        return f"{self.source}, {self.row_word} {self.lines[row]}"

    def numbers(self, column: str, *, positive: bool = True) -> Array:
        """A required column as finite (and, by default, positive) numbers."""
        values, factor = np.empty(len(self)), self.unit(column)
        for row, cell in enumerate(self.cells(column)):
            found = read_number(cell, column)
            values[row] = math.nan if found is None else found[0] * factor
            if (wrong := wrong_number(cell, values[row], column, positive=positive)) is not None:
                raise UsageError(f"{self.place(row)}: {column} {wrong}.")
        return values

    def unit(self, column: str) -> float:
        """The factor of the unit in the file's name of a column ("compute (PF-days)"); 1 without one."""
        name = self.renamed.get(column) or self.name_of(column)
        if name is None or self.cleaning is not None or normalized(name) in accepted_names(column):
            return 1.0
        return split_unit(name, column, accepted_names(column)) or 1.0

    def names(self, column: str) -> list[str]:
        """A required column as non-empty text."""
        names: list[str] = []
        for row, cell in enumerate(self.cells(column)):
            name = "" if cell is None else str(cell).strip()
            if not name:
                raise UsageError(f"{self.place(row)}: {column} is empty; every row needs one.")
            if printable(name) != name:
                raise UsageError(f"{self.place(row)}: {column} has control characters; write it without.")
            names.append(name)
        return names

    def seeds(self) -> list[str]:
        """The seed column as text; empty without one."""
        if not self.has("seed"):
            return [""] * len(self)
        return ["" if cell is None else str(cell) for cell in self.cells("seed")]

    def training_runs(self) -> list[str] | None:
        """Names of what rows may share: the `trunk` (common first steps), else the `run`; None without."""
        for column in ("trunk", "run"):
            if self.has(column, aliases=False):
                return self.names(column)
        return None

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

    def has(self, column: str, *, aliases: bool = True) -> bool:
        """Whether the table has the column, under its own name or (by default) one of its aliases."""
        if not aliases:
            return any(normalized(name) == column for name in self.columns)
        return self.name_of(column) is not None

    def require(self, columns: Sequence[str]) -> None:
        """Raise UsageError unless the table has all of these columns."""
        missing = [column for column in columns if not self.has(column)]
        if missing:
            word = "column" if len(missing) == 1 else "columns"
            raise UsageError(
                f"{self.source} has no {word} {', '.join(map(repr, missing))}; it needs {', '.join(columns)},"
                f" and has {self._nearest_columns(missing)}. Name a column with"
                f" `columns` {missing[0]}=ITS_NAME."
            )

    def optional(self, column: str) -> str | None:
        """The file's own spelling of a column; None also where two columns could be meant."""
        try:
            return self.name_of(column)
        except UsageError:
            return None

    def rename(self, columns: Mapping[str, str]) -> Table:
        """The table with columns under our names: `{"loss": "loss_c4_val"}`; `none`: it has none."""
        renamed = dict(self.columns)
        for ours, theirs in columns.items():
            found = None if theirs == NOT_USED else self.name_of(theirs)
            if found is None and theirs != NOT_USED:
                raise UsageError(
                    f"{self.source} has no column {theirs!r}; it has {self._nearest_columns([theirs])}."
                )
            renamed = {name: cells for name, cells in renamed.items() if name.casefold() != ours.casefold()}
            if found is not None:
                renamed[ours] = self.columns[found]
        return replace(self, columns=renamed, renamed={**self.renamed, **columns})

    def rename_like(self, other: Table) -> Table:
        """The table with columns renamed as those of `other` were, as far as it has them."""
        return self.rename(
            {ours: name for ours, name in other.renamed.items() if name == NOT_USED or self.optional(name)}
        )

    def where(self, conditions: Sequence[str]) -> Table:
        """The rows that satisfy every condition: `dataset=c4`, `arm=a,b`, `loss < 3 and params >= 1e8`."""
        keep = list(range(len(self)))
        for text in conditions:
            condition = parse_condition(text, self.columns, lambda name: self.name_of(name) or name)
            used = {name: self.columns[name] for name in condition.fields}
            keep = [row for row in keep if condition({name: _value(used[name][row]) for name in used})]
        if not keep:
            raise UsageError(f"no row of {self.source} has {' and '.join(conditions)}.")
        return self.keep(keep)

    def split(self, column: str) -> dict[str, Table]:
        """The rows of every value of a column, by the value."""
        self.require([column])
        rows: dict[str, list[int]] = {}
        for row, value in enumerate(self.names(column)):
            rows.setdefault(value, []).append(row)
        return {
            value: replace(self.keep(own), source=f"{self.source} ({column}={value})")
            for value, own in rows.items()
        }

    def keep(self, keep: Sequence[int]) -> Table:
        """The rows of these indices."""
        if len(keep) == len(self):
            return self
        return replace(
            self,
            lines=tuple(self.lines[row] for row in keep),
            columns={name: tuple(cells[row] for row in keep) for name, cells in self.columns.items()},
        )

    def cells(self, column: str) -> tuple[Any, ...]:
        """The cells of a required column."""
        self.require([column])
        return self.columns[self.name_of(column) or column]

    def name_of(self, column: str) -> str | None:
        """The file's own spelling of a column (FLOPs, compute), unless two columns could be meant."""
        if column in self.columns:
            return column
        if self.renamed.get(column) == NOT_USED:
            return None
        names = accepted_names(column)
        tiers: list[Callable[[str], bool]] = [
            lambda name: normalized(name) == column,
            lambda name: normalized(name) in ALIASES.get(column, ()),
            lambda name: normalized(name) in LESS_USUAL.get(column, ()),
            lambda name: split_unit(name, column, names) is not None,  # compute (PF-days), params_m
            # model.params of a tracker's settings; the name of a metric's part is too common for a guess.
            lambda name: re.split(r"[./]", name)[-1] in names and len(re.split(r"[./]", name)[-1]) > 1,
        ]
        for accepts in tiers:
            alike = [name for name in self.columns if accepts(name)]
            if len(alike) > 1:
                raise UsageError(
                    f"{self.source} has columns {', '.join(alike)}, each of which could be {column}; choose"
                    f" with `columns` {column}=NAME."
                )
            if alike:
                return alike[0]
        return None

    def _nearest_columns(self, wanted: Sequence[str]) -> str:
        """The columns most like the wanted ones; all of them where there are few."""
        names = list(self.columns)
        if len(names) <= MAX_COLUMNS_SHOWN:
            return ", ".join(names) or "none"
        spellings = {normalized(each) for name in wanted for each in (name, *ALIASES.get(name, ()))}

        def likeness(name: str) -> float:
            own = normalized(name)
            inside = max((len(each) for each in spellings if len(each) > 2 and each in own), default=0)
            ratio = max(difflib.SequenceMatcher(None, own, each).ratio() for each in spellings)
            return inside + ratio

        shown = sorted(names, key=likeness, reverse=True)[:MAX_COLUMNS_SHOWN]
        return f"{', '.join(shown)} and {len(names) - len(shown)} others"


def wrong_number(cell: Any, value: float, column: str, *, positive: bool = True) -> str | None:
    """What is wrong with a cell that should be a number, and what to do; None for a good one."""
    shown = shorten(str(cell), 40)
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return "is empty; give a number such as 3.2 or 1e18"
    if math.isnan(value) and isinstance(cell, str) and cell.strip().casefold() not in NO_VALUE:
        return f"is {shown!r}, which is not a number; give a number such as 3.2 or 1e18"
    if not math.isfinite(value):
        large = isinstance(cell, int) and not isinstance(cell, bool)
        if large:
            return "is too large for a floating-point number"
        return f"is {shown}; remove the row or give a finite number"
    if positive and value <= 0:
        return f"is {shown}; it must be greater than zero"
    low, high = RANGES.get(column, (-math.inf, math.inf))
    if positive and not low <= value <= high:
        return f"is {shown}; it must be from {low:g} to {high:g}"
    return None


def accepted_names(column: str) -> frozenset[str]:
    """Every name of a column, normalized."""
    return frozenset((column, *ALIASES.get(column, ()), *LESS_USUAL.get(column, ())))


def normalized(name: str) -> str:
    """A column's name in lower case, with underscores for spaces, hyphens, dots and slashes."""
    return re.sub(r"[\s_./-]+", "_", name.strip().casefold())


def _value(cell: Any) -> Any:
    """A cell as conditions compare it: the number that its text is, or its text; None where it is empty."""
    if isinstance(cell, str):
        cell = cell.strip()
    number = number_of(cell)
    return (None if cell == "" else cell) if number is None else number


def table_from(columns: Mapping[str, Sequence[Any]], source: str = "table") -> Table:
    """A table from columns in memory (records of a study, a notebook); rows are counted from 1."""
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise UsageError(f"the columns of {source} differ in length: {sorted(lengths)}.")
    rows = lengths.pop()
    return Table(source, "row", tuple(range(1, rows + 1)), {name: tuple(v) for name, v in columns.items()})
