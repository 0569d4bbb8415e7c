"""What `fit` returns for the compute law: laws of arms with verdicts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table, table_of
from steepen.results.text import Block, Paragraph, table_width
from steepen.studies.verdict_row import LawRow, VerdictRow, law_rows, verdict_row
from steepen.utils.formatting import MISSING, cost_axis, format_flops, percent

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.fits.compute_law import ComputeFit
    from steepen.laws.ladder import Ladder
    from steepen.laws.registered_forecasts import Calibration, ScoredForecast
    from steepen.laws.verdict.evidence import Prediction, Verdict
    from steepen.laws.verdict.holdout import HeldOutLoss
    from steepen.laws.verdict.multipliers import Multiplier
    from steepen.studies.answer import Answer

STYLES: dict[str, str] = {
    "better": "bold green",
    "grows": "bold green",
    "worse": "bold red",
    "shrinks": "bold red",
    "no difference": "cyan",
    "constant": "cyan",
    "not resolved": "yellow",
    "undecided": "yellow",
}
UNDECIDED = 3  # exit code
MAX_ROWS_IN_BRIEF = 10
MAX_PAIRS_IN_BRIEF = 6  # whose names take two lines
MAX_WARNINGS_IN_BRIEF = 2
MAX_HELD_OUT_IN_BRIEF = 4


def verdict_words(verdicts: Mapping[str, Verdict], most: int = 4) -> str:
    """The words of some verdicts in one line, each with its arm."""
    words = [f"{arm} {verdict.word}" for arm, verdict in verdicts.items()]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@dataclass(frozen=True, eq=False, repr=False)
class ComputeResult(Result):
    """Compute laws of the arms of a table, with a verdict on each against the reference.

    `analysis` has everything that was measured, `ladders` the rungs that were fitted; `registered` are the
    forecasts that were written down, `scored` those that were compared with runs, `calibration` that of their
    whole ledger. `full` prints everything.
    """

    schema = "steepen.fit.compute/1"

    analysis: LadderAnalysis
    ladders: dict[str, Ladder]
    registered: tuple[ScoredForecast, ...] = ()
    scored: tuple[ScoredForecast, ...] = ()
    calibration: Calibration | None = None
    predictions: Predictions | None = None
    full: bool = False
    exit_codes: bool = False

    @property
    def exit_code(self) -> int:
        """3, where it was asked for, if it is not resolved for an arm whether it is better."""
        open_arms = [one for one in self.verdicts.values() if one.better == "not resolved"]
        return UNDECIDED if self.exit_codes and open_arms else 0

    def predict(self, flops: float | Iterable[float]) -> Predictions:
        """The loss of every arm at one or more computes, with intervals for one run."""
        from steepen.laws.verdict.holdout import forecast_loss

        fit, judge, unit = self.analysis.primary_fit, self.analysis.judge, self.analysis.request.unit
        at = [float(flops)] if isinstance(flops, int | float) else list(map(float, flops))
        if not at or not all(math.isfinite(one) and one > 0 for one in at):
            raise UsageError(f"cannot predict at {flops!r}; give {unit} greater than zero.")
        found: list[PredictedLoss] = []
        for arm in fit.arms:
            highest = float(self.ladders[arm].flops[-1])
            for one in at:  # by the law that figures draw, with its error and the noise of a run
                loss, error = forecast_loss(fit, judge, arm, one, judge.run_variance(one))
                reach, beyond = fit.quantile * error, math.log10(one / highest)
                ends = loss - reach, loss + reach
                found.append(PredictedLoss(arm, one, loss, *ends, beyond, fit.settings.confidence))
        return Predictions(tuple(found), unit)

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
        return law_rows(self.analysis)

    def headline(self) -> str:
        """The verdicts in one line."""
        reference = self.analysis.request.reference
        if not self.verdicts:
            gamma = self.analysis.primary_fit.arms[reference].gamma.value
            return f"compute law of {reference}: γ = {gamma:.4f}"
        return f"fit against {reference}: {verdict_words(self.verdicts)}"

    def page_content(self) -> Answer:
        """The verdicts in place of their sentences, and without the table that repeats them."""
        from steepen.studies.answer import StudyVerdict

        page = replace(super().page_content(), warnings=tuple(self.analysis.warnings))
        if not self.verdicts:
            return page
        title = answer_title(self.analysis)
        return replace(
            page, question=title, findings=(),
            verdicts=tuple(StudyVerdict(verdict, arm) for arm, verdict in self.verdicts.items()),
            tables=tuple(one for one in page.tables if self.analysis.pairs or one.title != title),
        )  # fmt: skip

    def left_out(self) -> tuple[str, ...]:
        """Comparisons with a reference, where there is one arm."""
        if self.verdicts:
            return ()
        return tuple(one.name for one in fields(VerdictRow) if one.name != "arm")

    def legend(self) -> Sequence[str]:
        """The runs that took part in nothing."""
        return [
            f"left out: {one.arm} at {format_flops(one.flops, 2)}, {one.deviation:+.4f} off the law of the"
            " others"
            for one in self.analysis.left_out
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers, as `steepen fit --json` prints it."""
        found = self.analysis.to_dict()
        for name in ("registered", "scored"):
            if forecasts := getattr(self, name):
                found[name] = [one.to_dict() for one in forecasts]
        if self.calibration is not None:
            found["calibration"] = asdict(self.calibration)
        if self.predictions is not None:
            found["predictions"] = self.predictions.to_rows()
        return found

    def panels(self) -> list[Panel]:
        """Laws, multipliers, and exponents against constants."""
        from steepen.report.law_panels import compute_panels

        return compute_panels(self.analysis, self.ladders)

    def blocks(self, width: int) -> Iterable[Block]:
        """The answers; with `full` also the sentences, laws, multipliers and all warnings."""
        verdicts = [*self.verdicts.values(), *self.analysis.pairs]
        apart = [v for v in verdicts if v.flops_range is None]
        for verdict in apart[:MAX_NAMED]:
            yield Paragraph(f" {verdict.sentence}", "■", "yellow")
        most = None if self.full else MAX_PAIRS_IN_BRIEF if self.analysis.pairs else MAX_ROWS_IN_BRIEF
        if verdicts:
            yield answer_table(self.analysis, verdicts[:most], width)
        if self.full:
            yield from self._details(verdicts)
        elif len(verdicts) == 1 and not apart:
            yield Paragraph(f" {verdicts[0].sentence}", "■", STYLES[verdicts[0].better])
        elif not verdicts:
            yield law_table(self.analysis.primary_fit)
        if self.predictions is not None:
            yield self.predictions.table()
        yield from self._held_out()
        for warning in self.analysis.warnings[: None if self.full else MAX_WARNINGS_IN_BRIEF]:
            yield Paragraph(f" {warning}", "warning:", "yellow")
        yield from self._forecasts()
        if most is not None:
            yield Paragraph(self._what_else(len(verdicts), most))

    def _held_out(self) -> Iterable[Block]:
        held = self.analysis.hold_out
        if held and self.full:
            yield from (_held_out(one, self.analysis.request.unit) for one in held)
        elif held:
            largest = sorted(held, key=lambda one: -one.flops)[:MAX_HELD_OUT_IN_BRIEF]
            yield held_out_table([one for one in held if one in largest])

    def _forecasts(self) -> Iterable[Block]:
        """Registered forecasts, and how those of the ledger did."""
        for one in (*self.registered, *self.scored):
            style = "green" if one.inside else "dim" if one.inside is None else "bold red"
            yield Paragraph(f" {one.sentence()}", "■", style)
        if self.calibration is not None:
            yield Paragraph(f" {self.calibration.sentence()}", "ledger:", "bold")

    def _what_else(self, verdicts: int, most: int) -> str:
        """What the brief form leaves out, of which it shows `most` verdicts."""
        counts = (
            ("comparison", verdicts - most),
            ("hold-out", len(self.analysis.hold_out) - MAX_HELD_OUT_IN_BRIEF),
            ("warning", len(self.analysis.warnings) - MAX_WARNINGS_IN_BRIEF),
        )
        more = [f"{count} more {what}{'s' if count > 1 else ''}" for what, count in counts if count > 0]
        what = "sentences, what would change them, laws and multipliers"
        return f"--full (in Python full=True): {', '.join([*more, what])}."

    def _details(self, verdicts: Sequence[Verdict]) -> Iterable[Block]:
        for verdict in verdicts:
            yield Paragraph()
            yield Paragraph(f" {verdict.sentence}", "■", STYLES[verdict.better])
            for line in verdict.what_would_change:
                yield Paragraph(f"· {line}", indent=2)
        yield Paragraph()
        yield Paragraph(noise_sentence(self.analysis))
        if self.verdicts:
            yield prediction_table(self.analysis)
            yield multiplier_table(self.analysis.multipliers)
        for fit in self.analysis.fits.values():
            yield law_table(fit)
        if self.analysis.e_sweep:
            yield e_table(self.analysis)


