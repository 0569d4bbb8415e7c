"""The ladder study: does an arm's scaling law have a better exponent, a better constant, or neither?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal

from steepen.errors import UsageError
from steepen.launch.cost_estimate import Budget
from steepen.laws.analysis import LadderAnalysis
from steepen.laws.next_runs import Question
from steepen.laws.stopping import Stopping, StoppingRule
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.judge import TableJudge
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.runs.spec import expected_flops
from steepen.studies.answer import Draft, Study, Work
from steepen.studies.context import Arms, StudyContext, find_arms
from steepen.studies.ladders import ladder_runs, until_decided
from steepen.studies.ladders import verdict_report as report
from steepen.studies.ladders.ladder_runs import LadderSpec, MeasuredLadder
from steepen.studies.scores.downstream import ladder_scores

SECTION = "Section 4.2, Improving the Exponent of the Scaling Laws"


def ladder(
    context: StudyContext,
    *,
    arms: Arms = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (),
    reference: str | None = None,
    noise: float | None = None,
    c0: float | None = None,
    lr_regret: float | None = None,
    until: Literal["decided"] | None = None,
    question: Question | None = None,
    effect: float | None = None,
    budget: str | None = None,
) -> Study:
    """Section "Improving the Exponent of the Scaling Laws" (4.2), with the runtime figure of the appendix.

    Trains every arm's compute-optimal recipe at every rung and seed, fits one law to each ladder, and judges
    each against the reference, as a function of FLOPs and of training seconds. `c0` is the compute at which
    the constants A are quoted; by default that of the reference's run at the depth where recipes are tuned.
    `lr_regret` is the loss that a learning rate off by 2× costs (`regret` of a sweep).

    `until` decided makes batches of runs, tests after each, and stops when the `question` is answered,
    an `effect` of this size would have shown, or the `budget` is spent (that of the whole ladder by default).
    """
    chosen = find_arms(arms or context.preset.arms)
    base = _reference(context, reference, [arm.name for arm in chosen])
    if base not in [arm.name for arm in chosen]:
        chosen.insert(0, find_arm(base))
    ladders = [ladder_runs.ladder_spec(context, arm, rungs) for arm in chosen]
    others = [arm.name for arm in chosen if arm.name != base]
    draft = yield from compare_ladders(
        context, ladders, base, seeds=seeds, noise=noise, c0=c0, lr_regret=lr_regret,
        until=_stopping(base, question, effect, budget, until),
    )  # fmt: skip
    asked = (
        f"{'Does' if len(others) == 1 else 'Do'} {', '.join(others)} scale better than {base}, "
        "and is it the exponent or only the constant?"
    )
    return draft.answer("ladder", asked, SECTION)


def _stopping(
    reference: str, question: Question | None, effect: float | None, budget: str | None, until: str | None
) -> tuple[StoppingRule, Budget] | None:
    if until is None:
        if question is not None or effect is not None:
            raise UsageError("`question` and `effect` are of ladders that run `until` decided.")
        return None
    limit = Budget() if budget is None else Budget.parse(budget)
    most = limit.flops or limit.seconds or math.inf
    return StoppingRule(reference, question or "grows", effect or 1.1, budget=most), limit


def _reference(context: StudyContext, requested: str | None, names: list[str]) -> str:
    if requested is not None:
        return find_arm(requested).name
    wanted = find_arm(context.preset.reference).name
    return wanted if wanted in names or len(names) < 2 else names[0]


def compare_ladders(
    context: StudyContext,
    ladders: Sequence[LadderSpec],
    reference: str,
    *,
    seeds: Sequence[int] = (),
    noise: float | None = None,
    c0: float | None = None,
    lr_regret: float | None = None,
    until: tuple[StoppingRule, Budget] | None = None,
    whole: bool = True,
) -> Work[Draft]:
    """Run some ladders and judge them against one of them. Shared by several studies.

    Where they are the `whole` of a study they are also judged per second, and what it costs to fit a recipe
    is counted.
    """
    possible, warnings = ladder_runs.ladders_with_enough_rungs(context, ladders, reference)
    unused = sorted({*context.recipes, *context.choice.files} - {ladder.arm.name for ladder in possible})
    if unused:
        warnings.append(f"a recipe was given for {', '.join(unused)}, which this study does not measure")
    draft = Draft(warnings=warnings)
    stopping: Stopping | None = None
    if until is None:
        measured: list[MeasuredLadder] = yield from ladder_runs.run_ladders(context, possible, seeds)
    else:
        measured, stopping = yield from until_decided.run_until_decided(
            draft, context, possible, seeds or context.preset.seeds, *until, noise
        )
    borrowed = _borrowed_recipes(context, possible)
    if borrowed:
        draft.cautions.append(_borrowed_caution(context, possible, borrowed, cost=whole))
    # Constants A compare at a compute that the ladders span; elsewhere a difference of exponents is in them.
    # By default it is that of the reference's run at the depth at which its recipe was tuned.
    base = next(ladder for ladder in possible if ladder.label == reference)
    at = c0 or base.expected_flops(context, base.recipe.base_depth)
    known: dict[str, Any] = {"noise": noise, "lr_regret": lr_regret}
    analysis = ladder_runs.judge_ladders(context, measured, reference, c0=at, **known)
    if stopping is not None:
        analysis = _at_levels(analysis, stopping)
        analysis = replace(analysis, verdicts=analysis.verdicts | stopping.verdicts(lr_regret))
    report.add_analysis(draft, analysis, measured)
    draft.warnings += analysis.warnings
    if whole:
        _add_times(draft, context, measured, analysis, known, stopping)
    draft.warnings += ladder_runs.repeated_data_warnings(measured)
    scores = ladder_scores([one.scores for one in measured], reference)
    draft.findings += scores.findings
    draft.panels += scores.panels
    draft.tables += [report.recipes_table(measured), *scores.tables, report.runs_table(measured)]
    draft.values["what_would_change"] = [
        f"{name}: {change}"
        for name, verdict in analysis.verdicts.items()
        for change in verdict.what_would_change
    ]
    draft.method += _method(measured, analysis, borrowed, stopping)
    draft.runs += [record.run for one in measured for record in one.records]
    return draft


def _method(
    measured: Sequence[MeasuredLadder],
    analysis: LadderAnalysis,
    borrowed: dict[str, str],
    stopping: Stopping | None,
) -> list[str]:
    """How the ladders were measured and judged, one sentence each."""
    recipes = "at their own recipes"
    if borrowed:
        recipes += f" ({', '.join(f'{arm}: that of {owner}' for arm, owner in borrowed.items())})"
    records = [record for one in measured for record in one.records]
    reference = analysis.request.reference
    low, high = analysis.primary_fit.arms[reference].flops_range
    seed_count = len({record.spec.seed for record in records})
    found = [
        f"{len(records)} runs: {len(measured)} ladders {recipes}, {seed_count} "
        f"seed{'s'[: seed_count > 1]} per rung; {reference} spans {low:.3g} to {high:.3g} FLOPs.",
        "FLOPs are those executed, pass by pass, with causal attention and without the input embedding.",
        "One irreducible loss E and every ladder's A and γ are fitted jointly by least squares; the "
        "paper's method (E from the reference by Huber loss, then straight lines) is beside it.",
    ]
    if stopping is not None:
        found.append(
            f"Runs were made until the question ({stopping.rule.question}) was decided. An arm's words and "
            "intervals are those of the look that closed it, with the runs so far and at the level that it "
            "could spend, so that stopping is accounted for; laws and figures have all runs."
        )
    return found


def _at_levels(analysis: LadderAnalysis, stopping: Stopping) -> LadderAnalysis:
    """The analysis with every arm judged at the level of the look that closed it.

    What else is asked of the fit, such as what hangs on E, is asked at the strictest of these levels.
    """
    reference, levels = analysis.request.reference, {name: stopping.level(name) for name in analysis.verdicts}

    def judge_at(level: float) -> TableJudge:
        settings = replace(analysis.judge.settings, level=level, adjust=False)
        return replace(analysis.judge, settings=settings)

    found: dict[str, Verdict] = {}
    for name, level in levels.items():
        [found[name]] = judge_at(level).judge([(reference, name)])
    return replace(
        analysis, verdicts=found, judge=judge_at(min(levels.values())) if levels else analysis.judge
    )


def _add_times(
    draft: Draft,
    context: StudyContext,
    measured: Sequence[MeasuredLadder],
    analysis: LadderAnalysis,
    known: dict[str, Any],
    stopping: Stopping | None,
) -> None:
    """Add the same ladders as functions of training seconds, where every depth took another time."""
    merged = [one.spec.label for one in measured if one.depths_of_equal_time]
    if merged:
        draft.warnings.append(
            f"no verdict per second: two depths of {', '.join(merged)} took the same time, within 1%"
        )
        return
    timed = ladder_runs.judge_ladders(context, measured, analysis.request.reference, by="seconds", **known)
    if stopping is not None:
        timed = _at_levels(timed, stopping)
    report.add_analysis(draft, timed, measured)
    draft.warnings += [f"per second: {note}" for note in timed.warnings if note not in analysis.warnings]
    draft.warnings += _time_warnings([record for one in measured for record in one.records])


def _borrowed_recipes(context: StudyContext, ladders: Sequence[LadderSpec]) -> dict[str, str]:
    """Arms that are trained with the recipe of another arm, by name."""
    own = {*context.recipes, *context.choice.files}
    arms = [ladder.arm for ladder in ladders]
    return {arm.name: arm.recipe for arm in arms if arm.recipe != arm.name and arm.name not in own}


def _borrowed_caution(
    context: StudyContext, ladders: Sequence[LadderSpec], borrowed: dict[str, str], *, cost: bool
) -> str:
    """Whose recipe each arm borrows, and the command that fits its own, with what it takes."""
    arms = ", ".join(f"{arm} uses {owner}'s" for arm, owner in borrowed.items())
    first = next(ladder.arm for ladder in ladders if ladder.arm.name in borrowed)
    what = "fits one (--dry-run counts its cost)"
    if cost:  # seconds of simulation, so not for every part of a study of many ladders
        runs, flops = _cost_of_fitting_a_recipe(context, first)
        what = f"fits one with about {runs} runs, {flops:.2g} FLOPs"
    return (
        f"Without a recipe of their own: {arms}. A mistuned arm looks worse than it is; `steepen study "
        f"fit-recipe --arms {_name_on_the_command_line(first)} --preset {context.preset.name}` {what}."
    )


def _cost_of_fitting_a_recipe(context: StudyContext, arm: Arm) -> tuple[int, float]:
    """Runs and FLOPs of `fit-recipe`, estimated by leading it through synthetic records."""
    from steepen.studies.driver.dry_run import simulate_study
    from steepen.studies.stages.fit_recipe import fit_recipe
    from steepen.studies.synthetic import SIMULATED_RECORDS

    # With too little data for a stage: what was requested so far.
    found = simulate_study(fit_recipe(context, arms=[arm]), None, stand_in=SIMULATED_RECORDS[0])
    return len(found.unfinished), sum(map(expected_flops, found.unfinished.values()))


def _name_on_the_command_line(arm: Arm) -> str:
    """The arm's name where it is a built-in one; else the class of its block, or a place for its name."""
    try:
        return find_arm(arm.name).name
    except UsageError:
        return arm.block if isinstance(arm.block, str) and ":" in arm.block else "MODULE:ARM"


