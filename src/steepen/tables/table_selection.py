"""Which rows of a table are held out of a fit: the union of its hold-outs, the same for every law."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steepen.errors import UsageError, nearest
from steepen.tables.clean_table import clean
from steepen.tables.read_table import read_table
from steepen.tables.table import Table
from steepen.utils.arrays import Array, Mask


@dataclass(frozen=True, eq=False)
class HoldOut:
    """Runs to hold out: from `flops` up, of one arm or of every arm; or the runs of another `table`."""

    text: str
    arm: str | None = None
    flops: float = math.inf
    table: Table | None = None

    def selects(self, arm: str, flops: Array) -> Mask:
        """Which runs of an arm, by their compute, are held out (the runs of another table are not known)."""
        return (flops >= self.flops * (1 - 1e-9)) & (self.arm in (None, arm))


def parse_hold_outs(texts: Sequence[str], arms: Sequence[str], table: Table) -> tuple[HoldOut, ...]:
    """Parse hold-outs of a table: FLOPS, ARM:FLOPS, the path of a table of runs, or `none` alone.

    A table of runs is read with the columns of the fitted `table`.
    """
    if list(texts) == ["none"]:
        return ()
    found: list[HoldOut] = []
    for text in texts:
        if Path(text).is_file():
            other = read_table(text).rename_like(table)
            found.append(HoldOut(text, table=clean(other, table.cleaning) if table.cleaning else other))
            continue
        arm, colon, flops = text.rpartition(":")
        if colon and arm not in arms:
            hint = f"did you mean {nearest(arm, arms)}?" if list(arms) != [""] else "the table has no arms."
            raise UsageError(f"hold-out {text}: there is no arm '{arm}'; {hint}")
        found.append(HoldOut(text, arm if colon else None, parse_flops(flops, text)))
    return tuple(found)


def parse_flops(text: str, hold_out: str) -> float:
    """The FLOPs of a hold-out; raises UsageError for what is neither a file nor a number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UsageError(
            f"the hold-out {hold_out!r} is neither a file nor FLOPS nor ARM:FLOPS, such as 1e20 or"
            " vanilla:1e20."
        )
    return value


def held_out(hold_outs: Sequence[HoldOut], flops: Mapping[str, Array]) -> dict[str, Mask]:
    """The union of the hold-outs: a mask over the runs of every arm, whose compute `flops` has.

    Raises UsageError for a hold-out that no run reaches, and if no run is left to fit.
    """
    masks = {arm: np.zeros(len(values), bool) for arm, values in flops.items()}
    for one in (each for each in hold_outs if each.table is None):
        chosen = {arm: one.selects(arm, values) for arm, values in flops.items()}
        if not any(mask.any() for mask in chosen.values()):
            highest = max(float(values.max()) for arm, values in flops.items() if one.arm in (None, arm))
            whose = "" if one.arm is None else f" of {one.arm!r}"
            raise UsageError(
                f"hold-out {one.text} matches no run{whose}: the largest has {highest:.4g} FLOPs."
            )
        masks = {arm: mask | chosen[arm] for arm, mask in masks.items()}
    if all(mask.all() for mask in masks.values()):
        raise UsageError("every run is held out, so none is left to fit; hold out from a higher compute.")
    return masks
