"""Panels of `steepen fit` for compute laws: losses, multipliers, and exponents against constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.laws.ladder import Ladder
from steepen.studies.answer import Axis, Panel, Series
from steepen.studies.ladders.verdict_report import exponent_panel, multiplier_panel
from steepen.studies.plotting import line, points
from steepen.utils.cost_axis import cost_axis


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
        "Loss and fitted laws",
        Axis(cost_axis(analysis.request.unit).label, "log"),
        Axis("loss", "log"),
        tuple(series),
    )
