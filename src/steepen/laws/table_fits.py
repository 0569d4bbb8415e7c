"""Fit the compute law to a table of runs, with hold-outs as on the command line, and judge its arms."""

from __future__ import annotations

from collections.abc import Sequence

from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse
from steepen.laws.ladder import Ladder
from steepen.laws.table import Table
from steepen.laws.verdict.holdout import hold_out_rungs


def choose_reference(ladders: dict[str, Ladder], reference: str | None) -> str:
    """The named reference, or the only arm of a table with one arm."""
    if reference is None and len(ladders) == 1:
        return next(iter(ladders))
    if reference is None:
        raise UsageError(
            f"name the arm to judge against with `reference`; the arms are {', '.join(ladders)}."
        )
    return reference


def analyse_table(
    table: Table, request: AnalysisRequest, hold_out: Sequence[str] = ()
) -> tuple[LadderAnalysis, dict[str, Ladder]]:
    """Analyse a table with columns arm, flops, loss (and seed); also return the ladders that were fitted.

    Those are without arms that are too short, and without runs that are off the others.
    """
    ladders, held_out = hold_out_rungs(table, hold_out)
    found = analyse(ladders, request, held_out or None)
    return found, found.judge.ladders
