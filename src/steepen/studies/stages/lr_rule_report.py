"""The learning-rate rule's answer: drift table, constant against scaled recipe, and panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steepen.laws.fits.drift import Drift
from steepen.laws.fits.isoflop import PowerLawFit
from steepen.recipe.hyperparameters import paper_code, with_paper_code
from steepen.studies.answer import Answer, Axis, Panel, Series, StudyFit, Table
from steepen.studies.context import StudyContext
from steepen.studies.plotting import (
    censored_points,
    family_curve,
    finite_or_none,
    joined,
    line,
    optimum_star,
    parabola_or_segments,
    points,
)
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.4.4, Stage 4: Fit the Learning-Rate Rule"
SWEEPS = "one hyperparameter at a time, constant and scaled recipes"


@dataclass(frozen=True)
class HyperparameterSweeps:
    """All slices of one arm under one recipe: drift, points and runs by hyperparameter."""

    arm: str
    kind: Literal["constant", "scaled", "screen"]  # learning rate constant over sizes, or by the rule
    recipe: str  # the kind in words: "constant", "+GLR (β = −0.6)"
    drifts: dict[str, Drift]
    rows: dict[str, list[tuple[int, float, float, str]]]  # depth, multiple, loss, run
    base_losses: dict[int, float]  # loss at the base values, by depth
    tokens: dict[int, int]
    stored: dict[int, float]  # parameters at the start, by depth
    listed: tuple[str, ...] = ()  # hyperparameters swept over listed values, not multiples of the base


@dataclass(frozen=True)
class LearningRateRule:
    """The rule lr(N) = anchor·(N/N_base)^exponent to use for an arm.

    A growing arm's exponent is the one of the arm it starts as (`inherited`) plus the measured drift around
    it, to one decimal, and its anchor is fitted again; `anchor` is None if the recipe's stays.
    """

    exponent: float
    anchor: float | None = None
    inherited: float | None = None


def lr_rule_answer(
    context: StudyContext, swept: Sequence[HyperparameterSweeps], rules: dict[str, LearningRateRule]
) -> Answer:
    """The answer of the learning-rate study; `rules` are those to use, by arm."""
    found: list[str] = []
    notes: list[str] = []
    for arm, rule in rules.items():
        own = [one for one in swept if one.arm == arm and one.kind != "screen"]
        found.append(_sentence(arm, rule, own))
        for one in own:
            for name, drift in one.drifts.items():
                out = sum(vertex.censored for vertex in drift.vertices)
                if out:
                    notes.append(
                        f"{arm}, {one.recipe}: {out} of {len(drift.vertices)} optima of {name} lie outside "
                        "their sweeps and take no part in the drift"
                    )
    found += [_screened(one) for one in swept if one.kind == "screen"]
    panels = _panels(swept)
    tables = [_drift_table(swept)]
    compared = _comparison(swept)
    if compared is not None:
        tables.append(compared)
    depths = context.preset.grids.lr_rule.depths
    return Answer(
        study="lr-rule",
        question="How must the learning rate change with model size, and must anything else?",
        section=SECTION,
        findings=tuple(found),
        values=json_safe(
            {
                "rules": {
                    arm: {
                        "learning_rate_exponent": rule.exponent,
                        "learning_rate_base": rule.anchor,
                        "inherited_exponent": rule.inherited,
                    }
                    for arm, rule in rules.items()
                },
                "drift": [_values(one) for one in swept],
            }
        ),
        fits=tuple(
            StudyFit(drift, name, "stored parameters", one.arm, one.recipe)
            for one in swept
            for name, drift in one.drifts.items()
        ),
        panels=tuple(panels),
        tables=tuple(tables),
        warnings=tuple(notes),
        method=(
            f"Compute-optimal runs at depths {', '.join(map(str, depths))}; one hyperparameter at a time at "
            "multiples of its base value.",
            "β regresses the log optima on log initial stored parameters, with Student t intervals: with "
            "three sizes there is one degree of freedom, and three standard errors are p = 0.2.",
            "Regret is the mean loss at 0.5× and 2× the base value minus the loss at the base; range is the "
            "whole span of the slice; both at the largest size.",
        ),
        runs=tuple(dict.fromkeys(row[3] for one in swept for rows in one.rows.values() for row in rows)),
    )


def _sentence(arm: str, rule: LearningRateRule, own: Sequence[HyperparameterSweeps]) -> str:
    beta = rule.exponent
    drift = own[0].drifts.get("learning_rate")
    if drift is None or drift.law is None:
        return f"{arm}: too few learning-rate optima lie inside their sweeps for a rule; the recipe's stays."
    fitted = _exponent(drift.law)
    if own[0].kind != "constant":
        anchor = "" if rule.anchor is None else f" with {rule.anchor:.2g} at the base size"
        return (
            f"{arm}: GLR(N) ∝ N^{beta:+.1f}{anchor}: the inherited rule (β = {rule.inherited:+.1f}) plus the "
            f"drift of the optimum around it, {fitted}."
        )
    gain = ""
    if len(own) > 1:
        constant, scaled = own[0].base_losses, own[1].base_losses
        finished = [d for d in constant if math.isfinite(constant[d]) and math.isfinite(scaled[d])]
        if finished:
            top = max(finished)
            more = scaled[top] - constant[top]
            gain = f"; at d{top} the scaled rate changes the loss by {more:+.4f} against the constant one"
        left = own[1].drifts["learning_rate"].law if "learning_rate" in own[1].drifts else None
        if left is not None:
            gain += f", and around it the optimum still drifts with exponent {_exponent(left)}"
    return f"{arm}: GLR(N) ∝ N^{beta:+.1f} (fitted {fitted}){gain}."


def _exponent(law: PowerLawFit) -> str:
    """An exponent with what is known of its error; two sizes give a line and no error."""
    if law.degrees_of_freedom < 1:
        return f"{law.exponent:+.2f} from two sizes alone, so without an error"
    return f"{law.exponent:+.2f} ± {law.standard_error:.2f}, p = {law.p_value:.2g}"


def _screened(one: HyperparameterSweeps) -> str:
    spans = {name: d.span or 0.0 for name, d in one.drifts.items()}
    for name in one.listed:  # at the largest size, as for the others
        top = max((row[0] for row in one.rows[name]), default=0)
        losses = [row[2] for row in one.rows[name] if row[0] == top and math.isfinite(row[2])]
        if len(losses) > 1:
            spans[name] = max(losses) - min(losses)
    ranked = sorted(((span, name) for name, span in spans.items()), reverse=True)
    if not ranked:
        return f"{one.arm}, screened: too few runs finished for a single sweep."
    words = ", ".join(f"{name} {span:.4f}" for span, name in ranked[:4])
    return f"{one.arm}, screened: the widest loss ranges are {words}."


def _values(one: HyperparameterSweeps) -> dict[str, Any]:
    return {
        "arm": one.arm,
        "recipe": one.recipe,
        "centres": {str(depth): loss for depth, loss in one.base_losses.items()},
        "hyperparameters": {
            name: {
                "exponent": drift.law.exponent if drift.law else None,
                "error": drift.law.standard_error if drift.law else None,
                "interval": list(drift.law.interval) if drift.law else None,
                "p_value": drift.law.p_value if drift.law else None,
                "regret": drift.regret,
                "range": drift.span,
                "optima": [[v.budget, v.x, v.interior] for v in drift.vertices],
            }
            for name, drift in one.drifts.items()
        },
    }


def _tested(drift: Drift) -> PowerLawFit | None:
    """The drift's line, or None if there are too few sizes for a standard error of its exponent."""
    return drift.law if drift.law is not None and drift.law.degrees_of_freedom > 0 else None


