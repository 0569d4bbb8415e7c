"""What `fit` returns for the compute law: laws of arms with verdicts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError
from steepen.results.panel import Panel
from steepen.results.predict import Predictions, predict
from steepen.results.result import Result
from steepen.results.table import Column, Table, table_of
from steepen.results.text import Block, Paragraph, table_width
from steepen.utils.cost_axis import cost_axis
from steepen.utils.formatting import MISSING, format_flops, percent, pretty_exponents

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.fits.compute_law import ArmLaw, ComputeFit
    from steepen.laws.hypotheses.nested_models import Growth, Hypothesis
    from steepen.laws.ladder import Ladder
    from steepen.laws.registered_forecasts import ScoredForecast
    from steepen.laws.verdict.evidence import Prediction, Verdict
    from steepen.laws.verdict.holdout import HeldOutLoss
    from steepen.laws.verdict.multipliers import Multiplier

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
SHORT_NAMES: dict[Hypothesis, str] = {"exponent": "exponent", "irreducible": "lower E", "free": "E and γ"}


FRAGILE = "?: fragile, not a claim"  # below tables that have the mark


@dataclass(frozen=True)
class LawRow:
    """One arm: its law, its difference from the reference, and the verdict."""

    arm: str
    verdict: Annotated[str, Column(shown=False)]
    marked_verdict: Annotated[str, Column("verdict", stored=False)]  # "?" behind what is not a claim
    claim: Annotated[bool | None, Column(shown=False)]
    by_what_claim: Annotated[bool | None, Column(shown=False)]
    gamma: Annotated[float, Column("γ")]
    gamma_low: float
    gamma_high: float
    E: float
    log_A: Annotated[float, Column(shown=False)]
    C0: Annotated[float, Column(shown=False)]
    rungs: Annotated[int, Column(shown=False)]
    delta_gamma: Annotated[float | None, Column("Δγ")] = None
    delta_gamma_low: Annotated[float | None, Column(shown=False)] = None
    delta_gamma_high: Annotated[float | None, Column(shown=False)] = None
    multiplier: float | None = None
    multiplier_flops: Annotated[float | None, Column(shown=False)] = None
    p_growth: float | None = None
    sentence: Annotated[str, Column(shown=False)] = ""


def law_row(law: ArmLaw, rungs: int, verdict: Verdict | None) -> LawRow:
    """The row of an arm; of the reference, which has no verdict, without a comparison."""
    low, high = law.gamma.unconditional
    row = LawRow(
        arm=law.arm, verdict="reference", marked_verdict="reference", claim=None, by_what_claim=None,
        gamma=law.gamma.value, gamma_low=low, gamma_high=high, E=law.e.value, log_A=law.log_a.value,
        C0=law.c0, rungs=rungs,
    )  # fmt: skip
    if verdict is None:
        return row
    low, high = verdict.delta_gamma_interval
    return replace(
        row, verdict=verdict.word, marked_verdict=verdict.marked_word, claim=verdict.claim,
        by_what_claim=verdict.by_what_claim, delta_gamma=verdict.delta_gamma, delta_gamma_low=low,
        delta_gamma_high=high, multiplier=verdict.multiplier, multiplier_flops=verdict.multiplier_flops,
        p_growth=verdict.p_slope, sentence=verdict.sentence,
    )  # fmt: skip


def verdict_words(verdicts: Mapping[str, Verdict], most: int = 4) -> str:
    """The words of some verdicts in one line, each with its arm; "?" marks what is fragile."""
    words = [f"{arm} {verdict.marked_word}" for arm, verdict in verdicts.items()]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@dataclass(frozen=True, eq=False, repr=False)
class ComputeResult(Result):
    """Compute laws of the arms of a table, with a verdict on each against the reference.

    `analysis` has everything that was measured, `ladders` the rungs that were fitted; `registered` are the
    forecasts that were written down, `scored` those that were compared with runs.
    """

    schema = "steepen.fit.compute/1"

    analysis: LadderAnalysis
    ladders: dict[str, Ladder]
    registered: tuple[ScoredForecast, ...] = ()
    scored: tuple[ScoredForecast, ...] = ()
    predictions: Predictions | None = None

    def predict(self, flops: float | Iterable[float]) -> Predictions:
        """The loss of every arm at one or more computes, with intervals for one run."""
        return predict(self.analysis, self.ladders, flops)

    def warnings(self) -> Sequence[str]:
        """Warnings about the table and the fit."""
        return self.analysis.warnings

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each arm but the reference."""
        return self.analysis.verdicts

    def __getitem__(self, arm: str) -> Verdict:
        """The verdict on an arm."""
        if arm not in self.verdicts:
            raise UsageError(f"there is no verdict on {arm!r}; there is one on {', '.join(self.verdicts)}.")
        return self.verdicts[arm]

    @property
    def rows(self) -> list[LawRow]:
        """One row per arm."""
        return [
            law_row(law, len(self.ladders[arm].flops), self.verdicts.get(arm))
            for arm, law in self.analysis.primary_fit.arms.items()
        ]

    def headline(self) -> str:
        """The verdicts in one line."""
        reference = self.analysis.request.reference
        if not self.verdicts:
            gamma = self.analysis.primary_fit.arms[reference].gamma.value
            return f"compute law of {reference}: γ = {gamma:.4f}"
        return f"fit against {reference}: {verdict_words(self.verdicts)}"

    def headings(self) -> dict[str, str]:
        """With the level of γ's interval, and the compute of the multiplier where it is one for all arms."""
        level = f"γ {100 * self.analysis.primary_fit.settings.confidence:g}%"
        found = {"gamma_low": f"{level} low", "gamma_high": f"{level} high"}
        at = {format_flops(verdict.multiplier_flops, 2) for verdict in self.verdicts.values()}
        if len(at) == 1:
            found["multiplier"] = f"multiplier at {pretty_exponents(at.pop())}"
        return found

    def left_out(self) -> tuple[str, ...]:
        """Comparisons with a reference, where there is one arm."""
        return () if self.verdicts else ("delta_gamma", "multiplier", "p_growth")

    def legend(self) -> Sequence[str]:
        """What "?" means, where an answer has it."""
        return [FRAGILE] if _any_fragile(self.verdicts.values()) else []

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers, as `steepen fit --json` prints it."""
        found = self.analysis.to_dict()
        for name in ("registered", "scored"):
            if forecasts := getattr(self, name):
                found[name] = [one.to_dict() for one in forecasts]
        if self.predictions is not None:
            found["predictions"] = self.predictions.to_rows()
        return found

    def panels(self) -> list[Panel]:
        """Laws, multipliers, and exponents against constants."""
        from steepen.report.law_panels import compute_panels

        return compute_panels(self.analysis, self.ladders)

    def blocks(self, width: int) -> Iterable[Block]:
        """Verdicts first, as a table where there are several; then laws, hold-outs and warnings."""
        verdicts = list(self.verdicts.values())
        if len(verdicts) > 1:  # the answers at a glance; the sentence of a single arm is one itself
            yield verdict_table(self.analysis, width)
            yield Paragraph()
        for verdict in verdicts:
            yield Paragraph(f" {verdict.sentence}", "■", STYLES[verdict.growth])
            for line in verdict.what_would_change:
                yield Paragraph(f"· {line}", indent=2)
            yield Paragraph()
        if verdicts:
            if len(verdicts) == 1:
                yield verdict_table(self.analysis, width)
                yield Paragraph()
            yield prediction_table(verdicts)
            yield multiplier_table(self.analysis.multipliers)
        for fit in self.analysis.fits.values():
            yield law_table(fit)
        if self.predictions is not None:
            yield self.predictions.table()
        for held in self.analysis.hold_out:
            yield from _held_out(held)
        for warning in self.analysis.warnings:
            yield Paragraph()
            yield Paragraph(f" {warning}", "warning:", "yellow")
        for one in (*self.registered, *self.scored):
            style = "green" if one.inside else "dim" if one.inside is None else "bold red"
            yield Paragraph(f" {one.sentence()}", "■", style)


def verdict_table(analysis: LadderAnalysis, width: int) -> Table:
    """The answers, a row for each arm; without the tests of hypotheses where long names need their place."""
    verdicts = list(analysis.verdicts.values())
    noun = cost_axis(analysis.request.unit).noun
    title = f"Does the gain over {analysis.request.reference} grow with {noun}, and by what?"
    levels = [verdict.level for verdict in verdicts]
    if analysis.request.adjust and len(levels) > 1:
        each = " to ".join(dict.fromkeys(f"{level:.2g}" for level in (min(levels), max(levels))))
        title += (
            f"\nFamily-wise error rate {percent(analysis.request.level)} (Holm; level of each arm: {each})"
        )
    styles = {growth + mark: style for growth, style in STYLES.items() for mark in ("", "?")}
    columns = [
        Column("arm", value=lambda v: v.arm),
        Column("gain", value=lambda v: v.growth + "?" * bool(v.fragile), styles=styles),
        Column("by what", value=_by_what),
        Column("×/decade", value=_growth_per_decade, align="right"),
        Column("p", value=_p_growth, align="right"),
    ]
    tests = [
        Column("exp only", ".1g", value=lambda v: v.p_exponent_hypothesis),
        Column("E only", ".1g", value=lambda v: v.p_irreducible_hypothesis),
    ]
    for chosen in ([*columns, *tests], columns):
        legend = _verdict_legend(verdicts, len(chosen) > len(columns))
        caption = "\n".join(legend).replace("compute", noun)
        table = table_of(verdicts, chosen, title, caption)
        if table_width(table) <= width:
            return table
    return table_of(verdicts, columns, title, caption)


def _by_what(verdict: Verdict) -> str:
    return (verdict.by_what or MISSING).split(":")[0] + "?" * bool(verdict.by_what_fragile)


def _growth_per_decade(verdict: Verdict) -> str:
    low, high = verdict.growth_per_decade_interval
    value = verdict.growth_per_decade
    return MISSING if math.isnan(value) else f"{value:.3f} ({low:.2f}–{high:.2f})"


def _is_demoted(verdict: Verdict) -> bool:
    """Whether the test of no growth that decided was the one with the noise of the residuals."""
    return verdict.demoted is not None and verdict.demoted.growth in ("grows", "shrinks")


def _p_growth(verdict: Verdict) -> str:
    """p-value of the test of no growth that decided; starred with the noise of the residuals."""
    return f"{verdict.p_demoted:.1g}*" if _is_demoted(verdict) else f"{verdict.p_slope:.1g}"


def _any_fragile(verdicts: Iterable[Verdict]) -> bool:
    return any(verdict.fragile or verdict.by_what_fragile for verdict in verdicts)


def _verdict_legend(verdicts: Sequence[Verdict], tests: bool) -> Iterable[str]:
    """What the words and columns of the verdict table mean; words that do not occur are left out."""
    found = {verdict.growth for verdict in verdicts}
    yield from (f"{word}: {meaning}" for word, meaning in MEANINGS.items() if word in found)
    if any((verdict.by_what or "").startswith("either") for verdict in verdicts):
        yield "either: a larger exponent or a lower irreducible loss, not separable here"
    if _any_fragile(verdicts):
        yield FRAGILE
    yield "×/decade: growth of the multiplier; p: test of no growth"
    if any(map(_is_demoted, verdicts)):
        yield "*: with the correlated or unequal noise that the residuals show"
    if tests:
        yield "exp only, E only: p of a fit with only that free; small: rejected"


def prediction_table(verdicts: Sequence[Verdict]) -> Table:
    """Extrapolated multipliers: a row for each hypothesis that an arm's data do not reject."""
    rows = [(verdict, name, i == 0) for verdict in verdicts for i, name in enumerate(verdict.tenable)]
    places = verdicts[0].hypotheses["exponent"].predictions
    # A budget of about 10 or 1000 times the top rung has no column of its own.
    at = {f"at {format_flops(place.flops, 2)}": i for i, place in enumerate(places)}

    def column(heading: str, place: int) -> Column:
        return Column(
            heading, _times, value=lambda row: row[0].hypotheses[row[1]].predictions[place], align="right"
        )

    return table_of(
        rows,
        [
            Column("arm", value=lambda row: row[0].arm if row[2] else ""),
            Column("by what", value=lambda row: SHORT_NAMES[row[1]]),
            *(column(heading, place) for heading, place in at.items()),
        ],
        "extrapolated multipliers of every hypothesis that is not rejected",
    )


