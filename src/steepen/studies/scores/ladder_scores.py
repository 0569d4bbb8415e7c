"""Scores of a study's own ladders: what the ladder study shows where its runs have been evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steepen.runs.record import RunRecord
from steepen.studies.answer import Panel, Table
from steepen.studies.scores.score_ladders import (
    kl_depth_panels,
    multiplier_panels,
    multiplier_table,
    passes_panels,
    score_ladders,
    score_multipliers,
)
from steepen.studies.scores.score_residuals import bar_panels, pool_answer_nll, pooled_panels, task_bars
from steepen.studies.scores.score_series import ScoreSeries, checkpoint_of


@dataclass(frozen=True)
class LadderScores:
    """What the scores of some ladders show."""

    findings: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()


def make_series(label: str, arm: str, variant: str, records: Sequence[RunRecord]) -> ScoreSeries:
    """The records of one ladder as a series, in order of compute."""
    runs = sorted((checkpoint_of(record) for record in records), key=lambda run: run.flops)
    return ScoreSeries(label, arm, variant, "", tuple(runs))


def ladder_scores(series: Sequence[ScoreSeries], reference: str) -> LadderScores:
    """Panels, tables and findings of the ladders' scores; nothing where no run was evaluated."""
    base = next(one for one in series if one.label == reference)
    findings: list[str] = []
    panels: list[Panel] = []
    tables: list[Table] = []
    if any(run.nll is not None or run.core22 is not None for one in series for run in one.runs):
        found = score_multipliers(series, base)
        panels += [*score_ladders(series), *multiplier_panels(series, base, found)]
        if found:
            tables.append(multiplier_table(found, reference))
        pooled = pool_answer_nll(series)
        if pooled is not None:
            panels += pooled_panels(series, pooled)
        bars = task_bars(series, base)
        if bars and bars[0].residuals:
            panels += bar_panels(series, base, bars)
        nll = found.get("answer NLL", {})
        findings += [
            f"{label}: at equal answer NLL the multiplier over {reference} goes from {rows[0].value:.2f}× to "
            f"{rows[-1].value:.2f}×."
            for label, rows in nll.items()
            if rows
        ]
    deep = kl_depth_panels(series)
    if deep:
        ends = [(one.label, values) for one in series if len(values := one.column(lambda r: r.kl_depth)[1])]
        words = ", ".join(f"{label} {values[-1]:g}" for label, values in ends)
        findings.append(f"KL effective depth at each ladder's top rung: {words}.")
    panels += [*deep, *passes_panels(series)]
    return LadderScores(tuple(findings), tuple(panels), tuple(tables))
