"""Verdicts in words: one sentence for the verdict, and lines for what would change it."""

from __future__ import annotations

import math

from steepen.laws.verdict.evidence import Evidence, HypothesisFit
from steepen.laws.verdict.sensitivity import MAX_EXTRA_DECADES, MAX_LOSS_PENALTY, MAX_RUNS_FACTOR
from steepen.utils.formatting import format_flops


def verdict_sentence(evidence: Evidence) -> str:
    """State the verdict, then the numbers it rests on, then their condition."""
    v = evidence
    low, high = v.delta_gamma_interval
    delta = f"Δγ = {v.delta_gamma:+.4f} ({low:+.4f} to {high:+.4f})"
    answer = f"{v.arm} against {v.reference}: {v.word}"
    if v.word in ("steeper", "floor") and _both_rejected(v):
        return f"{answer}. {_free_fit(v)}{_current_cost(v)}."
    if v.word == "steeper":
        alternative = "a lower irreducible loss with the same exponent is rejected"
        return f"{answer}. {delta}; {alternative} (p = {v.p_irreducible_hypothesis:.2g}){_current_cost(v)}."
    if v.word == "floor":
        return (
            f"{answer}. It gains with {_cost(v)} because its irreducible loss E is lower (ΔE ="
            f" {v.delta_e:+.4f}); a larger exponent with the same E is rejected"
            f" (p = {v.p_exponent_hypothesis:.2g})."
        )
    if v.word == "lower (constant)":
        drift = max(abs(low), abs(high)) / v.hypotheses["constant"].gamma[0]
        return (
            f"{answer}. It needs {_times(_constant_multiplier(v))} less {_cost(v)} at every rung; {delta}, so"
            f" the multiplier drifts by at most ×{10**drift:.3f} per decade."
        )
    if v.word == "shallower":
        return f"{answer}. {_why_shallower(v, delta)}, {_current_saving(v)}."
    if v.word == "worse":
        more = _times(1 / _constant_multiplier(v))
        return f"{answer}. It needs {more} the {_cost(v)} at every rung, and {delta}."
    if v.p_slope < v.rule.level:
        return f"{answer}. {_exponent_or_irreducible(v, delta)}"
    if v.p_shift < v.rule.level:
        return f"{answer}. {_constant_or_slope(v, delta)}"
    return f"{answer}. No difference is resolved: {_multiplier(v)}, {delta}."


