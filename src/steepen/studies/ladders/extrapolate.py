"""The extrapolation study: does a ladder's law predict a held-out, deeper rung?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.laws.analysis import LadderAnalysis
from steepen.model.arms import find_arm
from steepen.studies.answer import Axis, Draft, Panel, Series, Study
from steepen.studies.cells import table
from steepen.studies.context import Arms, StudyContext, find_arms
from steepen.studies.ladders import ladder_runs
from steepen.studies.ladders import verdict_report as report
from steepen.studies.ladders.ladder_runs import LadderSpec, MeasuredLadder
from steepen.studies.plotting import line, points
from steepen.studies.scores.downstream import analyse_downstream
from steepen.utils.formatting import format_flops

SECTION = "Section 4.3, Extrapolation of Compute-Optimal Scaling Law"


def extrapolate(
    context: StudyContext,
    *,
    arms: Arms = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (),
    hold_out: int | None = None,
) -> Study:
    """Section "Extrapolation of Compute-Optimal Scaling Law" (4.3).

    Runs and fits the ladders, records the forecast for a deeper rung, and only then trains that rung and
    scores the forecast: in loss, in standard errors, and in compute.
    """
    grid = context.preset.grids.extrapolate
    chosen = find_arms(arms or (context.preset.reference, grid.arm))
    target, depth = chosen[-1], hold_out or grid.depth
    reference = find_arm(context.preset.reference)
    if reference.name not in [arm.name for arm in chosen]:
        chosen.insert(0, reference)
    ladders, notes = ladder_runs.ladders_with_enough_rungs(
        context, [ladder_runs.ladder_spec(context, arm, rungs) for arm in chosen], reference.name
    )
    own = next((ladder for ladder in ladders if ladder.arm.name == target.name), None)
    if own is None:
        raise UsageError(f"there is no law of {target.name} to extrapolate: {'; '.join(notes)}.")
    if depth <= max(own.depths):
        raise UsageError(
            f"the held-out depth {depth} is inside the ladder (up to d{max(own.depths)}); give a deeper one "
            "with `hold_out`."
        )
    context.spec(own.run(context, depth))  # raises if the data are too few, before the ladder is trained
    measured: list[MeasuredLadder] = yield from ladder_runs.run_ladders(context, ladders, seeds)
    law = ladder_runs.judge_ladders(context, measured, reference.name).primary_fit.arms[own.label]
    # Before the held-out run is requested: what a fit has seen cannot test it.
    forecast = float(law.predict(own.expected_flops(context, depth)))
    held: list[MeasuredLadder] = yield from ladder_runs.run_ladders(
        context, [replace(own, depths=(depth,))], seeds
    )
    analysis = ladder_runs.judge_ladders(
        context, measured, reference.name, hold_out=ladder_runs.to_ladders(held)
    )
    everything = [*measured, *held]
    draft = Draft(
        values={"forecast_before_the_run": forecast},
        warnings=[*notes, *analysis.warnings, *ladder_runs.repeated_data_warnings(everything)],
        method=[
            "The ladder is fitted, and its forecast recorded, before the held-out run is requested; that run "
            "takes part in no fit."
        ],
        runs=[record.run for one in everything for record in one.records],
    )
    report.add_laws(draft, analysis, measured)
    _add_held_out(draft, own, depth, analysis, measured)
    draft.tables += [report.verdict_table(analysis), report.runs_table(everything)]
    _add_projection(draft, analysis, own, grid.project)
    _add_score_forecasts(draft, measured, held, reference.name)
    question = f"Does the law fitted to the ladder predict {own.label} at d{depth}?"
    return draft.answer("extrapolate", question, SECTION)


def _add_held_out(
    draft: Draft, own: LadderSpec, depth: int, analysis: LadderAnalysis, measured: Sequence[MeasuredLadder]
) -> None:
    """Add the forecast of the held-out run against what came out: a sentence, a row and the panels."""
    score = analysis.hold_out[0]
    low, high = score.interval
    draft.values = {"hold_out": asdict(score), **draft.values}
    draft.findings.append(
        f"{own.label} at d{depth}, {10**score.decades_beyond:.1f}× beyond its ladder: {score.observed:.4f} "
        f"against {score.forecast:.4f} forecast ({low:.4f} to {high:.4f}), an error of {score.error:+.4f}, "
        f"{'inside' if low <= score.observed <= high else 'outside'} the forecast's interval. The law would "
        f"need {score.compute_factor:.2f}× that compute for the observed loss."
    )
    loss, reducible = report.law_panels(analysis, measured)
    irreducible = analysis.primary_fit.arms[own.label].e.value
    draft.panels.append(_with_forecast(loss, own, measured, analysis, 0.0))
    draft.panels.append(_with_forecast(reducible, own, measured, analysis, irreducible))
    row = {
        "arm": own.label, "depth": depth, "FLOPs": score.flops, "observed": score.observed,
        "forecast": score.forecast, "low": low, "high": high, "observed − forecast": score.error,
        "in σ of a run": score.error_in_sigma, "in forecast errors": score.error_in_standard_errors,
        "p": score.p_value, "compute factor": score.compute_factor,
    }  # fmt: skip
    caption = "Below zero the run is better than forecast."
    draft.tables.append(table("The held-out run", [row], caption))


def _add_projection(
    draft: Draft, analysis: LadderAnalysis, own: LadderSpec, multiples: Sequence[float]
) -> None:
    """Add the fitted multiplier beyond the ladders, and its values at multiples of the held-out run."""
    compute, fit, reference = analysis.hold_out[0].flops, analysis.primary_fit, analysis.request.reference
    low = min(law.flops_range[0] for law in fit.arms.values())
    x = np.geomspace(low, compute * max(1.0, *multiples), 80)
    beside = own.label != reference
    curve = analysis.judge.multipliers(own.label, reference, x, extrapolate=True) if beside else []
    if not curve:
        return
    end = min(fit.arms[own.label].flops_range[1], fit.arms[reference].flops_range[1])
    inside, beyond = [m for m in curve if m.flops <= end], [m for m in curve if m.flops > end]
    fields: dict[str, Any] = {"arm": own.arm.name, "variant": own.variant}
    at = analysis.judge.multipliers(own.label, reference, compute * np.array(multiples), extrapolate=True)
    star = points(
        own.label, [m.flops for m in at], [m.value for m in at], role="extrapolated", note="projected",
        marker="star", **fields,
    )  # fmt: skip
    series = (
        report.multiplier_band(own.label, curve, fit.settings.confidence, role="fit", **fields),
        report.multiplier_line(own.label, inside, role="fit", **fields),
        report.multiplier_line(own.label, beyond, role="extrapolated", style="dashed", **fields),
        replace(star, low=tuple(m.low for m in at), high=tuple(m.high for m in at)),
    )
    draft.panels.append(
        Panel(
            f"Compute multiplier over {reference}, projected",
            Axis(f"compute of {reference} (FLOPs)", "log"), Axis("multiplier", "log"), series,
            (("y", 1.0, reference), *(("x", m.flops, f"{m.value:.2f}×") for m in at)),
            "From the two fitted laws; a projection, not a measurement, beyond the ladders.",
        )
    )  # fmt: skip
    words = ", ".join(f"{m.value:.2f}× ({m.low:.2f} to {m.high:.2f}) at {format_flops(m.flops)}" for m in at)
    draft.findings.append(f"The fitted laws project a multiplier over {reference} of {words} FLOPs.")
    draft.values["projected_multipliers"] = [
        {"flops": m.flops, "value": m.value, "low": m.low, "high": m.high} for m in at
    ]


def _add_score_forecasts(
    draft: Draft, measured: Sequence[MeasuredLadder], held: Sequence[MeasuredLadder], reference: str
) -> None:
    """Add forecasts of answer NLL and CORE, where the runs have been evaluated."""
    runs = [run for one in (*measured, *held) for run in one.scores.runs]
    if any(run.nll is not None for run in runs):
        names = [record.run for one in held for record in one.records]
        found = analyse_downstream(runs, reference=reference, held_out=names)
        draft.findings += found.forecasts.findings
        draft.panels += found.forecasts.panels
        draft.tables += found.forecasts.tables
        draft.values["downstream"] = found.scores.values


def _with_forecast(
    panel: Panel, own: LadderSpec, measured: Sequence[MeasuredLadder], analysis: LadderAnalysis, less: float
) -> Panel:
    """The panel with every law dashed up to the held-out run, a square; `less` is taken off every loss."""
    added, score = list[Series](), analysis.hold_out[0]
    for one in measured:
        name, law = one.spec.label, analysis.primary_fit.arms[one.spec.label]
        x = np.geomspace(law.flops_range[1], max(score.flops, law.flops_range[1] * 1.01), 30)
        fields: dict[str, Any] = {"arm": one.spec.arm.name, "role": "extrapolated", "style": "dashed"}
        added.append(line(name, x, law.predict(x) - less, **fields))
    x, y = (score.flops,), (score.observed - less,)
    added.append(Series(own.label, "points", x, y, arm=own.arm.name, role="held_out", marker="square"))
    return replace(panel, series=(*panel.series, *added))