MAX_NAMED = 3


def answer_title(analysis: LadderAnalysis) -> str:
    """The three questions."""
    if analysis.pairs:
        return "Is it better, by how much, and does the gain grow?"
    return f"Against {analysis.request.reference}: better, by how much, and does the gain grow?"


def answer_table(analysis: LadderAnalysis, verdicts: Sequence[Verdict], width: int) -> Table:
    """The three answers, a row for each arm."""
    pairs = bool(analysis.pairs)
    rows = [verdict_row(one, f"{one.arm} / {one.reference}" if pairs else one.arm) for one in verdicts]
    styles = STYLES | {_gain_grows(row): STYLES[str(row.growth)] for row in rows}
    columns = [
        Column("arm", value=lambda row: row.arm),
        Column("in range", value=lambda row: row.better, styles=STYLES),
        Column("multiplier", value=lambda row: _times(
            row.multiplier, row.multiplier_low, row.multiplier_high), align="right"),
        Column("p", _p, value=lambda row: row.p_better, align="right"),
        Column("gain", value=_gain_grows, styles=styles),
        Column("×/decade", value=lambda row: _times(
            row.growth_per_decade, row.growth_per_decade_low, row.growth_per_decade_high), align="right"),
        Column("p", _p, value=lambda row: row.p_growth, align="right"),
    ]  # fmt: skip
    request = analysis.request
    words = f"multiplier: times less {cost_axis(request.unit).noun}, mean over the common range"
    lines = [f"{words} ({percent(1 - request.level)})"]
    if any((row.multiplier or 1) < 1 for row in rows):
        lines.append(f"a multiplier below 1: more {cost_axis(request.unit).noun}")
    lines.append("p: of no difference, and of no growth")
    if request.adjust and len(analysis.verdicts) + len(analysis.pairs) > 1:
        lines.append("words hold for all arms together (Holm); p is each arm's own")
    if any(row.by_what == "either" for row in rows):
        lines.append("either: a larger exponent or a lower irreducible loss")
    table = table_of(rows, columns, answer_title(analysis), "\n".join(lines))
    if table_width(table) <= width:
        return table
    narrow = [column for column in columns if column.header != "×/decade"]
    return table_of(rows, narrow, table.title, table.caption)


