"""Panels of `steepen fit`: compute laws with multipliers, Chinchilla fits, and sweeps at fixed compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.laws.fits.chinchilla import ChinchillaFit
from steepen.laws.fits.isoflop import IsoflopFit
from steepen.laws.fits.solver import Array
from steepen.laws.ladder import Ladder
from steepen.studies.answer import Axis, Panel, Series
from steepen.studies.ladders.verdict_report import exponent_panel, multiplier_panel
from steepen.studies.plotting import censored_points, line, optimum_star, parabola, points
from steepen.utils.formatting import format_flops

CONTOURS = 8
TPP_GROUPS = 5  # colours of the residuals


def compute_panels(analysis: LadderAnalysis, ladders: dict[str, Ladder]) -> list[Panel]:
    """Loss against compute, multipliers with bands, and exponent against constant."""
    curves: dict[str, dict[str, Any]] = {name: {"arm": name} for name in analysis.primary_fit.arms}
    return [
        loss_panel(analysis, ladders),
        multiplier_panel(analysis, curves, "flops"),
        exponent_panel(analysis, curves),
    ]


def loss_panel(analysis: LadderAnalysis, ladders: dict[str, Ladder]) -> Panel:
    """Loss against compute with the fitted laws, continued to held-out runs."""
    series: list[Series] = []
    for name in analysis.primary_fit.arms:
        law = analysis.primary_fit.arms[name]
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
    return Panel(
        "Loss and fitted laws", Axis("training compute (FLOPs)", "log"), Axis("loss", "log"), tuple(series)
    )


def chinchilla_panels(fit: ChinchillaFit, n: Array, d: Array, loss: Array) -> list[Panel]:
    """Residuals against compute, and contours of the law over the runs with the compute-optimal line."""
    from contourpy import contour_generator

    flops, residual, ratio = 6 * n * d, loss - fit.predict(n, d), d / n
    edges = np.unique(np.quantile(ratio, np.linspace(0, 1, TPP_GROUPS + 1)))
    groups = np.clip(np.searchsorted(edges, ratio, side="right") - 1, 0, max(len(edges) - 2, 0))
    residuals: list[Series] = []
    for group in np.unique(groups):
        own = groups == group
        label = f"{ratio[own].min():.3g} to {ratio[own].max():.3g} tokens per parameter"
        residuals.append(points(label, flops[own], residual[own]))
    grid_n, grid_d = np.geomspace(n.min(), n.max(), 80), np.geomspace(d.min(), d.max(), 80)
    surface = fit.predict(grid_n[None, :], grid_d[:, None])
    contours = contour_generator(grid_n, grid_d, surface)
    law: list[Series] = []
    for level in np.unique(np.quantile(loss, np.linspace(0.03, 0.97, CONTOURS))):
        for outline in contours.lines(float(level)):
            x, y = np.asarray(outline, float).T
            law.append(line(f"loss {level:.2f}", x, y, level=float(level)))
    law.append(points("runs", n, d))
    budgets = np.geomspace(flops.min(), flops.max(), 60)
    best = np.array([fit.optimum(float(c))[:2] for c in budgets])
    inside = (best >= [n.min(), d.min()]).all(axis=1) & (best <= [n.max(), d.max()]).all(axis=1)
    optimum = f"optimum, N ∝ C^{fit.parameters_exponent:.3f}"
    law.append(line(optimum, *best[inside].T, style="dashed"))
    return [
        Panel(
            f"Residuals, sd {fit.residual_sd:.3g}",
            Axis("6 · N · D (FLOPs)", "log"),
            Axis("loss − law"),
            tuple(residuals),
            lines=(("y", 0.0, ""),),
        ),
        Panel(
            "Fitted loss and compute-optimal split",
            Axis("parameters N", "log"),
            Axis("tokens D", "log"),
            tuple(law),
        ),
    ]


def isoflop_panels(fits: dict[str, IsoflopFit], data: dict[str, tuple[Array, Array, Array]]) -> list[Panel]:
    """Every sweep with its parabola, and the optima against budget with their law; two panels per arm."""
    panels: list[Panel] = []
    for name, fit in fits.items():
        budget, x, loss = data[name]
        log_x, log_loss = fit.settings["log_x"], fit.settings["log_loss"]
        sweeps: list[Series] = []
        optima: list[Series] = []
        for vertex in fit.vertices:
            own = np.abs(np.log(budget / vertex.budget)) <= fit.settings["tolerance"]
            fields: dict[str, Any] = {"level": vertex.budget}
            label = format_flops(vertex.budget, 2)
            sweeps.append(points(label, x[own], loss[own], **fields))
            if vertex.method == "quadratic":
                ends = float(x[own].min()), float(x[own].max())
                sweeps += parabola(label, vertex, *ends, log_x=log_x, log_loss=log_loss, **fields)
            sweeps.append(optimum_star(label, vertex, **fields))
            if vertex.interior:
                low, high = vertex.interval or (0.0, np.inf)
                bars = {"low": (low,), "high": (high,)} if 0 < low < high < np.inf else {}
                star: dict[str, Any] = {"role": "optimum", "marker": "star", **bars, **fields}
                optima.append(points(label, [vertex.budget], [vertex.x], **star))
            else:
                optima += censored_points(label, [vertex], marker="star", **fields)
        title = "Optima"
        if fit.law:
            budgets = [vertex.budget for vertex in fit.vertices]
            grid = np.geomspace(min(budgets), max(budgets), 50)
            power = f"{fit.law.exponent:.3f} ({fit.law.interval[0]:.3f} to {fit.law.interval[1]:.3f})"
            title = f"x* ∝ budget^{power}"
            optima.append(line("power law", grid, [fit.law.predict(float(b)) for b in grid], role="fit"))
        scale, head = "log" if log_x else "linear", "" if len(fits) == 1 else f"{name}: "
        panels += [
            Panel(f"{head}sweeps at fixed compute", Axis("x", scale), Axis("loss"), tuple(sweeps), columns=2),
            Panel(f"{head}{title}", Axis("budget", "log"), Axis("best x", scale), tuple(optima), columns=2),
        ]
    return panels
