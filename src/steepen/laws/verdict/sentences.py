"""Verdicts in words: one sentence for the verdict, and lines for what would change it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steepen.laws.hypotheses.bootstrap import LeaveOneOut
from steepen.laws.hypotheses.nested_models import ByWhat, Growth
from steepen.laws.hypotheses.noise_checks import CHECK_LEVEL, MAX_POINTS_CHECKED
from steepen.laws.verdict.evidence import SIMPLE_HYPOTHESES, Evidence, HypothesisFit, NoiseCheckResult
from steepen.laws.verdict.sensitivity import (
    MAX_EXTRA_DECADES,
    MAX_LOSS_PENALTY,
    MAX_RUNS_FACTOR,
    DriftShape,
    MistuningTolerance,
)
from steepen.utils.cost_axis import cost_axis
from steepen.utils.formatting import format_flops, percent

DRIFT_WORDS: dict[DriftShape, str] = {
    "top rung": "at once",
    "linear": "linearly",
    "quadratic": "quadratically",
}
MAX_BAND = 1e6  # larger multipliers are printed as unbounded

BY_WHAT_PHRASES: dict[ByWhat, str] = {
    "exponent": "by a larger exponent",
    "irreducible loss": "by a lower irreducible loss",
    "both": "by a larger exponent and a lower irreducible loss",
    "either: not separable here": "by a larger exponent or a lower irreducible loss (not separable here)",
}


def verdict_sentence(evidence: Evidence) -> str:
    """State the answers and what makes them fragile, then the numbers they rest on, then their condition."""
    v = evidence
    first = f"{v.arm} against {v.reference}: {_answers(v)}{_left_out(v)}{_demoted(v)}"
    return f"{first}. {_detail(v)}{_unadjusted(v)}{_noise(v)}"


def fragile_reasons(
    growth: Growth, checks: Sequence[NoiseCheckResult], left_out: Sequence[LeaveOneOut], robust: Growth
) -> tuple[str, ...]:
    """Why the answer to the first question might not hold: noise, a single rung, or points off the law."""
    reasons: list[str] = []
    for check in checks:
        if check.consequence == "fragile":
            p = check.p_slope if growth in ("grows", "shrinks") else check.p_shift
            p = max(p, check.p_difference)
            reasons.append(
                f"if the noise changes along the ladders, p = {p:.2g}"
                if check.kind == "trend"
                else f"if errors along the ladders are correlated, p = {p:.2g}"
            )
    reasons += _rungs_it_rests_on([(out, out.growth) for out in left_out if out.growth != growth])
    if robust != growth:
        reasons.append(f"a robust (Huber) fit says '{robust}'")
    if not checks and not left_out:
        reasons.append("too few rungs to check the noise or to leave one out")
    return tuple(reasons)


def by_what_fragile_reasons(
    growth: Growth,
    by_what: ByWhat,
    left_out: Sequence[LeaveOneOut],
    robust: tuple[Growth, ByWhat | None],
) -> tuple[str, ...]:
    """Why the answer to the second question might not hold; nothing where it is left open (*either*)."""
    if by_what == "either: not separable here":
        return ()
    same = {by_what, "both"}  # *both* includes either of the single answers
    reasons = _rungs_it_rests_on(
        [(out, out.by_what) for out in left_out if out.growth == growth and out.by_what not in same]
    )
    if robust[0] == growth and robust[1] not in (None, *same):
        reasons.append(f"a robust (Huber) fit says '{robust[1].split(':')[0]}'")
    return tuple(reasons)


def _rungs_it_rests_on(changed: list[tuple[LeaveOneOut, str | None]]) -> list[str]:
    """A reason that names up to two rungs without which the answer is another, or one of more."""
    if not changed:
        return []
    named = [f"{out.arm} at {format_flops(out.flops, 2)}" for out, _ in changed]
    rungs = (
        " or ".join(named) if len(named) < 3 else f"{named[0]}, or any one of {len(named) - 1} other rungs,"
    )
    answers = dict.fromkeys(str(answer).split(":")[0] for _, answer in changed)
    return [f"without {rungs} the answer is {' or '.join(repr(answer) for answer in answers)}"]


def _marked(answer: str, fragile: Sequence[str]) -> str:
    """An answer, with the reasons why it is fragile."""
    return f"{answer} (fragile, not a claim: {'; '.join(fragile)})" if fragile else answer


def _demoted(v: Evidence) -> str:
    """The noise that made the answer *undecided*."""
    if v.demoted is None:
        return ""
    found = v.demoted.growth
    check = next(check for check in v.noise_checks if check.kind == v.demoted.kind)
    what = (
        f"the noise changes along the ladders (SD ×{check.estimate:g} at the lowest compute;"
        if check.kind == "trend"
        else f"errors along the ladders are correlated ({check.estimate:g};"
    )
    shown = f"with such noise {found!r} is not shown (p = {v.p_demoted:.2g})"
    return f"; {what} p = {check.p_value:.2g}), and {shown}"


def _left_out(v: Evidence) -> str:
    """The rung without which the answer was reached, because it is off the law of the others."""
    if v.outlier is None:
        return ""
    side = "above" if v.outlier.deviation > 0 else "below"
    return (
        f", judged without {v.outlier.arm} at {format_flops(v.outlier.flops, 2)} {v.unit}, whose loss is"
        f" {abs(v.outlier.deviation):.4f} {side} the law of the other rungs (p = {v.outlier.p_value:.2g})"
    )


def _noise(v: Evidence) -> str:
    """Remarks where the noise could not be checked, and where the scatter contradicts the stated noise."""
    unchecked = (
        f" The noise was not checked: the ladders have more than {MAX_POINTS_CHECKED} points."
        if v.leave_one_out and not v.noise_checks
        else ""
    )
    if v.p_scatter >= CHECK_LEVEL:
        return unchecked
    return (
        f"{unchecked} The residuals scatter by {v.sigma:.2g}, more than the stated noise"
        f" (p = {v.p_scatter:.2g}), so the scatter was used."
    )


def _answers(v: Evidence) -> str:
    """Both answers in words, with what makes them fragile and a difference that works against the gain."""
    growth = _marked(v.growth, v.fragile)
    if v.by_what is None:
        return growth
    phrase = BY_WHAT_PHRASES[v.by_what]
    if v.leading == "free" and v.by_what == "exponent":
        phrase += ", despite a higher irreducible loss"
    elif v.leading == "free" and v.by_what == "irreducible loss":
        phrase += ", despite a smaller exponent"
    return f"{growth}, {_marked(phrase, v.by_what_fragile)}"


def _detail(v: Evidence) -> str:
    """The numbers behind the answers."""
    delta = f"Δγ = {v.delta_gamma:+.4f} ({_interval(v.delta_gamma_interval, v.level)})"
    if v.growth == "grows":
        return f"{_growth(v)}; {_why_grows(v, delta)}{_current_cost(v)}."
    if v.growth == "constant":
        drift = max(abs(end) for end in v.equivalence_interval) / v.hypotheses["constant"].gamma[0]
        bound = f"Δγ = {v.delta_gamma:+.4f} ({_interval(v.equivalence_interval, 2 * v.level)})"
        return (
            f"It needs {_times(_constant_multiplier(v))} less {_cost(v)} at every rung; {bound}, so"
            f" the multiplier drifts by at most ×{10**drift:.3f} per decade."
        )
    if v.growth == "shrinks":
        return f"{_growth(v)}; {_why_shrinks(v, delta)}, {_current_saving(v)}."
    if v.growth == "worse":
        more = _times(1 / _constant_multiplier(v))
        return f"It needs {more} the {_cost(v)} at every rung, and {delta}."
    if v.demoted is not None:
        interval = _interval(v.delta_gamma_interval, v.level)
        return (
            f"With independent errors of equal size: {_multiplier(v)}, Δγ = {v.delta_gamma:+.4f}"
            f" ({interval}; p = {v.p_slope:.2g})."
        )
    if v.p_difference >= v.level:
        return f"No difference is resolved (p = {v.p_difference:.2g}): {_multiplier(v)}, {delta}."
    return _constant_or_slope(v, delta)


def _growth(v: Evidence) -> str:
    """By what factor the multiplier grows per decade, and the p-value of equal slopes."""
    if math.isnan(v.growth_per_decade):
        return f"Equal slopes are rejected (p = {v.p_slope:.2g})"
    low, high = v.growth_per_decade_interval
    return (
        f"The multiplier {'grows' if v.growth == 'grows' else 'changes'} by ×{v.growth_per_decade:.3f} per"
        f" decade of {_cost(v)}"
        f" ({_percent(v.level)} {low:.3f} to {high:.3f}; p = {v.p_slope:.2g})"
    )


def _why_grows(v: Evidence, delta: str) -> str:
    """The evidence on the second question."""
    if v.leading == "free":
        return _free_fit(v)
    if v.by_what == "exponent":
        return (
            f"{delta}; a lower irreducible loss with the same exponent is rejected"
            f" (p = {v.p_irreducible_hypothesis:.2g})"
        )
    if v.by_what == "irreducible loss":
        return (
            f"ΔE = {v.delta_e:+.4f}; a larger exponent with the same E is rejected"
            f" (p = {v.p_exponent_hypothesis:.2g})"
        )
    if v.rejected("exponent"):
        return (
            f"one irreducible loss for both is rejected (p = {v.p_exponent_hypothesis:.2g}), and with one"
            f" exponent E would be higher (ΔE = {v.delta_e:+.4f})"
        )
    exponent, irreducible = (v.hypotheses[name].predictions[-1] for name in ("exponent", "irreducible"))
    at = f"{format_flops(exponent.flops, 2)} {v.unit}"
    return (
        f"the data allow both a larger exponent (Δγ = {v.delta_gamma:+.4f},"
        f" {_interval(v.delta_gamma_interval, v.level)}; p = {v.p_exponent_hypothesis:.2g}) and a lower"
        f" irreducible loss with the same exponent (ΔE = {v.delta_e:+.4f};"
        f" p = {v.p_irreducible_hypothesis:.2g}). At {at} the exponent hypothesis predicts"
        f" {_times(exponent.multiplier)} and the irreducible-loss hypothesis"
        f" {_times(irreducible.multiplier)}{_small_slope(v)}"
    )


def _unadjusted(v: Evidence) -> str:
    """The answers at the level of a single arm, where sharing the level among arms changed them."""
    if (v.growth, v.by_what) == (v.unadjusted_growth, v.unadjusted_by_what):
        return ""
    by_what = f", {BY_WHAT_PHRASES[v.unadjusted_by_what]}" if v.unadjusted_by_what else ""
    return (
        f" Judged alone at {percent(v.rule.level)} instead of with {v.arms - 1} other arms:"
        f" {v.unadjusted_growth}{by_what}."
    )


def what_would_change(evidence: Evidence) -> list[str]:
    """What would settle an undecided verdict, what would overturn a verdict, and rungs it depends on."""
    v = evidence
    lines: list[str] = []
    if v.by_what == "either: not separable here" and v.tenable == SIMPLE_HYPOTHESES:
        lines += _what_separates(v)
    elif v.growth == "undecided":
        lines += _what_bounds_the_slope(v)
    for tolerance in v.tolerance:
        if tolerance.shape == "top rung":
            lines += _top_rung(v, tolerance)
    lines += _drift(v)
    if v.demoted is not None:  # single rungs and penalties were tried on the word that the noise took away
        return lines
    changed = [out for out in v.leave_one_out if out.verdict != v.word]
    if changed:
        each = "; ".join(f"without {o.arm} at {format_flops(o.flops, 2)}: {o.verdict}" for o in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        lines.append(f"leaving out one rung changes it ({each}{more})")
    elif v.leave_one_out:
        lines.append("leaving out any one rung does not change it")
    return lines


def _top_rung(v: Evidence, tolerance: MistuningTolerance) -> list[str]:
    """What a loss too high at a ladder's top rung alone would change."""
    lines: list[str] = []
    rung = f"top rung of {tolerance.ladder} ({format_flops(tolerance.flops, 2)} {v.unit})"
    penalty = tolerance.penalty_changing_verdict
    if penalty is not None and v.demoted is None:
        factor = _lr_factor(tolerance.lr_factor_changing_verdict)
        lines.append(
            f"re-sweep the learning rate at the {rung}: a loss {penalty:.4f} too high there"
            f"{_in_sigma(penalty, v.sigma)}{factor} would make the verdict {tolerance.changed_verdict}"
        )
    if tolerance.penalty_explaining_slope is not None:
        lines.append(
            f"a loss {tolerance.penalty_explaining_slope:.4f} too high at the {rung} would by itself"
            " explain the difference in slope"
        )
    elif tolerance.could_explain_slope:
        uncertain = penalty is not None and v.demoted is None and tolerance.changed_verdict == "undecided"
        lines.append(
            f"no loss up to {MAX_LOSS_PENALTY:.0%} too high at the {rung} would by itself explain the"
            " difference in slope"
            + (": one as large as above makes the difference uncertain, not zero" if uncertain else "")
        )
    return lines