def _gain_grows(row: VerdictRow) -> str:
    return f"{row.growth}: {row.by_what}" if row.by_what else str(row.growth)


def _times(value: float | None, low: float | None, high: float | None) -> str:
    """A factor with its interval: 1.21 (1.18–1.27)."""
    if value is None or low is None or high is None or math.isnan(value):
        return MISSING
    ends = (f"{end:.2f}" if end < 100 else f"{end:.0e}" for end in (low, high))
    return f"{value:.2f} ({'–'.join(ends)})"


def _p(p: float | None) -> str:
    return MISSING if p is None else f"{p:.1g}" if p >= 1e-99 else "<1e-99"


def noise_sentence(analysis: LadderAnalysis) -> str:
    """What the noise is: of seeds, and of rungs about their laws."""
    if not analysis.seed_noise:
        return (
            f"Noise: residual SD {analysis.lack_of_fit:.2g}, from the scatter about the laws (no replicates)."
        )
    (low, first), (high, last) = analysis.seed_noise[0], analysis.seed_noise[-1]
    changes = f"{first:.2g}"
    if changes != f"{last:.2g}":
        changes += f" at {format_flops(low, 2)} to {last:.2g} at {format_flops(high, 2)}"
    return (
        f"Noise: SD of a seed {changes}, from replicates of all arms; lack of fit"
        f" {analysis.lack_of_fit:.2g}, which more seeds do not reduce."
    )


