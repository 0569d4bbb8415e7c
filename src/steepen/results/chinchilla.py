"""What `fit` returns for laws in model size and tokens: constants of each arm's law, and comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import MISSING, compute_factor, format_flops, format_value, percent

if TYPE_CHECKING:
    from steepen.laws.chinchilla_table import ArmChinchilla, ChinchillaTableFit, HeldOutChinchillaLoss
    from steepen.laws.fits.chinchilla import ChinchillaFit
    from steepen.laws.fits.size_law_comparison import LawComparison, Multiplier

# Constants of L = E + A/N^α + B/D^β and of its optimum, by field of `ChinchillaFit`.
SYMBOLS = {
    "e": "E", "a": "A", "b": "B", "alpha": "α", "beta": "β", "phi": "φ",
    "parameters_exponent": "exponent of N*", "tokens_exponent": "exponent of D*",
    "compute_exponent": "exponent of L − E",
}  # fmt: skip
LEVEL = 0.05  # family-wise, of the words about each question


@dataclass(frozen=True)
class ConstantRow:
    """A constant of an arm's law, with its interval."""

    arm: str
    constant: str
    value: Annotated[float, Column(format=format_value)]  # each of its own size
    low: Annotated[float | None, Column(format=format_value)]
    high: Annotated[float | None, Column(format=format_value)]


