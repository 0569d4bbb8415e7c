"""Figures of an evaluation, from its plain results; colours that colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steepen.evaluation.core.suite import FILTERED_OUT

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
    "schema": "shared ending",
    "language_modeling": "language modelling",
}


def draw(found: Mapping[str, Any], folder: Path, title: str = "") -> list[Path]:
    """Draw whatever `steepen eval` measured, one PNG each, into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    if "core" in found:
        files.append(folder / "core_tasks.png")
        draw_tasks(found["core"], files[-1], title)
    if "depth_used" in found:
        files.append(folder / "depth_used.png")
        draw_depth({title or "network": found["depth_used"]}, files[-1])
    if "passes_curve" in found:
        files.append(folder / "passes.png")
        draw_passes({title or "network": found["passes_curve"]}, files[-1])
    return files


def _axes(width: float, height: float) -> tuple[Any, Any]:
    # The figure is made without pyplot: nothing global, and no window system asked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_tasks(core: Mapping[str, Any], file: Path, title: str = "") -> None:
    """Centred accuracy of every task; whiskers span the seeds, hollow bars are outside the 17-task subset."""
    from matplotlib.patches import Patch

    tasks = sorted(core["tasks"].items(), key=lambda pair: pair[1]["centered"])
    figure, axes = _axes(7.5, 1.6 + 0.26 * len(tasks))
    for place, (label, task) in enumerate(tasks):
        colour = KIND_COLOURS[task["kind"]]
        kept = label not in FILTERED_OUT
        axes.barh(
            place,
            task["centered"],
            height=0.72,
            color=colour if kept else "none",
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


def draw_forecast(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    measured: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    held_out: Mapping[str, tuple[float, float]],
    references: Mapping[str, float],
    file: Path,
    target: float | None = None,
    label: str = "CORE",
) -> None:
    """The score named by `label` against compute: measured points, the forecast (dashed beyond them),
    references as lines.
    """
    figure, axes = _axes(7.5, 4.6)
    most = 0.0
    for index, (name, (flops, score)) in enumerate(curves.items()):
        colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
        points = measured[name]
        inside = [at <= max(points[0]) for at in flops]
        edge = sum(inside)
        axes.plot(flops[:edge], score[:edge], color=colour, linewidth=1.8, label=name)
        axes.plot(
            flops[max(0, edge - 1) :], score[max(0, edge - 1) :], color=colour, linewidth=1.8, linestyle="--"
        )
        axes.plot(*points, color=colour, marker=marker, linestyle="none", markersize=6)
        if name in held_out:
            axes.plot(
                *held_out[name],
                color=colour,
                marker="*",
                markersize=15,
                markeredgecolor="black",
                linestyle="none",
            )
        most = max(most, *score, *points[1])
    axes.set_xscale("log")
    for name, value in references.items():
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle=":")
        axes.text(
            0.005, value, name, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8, color=GREY
        )
        most = max(most, value)
    if target is not None:
        axes.axvline(target, color="black", linewidth=0.8, linestyle="-.")
    axes.set_ylim(top=most * 1.08)
    axes.set_xlabel("training compute (FLOPs)")
    axes.set_ylabel(label)
    star = "; star: held out" if held_out else ""
    dotted = "; dotted: references" if references else ""
    axes.set_title(f"points: measured{star}; dashed: forecast{dotted}", fontsize=9, loc="left")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=150)