def prediction_table(analysis: LadderAnalysis) -> Table:
    """Extrapolated multipliers by a larger exponent and by a lower irreducible loss."""
    verdicts = list(analysis.verdicts.values())
    places = verdicts[0].predictions
    columns = [Column("arm", value=lambda v: v.arm)]
    for i, place in enumerate(places):
        for symbol, shown in (("γ", _by_exponent), ("E", _by_irreducible_loss)):
            head = f"{symbol}, at {format_flops(place.flops, 2)}"
            columns.append(Column(head, shown, value=lambda v, i=i: v.predictions[i], align="right"))
    title = "extrapolated multipliers, if the exponent (γ) or the irreducible loss (E) differs; – rejected"
    neither = any(one.exponent is one.irreducible is None for v in verdicts for one in v.predictions)
    caption = "– under both: E and γ differ together, or a law does not fall" if neither else ""
    if analysis.one_e_rejected:
        caption = "arms do not share one E: columns of γ are by each arm's own E and γ"
    return table_of(verdicts, columns, title, caption)


def _by_exponent(prediction: Prediction) -> str:
    if prediction.exponent is None or prediction.exponent_interval is None:
        return MISSING
    low, high = prediction.exponent_interval
    value = f"{prediction.exponent:.2f}×"
    return f"{value} ({low:.2f}–{high:.2f})" if high < 1e3 else value


def _by_irreducible_loss(prediction: Prediction) -> str:
    return MISSING if prediction.irreducible is None else f"{prediction.irreducible:.2f}×"


def e_table(analysis: LadderAnalysis) -> Table:
    """The answers at several values of E."""
    arms = list(analysis.verdicts)
    columns = [Column("arm", value=lambda arm: arm)]
    for one in analysis.e_sweep:
        columns.append(Column(f"E = {one.e:.3f}", value=lambda arm, one=one: one.answers.get(arm, MISSING)))
    return table_of(arms, columns, "what hangs on E: answers if it were known (its estimate ± 1, 2 errors)")


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
        columns.append(
            Column("at", lambda m: format_flops(m.flops, 2), value=operator.itemgetter(place), align="right")
        )
        columns.append(Column("multiplier", _multiplier, value=operator.itemgetter(place), align="right"))
    title = "multipliers at each method's lowest and highest budget" + " († extrapolated)" * beyond
    return table_of(rows, columns, title)


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


def held_out_table(held: Sequence[HeldOutLoss]) -> Table:
    """Held-out runs and their forecasts in a row each; a sentence of each is in the full form."""
    columns = [
        Column("held out", value=lambda one: f"{one.arm} at {format_flops(one.flops)}"),
        Column("observed", ".4f", value=lambda one: one.observed),
        Column("forecast", value=lambda one: f"{one.forecast:.4f} ({_span(one.interval)})", align="right"),
        Column("error/SE", "+.1f", value=lambda one: one.error_in_standard_errors),
        Column("law needs", value=lambda one: f"{one.compute_factor:.2f}×", align="right"),
    ]
    return table_of(held, columns)


def _held_out(held: HeldOutLoss, unit: str) -> Block:
    low, high = held.interval
    return Paragraph(
        f"held out {held.arm} at {format_flops(held.flops)} {unit} ({held.decades_beyond:.2f} decades beyond"
        f" its ladder): observed {held.observed:.4f}, forecast {held.forecast:.4f} ({low:.4f} to"
        f" {high:.4f}); error {held.error:+.4f} = {held.error_in_sigma:+.1f}σ of a run ="
        f" {held.error_in_standard_errors:+.1f} standard errors of the forecast; the law needs"
        f" {held.compute_factor:.2f}× that {cost_axis(unit).noun} for the observed loss"
    )


@dataclass(frozen=True)
class PredictedLoss:
    """The predicted loss of a run of an arm; `decades_beyond` its ladder, negative within it."""

    arm: str
    flops: Annotated[float, Column("at", format_flops)]
    loss: Annotated[float, Column(format=".4f")]
    low: Annotated[float, Column(format=".4f")]
    high: Annotated[float, Column(format=".4f")]
    decades_beyond: Annotated[float, Column("decades beyond", ".1f")]
    confidence: Annotated[float, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(Result):
    """Predicted losses; `unit` is that of their compute."""

    predicted: tuple[PredictedLoss, ...]
    unit: str

    @property
    def rows(self) -> tuple[PredictedLoss, ...]:
        """One row per arm and compute."""
        return self.predicted

    def headline(self) -> str:
        """What is predicted, and how sure."""
        return f"Predicted loss of one run, {percent(self.predicted[0].confidence)} interval"

    def headings(self) -> dict[str, str]:
        """With the unit of compute."""
        return {"flops": f"at ({self.unit})"}
