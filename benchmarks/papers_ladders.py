"""The paper's ladders, arm by arm, by this package and by the paper's method; and what they can show.

    python benchmarks/papers_ladders.py [draws]

Prints the tables of docs/the-papers-ladders.md: the answers, the held-out d26, a simulation of the same
rungs with the same scatter under three truths, and what would separate exponent from irreducible loss.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from scipy import stats

from steepen.laws.analysis import AnalysisRequest, LadderAnalysis
from steepen.laws.fits.paper_method import fit_irreducible_loss
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    LadderPair,
    f_test_hypotheses,
    fit_hypotheses,
)
from steepen.laws.hypotheses.noise_checks import check_noise, judge_checked
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.paper_ladders import PAPER_LADDERS
from steepen.laws.read_table import read_table
from steepen.laws.table_fits import analyse_table

FLOPS_PER_GPU_HOUR = 0.4 * 989e12 * 3600  # an H100 at 40% of its bf16 peak


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
            f"{'arm':<18} {'gain':<10} {'by what':<17} {'mult./decade':>12} {'p':>8} {'fragile':>7} |"
            f" {'γ':>6} {'Δγ':>7} {'p':>8} {'m(d8)':>6} {'m(top)':>6}"
        )
        for arm, verdict in analysis.verdicts.items():
            delta, p = known_e_p(ladders["vanilla"], ladders[arm], e)
            m = sorted(
                (m for m in analysis.multipliers[arm] if m.method == "interpolated"), key=lambda m: m.flops
            )
            fragile = "yes" if verdict.fragile or verdict.by_what_fragile else ""
            print(
                f"{arm:<18} {verdict.growth:<10} {(verdict.by_what or '').split(':')[0]:<17}"
                f" {verdict.growth_per_decade:12.3f} {verdict.p_slope:8.1g} {fragile:>7} |"
                f" {straight_line(ladders[arm], e)[0]:6.4f} {delta:+7.4f} {p:8.1g}"
                f" {m[0].value:6.2f} {m[-1].value:6.2f}"
            )


def largest_run() -> None:
    analysis, _ = analysed("fineweb-edu")
    (out,) = analysis.hold_out
    print(f"\nd26 (untied-grow, {out.flops:.3g} FLOPs), observed {out.observed:.4f}")
    print(f"{'forecast by':<36} {'loss':>7} {'error':>8}")
    forecasts = {"joint fit": out.forecast}
    forecasts |= {f"{name} hypothesis": loss for name, loss in out.forecast_by_hypothesis.items()}
    paper = analysis.fits["paper"].arms["untied-grow"]
    forecasts["paper's method"] = float(paper.predict(out.flops))
    own = fit_irreducible_loss(analysed("fineweb-edu")[1]["untied-grow"], 1e18, "mse").theta
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


def simulate(draws: int) -> None:
    """The same rungs and scatter under three truths: how often is which answer given?"""
    analysis, ladders = analysed("fineweb")
    reference = ladders["vanilla"]
    rule = DecisionRule()
    print(f"\nFineWeb's rungs and scatter, {draws} draws for each arm and truth (at 5% for one arm)")
    print(
        f"{'arm':<18} {'σ':>6} {'truth':<17} {'undecided':>9} {'constant':>8} {'grows':>6}"
        f" {'exponent':>8} {'irreducible':>11} {'either':>6} | {'E known':>7}"
    )
    for arm in ("operator-1", "untied-2", "untied-grow"):
        verdict, own = analysis.verdicts[arm], ladders[arm]
        both = np.concatenate([reference.flops, own.flops])
        is_arm = np.arange(len(both)) >= len(reference.flops)
        x = np.log(both / analysis.primary_fit.c0)
        pair = LadderPair(x, is_arm, np.ones(len(x)))
        for name in ("constant", "exponent", "irreducible"):
            law = verdict.hypotheses[name]
            truth = np.where(
                is_arm,
                law.e[1] + np.exp(law.log_a[1] - law.gamma[1] * x),
                law.e[0] + np.exp(law.log_a[0] - law.gamma[0] * x),
            )
            y = truth + verdict.sigma * np.random.default_rng(0).standard_normal((draws, len(x)))
            fits = fit_hypotheses(pair, y, rule, warm_start=fit_hypotheses(pair, truth, rule))
            found, _ = judge_checked(f_test_hypotheses(fits, rule), check_noise(fits, y, rule), rule)
            grows = found.growth == "grows"
            by_what = [np.mean(grows & (found.by_what == word)) for word in ("exponent", "irreducible loss")]
            either = np.mean(grows) - sum(by_what)
            naive = np.mean([naive_steeper(reference, own, losses) for losses in y[: draws // 4]])
            print(
                f"{arm:<18} {verdict.sigma:6.4f} {name:<17} {np.mean(found.growth == 'undecided'):9.3f}"
                f" {np.mean(found.growth == 'constant'):8.3f} {np.mean(grows):6.3f} {by_what[0]:8.3f}"
                f" {by_what[1]:11.3f} {either:6.3f} | {naive:7.3f}"
            )


def naive_steeper(reference: Ladder, arm: Ladder, losses: np.ndarray) -> bool:
    """Whether the paper's method, with E taken as known, calls the arm steeper at 5%."""
    split = len(reference.flops)
    base = make_ladder("reference", reference.flops, losses[:split])
    own = make_ladder("arm", arm.flops, losses[split:])
    e = float(fit_irreducible_loss(base, 1e18).theta[0])
    if e >= losses.min():
        return False
    delta, p = known_e_p(base, own, e)
    return delta > 0 and p < 0.05


def what_would_settle() -> None:
    print("\nWhat would separate a larger exponent from a lower irreducible loss, with 90% power")
    print(
        f"{'data':<12} {'arm':<12} {'ladders up to':>13} {'more runs':>9} {'FLOPs':>8} {'H100 hours':>11}"
        "  one rung of each at"
    )
    for name in PAPER_LADDERS:
        analysis, ladders = analysed(name)
        for arm, verdict in analysis.verdicts.items():
            found = verdict.separation
            if arm not in ("operator-1", "loop-grow", "untied-grow") or found.top_flops is None:
                continue
            top = max(ladders[arm].flops.max(), ladders["vanilla"].flops.max())
            count = max(int(found.extra_rungs or 0) // 2, 1)
            cost = 2 * float(np.geomspace(top, float(found.top_flops), count + 1)[1:].sum())
            three = found.three_sigma_flops
            print(
                f"{name:<12} {arm:<12} {float(found.top_flops):13.1e} {found.extra_runs!s:>9} {cost:8.1e}"
                f" {cost / FLOPS_PER_GPU_HOUR:11.1e}  {'–' if three is None else f'{three:.1e}'}"
            )


if __name__ == "__main__":
    answers()
    largest_run()
    what_would_settle()
    simulate(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
