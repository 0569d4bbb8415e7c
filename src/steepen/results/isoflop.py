"""What `fit` returns for sweeps at fixed compute: the optimum of each, and their law."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.text import Block, Lines

if TYPE_CHECKING:
    from steepen.laws.table_fits import IsoflopTableFit


@dataclass(frozen=True)
class OptimumRow:
    """The optimum of one sweep at fixed compute; `interior`: inside the sweep's range."""

    arm: str
    budget: float
    x: float
    loss: float
    interior: bool


@dataclass(frozen=True, eq=False, repr=False)
class IsoflopResult(Result):
    """The optimum of every fixed-compute sweep of a table, and the law of the optima, by arm."""

    table_fit: IsoflopTableFit

    @property
    def rows(self) -> list[OptimumRow]:
        """One row per sweep."""
        return [
            OptimumRow(arm, v.budget, v.x, v.loss, v.interior)
            for arm, sweeps in self.table_fit.arms.items()
            for v in sweeps.fit.vertices
        ]

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or 'x*'} ∝ C^{sweeps.fit.law.exponent:.3f}"
            for arm, sweeps in self.table_fit.arms.items()
            if sweeps.fit.law is not None
        ]
        return f"iso-compute optima: {', '.join(laws) or 'no law'}"

    def blocks(self, width: int) -> Iterable[Block]:
        """The vertices, their law and the forecasts."""
        return [Lines(self.table_fit.summary())]

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def panels(self) -> list[Panel]:
        """Sweeps with their parabolas, and optima with their law, for each arm."""
        from steepen.report.law_panels import isoflop_panels

        arms = self.table_fit.arms
        return isoflop_panels(
            {arm: one.fit for arm, one in arms.items()}, {arm: one.data for arm, one in arms.items()}
        )
