"""What a reader must know before trusting a table of laws: whether the laws fit, whether arms share a floor,
which rows stand out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from steepen.laws.distributions import ROUNDING_ERROR, f_p_value
from steepen.laws.fits.compute_law import ComputeFit
from steepen.laws.fits.solver import (
    Array,
    Design,
    best_of,
    jacobian,
    one_hot,
    solve,
    solve_multistart,
    unscaled_covariance,
)
from steepen.laws.ladder import Ladder

# Beyond this a residual's t-value says no more than "not noise"; its digits would be the table's rounding.
MAX_T_SHOWN = 20.0


def lack_of_fit(ladders: dict[str, Ladder], fit: ComputeFit) -> float | None:
    """p-value that rungs scatter about their laws no more than their seeds do; None where no rung has two
    seeds. The laws have one floor between them, and a constant and an exponent each.

    They are those with the least squares of the losses, whichever way `fit` was made: only about these does
    the scatter have the distribution the test supposes. About the paper's, which take E from one arm alone,
    it is larger though the law is right.
    """
    within = sum(
        float(((runs - runs.mean()) ** 2).sum()) for ladder in ladders.values() for runs in ladder.runs
    )
    inner = sum(len(runs) - 1 for ladder in ladders.values() for runs in ladder.runs)
    freedom = sum(len(ladder.flops) for ladder in ladders.values()) - 1 - 2 * len(ladders)
    if inner == 0 or within <= 0 or freedom <= 0:
        return None
    between, _ = _fit_shared(ladders, fit, list(ladders), log=False)
    return float(stats.f.sf((between / freedom) / (within / inner), freedom, inner))


@dataclass(frozen=True, eq=False)
class SharedIrreducibleLoss:
    """F-tests of one floor for all arms against a floor for each; the variance is that of the free laws.

    `p` is for all arms at once (None without the points for it), `by_arm` for each arm sharing the
    reference's floor. `theta` holds the free laws: every arm's floor, then log constants, then exponents.
    """

    p: float | None
    by_arm: dict[str, float]
    theta: Array


def shared_irreducible_loss(ladders: dict[str, Ladder], fit: ComputeFit) -> SharedIrreducibleLoss:
    """Test whether the arms can share one E."""
    settings = fit.settings

    def fitted(names: list[str]) -> tuple[float, Array]:
        return _fit_shared(ladders, fit, names, log=settings.log)

    alone = {name: fitted([name]) for name in ladders}
    theta = np.stack([alone[name][1] for name in ladders]).T.ravel()
    points = sum(len(ladder.flops) for ladder in ladders.values())
    freedom = points - 3.0 * len(ladders)
    free = sum(rss for rss, _ in alone.values())
    if len(ladders) < 2 or (freedom < 1 and not settings.noise):
        return SharedIrreducibleLoss(None, {}, theta)
    mean = float(np.concatenate([ladder.loss for ladder in ladders.values()]).mean())
    if settings.noise:
        variance = (settings.noise / (mean if settings.log else 1.0)) ** 2
    else:
        variance = max(free / freedom, (ROUNDING_ERROR * (1.0 if settings.log else mean)) ** 2)
    below = np.array(math.inf if settings.noise else freedom)

    def p_value(names: list[str]) -> float:
        extra = len(names) - 1.0
        worse = fitted(names)[0] - sum(alone[name][0] for name in names)
        return float(f_p_value(np.array(worse / extra / variance), extra, below))

    reference = settings.reference
    by_arm = {name: p_value([reference, name]) for name in ladders if name != reference}
    together = next(iter(by_arm.values())) if len(by_arm) == 1 else p_value(list(ladders))
    return SharedIrreducibleLoss(together, by_arm, theta)


def collect_warnings(
    ladders: dict[str, Ladder],
    fit: ComputeFit,
    p_lack: float | None,
    floors: SharedIrreducibleLoss,
    level: float,
) -> tuple[str, ...]:
    """Everything about the table and its fit that a reader should be told."""
    found = [
        f"the fit rests on a limit ({what}), so its intervals are one-sided there" for what in fit.at_bound
    ]
    apart = floors.p is not None and floors.p < level
    if apart:
        blamed = [name for name, p in floors.by_arm.items() if p < level]
        blamed = blamed or [min(floors.by_arm, key=lambda name: floors.by_arm[name])]
        each = "; ".join(f"{name}, p = {floors.by_arm[name]:.2g}" for name in blamed)
        off = (
            "E and γ of the joint table are off for all of them"
            if fit.settings.method == "joint"
            else "γ of every arm but the reference is off"
        )
        found.append(
            f"the arms do not share one floor ({each}): {off}; read the verdicts, which compare each arm with"
            " the reference alone"
        )
    if p_lack is not None and p_lack < 0.01:
        found.append(
            f"rungs scatter about their laws more than their seeds do (p = {p_lack:.2g}): the law or the"
            " recipe is off, not the seeds"
        )
    for name, ladder in ladders.items():
        rise = np.flatnonzero(np.diff(ladder.loss) > 0)
        found += [f"{ladder.places[i + 1]}: the loss of '{ladder.arm}' rises with compute here" for i in rise]
        floor = fit.arms[name].e.value
        found += [
            f"{ladder.places[i]}: the loss {ladder.loss[i]:.4f} is not above the fitted floor E ="
            f" {floor:.4f}; the law cannot hold there"
            for i in np.flatnonzero(ladder.loss <= floor)
        ]
    # Where floors differ every row of some arm is off the shared law, so rows are judged by the free laws.
    return tuple(found + _outliers(ladders, fit, floors.theta if apart else None))


def _fit_shared(
    ladders: dict[str, Ladder], fit: ComputeFit, names: list[str], *, log: bool
) -> tuple[float, Array]:
    """The least sum of squares of some arms with one floor among them, and its law; the fit at hand is one of
    the starts.
    """
    x, y, weights, group = _stacked({name: ladders[name] for name in names}, fit.c0)
    design = _design(group, len(names), shared=True)
    rows = [list(fit.arms).index(name) for name in names]
    start = fit.theta[[0, *(1 + i for i in rows), *(1 + len(fit.arms) + i for i in rows)]]
    found = best_of(
        solve(design, x, y[None], start[None], weights=weights[None], log=log, iterations=400),
        solve_multistart(design, x, y, fractions=(0.3, 0.8, 0.95), weights=weights, log=log),
    )
    return float(found.objective[0]), found.theta[0]


def _stacked(ladders: dict[str, Ladder], c0: float) -> tuple[Array, Array, Array, np.ndarray]:
    """x, loss, seeds and the number of the ladder of every rung."""
    parts = list(ladders.values())
    return (
        np.log(np.concatenate([ladder.flops for ladder in parts]) / c0),
        np.concatenate([ladder.loss for ladder in parts]),
        np.concatenate([ladder.seeds for ladder in parts]),
        np.concatenate([np.full(len(ladder.flops), i) for i, ladder in enumerate(parts)]),
    )


def _design(group: np.ndarray, count: int, *, shared: bool) -> Design:
    own = one_hot(group, count)
    return Design(np.ones((len(group), 1)) if shared else own, own, own)


def _outliers(ladders: dict[str, Ladder], fit: ComputeFit, free: Array | None) -> list[str]:
    """Rungs whose residual, judged by the other rungs, is beyond chance (1% over the whole table)."""
    x, y, w, group = _stacked(ladders, fit.c0)
    design = _design(group, len(ladders), shared=free is None)
    theta = fit.theta if free is None else free
    freedom = len(x) - design.n_parameters - 1
    if freedom < 2:
        return []
    residual = (y - design.predict(theta, x)) * np.sqrt(w)
    j = jacobian(design, x, theta[None])[0] * np.sqrt(w)[:, None]
    inverse = unscaled_covariance(design, x, theta, weights=w)[0]
    left = np.maximum(1 - np.einsum("ni,ij,nj->n", j, inverse, j), 1e-6)
    rest = np.maximum((residual @ residual - residual**2 / left) / freedom, (1e-9 * y.mean()) ** 2)
    t = residual / np.sqrt(rest * left)
    p = 2 * stats.t.sf(np.abs(t), freedom) * len(x)
    places = [place for ladder in ladders.values() for place in ladder.places]
    return [
        f"{places[i]}: the loss is {residual[i] / np.sqrt(w[i]):+.4f} off its law ({_errors(float(t[i]))});"
        " check that run"
        for i in np.flatnonzero(p < 0.01)
    ]


def _errors(t: float) -> str:
    if abs(t) > MAX_T_SHOWN:
        return f"more than {MAX_T_SHOWN:.0f} standard errors"
    return f"{t:+.1f} standard errors"
