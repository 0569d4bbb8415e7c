"""What `fit` returns for L(N, D): constants of each arm's law."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Lines
from steepen.utils.formatting import format_value, percent

if TYPE_CHECKING:
    from steepen.laws.chinchilla_table import ChinchillaTableFit

# Constants of L = E + A/N^α + B/D^β and of its optimum, by field of `ChinchillaFit`.
SYMBOLS = {
    "e": "E", "a": "A", "b": "B", "alpha": "α", "beta": "β",
    "parameters_exponent": "exponent of N*", "tokens_exponent": "exponent of D*",
    "compute_exponent": "exponent of L − E",
}  # fmt: skip


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
    """L(N, D) = E + A/N^α + B/D^β of a table; `table_fit` has the law, the optimum and hold-outs."""

    table_fit: ChinchillaTableFit

    @property
    def rows(self) -> list[ConstantRow]:
        """One row per constant of each arm's law; `residual_rows` has the runs."""
        return [
            ConstantRow(arm, symbol, getattr(one.fit, field), *one.fit.intervals.get(field, (None, None)))
            for arm, one in self.table_fit.arms.items()
            for field, symbol in SYMBOLS.items()
        ]

    def left_out(self) -> tuple[str, ...]:
        """The arm, of a table without arms."""
        return () if all(self.table_fit.arms) else ("arm",)

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or 'N*'} ∝ C^{one.fit.parameters_exponent:.3f}" for arm, one in self.table_fit.arms.items()
        ]
        runs = sum(one.fit.points for one in self.table_fit.arms.values())
        return f"Chinchilla law of {runs} runs: {', '.join(laws)}"

    def headings(self) -> dict[str, str]:
        """With the level of the intervals."""
        level = percent(self.table_fit.first.fit.settings.confidence)
        return {"low": f"{level} low", "high": f"{level} high"}

    def blocks(self, width: int) -> Iterable[Block]:
        """The law, the optimum and the hold-outs."""
        return [Lines(self.table_fit.summary())]

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def panels(self) -> list[Panel]:
        """Residuals, and contours of the first arm's law with the compute-optimal line."""
        from steepen.report.law_panels import chinchilla_panels

        first = self.table_fit.first
        return chinchilla_panels(first.fit, first.parameters, first.tokens, first.loss)

    def residual_rows(self) -> list[dict[str, Any]]:
        """One row per fitted run: parameters, tokens, loss, the law's loss and the difference."""
        return [
            {"arm": arm, "parameters": float(n), "tokens": float(d), "loss": float(y), "law": float(law),
             "residual": float(y - law)}
            for arm, one in self.table_fit.arms.items()
            for n, d, y, law in zip(one.parameters, one.tokens, one.loss,
                                    one.fit.predict(one.parameters, one.tokens), strict=True)
        ]  # fmt: skip
