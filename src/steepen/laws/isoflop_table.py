"""Fit sweeps at fixed compute to a table of runs: optima, their laws, and comparisons of arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np

from steepen.errors import UsageError, require_one_of, require_reference
from steepen.laws.arm_fits import compare_arms, fit_arms, held_rows
from steepen.laws.distributions import Interval
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, fit_isoflop, fit_isoflop_runs
from steepen.laws.fits.isoflop_comparison import SweepComparison, compare_sweeps
from steepen.laws.fits.vertex import VertexMethod
from steepen.laws.verdict.questions import holm
from steepen.tables.table import ALIASES, Table
from steepen.tables.table_selection import parse_hold_outs
from steepen.utils.arrays import Array, take_rows

SweepLoss = Literal["mse", "log-mse"]


@dataclass(frozen=True)
class OptimumForecast:
    """The optimum forecast by the law at a budget; `observed` is the vertex measured there, if any."""

    budget: float
    x: float
    interval: Interval
    observed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and numbers, for JSON; `observed` only where there is one."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, eq=False)
class ArmSweeps:
    """Iso-compute sweeps of one arm: the fit, the (budget, x, loss) it was made from, and forecasts."""

    fit: IsoflopFit
    data: tuple[Array, Array, Array]
    at_budget: OptimumForecast | None
    hold_out: tuple[OptimumForecast, ...]

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        found = self.fit.to_dict()
        if self.at_budget is not None:
            found["at"] = self.at_budget.to_dict()
        if self.hold_out:
            found["hold_out"] = [one.to_dict() for one in self.hold_out]
        return found


@dataclass(frozen=True, eq=False)
class IsoflopTableFit:
    """Iso-compute fits of every arm of a table; a table without an arm column has one arm named "".

    `x_name` is what was swept, in words: parameters, tokens, or the table's name of the column.
    """

    arms: dict[str, ArmSweeps]
    x_name: str
    reference: str | None
    comparisons: dict[str, SweepComparison]
    warnings: tuple[str, ...]

    @property
    def p_better(self) -> dict[str, float]:
        """p-value of no difference, adjusted for the number of arms (Holm)."""
        return holm({arm: one.multiplier.p for arm, one in self.comparisons.items() if one.multiplier})

    @property
    def p_growth(self) -> dict[str, float]:
        """p-value of a constant multiplier, adjusted for the number of arms (Holm)."""
        return holm({arm: one.growth.p for arm, one in self.comparisons.items() if one.growth})

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON: the only arm's fit at the top, every arm's in `arms`."""
        arms = {name: one.to_dict() for name, one in self.arms.items()}
        only = next(iter(arms.values())) if len(arms) == 1 else {"law": "isoflop"}
        found = {**only, "x": self.x_name, **({} if "" in arms else {"arms": arms})}
        if self.reference is not None:
            better, growth = self.p_better, self.p_growth
            compared = {
                name: {
                    **asdict(one), "p_better_holm": better.get(name), "p_growth_holm": growth.get(name)
                }
                for name, one in self.comparisons.items()
            }  # fmt: skip
            found |= {"reference": self.reference, "comparisons": compared}
        return found | {"warnings": [*only.get("warnings", []), *self.warnings]}


