"""Verdicts, fits, tables and panels of analysed ladders: shared by every ladder study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.laws.verdict.multipliers import Multiplier
from steepen.recipe.hyperparameters import with_paper_code
from steepen.results.table import columns_of
from steepen.studies.answer import Axis, Draft, Panel, Series, StudyFit, StudyVerdict, Table
from steepen.studies.cells import table
from steepen.studies.ladders.ladder_runs import Measure, MeasuredLadder, cost_of
from steepen.studies.plotting import line, points
from steepen.studies.verdict_row import LawRow, law_rows
from steepen.utils.formatting import cost_axis, percent


def add_analysis(draft: Draft, analysis: LadderAnalysis, measured: Sequence[MeasuredLadder]) -> None:
    """Add all that there is to say of ladders as functions of FLOPs, or of seconds beside these."""
    add_laws(draft, analysis, measured)
    draft.panels += ladder_panels(analysis, measured)
    draft.tables.append(verdict_table(analysis))
    if _measure(analysis) == "flops":
        draft.tables += [hypotheses_table(analysis), *paper_method_tables(analysis)]


def add_laws(draft: Draft, analysis: LadderAnalysis, measured: Sequence[MeasuredLadder]) -> None:
    """Add the numbers, the verdicts, and the law of every ladder by every method."""
    by, ladders = _measure(analysis), {one.spec.label: one for one in measured}
    draft.values[by] = analysis.to_dict()
    draft.verdicts += [
        StudyVerdict(verdict, **ladders[name].curve, primary=by == "flops")
        for name, verdict in analysis.verdicts.items()
    ]
    for method, fit in analysis.fits.items():
        for name, law in fit.arms.items():
            own = ladders[name]
            runs = tuple(record.run for record in own.records)
            unit = analysis.request.unit
            draft.fits.append(StudyFit(law, "loss", unit, **own.curve, method=method, runs=runs))


def _measure(analysis: LadderAnalysis) -> Measure:
    return "seconds" if analysis.request.unit == "seconds" else "flops"


def verdict_table(analysis: LadderAnalysis) -> Table:
    """One row per ladder: its three answers with their numbers, and its exponent."""
    by = _measure(analysis)
    noun = cost_axis(by).noun
    shown = [column for column in columns_of(LawRow).values() if column.shown]
    rows = [{column.header: column.of(row) for column in shown} for row in law_rows(analysis)]
    title = f"Verdicts against {analysis.request.reference}" + ("" if by == "flops" else f", per {noun}")
    many = analysis.request.adjust and len(analysis.verdicts) > 1
    shared = "Words hold for all arms together (Holm); p is each arm alone. " if many else ""
    levels = sorted({verdict.rule.level for verdict in analysis.verdicts.values()}, reverse=True)
    widths = " or ".join(percent(1 - level) for level in levels or [analysis.request.level])
    caption = (
        f"The multiplier is the {noun} the reference needs over the arm's for the same loss, the mean over "
        f"the range both cover, with {widths} intervals. {shared}"
        f"γ of L = E + A·(C/C0)^−γ with {percent(analysis.request.confidence)} intervals that count E as "
        "unknown."
    )
    return table(title, rows, caption)


def hypotheses_table(analysis: LadderAnalysis) -> Table:
    """Each arm's multipliers beyond the ladder under every hypothesis that is not rejected."""
    rows: list[dict[str, Any]] = []
    for name, verdict in analysis.verdicts.items():
        near, far = verdict.predictions[:2]
        rows.append({
            "arm": name, "exponent: × at 10×": near.exponent, "exponent: × at 1000×": far.exponent,
            "exponent: p": verdict.delta_e.p_value, "irreducible loss: × at 10×": near.irreducible,
            "irreducible loss: × at 1000×": far.irreducible,
            "irreducible loss: p": verdict.delta_gamma_free.p_value,
        })  # fmt: skip
    caption = (
        "The compute multiplier at 10 and 1000 times the reference's top budget under either hypothesis: "
        "a better exponent above one irreducible loss, or a lower irreducible loss with one exponent. "
        "Fitted and extrapolated, not measured. A small p rejects a hypothesis, whose multipliers are "
        "then left out; if neither is rejected, both are open."
    )
    if analysis.one_e_rejected:
        caption += " Arms do not share one E here: those under exponent are by each arm's own E and γ."
    return table("Exponent and irreducible-loss hypotheses", rows, caption)