def _drift_table(swept: Sequence[HyperparameterSweeps]) -> Table:
    rows = tuple(
        (
            one.arm, one.recipe, with_paper_code(name),
            drift.law.exponent if drift.law else None,
            law.standard_error if (law := _tested(drift)) else None,
            law.p_value if law else None, drift.exceeds_three_standard_errors,
            1e3 * drift.regret if drift.regret is not None else None,
            1e3 * drift.span if drift.span is not None else None,
            sum(v.interior for v in drift.vertices),
        )
        for one in swept
        for name, drift in one.drifts.items()
    )  # fmt: skip
    return Table(
        "Hyperparameter drift and sensitivity",
        (
            "arm",
            "recipe",
            "hyperparameter",
            "β",
            "SE",
            "p",
            "|β| ≥ 3 SE",
            "regret ×10³",
            "range ×10³",
            "interior optima",
        ),
        rows,
        "Under a constant recipe the optimum scales as N^β; under a scaled one GLR shows the residual drift.",
        arm_column=0,
    )


def _comparison(swept: Sequence[HyperparameterSweeps]) -> Table | None:
    pairs = [
        (one, other)
        for one in swept
        for other in swept
        if one.arm == other.arm and one.kind == "constant" and other.kind == "scaled"
    ]
    rows = tuple(
        (one.arm, f"d{depth}", one.tokens[depth], finite_or_none(one.base_losses[depth]),
         finite_or_none(other.base_losses[depth]),
         finite_or_none(one.base_losses[depth] - other.base_losses[depth]))
        for one, other in pairs
        for depth in one.base_losses
    )  # fmt: skip
    if not rows:
        return None
    columns = ("arm", "size", "tokens", "constant", "scaled", "gain of scaling")
    return Table(
        "Constant against scaled learning rate", columns, rows, "Losses at the base values.", arm_column=0
    )


