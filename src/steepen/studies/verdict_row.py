"""A verdict as one flat row: what tables, pages, terminals and frames show of it, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.questions import Better, ByWhat, Growth
from steepen.results.table import Column


@dataclass(frozen=True)
class VerdictRow:
    """One ladder's verdict: its three answers, then their numbers."""

    arm: str  # the ladder's label
    measure: str  # what the multiplier saves: "per FLOP", "per second"
    verdict: Annotated[str, Column(shown=False)]  # the three answers together
    better: Annotated[Better, Column("in range")]
    growth: Annotated[Growth, Column("gain")]
    by_what: ByWhat | None
    multiplier: float
    multiplier_low: Annotated[float, Column("low")]
    multiplier_high: Annotated[float, Column("high")]
    p_better: Annotated[float, Column("p (better)")]
    growth_per_decade: Annotated[float, Column("× per decade")]
    p_growth: Annotated[float, Column("p (growth)")]
    delta_gamma: Annotated[float, Column("Δγ")]
    delta_gamma_low: Annotated[float, Column("Δγ low")]
    delta_gamma_high: Annotated[float, Column("Δγ high")]
    top_multiplier: Annotated[float, Column("multiplier at the top")]


def verdict_row(verdict: Verdict, arm: str = "") -> VerdictRow:
    """The row of a verdict; `arm` is the name to show, the ladder's label by default."""
    return VerdictRow(
        arm=arm or verdict.arm,
        measure=f"per {verdict.unit.removesuffix('s')}",
        verdict=verdict.word,
        better=verdict.better,
        growth=verdict.growth,
        by_what=verdict.by_what,
        multiplier=verdict.gain.value,
        multiplier_low=verdict.gain.interval[0],
        multiplier_high=verdict.gain.interval[1],
        p_better=verdict.gain.p_value,
        growth_per_decade=verdict.growth_per_decade,
        p_growth=verdict.slope.p_value,
        delta_gamma=verdict.delta_gamma,
        delta_gamma_low=verdict.delta_gamma_interval[0],
        delta_gamma_high=verdict.delta_gamma_interval[1],
        top_multiplier=verdict.top.value,
    )
