"""Stage 2: the compute-optimal tokens per stored parameter, and whether it drifts with scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steepen.laws.fits.isoflop import IsoflopFit
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.studies import plotting as plot
from steepen.studies.answer import Axis, Draft, Panel, Series, Study, StudyFit, Table
from steepen.studies.cells import Cells, Plan, measure, plan_grid, table
from steepen.studies.context import Arms, StudyContext, find_arms, starting_arm
from steepen.studies.sweeps import (
    error_of_mean,
    fit_token_sweeps,
    interior,
    law_values,
    mean_with_error,
    vertices_of,
)
from steepen.utils.formatting import format_flops

SECTION = "Appendix A.4.2, Stage 2: Fit the Optimal Tokens per Parameter"


def tpp(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Stage 2: Fit the Optimal Tokens per Parameter", table "Compute-optimal TPP by architecture".

    At each budget (the cost of an anchor depth at TPP 7) five sizes around the anchor are trained with
    tokens that match the compute, under the frozen base recipe. The vertex of log loss against log TPP is
    the budget's optimum; their mean is rounded to a whole number, and a scale-shift test says whether it
    drifts. For a growing arm the axis is t_ref, the TPP at equal compute without growth.
    """
    grid = context.preset.grids.tpp
    chosen = find_arms(arms or ("vanilla",))

    def plan(arm: Arm, anchor: int, offset: int) -> Plan:
        depth, priced = anchor + offset, arm if grid.budget_arm is None else find_arm(grid.budget_arm)
        budget = context.flops_at_tpp(priced, anchor, grid.reference_tpp)
        run = context.run_at_flops(context.constant_recipe(arm), arm, depth, budget)
        # From the realized FLOPs: whole steps move a run off its budget a little.
        flops = context.sweep_flops(run)
        tpp = flops / (context.flops_per_token(arm, depth) * context.stored_parameters(arm, depth))
        return run, {"budget": budget, "tpp": tpp, "active_tpp": 6 * float(run.tokens) ** 2 / flops}

    plans = plan_grid(plan, arm=chosen, anchor=grid.budgets, offset=sorted(grid.offsets))
    cells = yield from measure(context, plans, branches=True)
    draft, fits = Draft(runs=cells.column("run")), dict[str, IsoflopFit]()
    for arm in chosen:
        own = cells.where(arm=arm.name)
        finished = own.having("loss")
        if lost := len(own) - len(finished):
            draft.warnings.append(f"{arm.name}: {lost} runs diverged and are left out")
        fit = fits[arm.name] = fit_token_sweeps(finished, "tpp")
        draft.warnings += [f"{arm.name}: {warning}" for warning in fit.warnings]
        draft.findings.append(_sentence(arm.name, fit))
        draft.values[arm.name] = {**fit.to_dict(), "tpp": fit.rounded}
        draft.fits.append(StudyFit(fit, "tokens per parameter", "FLOPs", arm.name))
        draft.panels.append(_panel(arm.name, fit, own))
    draft.panels += _law_panels(fits)
    for arm in chosen:
        start = starting_arm(arm).name
        if start in fits and start != arm.name:  # it grows, and where it starts was swept too
            draft.panels.append(_token_panel(start, arm.name, cells.having("loss")))
    draft.tables.append(_table(fits))
    draft.method += [
        f"Budgets are those of {grid.budget_arm or 'each arm'} at depths {', '.join(map(str, grid.budgets))} "
        f"at {grid.reference_tpp:g} tokens per parameter; at each, {len(grid.offsets)} sizes with tokens "
        "adjusted to the same compute, under the base recipe with a constant learning rate.",
        "Vertices of parabolas of log loss against log TPP; censored ones (outside the sweep) take no part "
        "in mean and test.",
        context.sweep_flops_method,
    ]
    question = "How many tokens per stored parameter are compute-optimal, and does that drift with scale?"
    return draft.answer("tpp", question, SECTION)


def _sentence(name: str, fit: IsoflopFit) -> str:
    count = len(interior(fit.vertices))
    if not count:
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
        f"{count} of {len(fit.vertices)} budgets{_neighbours(fit)}){drift}."
    )


def _neighbours(fit: IsoflopFit) -> str:
    """Whole numbers besides the adopted one within two standard errors of the mean: they tie with it."""
    error = error_of_mean(fit)
    if error is None:
        return ""
    # A mean within 0.5 of a whole number is rounded to it, hence the halves.
    low, high = math.ceil(fit.mean - 2 * error - 0.5), math.floor(fit.mean + 2 * error + 0.5)
    tied = [str(value) for value in range(max(1, low), high + 1) if value != fit.rounded]
    return f"; a tie with {', '.join(tied)}" if tied else ""


