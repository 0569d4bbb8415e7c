"""Verdicts, fits, tables and panels of analysed ladders: shared by every ladder study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.recipe.hyperparameters import with_paper_code
from steepen.studies.answer import Axis, Panel, Series, StudyFit, StudyVerdict, Table
from steepen.studies.ladders.ladder_runs import Measure, MeasuredLadder, cost_of
from steepen.studies.plotting import finite_or_none, line, points
from steepen.utils.formatting import percent

AXIS_WORDS: dict[Measure, tuple[str, str]] = {  # an axis label, and the noun for titles
    "flops": ("training compute (FLOPs)", "compute"),
    "seconds": ("training time (seconds)", "time"),
}


def study_verdicts(
    analysis: LadderAnalysis, measured: Sequence[MeasuredLadder], *, primary: bool = True
) -> tuple[StudyVerdict, ...]:
    """The analysis's verdicts, each with its arm and variant."""
    ladders = {one.spec.label: one.spec for one in measured}
    return tuple(
        StudyVerdict(verdict, ladders[name].arm.name, ladders[name].variant, primary=primary)
        for name, verdict in analysis.verdicts.items()
    )


def study_fits(analysis: LadderAnalysis, measured: Sequence[MeasuredLadder]) -> tuple[StudyFit, ...]:
    """The law of every ladder by every method."""
    ladders = {one.spec.label: one.spec for one in measured}
    runs = {one.spec.label: tuple(record.run for record in one.records) for one in measured}
    return tuple(
        StudyFit(law, "loss", analysis.request.unit, ladders[name].arm.name, ladders[name].variant,
                 method=method, runs=runs[name])
        for method, fit in analysis.fits.items()
        for name, law in fit.arms.items()
    )  # fmt: skip


def what_would_change(analysis: LadderAnalysis) -> list[str]:
    """What would change each verdict, one line each."""
    return [
        f"{name}: {change}"
        for name, verdict in analysis.verdicts.items()
        for change in verdict.what_would_change
    ]


def verdict_table(analysis: LadderAnalysis, by: Measure = "flops") -> Table:
    """One row per ladder: its three answers with their numbers, and its exponent."""
    _, noun = AXIS_WORDS[by]
    shared = (
        "Words hold for all arms together (Holm); p is each arm alone. " if analysis.request.adjust else ""
    )
    rows: list[tuple[object, ...]] = []
    for name, law in analysis.primary_fit.arms.items():
        v, gamma = analysis.verdicts.get(name), law.gamma
        answers: tuple[object, ...] = ("reference", *[None] * 10)
        if v is not None:
            answers = (
                v.better, *map(finite_or_none, (v.gain.value, *v.gain.interval, v.gain.p_value)), v.growth,
                v.by_what, *map(finite_or_none, (v.growth_per_decade, v.slope.p_value)),
                *map(finite_or_none, (v.delta_gamma, v.top.value)),
            )  # fmt: skip
        rows.append((name, *answers, gamma.value, *map(finite_or_none, gamma.unconditional)))
    return Table(
        title=f"Verdicts against {analysis.request.reference}" + ("" if by == "flops" else f", per {noun}"),
        columns=(
            "arm", "in range", "multiplier", "low", "high", "p (better)", "gain", "by what", "× per decade",
            "p (growth)", "Δγ", "multiplier at the top", "γ", "γ low", "γ high",
        ),
        rows=tuple(rows),
        caption=(
            f"The multiplier is the {noun} the reference needs over the arm's for the same loss, the mean"
            " over "
            f"the range both cover, with {percent(1 - analysis.request.level)} intervals. "
            f"{shared}"
            f"γ of L = E + A·(C/C0)^−γ with {percent(analysis.request.confidence)} intervals that count E as "
            "unknown."
        ),
        arm_column=0,
    )  # fmt: skip


def hypotheses_table(analysis: LadderAnalysis, by: Measure = "flops") -> Table:
    """Each arm's multipliers beyond the ladder under every hypothesis that is not rejected."""
    _, noun = AXIS_WORDS[by]
    rows = tuple(
        (
            name, *(finite_or_none(p.exponent) for p in v.predictions[:2]), finite_or_none(v.delta_e.p_value),
            *(finite_or_none(p.irreducible) for p in v.predictions[:2]),
            finite_or_none(v.delta_gamma_free.p_value),
        )
        for name, v in analysis.verdicts.items()
    )  # fmt: skip
    return Table(
        title="Exponent and irreducible-loss hypotheses" + ("" if by == "flops" else f", per {noun}"),
        columns=(
            "arm", "exponent: × at 10×", "exponent: × at 1000×", "exponent: p",
            "irreducible loss: × at 10×", "irreducible loss: × at 1000×", "irreducible loss: p",
        ),
        rows=rows,
        caption=(
            f"The {noun} multiplier at 10 and 1000 times the reference's top budget under either hypothesis: "
            "a better exponent above one irreducible loss, or a lower irreducible loss with one exponent. "
            "Fitted and extrapolated, not measured. A small p rejects a hypothesis, whose multipliers are "
            "then left out; if neither is rejected, both are open."
        ),
        arm_column=0,
    )  # fmt: skip