def _drift(v: Evidence) -> list[str]:
    """What a penalty that grows along a ladder would change: the smallest that does, one line each."""
    smooth = [tolerance for tolerance in v.tolerance if tolerance.shape != "top rung"]
    lines: list[str] = []
    changing = [t for t in smooth if t.penalty_changing_verdict is not None and v.demoted is None]
    if changing:
        t = min(changing, key=lambda t: t.penalty_changing_verdict or math.inf)
        lines.append(
            f"a recipe of {t.ladder} that gets worse with {_cost(v)}, {DRIFT_WORDS[t.shape]} in its"
            f" logarithm to a loss {t.penalty_changing_verdict:.4f} too high at its top rung"
            f"{_lr_factor(t.lr_factor_changing_verdict)}, would make the verdict {t.changed_verdict}"
        )
    explaining = [t for t in smooth if t.penalty_explaining_slope is not None]
    if explaining:
        t = min(explaining, key=lambda t: t.penalty_explaining_slope or math.inf)
        subject = "one" if lines else "a recipe"
        lines.append(
            f"{subject} that gets worse {DRIFT_WORDS[t.shape]} to {t.penalty_explaining_slope:.4f} at the top"
            f" rung of {t.ladder}{_lr_factor(t.lr_factor_explaining_slope)} would by itself explain the"
            " difference in slope"
        )
    return lines


