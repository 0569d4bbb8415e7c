"""Numbers as tables have them (516M, 1.2e18 FLOPs, 0.3 PF-days), and units in the names of columns."""

from __future__ import annotations

import math
import re
from typing import Any

PF_DAY = 8.64e19  # FLOPs of a day at 10^15 FLOP/s
COUNTS = {
    **{"": 1.0, "k": 1e3, "m": 1e6, "mm": 1e6, "b": 1e9, "bn": 1e9, "g": 1e9, "t": 1e12},
    **{"thousand": 1e3, "thousands": 1e3, "million": 1e6, "millions": 1e6},
    **{"billion": 1e9, "billions": 1e9, "trillion": 1e12, "trillions": 1e12},
}
_METRIC = {
    **{"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18, "z": 1e21, "y": 1e24},
    **{"mega": 1e6, "giga": 1e9, "tera": 1e12, "peta": 1e15, "exa": 1e18, "zetta": 1e21, "yotta": 1e24},
}
_FLOPS = {
    **{f"{prefix}flop{s}": factor for prefix, factor in _METRIC.items() for s in ("", "s")},
    **{
        f"{words}day{s}": PF_DAY
        for words in ("pf", "pfs", "pflop", "pflops", "petaflop", "petaflops")
        for s in ("", "s")
    },
}
_HOURS = {
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 1 / 60),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1 / 3600),
    **dict.fromkeys(("d", "day", "days"), 24.0),
}
# Units by column, as factors to the column's own unit: FLOPs, counts, hours, seconds, dollars.
UNITS: dict[str, dict[str, float]] = {
    "flops": _FLOPS,
    "budget": _FLOPS,
    "parameters": {"param": 1.0, "params": 1.0, "parameter": 1.0, "parameters": 1.0},
    "tokens": {"token": 1.0, "tokens": 1.0},
    "hours": _HOURS,
    "seconds": {unit: 3600 * factor for unit, factor in _HOURS.items()},
    "dollars": {"usd": 1.0, "dollar": 1.0, "dollars": 1.0, "": 1.0},
    "loss": {"nats": 1.0, "nat": 1.0},
}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z][a-zA-Z/·\s.-]*)?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(?!\d)")
# Words that stand for no value; NaN is what pandas writes.
NO_VALUE = frozenset(("", "-", "–", "na", "n/a", "nan", "none", "null", "?", "missing"))


def unit_factor(unit: str, column: str) -> float | None:
    """The factor of a unit (PF-days, M, "B tokens") to the column's own; None for an unknown one."""
    word = re.sub(r"[^a-z]", "", unit.casefold())
    known = UNITS.get(column, {})
    if word in known:
        return known[word]
    if column == "loss":
        return None
    if word in COUNTS:
        return COUNTS[word]
    factors = [COUNTS[word[:i]] * known[word[i:]] for i in range(len(word)) if word[:i] in COUNTS
               and word[i:] in known]  # fmt: skip
    return factors[0] if factors else None


def read_number(cell: Any, column: str) -> tuple[float, str] | None:
    """A cell's number, and the unit or suffix that its text has; None for what is no number.

    A cell without a value is NaN.
    """
    if cell is None:
        return math.nan, ""
    if isinstance(cell, bool):
        return None
    if not isinstance(cell, str):
        try:
            return float(cell), ""
        except OverflowError:
            return math.inf, ""
        except (TypeError, ValueError):
            return None
    text = cell.strip().lstrip("$€ ")
    if text.casefold() in NO_VALUE:
        return math.nan, ""
    if column == "loss" and text.casefold() in ("diverged", "div"):
        return math.inf, ""
    try:
        return float(text), ""
    except ValueError:
        pass
    if grouped := _THOUSANDS.match(text):
        text = grouped[0].replace(",", "") + text[grouped.end() :]
    match = _NUMBER.fullmatch(text)
    factor = None if match is None else unit_factor(match[2] or "", column)
    if match is None or factor is None:
        return None
    return float(match[1]) * factor, match[2] or text


def split_unit(name: str, column: str, names: frozenset[str]) -> float | None:
    """The factor of the unit in a column's name ("compute (PF-days)", params_m); None if it has none.

    `names` are the names of the column without a unit. A name may also be a unit alone: pf_days.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.casefold()) if word]
    for i in range(len(words)):
        base, unit = "_".join(words[:i]), "".join(words[i:]).removeprefix("in")
        alone = not base and column == "flops" and unit.endswith(("day", "days"))
        if (base in names or alone) and unit.isalpha() and (factor := unit_factor(unit, column)) is not None:
            return factor
    return None