def paper_method_table(analysis: LadderAnalysis) -> Table | None:
    """Every ladder's law by the paper's method, beside the joint fit's exponent; None without both fits."""
    if not {"joint", "paper"} <= analysis.fits.keys():
        return None
    joint, paper = analysis.fits["joint"], analysis.fits["paper"]
    rows = tuple(
        (name, law.gamma.value, law.slope_standard_error, law.log_a.value, joint.arms[name].gamma.value)
        for name, law in paper.arms.items()
        if name in joint.arms
    )
    irreducible = next(iter(paper.arms.values())).e.value
    return Table(
        "Laws by the paper's method",
        ("arm", "γ", "standard error", "log A", "γ of the joint fit"),
        rows,
        f"E = {irreducible:.4f} from {analysis.request.reference} by Huber loss, then a regression of "
        f"log(L − E) on log C for each ladder, as the paper's authors do; A is at C0 = {paper.c0:.3g} FLOPs. "
        "The standard error takes E as known, so it is too small.",
        arm_column=0,
    )


@dataclass(frozen=True)
class LadderPanels:
    """The panels of some ladders."""

    loss: Panel
    reducible_loss: Panel
    multipliers: Panel
    exponents: Panel
    paper_exponents: Panel | None  # by the paper's method


def ladder_panels(
    analysis: LadderAnalysis, measured: Sequence[MeasuredLadder], by: Measure = "flops"
) -> LadderPanels:
    """Loss with fitted laws, reducible loss, multipliers with bands, and exponent against constant."""
    label, noun = AXIS_WORDS[by]
    group = "Laws" if by == "flops" else f"Laws and multipliers per {noun}"
    head = analysis.primary_fit
    irreducible = next(iter(head.arms.values())).e.value
    loss: list[Series] = []
    reducible: list[Series] = []
    for one in measured:
        name = one.spec.label
        law, records = analysis.primary_fit.arms[name], one.records
        x = [cost_of(record, by) for record in records]
        y = [record.validation_loss for record in records]
        runs = [record.run for record in records]
        curve = _curve_fields(one)
        loss.append(points(name, x, y, runs, **curve))
        reducible.append(points(name, x, [value - law.e.value for value in y], runs, **curve))
        grid = np.geomspace(min(x), max(x), 60)
        detail = f"γ = {law.gamma.value:.4f}"
        loss.append(line(name, grid, law.predict(grid), role="fit", detail=detail, **curve))
        reducible.append(line(name, grid, law.predict(grid) - law.e.value, role="fit", **curve))
    curves = {one.spec.label: _curve_fields(one) for one in measured}
    return LadderPanels(
        loss=Panel(
            f"Loss against {noun}", Axis(label, "log"), Axis("validation loss (nats per token)"), tuple(loss),
            caption="One point per run; lines are laws with "
            + (
                "an irreducible loss for each arm, since one for all is rejected."
                if analysis.one_e_rejected
                else f"one irreducible loss E = {irreducible:.4f}, fitted jointly."
            ),
            group=group,
        ),
        reducible_loss=Panel(
            f"Reducible loss against {noun}", Axis(label, "log"), Axis("loss − E", "log"), tuple(reducible),
            caption="A power law is a straight line here; a better exponent is a steeper one."
            + (" Each arm's own E is subtracted." if analysis.one_e_rejected else ""),
            group=group,
        ),
        multipliers=replace(
            multiplier_panel(analysis, curves, by), lead=by == "flops", group="" if by == "flops" else group
        ),
        exponents=replace(exponent_panel(analysis, curves), group=group),
        paper_exponents=replace(
            exponent_panel(analysis, curves, "paper"),
            group=group,
            title="Exponent against constant, paper's method",
        )
        if "paper" in analysis.fits
        else None,
    )  # fmt: skip


def _curve_fields(one: MeasuredLadder) -> dict[str, Any]:
    """The fields of `Series` that give a ladder its colour and label."""
    return {"arm": one.spec.arm.name, "variant": one.spec.variant}


