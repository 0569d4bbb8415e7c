"""What `fit` returns for sweeps at fixed compute: the optimum of each, their law, and comparisons of arms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.chinchilla import LEVEL, resolved
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import MISSING, compute_factor, format_flops, format_value, percent

if TYPE_CHECKING:
    from steepen.laws.distributions import Difference
    from steepen.laws.fits.isoflop_comparison import BudgetComparison, SweepComparison
    from steepen.laws.isoflop_table import ArmSweeps, IsoflopTableFit, OptimumForecast


@dataclass(frozen=True)
class OptimumRow:
    """The optimum of one sweep at fixed compute; `interior`: inside the sweep's range."""

    arm: Annotated[str, Column(whole=True)]
    budget: Annotated[float, Column("FLOPs", format=format_flops)]
    x: Annotated[float, Column(format=format_value)]
    low: Annotated[float | None, Column(format=format_value)]
    high: Annotated[float | None, Column(format=format_value)]
    loss: float
    points: int
    interior: Annotated[bool, Column("inside")]


@dataclass(frozen=True, eq=False, repr=False)
class IsoflopResult(Result):
    """The optimum of every fixed-compute sweep of a table, the law of the optima by arm, and comparisons."""

    table_fit: IsoflopTableFit

    @property
    def rows(self) -> list[OptimumRow]:
        """One row per sweep."""
        return [
            OptimumRow(arm, v.budget, v.x, *(v.interval or (None, None)), v.loss, v.points, v.interior)
            for arm, sweeps in self.table_fit.arms.items()
            for v in sweeps.fit.vertices
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of the table and of every arm's fit."""
        own = [
            f"{arm}: {text}" if arm else text
            for arm, one in self.table_fit.arms.items()
            for text in one.fit.warnings
        ]
        return (*self.table_fit.warnings, *own)

    def left_out(self) -> tuple[str, ...]:
        """The arm, of a table without arms."""
        return () if all(self.table_fit.arms) else ("arm",)

    def headings(self) -> dict[str, str]:
        """With what was swept, and the level of the intervals."""
        level = percent(next(iter(self.table_fit.arms.values())).fit.settings["confidence"])
        return {"x": f"best {self.table_fit.x_name}", "low": f"{level} low", "high": f"{level} high"}

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or f'best {self.table_fit.x_name}'} ∝ C^{sweeps.fit.law.exponent:.3f}"
            for arm, sweeps in self.table_fit.arms.items()
            if sweeps.fit.law is not None
        ]
        return f"iso-compute optima: {', '.join(laws) or 'no law'}"

    def blocks(self, width: int) -> Iterable[Block]:
        """Comparisons first; then the vertices, their laws and the forecasts."""
        found = self.table_fit
        for arm, one in found.comparisons.items():
            yield Paragraph(f" {arm} against {found.reference}: {comparison_sentence(found, arm)}", "■")
            yield Paragraph()
            if len(found.comparisons) == 1:
                yield budget_table(one, found.x_name)
                yield Paragraph()
        yield self.table()
        for arm, one in found.arms.items():
            yield Paragraph()
            text = law_sentence(one, found.x_name)
            yield Paragraph(f"{arm}: {text}" if arm else text)
            for forecast in (*([one.at_budget] if one.at_budget else []), *one.hold_out):
                yield Paragraph(f"· {forecast_sentence(forecast, found.x_name)}", indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def panels(self) -> Sequence[Panel]:
        """Sweeps of each arm with their parabolas, and optima of all arms with their laws."""
        from steepen.report.law_panels import isoflop_panels

        return isoflop_panels(self.table_fit.arms, self.table_fit.x_name)


def law_sentence(one: ArmSweeps, x_name: str) -> str:
    """The law of an arm's optima, its drift, and their mean."""
    fit, parts = one.fit, list[str]()
    if (law := fit.law) is not None:
        parts.append(
            f"best {x_name} = {law.coefficient:.4g} · C^{law.exponent:.4f} ({law.interval[0]:.4f} to"
            f" {law.interval[1]:.4f}); drift p = {law.p_value:.3g}, smallest drift this could have seen"
            f" {law.detectable:.3g}" + (f"; intervals from {law.runs} resampled runs" if law.runs else "")
        )
    if math.isfinite(fit.mean):
        # The rounding rule is for ratios and fractions, not for billions of tokens.
        rounded = f", rounded {fit.rounded:g}" if fit.mean < 1000 else ""
        parts.append(f"mean of the optima {fit.mean:.4g}{rounded}")
    censored = sum(vertex.censored for vertex in fit.vertices)
    if censored:
        parts.append(
            f"{censored} of {len(fit.vertices)} sweeps have no optimum inside: best measured, in no law"
        )
    return "; ".join(parts)


def forecast_sentence(forecast: OptimumForecast, x_name: str) -> str:
    """The forecast in one line."""
    seen = "" if forecast.observed is None else f", observed {forecast.observed:.4g}"
    low, high = forecast.interval
    at = format_flops(forecast.budget)
    return f"at {at} FLOPs: best {x_name} {forecast.x:.4g} ({low:.4g} to {high:.4g}){seen}"


def comparison_sentence(found: IsoflopTableFit, arm: str) -> str:
    """What the comparison of an arm with the reference says."""
    one, parts = found.comparisons[arm], list[str]()
    if (mean := one.multiplier) is not None:
        p = found.p_better[arm]
        known = (one.growth.value, found.p_growth[arm]) if one.growth is not None else (1.0, 1.0)
        head = resolved(mean.value, p, *known)
        ends = f"{mean.interval[0]:.3f} to {mean.interval[1]:.3f}; p = {p:.2g}"
        over = f"on average over {len(one.budgets)} budgets"
        needs = f"It needs {compute_factor(mean.value)} {over} (multiplier {mean.value:.3f}, {ends})"
        if p >= LEVEL:  # no direction is shown
            needs = f"The multiplier is {mean.value:.3f} {over} ({ends})"
        parts.append(f"{head}. {needs}")
    else:
        parts.append("no multiplier, as the arm has one optimum")
    if (growth := one.growth) is not None:
        ends = f"{growth.interval[0]:.3f} to {growth.interval[1]:.3f}; p = {found.p_growth[arm]:.2g}"
        parts.append(f"the multiplier changes by ×{growth.value:.3f} per decade of compute ({ends})")
    if (exponent := one.exponent) is not None:
        ends = f"{exponent.interval[0]:+.3f} to {exponent.interval[1]:+.3f}; p = {exponent.p:.2g}"
        parts.append(f"the exponent of its optimum differs by {exponent.value:+.3f} ({ends})")
    return "; ".join(parts) + "."


def budget_table(one: SweepComparison, x_name: str) -> Table:
    """A row for each common budget."""

    def factor(contrast: Difference | None) -> str:
        if contrast is None:
            return MISSING
        return f"{contrast.value:.3g} ({contrast.interval[0]:.2f}–{contrast.interval[1]:.2f})"

    def loss(row: BudgetComparison) -> str:
        value, (low, high) = row.loss_difference.value, row.loss_difference.interval
        return f"{value:+.4f} ±{(high - low) / 2:.4f}"

    return table_of(
        one.budgets,
        [
            Column("budget", value=lambda row: format_flops(row.budget, 2), align="right"),
            Column(f"ratio of {x_name}*", value=lambda row: factor(row.optimum_ratio), align="right"),
            Column("loss", value=loss, align="right"),
            Column("multiplier", value=lambda row: factor(row.multiplier), align="right"),
            Column("p", ".1g", value=lambda row: row.loss_difference.p),
        ],
        caption="loss: difference at the optima, with its p-value",
    )
