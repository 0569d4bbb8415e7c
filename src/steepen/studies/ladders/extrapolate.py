"""The extrapolation study: does a ladder's law predict a held-out, deeper rung?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.laws.analysis import LadderAnalysis
from steepen.laws.verdict.holdout import HeldOutLoss
from steepen.model.arms import find_arm
from steepen.recipe.flops import mean_flops_per_token
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, Table
from steepen.studies.context import Arms, StudyContext, find_arms
from steepen.studies.ladders.ladder_runs import (
    JudgedLadders,
    LadderSpec,
    MeasuredLadder,
    judge_ladders,
    ladder_spec,
    ladders_with_enough_rungs,
    repeated_data_warnings,
    run_ladders,
    to_ladders,
)
from steepen.studies.ladders.verdict_report import (
    ladder_panels,
    runs_table,
    study_fits,
    study_verdicts,
    verdict_table,
)
from steepen.studies.plotting import line
from steepen.studies.scores.downstream import analyse_downstream
from steepen.utils.formatting import format_flops, percent
from steepen.utils.json_io import json_safe

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
    ladders, notes = ladders_with_enough_rungs(
        context, [ladder_spec(context, arm, rungs) for arm in chosen], reference.name
    )
    own = next((ladder for ladder in ladders if ladder.arm.name == target.name), None)
    if own is None:
        raise UsageError(f"there is no law of {target.name} to extrapolate: {'; '.join(notes)}.")
    if depth <= max(own.depths):
        raise UsageError(
            f"the held-out depth {depth} is inside the ladder (up to d{max(own.depths)}); give a deeper one "
            "with --hold-out."
        )
    planned = own.recipe.at(target, depth, context.size_rule)
    context.spec(planned)  # raises if the data are too few, before the ladder is trained
    measured: list[MeasuredLadder] = yield from run_ladders(context, ladders, seeds)
    law = judge_ladders(measured, reference.name).analysis.primary_fit.arms[own.label]
    expected = mean_flops_per_token(target, planned.shape, planned.schedule).total * planned.tokens
    forecast = float(law.predict(expected))
    held: list[MeasuredLadder] = yield from run_ladders(context, [replace(own, depths=(depth,))], seeds)
    judged = judge_ladders(measured, reference.name, hold_out=to_ladders(held))
    answer = _answer(own, depth, forecast, judged, measured, held, notes)
    answer = _with_projection(answer, judged.analysis, own, reference.name, grid.project)
    return _with_score_forecasts(answer, measured, held, reference.name)


def _answer(
    own: LadderSpec,
    depth: int,
    forecast: float,
    judged: JudgedLadders,
    measured: Sequence[MeasuredLadder],
    held: Sequence[MeasuredLadder],
    notes: Sequence[str],
) -> Answer:
    analysis = judged.analysis
    score = analysis.hold_out[0]
    within = score.interval[0] <= score.observed <= score.interval[1]
    low, high = score.interval
    sentence = (
        f"{own.label} at d{depth}, {10**score.decades_beyond:.1f}× beyond its ladder: {score.observed:.4f} "
        f"against {score.forecast:.4f} forecast ({low:.4f} to {high:.4f}), an error of {score.error:+.4f}, "
        f"{'inside' if within else 'outside'} the forecast's interval. The law would need "
        f"{score.compute_factor:.2f}× that compute for the observed loss."
    )
    drawn = ladder_panels(analysis, measured)
    irreducible = analysis.primary_fit.arms[own.label].e.value
    panels = (
        _with_forecast(drawn.loss, own, score, measured, analysis, 0.0),
        _with_forecast(drawn.reducible_loss, own, score, measured, analysis, irreducible),
    )
    row = (
        own.label, depth, score.flops, score.observed, score.forecast, *score.interval, score.error,
        score.error_in_sigma, score.error_in_standard_errors, score.p_value, score.compute_factor,
    )  # fmt: skip
    columns = (
        "arm", "depth", "FLOPs", "observed", "forecast", "low", "high", "observed − forecast",
        "in σ of a run", "in forecast errors", "p", "compute factor",
    )  # fmt: skip
    verdicts = study_verdicts(analysis, measured)
    everything = [*measured, *held]
    return Answer(
        study="extrapolate",
        question=f"Does the law fitted to the ladder predict {own.label} at d{depth}?",
        section=SECTION,
        findings=(sentence,),
        values=json_safe(
            {"hold_out": asdict(score), "forecast_before_the_run": forecast, "flops": analysis.to_dict()}
        ),
        verdicts=verdicts,
        fits=study_fits(analysis, measured),
        panels=panels,
        tables=(
            Table(
                "The held-out run",
                columns,
                (row,),
                "Below zero the run is better than forecast.",
                arm_column=0,
            ),
            verdict_table(analysis),
            runs_table(everything),
        ),
        warnings=(*notes, *analysis.warnings, *repeated_data_warnings(everything)),
        method=(
            "The ladder is fitted, and its forecast recorded, before the held-out run is requested; that run "
            "takes part in no fit.",
        ),
        runs=tuple(record.run for one in everything for record in one.records),
    )


def _with_projection(
    answer: Answer, analysis: LadderAnalysis, own: LadderSpec, reference: str, multiples: Sequence[float]
) -> Answer:
    """The answer with the fitted multiplier beyond the ladders, and its values at multiples of the run."""
    if own.label == reference:
        return answer
    compute = analysis.hold_out[0].flops
    fit = analysis.primary_fit
    low = min(law.flops_range[0] for law in fit.arms.values())
    x = np.geomspace(low, compute * max(1.0, *multiples), 80)
    curve = analysis.judge.multipliers(own.label, reference, x, extrapolate=True)
    if not curve:
        return answer
    end = min(fit.arms[own.label].flops_range[1], fit.arms[reference].flops_range[1])
    inside, beyond = [m for m in curve if m.flops <= end], [m for m in curve if m.flops > end]
    fields: dict[str, Any] = {"arm": own.arm.name, "variant": own.variant}
    note = f"{percent(fit.settings.confidence)} band"
    series = [
        Series(
            own.label, "band", tuple(m.flops for m in curve), tuple(m.low for m in curve),
            tuple(m.high for m in curve), role="fit", note=note, **fields,
        ),
        line(own.label, [m.flops for m in inside], [m.value for m in inside], role="fit", **fields),
        line(
            own.label, [m.flops for m in beyond], [m.value for m in beyond], role="extrapolated",
            style="dashed", **fields,
        ),
    ]  # fmt: skip
    at = analysis.judge.multipliers(own.label, reference, compute * np.array(multiples), extrapolate=True)
    series.append(
        Series(
            own.label, "points", tuple(m.flops for m in at), tuple(m.value for m in at),
            role="extrapolated", note="projected", marker="star", low=tuple(m.low for m in at),
            high=tuple(m.high for m in at), **fields,
        )
    )  # fmt: skip
    panel = Panel(
        f"Compute multiplier over {reference}, projected", Axis(f"compute of {reference} (FLOPs)", "log"),
        Axis("multiplier", "log"), tuple(series),
        (("y", 1.0, reference), *(("x", m.flops, f"{m.value:.2f}×") for m in at)),
        "From the two fitted laws; a projection, not a measurement, beyond the ladders.",
    )  # fmt: skip
    words = ", ".join(f"{m.value:.2f}× ({m.low:.2f} to {m.high:.2f}) at {format_flops(m.flops)}" for m in at)
    projected = [{"flops": m.flops, "value": m.value, "low": m.low, "high": m.high} for m in at]
    return replace(
        answer,
        findings=(
            *answer.findings,
            f"The fitted laws project a multiplier over {reference} of {words} FLOPs.",
        ),
        panels=(*answer.panels, panel),
        values={**answer.values, "projected_multipliers": projected},
    )


def _with_score_forecasts(
    answer: Answer, measured: Sequence[MeasuredLadder], held: Sequence[MeasuredLadder], reference: str
) -> Answer:
    """The answer with forecasts of answer NLL and CORE, where the runs have been evaluated."""
    runs = [run for one in (*measured, *held) for run in one.scores.runs]
    if not any(run.nll is not None for run in runs):
        return answer
    names = [record.run for one in held for record in one.records]
    found = analyse_downstream(runs, reference=reference, held_out=names)
    return replace(
        answer,
        findings=(*answer.findings, *found.forecasts.findings),
        panels=(*answer.panels, *found.forecasts.panels),
        tables=(*answer.tables, *found.forecasts.tables),
        values={**answer.values, "downstream": json_safe(found.scores.values)},
    )


def _with_forecast(
    panel: Panel,
    own: LadderSpec,
    score: HeldOutLoss,
    measured: Sequence[MeasuredLadder],
    analysis: LadderAnalysis,
    subtract: float,
) -> Panel:
    """The panel with every law dashed up to the held-out run's compute, and that run as a square.

    `subtract` is taken off every loss.
    """
    added: list[Series] = []
    for one in measured:
        name, law = one.spec.label, analysis.primary_fit.arms[one.spec.label]
        x = np.geomspace(law.flops_range[1], max(score.flops, law.flops_range[1] * 1.01), 30)
        added.append(
            line(name, x, law.predict(x) - subtract, arm=one.spec.arm.name, role="extrapolated",
                 style="dashed")
        )  # fmt: skip
    x, y = (score.flops,), (score.observed - subtract,)
    added.append(Series(own.label, "points", x, y, arm=own.arm.name, role="held_out", marker="square"))
    return replace(panel, series=(*panel.series, *added))
