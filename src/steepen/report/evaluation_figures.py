"""Figures of evaluation scores: CORE tasks, KL effective depth, test-time passes and forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.evaluation.core.suite import FILTERED_OUT
from steepen.report.colours import PALETTE
from steepen.report.figure_style import (
    BLACK,
    GREY,
    MARKERS,
    PANEL_INCHES,
    curve_colours,
    figure_format,
    figure_style,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from steepen.evaluation.forecast import Forecast

WIDTH, HEIGHT = PANEL_INCHES
_, _SCHEMA, _CHOICE, _LANGUAGE, *_ = PALETTE
KIND_COLOURS = {
    "multiple_choice": _CHOICE.light,
    "schema": _SCHEMA.light,
    "language_modeling": _LANGUAGE.light,
}
KIND_NAMES = {
    "multiple_choice": "multiple choice",
    "schema": "schema",
    "language_modeling": "language modelling",
}


def draw(scores: Mapping[str, Any], folder: Path, title: str = "") -> list[Path]:
    """Draw each kind of score present, as one PNG each, into a folder; returns their paths."""
    files: list[Path] = []
    if "core" in scores:
        files.append(folder / "core_tasks.png")
        draw_tasks(scores["core"], files[-1], title)
    if "kl_depth" in scores:
        files.append(folder / "kl_depth.png")
        draw_depth({title or "network": scores["kl_depth"]}, files[-1])
    if "test_time_passes" in scores:
        files.append(folder / "test_time_passes.png")
        draw_passes({title or "network": scores["test_time_passes"]}, files[-1])
    return files


@figure_style()
def draw_tasks(core: Mapping[str, Any], file: Path, title: str = "") -> None:
    """Centred accuracy of every task; whiskers span the seeds, hollow bars are not in CORE17."""
    from matplotlib.patches import Patch

    tasks = sorted(core["tasks"].items(), key=lambda pair: pair[1]["centered"])
    figure = new_figure(5, 0.9 + 0.16 * len(tasks))
    axes = figure.subplots()
    for place, (label, task) in enumerate(tasks):
        colour = KIND_COLOURS[task["kind"]]
        in_core17 = label not in FILTERED_OUT
        axes.barh(
            place,
            task["centered"],
            height=0.72,
            color=colour if in_core17 else "none",
            edgecolor=colour,
            linewidth=0.7,
        )
        span = [(seed["accuracy"] - task["baseline"]) / (1 - task["baseline"]) for seed in task["seeds"]]
        if len(span) > 1:
            axes.plot([min(span), max(span)], [place, place], color=BLACK, linewidth=0.8)
        axes.plot(task["centered"], place, marker="o", markersize=2.5, color=colour, markeredgecolor=BLACK)
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.set_yticks(range(len(tasks)), [f"{label}, {task['shots']}-shot" for label, task in tasks])
    axes.set_ylim(-0.7, len(tasks) - 0.3)
    axes.set_xlabel("centred accuracy (0 = chance, 1 = perfect)")
    handles = [
        Patch(facecolor=KIND_COLOURS[kind], label=KIND_NAMES[kind])
        for kind in KIND_COLOURS
        if any(task["kind"] == kind for _, task in tasks)
    ]
    if any(label in FILTERED_OUT for label, _ in tasks):
        handles.append(Patch(facecolor="none", edgecolor=GREY, label="not in CORE17"))
    axes.legend(handles=handles, loc="lower right")
    score, name = (
        (core["core22"], "CORE22") if core.get("core22") is not None else (core["mean_centered"], "mean")
    )
    subset = "" if core.get("examples") is None else f", at most {core['examples']:,} examples per task"
    head = f"{title}: " if title else ""
    figure.suptitle(f"{head}{name} {score:.4f}{subset}")
    save_figure(figure, file)


@figure_style()
def draw_depth(results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """KL to the final prediction before the first and after every executed block; a star at the depth."""
    figure = new_figure(1.3 * WIDTH, HEIGHT)
    axes = figure.subplots()
    for (name, depth), colour, marker in zip(results.items(), curve_colours([*results]), cycle(MARKERS)):
        curve = depth["curve"]
        # Scores of earlier versions have no value before the first block.
        first_block = depth["executed"] + 1 - len(curve)
        label = f"{name}: {depth['depth']} of {depth['executed']}"
        axes.plot(
            range(first_block, first_block + len(curve)), curve, color=colour, marker=marker, label=label
        )
        star = (depth["depth"], curve[depth["depth"] - first_block])
        axes.plot(*star, marker="*", color=colour, markersize=9, markeredgecolor=BLACK, linestyle="none")
    first = next(iter(results.values()))
    axes.axhline(first["threshold"], color=GREY, linestyle="--", linewidth=1)
    if len(results) == 1:
        _mark_stages(axes, first["stages"])
    axes.set_xlabel("executed blocks")
    axes.set_ylabel("KL to the final prediction (nats)")
    axes.set_ylim(0, 1.12 * max(first["threshold"], *(max(depth["curve"]) for depth in results.values())))
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="best")
    figure.suptitle(f"KL effective depth: below {first['threshold']:g} nats from the star on")
    save_figure(figure, file)


def _mark_stages(axes: Any, stages: Sequence[str]) -> None:
    """Alternating bands with the stage's name above each."""
    start = 0
    names = list(dict.fromkeys(stages))
    for number, name in enumerate(names):
        end = start + list(stages).count(name)
        if number % 2:
            axes.axvspan(start + 0.5, end + 0.5, color=BLACK, alpha=0.05, linewidth=0)
        axes.text((start + end + 1) / 2, 1.01, name, transform=axes.get_xaxis_transform(), ha="center")
        start = end


