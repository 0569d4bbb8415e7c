"""Runs kept out of every fit, scored against the forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from steepen.errors import UsageError, nearest
from steepen.laws.distributions import Interval
from steepen.laws.fits.compute_law import ComputeFit
from steepen.laws.ladder import Ladder


@dataclass(frozen=True)
class HoldOut:
    """A held-out rung: negative misses are better than forecast.

    `miss_sigma` counts standard deviations of one run, `miss_errors` those of the forecast itself (law and
    run together), `p_value` is for the latter. `compute_factor` is the compute the law needs for the
    observed loss over the compute that was spent (above 1: better than forecast).
    """

    arm: str
    flops: float
    observed: float
    forecast: float
    interval: Interval
    miss: float
    miss_sigma: float
    miss_standard_errors: float
    p_value: float
    compute_factor: float
    decades_beyond: float
    forecast_by_hypothesis: dict[str, float]


def split_hold_out(
    ladders: dict[str, Ladder], at_least: float, arm: str | None = None
) -> tuple[dict[str, Ladder], dict[str, Ladder]]:
    """Ladders without, and with only, the rungs at or above a compute (of one arm, or of all)."""
    if arm is not None and arm not in ladders:
        raise UsageError(f"hold-out arm '{arm}' is not in the table; did you mean {nearest(arm, ladders)}?")
    kept: dict[str, Ladder] = {}
    out: dict[str, Ladder] = {}
    for name, ladder in ladders.items():
        away = (ladder.flops >= at_least) & (arm is None or arm == name)
        if not away.all():
            kept[name] = ladder.keep(~away)
        if away.any():
            out[name] = ladder.keep(away)
    if not out:
        raise UsageError(
            f"no rung{'' if arm is None else f' of {arm!r}'} has {at_least:g} FLOPs or more to hold out."
        )
    if not kept:
        raise UsageError(
            f"every run has {at_least:g} FLOPs or more, so all are held out and none is left to fit; hold out"
            " from a higher compute."
        )
    return kept, out


def exclude_rungs(ladder: Ladder, other: Ladder | None) -> Ladder:
    """A ladder less the rungs that another ladder of the arm also has."""
    if other is None:
        return ladder
    return ladder.keep(~np.isin(ladder.flops, other.flops))


def score_hold_outs(fit: ComputeFit, held: dict[str, Ladder]) -> list[HoldOut]:
    """Score every held-out rung against its arm's law."""
    names = list(fit.arms)
    theta = fit.theta
    found: list[HoldOut] = []
    for arm, ladder in held.items():
        if arm not in fit.arms:
            raise UsageError(
                f"{ladder.places[0]}: arm '{arm}' is held out but not fitted; it needs rungs in the table."
            )
        law = fit.arms[arm]
        a, g = 1 + names.index(arm), 1 + len(names) + names.index(arm)
        for flops, observed, count in zip(ladder.flops, ladder.loss, ladder.seeds, strict=True):
            x = math.log(flops / fit.c0)
            forecast = float(law.predict(flops))
            reducible = forecast - theta[0]
            slope = np.zeros(len(theta))
            slope[0], slope[a], slope[g] = 1.0, reducible, -x * reducible
            error = math.sqrt(max(float(slope @ fit.covariance @ slope), 0.0) + fit.sigma**2 / count)
            miss = float(observed) - forecast
            t = miss / max(error, 1e-300)
            freedom = fit.degrees_of_freedom if math.isfinite(fit.degrees_of_freedom) else 1e9
            found.append(
                HoldOut(
                    arm=arm, flops=float(flops), observed=float(observed), forecast=forecast,
                    interval=(forecast - fit.quantile * error, forecast + fit.quantile * error), miss=miss,
                    miss_sigma=miss / max(fit.sigma, 1e-300), miss_standard_errors=t,
                    p_value=float(2 * stats.t.sf(abs(t), max(freedom, 1e-9))),
                    compute_factor=float(law.compute_for(float(observed))) / float(flops),
                    decades_beyond=math.log10(flops / law.flops_range[1]), forecast_by_hypothesis={},
                )
            )  # fmt: skip
    return found
