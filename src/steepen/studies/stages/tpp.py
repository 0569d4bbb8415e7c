"""Stage 2: the compute-optimal tokens per stored parameter, and whether it drifts with scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from steepen.laws.fits.isoflop import IsoflopFit, fit_isoflop
from steepen.laws.fits.solver import Array
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, StudyFit, Table
from steepen.studies.context import Arms, StudyContext, find_arms, loss_or_inf, starting_arm
from steepen.studies.driver.run_concurrently import RunGenerator, run_concurrently
from steepen.studies.plotting import (
    censored_points,
    error_of_mean,
    family_curve,
    finite_or_none,
    line,
    mean_with_error,
    optimum_star,
    parabola,
    parabola_or_segments,
    points,
)
from steepen.utils.formatting import format_flops
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.4.2, Stage 2: Fit the Optimal Tokens per Parameter"


@dataclass(frozen=True, eq=False)
class TokenSweep:
    """An arm's sweeps against 6·T²/C: tokens per training-averaged compute-active parameter."""

    start: str  # the arm it starts as: its own name where it does not grow
    budgets: Array
    x: Array
    losses: Array


def tpp(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Stage 2: Fit the Optimal Tokens per Parameter", table "Compute-optimal TPP by architecture".

    At each budget (the cost of an anchor depth at TPP 7) five sizes around the anchor are trained with
    tokens that match the compute, under the frozen base recipe. The vertex of log loss against log TPP is
    the budget's optimum; their mean is rounded to a whole number, and a scale-shift test says whether it
    drifts. For a growing arm the axis is t_ref, the TPP at equal compute without growth.
    """
    grid = context.preset.grids.tpp
    found: dict[str, IsoflopFit] = {}
    panels: list[Panel] = []
    runs: list[str] = []
    notes: list[str] = []
    sweeps: dict[str, TokenSweep] = {}

    def measured(arm: Arm) -> RunGenerator:
        recipe = replace(context.recipe(arm), learning_rate_exponent=0.0)
        keys = [(anchor, anchor + offset) for anchor in grid.budgets for offset in sorted(grid.offsets)]
        priced = arm if grid.budget_arm is None else find_arm(grid.budget_arm)
        budgets = {
            anchor: context.flops_at_tpp(priced, anchor, grid.reference_tpp) for anchor in grid.budgets
        }
        planned_runs = [context.run_at_flops(recipe, arm, depth, budgets[anchor]) for anchor, depth in keys]
        specs = [context.spec(planned) for planned in planned_runs]
        losses = [loss_or_inf(record) for record in (yield specs)]
        # x is computed from the realized FLOPs: whole steps move a run off its budget a little.
        x = [
            context.sweep_flops(planned)
            / (context.flops_per_token(arm, depth) * context.stored_parameters(arm, depth))
            for planned, (_, depth) in zip(planned_runs, keys, strict=True)
        ]
        names = [spec.hash for spec in specs]
        runs.extend(names)
        nominal = np.array([budgets[anchor] for anchor, _ in keys])
        good = np.isfinite(losses)
        if not good.all():
            notes.append(f"{arm.name}: {int((~good).sum())} runs diverged and are left out")
        fit = fit_isoflop(nominal[good], np.array(x)[good], np.array(losses)[good])
        found[arm.name] = fit
        notes.extend(f"{arm.name}: {warning}" for warning in fit.warnings)
        panels.append(_panel(arm.name, fit, nominal.tolist(), x, losses, names))
        cost = np.array([context.sweep_flops(planned) for planned in planned_runs])
        tokens = np.array([planned.tokens for planned in planned_runs], float)
        sweeps[arm.name] = TokenSweep(
            starting_arm(arm).name, nominal[good], (6 * tokens**2 / cost)[good], np.array(losses)[good]
        )

    yield from run_concurrently([measured(arm) for arm in find_arms(arms or ("vanilla",))])
    panels += [_laws(found), _frontier(found)]
    panels += _token_panels(found, sweeps)
    return Answer(
        study="tpp",
        question="How many tokens per stored parameter are compute-optimal, and does that drift with scale?",
        section=SECTION,
        findings=tuple(_sentence(name, fit) for name, fit in found.items()),
        values=json_safe(
            {name: {**fit.to_dict(), "tpp": finite_or_none(fit.rounded)} for name, fit in found.items()}
        ),
        fits=tuple(StudyFit(fit, "tokens per parameter", "FLOPs", name) for name, fit in found.items()),
        panels=tuple(panels),
        tables=(_table(found),),
        warnings=tuple(notes),
        method=(
            f"Budgets are those of {grid.budget_arm or 'each arm'} at depths "
            f"{', '.join(map(str, grid.budgets))} at {grid.reference_tpp:g} tokens per parameter; at each, "
            f"{len(grid.offsets)} sizes with tokens adjusted to the same "
            "compute, under the base recipe with a constant learning rate.",
            "Vertices of parabolas of log loss against log TPP; censored ones (outside the sweep) take no "
            "part in mean and test.",
            context.sweep_flops_method,
        ),
        runs=tuple(runs),
    )


def _sentence(name: str, fit: IsoflopFit) -> str:
    inside = sum(vertex.interior for vertex in fit.vertices)
    if not inside:
        return f"{name}: no budget's optimum lies inside its sweep, so there is no TPP to adopt; widen it."
    drift = ""
    if fit.law is not None and fit.law.degrees_of_freedom > 0:
        verb = "drifts" if fit.law.p_value < 0.05 else "does not measurably drift"
        drift = (
            f"; it {verb} with compute (exponent {fit.law.exponent:+.3f}, p = {fit.law.p_value:.2g}; "
            f"minimum detectable drift {fit.law.detectable:.2f})"
        )
    return (
        f"{name}: {fit.rounded:g} tokens per parameter (mean optimum {mean_with_error(fit, 2)} over "
        f"{inside} of {len(fit.vertices)} budgets{_neighbours(fit)}){drift}."
    )


def _neighbours(fit: IsoflopFit) -> str:
    """Whole numbers besides the adopted one within two standard errors of the mean: they tie with it."""
    error = error_of_mean(fit)
    if error is None:
        return ""
    low, high = math.ceil(fit.mean - 2 * error - 0.5), math.floor(fit.mean + 2 * error + 0.5)
    tied = [str(value) for value in range(max(1, low), high + 1) if value != fit.rounded]
    return f"; a tie with {', '.join(tied)}" if tied else ""


def _panel(
    name: str,
    fit: IsoflopFit,
    budgets: Sequence[float],
    x: Sequence[float],
    losses: Sequence[float],
    runs: Sequence[str],
) -> Panel:
    series: list[Series] = []
    for budget in sorted(set(budgets)):
        rows = [i for i, other in enumerate(budgets) if other == budget and math.isfinite(losses[i])]
        if not rows:
            continue
        label, curve = family_curve("FLOPs", budget)
        own, loss = [x[i] for i in rows], [losses[i] for i in rows]
        series.append(points(label, own, loss, [runs[i] for i in rows], **curve))
        for vertex in fit.vertices:
            if abs(vertex.budget / budget - 1) < 1e-6:
                series += parabola_or_segments(label, own, loss, vertex, log=True, **curve)
                series.append(optimum_star(label, vertex, **curve))
    marks: tuple[Any, ...] = (("x", fit.mean, f"mean {fit.mean:.2f}"),) if finite_or_none(fit.mean) else ()
    return Panel(
        f"{name}: loss against tokens per parameter", Axis("tokens per stored parameter", "log"),
        Axis("validation loss", "log"), tuple(series), marks,
        "One colour per budget; stars are the parabolas' minima, hollow where the sweep does not reach it.",
    )  # fmt: skip


def _laws(found: dict[str, IsoflopFit]) -> Panel:
    series: list[Series] = []
    for name, fit in found.items():
        inside = [vertex for vertex in fit.vertices if vertex.interior]
        series.append(points(name, [v.budget for v in inside], [v.x for v in inside], arm=name))
        series += censored_points(name, fit.vertices, arm=name)
        if fit.law is not None and inside:
            x = [min(v.budget for v in inside), max(v.budget for v in inside)]
            series.append(line(name, x, [fit.law.predict(value) for value in x], arm=name, role="fit"))
    return Panel(
        "Optimal tokens per parameter against compute", Axis("compute (FLOPs)", "log"),
        Axis("optimal tokens per parameter", "log"), tuple(series),
    )  # fmt: skip


def _frontier(found: dict[str, IsoflopFit]) -> Panel:
    """The loss at each budget's optimum, a scaling law of its own."""
    series: list[Series] = []
    for name, fit in found.items():
        x, y = [v.budget for v in fit.vertices], [v.loss for v in fit.vertices]
        series += [points(name, x, y, arm=name), line(name, x, y, arm=name)]
    return Panel(
        "Loss at the optimum", Axis("compute (FLOPs)", "log"), Axis("loss at the optimal TPP", "log"),
        tuple(series), caption="Under the base recipe with a constant learning rate: not the ladders' laws.",
    )  # fmt: skip


def _token_panels(found: dict[str, IsoflopFit], sweeps: dict[str, TokenSweep]) -> list[Panel]:
    """For a growing arm whose starting arm was swept too: both against 6·T²/C."""
    panels: list[Panel] = []
    for name, own in sweeps.items():
        if own.start == name or own.start not in sweeps:
            continue
        series: list[Series] = []
        means: dict[str, float] = {}
        for arm, sweep in ((own.start, sweeps[own.start]), (name, own)):
            grown = arm == name
            fit = fit_isoflop(sweep.budgets, sweep.x, sweep.losses)
            for vertex in fit.vertices:
                rows = np.isclose(sweep.budgets, vertex.budget)
                label, curve = family_curve("FLOPs", float(sweep.budgets[rows][0]))
                x, y = sweep.x[rows].tolist(), sweep.losses[rows].tolist()
                role, note = ("measured", "with growth") if grown else ("control", "without growth")
                series.append(points(label, x, y, role=role, note=note, filled=grown, **curve))
                style: Literal["solid", "dotted"] = "solid" if grown else "dotted"
                ends = (min(x), max(x))
                series += parabola(label, vertex, *ends, log_x=True, log_loss=True, style=style, **curve)
                if grown:
                    series.append(optimum_star(label, vertex, **curve))
            if finite_or_none(fit.mean):
                means[arm] = fit.mean
        marks = tuple[tuple[Literal["x", "y"], float, str], ...](
            ("x", mean, f"{arm} {mean:.2f}") for arm, mean in means.items()
        )
        words = " and ".join(f"{mean:.2f} for {arm}" for arm, mean in means.items())
        panels.append(
            Panel(
                f"{name}: loss against 6·T²/C",
                Axis("6·T²/C", "log"),
                Axis("validation loss", "log"), tuple(series), marks,
                f"6·T²/C is tokens per mean compute-active parameter. Filled: {name}; hollow: {own.start}, "
                f"without growth, at the same compute. Mean optima (vertical lines): {words}.",
            )
        )  # fmt: skip
    return panels


def _table(found: dict[str, IsoflopFit]) -> Table:
    every = sorted(vertex.budget for fit in found.values() for vertex in fit.vertices)
    budgets = [b for i, b in enumerate(every) if not i or b > every[i - 1] * (1 + 1e-3)]
    rows = tuple(
        (
            name, finite_or_none(fit.mean), finite_or_none(fit.rounded), fit.law.p_value if fit.law else None,
            fit.law.exponent if fit.law else None, finite_or_none(fit.law.detectable) if fit.law else None,
            sum(v.interior for v in fit.vertices), len(fit.vertices),
            *(next((v.loss for v in fit.vertices if abs(v.budget / b - 1) < 1e-3), None) for b in budgets),
        )
        for name, fit in found.items()
    )  # fmt: skip
    return Table(
        "Compute-optimal TPP",
        ("arm", "mean TPP*", "rounded", "p (no drift)", "drift exponent", "detectable drift", "inside",
         "budgets", *(f"loss at {format_flops(b)} FLOPs" for b in budgets)),
        rows,
        arm_column=0,
    )  # fmt: skip
