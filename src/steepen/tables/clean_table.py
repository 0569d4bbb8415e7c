"""Clean a table of runs before a fit: every problem of it in one answer, worst first, with what was done.

The order matters: numbers are read first (units, holes), then FLOPs are completed and checked against 6·N·D,
then arms are named, and only then can repeated, equal and diverged runs be told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.tables.table import MIN_ARM_RUNGS, NOT_USED, Table, accepted_names, normalized, wrong_number
from steepen.tables.units import PF_DAY, read_number
from steepen.utils.arrays import Array, Mask
from steepen.utils.formatting import cost_axis, format_flops

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
CONTRADICTION = 3.0  # FLOPs over 6·N·D, against the arm's own ratio: larger than any accounting explains
HIGHEST_LOSS = 15.0  # nats: the logarithm of a vocabulary of 3 million; larger numbers are perplexities
BITS = (0.4, 1.4)  # the usual bits per byte of text; nats per token are more
DIVERGED = (1.3, 8.0)  # above the arm's trend by this factor and by this many robust standard deviations
ABOVE_SMALLER_RUN = 1.1  # and by this factor above a run of no more compute
UNFINISHED = ("running", "crashed", "failed", "killed", "preempted", "scheduled")  # states of runs
DIGITS = 5  # significant digits below which seeds may be equal by chance
MAX_LINES = 6  # line numbers that a problem lists


@dataclass(frozen=True)
class Problem:
    """What is wrong with a table (or was read in a way worth saying), in which lines, and what was done."""

    severity: Severity
    what: str
    done: str
    lines: tuple[int, ...] = ()
    row_word: str = "line"

    @property
    def place(self) -> str:
        """Its lines: "lines 3, 8 and 12"; "" for a problem of the whole table."""
        if not self.lines:
            return ""
        shown = [str(line) for line in self.lines[:MAX_LINES]]
        if len(self.lines) > MAX_LINES:
            return f"{self.row_word}s {', '.join(shown)} and {len(self.lines) - MAX_LINES} more"
        *others, last = shown
        return f"{self.row_word}s {', '.join(others)} and {last}" if others else f"{self.row_word} {last}"

    def sentence(self) -> str:
        """Place, what it is, and what was done."""
        return (f"{self.place}: " if self.lines else "") + f"{self.what}; {self.done}"


def merged(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, those of several parts of a table that differ in their lines only as one."""
    lines: dict[Problem, set[int]] = {}
    for one in problems:
        lines.setdefault(replace(one, lines=()), set()).update(one.lines)
    return [replace(one, lines=tuple(sorted(own))) for one, own in lines.items()]


