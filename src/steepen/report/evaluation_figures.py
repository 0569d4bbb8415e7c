"""Figures of evaluation scores, in colours that colour-blind readers can distinguish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError
from steepen.evaluation.core.suite import FILTERED_OUT

if TYPE_CHECKING:
    from steepen.evaluation.forecast import Forecast

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#767676",
)
SERIES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
KIND_COLOURS = {"multiple_choice": BLUE, "schema": ORANGE, "language_modeling": GREEN}
KIND_NAMES = {
    "multiple_choice": "multiple choice",
    "schema": "schema",
    "language_modeling": "language modelling",
}


def draw(found: Mapping[str, Any], folder: Path, title: str = "") -> list[Path]:
    """Draw each kind of score present, as one PNG each, into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    if "core" in found:
        files.append(folder / "core_tasks.png")
        draw_tasks(found["core"], files[-1], title)
    if "kl_depth" in found:
        files.append(folder / "kl_depth.png")
        draw_depth({title or "network": found["kl_depth"]}, files[-1])
    if "test_time_passes" in found:
        files.append(folder / "test_time_passes.png")
        draw_passes({title or "network": found["test_time_passes"]}, files[-1])
    return files


def _axes(width: float, height: float) -> tuple[Any, Any]:
    # Without pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_tasks(core: Mapping[str, Any], file: Path, title: str = "") -> None:
    """Centred accuracy of every task; whiskers span the seeds, hollow bars are not in CORE17."""
    from matplotlib.patches import Patch

    tasks = sorted(core["tasks"].items(), key=lambda pair: pair[1]["centered"])
    figure, axes = _axes(7.5, 1.6 + 0.26 * len(tasks))
    for place, (label, task) in enumerate(tasks):
        colour = KIND_COLOURS[task["kind"]]
        in_core17 = label not in FILTERED_OUT
        axes.barh(
            place,
            task["centered"],
            height=0.72,
            color=colour if in_core17 else "none",
            edgecolor=colour,
            linewidth=1.2,
        )
        span = [(seed["accuracy"] - task["baseline"]) / (1 - task["baseline"]) for seed in task["seeds"]]
        if len(span) > 1:
            axes.plot([min(span), max(span)], [place, place], color="black", linewidth=1.4)
        axes.plot(task["centered"], place, marker="o", markersize=3.5, color=colour, markeredgecolor="black")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(tasks)), [f"{label}, {task['shots']}-shot" for label, task in tasks], fontsize=8
    )
    axes.set_ylim(-0.7, len(tasks) - 0.3)
    axes.set_xlabel("centred accuracy (0 = chance, 1 = perfect)")
    handles = [
        Patch(facecolor=KIND_COLOURS[kind], label=KIND_NAMES[kind])
        for kind in KIND_COLOURS
        if any(task["kind"] == kind for _, task in tasks)
    ]
    if any(label in FILTERED_OUT for label, _ in tasks):
        handles.append(Patch(facecolor="none", edgecolor=GREY, label="not in CORE17"))
    axes.legend(handles=handles, fontsize=8, loc="lower right", frameon=False)
    score, name = (
        (core["core22"], "CORE22") if core.get("core22") is not None else (core["mean_centered"], "mean")
    )
    subset = "" if core.get("examples") is None else f", at most {core['examples']:,} examples per task"
    head = f"{title}: " if title else ""
    figure.suptitle(f"{head}{name} {score:.4f}{subset}", fontsize=10)
    figure.savefig(file, dpi=150)


