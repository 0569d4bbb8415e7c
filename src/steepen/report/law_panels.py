"""Panels of `steepen fit`: compute laws, laws in model size and tokens, and sweeps at fixed compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.laws.chinchilla_table import ArmChinchilla
from steepen.laws.isoflop_table import ArmSweeps
from steepen.laws.ladder import Ladder
from steepen.results.panel import Axis, Panel, Series
from steepen.studies.ladders.verdict_report import exponent_panel, multiplier_panel
from steepen.studies.plotting import line, optimum_star, parabola, points
from steepen.utils.arrays import Array
from steepen.utils.formatting import cost_axis, format_flops


def compute_panels(analysis: LadderAnalysis, ladders: dict[str, Ladder]) -> list[Panel]:
    """Loss against compute, multipliers with bands, and exponent against constant."""
    curves: dict[str, dict[str, Any]] = {name: {"arm": name} for name in analysis.primary_fit.arms}
    return [
        loss_panel(analysis, ladders),
        replace(multiplier_panel(analysis, curves), lead=True),
        exponent_panel(analysis, curves),
    ]


def loss_panel(analysis: LadderAnalysis, ladders: dict[str, Ladder]) -> Panel:
    """Loss against compute with the fitted laws, continued to held-out runs."""
    series: list[Series] = []
    for name, law in analysis.primary_fit.arms.items():
        ladder, arm = ladders[name], {"arm": name}
        inside = np.geomspace(ladder.flops[0], ladder.flops[-1], 60)
        detail = f"γ = {law.gamma.value:.4f}"
        series.append(points(name, ladder.flops, ladder.loss, **arm))
        series.append(line(name, inside, law.predict(inside), role="fit", detail=detail, **arm))
        for out in (one for one in analysis.hold_out if one.arm == name):
            further = np.geomspace(ladder.flops[-1], out.flops, 30)
            fields: dict[str, Any] = {"role": "extrapolated", "style": "dashed", **arm}
            series.append(line(name, further, law.predict(further), **fields))
            held: dict[str, Any] = {"role": "held_out", "marker": "square", "filled": False, **arm}
            series.append(points(name, [out.flops], [out.observed], **held))
        gone = [one for one in analysis.left_out if one.arm == name]
        if gone:
            marked: dict[str, Any] = {"role": "held_out", "note": "left out", "marker": "cross", **arm}
            series.append(points(name, [one.flops for one in gone], [one.loss for one in gone], **marked))
    cost = Axis(cost_axis(analysis.request.unit).label, "log")
    return Panel("Loss and fitted laws", cost, Axis("loss", "log"), tuple(series))


CONTOURS = 8


def chinchilla_panels(arms: Mapping[str, ArmChinchilla]) -> list[Panel]:
    """Residuals of all arms against compute, and for each arm its law over the runs."""
    residuals: list[Series] = []
    for arm, one in arms.items():
        left = one.runs.loss - one.fit.predict(one.size, one.runs.tokens)
        residuals.append(points(arm or "runs", one.runs.flops, left, arm=arm))
    sd = max(one.fit.residual_sd for one in arms.values())
    axes = Axis("training compute (FLOPs)", "log"), Axis("loss − law")
    found = [Panel(f"Residuals, SD {sd:.2g}", *axes, tuple(residuals), (("y", 0.0, ""),))]
    losses = np.concatenate([one.runs.loss for one in arms.values()])
    levels = np.unique(np.quantile(losses, np.linspace(0.03, 0.97, CONTOURS)))
    for arm, one in arms.items():
        head = f"{arm}: " if arm else ""
        found.append(_passes_panel(one) if one.fit.phi is not None else _split_panel(one, head, levels))
    return found


def _split_panel(one: ArmChinchilla, head: str, levels: Array) -> Panel:
    """Contours of the law over the runs, and the compute-optimal line."""
    from contourpy import contour_generator

    fit, n, d = one.fit, one.runs.parameters, one.runs.tokens
    grid_n, grid_d = np.geomspace(n.min(), n.max(), 80), np.geomspace(d.min(), d.max(), 80)
    contours = contour_generator(grid_n, grid_d, fit.predict(grid_n[None, :], grid_d[:, None]))
    series: list[Series] = []
    for level in levels:
        for outline in contours.lines(float(level)):
            x, y = np.asarray(outline, float).T
            series.append(line(f"loss {level:.2f}", x, y, level=float(level)))
    series.append(points("runs", n, d))
    budgets = np.geomspace(one.runs.flops.min(), one.runs.flops.max(), 60)
    best = np.array([fit.optimum(float(c))[:2] for c in budgets])
    inside = (best >= [n.min(), d.min()]).all(axis=1) & (best <= [n.max(), d.max()]).all(axis=1)
    series.append(line("compute-optimal", *best[inside].T, style="dashed"))
    axes = Axis("parameters N", "log"), Axis("tokens D", "log")
    return Panel(f"{head}loss, and N* ∝ C^{fit.parameters_exponent:.3f}", *axes, tuple(series))


def _passes_panel(one: ArmChinchilla) -> Panel:
    """Loss less the token term against effective size: one curve for every number of passes."""
    fit, passes = one.fit, np.exp(one.size.log_passes)
    size = one.size.effective(fit.phi or 0.0)[0]
    rest = one.runs.loss - fit.b * one.runs.tokens**-fit.beta
    series = [
        points(f"{value:g} passes", size[passes == value], rest[passes == value], level=float(value))
        for value in np.unique(passes)
    ]
    grid = np.geomspace(size.min(), size.max(), 60)
    series.append(line("law", grid, fit.e + fit.a * grid**-fit.alpha, role="fit"))
    axes = Axis(f"N_once + r^{fit.phi:.2f} · N_rec", "log"), Axis("loss − B/D^β")
    return Panel("Effective size", *axes, tuple(series))


def isoflop_panels(arms: Mapping[str, ArmSweeps], x_name: str) -> list[Panel]:
    """Every arm's sweeps with their parabolas; then the optima and losses of all arms against compute."""
    panels: list[Panel] = []
    for arm, one in arms.items():
        title = f"{arm}: sweeps at fixed compute" if arm else "sweeps at fixed compute"
        axes = Axis(x_name, "log"), Axis("loss")
        panels.append(Panel(title, *axes, tuple(_parabolas(one)), columns=2))
    compute = Axis("compute budget (FLOPs)", "log")
    optima = tuple(series for arm, one in arms.items() for series in _optima(arm, one))
    panels.append(Panel("Optima", compute, Axis(f"best {x_name}", "log"), optima, columns=2))
    losses = tuple(
        points(arm or "optima", [vertex.budget], [vertex.loss], role="optimum", marker="star", arm=arm)
        for arm, one in arms.items()
        for vertex in one.fit.vertices
        if vertex.interior
    )
    if losses:
        panels.append(Panel("Loss at the optimum", compute, Axis("loss", "log"), losses, columns=2))
    return panels