@dataclass(frozen=True, eq=False, repr=False)
class ChinchillaResult(Result):
    """L(N, D) = E + A/N^α + B/D^β of a table; `table_fit` has laws, optima, hold-outs and comparisons."""

    table_fit: ChinchillaTableFit

    @property
    def rows(self) -> list[ConstantRow]:
        """One row per constant of each arm's law; `residual_rows` has the runs."""
        return [
            ConstantRow(arm, symbol, getattr(one.fit, field), *one.fit.intervals[field])
            for arm, one in self.table_fit.arms.items()
            for field, symbol in SYMBOLS.items()
            if field in one.fit.intervals
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings."""
        return self.table_fit.warnings

    def left_out(self) -> tuple[str, ...]:
        """The arm, of a table without arms."""
        return () if all(self.table_fit.arms) else ("arm",)

    def headline(self) -> str:
        """The exponents in one line."""
        fits = {arm: one.fit for arm, one in self.table_fit.arms.items()}
        runs = sum(fit.points for fit in fits.values())
        if (fit := self.table_fit.first.fit).phi is not None:
            return f"looped law of {runs} runs: φ = {fit.phi:.3f}"
        laws = [f"{arm or 'N*'} ∝ C^{fit.parameters_exponent:.3f}" for arm, fit in fits.items()]
        return f"Chinchilla law of {runs} runs: {', '.join(laws)}"

    def headings(self) -> dict[str, str]:
        """With the level of the intervals."""
        level = percent(self.table_fit.first.fit.settings.confidence)
        return {"low": f"{level} low", "high": f"{level} high"}

    def blocks(self, width: int) -> Iterable[Block]:
        """Comparisons first; then laws, optima and hold-outs."""
        found = self.table_fit
        if len(found.comparisons) > 1:
            yield comparison_table(found)
            yield Paragraph()
        for arm in found.comparisons:
            yield Paragraph(f" {comparison_sentence(found, arm)}", "■")
            yield Paragraph()
        yield self.table() if len(found.arms) == 1 else self.arm_table()
        for arm, one in found.arms.items():
            yield Paragraph()
            yield Paragraph(f"{arm}: {law_sentence(one)}" if arm else law_sentence(one))
            for run in one.hold_out:
                yield Paragraph(f"· {held_out_sentence(run, found.row_word)}", indent=2)

    def arm_table(self) -> Table:
        """A row for each arm: the constants that have no unit, with their intervals."""

        def column(field: str) -> Column:
            def value(arm: str) -> str:
                fit = self.table_fit.arms[arm].fit
                low, high = fit.intervals[field]
                return f"{getattr(fit, field):.3f} ({low:.2f}–{high:.2f})"

            return Column(SYMBOLS[field], value=value, align="right")

        columns = [Column("arm", value=str), *map(column, ("e", "alpha", "beta"))]
        return table_of(list(self.table_fit.arms), columns, self.headline().partition(":")[0])

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def panels(self) -> list[Panel]:
        """Residuals, and contours of each arm's law with the compute-optimal line."""
        from steepen.report.law_panels import chinchilla_panels

        return chinchilla_panels(self.table_fit.arms)

    def residual_rows(self) -> list[dict[str, Any]]:
        """One row per fitted run: parameters, tokens, loss, the law's loss and the difference."""
        return [
            {"arm": arm, "parameters": float(n), "tokens": float(d), "loss": float(y), "law": float(law),
             "residual": float(y - law)}
            for arm, one in self.table_fit.arms.items()
            for n, d, y, law in zip(one.runs.parameters, one.runs.tokens, one.runs.loss,
                                    one.fit.predict(one.size, one.runs.tokens), strict=True)
        ]  # fmt: skip


def equation(fit: ChinchillaFit) -> str:
    """The law with its constants."""
    size = "N" if fit.phi is None else f"(N_once + r^{fit.phi:.3f}·N_rec)"
    return f"L = {fit.e:.4f} + {fit.a:.5g}/{size}^{fit.alpha:.4f} + {fit.b:.5g}/D^{fit.beta:.4f}"


def law_sentence(one: ArmChinchilla) -> str:
    """The law, how well it fits, and its optimum at a budget."""
    fit = one.fit
    text = (
        f"{equation(fit)}; residual SD {fit.residual_sd:.2g}, {fit.settings.loss} objective"
        f" {fit.objective:.6e} over {fit.points} runs, reached from {fit.starts_at_optimum:.0%} of"
        f" {fit.starts} starts."
    )
    if fit.phi is None:
        law = fit.flops_law
        usual = abs(law.coefficient / 6 - 1) < 0.01 and abs(law.exponent - 1) < 1e-3
        flops = "6·N·D" if usual else f"{law.coefficient:.3g}·N^{law.exponent:.3f}·D"
        text += (
            f" Compute-optimal with C = {flops}: N* ∝ C^{fit.parameters_exponent:.4f},"
            f" D* ∝ C^{fit.tokens_exponent:.4f}, L − E ∝ C^−{fit.compute_exponent:.4f}."
        )
    if (best := one.optimum) is not None:
        text += (
            f" At {format_flops(best.flops)} FLOPs: N* = {best.parameters:.4g}, D* = {best.tokens:.4g}, loss"
            f" {best.loss:.4f}."
        )
    return text


def held_out_sentence(run: HeldOutChinchillaLoss, row_word: str) -> str:
    """A held-out run against its forecast."""
    return (
        f"held out {row_word} {run.row}: {run.observed:.4f} against {run.forecast:.4f}"
        f" ({run.interval[0]:.4f} to {run.interval[1]:.4f}), error {run.error:+.4f}"
        f" ({run.error_in_sigma:+.1f}σ of a run, {run.error_in_standard_errors:+.1f} standard errors of the"
        " forecast)"
    )


def answers(found: ChinchillaTableFit, arm: str) -> tuple[str, str]:
    """Whether the arm is better, and whether its multiplier grows, in a word each."""
    one = found.comparisons[arm]
    level = "better" if one.multiplier.value > 1 else "worse"
    trend = "grows" if one.growth > 1 else "shrinks"
    return (
        level if found.p_better[arm] < LEVEL else "not resolved",
        trend if found.p_growth[arm] < LEVEL else MISSING,
    )


def comparison_table(found: ChinchillaTableFit) -> Table:
    """A row for each arm: better or worse, by how much, and whether it grows."""

    def interval(value: float, ends: tuple[float, float]) -> str:
        return f"{value:.3f} ({ends[0]:.2f}–{ends[1]:.2f})"

    def growth(arm: str) -> str:
        return interval(found.comparisons[arm].growth, found.comparisons[arm].growth_interval)

    def middle(arm: str) -> str:
        return interval((m := found.comparisons[arm].multiplier).value, m.interval)

    return table_of(
        list(found.comparisons),
        [
            Column("arm", value=str),
            Column("in range", value=lambda arm: answers(found, arm)[0]),
            Column("multiplier", value=middle, align="right"),
            Column("p", ".1g", value=lambda arm: found.p_better[arm]),
            Column("gain", value=lambda arm: answers(found, arm)[1]),
            Column("×/decade", value=growth, align="right"),
            Column("p", ".1g", value=lambda arm: found.p_growth[arm]),
        ],
        f"Multipliers over {found.reference} in the middle of the common range, and their growth",
        f"{percent(found.first.fit.settings.confidence)} intervals; p and words adjusted for"
        f" {len(found.comparisons)} arms (Holm, {percent(LEVEL)})",
    )


def resolved(multiplier: float, p: float, growth: float, p_growth: float) -> str:
    """Whether the arm is better, and whether the gain grows: what of it is resolved, in words."""
    head = "no difference is resolved" if p >= LEVEL else "better" if multiplier > 1 else "worse"
    if p_growth >= LEVEL:
        return head
    subject, trend = "the gain" if multiplier > 1 else "its multiplier", "grows" if growth > 1 else "shrinks"
    return f"{head}, and {subject} {trend} with compute"


def comparison_sentence(found: ChinchillaTableFit, arm: str) -> str:
    """What the comparison of an arm with the reference says."""
    one = found.comparisons[arm]
    p, p_growth = found.p_better[arm], found.p_growth[arm]
    head = resolved(one.multiplier.value, p, one.growth, p_growth)
    low, high = one.growth_interval
    confidence = percent(found.first.fit.settings.confidence)
    ends = ", ".join(_multiplier(m) for m in one.multipliers)
    middle = one.multiplier
    interval = f"{confidence} {middle.interval[0]:.3f} to {middle.interval[1]:.3f}; p = {p:.2g}"
    needs = f"It needs {_multiplier(middle)} (multiplier {middle.value:.3f}, {interval})"
    if p >= LEVEL:  # no direction is shown
        at = format_flops(middle.flops)
        needs = f"The multiplier is {middle.value:.3f} at {at} FLOPs ({interval})"
    text = (
        f"{arm} against {found.reference}: {head}. {needs}, the middle of the common range; {ends}."
        f" The multiplier changes by ×{one.growth:.3f}"
        f" per decade of compute ({low:.3f} to {high:.3f}; p = {p_growth:.2g})"
    )
    if one.p_ratio_effect < LEVEL:
        text += f" and by ×{one.ratio_effect:.3f} per tenfold D/N (p = {one.p_ratio_effect:.2g})"
    text += f", at the mean D/N. {_how(one)}"
    if not one.overlap:
        text += " The arms' ranges of compute do not overlap: these multipliers are extrapolated."
    return text


def _how(one: LawComparison) -> str:
    """What was paired and shared, and which of it the data reject."""
    how = f"{one.pairs} equal cells (N, D) are paired" if one.pairs else "too few equal cells (N, D) to pair"
    rejected = [
        f"{what} (p = {p:.2g})"
        for what, p in (("one α and β", one.p_exponents), ("one E", one.p_irreducible))
        if p < LEVEL
    ]
    if not rejected:
        p = min(one.p_irreducible, one.p_exponents)
        return f"{how}; one E, α and β for both arms is not rejected (p = {p:.2g})."
    verb = "is" if len(rejected) == 1 else "are"
    return f"{how}; {' and '.join(rejected)} for both arms {verb} rejected: the laws differ in form."


def _multiplier(multiplier: Multiplier) -> str:
    return f"{compute_factor(multiplier.value)} at {format_flops(multiplier.flops)} FLOPs"
