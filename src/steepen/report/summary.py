"""The table that opens a study's report: a line per arm with its answer, multiplier, p-value and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.multipliers import Multiplier
from steepen.report.colours import arm_key
from steepen.report.curves import ladder_title
from steepen.report.select_verdicts import primary_verdicts
from steepen.runs.record import RunRecord
from steepen.studies.answer import Answer, StudyVerdict, Table

ANSWER_COLUMN = 1


def summary_table(answer: Answer, records: Sequence[RunRecord], titles: dict[str, str]) -> Table | None:
    """One row per judged ladder, after the reference; None for a study without verdicts."""
    judged = primary_verdicts(answer)
    if not judged:
        return None
    runs = runs_of_ladders(answer)
    rows: list[tuple[object, ...]] = []
    for name in dict.fromkeys(one.verdict.reference for one in judged):
        cost = _cost(runs.get((arm_key(name), ""), set()), records, name)
        rows.append((ladder_title(name, "", titles), "reference", None, None, None, None, None, *cost))
    for one in judged:
        verdict = one.verdict
        top = top_multiplier(verdict)
        cost = _cost(runs.get((arm_key(one.arm), one.variant), set()), records, one.arm)
        rows.append(
            (
                ladder_title(one.arm, one.variant, titles) + (f", {one.part}" if one.part else ""),
                answer_words(one),
                *(_finite(value) for value in (top.value, top.low, top.high, top.flops, verdict.p_slope)),
                *cost,
            )
        )
    unit = judged[0].verdict.unit
    return Table(
        title="Answers",
        columns=(
            *("arm", "does the gain grow?", "multiplier (fitted)", "low", "high"),
            *(f"at ({unit})", "p (growth)", "training FLOPs", "training hours"),
        ),
        rows=tuple(rows),
        caption=(
            "The multiplier is the reference's cost over the arm's for the same loss by the fitted laws, at "
            "the reference's highest rung that the arm covers, with its interval; p is that of a gain that "
            "does not change with compute. By either: the data allow a larger exponent as well as a lower "
            "irreducible loss. FLOPs and hours are the sums over the arm's runs in this study."
        ),
        arm_column=0,
    )


def answer_words(judged: StudyVerdict) -> str:
    """A verdict's two answers: "grows (fragile: not a claim), by exponent"."""
    verdict = judged.verdict
    words = verdict.growth + (" (fragile: not a claim)" if verdict.fragile else "")
    if verdict.by_what:
        words += f", by {verdict.by_what}" + (" (fragile: not a claim)" if verdict.by_what_fragile else "")
    return words


def top_multiplier(verdict: Verdict) -> Multiplier:
    """The multiplier at the reference's highest rung that the arm covers too; without one, of the law."""
    inside = [one for one in verdict.leading_multipliers if not one.extrapolated]
    law = Multiplier("leading", verdict.multiplier_flops, verdict.multiplier, math.nan, math.nan)
    return max(inside, key=lambda one: one.flops, default=law)


def runs_of_ladders(answer: Answer) -> dict[tuple[str, str], set[str]]:
    """The runs of every (arm, variant), from the series that show them."""
    found: dict[tuple[str, str], set[str]] = {}
    for panel in answer.panels:
        for series in panel.series:
            if series.arm is not None and series.runs:
                found.setdefault((arm_key(series.arm), series.variant), set()).update(series.runs)
    return found


def _cost(runs: set[str], records: Sequence[RunRecord], arm: str) -> tuple[float | None, float | None]:
    """FLOPs and hours of training of some runs, or of all runs of an arm."""
    own = [r for r in records if (r.run in runs if runs else arm_key(r.spec.arm.name) == arm_key(arm))]
    if not own:
        return None, None
    return sum(r.flops for r in own), sum(r.seconds_training for r in own) / 3600


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
