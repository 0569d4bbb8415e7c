"""The three laws of `steepen fit`: read the table's columns, fit, and print, draw or write JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import typer

from steepen.cli.fit_tables import show_report, status
from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, analyse
from steepen.laws.fits.chinchilla import ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.isoflop import IsoflopFit, fit_isoflop
from steepen.laws.fits.solver import Array
from steepen.laws.ladder import Ladder, read_ladders
from steepen.laws.table import Table, read_table
from steepen.laws.verdict.holdout import exclude_rungs, split_hold_out
from steepen.utils.json_io import to_json


@dataclass(frozen=True)
class Output:
    """How to answer: as JSON or as text, with or without a figure, and what to hold out and predict."""

    as_json: bool
    figure: Path | None
    holds: list[str]
    budget: float | None

    def finish(self) -> None:
        """Say where the figure is, if one was drawn."""
        if self.figure is not None:
            typer.echo(f"figure: {self.figure}")


def run_compute(data: Table, reference: str | None, options: dict[str, Any], output: Output) -> None:
    """Laws of every arm, and the verdicts."""
    ladders = read_ladders(data)
    if reference is None and len(ladders) == 1:  # its law alone
        reference = next(iter(ladders))
    if reference is None:
        raise UsageError(
            f"name the arm to judge against with --reference; the arms are {', '.join(ladders)}."
        )
    request = AnalysisRequest(reference=reference, budget=output.budget, **options)
    ladders, held = _hold_out(ladders, output.holds)
    with status(f"fitting {len(ladders)} arms", output.as_json) as say:
        done: list[str] = []

        def step(arm: str) -> None:
            done.append(arm)
            say(f"judged {len(done)} of {len(ladders) - 1} arms (last: {arm})")

        report = analyse(ladders, request, held or None, progress=step)
    if output.figure is not None:
        from steepen.report.law_figures import draw_compute

        draw_compute(report, ladders, output.figure)
    if output.as_json:
        typer.echo(to_json(report.to_dict()))
        return
    show_report(report)
    output.finish()


def _hold_out(ladders: dict[str, Ladder], holds: list[str]) -> tuple[dict[str, Ladder], dict[str, Ladder]]:
    """Ladders to fit and runs to score, from each --hold-out in turn."""
    held: dict[str, Ladder] = {}
    for hold in holds:
        if Path(hold).is_file():
            out = read_ladders(read_table(hold))
            # A run that is also in the table must not be fitted, or it would be scored against itself.
            left = {name: exclude_rungs(ladder, out.get(name)) for name, ladder in ladders.items()}
            ladders = {name: ladder for name, ladder in left.items() if len(ladder.flops)}
        else:
            arm, _, tail = hold.rpartition(":")
            ladders, out = split_hold_out(ladders, _flops(tail, hold), arm or None)
        for name, ladder in out.items():
            if name in held:
                raise UsageError(f"arm '{name}' is held out twice; one --hold-out for each arm is enough.")
            held[name] = ladder
    return ladders, held


def _flops(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(
            f"--hold-out {whole!r} is neither a file nor FLOPS nor ARM:FLOPS, such as 1e20 or vanilla:1e20."
        )
    return value


def _at_or_above(values: Array, holds: list[str]) -> Any:
    """Rows to hold out of a table without arms."""
    away = np.zeros(len(values), bool)
    for hold in holds:
        away |= values >= _flops(hold, hold) * (1 - 1e-9)
    return away


def run_chinchilla(data: Table, options: dict[str, Any], output: Output) -> None:
    """The three-term law, its best split at a budget, and held-out rows."""
    data.require(["parameters", "tokens", "loss"])
    n, d, y = (data.numbers(name) for name in ("parameters", "tokens", "loss"))
    data.refuse_repeats(list(zip(n.tolist(), d.tolist(), strict=True)), "parameters and tokens")
    away = _at_or_above(6 * n * d, output.holds)
    if away.all():
        raise UsageError("every run is held out, so none is left to fit; hold out from a higher compute.")
    with status(f"fitting {int((~away).sum())} runs", output.as_json):
        found = fit_chinchilla(n[~away], d[~away], y[~away], ChinchillaSettings(**options))
    extra: dict[str, Any] = {"hold_out": []}
    if output.budget is not None:
        best = found.optimum(output.budget)
        extra["optimum"] = dict(
            zip(("flops", "parameters", "tokens", "loss"), (output.budget, *best), strict=True)
        )
    for i in np.flatnonzero(away):
        forecast = float(found.predict(n[i], d[i]))
        miss = float(y[i]) - forecast
        extra["hold_out"].append(
            {
                "row": data.lines[i], "parameters": n[i], "tokens": d[i], "observed": y[i],
                "forecast": forecast, "miss": miss, "miss_sigma": miss / max(found.residual_sd, 1e-300),
            }
        )  # fmt: skip
    if output.figure is not None:
        from steepen.report.law_figures import draw_chinchilla

        draw_chinchilla(found, n[~away], d[~away], y[~away], output.figure)
    if output.as_json:
        typer.echo(to_json({**found.to_dict(), **extra}))
        return
    typer.echo(found.summary())
    if "optimum" in extra:
        best = extra["optimum"]
        split = f"N* = {best['parameters']:.4g}, D* = {best['tokens']:.4g}"
        typer.echo(f"at {best['flops']:.3g} FLOPs: {split}, loss {best['loss']:.4f}")
    for out in extra["hold_out"]:
        typer.echo(
            f"held out {data.unit} {out['row']}: {out['observed']:.4f} against {out['forecast']:.4f},"
            f" miss {out['miss']:+.4f} ({out['miss_sigma']:+.1f}σ)"
        )
    output.finish()


def run_isoflop(data: Table, loss: str, options: dict[str, Any], output: Output) -> None:
    """Vertices of every budget and their law, and held-out budgets; one fit for each arm, if any."""
    if loss not in ("mse", "log-mse"):
        raise UsageError(
            f"loss is {loss!r}; an iso-compute parabola is least squares: choose mse (of the loss) or"
            " log-mse."
        )
    if options["method"] not in ("quadratic", "akima"):
        raise UsageError(f"vertex is {options['method']!r}; choose quadratic or akima.")
    data.require(["budget", "x", "loss"])
    c, x, y = (data.numbers(name) for name in ("budget", "x", "loss"))
    arms = np.array(data.names("arm") if data.has("arm") else [""] * len(data))
    same = "budget and x of an arm" if data.has("arm") else "budget and x"
    data.refuse_repeats(list(zip(arms.tolist(), c.tolist(), x.tolist(), strict=True)), same)
    away = _at_or_above(c, output.holds)
    fits: dict[str, IsoflopFit] = {}
    parts: dict[str, tuple[Array, Array, Array]] = {}
    results: dict[str, dict[str, Any]] = {}
    for arm in cast(list[str], list(dict.fromkeys(arms.tolist()))):
        used, out = (arms == arm) & ~away, (arms == arm) & away
        if not used.any():
            raise UsageError(
                f"every budget{f' of {arm!r}' if arm else ''} is held out; nothing is left to fit."
            )
        found = fit_isoflop(c[used], x[used], y[used], log_loss=loss == "log-mse", **options)
        fits[arm], parts[arm], results[arm] = found, (c[used], x[used], y[used]), found.to_dict()
        if found.law is None:
            continue
        line = found.law
        if output.budget is not None:
            results[arm]["at"] = _forecast(
                output.budget, line.predict(output.budget), line.interval_at(output.budget)
            )
        if out.any():
            later = fit_isoflop(c[out], x[out], y[out], log_loss=loss == "log-mse", **options)
            results[arm]["hold_out"] = [
                {**_forecast(v.budget, line.predict(v.budget), line.interval_at(v.budget)), "observed": v.x}
                for v in later.vertices
            ]
    if output.figure is not None:
        from steepen.report.law_figures import draw_isoflop

        draw_isoflop(fits, parts, output.figure)
    if output.as_json:
        only = next(iter(results.values())) if len(results) == 1 else {"law": "isoflop"}
        typer.echo(to_json({**only, **({"arms": results} if data.has("arm") else {})}))
        return
    for arm, found in fits.items():
        typer.echo((f"{arm}\n" if arm else "") + found.summary())
        for label in ("at", "hold_out"):
            shown = results[arm].get(label, [])
            for each in [shown] if isinstance(shown, dict) else shown:
                low, high = each["interval"]
                seen = f", observed {each['observed']:.4g}" if "observed" in each else ""
                typer.echo(f"at {each['budget']:.3g}: x* = {each['x']:.4g} ({low:.4g} to {high:.4g}){seen}")
    output.finish()


def _forecast(budget: float, x: float, interval: tuple[float, float]) -> dict[str, Any]:
    return {"budget": budget, "x": x, "interval": interval}
