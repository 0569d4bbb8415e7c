"""What ladders are measured along: FLOPs, or hours, seconds, tokens or dollars; and the words for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostAxis:
    """A cost of training: its column, its unit, the noun of sentences and the label of axes."""

    column: str
    unit: str
    noun: str
    label: str


FLOPS = CostAxis("flops", "FLOPs", "compute", "training compute (FLOPs)")
AXES = (
    FLOPS,
    CostAxis("seconds", "seconds", "time", "training time (seconds)"),
    CostAxis("hours", "hours", "time", "training time (hours)"),
    CostAxis("tokens", "tokens", "data", "training tokens"),
    CostAxis("dollars", "dollars", "cost", "training cost (dollars)"),
)


def cost_axis(name: str) -> CostAxis:
    """The axis of a column or a unit; any other name is a unit and noun of its own."""
    known = next((one for one in AXES if name.casefold() in (one.column, one.unit.casefold())), None)
    return known or CostAxis(name, name, name, name)