def _lr_factor(factor: float | None) -> str:
    """A penalty as an error of the learning rate, where a sweep's curvature is known."""
    return "" if factor is None else f" (a learning rate off by ×{factor:.2f})"


def _constant_or_slope(v: Evidence, delta: str) -> str:
    """Undecided with a resolved offset: the slopes may differ, or both E and γ do."""
    constant = v.hypotheses["constant"]
    side = "lower" if constant.log_a[1] < constant.log_a[0] else "higher"
    if v.rejected("exponent"):
        return (
            f"It is {side} where it was measured ({_multiplier(v)}), but one irreducible loss for both is"
            f" rejected (p = {v.p_exponent_hypothesis:.2g}): E and γ both seem to differ, and may cancel"
            " within the ladder but not beyond it."
        )
    if max(abs(end) for end in v.equivalence_interval) < _margin_of_gamma(v):
        return (
            f"The laws differ (p = {v.p_difference:.2g}; {_multiplier(v)}, {delta}), but neither a constant"
            f" gain (p = {v.p_shift:.2g}) nor a difference in slope (p = {v.p_slope:.2g}) is shown alone."
        )
    return (
        f"It is {side} ({_multiplier(v)}), but {delta} allows a drift beyond ±{v.rule.margin:.1%} of γ, so it"
        " may be a constant gain or an exponent."
    )