def _panels(swept: Sequence[HyperparameterSweeps]) -> list[Panel]:
    """A figure for each arm: one panel for each hyperparameter, constant and scaled recipes together.

    A screen has a figure of its own. Then how the best learning rate of every arm and recipe drifts.
    """
    panels: list[Panel] = []
    for arm, screen in dict.fromkeys((one.arm, one.kind == "screen") for one in swept):
        own = [one for one in swept if one.arm == arm and (one.kind == "screen") == screen]
        group = f"{arm}, screen: one hyperparameter at a time" if screen else f"{arm}: {SWEEPS}"
        made = [_panel(name, own, group) for name in own[0].rows]
        panels += [panel for panel in made if panel.series]
    drifts = [panel for one in swept if (panel := _drift_panel(one)) is not None]
    return [*panels, *drifts]


def _panel(name: str, own: Sequence[HyperparameterSweeps], group: str) -> Panel:
    """Loss against one hyperparameter at every size; a constant recipe is dashed beside a scaled one."""
    series: list[Series] = []
    for one in own:
        rows = one.rows[name]
        drift = one.drifts.get(name)
        beside = len(own) > 1
        dashed = beside and one.kind == "constant"
        look: dict[str, Any] = {"note": f"{one.kind} recipe"} if beside else {}
        for depth in sorted({row[0] for row in rows}):
            at = [row for row in rows if row[0] == depth and math.isfinite(row[2])]
            if len(at) < 2:  # the base values alone: nothing was swept at this size
                continue
            x, y = [row[1] for row in at], [row[2] for row in at]
            label, curve = family_curve("depth", depth)
            series.append(points(label, x, y, [row[3] for row in at], filled=not dashed, **look, **curve))
            stored = one.stored[depth]
            vertex = next((v for v in drift.vertices if v.budget == stored), None) if drift else None
            style = "dashed" if dashed else "solid"
            if vertex is None:
                series.append(joined(label, x, y, style=style, **curve))
                continue
            series += parabola_or_segments(label, x, y, vertex, log=True, **curve, style=style)
            if not dashed:
                series.append(optimum_star(label, vertex, **curve))
    code = paper_code(name)
    words = name.replace("_", " ")
    law = next((d.law for one in own if (d := one.drifts.get(name)) is not None), None)
    beta = ""
    if law is not None and own[0].kind == "constant":
        beta = f", β = {law.exponent:+.2f}".replace("-", "−")
    title = (f"{words} ({code})" if code else words) if own[0].kind == "screen" else f"{code or words}{beta}"
    listed = name in own[0].listed
    return Panel(
        title if own[0].kind == "screen" else f"{own[0].arm}: {title}",
        Axis(words if listed else f"{words} (× base)", "linear" if listed and name != "adam_eps" else "log"),
        Axis("validation loss", "log"),
        tuple(series),
        caption=""
        if len(own) == 1
        else "Solid and filled: the learning rate by the rule; dashed and hollow: constant over sizes. "
        "Stars: optima of the scaled recipe. β is the drift under the constant one.",
        group=group,
        columns=4,
    )


def _drift_panel(one: HyperparameterSweeps) -> Panel | None:
    drift = one.drifts.get("learning_rate")
    if drift is None or drift.law is None:
        return None
    inside = [v for v in drift.vertices if v.interior]
    x, y = [v.budget for v in inside], [v.x for v in inside]
    series = [
        points(one.arm, x, y, arm=one.arm),
        *censored_points(one.arm, drift.vertices, arm=one.arm),
    ]
    ends = [inside[0].budget, inside[-1].budget]
    law = drift.law
    fitted = [law.predict(x) for x in ends]
    series.append(line(one.arm, ends, fitted, arm=one.arm, role="fit", detail=f"∝ N^{law.exponent:.2f}"))
    return Panel(
        f"{one.arm}, {one.recipe}", Axis("stored parameters at the start", "log"),
        Axis("best GLR (× the recipe's)", "log"), tuple(series), group="Drift of the best learning rate",
    )  # fmt: skip
