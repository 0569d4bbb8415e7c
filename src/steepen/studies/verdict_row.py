"""A verdict as one flat row: what tables, pages, terminals and frames show of it, in one place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from steepen.laws.hypotheses.nested_models import Growth
from steepen.laws.verdict.evidence import Verdict
from steepen.results.table import Column

FRAGILE = "?: fragile, not a claim"  # what the mark means, below tables that have it


@dataclass(frozen=True)
class VerdictRow:
    """One ladder's verdict: the words, then the numbers; `gain` and `by_what` have "?" where fragile."""

    arm: str  # the ladder's label
    measure: str  # "per FLOP" or "per second"
    verdict: Annotated[str, Column(shown=False)]
    marked_verdict: Annotated[str, Column("verdict", stored=False)]
    claim: Annotated[bool, Column(shown=False)]
    by_what_claim: Annotated[bool, Column(shown=False)]
    delta_gamma: Annotated[float, Column("Δγ")]
    delta_gamma_low: Annotated[float, Column("Δγ low")]
    delta_gamma_high: Annotated[float, Column("Δγ high")]
    multiplier: float
    multiplier_flops: float
    p_growth: float
    growth: Annotated[Growth, Column(shown=False, stored=False)]
    gain: Annotated[str, Column(shown=False, stored=False)]
    by_what: Annotated[str | None, Column(shown=False, stored=False)]
    growth_per_decade: Annotated[float, Column(shown=False, stored=False)]

    @property
    def answer(self) -> str:
        """Both answers in words: "grows?, by exponent"."""
        return self.gain + (f", by {self.by_what}" if self.by_what else "")

    @property
    def by_what_short(self) -> str:
        """The second answer without its explanation."""
        words, mark = (self.by_what or "").partition(":")[0], (self.by_what or "").endswith("?")
        return words.rstrip("?") + "?" * mark


def verdict_row(verdict: Verdict, arm: str = "") -> VerdictRow:
    """The row of a verdict; `arm` is the name to show, the ladder's label by default."""
    return VerdictRow(
        arm=arm or verdict.arm,
        measure="per second" if verdict.unit == "seconds" else "per FLOP",
        verdict=verdict.word,
        marked_verdict=verdict.marked_word,
        claim=verdict.claim,
        by_what_claim=verdict.by_what_claim,
        delta_gamma=verdict.delta_gamma,
        delta_gamma_low=verdict.delta_gamma_interval[0],
        delta_gamma_high=verdict.delta_gamma_interval[1],
        multiplier=verdict.multiplier,
        multiplier_flops=verdict.multiplier_flops,
        p_growth=verdict.p_slope,
        growth=verdict.growth,
        gain=verdict.growth + "?" * bool(verdict.fragile),
        by_what=verdict.by_what and verdict.by_what + "?" * bool(verdict.by_what_fragile),
        growth_per_decade=verdict.growth_per_decade,
    )


def legend(rows: Iterable[VerdictRow]) -> list[str]:
    """What "?" means, where a row has it."""
    return [FRAGILE] if any("?" in row.marked_verdict for row in rows) else []