def _margin_of_gamma(v: Evidence) -> float:
    """The largest |Δγ| of a constant gain."""
    return v.rule.margin * abs(v.hypotheses["exponent"].gamma[0])


def _what_bounds_the_slope(v: Evidence) -> list[str]:
    """More measurements that would bring the interval of Δγ inside the margin."""
    lines: list[str] = []
    half_width = 0.5 * (v.equivalence_interval[1] - v.equivalence_interval[0])
    # More runs narrow the interval but do not move its centre, so this is the half-width to reach.
    target = _margin_of_gamma(v) - abs(v.delta_gamma)
    if half_width > target > 0 and math.isfinite(half_width):
        factor = (half_width / target) ** 2
        lines.append(
            "more rungs in the same span: if the slopes are equal, about"
            f" {math.ceil(10 * factor) / 10:.3g} times the runs bring Δγ's interval inside the margin"
            if factor < MAX_RUNS_FACTOR
            else _too_many_runs()
        )
    lines.append(f"another decade of {_cost(v)}: the standard error of Δγ falls as the span grows")
    return lines


def _what_separates(v: Evidence) -> list[str]:
    """More measurements that would separate the exponent from the irreducible-loss hypothesis."""
    lines: list[str] = []
    s = v.separation
    if s.top_flops is not None and s.extra_rungs:
        more = f"another {s.extra_decades:.1f} decades: " if s.extra_decades else ""
        lines.append(
            f"{more}extending both ladders to {format_flops(s.top_flops, 2)}"
            f" {v.unit} ({s.extra_runs} more runs) separates the hypotheses with 90% power"
        )
    elif s.top_flops is None:
        lines.append(
            f"no ladder within {MAX_EXTRA_DECADES:.0f} more decades separates the hypotheses at this noise"
        )
    if s.three_sigma_flops is not None:
        lines.append(
            f"one further rung of each at {format_flops(s.three_sigma_flops, 2)} {v.unit}: there the"
            " hypotheses differ by 3σ"
        )
    factors = [
        f"about {math.ceil(factor)} times the {what}"
        for what, factor in (("rungs", s.rungs_factor), ("seeds", s.seeds_factor))
        if factor is not None and factor < MAX_RUNS_FACTOR
    ]
    lines.append(f"more runs in the same span: {', or '.join(factors)}" if factors else _too_many_runs())
    return lines


