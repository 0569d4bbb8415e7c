"""The downstream analysis: does a better scaling law of the loss carry over to tasks?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from steepen.errors import SteepenError, UsageError, nearest
from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import ComputeFit, FitSettings
from steepen.laws.ladder import make_ladder
from steepen.model.arms import find_arm
from steepen.studies.answer import Answer, Axis, Panel, Series, Table
from steepen.studies.plotting import line, points
from steepen.studies.scores.score_forecasts import (
    CURVE_POINTS,
    MIN_LAW_RUNS,
    CoreForecast,
    core_panel,
    crossing_table,
    forecast_core,
    nll_laws,
    nll_panel,
    sigmoid_panels,
)
from steepen.studies.scores.score_ladders import (
    COMPUTE,
    LADDERS,
    METRICS,
    MULTIPLIERS,
    kl_depth_panels,
    multiplier_panels,
    multiplier_table,
    passes_panels,
    score_ladders,
    score_multipliers,
)
from steepen.studies.scores.score_residuals import (
    bar_panels,
    pool_answer_nll,
    pooled_panels,
    residual_table,
    task_bars,
)
from steepen.studies.scores.score_series import (
    Metric,
    ScoredCheckpoint,
    ScoreSeries,
    group_series,
    held_out_runs,
)
from steepen.utils.formatting import format_flops
from steepen.utils.json_io import json_safe

SECTION = "Appendix C, Corpus Transfer and Downstream Evaluation"
FORECASTS = "Forecasts beyond the ladders"
Held = Mapping[str, Sequence[ScoredCheckpoint]]
Predict = Callable[[float], Any]  # a metric at FLOPs


@dataclass
class Parts:
    """What the analysis has found so far."""

    findings: list[str] = field(default_factory=list[str])
    panels: list[Panel] = field(default_factory=list[Panel])
    tables: list[Table] = field(default_factory=list[Table])
    warnings: list[str] = field(default_factory=list[str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])


def downstream_answer(
    runs: Sequence[ScoredCheckpoint],
    *,
    reference: str = "vanilla",
    held_out: Sequence[str] = (),
    targets: Sequence[float] = (),
    arms: Sequence[str] = (),
    corpora: Mapping[str, str] | None = None,
) -> Answer:
    """Ladders, multipliers, residuals and forecasts of downstream scores, from runs that have them.

    `reference` is the arm that multipliers compare with, in every corpus of its own. Runs named by
    `held_out` (beginnings of names) take part in no fit. `targets` are FLOPs to forecast at.
    """
    scored = [run for run in runs if run.scored]
    if arms:
        wanted = {find_arm(name).name for name in arms}
        scored = [run for run in scored if run.arm in wanted]
    if not scored:
        raise UsageError(
            f"none of the {len(runs)} runs has scores; `steepen eval RUNS --data … --core …` adds them."
        )
    base = find_arm(reference).name
    if all(run.arm != base for run in scored):
        known = sorted({run.arm for run in scored})
        raise UsageError(
            f"there is no scored run of the reference {base!r}; the nearest are {nearest(base, known)}."
        )
    out = held_out_runs(scored, held_out)
    names = {run.run for run in out}
    everything = group_series(scored, corpora)
    held = {one.label: [run for run in one.runs if run.run in names] for one in everything}
    series = [left for one in everything if (left := one.without(names)).runs]
    farthest = max(
        [*targets, *(run.flops for run in out), 10 * max(run.flops for run in scored if run.run not in names)]
    )
    found = Parts()
    places = list(dict.fromkeys(one.corpus for one in series))
    for place in places:
        own = [one for one in series if one.corpus == place]
        _one_corpus(found, own, base, held, farthest, targets, "" if len(places) == 1 else f", {place}")
    if len(places) > 1:
        _corpora(found, series, base, held, farthest)
    found.panels += [*kl_depth_panels(series), *passes_panels(series)]
    return Answer(
        study="downstream",
        question=f"Do gains in loss over {base} carry over to downstream scores?",
        section=SECTION,
        findings=tuple(found.findings),
        values=json_safe(found.values),
        panels=tuple(found.panels),
        tables=tuple(found.tables),
        warnings=tuple(found.warnings),
        method=(
            f"{len(scored)} runs with scores, {len(out)} of them held out of every fit.",
            "Multipliers compare compute at an equal metric, interpolated between runs in log compute.",
            "CORE is forecast task by task: a law of the task's NLL for each series, one sigmoid from NLL to "
            "centred accuracy for all series, and one factor from the mean of the tasks to CORE.",
        ),
        runs=tuple(run.run for run in scored),
    )


def _one_corpus(
    found: Parts,
    series: Sequence[ScoreSeries],
    base: str,
    held: Held,
    farthest: float,
    targets: Sequence[float],
    suffix: str,
) -> None:
    reference = next((one for one in series if one.arm == base), None)
    if reference is None:
        found.warnings.append(f"there is no scored run of {base}{suffix}: nothing to compare with there")
        return
    values: dict[str, Any] = {}
    found.values[suffix.removeprefix(", ") or "scores"] = values
    multipliers = score_multipliers(series, reference)
    ladders = score_ladders(series, LADDERS + suffix)
    gains = multiplier_panels(series, reference, multipliers, MULTIPLIERS + suffix)
    found.panels += [replace(panel, title=panel.title + suffix) for panel in (*ladders, *gains)]
    if multipliers:
        found.tables.append(_titled(multiplier_table(multipliers, reference.label), suffix))
    for one in series:
        words = [
            f"{name} {rows[0].value:.2f}× → {rows[-1].value:.2f}×"
            for name, by_series in multipliers.items()
            if (rows := by_series.get(one.label, []))
        ]
        if words:
            found.findings.append(f"{one.label}: compute multiplier at equal {'; '.join(words)}.")
    values["multipliers"] = {
        name: {label: [[m.flops, m.value] for m in rows] for label, rows in by_series.items()}
        for name, by_series in multipliers.items()
    }
    pooled = pool_answer_nll(series)
    if pooled is not None:
        found.panels += [_grouped(panel, suffix) for panel in pooled_panels(series, pooled)]
        lowest = min(pooled.means, key=lambda label: pooled.means[label].mean)
        found.findings.append(
            f"Answer NLL follows the loss{suffix}: one line explains {pooled.fit.r_squared:.2%} of its "
            f"variance (residual SD {pooled.fit.sd:.4f}); {lowest} lies lowest, "
            f"{pooled.means[lowest].mean:+.4f} on average."
        )
        values["pooled"] = {
            "intercept": pooled.fit.intercept,
            "slope": pooled.fit.slope,
            "sd": pooled.fit.sd,
            "means": {label: row.mean for label, row in pooled.means.items()},
        }
    bars = task_bars(series, reference)
    if bars and bars[0].residuals:
        found.panels += [_grouped(panel, suffix) for panel in bar_panels(series, reference, bars)]
        found.tables += [_titled(residual_table(one), suffix) for one in bars]
        values["task_residuals"] = {
            one.runs: {label: {t: r.mean for t, r in left.items()} for label, left in one.residuals.items()}
            for one in bars
        }
    _forecasts(found, values, series, reference, held, farthest, targets, suffix)


def _forecasts(
    found: Parts,
    values: dict[str, Any],
    series: Sequence[ScoreSeries],
    reference: ScoreSeries,
    held: Held,
    farthest: float,
    targets: Sequence[float],
    suffix: str,
) -> None:
    """Loss, answer NLL and CORE beyond the ladders, of the series whose CORE can be forecast."""
    core = forecast_core(series)
    chosen = [one for one in series if core is None or one in core.series]
    group = FORECASTS + suffix
    loss = _loss_fit(chosen, reference)
    if loss is not None:
        values["loss_forecast"] = _loss_values(found, chosen, loss, reference, held)
        ends = [1.2 * one["multiplier"] * one["flops"] for one in values["loss_forecast"]["multipliers"]]
        panel = _loss_panel(chosen, loss, held, max([farthest, *ends]), group)
        saved = [
            line(
                f"{one['multiplier']:.2f}× the compute for {reference.label}",
                (one["flops"], one["multiplier"] * one["flops"]),
                [float(loss.arms[one["arm"]].predict(one["flops"]))] * 2,
                role="control",
            )
            for one in values["loss_forecast"]["multipliers"]
        ]
        found.panels.append(replace(panel, series=(*panel.series, *saved)))
    laws = nll_laws(chosen)
    if laws:
        found.panels.append(nll_panel(chosen, laws, held, farthest, group=group))
        values["nll_forecast"] = _misses(
            found, "answer NLL", held, lambda run: run.nll,
            {label: law.predict for label, law in laws.items()},
        )  # fmt: skip
    if core is None:
        return
    found.panels.append(core_panel(core, held, farthest, group=group))
    found.panels += [_grouped(panel, suffix) for panel in sigmoid_panels(core)]
    if reference in core.series:
        found.tables.append(_titled(crossing_table(core, reference.label), suffix))
        found.findings += _ratio_sentences(core, reference.label)

    def predictor(label: str) -> Predict:
        return lambda flops: core.fit.predict(label, flops)[0]

    at_targets = [
        (one.label, flops, float(core.fit.predict(one.label, flops)[0]))
        for flops in targets
        for one in core.series
    ]
    values["core_forecast"] = {
        "r": core.fit.r,
        "crossings": core.crossings,
        "held_out": _misses(
            found,
            "CORE",
            held,
            lambda run: run.core22,
            {one.label: predictor(one.label) for one in core.series},
        ),
        "targets": [{"arm": label, "flops": flops, "core": score} for label, flops, score in at_targets],
    }
    found.findings += [
        f"{label} at {format_flops(flops)} FLOPs: CORE {score:.4f} forecast."
        for label, flops, score in at_targets
    ]


def _ratio_sentences(core: CoreForecast, base: str) -> list[str]:
    sentences: list[str] = []
    for one in core.series:
        if one.label == base:
            continue
        known = [(n, r) for n in core.crossings if (r := core.ratio(n, base, one.label)) is not None]
        if known:
            words = f"{known[0][1]:.2f}× for {known[0][0]} to {known[-1][1]:.2f}× for {known[-1][0]}"
            sentences.append(
                f"{base} is forecast to need {words} the compute of {one.label} to match their CORE."
            )
    return sentences


def _loss_fit(series: Sequence[ScoreSeries], reference: ScoreSeries) -> ComputeFit | None:
    ladders = {
        one.label: make_ladder(one.label, *one.column(lambda run: run.loss)[:2])
        for one in series
        if len(one.runs) >= MIN_LAW_RUNS
    }
    if reference.label not in ladders:
        return None
    try:
        return fit_compute(ladders, FitSettings(reference.label, method="paper", reference_law="free-fit"))
    except SteepenError:
        return None


def _loss_panel(
    series: Sequence[ScoreSeries], fit: ComputeFit, held: Held, farthest: float, group: str
) -> Panel:
    drawn: list[Series] = []
    for one in series:
        flops, values, runs = one.column(lambda run: run.loss)
        drawn.append(points(one.label, flops, values, runs, **one.curve))
        if one.label in fit.arms:
            law = fit.arms[one.label]
            inside = np.geomspace(flops.min(), flops.max(), CURVE_POINTS)
            beyond = np.geomspace(flops.max(), max(farthest, flops.max() * 1.01), CURVE_POINTS)
            detail = f"γ = {law.gamma.value:.4f}"
            drawn += [
                line(one.label, inside, law.predict(inside), role="fit", detail=detail, **one.curve),
                line(
                    one.label, beyond, law.predict(beyond), role="extrapolated", style="dashed", **one.curve
                ),
            ]
        out = held.get(one.label, ())
        if out:
            x, y = tuple(run.flops for run in out), tuple(run.loss for run in out)
            drawn.append(
                Series(one.label, "points", x, y, role="held_out", marker="square", filled=False, **one.curve)
            )
    return Panel(
        "validation loss", COMPUTE, Axis("validation loss (nats per token)"), tuple(drawn), group=group,
        caption="Laws by the paper's method: one irreducible loss, from the reference.",
    )  # fmt: skip


def _loss_values(
    found: Parts,
    series: Sequence[ScoreSeries],
    fit: ComputeFit,
    reference: ScoreSeries,
    held: Held,
) -> dict[str, Any]:
    laws = fit.arms
    values = _misses(
        found, "validation loss", held, lambda run: run.loss,
        {label: law.predict for label, law in laws.items()},
    )  # fmt: skip
    ratios: list[dict[str, Any]] = []
    for one in series:
        if one.label == reference.label or one.label not in laws:
            continue
        for run in held.get(one.label, ()):
            value = float(laws[reference.label].compute_for(laws[one.label].predict(run.flops))) / run.flops
            ratios.append({"arm": one.label, "flops": run.flops, "multiplier": value})
            found.findings.append(
                f"At {format_flops(run.flops)} FLOPs the fitted laws give {one.label} a multiplier of "
                f"{value:.2f}× over {reference.label}."
            )
    return {"held_out": values, "multipliers": ratios}


def _misses(
    found: Parts, name: str, held: Held, read: Metric, predict: Mapping[str, Predict]
) -> list[dict[str, Any]]:
    """Held-out runs against the forecast of fits without them."""
    rows: list[dict[str, Any]] = []
    for label, runs in held.items():
        for run in runs:
            observed = read(run)
            if observed is None or label not in predict:
                continue
            forecast = float(predict[label](run.flops))
            rows.append(
                {"arm": label, "run": run.run, "flops": run.flops, "observed": observed, "forecast": forecast}
            )
            found.findings.append(
                f"{label}, held out at {format_flops(run.flops)} FLOPs: {name} {observed:.4f} against "
                f"{forecast:.4f} forecast ({observed - forecast:+.4f})."
            )
    return rows


def _corpora(found: Parts, series: Sequence[ScoreSeries], base: str, held: Held, farthest: float) -> None:
    """Each arm's gain within each corpus, and each arm that several corpora have, corpus against corpus."""
    for kind in METRICS:
        drawn: list[Series] = []
        for place in dict.fromkeys(one.corpus for one in series):
            own = [one for one in series if one.corpus == place]
            reference = next((one for one in own if one.arm == base), None)
            if reference is None:
                continue
            for label, rows in score_multipliers(own, reference).get(kind.name, {}).items():
                arm = next(one for one in own if one.label == label)
                if rows and any(o.arm == arm.arm and o.corpus != place for o in series):
                    x, y = [m.flops for m in rows], [m.value for m in rows]
                    drawn += [points(label, x, y, **arm.curve), line(label, x, y, **arm.curve)]
        if drawn:
            axis = Axis(f"compute of {base} (FLOPs)", "log")
            found.panels.append(
                Panel(
                    f"at equal {kind.name}", axis, Axis("compute multiplier", "log"), tuple(drawn),
                    (("y", 1.0, base),), "Both on the same corpus.", group="Multipliers within each corpus",
                )
            )  # fmt: skip
    for arm in dict.fromkeys(one.arm for one in series):
        own = [one for one in series if one.arm == arm]
        if len({one.corpus for one in own}) < 2:
            continue
        group = f"Corpora compared: {arm}"
        fits = {one.label: fit for one in own if (fit := _loss_fit([one], one)) is not None}
        joined = [
            _loss_panel([one], fits[one.label], {}, farthest, group) for one in own if one.label in fits
        ]
        if joined:
            curves = tuple(s for panel in joined for s in panel.series)
            found.panels.append(
                Panel("validation loss, each on its own corpus", COMPUTE, joined[0].y, curves, group=group)
            )
        laws = nll_laws(own)
        if laws:
            found.panels.append(nll_panel(own, laws, {}, farthest, group=group))
        core = forecast_core(own)
        if core is None or len(core.series) < 2:
            continue
        found.panels.append(core_panel(core, {}, farthest, group=group))
        base_label = core.series[0].label
        found.tables.append(_titled(crossing_table(core, base_label), f", {arm} by corpus"))
        found.findings += _ratio_sentences(core, base_label)
        found.values[f"corpora of {arm}"] = {"r": core.fit.r, "crossings": core.crossings}


def _titled(table: Table, suffix: str) -> Table:
    return replace(table, title=table.title + suffix)


def _grouped(panel: Panel, suffix: str) -> Panel:
    return replace(panel, group=panel.group + suffix)
