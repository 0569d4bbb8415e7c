"""Figures of `steepen fit`: compute laws with multipliers, Chinchilla fits, and sweeps at fixed compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.laws.fits.chinchilla import ChinchillaFit
from steepen.laws.fits.isoflop import IsoflopFit
from steepen.laws.fits.solver import Array
from steepen.laws.fits.vertex import find_vertex
from steepen.laws.ladder import Ladder
from steepen.laws.verdict.multipliers import fitted_multipliers
from steepen.report.figure_style import (
    BLACK,
    GREY,
    MARKERS,
    PANEL_INCHES,
    curve_colours,
    figure_style,
    new_figure,
    save_figure,
)
from steepen.utils.formatting import format_flops

WIDTH, HEIGHT = PANEL_INCHES


@figure_style()
def draw_compute(report: LadderAnalysis, ladders: dict[str, Ladder], path: Path) -> None:
    """Loss against compute, multipliers with bands, and exponent against constant."""
    figure = new_figure(3 * WIDTH, HEIGHT)
    left, middle, right = figure.subplots(1, 3)
    fit = report.primary_fit
    for i, ((name, law), colour) in enumerate(zip(fit.arms.items(), curve_colours([*fit.arms]), strict=True)):
        marker = MARKERS[i % len(MARKERS)]
        ladder = ladders[name]
        line = np.geomspace(ladder.flops[0], ladder.flops[-1], 100)
        left.plot(line, law.predict(line), color=colour, lw=1.2)
        left.plot(
            ladder.flops,
            ladder.loss,
            marker,
            color=colour,
            label=name,
        )
        for out in (h for h in report.hold_out if h.arm == name):
            further = np.geomspace(ladder.flops[-1], out.flops, 50)
            left.plot(further, law.predict(further), color=colour, lw=1.2, ls="--")
            left.plot(out.flops, out.observed, "s", mfc="none", color=colour, ms=8)
        low, high = law.gamma.unconditional
        gap = [[_finite(law.gamma.value - low)], [_finite(high - law.gamma.value)]]
        sides = law.log_a.conditional
        wide = [[law.log_a.value - sides[0]], [sides[1] - law.log_a.value]]
        narrow = law.gamma.conditional
        right.errorbar(
            -law.log_a.value, law.gamma.value, yerr=gap, color=colour, lw=0.8, alpha=0.45, capsize=2
        )
        right.errorbar(
            -law.log_a.value, law.gamma.value, xerr=wide[::-1],
            yerr=[[law.gamma.value - narrow[0]], [narrow[1] - law.gamma.value]],
            fmt=marker, color=colour, ms=3.5, lw=1.8, label=name,
        )  # fmt: skip
        _draw_multipliers(middle, report, name, colour, marker)
    middle.axhline(1.0, color=BLACK, lw=0.8)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="training compute (FLOPs)",
        ylabel="loss",
        title="Loss and fitted laws",
    )
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    middle.set(
        xscale="log", xlabel=f"compute of {report.request.reference} (FLOPs)", ylabel="compute multiplier"
    )
    middle.set_title("Multiplier: points interpolated, lines fitted")
    right.set(
        xlabel=f"constant, −log A at C0 = {format_flops(fit.c0, 2)} (right is better)",
        ylabel="exponent γ (up is better)",
    )
    right.set_title(f"Bold: {fit.settings.confidence:.0%} given E; thin: with E's error")
    # One legend for all three panels, in the corner that falling curves leave free.
    left.legend(loc="lower left", fontsize="small" if len(fit.arms) > 4 else None, handletextpad=0.2)
    save_figure(figure, path)


def _draw_multipliers(axis: Any, report: LadderAnalysis, name: str, colour: str, marker: str) -> None:
    found = report.multipliers.get(name, ())
    points = [m for m in found if m.method == "interpolated"]
    if points:
        values = np.array([[m.flops, m.value, m.value - m.low, m.high - m.value] for m in points]).T
        axis.errorbar(
            values[0], values[1], yerr=np.maximum(values[2:], 0), fmt=marker, color=colour, ms=4, lw=1
        )
    fitted = [m for m in found if m.leads]
    if not fitted:
        return
    if not report.verdicts[name].rejected("exponent"):
        # Sampled densely: the ratio of two laws is straight only on logarithmic axes.
        ends = [m.flops for m in fitted]
        line = np.unique(np.concatenate([ends, np.geomspace(min(ends), max(ends), 100)]))
        extrapolate = any(m.extrapolated for m in found)
        fitted = fitted_multipliers(report.primary_fit, name, line, extrapolate=extrapolate)
    for beyond, style in ((False, "-"), (True, ":")):
        part = sorted((m for m in fitted if m.extrapolated == beyond), key=lambda m: m.flops)
        if beyond and part:
            # Start the dotted line at the end of the solid one, as its continuation.
            part = sorted([*part, *(m for m in fitted if not m.extrapolated)], key=lambda m: m.flops)
        if part:
            x = [m.flops for m in part]
            axis.plot(x, [m.value for m in part], style, color=colour, lw=1.2)
            if not beyond:
                axis.fill_between(
                    x, [m.low for m in part], [m.high for m in part], color=colour, alpha=0.15, lw=0
                )


@figure_style()
def draw_chinchilla(fit: ChinchillaFit, n: Array, d: Array, loss: Array, path: Path) -> None:
    """Residuals against compute, and contours of the law over the runs with the compute-optimal line."""
    figure = new_figure(2 * WIDTH, HEIGHT)
    left, right = figure.subplots(1, 2)
    flops = 6 * n * d
    residual = loss - fit.predict(n, d)
    left.axhline(0, color=BLACK, lw=0.8)
    shown = left.scatter(flops, residual, c=np.log10(d / n), cmap="cividis", s=14)
    figure.colorbar(shown, ax=left, label="log10 of tokens per parameter")
    left.set(
        xscale="log",
        xlabel="6 · N · D (FLOPs)",
        ylabel="loss − law",
        title=f"Residuals, sd {fit.residual_sd:.3g}",
    )
    grid_n, grid_d = np.geomspace(n.min(), n.max(), 120), np.geomspace(d.min(), d.max(), 120)
    surface = fit.predict(grid_n[None, :], grid_d[:, None])
    levels = np.quantile(loss, np.linspace(0.02, 0.98, 10))
    lines = right.contour(grid_n, grid_d, surface, levels=np.unique(levels), cmap="cividis", linewidths=1)
    right.clabel(lines, fmt="%.2f")
    right.plot(n, d, ".", color=GREY, ms=4, label="runs")
    budgets = np.geomspace(flops.min(), flops.max(), 60)
    best = np.array([fit.optimum(float(c))[:2] for c in budgets])
    inside = (
        (best[:, 0] >= n.min()) & (best[:, 0] <= n.max()) & (best[:, 1] >= d.min()) & (best[:, 1] <= d.max())
    )
    right.plot(
        best[inside, 0],
        best[inside, 1],
        color=curve_colours(["operator-1"])[0],
        lw=1.6,
        label=f"optimum, N ∝ C^{fit.parameters_exponent:.3f}",
    )
    right.set(
        xscale="log",
        yscale="log",
        xlabel="parameters N",
        ylabel="tokens D",
        title="Fitted loss and compute-optimal split",
    )
    right.legend(loc="lower left", frameon=True, framealpha=0.9, edgecolor="none")
    save_figure(figure, path)


@figure_style()
def draw_isoflop(
    fits: dict[str, IsoflopFit], data: dict[str, tuple[Array, Array, Array]], path: Path
) -> None:
    """Every sweep with its parabola, and the optima against budget with their law."""
    figure = new_figure(2 * WIDTH, HEIGHT * len(fits))
    axes = figure.subplots(len(fits), 2, squeeze=False)
    for (name, fit), (left, right) in zip(fits.items(), axes, strict=True):
        _draw_sweeps(left, fit, data[name])
        colours = _shades(len(fit.vertices))
        for vertex, colour in zip(fit.vertices, colours, strict=True):
            fill = colour if vertex.interior else "none"
            right.plot(vertex.budget, vertex.x, "*", ms=8, mfc=fill, color=colour)
            low, high = vertex.interval or (0.0, np.inf)
            if vertex.interior and 0 < low < high < np.inf:
                right.plot([vertex.budget] * 2, [low, high], color=colour, lw=1)
        title = "optima (hollow: censored)"
        if fit.law:
            line = np.geomspace(min(v.budget for v in fit.vertices), max(v.budget for v in fit.vertices), 50)
            right.plot(line, [fit.law.predict(float(b)) for b in line], color=BLACK, lw=1)
            title = (
                f"x* ∝ budget^{fit.law.exponent:.3f} ({fit.law.interval[0]:.3f} to {fit.law.interval[1]:.3f})"
            )
        scale = "log" if fit.settings["log_x"] else "linear"
        label = "" if len(fits) == 1 else f"{name}: "
        left.set(xscale=scale, xlabel="x", ylabel="loss", title=f"{label}sweeps at fixed compute")
        right.set(xscale="log", yscale=scale, xlabel="budget", ylabel="best x", title=title)
    save_figure(figure, path)


def _draw_sweeps(axis: Any, fit: IsoflopFit, data: tuple[Array, Array, Array]) -> None:
    budget, x, loss = data
    colours = _shades(len(fit.vertices))
    log_x, log_loss = fit.settings["log_x"], fit.settings["log_loss"]
    for vertex, colour in zip(fit.vertices, colours, strict=True):
        own = np.abs(np.log(budget / vertex.budget)) <= fit.settings["tolerance"]
        axis.plot(x[own], loss[own], "o", color=colour, ms=3.5, label=f"{vertex.budget:.2g}")
        again = find_vertex(x[own], loss[own], method="quadratic", log_x=log_x, log_loss=log_loss)
        if vertex.method == "quadratic" and again.curvature > 0:
            line = (
                np.geomspace(x[own].min(), x[own].max(), 80)
                if log_x
                else np.linspace(x[own].min(), x[own].max(), 80)
            )
            u, v = (np.log(x[own]) if log_x else x[own]), (np.log(loss[own]) if log_loss else loss[own])
            near = np.argsort(np.abs(u - u[np.argmin(v)]), kind="stable")[: fit.settings["nearest"] or len(u)]
            curve = np.polyval(np.polyfit(u[near], v[near], 2), np.log(line) if log_x else line)
            height = np.exp(curve) if log_loss else curve
            seen = height < loss[own].max() * 1.02
            axis.plot(line[seen], height[seen], color=colour, lw=1)
        axis.plot(vertex.x, vertex.loss, "*", ms=8, mfc=colour if vertex.interior else "none", color=colour)
    if len(fit.vertices) <= 16:
        axis.legend(title="budget")


def _shades(count: int) -> Any:
    """Colours of a family of sweeps, from dark to bright, without viridis's palest end."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0, 0.85, count))


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 0.0
