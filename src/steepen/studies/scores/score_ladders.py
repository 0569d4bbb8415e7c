"""Scores along series: metrics, multipliers at equal scores, effective depth, passes at test time.

A metric either falls with compute (a loss, an answer NLL) or rises (an accuracy). Multipliers interpolate
between measurements, linear in log compute, and never extrapolate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from steepen.evaluation.scored_runs import PassesAtTestTime, ScoreSeries
from steepen.laws.ladder import make_ladder
from steepen.laws.verdict.multipliers import interpolate_compute
from steepen.results.panel import Lines
from steepen.results.table import Column, columns_of, table_of
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.plotting import family_curve, line, measured_curve, measured_curves, points
from steepen.utils.arrays import Array

COMPUTE = Axis("training compute (FLOPs)", "log")
LADDERS, MULTIPLIERS = "Scores along the ladders", "Compute multipliers at equal scores"


@dataclass(frozen=True)
class MetricKind:
    """A downstream metric: its name, its field of `ScoredRun`, its unit, whether it rises with compute."""

    name: str
    field: str
    unit: str = "nats per token"
    rises: bool = False


LOSS, ANSWER_NLL = MetricKind("validation loss", "loss"), MetricKind("answer NLL", "nll")
CORE22 = MetricKind("CORE, 22 tasks", "core22", "centred accuracy", rises=True)
METRICS = (LOSS, ANSWER_NLL, CORE22, MetricKind("CORE, 17 tasks", "core17", "centred accuracy", rises=True))


@dataclass(frozen=True)
class MetricMultiplier:
    """How many times less compute a series needs for the reference's metric at `flops` of the reference."""

    flops: float
    metric: float
    value: float


Multipliers = Mapping[str, Mapping[str, list[MetricMultiplier]]]  # by metric and series


def matched_metric(
    reference: tuple[Array, Array], series: tuple[Array, Array], *, rises: bool = False
) -> list[MetricMultiplier]:
    """Multipliers at the reference's rungs whose metric lies within the series' measured range.

    `reference` and `series` are (FLOPs, metric); runs within 1% of compute are averaged. A metric that
    fluctuates is taken as reached where the curve first crosses it.
    """
    sign = -1.0 if rises else 1.0
    base = make_ladder("reference", reference[0], sign * np.asarray(reference[1], float))
    other = make_ladder("series", series[0], sign * np.asarray(series[1], float))
    if len(other.flops) < 2:
        return []
    needed = interpolate_compute(other.flops, other.loss, base.loss)
    return [
        MetricMultiplier(float(c), float(sign * y), float(c / x))
        for c, y, x in zip(base.flops, base.loss, needed, strict=True)
        if np.isfinite(x)
    ]


def score_curves(series: Sequence[ScoreSeries], x: str, y: str, *, join: bool = True) -> list[Series]:
    """What the runs of each series measured, where they have it."""
    return measured_curves([(one.label, one.curve, one.runs) for one in series], x, y, join=join)


def measured_metrics(series: Sequence[ScoreSeries]) -> list[MetricKind]:
    """The metrics that two runs of some series have."""
    return [kind for kind in METRICS if any(len(one.runs.having(kind.field)) >= 2 for one in series)]


def metric_panels(series: Sequence[ScoreSeries], suffix: str = "") -> list[Panel]:
    """Each metric against compute, one curve for each series."""
    fields: dict[str, Any] = {"group": LADDERS + suffix, "columns": len(METRICS)}
    drawn = {kind: tuple(score_curves(series, "flops", kind.field)) for kind in measured_metrics(series)}
    return [Panel(kind.name + suffix, COMPUTE, Axis(kind.unit), own, **fields) for kind, own in drawn.items()]


def score_multipliers(series: Sequence[ScoreSeries], reference: ScoreSeries) -> Multipliers:
    """Multipliers over the reference where the metric is equal."""
    found: dict[str, dict[str, list[MetricMultiplier]]] = {}
    for kind in measured_metrics(series):
        columns = {one.label: one.metric(kind.field) for one in series}
        base = columns.pop(reference.label)
        own = {
            label: matched_metric(base, column, rises=kind.rises)
            for label, column in columns.items()
            if min(len(base[0]), len(column[0])) >= 2
        }
        found |= {kind.name: own} if own else {}
    return found


