"""Forecasts of answer NLL and CORE from ladders: laws, task sigmoids, crossings and held-out runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steepen.errors import SteepenError
from steepen.evaluation.core.suite import CORE17
from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import ArmLaw, FitSettings
from steepen.laws.fits.downstream import GPT3_CORE, Checkpoints, DownstreamFit, fit_downstream
from steepen.laws.ladder import make_ladder
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.plotting import line, points
from steepen.studies.scores.score_ladders import COMPUTE
from steepen.studies.scores.score_series import ScoredCheckpoint, ScoreSeries

CURVE_POINTS = 80
MIN_LAW_RUNS = 4
SIGMOIDS = "From task NLL to accuracy, and from 17 tasks to CORE"


def nll_laws(series: Sequence[ScoreSeries]) -> dict[str, ArmLaw]:
    """A law E + A·(C/C0)^−γ of the answer NLL for each series with four runs."""
    found: dict[str, ArmLaw] = {}
    for one in series:
        flops, nll, _ = one.column(lambda run: run.nll)
        if len(flops) < MIN_LAW_RUNS:
            continue
        settings = FitSettings(one.label, method="paper", reference_law="free-fit")
        try:
            found[one.label] = fit_compute({one.label: make_ladder(one.label, flops, nll)}, settings).arms[
                one.label
            ]
        except SteepenError:  # too few or flat: no law, the points stay
            continue
    return found


def nll_panel(
    series: Sequence[ScoreSeries],
    laws: Mapping[str, ArmLaw],
    held: Mapping[str, Sequence[ScoredCheckpoint]],
    farthest: float,
    title: str = "answer NLL",
    group: str = "",
) -> Panel:
    """Answer NLL with each series' law, dashed beyond its runs; held-out runs are squares."""
    drawn: list[Series] = []
    for one in series:
        flops, nll, runs = one.column(lambda run: run.nll)
        if not len(flops):
            continue
        drawn.append(points(one.label, flops, nll, runs, **one.curve))
        if one.label in laws:
            drawn += _law_lines(one, laws[one.label], flops, farthest)
        drawn += _held(one, [(run.flops, run.nll) for run in held.get(one.label, ()) if run.nll is not None])
    return Panel(
        title, COMPUTE, Axis("answer NLL (nats per token)"), tuple(drawn),
        caption="Laws with an irreducible NLL for each series, dashed beyond its runs.", group=group,
    )  # fmt: skip


def _law_lines(one: ScoreSeries, law: ArmLaw, flops: np.ndarray, farthest: float) -> list[Series]:
    inside = np.geomspace(flops.min(), flops.max(), CURVE_POINTS)
    beyond = np.geomspace(flops.max(), max(farthest, flops.max() * 1.01), CURVE_POINTS)
    detail = f"γ = {law.gamma.value:.4f}"
    return [
        line(one.label, inside, law.predict(inside), role="fit", detail=detail, **one.curve),
        line(one.label, beyond, law.predict(beyond), role="extrapolated", style="dashed", **one.curve),
    ]


def _held(one: ScoreSeries, rows: Sequence[tuple[float, float]]) -> list[Series]:
    if not rows:
        return []
    x, y = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    return [Series(one.label, "points", x, y, role="held_out", marker="square", filled=False, **one.curve)]


@dataclass(frozen=True)
class CoreForecast:
    """The fit of some series, and the compute at which each is forecast to reach each reference score."""

    series: tuple[ScoreSeries, ...]
    checkpoints: dict[str, Checkpoints]
    fit: DownstreamFit
    crossings: dict[str, dict[str, float]]  # reference → series → FLOPs; infinite if out of reach

    def ratio(self, reference: str, base: str, label: str) -> float | None:
        """How many times more compute the first series needs for a reference score; None if unreached."""
        own = self.crossings[reference]
        value = own[base] / own[label] if own[label] else math.nan
        return value if math.isfinite(value) and value > 0 else None


def forecast_core(
    series: Sequence[ScoreSeries], tasks: Sequence[str] = CORE17, references: Mapping[str, float] = GPT3_CORE
) -> CoreForecast | None:
    """Fit the pipeline to the series that have accuracies of every task; None if no series has."""
    known = {one.label: found for one in series if (found := one.checkpoints(tasks)) is not None}
    if not known:
        return None
    fit = fit_downstream(known, tasks)
    crossings = {
        name: {label: fit.compute_for(label, score) for label in known} for name, score in references.items()
    }
    return CoreForecast(tuple(one for one in series if one.label in known), known, fit, crossings)


