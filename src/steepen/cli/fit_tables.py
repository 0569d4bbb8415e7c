"""Print laws, verdicts and power as tables and lines of at most 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from steepen.utils.console import SafeConsole
from steepen.utils.formatting import format_flops, percent

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.fits.compute_law import ComputeFit
    from steepen.laws.hypotheses.nested_models import Growth, Hypothesis
    from steepen.laws.power import CheapestLadder, LadderPlan, Power, Target
    from steepen.laws.registered_forecasts import ScoredForecast
    from steepen.laws.verdict.evidence import Prediction, Verdict

STYLES: dict[Growth, str] = {
    "grows": "bold green",
    "constant": "cyan",
    "shrinks": "bold red",
    "worse": "red",
    "undecided": "yellow",
}
MEANINGS: dict[Growth, str] = {
    "grows": "the saving in compute rises with compute",
    "constant": "the same saving at every compute",
    "shrinks": "the saving falls with compute",
    "worse": "needs more compute, by a constant factor",
    "undecided": "neither a growing nor a constant gain is shown",
}
VERDICT_COLUMNS = 69  # of the verdict table without its arms' names
SHORT_NAMES: dict[Hypothesis, str] = {"exponent": "exponent", "irreducible": "lower E", "free": "E and γ"}
TARGET_TITLES: dict[Target, str] = {"growth": "growth of the gain", "exponent": "larger exponent"}


@contextmanager
def spinner(text: str, quiet: bool) -> Generator[Callable[[str], None]]:
    """Show a spinner on a terminal and yield a function that changes its text; a no-op elsewhere."""
    console = SafeConsole(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as shown:

        def update(new_text: str) -> None:
            shown.update(new_text)

        yield update


def print_analysis(analysis: LadderAnalysis) -> None:
    """Print laws, verdicts, predictions, multipliers, hold-outs and warnings."""
    console = SafeConsole()
    if len(analysis.verdicts) > 1:  # the answers at a glance; the sentence of a single arm is one itself
        console.print(_verdicts(analysis, console.width), "")
    for verdict in analysis.verdicts.values():
        console.print(f"[{STYLES[verdict.growth]}]■[/] {escape(verdict.sentence)}", highlight=False)
        for line in verdict.what_would_change:
            console.print(Padding(f"· {escape(line)}", (0, 0, 0, 2)), highlight=False)
        console.print()
    if analysis.verdicts:
        if len(analysis.verdicts) == 1:
            console.print(_verdicts(analysis, console.width), "")
        console.print(_predictions(analysis))
        console.print(_multipliers(analysis))
    for fit in analysis.fits.values():
        console.print(_laws(fit))
    for h in analysis.hold_out:
        low, high = h.interval
        own = ", by its own E, A and γ" if h.own_law else ""
        console.print(
            f"\nheld out {escape(h.arm)} at {format_flops(h.flops)} FLOPs ({h.decades_beyond:.2f} decades"
            f" beyond its ladder): observed {h.observed:.4f}, forecast {h.forecast:.4f} ({low:.4f} to"
            f" {high:.4f}{own}); error {h.error:+.4f} = {h.error_in_sigma:+.1f}σ of a run ="
            f" {h.error_in_standard_errors:+.1f} standard errors of the forecast; the law needs"
            f" {h.compute_factor:.2f}× that compute for the observed loss",
            highlight=False,
        )
        if h.forecast_by_hypothesis:
            each = ", ".join(f"{name} {value:.4f}" for name, value in h.forecast_by_hypothesis.items())
            console.print(f"  · forecast by hypothesis: {escape(each)}", highlight=False)
    for warning in analysis.warnings:
        console.print(f"\n[yellow]warning:[/] {escape(warning)}", highlight=False)


def print_registered(scored: Sequence[ScoredForecast]) -> None:
    """Print registered forecasts, a line each, with their scores where the runs exist."""
    console = SafeConsole()
    for one in scored:
        style = "green" if one.inside else "dim" if one.inside is None else "bold red"
        console.print(f"[{style}]■[/] {escape(one.sentence())}", highlight=False)


def _laws(fit: ComputeFit) -> Table:
    confidence = percent(fit.settings.confidence)
    how = (
        "one E from all arms"
        if fit.settings.method == "joint"
        else f"E by {fit.settings.loss} on {fit.settings.reference}"
    )
    e = next(iter(fit.arms.values())).e
    table = _table(
        f"L = E + A·(C/C0)^−γ, {fit.settings.method} method ({escape(how)})\n"
        f"C0 = {fit.c0:.4g}   E = {e.value:.4f} ({_span(e.unconditional)})   residual SD {fit.sigma:.2g}",
        ("arm", "γ", f"{confidence} interval", f"{confidence} given E", "log A", f"{confidence} interval"),
    )
    for law in fit.arms.values():
        g, a = law.gamma, law.log_a
        table.add_row(
            escape(law.arm), f"{g.value:.4f}", _span(g.unconditional), _span(g.conditional), f"{a.value:.4f}",
            _span(a.unconditional),
        )  # fmt: skip
    return table


def _verdicts(analysis: LadderAnalysis, width: int) -> Table:
    """The answers, a row for each arm; without the tests of hypotheses where long names need their place."""
    longest = max(len(name) for name in analysis.verdicts)
    hypotheses = longest <= width - VERDICT_COLUMNS
    table = _table(
        f"Does the gain over {escape(analysis.request.reference)} grow with compute, and by what?"
        f"{_shared_level(analysis)}",
        ("arm", "gain", "by what", "×/decade", "p", *(("exp only", "E only") if hypotheses else ())),
    )
    table.caption = _legend(analysis, hypotheses)
    table.caption_justify, table.caption_style = "left", ""
    for v in analysis.verdicts.values():
        low, high = v.growth_per_decade_interval
        tests = (f"{v.p_exponent_hypothesis:.1g}", f"{v.p_irreducible_hypothesis:.1g}")
        table.add_row(
            escape(v.arm), f"[{STYLES[v.growth]}]{v.growth}[/]" + ("?" if v.fragile else ""),
            (v.by_what or "–").split(":")[0] + ("?" if v.by_what_fragile else ""),
            "–" if math.isnan(v.growth_per_decade) else f"{v.growth_per_decade:.3f} ({low:.2f}–{high:.2f})",
            _p_growth(v), *(tests if hypotheses else ()),
        )  # fmt: skip
    return table


def _p_growth(v: Verdict) -> str:
    """p-value of the test of no growth that decided: starred if repeated with the noise of the residuals."""
    if v.demoted is not None and v.demoted.growth in ("grows", "shrinks"):
        return f"{v.p_demoted:.1g}*"
    return f"{v.p_slope:.1g}"


def _legend(analysis: LadderAnalysis, hypotheses: bool) -> str:
    """What the words and columns of the verdict table mean; words that do not occur are left out."""
    verdicts = list(analysis.verdicts.values())
    lines = [
        f"{word}: {meaning}" for word, meaning in MEANINGS.items() if word in {v.growth for v in verdicts}
    ]
    if any((v.by_what or "").startswith("either") for v in verdicts):
        lines.append("either: a larger exponent or a lower irreducible loss, not separable here")
    if any(v.fragile or v.by_what_fragile for v in verdicts):
        lines.append("?: fragile, not a claim")
    lines.append("×/decade: growth of the multiplier; p: test of no growth")
    if any(_p_growth(v).endswith("*") for v in verdicts):
        lines.append("*: with the correlated or unequal noise that the residuals show")
    if hypotheses:
        lines.append("exp only, E only: p of a fit with only that free; small: rejected")
    return "\n".join(lines)


def _shared_level(analysis: LadderAnalysis) -> str:
    """A note on the level of the tests, where arms share it."""
    levels = [v.level for v in analysis.verdicts.values()]
    if not analysis.request.adjust or len(levels) < 2:
        return ""
    low, high = min(levels), max(levels)
    each = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    return f"\nFamily-wise error rate {percent(analysis.request.level)} (Holm; level of each arm: {each})"


def _predictions(analysis: LadderAnalysis) -> Table:
    places = next(iter(analysis.verdicts.values())).hypotheses["exponent"].predictions
    # A budget of about 10 or 1000 times the top rung has no column of its own.
    columns = {f"at {format_flops(place.flops, 2)}": i for i, place in enumerate(places)}
    table = _table(
        "extrapolated multipliers of every hypothesis that is not rejected",
        ("arm", "by what", *columns),
    )
    for v in analysis.verdicts.values():
        for i, name in enumerate(v.tenable):
            cells = [_times(v.hypotheses[name].predictions[k]) for k in columns.values()]
            table.add_row("" if i else escape(v.arm), SHORT_NAMES[name], *cells)
    return table


def _times(prediction: Prediction) -> str:
    if math.isnan(prediction.multiplier):
        return "–"
    low, high = prediction.multiplier_interval
    return (
        f"{prediction.multiplier:.2f}× ({low:.2f}–{high:.2f})"
        if high < 1e3
        else f"{prediction.multiplier:.2f}×"
    )


def _multipliers(analysis: LadderAnalysis) -> Table:
    beyond = any(m.extrapolated for found in analysis.multipliers.values() for m in found)
    table = _table(
        "multipliers at each method's lowest and highest budget" + " († extrapolated)" * beyond,
        ("arm", "method", "at", "multiplier", "at", "multiplier"),
    )
    for arm, found in analysis.multipliers.items():
        for method in dict.fromkeys(m.method for m in found):
            own = sorted((m for m in found if m.method == method), key=lambda m: m.flops)
            cells: list[str] = []
            for m in (own[0], own[-1]):
                mark = "†" if m.extrapolated else ""
                value, low, high = (f"{x:.2f}" if x < 10 else f"{x:.3g}" for x in (m.value, m.low, m.high))
                cells += [format_flops(m.flops, 2), f"{value} ({low}–{high}){mark}"]
            table.add_row(escape(arm), method, *cells)
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    """A table that fits eighty columns: no rules between cells, words left, numbers right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in columns:
        # Words wrap where the terminal is narrow; numbers are never cut.
        words = name in ("arm", "gain", "by what", "hypothesis", "method", "outcome")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def print_power(result: Power, found: list[CheapestLadder]) -> None:
    """Print the power of the plan and the cheapest ladders."""
    console = SafeConsole()
    plan = result.plan
    console.print(
        f"{_plan_size(plan)} × 2 arms, {format_flops(plan.lowest)} to {format_flops(plan.highest)} FLOPs"
        f" ({plan.decades:.2f} decades), noise {plan.noise:g}, Δγ = {plan.delta_gamma:+g}:"
        f" {format_flops(plan.cost)} FLOPs in total",
        highlight=False,
    )
    table = _table(
        f"{result.draws} simulated pairs, judged at level {plan.rule.level:.2g}",
        ("outcome", "claimed", "fragile, not a claim"),
    )
    for growth, fraction in result.growth_fractions.items():
        right = " (correct)" if growth == result.expected_growth else ""
        fragile = result.fragile_growth_fractions.get(growth)
        unmarked = fraction - (sum(result.fragile_growth_fractions.values()) if fragile is None else 0.0)
        table.add_row(f"{growth}{right}", f"{unmarked:.3f}", "–" if fragile is None else f"{fragile:.3f}")
        for word, part in result.verdict_fractions.items():
            if growth == "grows" and word.startswith("grows: "):
                right = " (correct)" if word == result.expected_verdict else ""
                table.add_row(f"  by {word.removeprefix('grows: ')}{right}", f"{part:.3f}", "")
    console.print(table)
    if plan.delta_gamma:
        console.print(
            "A mistuned recipe can imitate the effect: a loss"
            f" {result.confounding_penalty['top rung']:.4f} too high at the {result.confounding_ladder}'s top"
            " rung alone, or one that grows along its ladder linearly to"
            f" {result.confounding_penalty['linear']:.4f} or quadratically to"
            f" {result.confounding_penalty['quadratic']:.4f} there, would look like the whole Δγ. Re-sweep"
            " the learning rate at the top.",
            highlight=False,
        )
    for option in found:
        if option.plan is None or option.power is None:
            console.print(
                f"No ladder up to 16 rungs, 5 seeds and 8 decades reaches {percent(option.goal)} power to"
                f" show the {TARGET_TITLES[option.target]}.",
                highlight=False,
            )
            continue
        cheapest = option.plan
        reached = option.power.verdict if option.target == "exponent" else option.power.growth
        console.print(
            f"Cheapest ladder with {percent(option.goal)} power to show the {TARGET_TITLES[option.target]}:"
            f" {_plan_size(cheapest)}"
            f" up to {format_flops(cheapest.highest)} FLOPs ({cheapest.decades:.2f} decades):"
            f" {format_flops(cheapest.cost)} FLOPs in total, simulated power {reached:.3f}",
            highlight=False,
        )


def _plan_size(plan: LadderPlan) -> str:
    return f"{plan.rungs} rungs × {plan.seeds} seed{'s' if plan.seeds > 1 else ''}"


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.4f}–{interval[1]:.4f}"