def _too_many_runs() -> str:
    return f"more runs in the same span are not enough (over {MAX_RUNS_FACTOR} times as many)"


def _free_fit(v: Evidence) -> str:
    """Why both hypotheses are rejected, and what the free fit says within and beyond the ladders."""
    beyond = v.hypotheses["free"].predictions[-1]
    further = (
        ""
        if math.isnan(beyond.multiplier)
        else f", and at {format_flops(beyond.flops, 2)} {v.unit} the fit gives"
        f" {_times(beyond.multiplier)} ({_band(beyond.multiplier_interval)})"
    )
    return (
        f"a common irreducible loss is rejected (p = {v.p_exponent_hypothesis:.2g}) and so is a common"
        f" exponent (p = {v.p_irreducible_hypothesis:.2g}). With separate E and γ,"
        f" ΔE = {v.delta_e_free:+.4f} ({_interval(v.delta_e_free_interval, v.level)}) and"
        f" Δγ = {v.delta_gamma_free:+.4f} ({_interval(v.delta_gamma_free_interval, v.level)});"
        f" {_free_crossing(v)}{further}"
    )


def _free_crossing(v: Evidence) -> str:
    """Where the free fit's laws cross above the ladders."""
    low, high = v.free_crossing.interval
    if not math.isfinite(v.free_crossing.flops):
        return f"the laws do not cross within {MAX_EXTRA_DECADES:.0f} decades above the ladders"
    ends = [format_flops(end, 2) if math.isfinite(end) else "never" for end in (low, high)]
    return f"the laws cross at {format_flops(v.free_crossing.flops, 2)} {v.unit} ({ends[0]} to {ends[1]})"


def _why_shrinks(v: Evidence, delta: str) -> str:
    """Whether the reference gains by its exponent, by its irreducible loss, or by either."""
    if v.leading == "free":
        return _free_fit(v)
    if v.rejected("irreducible"):
        return (
            f"{delta}; a higher irreducible loss with the same exponent is rejected"
            f" (p = {v.p_irreducible_hypothesis:.2g})"
        )
    if v.rejected("exponent"):
        return (
            f"its irreducible loss is higher (ΔE = {v.delta_e:+.4f}), and a"
            f" smaller exponent with the same E is rejected (p = {v.p_exponent_hypothesis:.2g})"
        )
    return f"{delta}, or a higher irreducible loss with the same exponent (ΔE = {v.delta_e:+.4f})"


def _current_saving(v: Evidence) -> str:
    """What an arm whose gain shrinks saves at the top of the ladders, and where the saving ends."""
    if math.isnan(v.multiplier):
        return f"and {_multiplier(v)}"
    if v.multiplier <= 1:
        return f"and it already needs {_times(1 / v.multiplier)} the {_cost(v)} {_at_top(v)}"
    now = f"though it still saves {_cost(v)} ({_times(v.multiplier)}) {_at_top(v)}"
    if v.leading == "free":
        return now
    exponent, irreducible = (_crossing(v, v.hypotheses[name]) for name in ("exponent", "irreducible"))
    if v.rejected("irreducible"):
        return f"{now}; the saving is gone {exponent}"
    if v.rejected("exponent"):
        return f"{now}; given its E, the saving is gone {irreducible}"
    return (
        f"{now}; the saving is gone {exponent} (exponent hypothesis) or {irreducible} (irreducible-loss"
        " hypothesis)"
    )


