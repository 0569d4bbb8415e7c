"""Panels that a report adds from the runs themselves: loss curves, and residuals of laws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from steepen.laws.fits.compute_law import ArmLaw
from steepen.report.colours import arm_key
from steepen.report.curves import ladder_title
from steepen.report.summary import runs_of_ladders
from steepen.runs.metrics import read_metrics
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory
from steepen.studies.answer import Answer, Axis, Panel, Series, StudyFit, Table
from steepen.studies.plotting import line, points

CURVE_POINTS = 60  # means of equal numbers of steps, after the first ones
MAX_CURVES = 8  # of an arm
MAX_ARMS = 9


def curve_panels(records: Sequence[RunRecord], directory: Path | None, titles: dict[str, str]) -> list[Panel]:
    """Loss during training, a panel per arm: of metrics.jsonl, or of the validations in the records."""
    arms: dict[str, list[RunRecord]] = {}
    for record in records:
        arms.setdefault(record.spec.arm.name, []).append(record)
    panels: list[Panel] = []
    for name, own in list(arms.items())[:MAX_ARMS]:
        chosen = _spread(sorted(own, key=lambda r: (r.spec.seed, -r.flops))[:200])
        series: list[Series] = []
        for record in chosen:
            x, y = _curve(record, directory)
            if len(x) > 1:
                label = f"d{record.spec.shape.depth}"
                level = float(record.spec.shape.depth)
                detail = f"run {record.run}"
                series.append(Series(label, "line", x, y, level=level, family="depth", detail=detail))
        if series:
            more = "" if len(series) == len(own) else f" ({len(series)} of {len(own)} runs)"
            panels.append(
                Panel(
                    f"{ladder_title(name, '', titles)}{more}",
                    Axis("tokens", "log"),
                    Axis("loss (nats per token)"),
                    tuple(series),
                    group="Loss curves of the runs",
                    share="y",
                )
            )
    return panels


def compared_curves(
    runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], tokens_per_step: Sequence[float]
) -> Panel:
    """Training loss over tokens of some runs, from their lines of metrics.jsonl; validations as points."""
    series: list[Series] = []
    for (label, lines), tokens in zip(runs, tokens_per_step, strict=True):
        for name, made in (("loss", line), ("validation_loss", points)):
            rows = [(row["step"] * tokens, row[name]) for row in lines if row.get(name) is not None]
            if rows:
                note = "training" if name == "loss" else "validation"
                series.append(made(label, *zip(*rows, strict=True), note=note))
    return Panel("Loss curves", Axis("tokens"), Axis("loss (nats per token)"), tuple(series))


def _spread(records: list[RunRecord]) -> list[RunRecord]:
    """At most `MAX_CURVES` runs, evenly spaced in compute, one for each depth first."""
    by_depth = {record.spec.shape.depth: record for record in reversed(records)}
    ordered = sorted(by_depth.values(), key=lambda record: record.flops)
    if len(ordered) <= MAX_CURVES:
        return ordered
    step = (len(ordered) - 1) / (MAX_CURVES - 1)
    return [ordered[round(i * step)] for i in range(MAX_CURVES)]


def _curve(record: RunRecord, directory: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Tokens and loss: training loss in means over steps that grow geometrically, or validation losses."""
    rows: list[tuple[float, float]] = []
    if directory is not None:
        lines = read_metrics(RunDirectory(directory / record.run).metrics_file)
        rows = [(row["step"], row["loss"]) for row in lines if row.get("loss") is not None]
    rows = rows or [(score.step, score.loss) for score in record.validation_scores]
    rows = [(step, loss) for step, loss in rows if step > 0 and math.isfinite(loss)]
    if not rows:
        return (), ()
    growth = max(rows[-1][0] / rows[0][0], 1.0) ** (1 / CURVE_POINTS)
    bins: dict[int, list[tuple[float, float]]] = {}
    for step, loss in rows:
        place = 0 if growth <= 1 else int(math.log(step / rows[0][0]) / math.log(growth) + 1e-9)
        bins.setdefault(place, []).append((step, loss))
    batch = record.spec.batch_tokens
    return (
        tuple(batch * fmean(step for step, _ in found) for found in bins.values()),
        tuple(fmean(loss for _, loss in found) for found in bins.values()),
    )


