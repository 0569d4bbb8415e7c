"""Forecasts of scores: a law over the runs of a series, dashed beyond them, with the runs it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steepen.evaluation.forecast import Forecast, Held
from steepen.evaluation.scored_runs import Score, ScoreSeries
from steepen.laws.fits.compute_law import ArmLaw
from steepen.results.panel import Lines
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.cells import table
from steepen.studies.plotting import line, points
from steepen.studies.scores.score_ladders import COMPUTE, MetricKind, score_curves
from steepen.utils.arrays import Array

SIGMOIDS = "From task NLL to accuracy, and from 17 tasks to CORE"
CURVE_POINTS = 80
UNREACHABLE = 1e26  # FLOPs beyond which a crossing is not drawn


@dataclass(frozen=True)
class Scope:
    """What forecasts are made for: FLOPs to draw up to and to forecast at, and runs held out of every fit."""

    farthest: float
    targets: Sequence[float] = ()
    held: Held = field(default_factory=dict[str, Any])


def _law_curves(
    one: ScoreSeries, flops: Array, predict: Callable[[Array], Any], farthest: float, detail: str = ""
) -> list[Series]:
    """A series' law over its runs, and dashed up to `farthest` FLOPs."""
    last = float(flops.max())
    inside = np.geomspace(flops.min(), last, CURVE_POINTS)
    beyond = np.geomspace(last, max(farthest, last * 1.01), CURVE_POINTS)
    dashed: dict[str, Any] = {"role": "extrapolated", "style": "dashed", **one.curve}
    return [
        line(one.label, inside, predict(inside), role="fit", detail=detail, **one.curve),
        line(one.label, beyond, predict(beyond), **dashed),
    ]


def _held_out_points(one: ScoreSeries, held: Held, score: Score) -> list[Series]:
    """Runs that took part in no fit, as squares."""
    rows = [(run.flops, value) for run in held.get(one.label, ()) if (value := score(run)) is not None]
    square: dict[str, Any] = {"role": "held_out", "marker": "square", "filled": False, **one.curve}
    return [points(one.label, *zip(*rows, strict=True), **square)] if rows else []


def metric_forecast_panel(
    series: Sequence[ScoreSeries], kind: MetricKind, laws: Mapping[str, ArmLaw], scope: Scope, **panel: Any
) -> Panel:
    """A metric with each series' law E + A·(C/C0)^−γ, dashed beyond its runs; held-out runs are squares."""
    drawn: list[Series] = []
    for one in series:
        measured = score_curves([one], "flops", kind.field, join=False)
        drawn += measured
        if one.label in laws:
            law = laws[one.label]
            flops, detail = np.array(measured[0].x), f"γ = {law.gamma.value:.4f}"
            drawn += _law_curves(one, flops, law.predict, scope.farthest, detail)
        drawn += _held_out_points(one, scope.held, lambda run: run[kind.field]) if measured else []
    return Panel(kind.name, COMPUTE, Axis(f"{kind.name} ({kind.unit})"), tuple(drawn), **panel)


def core_panel(forecast: Forecast, scope: Scope, group: str = "") -> Panel:
    """Score against compute: measured, forecast (dashed beyond), references and where curves cross them."""
    drawn: list[Series] = []
    reached = [c for own in forecast.crossings.values() for c in own.values() if 0 < c < UNREACHABLE]
    farthest = max([scope.farthest, *(1.3 * c for c in reached)])
    for one in forecast.series:
        own = forecast.checkpoints[one.label]
        drawn.append(points(one.label, own.flops, own.score, **one.curve))
        drawn += _law_curves(one, own.flops, lambda x, one=one: forecast.fit.predict(one.label, x), farthest)
        crossed = [(at[one.label], forecast.references[name]) for name, at in forecast.crossings.items()]
        if inside := [at for at in crossed if 0 < at[0] < UNREACHABLE]:
            star: dict[str, Any] = {"role": "extrapolated", "marker": "star", "note": "reaches a reference"}
            drawn.append(points(one.label, *zip(*inside, strict=True), **star, **one.curve))
        drawn += _held_out_points(one, scope.held, forecast.score)
    scores = forecast.references.items()
    lines: Lines = tuple(("y", score, name + _ratio_words(forecast, name)) for name, score in scores)
    caption = (
        "Task laws, task sigmoids and one factor to CORE; dashed beyond the runs; squares were in no fit."
    )
    return Panel("CORE", COMPUTE, Axis("CORE (centred accuracy)"), tuple(drawn), lines, caption, group=group)


