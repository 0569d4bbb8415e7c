"""Results of `steepen.fit` with `law="chinchilla"` and `law="isoflop"`: laws of parameters and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.utils.formatting import percent

if TYPE_CHECKING:
    from steepen.laws.chinchilla_table import ChinchillaTableFit
    from steepen.laws.table_fits import IsoflopTableFit


# Constants of L = E + A/N^α + B/D^β and of its optimum, by field of `ChinchillaFit`.
SYMBOLS = {
    "e": "E", "a": "A", "b": "B", "alpha": "α", "beta": "β",
    "parameters_exponent": "exponent of N*", "tokens_exponent": "exponent of D*",
    "compute_exponent": "exponent of L − E",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class ChinchillaResult(Result):
    """L(N, D) = E + A/N^α + B/D^β of a table; `table_fit` has the law, the optimum and hold-outs."""

    table_fit: ChinchillaTableFit

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or 'N*'} ∝ C^{one.fit.parameters_exponent:.3f}" for arm, one in self.table_fit.arms.items()
        ]
        runs = sum(one.fit.points for one in self.table_fit.arms.values())
        return f"Chinchilla law of {runs} runs: {', '.join(laws)}"

    def summary(self) -> str:
        """The law, the optimum and the hold-outs."""
        return self.table_fit.summary()

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per constant of each arm's law, with its interval; `residual_rows` has the runs."""
        rows: list[dict[str, Any]] = []
        for arm, one in self.table_fit.arms.items():
            named = {"arm": arm} if arm else {}
            for field, symbol in SYMBOLS.items():
                low, high = one.fit.intervals.get(field, (None, None))
                value = getattr(one.fit, field)
                rows.append({**named, "constant": symbol, "value": value, "low": low, "high": high})
        return rows

    def heading(self, column: str) -> str:
        """With the level of the intervals."""
        level = next(iter(self.table_fit.arms.values())).fit.settings.confidence
        return f"{percent(level)} {column}" if column in ("low", "high") else super().heading(column)

    def residual_rows(self) -> list[dict[str, Any]]:
        """One row per fitted run: parameters, tokens, loss, the law's loss and the difference."""
        return [
            {"arm": arm, "parameters": float(n), "tokens": float(d), "loss": float(y), "law": float(law),
             "residual": float(y - law)}
            for arm, one in self.table_fit.arms.items()
            for n, d, y, law in zip(one.parameters, one.tokens, one.loss,
                                    one.fit.predict(one.parameters, one.tokens), strict=True)
        ]  # fmt: skip

    def plot(self, ax: Any = None) -> Any:
        """Draw the residuals against compute; returns the Axes."""
        ax = new_axes(ax)
        rows = self.residual_rows()
        ax.axhline(0, color="#111111", lw=0.8)
        ax.plot([6 * r["parameters"] * r["tokens"] for r in rows], [r["residual"] for r in rows], "o", ms=4)
        ax.set(xscale="log", xlabel="6 · N · D (FLOPs)", ylabel="loss − law")
        return ax


@dataclass(frozen=True, eq=False, repr=False)
class IsoflopResult(Result):
    """The optimum of every fixed-compute sweep of a table, and the law of the optima, by arm."""

    table_fit: IsoflopTableFit

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or 'x*'} ∝ C^{sweeps.fit.law.exponent:.3f}"
            for arm, sweeps in self.table_fit.arms.items()
            if sweeps.fit.law is not None
        ]
        return f"iso-compute optima: {', '.join(laws) or 'no law'}"

    def summary(self) -> str:
        """The vertices, their law and the forecasts."""
        return self.table_fit.summary()

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per sweep: its budget, optimum, loss there, and whether the optimum lies inside it."""
        return [
            {"arm": arm, "budget": v.budget, "x": v.x, "loss": v.loss, "interior": v.interior}
            for arm, sweeps in self.table_fit.arms.items()
            for v in sweeps.fit.vertices
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the optima against the budget with their law; returns the Axes."""
        import numpy as np

        ax = new_axes(ax)
        for arm, sweeps in self.table_fit.arms.items():
            budgets = [v.budget for v in sweeps.fit.vertices]
            points = ax.plot(budgets, [v.x for v in sweeps.fit.vertices], "*", ms=8, label=arm or None)
            if (law := sweeps.fit.law) is not None:
                line = np.geomspace(min(budgets), max(budgets), 50)
                ax.plot(line, [law.predict(float(b)) for b in line], color=points[0].get_color(), lw=1)
        ax.set(xscale="log", yscale="log", xlabel="budget (FLOPs)", ylabel="best x")
        if self.table_fit.has_arms:
            ax.legend()
        return ax
