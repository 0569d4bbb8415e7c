"""A ladder: the losses of one arm at its rungs of compute, with the seeds of each rung."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steepen.errors import UsageError, require_reference
from steepen.tables.table import MIN_ARM_RUNGS, MIN_REFERENCE_RUNGS, Table
from steepen.utils.arrays import Array, Mask, take_rows
from steepen.utils.series import series_labels

Rows = NDArray[np.intp]
MERGE_TOLERANCE = 0.01  # runs of an arm whose compute differs by less are seeds of one rung


@dataclass(frozen=True, eq=False)
class Ladder:
    """An arm's rungs in order of compute. `loss` is the mean over seeds, `runs` the loss of each.

    `weights` are the relative precisions of the rungs' losses: 1 is that of a single run of typical noise.
    They are the numbers of seeds, or sums of the table's own weights. `clusters` has one name for all rungs
    that share training runs: their errors are not independent; `seed_names` the seeds of each rung. `known`
    is the variance of each rung's loss that the table states (`loss_sd`), 0 for none.
    """

    arm: str
    flops: Array
    loss: Array
    runs: tuple[Array, ...]
    row_labels: tuple[str, ...]  # file and line of each rung, for messages
    weights: Array = field(default_factory=lambda: np.zeros(0))
    clusters: tuple[str, ...] = ()
    seed_names: tuple[tuple[str, ...], ...] = ()
    known: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.weights):
            object.__setattr__(self, "weights", self.seeds)
        if not len(self.known):
            object.__setattr__(self, "known", np.zeros(len(self.flops)))

    @property
    def seeds(self) -> Array:
        """Number of runs at each rung."""
        return np.array([len(runs) for runs in self.runs], dtype=float)

    def keep(self, mask: Mask) -> Ladder:
        """The rungs where the mask is true."""
        return take_rows(self, mask)

    def without_seed(self, rung: int, seed: int) -> Ladder:
        """The ladder without one run of a rung; without the rung, where it has no other."""
        if len(self.runs[rung]) == 1:
            return self.keep(np.arange(len(self.flops)) != rung)
        runs = np.delete(self.runs[rung], seed)
        part = len(runs) / len(self.runs[rung])
        loss, weights, known = self.loss.copy(), self.weights.copy(), self.known.copy()
        loss[rung], weights[rung], known[rung] = runs.mean(), weights[rung] * part, known[rung] / part
        names = list(self.seed_names)
        if names:
            names[rung] = tuple(name for i, name in enumerate(names[rung]) if i != seed)
        every = (*self.runs[:rung], runs, *self.runs[rung + 1 :])
        return replace(self, loss=loss, runs=every, weights=weights, known=known, seed_names=tuple(names))


def join_ladders(first: Ladder, second: Ladder) -> Ladder:
    """One ladder with the rungs of two of the same arm, in order of compute."""

    rungs = len(first.flops) + len(second.flops)

    def joined(name: str) -> Any:
        a, b = getattr(first, name), getattr(second, name)
        if isinstance(a, np.ndarray):
            return np.concatenate([a, b])
        return every if len(every := (*a, *b)) == rungs else ()  # names that one lacks are dropped

    both = Ladder(first.arm, *(joined(one.name) for one in fields(Ladder)[1:]))
    return take_rows(both, np.argsort(both.flops, kind="stable"))


def make_ladder(arm: str, flops: Array, loss: Array) -> Ladder:
    """A ladder from two arrays; runs whose compute differs by less than 1% are seeds of one rung."""
    flops, loss = np.asarray(flops, float), np.asarray(loss, float)
    groups = group_rungs(flops)
    runs = tuple(loss[rows] for rows in groups)
    rungs = np.array([_mean_compute(flops[rows]) for rows in groups])
    row_labels = tuple(f"{arm} at {value:.3g} FLOPs" for value in rungs)
    return Ladder(arm, rungs, np.array([values.mean() for values in runs]), runs, row_labels)


def group_rungs(flops: Array) -> list[Rows]:
    """Rows of each rung, lowest first; rows within 1% of a rung's lowest compute belong to it."""
    order = np.argsort(flops, kind="stable")
    groups: list[list[int]] = []
    for row in order.tolist():
        if not groups or flops[row] > float(flops[groups[-1][0]]) * (1 + MERGE_TOLERANCE):
            groups.append([])
        groups[-1].append(row)
    return [np.array(rows) for rows in groups]


def _mean_compute(flops: Array) -> float:
    """The geometric mean; exact where all are equal."""
    return float(flops[0]) if np.ptp(flops) == 0 else float(np.exp(np.log(flops).mean()))


def ladder_names(table: Table) -> list[str]:
    """The ladder of every row: its arm, with corpus and recipe where the arm has several."""
    corpora, recipes = (table.names(name) if table.has(name) else [] for name in ("corpus", "recipe"))
    return series_labels(table.names("arm"), corpora, recipes)