@figure_style()
def draw_passes(results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """L(k) − L(K trained) against k, a star at the trained K, as in the paper's figure."""
    figure = new_figure(1.2 * WIDTH, HEIGHT)
    axes = figure.subplots()
    for (name, curve), colour, marker in zip(results.items(), curve_colours([*results]), cycle(MARKERS)):
        axes.plot(curve["passes"], curve["differences"], color=colour, marker=marker, label=name)
        axes.plot(
            curve["trained"],
            0,
            marker="*",
            color=colour,
            markersize=9,
            markeredgecolor=BLACK,
            linestyle="none",
        )
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1, zorder=0)
    axes.set_xlabel("core passes k at test time (star: trained)")
    axes.set_ylabel("L(k) − L(K trained)  (nats per token)")
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    save_figure(figure, file)


@figure_style()
def draw_forecast(forecast: Forecast, file: Path) -> None:
    """Score against compute: measured points, the forecast (dashed beyond them), references as lines."""
    import numpy as np

    figure_format(file)  # refuses a file name without a known ending before drawing
    computes = [run.flops for runs in forecast.runs.values() for run in runs]
    flops = np.geomspace(min(computes), max([*forecast.targets, 10 * max(computes)]), 200)
    figure = new_figure(1.5 * WIDTH, 1.1 * HEIGHT)
    axes = figure.subplots()
    top = 0.0
    colours = curve_colours([*forecast.runs])
    for (name, runs), colour, marker in zip(forecast.runs.items(), colours, cycle(MARKERS)):
        score = forecast.fit.predict(name, flops)
        held = forecast.held_out.get(name, [])
        shown = [run for run in runs if run not in held]
        points = [run.flops for run in shown], [forecast.score(run) for run in shown]
        edge = int((flops <= max(points[0])).sum())
        axes.plot(flops[:edge], score[:edge], color=colour, label=name)
        axes.plot(flops[max(0, edge - 1) :], score[max(0, edge - 1) :], color=colour, linestyle="--")
        axes.plot(*points, color=colour, marker=marker, linestyle="none")
        if held:
            axes.plot(
                [run.flops for run in held],
                [forecast.score(run) for run in held],
                color=colour,
                marker="*",
                markersize=9,
                markeredgecolor=BLACK,
                linestyle="none",
            )
        top = max(top, *score.tolist(), *points[1], *(forecast.score(run) for run in held))
    axes.set_xscale("log")
    for name, value in forecast.references.items():
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle=":")
        axes.text(0.005, value, name, transform=axes.get_yaxis_transform(), va="bottom", color=GREY)
        top = max(top, value)
    if forecast.targets:
        axes.axvline(forecast.targets[-1], color=BLACK, linewidth=0.8, linestyle="-.")
    axes.set_ylim(top=top * 1.08)
    axes.set_xlabel("training compute (FLOPs)")
    tasks = len(forecast.tasks)
    axes.set_ylabel("CORE" if forecast.is_core else f"mean centred accuracy of {tasks} tasks")
    star = "; star: held out" if forecast.held_out else ""
    dotted = "; dotted: references" if forecast.references else ""
    axes.set_title(f"points: measured{star}; dashed: forecast{dotted}", loc="left")
    axes.legend(loc="lower right")
    save_figure(figure, file)
