"""Diagnostics of a compute-law fit: lack of fit, the test of a shared E, outliers, and their warnings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, stats

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
)
from steepen.laws.ladder import Ladder

# Larger t-values are not printed: their digits would only reflect the rounding of the table.
MAX_T_SHOWN = 20.0
MIN_PLAUSIBLE_FLOPS = 1e6  # a training run takes more; smaller numbers are in another unit


def lack_of_fit(ladders: dict[str, Ladder], fit: ComputeFit) -> float | None:
    """p-value of the lack-of-fit F-test of laws with one shared E; None if no rung has two seeds.

    Compares the scatter of rungs about the laws with the scatter of seeds within rungs. The laws are refitted
    by least squares whatever the method of `fit`: only then does the statistic follow the F distribution.
    About the paper's laws, which take E from one arm, it is too large even where the law is right.
    """
    within = sum(
        float(weight) * float(runs.var())  # of a run of typical noise, as about the laws
        for ladder in ladders.values()
        for weight, runs in zip(ladder.weights, ladder.runs, strict=True)
    )
    df_within = sum(len(runs) - 1 for ladder in ladders.values() for runs in ladder.runs)
    df = sum(len(ladder.flops) for ladder in ladders.values()) - 1 - 2 * len(ladders)
    if df_within == 0 or within <= 0 or df <= 0:
        return None
    between, _ = _fit_shared(ladders, fit, list(ladders), log=False)
    return float(stats.f.sf((between / df) / (within / df_within), df, df_within))


@dataclass(frozen=True, eq=False)
class SharedIrreducibleLoss:
    """F-tests of one irreducible loss E for all arms against a separate E for each.

    `p` is for all arms at once (None with too few points, or rungs that share runs), `by_arm` for each arm
    with the reference alone. `theta` holds the separate laws: every arm's E, then every log A, then every γ.
    """

    p: float | None
    by_arm: dict[str, float]
    theta: Array


def shared_irreducible_loss(ladders: dict[str, Ladder], fit: ComputeFit) -> SharedIrreducibleLoss:
    """Test whether the arms can share one E.

    Not where rungs share training runs: the F-test would take the runs' errors for differences in E.
    """
    settings = fit.settings
    share_runs = any(len(set(ladder.clusters)) < len(ladder.clusters) for ladder in ladders.values())

    def fitted(names: list[str]) -> tuple[float, Array]:
        return _fit_shared(ladders, fit, names, log=settings.fits_log_loss)

    alone = {name: fitted([name]) for name in ladders}
    theta = np.stack([alone[name][1] for name in ladders]).T.ravel()
    points = sum(len(ladder.flops) for ladder in ladders.values())
    df = points - 3.0 * len(ladders)
    free = sum(rss for rss, _ in alone.values())
    if len(ladders) < 2 or share_runs or (df < 1 and not settings.noise):
        return SharedIrreducibleLoss(None, {}, theta)
    mean = float(np.concatenate([ladder.loss for ladder in ladders.values()]).mean())
    if settings.noise:
        variance = (settings.noise / (mean if settings.fits_log_loss else 1.0)) ** 2
    else:
        variance = max(free / df, (ROUNDING_ERROR * (1.0 if settings.fits_log_loss else mean)) ** 2)
    df_denominator = np.array(math.inf if settings.noise else df)

    def p_value(names: list[str]) -> float:
        extra = len(names) - 1.0
        worse = fitted(names)[0] - sum(alone[name][0] for name in names)
        return float(f_p_value(np.array(worse / extra / variance), extra, df_denominator))

    reference = settings.reference
    by_arm = {name: p_value([reference, name]) for name in ladders if name != reference}
    together = next(iter(by_arm.values())) if len(by_arm) == 1 else p_value(list(ladders))
    return SharedIrreducibleLoss(together, by_arm, theta)


def collect_warnings(
    ladders: dict[str, Ladder],
    fit: ComputeFit,
    p_lack: float | None,
    shared: SharedIrreducibleLoss,
    level: float,
    unit: str = "FLOPs",
) -> tuple[str, ...]:
    """Warnings about the table and its fit, each a sentence; `unit` is that of the ladders' x axis."""
    found: list[str] = []
    if fit.at_bound:  # the one bound is E ≥ 0
        found.append(
            "the fitted irreducible loss E is 0, its lower bound: these runs do not show one, γ is the slope"
            " over their own range only, and intervals are one-sided there"
        )
    lowest = min(float(ladder.flops.min()) for ladder in ladders.values())
    if unit == "FLOPs" and lowest < MIN_PLAUSIBLE_FLOPS:
        found.append(
            f"the lowest compute is {lowest:.3g} FLOPs, less than any training run takes: the column is in"
            " another unit, and so is every number of FLOPs printed here; convert it (1 PF-day is 8.64e19"
            " FLOPs)"
        )
    differ = shared.p is not None and shared.p < level
    if differ:
        differing_arms = [name for name, p in shared.by_arm.items() if p < level]
        differing_arms = differing_arms or [min(shared.by_arm, key=lambda name: shared.by_arm[name])]
        each = "; ".join(f"{name}, p = {shared.by_arm[name]:.2g}" for name in differing_arms)
        consequence = (
            "E and γ of the joint table are biased for all of them"
            if fit.settings.method == "joint"
            else "γ of every arm but the reference is biased"
        )
        found.append(
            f"the arms do not share one irreducible loss E ({each}): {consequence}; read the verdicts, which"
            " compare each arm with the reference alone"
        )
    if p_lack is not None and p_lack < 0.01:
        found.append(
            f"rungs scatter about their laws more than their seeds do (p = {p_lack:.2g}): the law does"
            " not fit or the recipe is mistuned; more seeds will not help"
        )
    for name, ladder in ladders.items():
        rise = np.flatnonzero(np.diff(ladder.loss) > 0)
        found += [
            f"{ladder.row_labels[i + 1]}: the loss of '{ladder.arm}' rises with compute here" for i in rise
        ]
        e = fit.arms[name].e.value
        found += [
            f"{ladder.row_labels[i]}: the loss {ladder.loss[i]:.4f} is not above the fitted E ="
            f" {e:.4f}; the law cannot hold there"
            for i in np.flatnonzero(ladder.loss <= e)
        ]
    # If E differs between arms, all rows of some arm are off the shared law: use each arm's own law.
    return tuple(found + _outliers(ladders, fit, shared.theta if differ else None))


