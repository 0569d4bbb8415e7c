"""The transfer study: the loss penalty of training an arm with another arm's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.recipe.paper_tables import INITIAL
from steepen.recipe.recipe import Recipe
from steepen.studies.answer import Draft, Study, Work
from steepen.studies.cells import Plan, measure, plan_grid, run_concurrently, table
from steepen.studies.context import Arms, StudyContext, find_arms
from steepen.studies.ladders.ladder import compare_ladders
from steepen.studies.ladders.ladder_runs import LadderSpec, ladder_spec
from steepen.studies.registry import choose_parts
from steepen.studies.stages.chain_tuning import has_injection

SECTION = (
    "Appendix A.4.1, transfer probe, and Appendix B.2, Recipe Tuning Changes the Apparent Scaling Advantage"
)


def transfer(
    context: StudyContext,
    *,
    arms: Arms = (),
    source: str = "vanilla",
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (),
    parts: Sequence[str] = (),
) -> Study:
    """Table "Transfer probe from the Vanilla recipe" and figure "Operator-1 recipe ablations".

    `probe`: every arm at the base size and tokens with its own base values and with the source's (α at its
    default, unless the source has one), which gives the transfer regret. `ladder`: the arms' ladders with
    both, judged against the source's own: does a transferred recipe turn a better exponent into a better
    constant?
    """
    wanted = choose_parts("transfer", parts)
    source_arm = find_arm(source)
    chosen = [arm for arm in find_arms(arms or ("operator-1",)) if arm.name != source_arm.name]
    if not chosen:
        raise UsageError("give at least one arm besides the one whose recipe is transferred.")
    ladders = _ladders(context, source_arm, chosen, rungs)
    works = {
        "probe": _probe(context, source_arm, chosen),
        "ladder": compare_ladders(context, ladders, source_arm.name, seeds=seeds, whole=False),
    }
    found: list[Draft] = yield from run_concurrently([works[part] for part in wanted])
    draft = Draft()
    for part in found:
        draft.add(part)
    draft.method = found[-1].method
    question = (
        f"What does {source_arm.name}'s recipe cost {', '.join(arm.name for arm in chosen)}, and does it "
        "change their fitted exponents?"
    )
    return draft.answer("transfer", question, SECTION)


def _probe(context: StudyContext, source_arm: Arm, chosen: Sequence[Arm]) -> Work[Draft]:
    source, threshold = source_arm.name, context.preset.grids.chain.threshold

    def plan(arm: Arm, recipe: str) -> Plan:
        own = context.recipe(arm) if recipe == "own" else transferred_recipe(context, source_arm, arm)
        return context.base_run(arm, own), {}

    members = (source_arm, *chosen)
    plans = plan_grid(plan, arm=members, recipe=("own", "transferred"))
    cells = yield from measure(context, plans, required=True)
    draft = Draft(
        values={"probe": {}},
        method=[f"Base size on {context.preset.fixed_tokens:,} tokens, one seed."],
        runs=cells.column("run"),
    )
    rows: list[dict[str, Any]] = []
    base = cells.where(arm=source, recipe="transferred")[0].loss
    for name in (arm.name for arm in members):
        own, transferred = (cells.where(arm=name, recipe=kind)[0].loss for kind in ("own", "transferred"))
        regret = transferred - own
        draft.values["probe"][name] = {"transferred": transferred, "own": own, "regret": regret}
        rows.append({
            "arm": name, "transferred loss": transferred,
            f"Δ against {source} ×10³": 1e3 * (transferred - base), "own loss": own,
            "regret ×10³": 1e3 * regret,
        })  # fmt: skip
        if name == source:
            continue
        draft.findings.append(_sentence(name, source, regret, threshold))
        if transferred < own - threshold:
            draft.warnings.append(
                f"{source}'s recipe is better for {name} than its own, which is not tuned for this size "
                f"and data: tune it first (`steepen study fit-recipe --arms {name}`)"
            )
    caption = "Regret: loss with the transferred recipe minus loss with the arm's own, at the base size."
    draft.tables.append(table(f"Transfer probe from the {source} recipe", rows, caption))
    return draft


def _sentence(name: str, source: str, regret: float, threshold: float) -> str:
    if abs(regret) < threshold:
        return (
            f"{name} with {source}'s recipe ties with its own at the base size ({regret:+.4f} nats, less "
            f"than the {threshold:g} that one run each resolves)."
        )
    verb = "gains" if regret < 0 else "loses"
    return f"{name} with {source}'s recipe {verb} {abs(regret):.4f} nats at the base size."


def _ladders(
    context: StudyContext, source_arm: Arm, chosen: Sequence[Arm], rungs: Sequence[int]
) -> list[LadderSpec]:
    """The source's ladder, and every other arm's with its own recipe and with the transferred one."""
    ladders = [ladder_spec(context, source_arm, rungs)]
    for arm in chosen:
        own = ladder_spec(context, arm, rungs)
        transferred = transferred_recipe(context, source_arm, arm)
        ladders += [own, replace(own, recipe=transferred, variant=f"{source_arm.name} recipe")]
    return ladders


def transferred_recipe(context: StudyContext, source_arm: Arm, arm: Arm) -> Recipe:
    """An arm's recipe with another's base values; its own tokens, rule for the rate and growth stay.

    α is the initial one where the source arm has no injection (the table's caption:
    "injection variants keep the default").
    """
    own, source = context.recipe(arm), context.recipe(source_arm)
    alpha = source.base.injection_weight if has_injection(source_arm) else INITIAL.injection_weight
    return replace(
        own, base=replace(source.base, injection_weight=alpha), learning_rate_base=source.learning_rate_base
    )