def _times(prediction: Prediction) -> str:
    if math.isnan(prediction.multiplier):
        return MISSING
    low, high = prediction.multiplier_interval
    value = f"{prediction.multiplier:.2f}×"
    return f"{value} ({low:.2f}–{high:.2f})" if high < 1e3 else value


def multiplier_table(multipliers: Mapping[str, Sequence[Multiplier]]) -> Table:
    """Multipliers at each method's lowest and highest budget."""
    beyond = any(m.extrapolated for found in multipliers.values() for m in found)
    rows: list[tuple[str, str, Multiplier, Multiplier]] = []
    for arm, found in multipliers.items():
        for method in dict.fromkeys(m.method for m in found):
            own = sorted((m for m in found if m.method == method), key=lambda m: m.flops)
            rows.append((arm, method, own[0], own[-1]))
    columns = [Column("arm", value=lambda row: row[0]), Column("method", value=lambda row: row[1])]
    for place in (2, 3):
        columns.append(Column("at", _budget, value=operator.itemgetter(place), align="right"))
        columns.append(Column("multiplier", _multiplier, value=operator.itemgetter(place), align="right"))
    title = "multipliers at each method's lowest and highest budget" + " († extrapolated)" * beyond
    return table_of(rows, columns, title)


def _budget(multiplier: Multiplier) -> str:
    return format_flops(multiplier.flops, 2)