def paper_method_tables(analysis: LadderAnalysis) -> list[Table]:
    """Every ladder's law by the paper's method, beside the joint fit's exponent; [] without both fits."""
    if not {"joint", "paper"} <= analysis.fits.keys():
        return []
    joint, paper = analysis.fits["joint"], analysis.fits["paper"]
    rows = [
        {
            "arm": name, "γ": law.gamma.value, "standard error": law.slope_standard_error,
            "log A": law.log_a.value, "γ of the joint fit": joint.arms[name].gamma.value,
        }
        for name, law in paper.arms.items()
        if name in joint.arms
    ]  # fmt: skip
    caption = (
        f"E = {next(iter(paper.arms.values())).e.value:.4f} from {analysis.request.reference} by Huber loss, "
        "then a regression of log(L − E) on log C for each ladder, as the paper's authors do; A is at C0 = "
        f"{paper.c0:.3g} FLOPs. The standard error takes E as known, so it is too small."
    )
    return [table("Laws by the paper's method", rows, caption)]


def law_panels(analysis: LadderAnalysis, measured: Sequence[MeasuredLadder]) -> tuple[Panel, Panel]:
    """Loss and reducible loss against cost, with the fitted laws."""
    by, head = _measure(analysis), analysis.primary_fit
    axis = cost_axis(by)
    group = "Laws" if by == "flops" else f"Laws and multipliers per {axis.noun}"
    loss: list[Series] = []
    reducible: list[Series] = []
    for one in measured:
        name, law, records = one.spec.label, head.arms[one.spec.label], one.records
        x = [cost_of(record, by) for record in records]
        y = np.array([record.validation_loss for record in records])
        runs = [record.run for record in records]
        grid = np.geomspace(min(x), max(x), 60)
        for series, less, detail in ((loss, 0.0, f"γ = {law.gamma.value:.4f}"), (reducible, law.e.value, "")):
            series.append(points(name, x, y - less, runs, **one.curve))
            series.append(line(name, grid, law.predict(grid) - less, role="fit", detail=detail, **one.curve))
    one_e = (
        f"one irreducible loss E = {next(iter(head.arms.values())).e.value:.4f}, "
        f"fitted {'jointly' if head.settings.method == 'joint' else 'to the reference'}."
    )
    own_e = "an irreducible loss for each arm, since one for all is rejected."
    return (
        Panel(
            f"Loss against {axis.noun}", Axis(axis.label, "log"), Axis("validation loss (nats per token)"),
            tuple(loss), group=group,
            caption=f"One point per run; lines are laws with {own_e if analysis.one_e_rejected else one_e}",
        ),
        Panel(
            f"Reducible loss against {axis.noun}", Axis(axis.label, "log"), Axis("loss − E", "log"),
            tuple(reducible), group=group,
            caption="A power law is a straight line here; a better exponent is a steeper one."
            + (" Each arm's own E is subtracted." if analysis.one_e_rejected else ""),
        ),
    )  # fmt: skip


def ladder_panels(analysis: LadderAnalysis, measured: Sequence[MeasuredLadder]) -> list[Panel]:
    """Loss with fitted laws and multipliers with bands; by FLOPs also reducible loss and exponents."""
    loss, reducible = law_panels(analysis, measured)
    curves = {one.spec.label: one.curve for one in measured}
    multipliers = multiplier_panel(analysis, curves)
    if _measure(analysis) != "flops":
        return [loss, replace(multipliers, group=loss.group)]
    exponents = [exponent_panel(analysis, curves)]
    if len(analysis.fits) > 1:
        by_paper = exponent_panel(analysis, curves, "paper")
        exponents.append(replace(by_paper, title="Exponent against constant, paper's method"))
    grouped = [replace(panel, group=loss.group) for panel in exponents]
    return [loss, reducible, replace(multipliers, lead=True), *grouped]


def multiplier_line(name: str, found: Sequence[Multiplier], **fields: Any) -> Series:
    """Multipliers against compute, as a line."""
    return line(name, [m.flops for m in found], [m.value for m in found], **fields)


def multiplier_band(name: str, found: Sequence[Multiplier], level: float, **fields: Any) -> Series:
    """The intervals of multipliers."""
    x, low, high = zip(*((m.flops, m.low, m.high) for m in found), strict=True)
    return Series(name, "band", x, low, high, note=f"{percent(level)} band", **fields)


def multiplier_panel(analysis: LadderAnalysis, curves: dict[str, dict[str, Any]]) -> Panel:
    """Multipliers over the reference; `curves` are the fields of `Series` that give each arm its colour."""
    axis, reference = cost_axis(analysis.request.unit), analysis.request.reference
    level = analysis.request.confidence
    series: list[Series] = []
    for name, found in analysis.multipliers.items():
        series += _multiplier_curves(name, found, level, curves[name])
    return Panel(
        f"{axis.noun.capitalize()} multiplier over {reference}",
        Axis(f"{axis.label} of {reference}", "log"),
        Axis(f"multiplier (× less {axis.noun})", "log"),
        tuple(series),
        lines=(("y", 1.0, reference),),
        caption="A flat curve means a better constant, a rising one a better exponent (or a lower "
        f"irreducible loss). Points interpolate between measurements, with {percent(level)} bands; dotted "
        "lines are the fitted laws.",
    )