def what_would_change(evidence: Evidence) -> list[str]:
    """What would settle an undecided verdict, what would overturn a verdict, and rungs it depends on."""
    v = evidence
    lines: list[str] = []
    if v.word == "undecided" and v.p_slope < v.rule.level:
        lines += _what_separates(v)
    elif v.word == "undecided":
        lines += _what_bounds_the_slope(v)
    for tolerance in v.tolerance:
        rung = f"top rung of {tolerance.ladder} ({format_flops(tolerance.flops, 2)} {v.unit})"
        penalty = tolerance.penalty_changing_verdict
        if penalty is not None:
            lines.append(
                f"re-sweep the learning rate at the {rung}: a loss {penalty:.4f} too high there"
                f"{_in_sigma(penalty, v.sigma)} would make the verdict {tolerance.changed_verdict}"
            )
        if tolerance.penalty_explaining_slope is not None:
            lines.append(
                f"a loss {tolerance.penalty_explaining_slope:.4f} too high at the {rung} would by itself"
                " explain the difference in slope"
            )
        elif tolerance.could_explain_slope:
            lines.append(
                f"no error up to {MAX_LOSS_PENALTY:.0%} of the loss at the {rung} would by itself explain"
                " the difference in slope"
            )
    changed = [out for out in v.leave_one_out if out.verdict != v.word]
    if changed:
        each = "; ".join(f"without {o.arm} at {format_flops(o.flops, 2)}: {o.verdict}" for o in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        lines.append(f"leaving out one rung changes it ({each}{more})")
    elif v.leave_one_out:
        lines.append("leaving out any one rung does not change it")
    return lines


def _exponent_or_irreducible(v: Evidence, delta: str) -> str:
    """Undecided with a resolved slope: both hypotheses fit, but extrapolate differently."""
    exponent, irreducible = (v.hypotheses[name].predictions[-1] for name in ("exponent", "irreducible"))
    at = f"{format_flops(exponent.flops, 2)} {v.unit}"
    return (
        f"It gains with {_cost(v)}, but the data allow both a larger exponent ({delta};"
        f" p = {v.p_exponent_hypothesis:.2g}) and a lower irreducible loss with the same exponent"
        f" (ΔE = {v.delta_e:+.4f}; p = {v.p_irreducible_hypothesis:.2g}). At {at} the exponent hypothesis"
        f" predicts {_times(exponent.multiplier)} and the irreducible-loss hypothesis"
        f" {_times(irreducible.multiplier)}.{_small_slope(v)}"
    )


def _constant_or_slope(v: Evidence, delta: str) -> str:
    """Undecided with a resolved offset: the slopes may differ, or both E and γ do."""
    constant = v.hypotheses["constant"]
    side = "lower" if constant.log_a[1] < constant.log_a[0] else "higher"
    if v.p_exponent_hypothesis < v.rule.level:
        return (
            f"It is {side} where it was measured ({_multiplier(v)}), but one irreducible loss for both is"
            f" rejected (p = {v.p_exponent_hypothesis:.2g}): E and γ both seem to differ, and may cancel"
            " within the ladder but not beyond it."
        )
    return (
        f"It is {side} ({_multiplier(v)}), but {delta} allows a drift beyond ±{v.rule.margin:.1%} of γ, so it"
        " may be a constant gain or an exponent."
    )


def _what_bounds_the_slope(v: Evidence) -> list[str]:
    """More measurements that would bring the interval of Δγ inside the margin."""
    lines: list[str] = []
    half_width = 0.5 * (v.delta_gamma_interval[1] - v.delta_gamma_interval[0])
    # More runs narrow the interval but do not move its centre, so this is the half-width to reach.
    target = v.rule.margin * abs(v.hypotheses["constant"].gamma[0]) - abs(v.delta_gamma)
    if half_width > target > 0 and math.isfinite(half_width):
        factor = (half_width / target) ** 2
        lines.append(
            f"more rungs in the same span: if the slopes are equal, about {factor:.0f} times"
            " the runs bring Δγ's interval inside the margin"
            if factor < MAX_RUNS_FACTOR
            else _too_many_runs()
        )
    lines.append(f"another decade of {_cost(v)}: the standard error of Δγ falls as the span grows")
    return lines


def _what_separates(v: Evidence) -> list[str]:
    """More measurements that would separate the exponent from the irreducible-loss hypothesis."""
    lines: list[str] = []
    s = v.separation
    if s.top_flops is not None and s.extra_decades:
        lines.append(
            f"another {s.extra_decades:.1f} decades: extending both ladders to {format_flops(s.top_flops, 2)}"
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


def _both_rejected(v: Evidence) -> bool:
    """Whether neither a common irreducible loss nor a common exponent fits."""
    return max(v.p_exponent_hypothesis, v.p_irreducible_hypothesis) < v.rule.level


def _free_fit(v: Evidence) -> str:
    """Why both hypotheses are rejected, and Δγ of the free model."""
    low, high = v.delta_gamma_free_interval
    return (
        f"A common irreducible loss is rejected (p = {v.p_exponent_hypothesis:.2g}) and so is a common"
        f" exponent (p = {v.p_irreducible_hypothesis:.2g}); with separate E and γ,"
        f" Δγ = {v.delta_gamma_free:+.4f} ({low:+.4f} to {high:+.4f})"
    )


def _why_shallower(v: Evidence, delta: str) -> str:
    """Whether the reference gains by its exponent, by its irreducible loss, or by either."""
    if _both_rejected(v):
        e, arm_e = v.hypotheses["free"].e
        return f"{_free_fit(v)} and ΔE = {arm_e - e:+.4f}"
    if v.p_irreducible_hypothesis < v.rule.level:
        return (
            f"{delta}; a higher irreducible loss with the same exponent is rejected"
            f" (p = {v.p_irreducible_hypothesis:.2g})"
        )
    if v.p_exponent_hypothesis < v.rule.level:
        return (
            f"It loses with {_cost(v)} because its irreducible loss is higher (ΔE = {v.delta_e:+.4f}); a"
            f" smaller exponent with the same E is rejected (p = {v.p_exponent_hypothesis:.2g})"
        )
    return f"{delta}, or a higher irreducible loss with the same exponent (ΔE = {v.delta_e:+.4f})"


def _current_saving(v: Evidence) -> str:
    """What a shallower arm saves at the top of the ladders, and the compute at which the saving ends."""
    if math.isnan(v.multiplier):
        return f"and {_multiplier(v)}"
    if v.multiplier <= 1:
        return f"and it already needs {_times(1 / v.multiplier)} the {_cost(v)} {_at_top(v)}"
    now = f"though it still saves {_cost(v)} ({_times(v.multiplier)}) {_at_top(v)}"
    if _both_rejected(v):
        return f"{now}; whether the saving lasts is open"
    exponent, irreducible = (_crossing(v, v.hypotheses[name]) for name in ("exponent", "irreducible"))
    if v.p_irreducible_hypothesis < v.rule.level:
        return f"{now}; the saving is gone {exponent}"
    if v.p_exponent_hypothesis < v.rule.level:
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
    """How much more compute a steeper arm still needs at the top of the ladders, if any."""
    if math.isnan(v.multiplier):
        return f"; {_multiplier(v)}"
    if v.multiplier >= 1:
        return ""
    return f", though it still needs {_times(1 / v.multiplier)} the {_cost(v)} {_at_top(v)}"


def _multiplier(v: Evidence) -> str:
    """The multiplier at the highest compute that both ladders cover, or why there is none."""
    if math.isnan(v.multiplier):
        return f"there is no multiplier {_at_top(v)}: a curve does not fall with {_cost(v)}"
    return f"multiplier {v.multiplier:.3f} {_at_top(v)}"


def _cost(v: Evidence) -> str:
    """The noun for the ladders' x axis."""
    return "compute" if v.unit == "FLOPs" else "time"


def _at_top(v: Evidence) -> str:
    """The compute at which the verdict's multiplier is taken."""
    return f"at {format_flops(v.multiplier_flops, 2)} {v.unit}"


def _constant_multiplier(v: Evidence) -> float:
    """The multiplier of the constant hypothesis, the same at every compute."""
    return v.hypotheses["constant"].predictions[0].multiplier


def _small_slope(v: Evidence) -> str:
    """A remark where the slope is resolved but lies inside the margin of a constant gain."""
    largest = max(abs(end) for end in v.delta_gamma_interval)
    fraction = largest / abs(v.hypotheses["constant"].gamma[0])
    return f" Either way it is small: at most {fraction:.1%} of γ." if fraction < v.rule.margin else ""


def _in_sigma(penalty: float, sigma: float) -> str:
    """A loss in standard deviations of a rung; empty for noise-free tables, where it would be huge."""
    return f" ({penalty / sigma:.1f}σ)" if penalty < 1000 * sigma else ""


def _times(value: float) -> str:
    """A multiplier: 1.081× or 12.3×."""
    if math.isnan(value):
        return "an unknown factor"
    return f"{value:.3f}×" if value < 10 else f"{value:.3g}×"