def residual_panel(answer: Answer, records: Sequence[RunRecord], titles: dict[str, str]) -> Panel | None:
    """Loss minus law of every run of every ladder, against compute; None without laws of compute."""
    series: list[Series] = []
    scatter: list[str] = []
    for one, law, own in _ladders(answer, records):
        misses = [r.validation_loss - float(law.predict(r.flops)) for r in own]
        series.append(
            Series(
                one.arm, "points", tuple(r.flops for r in own), tuple(misses), arm=one.arm,
                variant=one.variant, runs=tuple(r.run for r in own),
            )
        )  # fmt: skip
        title = ladder_title(one.arm, one.variant, titles)
        scatter.append(f"{title} {_residual_sd(misses):.2g}")
    if not series:
        return None
    return Panel(
        "Residuals of the laws",
        Axis("training compute (FLOPs)", "log"),
        Axis("loss − law (nats per token)"),
        tuple(series),
        lines=(("y", 0.0, ""),),
        caption=f"Standard deviations: {', '.join(scatter)}.",
    )


def scatter_table(answer: Answer, records: Sequence[RunRecord], titles: dict[str, str]) -> Table | None:
    """Runs and scatter about its law of every ladder; None without laws of compute."""
    rows: list[tuple[object, ...]] = []
    for one, law, own in _ladders(answer, records):
        misses = {r.run: r.validation_loss - float(law.predict(r.flops)) for r in own}
        worst = max(misses, key=lambda run: abs(misses[run]))
        by_rung: dict[int, list[float]] = {}
        for record in own:
            by_rung.setdefault(record.spec.shape.depth, []).append(record.validation_loss)
        seeds = [_deviations(losses) for losses in by_rung.values() if len(losses) > 1]
        squares, degrees = sum(s for s, _ in seeds), sum(d for _, d in seeds)
        rows.append(
            (
                ladder_title(one.arm, one.variant, titles), len(own), _residual_sd([*misses.values()]),
                math.sqrt(squares / degrees) if degrees else None, misses[worst], worst,
            )
        )  # fmt: skip
    if not rows:
        return None
    return Table(
        "Scatter about the laws",
        ("arm", "runs", "residual sd", "sd between seeds", "largest residual", "run"),
        tuple(rows),
        "In nats per token. A residual sd far above that between seeds means that the law does not fit.",
        arm_column=0,
    )


def _residual_sd(misses: Sequence[float]) -> float:
    """Standard deviation about a law of two parameters of its own."""
    return math.sqrt(sum(miss**2 for miss in misses) / max(1, len(misses) - 2))


def _deviations(losses: Iterable[float]) -> tuple[float, int]:
    """Sum of squares about the mean, and degrees of freedom."""
    values = list(losses)
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values), len(values) - 1


def _ladders(answer: Answer, records: Sequence[RunRecord]) -> list[tuple[StudyFit, ArmLaw, list[RunRecord]]]:
    """Every law of loss against FLOPs (the joint fit's, if there are two), with the runs of its ladder."""
    runs = runs_of_ladders(answer)
    found: dict[tuple[str, str, str], tuple[StudyFit, ArmLaw, list[RunRecord]]] = {}
    for one in answer.fits:
        if not isinstance(one.fit, ArmLaw) or one.quantity != "loss" or one.against.lower() != "flops":
            continue
        key = (arm_key(one.arm), one.variant, one.part)
        own = [record for record in records if record.run in runs.get(key[:2], ())]
        if own and (key not in found or one.method == "joint"):
            found[key] = (one, one.fit, own)
    return list(found.values())
