"""Warnings about a table of ladders and the laws fitted to it, each a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from steepen.laws.fits.compute_law import ComputeFit
from steepen.laws.ladder import Ladder
from steepen.laws.verdict.judge import Outlier, TableJudge

MIN_PLAUSIBLE_FLOPS = 1e6  # a training run takes more; smaller numbers are in another unit
MAX_PLAUSIBLE_LOSS = 20.0  # nats per token: more is a perplexity
MAX_NAMED = 3


def collect_warnings(
    given: dict[str, Ladder], judge: TableJudge, fit: ComputeFit, unit: str = "FLOPs"
) -> tuple[str, ...]:
    """Warnings about the ladders as `given` and what was fitted; `unit` is that of their x axis."""
    return (
        *(_left_out(outlier, unit) for outlier in judge.outliers),
        *_bounds(fit),
        *_one_e(judge),
        *_units(given, unit),
        *_equal_seeds(given),
        *_similar_names(given),
        *_flat(judge.ladders),
        *_shape(judge.ladders, fit),
    )


def _left_out(outlier: Outlier, unit: str) -> str:
    what = f"{outlier.arm} at {outlier.flops:.3g} {unit}"
    if outlier.seed is not None:
        what = f"run {outlier.seed + 1} of {what}"
    side = "above" if outlier.deviation > 0 else "below"
    return (
        f"{outlier.place}: {what} is left out of everything: its loss is {abs(outlier.deviation):.4f}"
        f" {side} the"
        f" law of the others (p = {outlier.p_value:.2g}); check what was run there"
    )


def _bounds(fit: ComputeFit) -> Iterable[str]:
    if fit.at_bound:  # the one bound is E ≥ 0
        yield (
            "the fitted irreducible loss E is 0, its lower bound: these runs do not show one, γ is the"
            " slope over"
            " their own range only, and intervals take E as known"
        )


def _one_e(judge: TableJudge) -> Iterable[str]:
    if judge.own_e:
        yield (
            f"the arms do not share one irreducible loss E (p = {judge.p_one_e:.2g}): every arm has its"
            " own here,"
            " and growth is that of the multiplier within the common range"
        )


def _units(ladders: dict[str, Ladder], unit: str) -> Iterable[str]:
    lowest = min(float(ladder.flops.min()) for ladder in ladders.values())
    if unit == "FLOPs" and lowest < MIN_PLAUSIBLE_FLOPS:
        yield (
            f"the lowest compute is {lowest:.3g} FLOPs, less than any training run takes: the column is in"
            " another unit, and so is every number of FLOPs printed here; convert it (1 PF-day is 8.64e19"
            " FLOPs)"
        )
    highest = max(float(ladder.loss.max()) for ladder in ladders.values())
    if highest > MAX_PLAUSIBLE_LOSS:
        yield f"the highest loss is {highest:.4g}: if these are perplexities, give their logarithms"


def _equal_seeds(ladders: dict[str, Ladder]) -> Iterable[str]:
    places = [
        ladder.row_labels[k]
        for ladder in ladders.values()
        for k, runs in enumerate(ladder.runs)
        if len(runs) > 1 and np.ptp(runs) == 0
    ]
    if places:
        yield (
            f"{places[0]}: the seeds of {'this rung' if len(places) == 1 else f'{len(places)} rungs'} have"
            " equal"
            " losses to all digits: copies of a run are no replicates"
        )


def _similar_names(ladders: dict[str, Ladder]) -> Iterable[str]:
    for first, second in combinations(ladders, 2):
        if first != second and "".join(first.split()).casefold() == "".join(second.split()).casefold():
            yield f"'{first}' and '{second}' are different arms here; if they are one, spell them alike"


def _flat(ladders: dict[str, Ladder]) -> Iterable[str]:
    flat = [name for name, ladder in ladders.items() if ladder.loss[-1] >= ladder.loss[0]]
    if flat:
        yield (
            f"the loss of {', '.join(repr(name) for name in flat[:MAX_NAMED])} is no lower at the highest"
            " compute than at the lowest: multipliers of such a ladder mean nothing"
        )


def _shape(ladders: dict[str, Ladder], fit: ComputeFit) -> list[str]:
    found: list[str] = []
    for name, ladder in ladders.items():
        rise = np.flatnonzero(np.diff(ladder.loss) > 0)
        found += [
            f"{ladder.row_labels[i + 1]}: the loss of '{ladder.arm}' rises with compute here" for i in rise
        ]
        e = fit.arms[name].e.value
        found += [
            f"{ladder.row_labels[i]}: the loss {ladder.loss[i]:.4f} is not above the fitted E ="
            f" {e:.4f}; the law cannot hold there"
            for i in np.flatnonzero(ladder.loss <= e)
        ]
    more = len(found) - MAX_NAMED
    return [*found[:MAX_NAMED], *([f"and {more} more of this kind"] if more > 0 else [])]