def draw_depth(results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """KL to the final prediction after every executed block; a star where it is within the threshold."""
    figure, axes = _axes(7, 4)
    for index, (name, depth) in enumerate(results.items()):
        colour, curve = SERIES[index % len(SERIES)], depth["curve"]
        blocks = range(1, len(curve) + 1)
        label = f"{name}: {depth['depth']} of {depth['executed']}"
        axes.plot(
            blocks, curve, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=5, label=label
        )
        star = (depth["depth"], curve[depth["depth"] - 1])
        axes.plot(*star, marker="*", color=colour, markersize=16, markeredgecolor="black", linestyle="none")
    first = next(iter(results.values()))
    axes.axhline(first["threshold"], color=GREY, linestyle="--", linewidth=1)
    if len(results) == 1:
        _mark_stages(axes, first["stages"])
    axes.set_xlabel("executed block")
    axes.set_ylabel("KL to the final prediction (nats)")
    axes.set_ylim(0, 1.12 * max(first["threshold"], *(max(depth["curve"]) for depth in results.values())))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="best", fontsize=9)
    figure.suptitle(f"KL effective depth: within {first['threshold']:g} nats at the star", fontsize=10)
    figure.savefig(file, dpi=150)


def _mark_stages(axes: Any, stages: Sequence[str]) -> None:
    """Alternating bands with the stage's name above each."""
    start = 0
    names = list(dict.fromkeys(stages))
    for number, name in enumerate(names):
        end = start + list(stages).count(name)
        if number % 2:
            axes.axvspan(start + 0.5, end + 0.5, color="black", alpha=0.05, linewidth=0)
        axes.text(
            (start + end + 1) / 2, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", fontsize=8
        )
        start = end


def draw_passes(results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """L(k) − L(K trained) against k, a star at the trained K, as in the paper's figure."""
    figure, axes = _axes(6, 4)
    for index, (name, curve) in enumerate(results.items()):
        colour = SERIES[index % len(SERIES)]
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(
            curve["passes"], curve["differences"], color=colour, marker=marker, markersize=5, label=name
        )
        axes.plot(
            curve["trained"],
            0,
            marker="*",
            color=colour,
            markersize=16,
            markeredgecolor="black",
            linestyle="none",
        )
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1, zorder=0)
    axes.set_xlabel("core passes k at test time (star: trained)")
    axes.set_ylabel("L(k) − L(K trained)  (nats per token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def draw_forecast(forecast: Forecast, file: Path) -> None:
    """Score against compute: measured points, the forecast (dashed beyond them), references as lines."""
    import numpy as np

    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--figure {file} is not valid: its name must end in .png, .pdf or .svg.")
    file.parent.mkdir(parents=True, exist_ok=True)
    computes = [run.flops for runs in forecast.runs.values() for run in runs]
    flops = np.geomspace(min(computes), max([*forecast.targets, 10 * max(computes)]), 200)
    figure, axes = _axes(7.5, 4.6)
    top = 0.0
    for index, (name, runs) in enumerate(forecast.runs.items()):
        colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
        score = forecast.fit.predict(name, flops)
        points = [run.flops for run in runs], [forecast.score(run) for run in runs]
        edge = int((flops <= max(points[0])).sum())
        axes.plot(flops[:edge], score[:edge], color=colour, linewidth=1.8, label=name)
        axes.plot(
            flops[max(0, edge - 1) :], score[max(0, edge - 1) :], color=colour, linewidth=1.8, linestyle="--"
        )
        axes.plot(*points, color=colour, marker=marker, linestyle="none", markersize=6)
        if name in forecast.held_out:
            last = forecast.held_out[name][-1]
            axes.plot(
                last.flops,
                forecast.score(last),
                color=colour,
                marker="*",
                markersize=15,
                markeredgecolor="black",
                linestyle="none",
            )
        top = max(top, *score.tolist(), *points[1])
    axes.set_xscale("log")
    for name, value in forecast.references.items():
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle=":")
        axes.text(
            0.005, value, name, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8, color=GREY
        )
        top = max(top, value)
    if forecast.targets:
        axes.axvline(forecast.targets[-1], color="black", linewidth=0.8, linestyle="-.")
    axes.set_ylim(top=top * 1.08)
    axes.set_xlabel("training compute (FLOPs)")
    tasks = len(forecast.tasks)
    axes.set_ylabel("CORE" if forecast.is_core else f"mean centred accuracy of {tasks} tasks")
    star = "; star: held out" if forecast.held_out else ""
    dotted = "; dotted: references" if forecast.references else ""
    axes.set_title(f"points: measured{star}; dashed: forecast{dotted}", fontsize=9, loc="left")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=150)