def _panel(name: str, fit: IsoflopFit, cells: Cells) -> Panel:
    drawn = plot.sweep_curves(cells, "tpp", "loss", "budget", vertices_of(fit, cells, "budget"), log=True)
    return Panel(
        f"{name}: loss against tokens per parameter", Axis("tokens per stored parameter", "log"),
        Axis("validation loss", "log"), tuple(drawn),
        plot.mark_mean(fit.mean, 2),
        "One colour per budget; stars are the parabolas' minima, hollow where the sweep does not reach it.",
    )  # fmt: skip


def _law_panels(fits: Mapping[str, IsoflopFit]) -> list[Panel]:
    """The optima of every arm against compute, and the loss there, a scaling law of its own."""
    optima, losses = list[Series](), list[Series]()
    for name, fit in fits.items():
        optima += plot.optima_with_law(name, fit.vertices, fit.law, arm=name)
        x, y = [v.budget for v in fit.vertices], [v.loss for v in fit.vertices]
        losses += [plot.points(name, x, y, arm=name), plot.line(name, x, y, arm=name)]
    compute, best = Axis("compute (FLOPs)", "log"), Axis("optimal tokens per parameter", "log")
    caption = "Under the base recipe with a constant learning rate: not the ladders' laws."
    loss = Axis("loss at the optimal TPP", "log")
    return [
        Panel("Optimal tokens per parameter against compute", compute, best, tuple(optima)),
        Panel("Loss at the optimum", compute, loss, tuple(losses), caption=caption),
    ]


def _token_panel(start: str, grown: str, cells: Cells) -> Panel:
    """An arm that grows and the one it starts as, both against 6·T²/C."""
    series: list[Series] = []
    means: dict[str, float] = {}
    hollow: dict[str, Any] = {"role": "control", "note": "without growth", "filled": False}
    for name, look in ((start, hollow), (grown, {"note": "with growth"})):
        of_arm = cells.where(arm=name)
        fit = fit_token_sweeps(of_arm, "active_tpp")
        for budget, vertex in vertices_of(fit, of_arm, "budget").items():
            label, curve = plot.family_curve("budget", budget)
            own = of_arm.where(budget=budget)
            x, style = own.column("active_tpp"), "solid" if name == grown else "dotted"
            series.append(plot.points(label, x, own.column("loss"), **look, **curve))
            ends = (min(x), max(x))
            series += plot.parabola(label, vertex, *ends, log_x=True, log_loss=True, style=style, **curve)
            series += [plot.optimum_star(label, vertex, **curve)] if name == grown else []
        if math.isfinite(fit.mean):
            means[name] = fit.mean
    words = " and ".join(f"{mean:.2f} for {arm}" for arm, mean in means.items())
    return Panel(
        f"{grown}: loss against 6·T²/C", Axis("6·T²/C", "log"), Axis("validation loss", "log"),
        tuple(series), tuple(("x", mean, f"{arm} {mean:.2f}") for arm, mean in means.items()),
        f"6·T²/C is tokens per mean compute-active parameter. Filled: {grown}; hollow: {start}, "
        f"without growth, at the same compute. Mean optima (vertical lines): {words}.",
    )  # fmt: skip


def _table(fits: Mapping[str, IsoflopFit]) -> Table:
    every = sorted(vertex.budget for fit in fits.values() for vertex in fit.vertices)
    # Budgets of different arms that are nearly equal share a column.
    budgets = [b for i, b in enumerate(every) if not i or b > every[i - 1] * (1 + 1e-3)]
    rows: list[dict[str, Any]] = []
    for name, fit in fits.items():
        law = law_values(fit.law)
        near = {b: [v for v in fit.vertices if math.isclose(v.budget, b, rel_tol=1e-3)] for b in budgets}
        rows.append({
            "arm": name, "mean TPP*": fit.mean, "rounded": fit.rounded, "p (no drift)": law["p"],
            "drift exponent": law["exponent"], "detectable drift": law["detectable"],
            "inside": len(interior(fit.vertices)), "budgets": len(fit.vertices),
            **{f"loss at {format_flops(b)} FLOPs": own[0].loss if own else None for b, own in near.items()},
        })  # fmt: skip
    return table("Compute-optimal TPP", rows)
