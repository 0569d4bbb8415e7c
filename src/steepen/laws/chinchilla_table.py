"""Fit the Chinchilla law to a table of runs, arm by arm, and score the runs that are held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from steepen.errors import UsageError, nearest
from steepen.laws.distributions import Interval, t_quantile
from steepen.laws.fits.chinchilla import ChinchillaFit, ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.solver import Array, Mask
from steepen.laws.read_table import read_table
from steepen.laws.table import Table
from steepen.laws.table_selection import parse_flops


@dataclass(frozen=True)
class ComputeOptimum:
    """The split of `flops` into parameters and tokens with the lowest predicted loss."""

    flops: float
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class HeldOutChinchillaLoss:
    """A row held out of the Chinchilla fit; `error` is observed minus forecast.

    `interval` covers a run's loss: the law's own error and the noise of a run. `error_in_sigma` is the error
    in residual standard deviations, `error_in_standard_errors` in standard errors of the forecast.
    """

    row: int
    parameters: float
    tokens: float
    observed: float
    forecast: float
    interval: Interval
    error: float
    error_in_sigma: float
    error_in_standard_errors: float


@dataclass(frozen=True, eq=False)
class ArmChinchilla:
    """The law of one arm, its optimum at a budget, the forecasts of held-out rows, and the rows fitted."""

    fit: ChinchillaFit
    optimum: ComputeOptimum | None
    hold_out: tuple[HeldOutChinchillaLoss, ...]
    parameters: Array
    tokens: Array
    loss: Array
    row_unit: str

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        optimum = {} if self.optimum is None else {"optimum": asdict(self.optimum)}
        return {**self.fit.to_dict(), "hold_out": [asdict(run) for run in self.hold_out], **optimum}

    def summary(self) -> str:
        """The law, the optimum and the hold-outs, one per line."""
        lines = [self.fit.summary()]
        if (best := self.optimum) is not None:
            split = f"N* = {best.parameters:.4g}, D* = {best.tokens:.4g}"
            lines.append(f"at {best.flops:.3g} FLOPs: {split}, loss {best.loss:.4f}")
        lines += [
            f"held out {self.row_unit} {run.row}: {run.observed:.4f} against {run.forecast:.4f}"
            f" ({run.interval[0]:.4f} to {run.interval[1]:.4f}), error {run.error:+.4f}"
            f" ({run.error_in_sigma:+.1f}σ of a run, {run.error_in_standard_errors:+.1f} standard errors of"
            " the forecast)"
            for run in self.hold_out
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class LawComparison:
    """An arm's law against the reference's: differences with intervals, and the multiplier at the optimum.

    `delta_compute_exponent` compares the exponents of loss along the compute-optimal splits, with its
    two-sided p-value. `multiplier` is how many times less compute the arm needs for the reference's
    compute-optimal loss at `flops`; NaN where it never reaches it.
    """

    delta_e: float
    delta_e_interval: Interval
    delta_compute_exponent: float
    delta_compute_exponent_interval: Interval
    p_compute_exponent: float
    flops: float
    multiplier: float


@dataclass(frozen=True, eq=False)
class ChinchillaTableFit:
    """Chinchilla laws of every arm of a table; one law, under "", if there is no arm column."""

    arms: dict[str, ArmChinchilla]
    reference: str | None
    comparisons: dict[str, LawComparison]

    @property
    def first(self) -> ArmChinchilla:
        """The reference's law, or the first arm's."""
        return self.arms[self.reference] if self.reference else next(iter(self.arms.values()))

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON: the only arm's law at the top, every arm's in `arms`."""
        if "" in self.arms:
            return self.first.to_dict()
        only = self.first.to_dict() if len(self.arms) == 1 else {"law": "chinchilla"}
        return {
            **only,
            "reference": self.reference,
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "comparisons": {name: asdict(one) for name, one in self.comparisons.items()},
        }

    def summary(self) -> str:
        """The laws, each under its arm, and the comparisons."""
        parts = [(f"{name}\n" if name else "") + arm.summary() for name, arm in self.arms.items()]
        for name, c in self.comparisons.items():
            (low, high), (e_low, e_high) = c.delta_compute_exponent_interval, c.delta_e_interval
            gain = (
                "it never reaches the reference's compute-optimal loss"
                if math.isnan(c.multiplier)
                else f"{c.multiplier:.2f}× less compute"
            )
            parts.append(
                f"{name} against {self.reference}: compute exponent {c.delta_compute_exponent:+.4f}"
                f" ({low:+.4f} to {high:+.4f}; p = {c.p_compute_exponent:.2g}), ΔE {c.delta_e:+.4f}"
                f" ({e_low:+.4f} to {e_high:+.4f}); at {c.flops:.3g} FLOPs {gain}"
            )
        return "\n".join(parts)


