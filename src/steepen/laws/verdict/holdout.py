"""Hold runs out of a fit by compute, by arm or by table, and score them against the forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from steepen.errors import UsageError
from steepen.laws.distributions import Interval
from steepen.laws.fits.compute_law import ComputeFit
from steepen.laws.fits.joint_method import fit_joint
from steepen.laws.fits.solver import Array
from steepen.laws.ladder import MERGE_TOLERANCE, Ladder, join_ladders, read_ladders
from steepen.laws.table import Table
from steepen.laws.table_selection import HoldOut, held_out, parse_hold_outs
from steepen.laws.verdict.evidence import Verdict

MIN_RUNGS_OF_OWN_LAW = 5  # two more than its parameters


@dataclass(frozen=True)
class HeldOutLoss:
    """A held-out rung and its forecast; `error` is observed minus forecast, so negative is better.

    `error_in_sigma` is the error in standard deviations of one such run, `error_in_standard_errors` in
    standard errors of the forecast (law and run together), to which `p_value` belongs. `compute_factor` is
    the compute the law needs for the observed loss over the compute spent (above 1: better than forecast).
    `own_law`: the forecast is by the arm's own E, A and γ, because the data reject one E for all arms.
    """

    arm: str
    flops: float
    observed: float
    forecast: float
    interval: Interval
    error: float
    error_in_sigma: float
    error_in_standard_errors: float
    p_value: float
    compute_factor: float
    decades_beyond: float
    forecast_by_hypothesis: dict[str, float]
    own_law: bool = False


def hold_out_rungs(table: Table, hold_out: Sequence[str]) -> tuple[dict[str, Ladder], dict[str, Ladder]]:
    """Ladders of a table (to fit, to score) by the union of hold-outs (`parse_hold_outs`)."""
    ladders = read_ladders(table)
    hold_outs = parse_hold_outs(hold_out, list(ladders), table)
    ladders, held = split_hold_outs(ladders, hold_outs)
    for one in hold_outs:
        if one.table is None:
            continue
        for name, ladder in read_ladders(one.table, typical=table).items():
            # A run that is also in the fitted table would be scored against itself.
            if name in ladders:
                ladders[name] = exclude_rungs(ladders[name], ladder)
            held[name] = join_ladders(exclude_rungs(held[name], ladder), ladder) if name in held else ladder
    return {name: ladder for name, ladder in ladders.items() if len(ladder.flops)}, held


def split_hold_outs(
    ladders: dict[str, Ladder], hold_outs: Sequence[HoldOut]
) -> tuple[dict[str, Ladder], dict[str, Ladder]]:
    """Split ladders into rungs to fit and rungs that the hold-outs select."""
    masks = held_out(hold_outs, {name: ladder.flops for name, ladder in ladders.items()})
    fitted = {name: ladder.keep(~masks[name]) for name, ladder in ladders.items() if not masks[name].all()}
    return fitted, {name: ladder.keep(masks[name]) for name, ladder in ladders.items() if masks[name].any()}


def exclude_rungs(ladder: Ladder, other: Ladder | None) -> Ladder:
    """The ladder without the rungs that `other` also has: its runs would be seeds of them."""
    if other is None:
        return ladder
    nearest_rung = np.abs(np.log(ladder.flops[:, None] / other.flops)).min(axis=1)
    return ladder.keep(nearest_rung > math.log1p(MERGE_TOLERANCE))


def own_law(shared: ComputeFit, ladder: Ladder) -> ComputeFit:
    """The arm's own E, A and γ, for forecasts where the data reject one E for all arms.

    The shared fit itself where the ladder is too short to say how large its noise is.
    """
    if len(ladder.flops) < MIN_RUNGS_OF_OWN_LAW:
        return shared
    return fit_joint({ladder.arm: ladder}, replace(shared.settings, reference=ladder.arm, c0=shared.c0))


def score_hold_outs(
    shared: ComputeFit,
    held: dict[str, Ladder],
    verdicts: dict[str, Verdict] | None = None,
    ladders: dict[str, Ladder] | None = None,
    weights: dict[str, Array] | None = None,
) -> tuple[HeldOutLoss, ...]:
    """Compare every held-out rung with its arm's law and, given verdicts, with both hypotheses.

    With the fitted `ladders` the law is the arm's own (`own_law`), else that of the `shared` fit. `weights`
    are the precisions of the held-out rungs (`held_out_weights`), by default those of their ladders.
    """
    found: list[HeldOutLoss] = []
    for arm, ladder in held.items():
        if arm not in shared.arms:
            raise UsageError(
                f"{ladder.row_labels[0]}: arm '{arm}' is held out but not fitted; give it rungs in the table."
            )
        fit = own_law(shared, ladders[arm]) if ladders else shared
        df = fit.degrees_of_freedom if math.isfinite(fit.degrees_of_freedom) else 1e9
        law = fit.arms[arm]
        precisions = weights[arm] if weights else ladder.weights
        runs_own_noise = fit.sigma * np.sqrt(ladder.seeds / ladder.weights)
        for flops, observed, weight, sigma in zip(
            ladder.flops, ladder.loss, precisions, runs_own_noise, strict=True
        ):
            x = math.log(flops / fit.c0)
            forecast, standard_error = forecast_loss(fit, arm, float(flops), float(weight))
            half_width = fit.quantile * standard_error
            error = float(observed) - forecast
            t = error / max(standard_error, 1e-300)
            found.append(
                HeldOutLoss(
                    arm=arm,
                    flops=float(flops),
                    observed=float(observed),
                    forecast=forecast,
                    interval=(forecast - half_width, forecast + half_width),
                    error=error,
                    error_in_sigma=error / max(float(sigma), 1e-300),
                    error_in_standard_errors=t,
                    p_value=float(2 * stats.t.sf(abs(t), max(df, 1e-9))),
                    compute_factor=float(law.compute_for(float(observed))) / float(flops),
                    decades_beyond=math.log10(flops / law.flops_range[1]),
                    forecast_by_hypothesis=_by_hypothesis((verdicts or {}).get(arm), x),
                    own_law=fit is not shared,
                )
            )
    return tuple(found)


def forecast_loss(fit: ComputeFit, arm: str, flops: float, weight: float = 1.0) -> tuple[float, float]:
    """The law's loss at `flops` and the standard error of a run there (of the mean of `weight` runs)."""
    names = list(fit.arms)
    a, g = 1 + names.index(arm), 1 + len(names) + names.index(arm)
    forecast = float(fit.arms[arm].predict(flops))
    reducible = forecast - fit.theta[0]
    gradient = np.zeros(len(fit.theta))
    gradient[0], gradient[a], gradient[g] = 1.0, reducible, -math.log(flops / fit.c0) * reducible
    law_variance = max(float(gradient @ fit.covariance @ gradient), 0.0)
    return forecast, math.sqrt(law_variance + fit.sigma**2 / weight)


def _by_hypothesis(verdict: Verdict | None, x: float) -> dict[str, float]:
    """Forecast of the arm's loss at log(C/C0) = x by each tenable hypothesis; empty without a verdict."""
    if verdict is None:
        return {}
    fits = {name: verdict.hypotheses[name] for name in verdict.tenable}
    return {name: float(f.e[1] + np.exp(f.log_a[1] - f.gamma[1] * x)) for name, f in fits.items()}