def _time_warnings(records: Sequence[RunRecord]) -> list[str]:
    """Why the seconds of these runs may not compare."""
    warnings: list[str] = []
    hardware = sorted({_hardware(record.hardware) for record in records})
    if len(hardware) > 1:
        warnings.append(f"runs are of different hardware ({', '.join(hardware)}): times do not compare")
    if ran_on_shared_machine(records):
        warnings.append(
            "runs shared their machine (a CPU, or several at a time on one host): their seconds include "
            "the others' load, so verdicts per second are weaker than those per FLOP"
        )
    return warnings


def ran_on_shared_machine(records: Sequence[RunRecord]) -> bool:
    """Whether some run was on a CPU, or overlapped in time with another run on its host."""
    if any(record.hardware.get("device") == "cpu" for record in records):
        return True
    spans: dict[str, list[tuple[float, float]]] = {}
    for record in {record.run: record for record in records if record.finished}.values():
        end = datetime.fromisoformat(record.finished).timestamp()
        spans.setdefault(str(record.hardware.get("host")), []).append((end - record.seconds_total, end))
    # Ends are in whole seconds, so a run may seem to start up to 2 s before the one it followed ended.
    return any(
        later[0] < earlier[1] - 2 for own in spans.values() for earlier, later in pairwise(sorted(own))
    )


def _hardware(hardware: dict[str, Any]) -> str:
    return str(hardware.get("name") or hardware.get("host") or hardware.get("device") or "unknown")
