"""Panels of evaluation scores: CORE tasks, KL effective depth, passes at test time, and forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from steepen.evaluation.core.suite import FILTERED_OUT
from steepen.evaluation.forecast import Forecast
from steepen.evaluation.scored_runs import PassesAtTestTime
from steepen.report.colours import ARM_COLOURS, arm_key
from steepen.results.panel import Lines
from steepen.studies.answer import Axis, Panel, Series
from steepen.studies.plotting import line, points
from steepen.studies.scores.score_forecasts import Scope, core_panel
from steepen.studies.scores.score_ladders import passes_curve

KIND_NAMES = {
    "schema": "schema",
    "multiple_choice": "multiple choice",
    "language_modeling": "language modelling",
}


def score_panels(scores: Mapping[str, Any], title: str = "") -> list[Panel]:
    """A panel for each kind of score present."""
    name, panels = title or "network", list[Panel]()
    if "kl_depth" in scores:
        panels.append(kl_depth_panel(name, scores["kl_depth"]))
    if "test_time_passes" in scores:
        panels.append(passes_panel(name, scores["test_time_passes"]))
    if "core" in scores:
        panels.append(task_panel(scores["core"], title))
    return panels


def task_panel(core: Mapping[str, Any], title: str = "") -> Panel:
    """Centred accuracy of every task; bars span the seeds, and hollow ones are not in CORE17."""
    tasks = sorted(core["tasks"].items(), key=lambda pair: pair[1]["centered"])
    series = [_task_bars(tasks, kind, filled) for kind in KIND_NAMES for filled in (True, False)]
    found = core.get("core22")
    score = f"mean {core['mean_centered']:.4f}" if found is None else f"CORE22 {found:.4f}"
    subset = "" if core.get("examples") is None else f", at most {core['examples']:,} examples per task"
    return Panel(
        f"{f'{title}: ' if title else ''}{score}{subset}",
        Axis("centred accuracy (0 = chance, 1 = perfect)"),
        Axis("", names=tuple(f"{label}, {task['shots']}-shot" for label, task in tasks)),
        tuple(bars for bars in series if bars.x),
        lines=(("x", 0.0, ""),),
    )


def _task_bars(tasks: Sequence[tuple[str, Mapping[str, Any]]], kind: str, filled: bool) -> Series:
    """The bars of the tasks of a kind that are in CORE17 (`filled`), or are not."""
    rows = [
        (float(place), label, task)
        for place, (label, task) in enumerate(tasks)
        if task["kind"] == kind and (label not in FILTERED_OUT) == filled
    ]
    spans = [
        [(seed["accuracy"] - task["baseline"]) / (1 - task["baseline"]) for seed in task["seeds"]]
        or [task["centered"]]
        for _, _, task in rows
    ]
    return Series(
        KIND_NAMES[kind], "bars", tuple(float(task["centered"]) for _, _, task in rows),
        tuple(place for place, _, _ in rows), low=tuple(map(min, spans)), high=tuple(map(max, spans)),
        filled=filled, note="" if filled else "not in CORE17", texts=tuple(label for _, label, _ in rows),
    )  # fmt: skip


def kl_depth_panel(name: str, depth: Mapping[str, Any]) -> Panel:
    """KL to the final prediction before the first and after every executed block; a star at the depth."""
    curve, stages, threshold = depth["curve"], list(depth["stages"]), float(depth["threshold"])
    # Scores of earlier versions have no value before the first block.
    first = depth["executed"] + 1 - len(curve)
    blocks, detail = range(first, first + len(curve)), f"{depth['depth']} of {depth['executed']}"
    star = (depth["depth"],), (curve[depth["depth"] - first],)
    series = (
        line(name, blocks, curve, detail=detail, **_colour(name)),
        points(name, blocks, curve, detail=detail, **_colour(name)),
        points(name, *star, marker="star", note="effective depth", **_colour(name)),
    )
    begun = [(stages.index(stage), stage) for stage in dict.fromkeys(stages)]
    title = f"KL effective depth: below {threshold:g} nats from the star on"
    axes = Axis("executed blocks"), Axis("KL to the final prediction (nats)")
    lines: Lines = (("y", threshold, ""), *(("x", at + 0.5, stage) for at, stage in begun if at))
    return Panel(title, *axes, series, lines)


def passes_panel(name: str, curve: Mapping[str, Any]) -> Panel:
    """L(k) − L(K trained) against k, a star at the trained K."""
    passes = PassesAtTestTime(curve["trained"], tuple(curve["passes"]), tuple(curve["differences"]))
    series = tuple(passes_curve(name, passes, **_colour(name)))
    axes = Axis("core passes k at test time"), Axis("L(k) − L(K trained)  (nats per token)")
    return Panel("Passes at test time", *axes, series, (("y", 0.0, ""),))


def forecast_panel(forecast: Forecast) -> Panel:
    """Score against compute: measured and held-out runs, the forecast, and where it reaches references."""
    farthest = max([*forecast.targets, *(10 * run.flops for one in forecast.series for run in one.runs)])
    label = "CORE" if forecast.is_core else f"mean centred accuracy of {len(forecast.tasks)} tasks"
    panel = core_panel(forecast, Scope(farthest, held=forecast.held_out))
    targets: Lines = tuple(("x", at, "target") for at in forecast.targets[-1:])
    return replace(panel, title="Forecast", y=Axis(label), lines=(*panel.lines, *targets), caption="")


def _colour(name: str) -> dict[str, Any]:
    """The arm's colour where the name is one of the main arms', else the palette's next."""
    return {"arm": name} if arm_key(name) in ARM_COLOURS else {}
