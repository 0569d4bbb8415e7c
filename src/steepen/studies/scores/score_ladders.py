"""Panels of scores along ladders: metrics and their multipliers, effective depth, passes at test time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steepen.laws.fits.matched_metric import MetricMultiplier, matched_metric
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.plotting import family_curve, line, points
from steepen.studies.scores.score_series import Metric, ScoreSeries

COMPUTE = Axis("training compute (FLOPs)", "log")


@dataclass(frozen=True)
class MetricKind:
    """A downstream metric: its name, how it is read from a run, and whether it rises with compute."""

    name: str
    read: Metric
    rises: bool
    unit: str


METRICS = (
    MetricKind("validation loss", lambda run: run.loss, False, "nats per token"),
    MetricKind("answer NLL", lambda run: run.nll, False, "nats per token"),
    MetricKind("CORE, 22 tasks", lambda run: run.core22, True, "centred accuracy"),
    MetricKind("CORE, 17 tasks", lambda run: run.core17, True, "centred accuracy"),
)
LADDERS, MULTIPLIERS = "Scores along the ladders", "Compute multipliers at equal scores"


def measured_metrics(series: Sequence[ScoreSeries]) -> list[MetricKind]:
    """The metrics that two runs of some series have."""
    return [kind for kind in METRICS if any(len(one.column(kind.read)[0]) >= 2 for one in series)]


def score_ladders(series: Sequence[ScoreSeries], group: str = LADDERS) -> list[Panel]:
    """Each metric against compute, one curve for each series."""
    return [
        Panel(
            kind.name,
            COMPUTE,
            Axis(kind.unit),
            tuple(s for one in series for s in _curve(one, kind)),
            group=group,
            columns=len(METRICS),
        )
        for kind in measured_metrics(series)
    ]


def _curve(one: ScoreSeries, kind: MetricKind) -> list[Series]:
    flops, values, runs = one.column(kind.read)
    if not len(flops):
        return []
    return [points(one.label, flops, values, runs, **one.curve), line(one.label, flops, values, **one.curve)]


def score_multipliers(
    series: Sequence[ScoreSeries], reference: ScoreSeries
) -> dict[str, dict[str, list[MetricMultiplier]]]:
    """By metric and series: multipliers over the reference where the metric is equal."""
    found: dict[str, dict[str, list[MetricMultiplier]]] = {}
    for kind in measured_metrics(series):
        base = reference.column(kind.read)[:2]
        if len(base[0]) < 2:
            continue
        for one in series:
            own = one.column(kind.read)[:2]
            if one is not reference and len(own[0]) >= 2:
                found.setdefault(kind.name, {})[one.label] = matched_metric(base, own, rises=kind.rises)
    return found


def multiplier_panels(
    series: Sequence[ScoreSeries],
    reference: ScoreSeries,
    found: dict[str, dict[str, list[MetricMultiplier]]],
    group: str = MULTIPLIERS,
) -> list[Panel]:
    """One panel for each metric: the multiplier against the reference's compute."""
    curves = {one.label: one.curve for one in series}
    panels: list[Panel] = []
    for name, by_series in found.items():
        drawn: list[Series] = []
        for label, values in by_series.items():
            x, y = [m.flops for m in values], [m.value for m in values]
            if x:
                drawn += [points(label, x, y, **curves[label]), line(label, x, y, **curves[label])]
        panels.append(
            Panel(
                f"at equal {name}",
                Axis(f"compute of {reference.label} (FLOPs)", "log"),
                Axis("compute multiplier", "log"),
                tuple(drawn),
                (("y", 1.0, reference.label),),
                "Interpolated between measurements, never beyond them.",
                group=group,
                columns=len(METRICS),
            )
        )
    return panels


def multiplier_table(found: dict[str, dict[str, list[MetricMultiplier]]], reference: str) -> Table:
    """The multiplier of every metric at the lowest and highest budget where it is measured."""
    rows = tuple(
        (label, name, values[0].flops, values[0].value, values[-1].flops, values[-1].value)
        for name, by_series in found.items()
        for label, values in by_series.items()
        if values
    )
    return Table(
        f"Multipliers over {reference} at equal scores",
        ("arm", "equal", "from FLOPs", "multiplier", "to FLOPs", "multiplier there"),
        rows,
        "Interpolated between measurements. Accuracies fluctuate from run to run, so theirs do too.",
        arm_column=0,
    )


def kl_depth_panels(series: Sequence[ScoreSeries]) -> list[Panel]:
    """KL effective depth against compute; [] where it was not evaluated."""
    drawn: list[Series] = []
    for one in series:
        flops, values, runs = one.column(lambda run: run.kl_depth)
        if len(flops):
            drawn += [
                points(one.label, flops, values, runs, **one.curve),
                line(one.label, flops, values, **one.curve),
            ]
    if not drawn:
        return []
    caption = "The first block after the peak whose decoded prediction is within the threshold of the last."
    y = Axis("KL effective depth (blocks)")
    return [Panel("KL effective depth along the ladders", COMPUTE, y, tuple(drawn), caption=caption)]


def passes_panels(series: Sequence[ScoreSeries]) -> list[Panel]:
    """L(k) − L(K trained) against passes k: one panel for each series, one curve for each size."""
    panels: list[Panel] = []
    for one in series:
        known = [run for run in one.runs if run.passes is not None]
        if not known:
            continue
        drawn: list[Series] = []
        for run in known:
            assert run.passes is not None
            label, curve = family_curve("depth", run.depth)
            x, y = run.passes.passes, run.passes.differences
            drawn += [
                line(label, x, y, **curve),
                points(label, x, y, [run.run] * len(x), **curve),
                Series(
                    label, "points", (run.passes.trained,), (0.0,), marker="star", note="trained", **curve
                ),
            ]
        panels.append(
            Panel(
                one.label,
                Axis("core passes k at test time"),
                Axis("L(k) − L(K trained) (nats)"),
                tuple(drawn),
                (("y", 0.0, ""),),
                group="Loss at other numbers of passes than trained",
            )
        )
    return panels