def worst_first(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Errors, warnings, notes; of equals, those of the whole table and of more lines first."""

    def order(one: Problem) -> tuple[int, float]:
        return SEVERITIES.index(one.severity), -(len(one.lines) or math.inf)

    return tuple(sorted(problems, key=order))


@dataclass(frozen=True)
class Cleaning:
    """What a fit needs of a table, and what may be done to it.

    `needs` are the columns of the law. `x` is the cost that the column `flops` is to hold. `flops` 6nd takes
    6·N·D for every row; exact says that they were counted before.
    """

    needs: tuple[str, ...] = ("flops", "loss")
    x: str = "flops"
    flops: Literal["table", "6nd", "exact"] = "table"
    drop_missing: bool = False
    keep_diverged: bool = False


def clean(table: Table, cleaning: Cleaning) -> Table:
    """The table with the columns of a law as numbers, and its problems; raises UsageError for errors."""
    work = _Work(table, cleaning)
    work.read_columns()
    work.check_flops()
    work.name_arms()
    work.check_data_sets()
    work.drop_missing()
    work.check_states()
    work.check_losses()
    work.check_repeats()
    work.drop_repeats()
    work.drop_diverged()
    errors = [one for one in worst_first(work.problems) if one.severity == "error"]
    if len(errors) == 1:
        raise UsageError(f"{table.source}{', ' if errors[0].lines else ': '}{errors[0].sentence()}.")
    if errors:
        listed = "\n".join(f"  {i}. {one.sentence()}." for i, one in enumerate(errors, start=1))
        raise UsageError(f"{table.source} has {len(errors)} problems:\n{listed}")
    return work.table()


@dataclass
class _Work:
    source: Table
    cleaning: Cleaning
    problems: list[Problem] = field(default_factory=list[Problem])
    numbers: dict[str, Array] = field(default_factory=dict[str, Array])
    arms: list[str] | None = None
    missing: dict[int, list[str]] = field(default_factory=dict[int, list[str]])  # columns without a value
    dropped: set[int] = field(default_factory=set[int])

    def add(self, severity: Severity, what: str, done: str, rows: Sequence[int] = ()) -> None:
        lines = tuple(self.source.lines[row] for row in rows)
        self.problems.append(Problem(severity, what, done, lines, self.source.row_word))

    def rows(self) -> list[int]:
        """The rows that are still in use."""
        return [row for row in range(len(self.source)) if row not in self.dropped]

    def table(self) -> Table:
        """The rows in use, with the columns read under our names."""
        columns: dict[str, tuple[Any, ...]] = {
            **self.source.columns,
            **{name: tuple(values.tolist()) for name, values in self.numbers.items()},
            **({} if self.arms is None else {"arm": tuple(self.arms)}),
        }
        whole = replace(
            self.source, columns=columns, problems=worst_first(self.problems), cleaning=self.cleaning,
            axis=cost_axis(self.cleaning.x),
        )  # fmt: skip
        return whole.keep(self.rows())

    def read_columns(self) -> None:
        """Read the law's columns, and sizes and tokens where they are there, as numbers."""
        table, cleaning = self.source, self.cleaning
        absent = list[str]()
        for column in cleaning.needs:
            own = self.column_for(column)
            if own is None:
                absent.append(column)
            else:
                self.numbers[column] = self.read(own, column, required=True)
        for column in ("parameters", "tokens"):
            if column not in self.numbers and table.optional(column):
                self.numbers[column] = self.read(column, column, required=False)
        if not absent:
            return
        if absent == ["flops"] and cleaning.x == "flops" and "tokens" in self.numbers:
            offers = ["6·N·D for them with `flops` 6nd"] * ("parameters" in self.numbers)
            offers += ["our count of steepen's own arms with `flops` exact"] * table.has("depth")
            if offers and cleaning.flops == "table":
                self.add("error", "there is no column of FLOPs", f"take {', or '.join(offers)}")
            if offers:
                return
        table.require([cleaning.x if name == "flops" else name for name in cleaning.needs])
        table.require(absent)

    def column_for(self, column: str) -> str | None:
        """Which column of the table is read as one that the law needs; None for none."""
        table = self.source
        if column == "flops" and self.cleaning.x != "flops":
            return self.cleaning.x if table.has(self.cleaning.x) else None
        if table.has(column):
            return column
        others = {"x": ("parameters", "tokens"), "loss": ("perplexity", "bits_per_byte")}.get(column, ())
        return next((name for name in others if table.has(name)), None)

    def read(self, own: str, column: str, *, required: bool) -> Array:
        """A column's numbers, NaN where there is none."""
        table, factor = self.source, self.source.unit(own)
        values = np.full(len(table), math.nan)
        suffixed, wrong = list[int](), dict[str, list[int]]()
        for row, cell in enumerate(table.cells(own)):
            number, suffix = read_number(cell, own) or (None, "")
            value = math.nan if number is None else number * factor
            fault = wrong_number(cell, value, column)
            if number is not None and math.isnan(number):
                if required:
                    self.missing.setdefault(row, []).append(column)
            elif fault is not None and not (column == "loss" and math.isinf(value)):
                wrong.setdefault(fault, []).append(row)
            else:
                values[row] = value
                suffixed += [row] if suffix else []
        for fault, rows in wrong.items() if required else ():
            what, _, done = fault.partition("; ")
            self.add("error", f"{column} {what}", done or "correct it", rows)
        if suffixed:
            cell = str(table.cells(own)[suffixed[0]]).strip()
            done = f"{cell} is read as {values[suffixed[0]]:.4g}"
            self.add("note", f"{column} is written with a unit", done, suffixed)
        name = table.renamed.get(own) or table.name_of(own)
        if factor != 1:
            self.add("note", f"{column} is the column {name}", f"multiplied by {factor:.4g}")
        if own == "perplexity":
            self.add("note", f"the loss is the column {name}", "its logarithm is taken")
            return np.log(values)
        if own == "bits_per_byte":
            done = "γ and multipliers are those of nats per token, E and A are in bits per byte"
            self.add("note", f"the loss is the column {name}", done)
        return values

    def check_flops(self) -> None:
        """Complete FLOPs by 6·N·D if that is asked for, else compare them with it."""
        if "flops" not in self.cleaning.needs or self.cleaning.x != "flops":
            return
        if self.cleaning.flops == "exact":
            self.add("note", "FLOPs are counted from arm, depth and tokens", "other columns are not used")
            return
        n, d = self.numbers.get("parameters"), self.numbers.get("tokens")
        if n is None or d is None:
            if self.cleaning.flops == "6nd":
                self.source.require(["parameters", "tokens"])
        elif self.cleaning.flops == "6nd":
            self.take_estimate(6 * n * d)
        elif "flops" in self.numbers:
            self.compare_flops(self.numbers["flops"], 6 * n * d)

    def take_estimate(self, estimate: Array) -> None:
        """Take 6·N·D in every row, whatever the table has."""
        self.numbers["flops"] = estimate
        others = {row: [one for one in own if one != "flops"] for row, own in self.missing.items()}
        self.missing = {row: own for row, own in others.items() if own}
        for row in np.flatnonzero(~np.isfinite(estimate)).tolist():
            self.missing.setdefault(row, []).append("parameters or tokens")
        self.add("note", "FLOPs are 6·N·D, in every row", "attention and embeddings are not counted")

    def compare_flops(self, flops: Array, estimate: Array) -> None:
        """Find FLOPs that contradict 6·N·D: of an arm, and of a row against its arm's own ratio."""
        ratio = flops / estimate
        known = np.isfinite(ratio)
        arms = np.array(_arm_names(self.source) or [""] * len(ratio))
        in_days = list[str]()
        for arm in dict.fromkeys(arms[known].tolist()):
            own = known & (arms == arm)
            typical = float(np.median(ratio[own]))
            whose = f" of {arm!r}" if arm else ""
            if _agrees(typical * PF_DAY):
                in_days.append(arm)
            elif not _agrees(typical):
                self.add(
                    "warning",
                    f"FLOPs{whose} are {typical:.2g} times 6·N·D in the median row",
                    "used as they are: right for loops or long contexts, else check the unit",
                )
            for row in (row for row in np.flatnonzero(own).tolist() if not _agrees(ratio[row] / typical)):
                days = " (PF-days?)" if _agrees(ratio[row] / typical * PF_DAY) else ""
                self.add(
                    "error",
                    f"FLOPs are {format_flops(flops[row])}, but 6·N·D is {format_flops(estimate[row])}{days}",
                    "correct the row, or take 6·N·D for all rows with `flops` 6nd",
                    [row],
                )
        if in_days:
            whose = f" of {', '.join(map(repr, in_days))}" if len(in_days) < len(set(arms.tolist())) else ""
            self.add(
                "error", f"FLOPs{whose} are {1 / PF_DAY:.2g} times 6·N·D, so they are PF-days",
                f"rename the column to pf_days, or multiply it by {PF_DAY:g}",
            )  # fmt: skip

    def name_arms(self) -> None:
        """Take the arm column; spellings that differ in capitals and spaces are one arm."""
        names = _arm_names(self.source)
        if names is None:
            return
        # A column `model` whose values are all different names runs, not arms.
        exact = self.source.has("arm", aliases=False) or "flops" in self.cleaning.needs
        if not exact and max(Counter(names).values()) < MIN_ARM_RUNGS:
            return
        spelling = {"": ""}
        for name, _ in Counter(names).most_common():
            spelling.setdefault(_plain(name), name)
        self.arms = [spelling[_plain(name)] for name in names]
        others = {name: kept for name, kept in zip(names, self.arms, strict=True) if name != kept}
        if others:
            listed = ", ".join(f"{name!r} as {kept!r}" for name, kept in others.items())
            rows = [row for row, name in enumerate(names) if name in others]
            self.add("warning", "arms that differ in capitals or spaces only", f"counted {listed}", rows)
        for row in (row for row, name in enumerate(names) if not name):
            self.missing.setdefault(row, []).insert(0, "arm")

    def check_data_sets(self) -> None:
        """Reject several data sets: their losses are no seeds of each other."""
        table = self.source
        accepted, arm = accepted_names("dataset"), (table.renamed.get("arm"), table.optional("arm"))
        if table.renamed.get("dataset") == NOT_USED:
            return
        for name in table.columns:
            counts = Counter(str(cell).strip() for cell in table.columns[name] if cell not in (None, ""))
            if normalized(name) not in accepted or name in arm or len(counts) < 2:
                continue
            listed = ", ".join(f"{key} ({count})" for key, count in counts.most_common(MAX_LINES))
            more = f" and {len(counts) - MAX_LINES} more" if len(counts) > MAX_LINES else ""
            self.add(
                "error", f"the table has {len(counts)} data sets in the column {name}: {listed}{more}",
                f"fit each with `by` {name}, one with `where` '{name}={counts.most_common(1)[0][0]}', compare"
                f" them with `columns` arm={name}, or say with `columns` dataset=none that these are none",
            )  # fmt: skip
            return

    def check_states(self) -> None:
        """Warn of a tracker's runs that have not finished: their last loss is not their final one."""
        states = self.source.columns.get("state", ())
        rows = [row for row in self.rows() if row < len(states) and str(states[row]).casefold() in UNFINISHED]
        if rows:
            words = ", ".join(dict.fromkeys(str(states[row]) for row in rows))
            done = "used with their last loss (leave them out with `where` state=finished)"
            self.add("warning", f"runs have not finished ({words})", done, rows)

    def drop_missing(self) -> None:
        """Leave rows with holes out where that is allowed; else they are errors."""
        by_columns: dict[str, list[int]] = {}
        for row, columns in sorted(self.missing.items()):
            by_columns.setdefault(" and ".join(dict.fromkeys(columns)), []).append(row)
        for columns, rows in by_columns.items():
            verb = "are" if " and " in columns else "is"
            cells = {str(self.source.columns[name][rows[0]]) for name in self.shown_names(columns)}
            shown = cells.pop() if len(rows) == 1 and len(cells) == 1 else ""
            said = "empty" if shown.strip() in ("", "None") else shown
            if self.cleaning.drop_missing:
                self.add("warning", f"{columns} {verb} {said}", "left out", rows)
                self.dropped.update(rows)
            else:
                many = "these rows" if len(rows) > 1 else "the row"
                self.add("error", f"{columns} {verb} {said}", f"leave {many} out with `drop_missing`", rows)

    def shown_names(self, columns: str) -> list[str]:
        """The table's own names of missing columns."""
        found = [self.column_for(column) or column for column in columns.split(" and ")]
        names = [self.source.name_of(own) for own in found if self.source.has(own)]
        return [name for name in names if name is not None]

    def check_losses(self) -> None:
        """Warn of numbers that are no losses in nats."""
        loss = self.numbers.get("loss")
        if loss is None or not self.source.has("loss"):
            return
        used = loss[self.rows()]
        used = used[np.isfinite(used)]
        if not len(used):
            return
        span = f"the loss is {used.min():.3g} to {used.max():.3g}"
        if float(np.median(used)) > HIGHEST_LOSS:
            name = self.source.renamed.get("loss") or self.source.name_of("loss")
            self.add(
                "error", f"{span}: a perplexity, whose law is another",
                f"take its logarithm with `columns` perplexity={name}"
                if name != "loss" else "rename the column to perplexity, and its logarithm is taken",
            )  # fmt: skip
        elif BITS[0] < float(np.median(used)) < BITS[1]:
            self.add(
                "note", f"{span}, as bits per byte are",
                "γ and multipliers are those of nats per token, E and A are in the column's unit",
            )  # fmt: skip

    def check_repeats(self) -> None:
        """Reject rows of the same arm, compute and seed: a run that is there twice would count twice."""
        cost = self.numbers.get("flops")
        if cost is None:
            return
        table = self.source
        names = [name for name in map(table.optional, ("seed", "run", "corpus", "recipe", "dataset")) if name]
        seen: dict[tuple[Any, ...], int] = {}
        again: dict[int, int] = {}  # the earlier row of each repeated one
        for row in self.rows():
            key = (self.arm(row), float(cost[row]), *(str(table.columns[name][row]) for name in names))
            if (first := seen.setdefault(key, row)) != row:
                again[row] = first
        done = "keep one, or tell repeats apart in a seed column (`columns` seed=ITS_NAME)"
        if len(again) == 1:
            ((row, first),) = again.items()
            seed = f"seed {table.seeds()[row]} of " if table.optional("seed") else ""
            arm = f"{seed}arm '{self.arm(row)}' at {cost[row]:g} {cost_axis(self.cleaning.x).unit}"
            self.add("error", f"{arm} is already at {table.row_word} {table.lines[first]}", done, [row])
        elif again:
            self.add("error", "the arm, compute and seed of an earlier row", done, list(again))

    def drop_repeats(self) -> None:
        """Count a run once whose loss two seeds have to all digits."""
        if self.source.optional("seed") is None or "flops" not in self.numbers or "loss" not in self.numbers:
            return
        seen: dict[tuple[str, float, float], int] = {}
        seeds, pairs = self.source.seeds(), list[int]()
        for row in self.rows():
            flops, loss = float(self.numbers["flops"][row]), float(self.numbers["loss"][row])
            first = seen.setdefault((self.arm(row), flops, loss), row)
            digits = len(f"{loss!r}".replace(".", "").lstrip("0"))
            if first != row and seeds[first] != seeds[row] and digits >= DIGITS:
                pairs.append(row)
        if pairs:
            self.add("warning", "the loss equals that of another seed to all digits", "counted once", pairs)
            self.dropped.update(pairs)

    def drop_diverged(self) -> None:
        """Leave runs out whose loss is infinite or far above their arm's trend."""
        loss, cost = self.numbers.get("loss"), self.numbers.get("flops")
        if cost is None and {"parameters", "tokens"} <= set(self.numbers):
            cost = self.numbers["parameters"] * self.numbers["tokens"]
        if loss is None:
            return
        rows = [row for row in self.rows() if not math.isnan(loss[row])]
        found = infinite = [row for row in rows if math.isinf(loss[row])]
        if cost is not None:
            for arm in dict.fromkeys(map(self.arm, rows)):
                own = [r for r in rows if self.arm(r) == arm and r not in infinite and cost[r] > 0]
                if len(own) > MIN_ARM_RUNGS:
                    far = diverged(np.log(cost[own]), np.log(loss[own]))
                    found = [*found, *np.array(own)[far].tolist()]
        if not found:
            return
        listed = ", ".join(f"{loss[row]:.3g}" for row in sorted(found)[:MAX_LINES])
        what = f"the loss ({listed}) is far above the arm's other runs"
        if self.cleaning.keep_diverged and not infinite:
            self.add("warning", what, "kept", sorted(found))
        else:
            done = "left out of everything (`keep_diverged` keeps finite ones)"
            self.add("warning", f"{what}: diverged", done, sorted(found))
            self.dropped.update(found)

    def arm(self, row: int) -> str:
        """The arm of a row."""
        return "" if self.arms is None else self.arms[row]


def _agrees(ratio: float) -> bool:
    """Whether a ratio of FLOPs to an estimate is near one."""
    return abs(math.log(ratio)) <= math.log(CONTRADICTION)


def diverged(x: Array, y: Array) -> Mask:
    """Which runs lie far above their trend of log loss `y` over log cost `x`, and above a smaller run.

    The trend is a line with the median slope and intercept (Theil and Sen), which a third of the runs cannot
    move. A loss that falls with compute, however steeply, is never above that of a smaller run.
    """
    i, j = np.triu_indices(len(x), 1)
    apart = np.abs(x[j] - x[i]) > 1e-6
    slope = float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart])) if apart.any() else 0.0
    residual = y - slope * x
    residual = residual - np.median(residual)
    spread = 1.4826 * float(np.median(np.abs(residual)))
    far = residual > max(math.log(DIVERGED[0]), DIVERGED[1] * spread)
    smaller = np.array([y[(x <= own + 0.01) & (np.arange(len(x)) != k)].min(initial=math.inf)
                        for k, own in enumerate(x)])  # fmt: skip
    return far & (y > smaller + math.log(ABOVE_SMALLER_RUN))


def _arm_names(table: Table) -> list[str] | None:
    """The arm of every row, "" where it has none; None for a table without arms."""
    if not table.has("arm"):
        return None
    return ["" if cell is None else " ".join(str(cell).split()) for cell in table.cells("arm")]


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()