def _crossing(v: Evidence, fit: HypothesisFit) -> str:
    """The compute at which the two laws of a hypothesis cross."""
    (a, arm_a), gamma = fit.log_a, fit.gamma[0]
    if fit.hypothesis == "exponent":
        x = (arm_a - a) / v.delta_gamma
    else:
        # The arm's smaller constant shrinks with compute until its higher E outweighs it; an arm without a
        # smaller constant was never ahead.
        gain_in_a, loss_in_e = math.exp(a) - math.exp(arm_a), fit.e[1] - fit.e[0]
        crosses = gamma > 0 and loss_in_e > 0
        x = -math.inf if gain_in_a <= 0 else math.log(gain_in_a / loss_in_e) / gamma if crosses else math.inf
    top = math.log(v.multiplier_flops / v.c0)
    if x <= top:
        return "already"
    if x - top > MAX_EXTRA_DECADES * math.log(10):
        return f"beyond {MAX_EXTRA_DECADES:.0f} more decades"
    return f"at {format_flops(v.c0 * math.exp(x), 2)} {v.unit}"


def _current_cost(v: Evidence) -> str:
    """How much more compute an arm whose gain grows still needs at the top of the ladders, if any."""
    if math.isnan(v.multiplier):
        return f"; {_multiplier(v)}"
    if v.multiplier >= 1:
        return ""
    return f", though it still needs {_times(1 / v.multiplier)} the {_cost(v)} {_at_top(v)}"


def _multiplier(v: Evidence) -> str:
    """The multiplier at the highest compute that both ladders cover, or why there is none."""
    if math.isnan(v.multiplier):
        return f"there is no multiplier {_at_top(v)}: a curve does not fall with {_cost(v)}"
    return f"fitted multiplier {v.multiplier:.3f} {_at_top(v)}"


def _cost(v: Evidence) -> str:
    """The noun for the ladders' x axis."""
    return cost_axis(v.unit).noun


def _at_top(v: Evidence) -> str:
    """The compute at which the verdict's multiplier is taken, and whether the arm was measured there."""
    beyond = ", extrapolated" if v.multiplier_extrapolated else ""
    return f"at {format_flops(v.multiplier_flops, 2)} {v.unit}{beyond}"


def _constant_multiplier(v: Evidence) -> float:
    """The multiplier of the constant hypothesis, the same at every compute."""
    return v.hypotheses["constant"].predictions[0].multiplier


def _small_slope(v: Evidence) -> str:
    """A remark where the slope is resolved but lies inside the margin of a constant gain."""
    largest = max(abs(end) for end in v.delta_gamma_interval)
    fraction = largest / abs(v.hypotheses["constant"].gamma[0])
    return f"; either way Δγ is at most {fraction:.1%} of γ" if fraction < v.rule.margin else ""


def _in_sigma(penalty: float, sigma: float) -> str:
    """A loss in standard deviations of a rung; empty for noise-free tables, where it would be huge."""
    return f" ({penalty / sigma:.1f}σ)" if penalty < 1000 * sigma else ""


def _times(value: float) -> str:
    """A multiplier: 1.081× or 12.3×."""
    if math.isnan(value):
        return "an unknown factor"
    return f"{value:.3f}×" if value < 10 else f"{value:.3g}×"


def _percent(level: float) -> str:
    """The confidence that belongs to a test's level, such as "95%" or "99.3%"."""
    return f"{100 * (1 - level):.3g}%"


def _interval(interval: tuple[float, float], level: float) -> str:
    """An interval with its confidence: "95% +0.0056 to +0.0060"."""
    return f"{_percent(level)} {interval[0]:+.4f} to {interval[1]:+.4f}"


def _band(interval: tuple[float, float]) -> str:
    """A band of multipliers; an end that no draw bounds is said so."""
    low, high = (f"{end:.3g}" if end < MAX_BAND else "unbounded" for end in interval)
    return f"band {low} to {high}"
