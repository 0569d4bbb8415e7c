"""A verdict as one flat row: what files, frames, and the tables of pages and studies show of it.

An answer is a field of `VerdictRow` and its value in `verdict_row`; what the reference has too belongs in
`LawRow` and `law_rows`. `answer_table` in `results/fit.py` shows the three answers in a terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from steepen.results.table import Column

if TYPE_CHECKING:  # numpy and scipy, which `--help` does without
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.verdict.evidence import Verdict


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """One ladder's verdict: its three answers, each before its numbers. Defaults are the reference's."""

    arm: str  # the ladder's label
    better: Annotated[str, Column("in range")] = "reference"
    multiplier: float | None = None
    multiplier_low: Annotated[float | None, Column("low")] = None
    multiplier_high: Annotated[float | None, Column("high")] = None
    p_better: Annotated[float | None, Column("p (better)")] = None
    growth: Annotated[str | None, Column("gain")] = None
    by_what: str | None = None
    growth_per_decade: Annotated[float | None, Column("× per decade")] = None
    growth_per_decade_low: Annotated[float | None, Column(shown=False, stored=False)] = None
    growth_per_decade_high: Annotated[float | None, Column(shown=False, stored=False)] = None
    p_growth: Annotated[float | None, Column("p (growth)")] = None
    delta_gamma: Annotated[float | None, Column("Δγ")] = None
    delta_gamma_low: Annotated[float | None, Column("Δγ low", shown=False)] = None
    delta_gamma_high: Annotated[float | None, Column("Δγ high", shown=False)] = None
    top_multiplier: Annotated[float | None, Column("multiplier at the top")] = None
    measure: Annotated[str, Column(shown=False)] = ""  # what the multiplier saves: "per FLOP", "per second"
    verdict: Annotated[str, Column(shown=False)] = "reference"  # the three answers together
    sentence: Annotated[str, Column(shown=False)] = ""


@dataclass(frozen=True, kw_only=True)
class LawRow(VerdictRow):
    """One ladder: its verdict, and its law."""

    gamma: Annotated[float, Column("γ")]
    gamma_low: Annotated[float, Column("γ low")]
    gamma_high: Annotated[float, Column("γ high")]
    E: Annotated[float, Column(shown=False)]
    log_A: Annotated[float, Column(shown=False)]
    C0: Annotated[float, Column(shown=False)]
    rungs: Annotated[int, Column(shown=False)]
    left_out: Annotated[int, Column(shown=False)]  # runs of the ladder that took part in nothing


def verdict_row(verdict: Verdict, arm: str = "") -> VerdictRow:
    """The row of a verdict; `arm` is the name to show, the ladder's label by default."""
    if verdict.flops_range is None:  # nothing was compared
        return VerdictRow(
            arm=arm or verdict.arm, better=verdict.better, growth=verdict.growth, verdict=verdict.word,
            sentence=verdict.sentence,
        )  # fmt: skip
    (low, high), (gamma_low, gamma_high) = verdict.gain.interval, verdict.delta_gamma_interval
    growth_low, growth_high = verdict.growth_per_decade_interval
    return VerdictRow(
        arm=arm or verdict.arm, measure=f"per {verdict.unit.removesuffix('s')}", verdict=verdict.word,
        better=verdict.better, multiplier=verdict.gain.value, multiplier_low=low, multiplier_high=high,
        p_better=verdict.gain.p_value, growth=verdict.growth, by_what=verdict.by_what,
        growth_per_decade=verdict.growth_per_decade, growth_per_decade_low=growth_low,
        growth_per_decade_high=growth_high, p_growth=verdict.slope.p_value,
        delta_gamma=verdict.delta_gamma, delta_gamma_low=gamma_low, delta_gamma_high=gamma_high,
        top_multiplier=verdict.top.value, sentence=verdict.sentence,
    )  # fmt: skip


def law_rows(analysis: LadderAnalysis) -> list[LawRow]:
    """A row for each ladder of an analysis, the reference included."""
    gone = [one.arm for one in analysis.left_out]
    rows: list[LawRow] = []
    for name, law in analysis.primary_fit.arms.items():
        verdict, (low, high) = analysis.verdicts.get(name), law.gamma.unconditional
        judged = VerdictRow(arm=name) if verdict is None else verdict_row(verdict)
        rows.append(
            LawRow(
                **vars(judged), gamma=law.gamma.value, gamma_low=low, gamma_high=high, E=law.e.value,
                log_A=law.log_a.value, C0=law.c0, rungs=len(analysis.judge.ladders[name].flops),
                left_out=gone.count(name),
            )
        )  # fmt: skip
    return rows