def fit_chinchilla_table(
    table: Table,
    settings: ChinchillaSettings | None = None,
    *,
    reference: str | None = None,
    budget: float | None = None,
    hold_out: Sequence[str] = (),
) -> ChinchillaTableFit:
    """Fit L(N, D) = E + A/N^α + B/D^β to columns parameters, tokens, loss (and arm, run, seed, flops).

    Every arm has its own law. Hold-outs are FLOPS, ARM:FLOPS or a table's path; FLOPs are the table's, or
    6·N·D. Rows with the same `run` (checkpoints of one training run) are one observation for intervals.
    """
    settings = settings or ChinchillaSettings()
    rows = _Rows.read(table, with_arms=reference is not None)
    arms = list(dict.fromkeys(rows.arm))
    if reference is not None and reference not in arms:
        raise UsageError(
            f"the reference '{reference}' is not among the arms; did you mean {nearest(reference, arms)}?"
        )
    held, further = _hold_out(table, rows, arms, hold_out)
    fits: dict[str, ArmChinchilla] = {}
    for arm in arms:
        own = np.array([name == arm for name in rows.arm])
        used = np.flatnonzero(own & ~held)
        if not len(used):
            raise UsageError(
                f"every run{f' of {arm!r}' if arm else ''} is held out, so none is left to fit; hold out from"
                " a higher compute."
            )
        names = None if rows.run is None else [rows.run[i] for i in used]
        try:
            fit = fit_chinchilla(rows.n[used], rows.d[used], rows.y[used], settings, runs=names)
        except UsageError as error:
            raise UsageError(f"arm '{arm}': {error}" if arm else str(error)) from None
        scored = [_score(fit, rows, int(i)) for i in np.flatnonzero(own & held)]
        for other in further:
            scored += [_score(fit, other, i) for i, name in enumerate(other.arm) if name == arm]
        optimum = None if budget is None else ComputeOptimum(budget, *fit.optimum(budget))
        fits[arm] = ArmChinchilla(
            fit, optimum, tuple(scored), rows.n[used], rows.d[used], rows.y[used], table.row_word
        )
    comparisons: dict[str, LawComparison] = {}
    if reference is not None:
        base = fits[reference]
        at = budget or float((6 * base.parameters * base.tokens).max())
        comparisons = {
            name: _compare(base.fit, arm.fit, at) for name, arm in fits.items() if name != reference
        }
    return ChinchillaTableFit(fits, reference, comparisons)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The columns of a table for this law."""

    lines: tuple[int, ...]
    arm: list[str]
    n: Array
    d: Array
    y: Array
    flops: Array
    run: list[str] | None

    @classmethod
    def read(cls, table: Table, *, with_arms: bool) -> _Rows:
        table.require(["parameters", "tokens", "loss"])
        has_arms = table.has("arm", aliases=with_arms)
        if with_arms and not has_arms:
            table.require(["arm", "parameters", "tokens", "loss"])
        arm = table.names("arm") if has_arms else [""] * len(table)
        n, d, y = (table.numbers(name) for name in ("parameters", "tokens", "loss"))
        run = table.names("run") if table.has("run") else None
        if run is None:
            key = "parameters and tokens of an arm" if has_arms else "parameters and tokens"
            table.require_unique_rows(list(zip(arm, n.tolist(), d.tolist(), strict=True)), key)
        flops = table.numbers("flops") if table.has("flops") else 6 * n * d
        return cls(table.lines, arm, n, d, y, flops, run)


def _hold_out(
    table: Table, rows: _Rows, arms: Sequence[str], hold_out: Sequence[str]
) -> tuple[Mask, list[_Rows]]:
    """Rows to hold out, and further rows to score from other tables."""
    held, further = np.zeros(len(rows.y), bool), list[_Rows]()
    if list(hold_out) == ["none"]:
        return held, further
    for text in hold_out:
        if Path(text).is_file():
            other = _Rows.read(read_table(text).rename_like(table), with_arms=arms != [""])
            # A run that is also in the fitted table would be scored against itself.
            keys = set(zip(other.arm, other.n.tolist(), other.d.tolist(), strict=True))
            held |= [key in keys for key in zip(rows.arm, rows.n.tolist(), rows.d.tolist(), strict=True)]
            known = set(zip(rows.arm, rows.n.tolist(), rows.d.tolist(), strict=True))
            new = [
                i
                for i, key in enumerate(zip(other.arm, other.n.tolist(), other.d.tolist(), strict=True))
                if key not in known
            ]
            further.append(
                _Rows(
                    tuple(other.lines[i] for i in new), [other.arm[i] for i in new], other.n[new],
                    other.d[new], other.y[new], other.flops[new], None,
                )
            )  # fmt: skip
            unknown = sorted(set(further[-1].arm) - set(arms))
            if unknown:
                raise UsageError(f"--hold-out {text}: arm '{unknown[0]}' is held out but not fitted.")
            continue
        arm, colon, flops = text.rpartition(":")
        if colon and arm not in arms:
            known_arms = "the table has no arm column" if arms == [""] else f"arms are {nearest(arm, arms)}"
            raise UsageError(f"--hold-out {text}: there is no arm '{arm}'; {known_arms}.")
        chosen = rows.flops >= parse_flops(flops, text) * (1 - 1e-9)
        if colon:
            chosen &= np.array([name == arm for name in rows.arm])
        held |= chosen
    return held, further


def _score(fit: ChinchillaFit, rows: _Rows, i: int) -> HeldOutChinchillaLoss:
    n, d, observed = float(rows.n[i]), float(rows.d[i]), float(rows.y[i])
    forecast = float(fit.predict(n, d))
    interval, standard_error = fit.forecast_interval(n, d)
    error = observed - forecast
    return HeldOutChinchillaLoss(
        row=rows.lines[i], parameters=n, tokens=d, observed=observed, forecast=forecast, interval=interval,
        error=error, error_in_sigma=error / max(fit.residual_sd, 1e-300),
        error_in_standard_errors=error / max(standard_error, 1e-300),
    )  # fmt: skip


def _compare(reference: ChinchillaFit, arm: ChinchillaFit, flops: float) -> LawComparison:
    """Differences of two independent fits (degrees of freedom by Satterthwaite)."""

    def difference(values: tuple[float, float], errors: tuple[float, float]) -> tuple[float, Interval, float]:
        delta, error = values[1] - values[0], math.hypot(*errors)
        parts = errors[0] ** 4 / reference.degrees_of_freedom + errors[1] ** 4 / arm.degrees_of_freedom
        df = max(error**4 / max(parts, 1e-300), 1.0)
        reach = error * float(t_quantile((1 + arm.settings.confidence) / 2, np.array(df)))
        p = float(2 * stats.t.sf(abs(delta) / max(error, 1e-300), df))
        return delta, (delta - reach, delta + reach), p

    e = difference(
        (reference.e, arm.e),
        (math.sqrt(max(reference.covariance[0][0], 0.0)), math.sqrt(max(arm.covariance[0][0], 0.0))),
    )
    gamma = difference(
        (reference.compute_exponent, arm.compute_exponent),
        (reference.compute_exponent_error, arm.compute_exponent_error),
    )
    # Along the optimum L = E + K·C^−γ, and K follows from the loss at any compute.
    target, k = reference.optimum(flops)[2], (arm.optimum(1.0)[2] - arm.e)
    reducible = target - arm.e
    needed = (k / reducible) ** (1 / arm.compute_exponent) if reducible > 0 else math.inf
    multiplier = flops / needed if math.isfinite(needed) else math.nan
    return LawComparison(e[0], e[1], gamma[0], gamma[1], gamma[2], flops, multiplier)
