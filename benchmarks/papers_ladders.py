"""The paper's ladders, arm by arm, by this package and by the paper's method.

    python benchmarks/papers_ladders.py

Prints the tables of docs/the-papers-ladders.md: the answers, and the held-out d26.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy import stats

from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse_table
from steepen.laws.fits.compute_law import fit_irreducible_loss
from steepen.laws.ladder import Ladder
from steepen.laws.model.table_fit import slope_contrast
from steepen.tables.paper_ladders import PAPER_LADDERS
from steepen.tables.read_table import read_table


def analysed(name: str, hold_out: list[str] | None = None) -> tuple[LadderAnalysis, dict[str, Ladder]]:
    data = PAPER_LADDERS[name]
    request = AnalysisRequest(data.reference, c0=data.c0)
    return analyse_table(read_table(data.path), request, data.hold_out if hold_out is None else hold_out)


def straight_line(ladder: Ladder, e: float) -> tuple[float, float]:
    """γ and its standard error by regression of log(L − E), as with a known E."""
    found = stats.linregress(np.log(ladder.flops), np.log(ladder.loss - e))
    return -float(found.slope), float(found.stderr)


def known_e_p(reference: Ladder, arm: Ladder, e: float) -> tuple[float, float]:
    """Δγ and its p-value with E taken as known: what two regression lines say."""
    (base, base_error), (own, own_error) = straight_line(reference, e), straight_line(arm, e)
    error = math.hypot(base_error, own_error)
    df = len(reference.flops) + len(arm.flops) - 4
    return own - base, float(2 * stats.t.sf(abs(own - base) / error, df))


def answers() -> None:
    for name in PAPER_LADDERS:
        analysis, ladders = analysed(name)
        e = analysis.fits["paper"].arms["vanilla"].e.value
        print(f"\n{name}: this package | the paper's method, E = {e:.4f} taken as known")
        print(
            f"{'arm':<18} {'in range':<13} {'multiplier (95%)':>18} {'p':>7} {'gain':<10} {'x/decade':>8}"
            f" {'p':>6} |"
            f" {'γ':>6} {'Δγ':>7} {'p':>7} {'m(d8)':>6} {'m(top)':>6}"
        )
        for arm, v in analysis.verdicts.items():
            delta, p = known_e_p(ladders["vanilla"], ladders[arm], e)
            m = sorted(
                (m for m in analysis.multipliers[arm] if m.method == "interpolated"), key=lambda m: m.flops
            )
            gain = f"{v.gain.value:.2f} ({v.gain.interval[0]:.2f}–{v.gain.interval[1]:.2f})"
            print(
                f"{arm:<18} {v.better:<13} {gain:>18} {v.gain.p_value:7.1g} {v.growth:<10}"
                f" {v.growth_per_decade:8.3f} {v.slope.p_value:6.1g} |"
                f" {straight_line(ladders[arm], e)[0]:6.4f} {delta:+7.4f} {p:7.1g}"
                f" {m[0].value:6.2f} {m[-1].value:6.2f}"
            )
        noises(analysis)


def noises(analysis: LadderAnalysis) -> None:
    """The weight of each kind of noise, and the p-values of growth if it were that kind."""
    fit, names = analysis.judge.fit, analysis.judge.names
    kinds: dict[str, list[int]] = {}
    for k, model in enumerate(fit.models):
        variances = np.diag(np.linalg.inv(model.precision[0, 0]))
        changing = "changing with compute" if np.ptp(variances) > 1e-6 * variances.max() else "of one size"
        kinds.setdefault(f"{'correlated' if model.length else 'independent'}, {changing}", []).append(k)
    arms = [name for name in ("loop-grow", "untied-grow") if name in names]
    print(f"{'noise':<36} {'weight':>7}" + "".join(f" {name:>12}" for name in arms))
    for kind, places in sorted(kinds.items()):
        one = replace(fit, models=tuple(fit.models[k] for k in places))
        found = [
            one.mixture(slope_contrast(fit.laws, (names.index("vanilla"), names.index(arm)))) for arm in arms
        ]
        p = "".join(f" {float(each.p_value()[0]):12.1g}" for each in found)
        print(f"{kind:<36} {fit.weight[places, 0].sum():7.3f}{p}")
    parts = zip(fit.weight[:, 0], fit.models, strict=True)
    shared = sum(w for w, model in parts if (model.spread[0, 1:, 1:] != 0).any())
    print(f"{'shared by arms, of any kind':<36} {shared:7.3f}")


def largest_run() -> None:
    analysis, ladders = analysed("fineweb-edu")
    (out,) = analysis.hold_out
    print(f"\nd26 (untied-grow, {out.flops:.3g} FLOPs), observed {out.observed:.4f}")
    print(f"{'forecast by':<36} {'loss':>7} {'error':>8}")
    forecasts = {"joint fit": out.forecast}
    paper = analysis.fits["paper"].arms["untied-grow"]
    forecasts["paper's method"] = float(paper.predict(out.flops))
    own = fit_irreducible_loss(ladders["untied-grow"], 1e18, "mse").theta
    forecasts["untied-grow's own E, A and γ"] = float(
        own[0] + np.exp(own[1] - own[2] * np.log(out.flops / 1e18))
    )
    for name, loss in forecasts.items():
        print(f"{name:<36} {loss:7.4f} {out.observed - loss:+8.4f}")
    print(
        f"standard error of the joint forecast {abs(out.error / out.error_in_standard_errors):.4f}:"
        f" {out.error_in_standard_errors:+.1f} of them, p = {out.p_value:.1g};"
        f" the law needs {out.compute_factor:.2f} times d26's compute for its loss"
    )


if __name__ == "__main__":
    answers()
    largest_run()