def core_panel(
    forecast: CoreForecast,
    held: Mapping[str, Sequence[ScoredCheckpoint]],
    farthest: float,
    references: Mapping[str, float] = GPT3_CORE,
    title: str = "CORE",
    group: str = "",
) -> Panel:
    """CORE against compute: measured, forecast (dashed beyond), references and where curves cross them."""
    drawn: list[Series] = []
    reached = [c for own in forecast.crossings.values() for c in own.values() if 0 < c < 1e26]
    farthest = max([farthest, *(1.3 * c for c in reached)])
    for one in forecast.series:
        own = forecast.checkpoints[one.label]
        drawn.append(points(one.label, own.flops, own.score, **one.curve))
        inside = np.geomspace(own.flops.min(), own.flops.max(), CURVE_POINTS)
        beyond = np.geomspace(own.flops.max(), max(farthest, own.flops.max() * 1.01), CURVE_POINTS)
        drawn += [
            line(one.label, inside, forecast.fit.predict(one.label, inside), role="fit", **one.curve),
            line(
                one.label, beyond, forecast.fit.predict(one.label, beyond), role="extrapolated",
                style="dashed", **one.curve,
            ),
        ]  # fmt: skip
        crossed = [
            (c, references[name])
            for name, found in forecast.crossings.items()
            if 0 < (c := found[one.label]) < 1e26
        ]
        if crossed:
            x, y = tuple(row[0] for row in crossed), tuple(row[1] for row in crossed)
            drawn.append(
                Series(
                    one.label, "points", x, y, role="extrapolated", marker="star", note="reaches a reference",
                    **one.curve,
                )
            )  # fmt: skip
        drawn += _held(one, [(r.flops, r.core22) for r in held.get(one.label, ()) if r.core22 is not None])
    lines = tuple[tuple[Literal["x", "y"], float, str], ...](
        ("y", score, name + _ratio_words(forecast, name)) for name, score in references.items()
    )
    return Panel(
        title, COMPUTE, Axis("CORE (centred accuracy)"), tuple(drawn), lines,
        "Task laws, task sigmoids and one factor to CORE; dashed beyond the runs; squares were in no fit.",
        group=group,
    )  # fmt: skip


def _ratio_words(forecast: CoreForecast, reference: str) -> str:
    """Of two series: how many times more compute one needs than the other for a reference score."""
    labels = [one.label for one in forecast.series]
    if len(labels) != 2:
        return ""
    ratios = [forecast.ratio(reference, *pair) for pair in (labels, labels[::-1])]
    known = [ratio for ratio in ratios if ratio is not None and ratio >= 1]
    return f", {known[0]:.2f}×" if known else ""


def sigmoid_panels(forecast: CoreForecast) -> list[Panel]:
    """One panel for each task (accuracy against NLL, shared sigmoid), and the factor from tasks to CORE."""
    panels: list[Panel] = []
    for task in forecast.fit.tasks:
        drawn: list[Series] = []
        every: list[float] = []
        for one in forecast.series:
            own = forecast.checkpoints[one.label]
            drawn.append(points(one.label, own.nll[task], own.centered[task], **one.curve))
            every += own.nll[task].tolist()
        low, high = min(every), max(every)
        wide = 0.5 * (high - low)
        curve = forecast.fit.sigmoids[task]
        inside = np.linspace(low, high, CURVE_POINTS)
        drawn.append(line("sigmoid", inside, curve.predict(inside), role="fit"))
        for x in (np.linspace(max(low - wide, 0.0), low, 30), np.linspace(high, high + wide, 30)):
            drawn.append(line("sigmoid", x, curve.predict(x), role="extrapolated", style="dashed"))
        panels.append(
            Panel(
                task, Axis("task NLL", reverse=True), Axis("centred accuracy"), tuple(drawn), group=SIGMOIDS,
                columns=6,
            )
        )  # fmt: skip
    drawn = []
    highest = 0.0
    for one in forecast.series:
        own = forecast.checkpoints[one.label]
        mean = np.mean([own.centered[task] for task in forecast.fit.tasks], axis=0)
        highest = max(highest, float(mean.max()))
        drawn.append(points(one.label, mean, own.score, **one.curve))
    r = forecast.fit.r
    drawn.append(line(f"CORE = {r:.5f} × mean", [0.0, highest], [0.0, r * highest], role="fit"))
    count = len(forecast.fit.tasks)
    panels.append(
        Panel(
            f"{count} tasks to CORE", Axis(f"mean of {count} tasks"), Axis("CORE, 22 tasks"), tuple(drawn),
            group=SIGMOIDS, columns=6,
        )
    )  # fmt: skip
    return panels


def crossing_table(forecast: CoreForecast, base: str, references: Mapping[str, float] = GPT3_CORE) -> Table:
    """The compute each series needs for each reference score, and the ratio to the first series."""
    others = [one.label for one in forecast.series if one.label != base]
    rows = tuple(
        (
            name, score, *(_finite(forecast.crossings[name][one.label]) for one in forecast.series),
            *(forecast.ratio(name, base, label) for label in others),
        )
        for name, score in references.items()
    )  # fmt: skip
    labels = [f"{one.label} (FLOPs)" for one in forecast.series]
    return Table(
        "Compute forecast to match published scores",
        ("reference", "CORE", *labels, *(f"{base} over {label}" for label in others)),
        rows,
        "Forecasts far beyond the runs: they assume that the laws and sigmoids go on.",
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