def crossing_ratio(forecast: Forecast, reference: str, base: str, label: str) -> float | None:
    """How many times more compute the first series needs for a reference score; None if unreached."""
    own = forecast.crossings[reference]
    value = own[base] / own[label] if own[label] else math.nan
    return value if math.isfinite(value) and value > 0 else None


def _ratio_words(forecast: Forecast, reference: str) -> str:
    """Of two series: how many times more compute one needs than the other for a reference score."""
    labels = [one.label for one in forecast.series]
    if len(labels) != 2:
        return ""
    ratios = [crossing_ratio(forecast, reference, *pair) for pair in (labels, labels[::-1])]
    known = [ratio for ratio in ratios if ratio is not None and ratio >= 1]
    return f", {known[0]:.2f}×" if known else ""


def sigmoid_panels(forecast: Forecast, suffix: str = "") -> list[Panel]:
    """One panel for each task (accuracy against NLL, shared sigmoid), and the factor from tasks to CORE."""
    fields: dict[str, Any] = {"group": SIGMOIDS + suffix, "columns": 6}
    axes = Axis("task NLL", reverse=True), Axis("centred accuracy")
    panels = [Panel(task, *axes, tuple(_sigmoid(forecast, task)), **fields) for task in forecast.tasks]
    drawn: list[Series] = []
    for one in forecast.series:
        own = forecast.checkpoints[one.label]
        mean = np.mean([own.centered[task] for task in forecast.tasks], axis=0)
        drawn.append(points(one.label, mean, own.score, **one.curve))
    highest, r = max(0.0, *(x for curve in drawn for x in curve.x)), forecast.fit.r
    drawn.append(line(f"CORE = {r:.5f} × mean", [0.0, highest], [0.0, r * highest], role="fit"))
    count = len(forecast.tasks)
    axes = Axis(f"mean of {count} tasks"), Axis("CORE, 22 tasks")
    return [*panels, Panel(f"{count} tasks to CORE", *axes, tuple(drawn), **fields)]


def _sigmoid(forecast: Forecast, task: str) -> list[Series]:
    tables, curve = forecast.checkpoints, forecast.fit.sigmoids[task]
    every = np.concatenate([own.nll[task] for own in tables.values()])
    low, high = float(every.min()), float(every.max())
    wide, inside = 0.5 * (high - low), np.linspace(low, high, CURVE_POINTS)
    dashed: dict[str, Any] = {"role": "extrapolated", "style": "dashed"}
    outside = (np.linspace(max(low - wide, 0.0), low, 30), np.linspace(high, high + wide, 30))
    return [
        *(
            points(one.label, tables[one.label].nll[task], tables[one.label].centered[task], **one.curve)
            for one in forecast.series
        ),
        line("sigmoid", inside, curve.predict(inside), role="fit"),
        *(line("sigmoid", x, curve.predict(x), **dashed) for x in outside),
    ]


def crossing_table(forecast: Forecast, base: str, suffix: str = "") -> Table:
    """The compute each series needs for each reference score, and the ratio to the first series."""
    labels = [one.label for one in forecast.series]
    others = [label for label in labels if label != base]
    rows = [
        {
            "reference": name, "CORE": score,
            **{f"{label} (FLOPs)": forecast.crossings[name][label] for label in labels},
            **{f"{base} over {label}": crossing_ratio(forecast, name, base, label) for label in others},
        }
        for name, score in forecast.references.items()
    ]  # fmt: skip
    caption = "Forecasts far beyond the runs: they assume that the laws and sigmoids go on."
    return table(f"Compute forecast to match published scores{suffix}", rows, caption)
