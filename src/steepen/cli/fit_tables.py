"""How laws, verdicts and power look on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from steepen.utils.formatting import format_flops

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.fits.compute_law import ComputeFit
    from steepen.laws.power import CheapestLadder, Power
    from steepen.laws.verdict.evidence import Prediction

STYLES = {
    "steeper": "bold green",
    "lower (constant)": "green",
    "floor": "yellow",
    "undecided": "bold yellow",
    "shallower": "bold red",
    "worse": "red",
}


@contextmanager
def status(what: str, quiet: bool) -> Generator[Callable[[str], None]]:
    """A spinner on a terminal; yields a function that changes its words. Nothing where output is read by a
    script.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(what) as spinner:

        def say(words: str) -> None:
            spinner.update(words)

        yield say


def show_report(report: LadderAnalysis) -> None:
    """Laws, verdicts, predictions, multipliers, hold-outs and warnings."""
    console = Console()
    for fit in report.fits.values():
        console.print(_laws(fit))
    if report.verdicts:
        console.print(_verdicts(report))
        console.print(_predictions(report))
        console.print(_multipliers(report))
    for verdict in report.verdicts.values():
        console.print(f"\n[{STYLES[verdict.word]}]■[/] {escape(verdict.sentence)}", highlight=False)
        for line in verdict.what_would_change:
            console.print(Padding(f"· {escape(line)}", (0, 0, 0, 2)), highlight=False)
    for h in report.hold_out:
        console.print(
            f"\nheld out {escape(h.arm)} at {h.flops:.3g} FLOPs ({h.decades_beyond:.2f} decades beyond its"
            " ladder): observed"
            f" {h.observed:.4f}, forecast {h.forecast:.4f} ({h.interval[0]:.4f} to {h.interval[1]:.4f});"
            f" miss {h.miss:+.4f} ="
            f" {h.miss_sigma:+.1f}σ of a run = {h.miss_standard_errors:+.1f} forecast errors; the law needs"
            f" {h.compute_factor:.2f}× that"
            " compute for the observed loss",
            highlight=False,
        )
        if h.forecast_by_hypothesis:
            each = ", ".join(f"{name} {value:.4f}" for name, value in h.forecast_by_hypothesis.items())
            console.print(f"  · by reading: {each}", highlight=False)
    for warning in report.warnings:
        console.print(f"\n[yellow]warning:[/] {escape(warning)}", highlight=False)


def _laws(fit: ComputeFit) -> Table:
    share = f"{fit.settings.confidence:.0%}"
    how = (
        "one E from all arms"
        if fit.settings.method == "joint"
        else f"E by {fit.settings.loss} on {fit.settings.reference}"
    )
    e = next(iter(fit.arms.values())).e
    table = _table(
        f"L = E + A·(C/C0)^−γ, {fit.settings.method} way ({escape(how)})\n"
        f"C0 = {fit.c0:.4g}   E = {e.value:.4f} ({_span(e.unconditional)})   scatter {fit.sigma:.2g}",
        ("arm", "γ", f"{share} interval", f"{share} given E", "log A", f"{share} interval"),
    )
    for law in fit.arms.values():
        g, a = law.gamma, law.log_a
        table.add_row(
            escape(law.arm), f"{g.value:.4f}", _span(g.unconditional), _span(g.conditional), f"{a.value:.4f}",
            _span(a.unconditional),
        )  # fmt: skip
    return table


def _verdicts(report: LadderAnalysis) -> Table:
    table = _table(
        f"against {escape(report.request.reference)} (p: slopes equal; exponent reading; floor twin)",
        ("arm", "verdict", "Δγ", "interval", "p slope", "p exp", "p twin"),
    )
    for v in report.verdicts.values():
        low, high = v.delta_gamma_interval
        table.add_row(
            escape(v.arm), f"[{STYLES[v.word]}]{v.word}[/]", _short(v.delta_gamma),
            f"{_short(low)} {_short(high)}", f"{v.p_slope:.1g}", f"{v.p_exponent_hypothesis:.1g}",
            f"{v.p_irreducible_hypothesis:.1g}",
        )  # fmt: skip
    return table