def _parabolas(one: ArmSweeps) -> list[Series]:
    """The runs of every sweep with its parabola and its optimum."""
    settings, (budget, x, loss) = one.fit.settings, one.data
    found: list[Series] = []
    for vertex in one.fit.vertices:
        own = np.abs(np.log(budget / vertex.budget)) <= settings["tolerance"]
        level, label = float(f"{vertex.budget:.2g}"), f"{format_flops(vertex.budget, 2)} FLOPs"
        found.append(points(label, x[own], loss[own], level=level))
        if vertex.method == "quadratic":
            logs = {name: settings[name] for name in ("log_x", "log_loss")}
            found += parabola(label, vertex, float(x[own].min()), float(x[own].max()), **logs, level=level)
        found.append(optimum_star(label, vertex, level=level))
    return found


def _optima(arm: str, one: ArmSweeps) -> list[Series]:
    """The optimum of every sweep with its interval, hollow where it is censored, and their law."""
    fit, name, found = one.fit, arm or "optima", list[Series]()
    for vertex in fit.vertices:
        star: dict[str, Any] = {"marker": "star", "arm": arm}
        if vertex.interior:
            low, high = vertex.interval or (0.0, np.inf)
            bars = {"low": (low,), "high": (high,)} if 0 < low < high < np.inf else {}
            found.append(points(name, [vertex.budget], [vertex.x], (), role="optimum", **star, **bars))
        elif vertex.censored:
            found.append(points(name, [vertex.budget], [vertex.x], role="censored", filled=False, **star))
    if fit.law:
        budgets = [vertex.budget for vertex in fit.vertices]
        grid = np.geomspace(min(budgets), max(budgets), 50)
        law, detail = map(fit.law.predict, grid.tolist()), f"exponent {fit.law.exponent:.3f}"
        found.append(line(name, grid, law, role="fit", detail=detail, arm=arm))
    return found
