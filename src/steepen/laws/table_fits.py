"""Fit a law to a table of runs: the compute law with its verdicts, and iso-compute sweeps.

These are what `steepen fit` calls (`chinchilla_table` has the Chinchilla law). Each takes a `Table`,
hold-outs as on the command line (`1e20`, `vanilla:1e20` or a table's path) and returns a result with
`summary()` and `to_dict()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np

from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse
from steepen.laws.distributions import Interval
from steepen.laws.fits.isoflop import IsoflopFit, fit_isoflop
from steepen.laws.fits.isoflop_runs import fit_isoflop_runs
from steepen.laws.fits.solver import Array, Mask
from steepen.laws.fits.vertex import VertexMethod
from steepen.laws.ladder import Ladder
from steepen.laws.table import Table
from steepen.laws.table_selection import parse_flops
from steepen.laws.verdict.holdout import hold_out_rungs

SweepLoss = Literal["mse", "log-mse"]


def choose_reference(ladders: dict[str, Ladder], reference: str | None) -> str:
    """The named reference, or the only arm of a table with one arm."""
    if reference is None and len(ladders) == 1:
        return next(iter(ladders))
    if reference is None:
        raise UsageError(
            f"name the arm to judge against with `reference`; the arms are {', '.join(ladders)}."
        )
    return reference


def analyse_table(
    table: Table, request: AnalysisRequest, hold_out: Sequence[str] = ()
) -> tuple[LadderAnalysis, dict[str, Ladder]]:
    """Analyse a table with columns arm, flops, loss (and seed); also return the ladders that were fitted.

    Those are without arms that are too short, and without runs that are off the others.
    """
    ladders, held_out = hold_out_rungs(table, hold_out)
    found = analyse(ladders, request, held_out or None)
    return found, found.judge.ladders


@dataclass(frozen=True)
class OptimumForecast:
    """The optimum forecast by the law at a budget; `observed` is the vertex measured there, if any."""

    budget: float
    x: float
    interval: Interval
    observed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and numbers, for JSON; `observed` only where there is one."""
        return {
            name: value for name, value in asdict(self).items() if name != "observed" or value is not None
        }

    def summary(self) -> str:
        """The forecast in one line."""
        seen = "" if self.observed is None else f", observed {self.observed:.4g}"
        low, high = self.interval
        return f"at {self.budget:.3g}: x* = {self.x:.4g} ({low:.4g} to {high:.4g}){seen}"


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

    def summary(self) -> str:
        """The vertices, their law and the forecasts."""
        forecasts = [*([self.at_budget] if self.at_budget else []), *self.hold_out]
        return "\n".join([self.fit.summary(), *(one.summary() for one in forecasts)])


@dataclass(frozen=True, eq=False)
class IsoflopTableFit:
    """Iso-compute fits of every arm of a table; a table without an arm column has one arm named ""."""

    arms: dict[str, ArmSweeps]
    has_arms: bool

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON: the only arm's fit at the top, every arm's in `arms`."""
        arms = {name: one.to_dict() for name, one in self.arms.items()}
        only = next(iter(arms.values())) if len(arms) == 1 else {"law": "isoflop"}
        return {**only, **({"arms": arms} if self.has_arms else {})}

    def summary(self) -> str:
        """The fits of all arms, each under its name."""
        return "\n".join((f"{arm}\n" if arm else "") + one.summary() for arm, one in self.arms.items())


def fit_isoflop_table(
    table: Table,
    *,
    loss: SweepLoss = "log-mse",
    vertex: VertexMethod = "quadratic",
    nearest: int | None = None,
    confidence: float = 0.90,
    budget: float | None = None,
    hold_out: Sequence[str] = (),
) -> IsoflopTableFit:
    """Fit every budget's optimum, and the law of the optima, to columns budget, x, loss (and arm, seed, run).

    Where rows share a training run (`run`), the intervals of parabolas are from a bootstrap over runs.
    """
    if loss not in ("mse", "log-mse"):
        raise UsageError(
            f"loss is {loss!r}; an iso-compute parabola is least squares: choose mse (of the loss) or"
            " log-mse."
        )
    if vertex not in ("quadratic", "akima"):
        raise UsageError(f"vertex is {vertex!r}; choose quadratic or akima.")
    table.require(["budget", "x", "loss"])
    c, x, y = (table.numbers(name) for name in ("budget", "x", "loss"))
    has_arms = table.has("arm", aliases=False)
    names = np.array(table.names("arm") if has_arms else [""] * len(table))
    key = "budget and x of an arm" if has_arms else "budget and x"
    table.require_unique_rows(list(zip(names.tolist(), c.tolist(), x.tolist(), strict=True)), key)
    held = _at_or_above(c, hold_out)

    runs = np.array(table.names("run")) if table.has("run", aliases=False) else None

    def fit(rows: Mask) -> IsoflopFit:
        if runs is not None and vertex == "quadratic" and len(np.unique(runs[rows])) < int(rows.sum()):
            return fit_isoflop_runs(
                c[rows], x[rows], y[rows], cast(list[str], runs[rows].tolist()),
                log_loss=loss == "log-mse", nearest=nearest, confidence=confidence,
            )  # fmt: skip
        return fit_isoflop(
            c[rows], x[rows], y[rows],
            log_loss=loss == "log-mse", method=vertex, nearest=nearest, confidence=confidence,
        )  # fmt: skip

    arms: dict[str, ArmSweeps] = {}
    for arm in cast(list[str], list(dict.fromkeys(names.tolist()))):
        used, out = (names == arm) & ~held, (names == arm) & held
        if not used.any():
            raise UsageError(
                f"every budget{f' of {arm!r}' if arm else ''} is held out; nothing is left to fit."
            )
        found = fit(used)
        at_budget, scored = None, list[OptimumForecast]()
        if (law := found.law) is not None:
            if budget is not None:
                at_budget = OptimumForecast(budget, law.predict(budget), law.interval_at(budget))
            if out.any():
                scored = [
                    OptimumForecast(v.budget, law.predict(v.budget), law.interval_at(v.budget), v.x)
                    for v in fit(out).vertices
                ]
        arms[arm] = ArmSweeps(found, (c[used], x[used], y[used]), at_budget, tuple(scored))
    return IsoflopTableFit(arms, has_arms)


def _at_or_above(values: Array, hold_out: Sequence[str]) -> Mask:
    """Rows of a table without arms that the hold-outs name."""
    held = np.zeros(len(values), bool)
    for text in hold_out:
        held |= values >= parse_flops(text, text) * (1 - 1e-9)
    return held