def _multiplier_curves(
    name: str, found: Sequence[Multiplier], level: float, curve: dict[str, Any]
) -> list[Series]:
    """What is interpolated as points with a band, what is fitted dotted, and dashed beyond the runs."""
    ordered, series = sorted(found, key=lambda m: m.flops), list[Series]()
    if interpolated := [m for m in ordered if m.method == "interpolated"]:
        x, y = [m.flops for m in interpolated], [m.value for m in interpolated]
        series += [points(name, x, y, **curve), line(name, x, y, **curve)]
        series.append(multiplier_band(name, interpolated, level, **curve))
    fitted = [m for m in ordered if m.leads]
    inside, outside = ([m for m in fitted if m.extrapolated == out] for out in (False, True))
    if inside:
        series.append(multiplier_line(name, inside, role="fit", note="fitted", style="dotted", **curve))
    if outside:
        beyond = sorted([*inside[-1:], *outside], key=lambda m: m.flops)
        series.append(multiplier_line(name, beyond, role="extrapolated", style="dashed", **curve))
        series.append(multiplier_band(name, beyond, level, **curve))
    return series


def exponent_panel(
    analysis: LadderAnalysis, curves: dict[str, dict[str, Any]], method: str | None = None
) -> Panel:
    """Exponent γ against log A (reversed), of the primary fit or another: better is up and to the right."""
    fit = analysis.primary_fit if method is None else analysis.fits[method]
    own = " The data reject one E for all arms, so " + (
        "each has its own." if fit.settings.method == "joint" else "these values are biased."
    )
    series: list[Series] = []
    for name, law in fit.arms.items():
        x, y = law.log_a.value, law.gamma.value
        low, high = law.gamma.unconditional
        bars = {"low": (low,), "high": (high,)} if math.isfinite(low) and math.isfinite(high) else {}
        series.append(Series(name, "points", (x,), (y,), **bars, **curves[name]))
    return Panel(
        "Exponent against constant",
        Axis("log A at C0 (falling: better to the right)", reverse=True),
        Axis("exponent γ (better upwards)"),
        tuple(series),
        caption=f"At C0 = {fit.c0:.3g}; bars are {percent(analysis.request.confidence)} "
        "intervals, which count E as unknown."
        + (own if analysis.one_e_rejected else ""),
    )  # fmt: skip


def recipes_table(measured: Sequence[MeasuredLadder]) -> Table:
    """Each ladder's recipe: base values, the rule of the learning rate, tokens and growth."""
    rows: list[dict[str, Any]] = []
    for one in measured:
        recipe, depths, rho = one.spec.recipe, one.spec.depths, one.spec.recipe.rho
        if one.spec.arm.passes.grows and rho is None:
            schedules = [record.spec.schedule for record in one.records if record.spec.schedule.grows]
            found = [1 - (schedule.stages[1].start or 0.0) for schedule in schedules]
            rho = f"{min(found):.2f} to {max(found):.2f}" if found else None
        rules = ", ".join(f"{rule.hyperparameter} {rule.exponent:+g}" for rule in recipe.scaling)
        anchor = {"learning_rate": recipe.learning_rate_base or recipe.base.learning_rate}
        rows.append({
            "arm": one.spec.label, "exponent of the learning rate": recipe.learning_rate_exponent,
            "tokens per parameter": recipe.tpp, "ρ": rho, "also scaled": rules or None,
            "depths": f"d{min(depths)} to d{max(depths)}",
            **{with_paper_code(name): value for name, value in (recipe.base.to_dict() | anchor).items()},
        })  # fmt: skip
    caption = (
        "Base values, with the learning rate at the depth of tuning. For a growing arm, tokens per parameter "
        "set its budget without growth (t_ref), and ρ is the fraction of tokens after growth."
    )
    return table("Recipes of the ladders", rows, caption)


def runs_table(measured: Sequence[MeasuredLadder]) -> Table:
    """One row per run."""
    rows = [
        {
            "arm": one.spec.label, "depth": record.spec.shape.depth, "seed": record.spec.seed,
            "parameters": record.parameters.initial_stored, "tokens": record.tokens, "FLOPs": record.flops,
            "loss": record.validation_loss, "seconds": record.seconds_training,
            "learning rate (GLR)": record.spec.hyperparameters.learning_rate, "run": record.run,
        }
        for one in measured
        for record in one.records
    ]  # fmt: skip
    caption = "Parameters are those stored at the start; seconds are of training alone."
    return replace(table("Runs", rows, caption), per_run=True)