def _predictions(report: LadderAnalysis) -> Table:
    places = next(iter(report.verdicts.values())).hypotheses["exponent"].predictions
    table = _table(
        "multipliers if exponent / if floor",
        ("arm", *(f"at {format_flops(place.flops, 2)}" for place in places)),
    )
    for v in report.verdicts.values():
        both = zip(v.hypotheses["exponent"].predictions, v.hypotheses["irreducible"].predictions, strict=True)
        table.add_row(escape(v.arm), *(f"{_times(a)} / {_times(b)}" for a, b in both))
    return table


def _times(prediction: Prediction) -> str:
    return "–" if math.isnan(prediction.multiplier) else f"{prediction.multiplier:.2f}×"


def _multipliers(report: LadderAnalysis) -> Table:
    table = _table(
        "multipliers at each method's lowest and highest budget († extrapolated)",
        ("arm", "method", "at", "multiplier", "at", "multiplier"),
    )
    for arm, found in report.multipliers.items():
        for method in dict.fromkeys(m.method for m in found):
            own = sorted((m for m in found if m.method == method), key=lambda m: m.flops)
            cells: list[str] = []
            for m in (own[0], own[-1]):
                mark = "†" if m.extrapolated else ""
                cells += [format_flops(m.flops, 2), f"{m.value:.2f} ({m.low:.2f}–{m.high:.2f}){mark}"]
            table.add_row(escape(arm), method, *cells)
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    """A table that fits eighty columns: no rules between cells, words left, numbers right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("arm", "verdict", "method", "outcome") else "right", no_wrap=True
        )
    return table


def _short(value: float) -> str:
    return f"{value:+.4f}".replace("0.", ".", 1)


def show_power(result: Power, found: list[CheapestLadder]) -> None:
    """The plan's chances and the cheapest ladders."""
    console = Console()
    plan = result.plan
    console.print(
        f"{plan.rungs} rungs × {plan.seeds} seed{'s' if plan.seeds > 1 else ''} × 2 arms, {plan.lowest:.3g}"
        " to"
        f" {plan.highest:.3g} FLOPs ({plan.decades:.2f} decades), noise {plan.noise:g}, Δγ ="
        f" {plan.delta_gamma:+g}:"
        f" {plan.cost:.3g} FLOPs in all",
        highlight=False,
    )
    table = _table("", ("outcome", "chance"))
    table.add_row(f"slope differs (joint F-test, {plan.level:.0%} two-sided)", f"{result.slope:.3f}")
    table.add_row(f"slope differs ({plan.level:.0%} one-sided)", f"{result.slope_one_sided:.3f}")
    for word, share in result.verdict_fractions.items():
        right = " (right)" if word == result.right_word else ""
        table.add_row(f"verdict {word}{right}", f"{share:.3f}")
    console.print(table)
    if plan.delta_gamma:
        console.print(
            f"Not noise but recipe: a loss {result.confounding_penalty:.4f} too high at the"
            f" {result.confounding_ladder}'s top rung alone would look like"
            " the whole Δγ. Re-sweep the learning rate there.",
            highlight=False,
        )
    for option in found:
        if option.plan is None or option.power is None:
            console.print(
                f"No ladder in reach (16 rungs, 5 seeds, 8 decades) has {option.goal:.0%} for the"
                f" {option.target}."
            )
            continue
        p = option.plan
        chance = option.power.verdict if option.target == "verdict" else option.power.slope
        console.print(
            f"Cheapest for the {option.target} at {option.goal:.0%}: {p.rungs} rungs × {p.seeds}"
            f" seed{'s' if p.seeds > 1 else ''} up"
            f" to {p.highest:.3g} FLOPs ({p.decades:.2f} decades): {p.cost:.3g} FLOPs in all, simulated"
            f" chance {chance:.3f}",
            highlight=False,
        )


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.4f}–{interval[1]:.4f}"
