"""Verdicts in words: the sentence itself, and what would decide or undo it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from steepen.laws.verdict.sensitivity import MAX_EXTRA_DECADES, MAX_LOSS_PENALTY, MAX_RUNS_FACTOR

if TYPE_CHECKING:
    from steepen.laws.verdict.judge import HypothesisFit, Verdict


def sentence(verdict: Verdict) -> str:
    """One sentence that says the verdict and the numbers it rests on."""
    v = verdict
    low, high = v.delta_gamma_interval
    gain = f"Δγ = {v.delta_gamma:+.4f} ({low:+.4f} to {high:+.4f})"
    lead = f"{v.arm} against {v.reference}: {v.word}"
    sloped = v.p_slope < v.rule.level
    own_floors = v.p_exponent_hypothesis < v.rule.level
    if v.word in ("steeper", "floor") and _both_refuted(v):
        return f"{lead}. {_each_its_own(v)}{_behind(v)}."
    if v.word == "steeper":
        more = f"; a lower floor with the same exponent is refuted (p = {v.p_irreducible_hypothesis:.2g})"
        return f"{lead}. {gain}{more}{_behind(v)}."
    if v.word == "floor":
        return (
            f"{lead}. It gains with {_cost(v)} because its floor is lower (ΔE = {v.delta_e:+.4f}); a better"
            " exponent above a"
            f" common floor is refuted (p = {v.p_exponent_hypothesis:.2g})."
        )
    if v.word == "lower (constant)":
        drift = max(abs(low), abs(high)) / v.hypotheses["constant"].gamma[0]
        return (
            f"{lead}. It needs {_times(_constant(v))} less {_cost(v)} at every rung; {gain}, so the factor"
            " drifts by no more than"
            f" ×{10**drift:.3f} a decade."
        )
    if v.word == "shallower":
        return f"{lead}. {_loses(v, gain)}, {_standing(v)}."
    if v.word == "worse":
        return f"{lead}. It needs {_times(1 / _constant(v))} the {_cost(v)} at every rung, and {gain}."
    if sloped:
        far = [(name, v.hypotheses[name].predictions[-1]) for name in ("exponent", "irreducible")]
        says = " and ".join(f"{_times(p.multiplier)} ({name})" for name, p in far)
        return (
            f"{lead}. It gains with {_cost(v)}, but a better exponent"
            f" ({gain}; p = {v.p_exponent_hypothesis:.2g}) and a lower floor"
            f" with the same exponent (ΔE = {v.delta_e:+.4f}; p = {v.p_irreducible_hypothesis:.2g}) are both"
            " tenable; at"
            f" {format_flops(far[0][1].flops)} {v.unit} they say {says}.{_small(v)}"
        )
    if v.p_shift < v.rule.level:
        constant = v.hypotheses["constant"]
        side = "lower" if constant.log_a[1] < constant.log_a[0] else "higher"
        if own_floors:
            return (
                f"{lead}. It is {side} where it was measured ({_multiplier(v)}), but one floor for both is"
                f" refuted (p = {v.p_exponent_hypothesis:.2g}): floor and exponent both seem to differ,"
                " and may"
                " make up for each other here and not further on."
            )
        return (
            f"{lead}. It is {side} ({_multiplier(v)}), but {gain} leaves room for a"
            f" drift beyond ±{v.rule.margin:.1%} of γ, so constant or exponent is open."
        )
    return f"{lead}. No difference is resolved: {_multiplier(v)}, {gain}."


def what_would_change(verdict: Verdict) -> list[str]:
    """What would decide it, what would undo it, and which rungs it hangs on."""
    v = verdict
    lines: list[str] = []
    if v.word == "undecided" and v.p_slope < v.rule.level:
        lines += _tie_breakers(v)
    elif v.word == "undecided":
        reach = 0.5 * (v.delta_gamma_interval[1] - v.delta_gamma_interval[0])
        goal = v.rule.margin * abs(v.hypotheses["constant"].gamma[0])
        room = goal - abs(v.delta_gamma)  # which more runs may narrow, if the slopes are equal, and not move
        if reach > room > 0 and math.isfinite(reach):
            times = (reach / room) ** 2
            lines.append(
                f"more rungs in the same span: if the slopes are equal, about {times:.0f} times"
                " the runs bring Δγ's interval inside the margin"
                if times < MAX_RUNS_FACTOR
                else f"more runs in the same span will not do (over {MAX_RUNS_FACTOR} times as many)"
            )
        lines.append(
            f"another decade of {_cost(v)}: a drift of the multiplier shows in proportion to the span"
        )
    for tolerance in v.tolerance:
        where = f"top rung of {tolerance.ladder} ({format_flops(tolerance.flops)} {v.unit})"
        if tolerance.penalty_changing_verdict is not None:
            lines.append(
                f"re-sweep the learning rate at the {where}: a loss {tolerance.penalty_changing_verdict:.4f} too high"
                " there"
                f"{_in_sigma(tolerance.penalty_changing_verdict, v.sigma)} would make the verdict"
                f" {tolerance.changed_verdict}"
            )
        if tolerance.penalty_explaining_slope is not None:
            lines.append(
                f"a loss {tolerance.penalty_explaining_slope:.4f} too high at the {where} would by itself explain the"
                " difference in slope"
            )
        elif tolerance.could_explain_slope:
            lines.append(
                f"no error up to {MAX_LOSS_PENALTY:.0%} of the loss at the {where} would by itself explain the"
                " difference in slope"
            )
    changed = [out for out in v.leave_one_out if out.verdict != v.word]
    if changed:
        each = "; ".join(f"without {o.arm} at {format_flops(o.flops)}: {o.verdict}" for o in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        lines.append(f"it hangs on single rungs ({each}{more})")
    elif v.leave_one_out:
        lines.append("leaving out any one rung does not change it")
    return lines


def _tie_breakers(v: Verdict) -> list[str]:
    lines: list[str] = []
    d = v.separation
    if d.top_flops is not None and d.extra_decades:
        lines.append(
            f"another {d.extra_decades:.1f} decades: both ladders carried on to {format_flops(d.top_flops)} {v.unit}"
            f" ({d.extra_runs} more runs) tell the readings apart with 90% power"
        )
    elif d.top_flops is None:
        lines.append("no ladder within twelve more decades tells the readings apart at this noise")
    if d.three_sigma_flops is not None:
        lines.append(
            f"one further rung of each at {format_flops(d.three_sigma_flops)} {v.unit}: there the readings"
            " differ by 3σ"
        )
    dense = [
        f"about {math.ceil(factor)} times the {what}"
        for what, factor in (("rungs", d.rungs_factor), ("seeds", d.seeds_factor))
        if factor is not None and factor < MAX_RUNS_FACTOR
    ]
    if dense:
        lines.append(f"more runs in the same span: {', or '.join(dense)}")
    else:
        lines.append(f"more runs in the same span will not do (over {MAX_RUNS_FACTOR} times as many)")
    return lines


def _both_refuted(v: Verdict) -> bool:
    """Whether the arm has a floor and an exponent of its own."""
    return max(v.p_exponent_hypothesis, v.p_irreducible_hypothesis) < v.rule.level


def _each_its_own(v: Verdict) -> str:
    """Why neither reading holds, and the Δγ that needs neither."""
    low, high = v.delta_gamma_free_interval
    return (
        f"A common floor is refuted (p = {v.p_exponent_hypothesis:.2g}) and so is a common exponent"
        f" (p = {v.p_irreducible_hypothesis:.2g}); each with its own, Δγ = {v.delta_gamma_free:+.4f}"
        f" ({low:+.4f} to {high:+.4f})"
    )


def _loses(v: Verdict, gain: str) -> str:
    """Why the reference gains on a shallower arm: its exponent, its floor, or one of the two."""
    if _both_refuted(v):
        e, arm_e = v.hypotheses["free"].e
        return f"{_each_its_own(v)} and ΔE = {arm_e - e:+.4f}"
    if v.p_irreducible_hypothesis < v.rule.level:
        return (
            f"{gain}; a higher floor with the same exponent is refuted (p = {v.p_irreducible_hypothesis:.2g})"
        )
    if v.p_exponent_hypothesis < v.rule.level:
        return (
            f"It loses with {_cost(v)} because its floor is higher (ΔE = {v.delta_e:+.4f}); a smaller"
            f" exponent above a common floor is refuted (p = {v.p_exponent_hypothesis:.2g})"
        )
    return f"{gain}, or a higher floor with the same exponent (ΔE = {v.delta_e:+.4f})"


def _standing(v: Verdict) -> str:
    """Where a shallower arm stands now, and where it is overtaken."""
    if math.isnan(v.multiplier):
        return f"and {_multiplier(v)}"
    if v.multiplier <= 1:
        return f"and it already needs {_times(1 / v.multiplier)} the {_cost(v)} {_where(v)}"
    now = f"though it still saves {_cost(v)} ({_times(v.multiplier)}) {_where(v)}"
    if _both_refuted(v):
        return f"{now}; whether the saving lasts is open"
    exponent, floor = (_overtaken(v, v.hypotheses[name]) for name in ("exponent", "irreducible"))
    if v.p_irreducible_hypothesis < v.rule.level:
        return f"{now}; the saving is gone {exponent}"
    if v.p_exponent_hypothesis < v.rule.level:
        return f"{now}; by its floor the saving is gone {floor}"
    return f"{now}; the saving is gone {exponent} (exponent) or {floor} (floor)"


def _overtaken(v: Verdict, reading: HypothesisFit) -> str:
    """Where the laws of the exponent reading, or of the floor reading, meet."""
    (a, arm_a), gamma = reading.log_a, reading.gamma[0]
    if reading.hypothesis == "exponent":
        x = (arm_a - a) / v.delta_gamma
    else:
        # A higher floor uses up a smaller constant as that shrinks; without one the arm was never ahead.
        ahead, raised = math.exp(a) - math.exp(arm_a), reading.e[1] - reading.e[0]
        falls = gamma > 0 and raised > 0
        x = -math.inf if ahead <= 0 else math.log(ahead / raised) / gamma if falls else math.inf
    top = math.log(v.multiplier_flops / v.c0)
    if x <= top:
        return "already"
    if x - top > MAX_EXTRA_DECADES * math.log(10):
        return f"beyond {MAX_EXTRA_DECADES:.0f} more decades"
    return f"at {format_flops(v.c0 * math.exp(x))} {v.unit}"


def _behind(v: Verdict) -> str:
    """Where a steeper arm has yet to catch up."""
    if math.isnan(v.multiplier):
        return f"; {_multiplier(v)}"
    if v.multiplier >= 1:
        return ""
    return f", though it still needs {_times(1 / v.multiplier)} the {_cost(v)} {_where(v)}"


def _multiplier(v: Verdict) -> str:
    """The multiplier where both ladders have measurements, or why there is none."""
    if math.isnan(v.multiplier):
        return f"there is no multiplier {_where(v)}: a curve does not fall with {_cost(v)}"
    return f"multiplier {v.multiplier:.3f} {_where(v)}"


def _cost(v: Verdict) -> str:
    """What the ladders are measured along, as a word."""
    return "compute" if v.unit == "FLOPs" else "time"


def _where(v: Verdict) -> str:
    """The compute at which the verdict's multiplier is read."""
    return f"at {format_flops(v.multiplier_flops)} {v.unit}"


def _constant(v: Verdict) -> float:
    """The one multiplier of the constant reading, the same at every compute."""
    return v.hypotheses["constant"].predictions[0].multiplier


def _small(v: Verdict) -> str:
    """A remark where a slope is resolved but no larger than what may pass for a constant."""
    reach = max(abs(end) for end in v.delta_gamma_interval)
    share = reach / abs(v.hypotheses["constant"].gamma[0])
    return f" Either way it is small: at most {share:.1%} of γ." if share < v.rule.margin else ""


def _in_sigma(size: float, sigma: float) -> str:
    """A loss in standard deviations of a rung, unless the table is noise-free and the figure would be
    silly.
    """
    return f" ({size / sigma:.1f}σ)" if size < 1000 * sigma else ""


def format_flops(flops: float) -> str:
    """Compute as people write it: 1.2e21."""
    return f"{flops:.2g}".replace("e+", "e")


def _times(value: float) -> str:
    """A multiplier as people write it."""
    if math.isnan(value):
        return "an unknown factor"
    return f"{value:.3f}×" if value < 10 else f"{value:.3g}×"