def read_ladders(table: Table, typical: Table | None = None) -> dict[str, Ladder]:
    """The ladders of a table with columns arm, flops and loss, in the order arms appear.

    Further columns are used where present: `seed`; `loss_sd` or `weight`, the standard deviation or the
    relative precision of a row's loss; `run`, the training run a row belongs to, and `trunk`, runs of common
    first steps; `corpus` and `recipe`, which separate ladders of one arm. `typical` is the table whose
    typical row has weight 1: this one by default.
    """
    table.require(["arm", "flops", "loss"])
    flops, loss = table.numbers("flops"), table.numbers("loss")
    seeds, precision = table.seeds(), read_weights(table, typical or table)
    shared = table.training_runs()
    stated = table.numbers("loss_sd") if table.has("loss_sd") else None
    ladders: dict[str, Ladder] = {}
    for arm, listed in _rows_of_ladders(table, flops, seeds).items():
        own = np.array(listed)
        groups = [own[rows] for rows in group_rungs(flops[own])]
        ladders[arm] = Ladder(
            arm, np.array([_mean_compute(flops[rows]) for rows in groups]),
            np.array([float(np.average(loss[rows], weights=precision[rows])) for rows in groups]),
            tuple(loss[rows] for rows in groups), tuple(table.place(int(rows[0])) for rows in groups),
            np.array([float(precision[rows].sum()) for rows in groups]),
            _link_rungs([[shared[int(row)] for row in rows] for rows in groups]) if shared else (),
            tuple(tuple(seeds[int(row)] for row in rows) for rows in groups),
            np.array([0.0 if stated is None else 1 / float((stated[rows] ** -2).sum()) for rows in groups]),
        )  # fmt: skip
    return ladders


def _rows_of_ladders(table: Table, flops: Array, seeds: Sequence[str]) -> dict[str, list[int]]:
    """The rows of every ladder; a run that is there twice would count as its own replicate."""
    runs = table.names("run") if table.has("run") else [""] * len(table)
    seen: dict[tuple[str, float, str, str], int] = {}
    found: dict[str, list[int]] = {}
    for row, key in enumerate(zip(ladder_names(table), flops.tolist(), seeds, runs, strict=True)):
        arm, compute, seed, _ = key
        if key in seen:
            what = f"seed {seed} of " if seed else ""
            raise UsageError(
                f"{table.place(row)}: {what}arm '{arm}' at {compute:g} FLOPs is already at {table.row_word}"
                f" {table.lines[seen[key]]}; keep one, or tell repeats apart in a seed column."
            )
        seen[key] = row
        found.setdefault(arm, []).append(row)
    return found


def _link_rungs(runs: list[list[str]]) -> tuple[str, ...]:
    """A name for each rung from its training runs; rungs that share one, directly or not, have the same."""
    groups: dict[str, set[str]] = {}
    for own in runs:
        linked = set(own).union(*(groups.get(run, ()) for run in own))
        groups.update(dict.fromkeys(linked, linked))
    return tuple(min(groups[own[0]]) for own in runs)


def read_weights(table: Table, typical: Table) -> Array:
    """Relative precision of every row: from `loss_sd` (1/variance) or `weight`; 1 without these columns.

    They are scaled to a median of 1 in the table `typical`, so that estimated noise is that of a typical row;
    in the table itself where `typical` has no such column.
    """
    column = _weight_column(table)
    if column is None:
        return np.ones(len(table))
    power = -2.0 if column == "loss_sd" else 1.0
    scale = typical if _weight_column(typical) == column else table
    return table.numbers(column) ** power / float(np.median(scale.numbers(column) ** power))


def _weight_column(table: Table) -> str | None:
    found = [name for name in ("loss_sd", "weight") if table.has(name)]
    if len(found) > 1:
        raise UsageError(f"{table.source} has columns loss_sd and weight; keep one of them.")
    return found[0] if found else None


def check_ladders(ladders: dict[str, Ladder], reference: str) -> tuple[dict[str, Ladder], tuple[str, ...]]:
    """The ladders that are long enough for a law, and a warning for each that is not.

    Raises UsageError for a reference that is not among the arms, or is too short.
    """
    require_reference(reference, ladders)
    kept: dict[str, Ladder] = {}
    warnings: list[str] = []
    for arm, ladder in ladders.items():
        minimum = MIN_REFERENCE_RUNGS if arm == reference else MIN_ARM_RUNGS
        count = len(np.unique(ladder.flops))
        if count >= minimum:
            kept[arm] = ladder
            continue
        what = "rung" if count == 1 else "rungs"
        same = [other for other in ladders if other != arm and plain_name(other) == plain_name(arm)]
        meant = f" (did you mean '{same[0]}'?)" if same else ""
        found = f"{ladder.row_labels[-1]}: arm '{arm}' has only {count} {what}{meant}"
        if arm == reference:
            raise UsageError(f"{found}; the reference needs at least {minimum} rungs of different compute.")
        needed = f"an arm needs at least {minimum} rungs of different compute"
        warnings.append(f"{found} and is left out: {needed}")
    return kept, tuple(warnings)


def plain_name(name: str) -> str:
    """The name without spaces and capitals, which are easily mistyped."""
    return "".join(name.split()).casefold()


def thin(ladder: Ladder, most: int) -> Ladder:
    """The ladder with neighbouring rungs merged where there are more than `most`."""
    if len(ladder.flops) <= most:
        return ladder
    edges = np.linspace(math.log(ladder.flops[0]), math.log(ladder.flops[-1]), most + 1)
    group = np.clip(np.searchsorted(edges, np.log(ladder.flops), side="right") - 1, 0, most - 1)
    keep, where = np.unique(group, return_inverse=True)
    weights = np.asarray(np.bincount(where, ladder.weights), float)

    def mean(values: Array) -> Array:
        return np.bincount(where, ladder.weights * values) / weights

    heads = [int(np.flatnonzero(where == k)[0]) for k in range(len(keep))]
    return Ladder(
        ladder.arm, np.exp(mean(np.log(ladder.flops))), mean(ladder.loss),
        tuple(np.array([value]) for value in mean(ladder.loss)),
        tuple(ladder.row_labels[k] for k in heads), weights,
        known=np.bincount(where, ladder.known) / np.bincount(where) ** 2,
    )  # fmt: skip