def multiplier_panels(
    series: Sequence[ScoreSeries], reference: ScoreSeries, found: Multipliers, suffix: str = ""
) -> list[Panel]:
    """One panel for each metric: the multiplier against the reference's compute."""
    curves = {one.label: one.curve for one in series}
    axes = Axis(f"compute of {reference.label} (FLOPs)", "log"), Axis("compute multiplier", "log")
    caption = "Interpolated between measurements, never beyond them."
    fields: dict[str, Any] = {"group": MULTIPLIERS + suffix, "columns": len(METRICS)}
    lines: Lines = (("y", 1.0, reference.label),)
    panels: list[Panel] = []
    for name, by_series in found.items():
        drawn = [multiplier_curve(label, rows, curves[label]) for label, rows in by_series.items()]
        every = tuple(curve for own in drawn for curve in own)
        panels.append(Panel(f"at equal {name}{suffix}", *axes, every, lines, caption, **fields))
    return panels


def multiplier_curve(label: str, rows: Sequence[MetricMultiplier], curve: dict[str, Any]) -> list[Series]:
    """Multipliers against the reference's compute."""
    return measured_curve(label, [m.flops for m in rows], [m.value for m in rows], **curve) if rows else []


@dataclass(frozen=True)
class MultiplierRow:
    """A series' multiplier at an equal metric, at the lowest and highest budget where it is measured."""

    arm: str
    equal: str  # the metric
    from_flops: Annotated[float, Column("from FLOPs")]
    multiplier: float
    to_flops: Annotated[float, Column("to FLOPs")]
    multiplier_there: float


def multiplier_rows(found: Multipliers) -> list[MultiplierRow]:
    """The ends of every curve of multipliers."""
    return [
        MultiplierRow(label, name, rows[0].flops, rows[0].value, rows[-1].flops, rows[-1].value)
        for name, by_series in found.items()
        for label, rows in by_series.items()
        if rows
    ]


def multiplier_table(rows: Sequence[MultiplierRow], reference: str, suffix: str = "") -> Table:
    """The multiplier of every metric at the lowest and highest budget where it is measured."""
    columns = list(columns_of(MultiplierRow).values())
    caption = "Interpolated between measurements. Accuracies fluctuate from run to run, so theirs do too."
    made = table_of(rows, columns, f"Multipliers over {reference} at equal scores{suffix}", caption)
    return replace(made, arm_column=0)


def kl_depth_panels(series: Sequence[ScoreSeries]) -> list[Panel]:
    """KL effective depth against compute; [] where it was not evaluated."""
    drawn = tuple(score_curves(series, "flops", "kl_depth"))
    caption = "The first block after the peak whose decoded prediction is within the threshold of the last."
    axes = COMPUTE, Axis("KL effective depth (blocks)")
    return [Panel("KL effective depth along the ladders", *axes, drawn, caption=caption)] if drawn else []


def passes_curve(
    label: str, passes: PassesAtTestTime, runs: Sequence[str] = (), **fields: Any
) -> list[Series]:
    """L(k) − L(K trained) against k passes, with a star at the trained K."""
    x, y = passes.passes, passes.differences
    star: dict[str, Any] = {"marker": "star", "note": "trained", **fields}
    return [
        line(label, x, y, **fields),
        points(label, x, y, runs, **fields),
        points(label, [passes.trained], [0.0], **star),
    ]


def passes_panels(series: Sequence[ScoreSeries]) -> list[Panel]:
    """L(k) − L(K trained) against passes k: one panel for each series, one curve for each size."""
    panels: list[Panel] = []
    axes = Axis("core passes k at test time"), Axis("L(k) − L(K trained) (nats)")
    group = "Loss at other numbers of passes than trained"
    for one in series:
        drawn: list[Series] = []
        for run in one.runs:
            if run.passes is not None:
                label, curve = family_curve("depth", run.depth)
                drawn += passes_curve(label, run.passes, [run.run] * len(run.passes.passes), **curve)
        if drawn:
            panels.append(Panel(one.label, *axes, tuple(drawn), (("y", 0.0, ""),), group=group))
    return panels