def _fit_shared(
    ladders: dict[str, Ladder], fit: ComputeFit, names: list[str], *, log: bool
) -> tuple[float, Array]:
    """RSS and θ of the least-squares fit of these arms with one shared E; `fit` is one starting point."""
    x, y, weights, group = _stacked({name: ladders[name] for name in names}, fit.c0)
    design = _design(group, len(names), shared_e=True)
    rows = [list(fit.arms).index(name) for name in names]
    start = fit.theta[[0, *(1 + i for i in rows), *(1 + len(fit.arms) + i for i in rows)]]
    found = best_of(
        solve(design, x, y[None], start[None], weights=weights[None], log=log, iterations=400),
        solve_multistart(design, x, y, fractions=(0.3, 0.8, 0.95), weights=weights, log=log),
    )
    return float(found.objective[0]), found.theta[0]


def _stacked(ladders: dict[str, Ladder], c0: float) -> tuple[Array, Array, Array, np.ndarray]:
    """log(C/C0), loss, seeds and ladder index of every rung."""
    parts = list(ladders.values())
    return (
        np.log(np.concatenate([ladder.flops for ladder in parts]) / c0),
        np.concatenate([ladder.loss for ladder in parts]),
        np.concatenate([ladder.weights for ladder in parts]),
        np.concatenate([np.full(len(ladder.flops), i) for i, ladder in enumerate(parts)]),
    )


def _design(group: np.ndarray, count: int, *, shared_e: bool) -> Design:
    own = one_hot(group, count)
    return Design(np.ones((len(group), 1)) if shared_e else own, own, own)


def _outliers(ladders: dict[str, Ladder], fit: ComputeFit, free: Array | None) -> list[str]:
    """Rungs with an externally studentized residual beyond 1%, Bonferroni-corrected over the table.

    An E at its bound is no free parameter: the residuals are not orthogonal to its derivative.
    """
    x, y, w, group = _stacked(ladders, fit.c0)
    design = _design(group, len(ladders), shared_e=free is None)
    theta = fit.theta if free is None else free
    free_parameters = np.arange(design.n_parameters) >= design.sizes[0]
    free_parameters[: design.sizes[0]] = theta[: design.sizes[0]] > 0
    df = len(x) - int(free_parameters.sum()) - 1
    if df < 2:
        return []
    residual = (y - design.predict(theta, x)) * np.sqrt(w)
    j = (jacobian(design, x, theta[None])[0] * np.sqrt(w)[:, None])[:, free_parameters]
    basis = linalg.orth(j / np.linalg.norm(j, axis=0))
    left = np.maximum(1 - (basis**2).sum(axis=1), 1e-6)  # 1 − leverage
    rest = np.maximum((residual @ residual - residual**2 / left) / df, (1e-9 * y.mean()) ** 2)
    t = residual / np.sqrt(rest * left)
    p = 2 * stats.t.sf(np.abs(t), df) * len(x)
    row_labels = [label for ladder in ladders.values() for label in ladder.row_labels]
    return [
        f"{row_labels[i]}: the loss is {residual[i] / left[i] / np.sqrt(w[i]):+.4f} off the law of the other"
        f" rungs ({_format_t(float(t[i]))}); check what was run there"
        for i in np.flatnonzero(p < 0.01)
    ]


def _format_t(t: float) -> str:
    if abs(t) > MAX_T_SHOWN:
        return f"more than {MAX_T_SHOWN:.0f} standard errors"
    return f"{t:+.1f} standard errors"
