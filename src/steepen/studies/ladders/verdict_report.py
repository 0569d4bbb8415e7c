"""A laws report as findings, tables and panels: what every ladder study shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from steepen.laws.analysis import LadderAnalysis
from steepen.laws.ladder import Ladder
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.ladders.ladder_runs import MeasuredLadder, cost_of
from steepen.studies.plotting import finite_or_none, line, points

WORDS = {
    "flops": ("training compute (FLOPs)", "compute", "FLOPs"),
    "seconds": ("training time (seconds)", "time", "seconds"),
}


def verdict_sentences(report: LadderAnalysis) -> list[str]:
    """The verdicts as sentences."""
    return [verdict.sentence for verdict in report.verdicts.values()]


def what_would_change(report: LadderAnalysis) -> list[str]:
    """What would decide or undo each verdict."""
    return [
        f"{name}: {line}" for name, verdict in report.verdicts.items() for line in verdict.what_would_change
    ]


def verdict_table(report: LadderAnalysis, by: str = "flops") -> Table:
    """One row per ladder: its law, its verdict, and the multiplier at the bottom and the top."""
    _, noun, _ = WORDS[by]
    rows: list[tuple[object, ...]] = []
    for name, law in report.primary_fit.arms.items():
        verdict = report.verdicts.get(name)
        found = sorted(
            (m for m in report.multipliers.get(name, ()) if m.method == "interpolated"), key=lambda m: m.flops
        )
        low, high = (found[0].value, found[-1].value) if found else (None, None)
        gamma = law.gamma
        rows.append(
            (
                name,
                verdict.word if verdict else "reference",
                gamma.value,
                finite_or_none(gamma.unconditional[0]),
                finite_or_none(gamma.unconditional[1]),
                verdict.delta_gamma if verdict else None,
                finite_or_none(verdict.delta_gamma_interval[0]) if verdict else None,
                finite_or_none(verdict.delta_gamma_interval[1]) if verdict else None,
                low,
                high,
            )
        )
    return Table(
        title=f"Verdicts against {report.request.reference}" + ("" if by == "flops" else f", per {noun}"),
        columns=(
            "arm",
            "verdict",
            "γ",
            "γ low",
            "γ high",
            "Δγ",
            "Δγ low",
            "Δγ high",
            "× bottom (interpolated)",
            "× top (interpolated)",
        ),
        rows=tuple(rows),
        caption=(
            f"γ of L = E + A·(C/C0)^−γ by one joint fit, with {report.request.confidence:.0%} intervals that "
            f"count E as unknown; × is the {noun} the reference needs over the arm's for the same loss, "
            "interpolated between measurements, at the lowest and highest budget both cover."
        ),
    )


def hypotheses_table(report: LadderAnalysis, by: str = "flops") -> Table:
    """What each arm would gain beyond the ladder if its exponent, or if only its floor, were better."""
    _, noun, _ = WORDS[by]
    rows: list[tuple[object, ...]] = []
    for name, verdict in report.verdicts.items():
        row: list[object] = [name]
        for reading in ("exponent", "irreducible"):
            fit = verdict.hypotheses[reading]
            row += [finite_or_none(prediction.multiplier) for prediction in fit.predictions[:2]]
            row.append(finite_or_none(fit.p_against_free) if fit.p_against_free is not None else None)
        rows.append(tuple(row))
    return Table(
        title="If exponent, if floor" + ("" if by == "flops" else f", per {noun}"),
        columns=(
            "arm", "exponent: × at 10×", "exponent: × at 1000×", "exponent: p",
            "floor: × at 10×", "floor: × at 1000×", "floor: p",
        ),
        rows=tuple(rows),
        caption=(
            f"The {noun} multiplier at 10 and 1000 times the reference's top budget under either reading: a "
            "better exponent above a common floor, or a lower floor with the same exponent. Fitted and "
            "extrapolated, not measured. A small p refutes a reading; if neither is refuted, both are open."
        ),
    )  # fmt: skip


def ladder_panels(
    report: LadderAnalysis, ladders: dict[str, Ladder], measured: Sequence[MeasuredLadder], by: str = "flops"
) -> list[Panel]:
    """Loss against compute with fits, reducible loss, multipliers with bands, exponent against constant."""
    label, noun, _ = WORDS[by]
    arms = {one.spec.label: one.spec.arm.name for one in measured}
    head = report.primary_fit
    floor = next(iter(head.arms.values())).e.value
    loss: list[Series] = []
    above: list[Series] = []
    for one in measured:
        name = one.spec.label
        law, records = head.arms[name], one.records
        x = [cost_of(record, by) for record in records]
        y = [record.validation_loss for record in records]
        names = [record.run for record in records]
        look = {"arm": arms[name]}
        loss.append(points(name, x, y, names, **look))
        above.append(points(name, x, [value - floor for value in y], names, **look))
        grid = np.geomspace(min(x), max(x), 60)
        loss.append(line(f"{name}: γ = {law.gamma.value:.4f}", grid, law.predict(grid), **look))
        above.append(line(name, grid, law.predict(grid) - floor, **look))
    panels = [
        Panel(
            f"Loss against {noun}", Axis(label, "log"), Axis("validation loss (nats per token)"), tuple(loss),
            caption=f"One point per run; lines are laws above one floor E = {floor:.4f}, fitted jointly.",
        ),
        Panel(
            f"Loss above the floor against {noun}", Axis(label, "log"), Axis("loss − E", "log"), tuple(above),
            caption="A power law is a straight line here; a better exponent is a steeper one.",
        ),
    ]  # fmt: skip
    panels.append(_multipliers(report, ladders, arms, by))
    panels.append(_plane(report, arms))
    return panels


def _multipliers(report: LadderAnalysis, ladders: dict[str, Ladder], arms: dict[str, str], by: str) -> Panel:
    label, noun, _ = WORDS[by]
    series: list[Series] = []
    for name, found in report.multipliers.items():
        measured = sorted((m for m in found if m.method == "interpolated"), key=lambda m: m.flops)
        if measured:
            x = tuple(m.flops for m in measured)
            look: dict[str, Any] = {"arm": arms[name]}
            series.append(points(name, x, [m.value for m in measured], **look))
            series.append(line(name, x, [m.value for m in measured], **look))
            low, high = tuple(m.low for m in measured), tuple(m.high for m in measured)
            series.append(Series(f"{name}: band", "band", x, low, high, **look))
        fitted = sorted((m for m in found if m.method == "fitted (joint)"), key=lambda m: m.flops)
        if fitted:
            series.append(
                line(
                    f"{name}: fitted", [m.flops for m in fitted], [m.value for m in fitted],
                    arm=arms[name], style="dotted",
                )
            )  # fmt: skip
    reference = report.request.reference
    return Panel(
        f"{noun.capitalize()} multiplier over {reference}",
        Axis(f"{label} of {reference}", "log"),
        Axis("multiplier", "log"),
        tuple(series),
        lines=(("y", 1.0, reference),),
        caption="Flat is a better constant, rising a better exponent (or a lower floor). Points interpolate "
        f"between measurements, with {report.request.confidence:.0%} bands; dotted are the fitted laws.",
    )


def _plane(report: LadderAnalysis, arms: dict[str, str]) -> Panel:
    """Better is up and to the right: a larger exponent, a smaller constant."""
    series: list[Series] = []
    for name, law in report.primary_fit.arms.items():
        x, y = law.log_a.value, law.gamma.value
        series.append(Series(name, "points", (x,), (y,), arm=arms[name]))
        for (low, high), given, style in (
            (law.gamma.unconditional, "E unknown", "dotted"),
            (law.gamma.conditional, "given E", "solid"),
        ):
            if finite_or_none(low) is not None and finite_or_none(high) is not None:
                label = f"{name}: interval, {given}"
                series.append(line(label, (x, x), (low, high), arm=arms[name], style=style))
    return Panel(
        "Exponent against constant", Axis("log A (reducible loss at C0)", reverse=True), Axis("γ"),
        tuple(series),
        caption=f"At C0 = {report.primary_fit.c0:.3g}; bars are {report.request.confidence:.0%} intervals: "
        "solid given E, dotted with E unknown (always the longer).",
    )  # fmt: skip


def runs_table(measured: Sequence[MeasuredLadder]) -> Table:
    """Every run of the ladders."""
    rows = tuple(
        (
            one.spec.label, record.spec.shape.depth, record.spec.seed, record.parameters.initial_stored,
            record.tokens, record.flops, record.validation_loss, record.seconds_training,
            record.spec.hyperparameters.learning_rate, record.run,
        )
        for one in measured
        for record in one.records
    )  # fmt: skip
    return Table(
        "Runs",
        ("arm", "depth", "seed", "parameters", "tokens", "FLOPs", "loss", "seconds", "GLR", "run"),
        rows,
        "Parameters are those stored at the start; seconds are of training alone.",
    )