def _multiplier(m: Multiplier) -> str:
    value, low, high = (f"{x:.2f}" if x < 10 else f"{x:.3g}" for x in (m.value, m.low, m.high))
    return f"{value} ({low}–{high}){'†' if m.extrapolated else ''}"


def law_table(fit: ComputeFit) -> Table:
    """The law of each arm by one method, with intervals that count E as unknown, and given E."""
    level = percent(fit.settings.confidence)
    joint = fit.settings.method == "joint"
    how = "one E from all arms" if joint else f"E by {fit.settings.loss} on {fit.settings.reference}"
    e = next(iter(fit.arms.values())).e
    return table_of(
        list(fit.arms.values()),
        [
            Column("arm", value=lambda law: law.arm),
            Column("γ", ".4f", value=lambda law: law.gamma.value),
            Column(f"{level} interval", _span, value=lambda law: law.gamma.unconditional, align="right"),
            Column(f"{level} given E", _span, value=lambda law: law.gamma.conditional, align="right"),
            Column("log A", ".4f", value=lambda law: law.log_a.value),
            Column(f"{level} interval", _span, value=lambda law: law.log_a.unconditional, align="right"),
        ],
        f"L = E + A·(C/C0)^−γ, {fit.settings.method} method ({how})\n"
        f"C0 = {fit.c0:.4g}   E = {e.value:.4f} ({_span(e.unconditional)})   residual SD {fit.sigma:.2g}",
    )


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.4f}–{interval[1]:.4f}"


def _held_out(held: HeldOutLoss) -> Iterable[Block]:
    low, high = held.interval
    own = ", by its own E, A and γ" if held.own_law else ""
    yield Paragraph()
    yield Paragraph(
        f"held out {held.arm} at {format_flops(held.flops)} FLOPs ({held.decades_beyond:.2f} decades beyond"
        f" its ladder): observed {held.observed:.4f}, forecast {held.forecast:.4f} ({low:.4f} to"
        f" {high:.4f}{own}); error {held.error:+.4f} = {held.error_in_sigma:+.1f}σ of a run ="
        f" {held.error_in_standard_errors:+.1f} standard errors of the forecast; the law needs"
        f" {held.compute_factor:.2f}× that compute for the observed loss"
    )
    if held.forecast_by_hypothesis:
        each = ", ".join(f"{name} {value:.4f}" for name, value in held.forecast_by_hypothesis.items())
        yield Paragraph(f"  · forecast by hypothesis: {each}")