def multiplier_panel(analysis: LadderAnalysis, curves: dict[str, dict[str, Any]], by: Measure) -> Panel:
    """Multipliers over the reference; `curves` are the fields of `Series` that give each arm its colour."""
    label, noun = AXIS_WORDS[by]
    series: list[Series] = []
    for name, found in analysis.multipliers.items():
        curve = curves[name]
        interpolated = sorted((m for m in found if m.method == "interpolated"), key=lambda m: m.flops)
        if interpolated:
            x = tuple(m.flops for m in interpolated)
            values = [m.value for m in interpolated]
            series.append(points(name, x, values, **curve))
            series.append(line(name, x, values, **curve))
            low, high = tuple(m.low for m in interpolated), tuple(m.high for m in interpolated)
            note = f"{percent(analysis.request.confidence)} band"
            series.append(Series(name, "band", x, low, high, note=note, **curve))
        fitted = sorted((m for m in found if m.leads), key=lambda m: m.flops)
        inside = [m for m in fitted if not m.extrapolated]
        beyond = inside[-1:] + [m for m in fitted if m.extrapolated and m not in inside[-1:]]
        beyond.sort(key=lambda m: m.flops)
        if inside:
            x, values = [m.flops for m in inside], [m.value for m in inside]
            series.append(line(name, x, values, role="fit", note="fitted", style="dotted", **curve))
        if any(m.extrapolated for m in beyond):
            x, values = tuple(m.flops for m in beyond), [m.value for m in beyond]
            series.append(line(name, x, values, role="extrapolated", style="dashed", **curve))
            low, high = tuple(m.low for m in beyond), tuple(m.high for m in beyond)
            note = f"{percent(analysis.request.confidence)} band"
            series.append(Series(name, "band", x, low, high, note=note, **curve))
    reference = analysis.request.reference
    return Panel(
        f"{noun.capitalize()} multiplier over {reference}",
        Axis(f"{label} of {reference}", "log"),
        Axis("multiplier", "log"),
        tuple(series),
        lines=(("y", 1.0, reference),),
        caption="A flat curve means a better constant, a rising one a better exponent (or a lower "
        "irreducible loss). Points interpolate between measurements, with "
        f"{percent(analysis.request.confidence)} bands; dotted lines are the fitted laws.",
    )


def exponent_panel(
    analysis: LadderAnalysis, curves: dict[str, dict[str, Any]], method: str | None = None
) -> Panel:
    """Exponent γ against log A (reversed), of the primary fit or another: better is up and to the right."""
    fit = analysis.primary_fit if method is None else analysis.fits[method]
    biased = " The data reject one E for all arms, so these values are biased."
    series: list[Series] = []
    for name, law in fit.arms.items():
        x, y = law.log_a.value, law.gamma.value
        series.append(Series(name, "points", (x,), (y,), **curves[name]))
        for (low, high), condition, style in (
            (law.gamma.unconditional, "E unknown", "dotted"),
            (law.gamma.conditional, "given E", "solid"),
        ):
            if finite_or_none(low) is not None and finite_or_none(high) is not None:
                note = f"interval, {condition}"
                series.append(
                    line(name, (x, x), (low, high), role="fit", note=note, style=style, **curves[name])
                )
    return Panel(
        "Exponent against constant", Axis("log A (reducible loss at C0)", reverse=True), Axis("γ"),
        tuple(series),
        caption=f"At C0 = {fit.c0:.3g}; bars are {percent(analysis.request.confidence)} "
        "intervals: solid given E, dotted with E unknown (always the longer)."
        + (biased if analysis.one_e_rejected else ""),
    )  # fmt: skip


def recipes_table(measured: Sequence[MeasuredLadder]) -> Table:
    """Each ladder's recipe: base values, the rule of the learning rate, tokens and growth."""
    first = measured[0].spec.recipe.base.to_dict()
    rows: list[tuple[object, ...]] = []
    for one in measured:
        recipe, depths = one.spec.recipe, one.spec.depths
        anchor = recipe.learning_rate_base or recipe.base.learning_rate
        rho: object = recipe.rho
        if one.spec.arm.passes.grows and rho is None:
            shapes = {record.spec.shape.depth: record.spec.schedule for record in one.records}
            found = [1 - (schedule.stages[1].start or 0.0) for schedule in shapes.values() if schedule.grows]
            rho = f"{min(found):.2f} to {max(found):.2f}" if found else None
        rules = ", ".join(f"{rule.hyperparameter} {rule.exponent:+g}" for rule in recipe.scaling)
        values = {**recipe.base.to_dict(), "learning_rate": anchor}
        rows.append(
            (
                one.spec.label, recipe.learning_rate_exponent, recipe.tpp, rho, rules or None,
                f"d{min(depths)} to d{max(depths)}", *(values[name] for name in first),
            )
        )  # fmt: skip
    return Table(
        "Recipes of the ladders",
        (
            "arm", "exponent of the learning rate", "tokens per parameter", "ρ", "also scaled", "depths",
            *map(with_paper_code, first),
        ),
        tuple(rows),
        "Base values, with the learning rate at the depth of tuning. For a growing arm, tokens per parameter "
        "set its budget without growth (t_ref), and ρ is the fraction of tokens after growth.",
        arm_column=0,
    )  # fmt: skip


def runs_table(measured: Sequence[MeasuredLadder]) -> Table:
    """One row per run."""
    rows = tuple(
        (
            one.spec.label, record.spec.shape.depth, record.spec.seed, record.parameters.initial_stored,
            record.tokens, record.flops, record.validation_loss, record.seconds_training,
            record.spec.hyperparameters.learning_rate, record.run,
        )
        for one in measured
        for record in one.records
    )  # fmt: skip
    return Table(
        "Runs",
        (
            "arm",
            "depth",
            "seed",
            "parameters",
            "tokens",
            "FLOPs",
            "loss",
            "seconds",
            "learning rate (GLR)",
            "run",
        ),
        rows,
        "Parameters are those stored at the start; seconds are of training alone.",
        per_run=True,
        arm_column=0,
    )