def fit_isoflop_table(
    table: Table,
    *,
    loss: SweepLoss = "log-mse",
    vertex: VertexMethod = "quadratic",
    nearest: int | None = None,
    confidence: float = 0.90,
    reference: str | None = None,
    budget: float | None = None,
    hold_out: Sequence[str] = (),
) -> IsoflopTableFit:
    """Fit every budget's optimum, and the law of the optima, to columns budget, x, loss (and arm, seed, run).

    Without a column x, x is the number of parameters, or of tokens. Arms are compared with the `reference`.
    Where rows share training (`run`, `trunk`), the intervals of parabolas are from a bootstrap over runs.
    """
    if loss not in ("mse", "log-mse"):
        least_squares = "an iso-compute parabola is least squares: choose mse (of the loss) or log-mse"
        raise UsageError(f"loss is {loss!r}; {least_squares}.")
    require_one_of("vertex", vertex, ("quadratic", "akima"))
    table, x_name = _with_x(table)
    rows = _Rows.read(table, with_arms=reference is not None)
    arms = cast(list[str], list(dict.fromkeys(rows.arm.tolist())))
    if reference is not None:
        require_reference(reference, arms)
    held = held_rows(parse_hold_outs(hold_out, arms, table), rows.arm, rows.budget)
    how: dict[str, Any] = {"log_loss": loss == "log-mse", "nearest": nearest, "confidence": confidence}

    def fit_arm(arm: str) -> ArmSweeps:
        own = rows.arm == arm
        return _fit_arm(take_rows(rows, own & ~held), take_rows(rows, own & held), vertex, how, budget)

    warnings: list[str] = []
    found = fit_arms(arms, reference, fit_arm, warnings)
    if not found:
        raise UsageError("no arm has a sweep of three different x: " + "; ".join(warnings))
    comparisons: dict[str, SweepComparison] = {}
    if reference is not None:
        base = found[reference]
        comparisons = compare_arms(
            [arm for arm in found if arm != reference],
            lambda arm: compare_sweeps((base.fit, found[arm].fit), (base.data, found[arm].data)),
            warnings, only=len(arms) == 2,
        )  # fmt: skip
    if comparisons and any("runs" in one.fit.settings for one in found.values()):
        warnings.append("rows share training runs; comparisons treat them as independent")
    return IsoflopTableFit(found, x_name, reference, comparisons, tuple(warnings))


@dataclass(frozen=True, eq=False)
class _Rows:
    """The columns of a table for this law; `arm` and `run` are names."""

    arm: Any
    budget: Array
    x: Array
    loss: Array
    run: Any | None

    @classmethod
    def read(cls, table: Table, *, with_arms: bool) -> _Rows:
        table.require([*(["arm"] if with_arms else []), "budget", "x", "loss"])
        c, x, y = (table.numbers(name) for name in ("budget", "x", "loss"))
        has_arms = table.has("arm", aliases=with_arms)
        names = table.names("arm") if has_arms else [""] * len(table)
        # Two sizes may share an x (of tokens); a row that is there twice counts twice.
        cells = list(zip(names, c.tolist(), x.tolist(), y.tolist(), strict=True))
        table.require_unique_rows(cells, f"budget, x and loss{' of an arm' * has_arms}")
        runs = table.training_runs()
        return cls(np.array(names), c, x, y, None if runs is None else np.array(runs))

    @property
    def columns(self) -> tuple[Array, Array, Array]:
        """Budget, x and loss."""
        return self.budget, self.x, self.loss

    def fit(self, vertex: VertexMethod, how: dict[str, Any]) -> IsoflopFit:
        """The optima and their law; with intervals over training runs where rows share them."""
        if self.run is not None and vertex == "quadratic" and len(np.unique(self.run)) < len(self.run):
            return fit_isoflop_runs(*self.columns, cast(list[str], self.run.tolist()), **how)
        return fit_isoflop(*self.columns, method=vertex, **how)


def _fit_arm(
    used: _Rows, out: _Rows, vertex: VertexMethod, how: dict[str, Any], budget: float | None
) -> ArmSweeps:
    """The optima of one arm and their law, which forecasts that at a budget and those held out."""
    if not len(used.x):
        raise UsageError("every budget is held out; nothing is left to fit.")
    fit, at_budget, scored = used.fit(vertex, how), None, list[OptimumForecast]()
    if fit.law is not None and budget is not None:
        at_budget = _forecast(fit.law, budget)
    if fit.law is not None and len(out.x):
        scored = [_forecast(fit.law, v.budget, v.x) for v in out.fit(vertex, how).vertices]
    return ArmSweeps(fit, used.columns, at_budget, tuple(scored))


def _forecast(law: PowerLawFit, budget: float, observed: float | None = None) -> OptimumForecast:
    return OptimumForecast(budget, law.predict(budget), law.interval_at(budget), observed)


def _with_x(table: Table) -> tuple[Table, str]:
    """The table with a column x, and what it is in words."""
    read = table.columns.get("x")  # of a cleaned table, where it may be the sizes or tokens
    same = (one for one in ("parameters", "tokens") if table.has(one) and read in (None, table.cells(one)))
    name = table.renamed.get("x") or next(same, "x")
    if not table.has("x") and name != "x":
        table = table.rename({"x": name})
    plain = name.strip().casefold().replace(" ", "_")
    for word in ("parameters", "tokens"):
        if plain == word or plain in ALIASES[word]:
            return table, word
    return table, name
