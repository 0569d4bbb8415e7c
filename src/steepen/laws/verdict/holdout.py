"""Hold runs out of a fit by compute, by arm or by table, and score them against the forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import Interval, t_p_value
from steepen.laws.fits.compute_law import ComputeFit
from steepen.laws.ladder import MERGE_TOLERANCE, Ladder, join_ladders, read_ladders
from steepen.laws.verdict.judge import TableJudge
from steepen.tables.table import Table
from steepen.tables.table_selection import HoldOut, held_out, parse_hold_outs


@dataclass(frozen=True)
class HeldOutLoss:
    """A held-out rung and its forecast; `error` is observed minus forecast, so negative is better.

    `error_in_sigma` is the error in standard deviations of one such run, `error_in_standard_errors` in
    standard errors of the forecast (law and run together), to which `p_value` belongs. `compute_factor` is
    the compute the law needs for the observed loss over the compute spent (above 1: better than forecast).
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


def hold_out_rungs(table: Table, hold_out: Sequence[str]) -> tuple[dict[str, Ladder], dict[str, Ladder]]:
    """Ladders of a table (to fit, to score) by the union of hold-outs (`parse_hold_outs`)."""
    ladders = read_ladders(table)
    hold_outs = parse_hold_outs(hold_out, list(ladders), table)
    ladders, held = split_hold_outs(ladders, hold_outs)
    for table_of_runs in (one.table for one in hold_outs if one.table is not None):
        for name, ladder in read_ladders(table_of_runs, typical=table).items():
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


def exclude_rungs(ladder: Ladder, other: Ladder) -> Ladder:
    """The ladder without the rungs that `other` also has: its runs would be seeds of them."""
    nearest_rung = np.abs(np.log(ladder.flops[:, None] / other.flops)).min(axis=1)
    return ladder.keep(nearest_rung > math.log1p(MERGE_TOLERANCE))


def score_hold_outs(fit: ComputeFit, held: dict[str, Ladder], judge: TableJudge) -> tuple[HeldOutLoss, ...]:
    """Compare every held-out rung with its arm's law; the noise of its runs is the model's."""
    found: list[HeldOutLoss] = []
    df = fit.degrees_of_freedom if math.isfinite(fit.degrees_of_freedom) else 1e9
    for arm, ladder in held.items():
        if arm not in fit.arms:
            raise UsageError(
                f"{ladder.row_labels[0]}: arm '{arm}' is held out but not fitted; give it rungs in the table."
            )
        law = fit.arms[arm]
        for flops, observed, seeds, known in zip(
            ladder.flops, ladder.loss, ladder.seeds, ladder.known, strict=True
        ):
            variance, one_run = (judge.run_variance(float(flops), count) for count in (float(seeds), 1.0))
            if known > 0:  # the table states the noise of the run
                variance, one_run = judge.tau**2 + float(known), judge.tau**2 + float(known * seeds)
            forecast, standard_error = forecast_loss(fit, judge, arm, float(flops), variance)
            half_width = fit.quantile * standard_error
            error = float(observed) - forecast
            found.append(
                HeldOutLoss(
                    arm=arm, flops=float(flops), observed=float(observed), forecast=forecast,
                    interval=(forecast - half_width, forecast + half_width), error=error,
                    error_in_sigma=error / max(math.sqrt(one_run), 1e-300),
                    error_in_standard_errors=error / max(standard_error, 1e-300),
                    p_value=t_p_value(error, standard_error, max(df, 1e-9)),
                    compute_factor=float(law.compute_for(float(observed))) / float(flops),
                    decades_beyond=math.log10(flops / law.flops_range[1]),
                )
            )  # fmt: skip
    return tuple(found)


def forecast_loss(
    fit: ComputeFit, judge: TableJudge, arm: str, flops: float, run_variance: float
) -> tuple[float, float]:
    """The law's loss at `flops`, and the standard error of runs there whose mean has a variance."""
    law = fit.arms[arm]
    forecast = float(law.predict(flops))
    reducible = forecast - law.e.value
    x = math.log(flops / fit.c0)
    if fit.settings.method == "joint":
        variance = judge.law_variance(arm, x, reducible)
    else:
        variance = fit.variance({arm: (reducible, -x * reducible)}, 1.0)
    return forecast, math.sqrt(variance + run_variance)
