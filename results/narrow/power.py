"""What the runs of run.sh would decide, if the paper's effects were theirs too: shares of simulated tables.

    PYTHONPATH=src:tools python results/narrow/power.py [DRAWS]

Every table has the planned rungs and seeds, losses on a law of the published ladder, noise by depth
(`NOISE`), and .0016 of lack of fit at every rung. An arm's compute multiplier is the paper's at the lowest
budget of both; it grows by the paper's factor per decade, or by its square. A sweep is the authors' own, at
as many places as run.sh has, with the noise of these runs on it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from paper_claims import QUANTITIES, Run, Runs, by, noise_at

from steepen.laws.analysis import AnalysisRequest
from steepen.laws.ladder import read_ladders
from steepen.laws.verdict.judge import fit_ladders
from steepen.model.arms import find_arm
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.tables.table import table_from

LAW = (2.1, 1.47, 0.145)  # E, A at 1e15 FLOPs and γ: about the published ladder's
LACK_OF_FIT = 0.0016
NOISE = {4: 0.026, 5: 0.0063, 6: 0.0037, 7: 0.0046}  # by depth, between seeds of the former ladder
LADDERS: dict[str, tuple[str, str, float, float]] = {  # arm, reference, multiplier and growth of the paper
    # A star: the ladder's own runs, beside a variant of them.
    "operator-1 grows": ("operator-1", "vanilla", 1.12, 1.056),
    "growth grows, untied": ("untied-grow", "untied-2", 1.09, 1.052),
    "growth grows, tied": ("loop-grow", "loop-2", 1.05, 1.037),
    "all together grows": ("untied-grow", "vanilla", 1.30, 1.104),
    "untying is constant": ("untied-2", "loop-2", 1.08, 1.0),
    "no coda injection is worse": ("loop-2-no-coda-injection", "loop-2", 0.88, 1.0),
    "2/C/3 is worse": ("loop-2-nci-2-c-3", "loop-2", 0.86, 1.0),
    "random recurrence is worse": ("random-loop-grow", "loop-grow", 0.965, 1.0),
    "Vanilla's recipe is worse": ("operator-1", "operator-1*", 0.92, 1.0),
    "AdamW is worse": ("vanilla", "vanilla*", 0.6, 1.0),
    "width alone is constant": ("width-only-operator-1", "width-only-vanilla", 1.17, 1.0),
    "fp8 is no difference": ("vanilla", "vanilla*", 1.0, 1.0),
}
QUICKSTART = "preset mini, three arms"
PLANS, QUICK = ("d4 to d8", "all steps", QUICKSTART), ("operator-1 grows", "all together grows")
NOW = {4: 2, 5: 2, 6: 2, 7: 2, 8: 2}  # seeds by rung
TOP: dict[str, dict[int, int]] = {
    "vanilla": {9: 1, 10: 1, 12: 1}, "operator-1": {9: 1, 10: 1, 11: 1}, "untied-grow": {9: 1},
}  # fmt: skip
ABLATED = {
    "random-loop-grow": dict.fromkeys(NOW, 1), "loop-2-no-coda-injection": dict.fromkeys(NOW, 1),
    "loop-2-nci-2-c-3": dict.fromkeys((6, 7, 9), 1),
    "width-only-operator-1": dict.fromkeys((3, 4, 5, 6, 7), 1),
    "width-only-vanilla": dict.fromkeys((3, 4, 5, 6, 7), 1),
}  # fmt: skip
VARIANTS = {
    "Vanilla's recipe": dict.fromkeys(NOW, 1), "AdamW": dict.fromkeys((4, 5, 6), 1),
    "fp8": dict.fromkeys((5, 6, 8), 2),
}  # fmt: skip
# Our depths for the authors', whose noise the sweeps get.
FRESH, REPEATED, BUDGETS = {6: 5, 8: 6, 12: 8}, {6: 5, 8: 6, 10: 8}, (4, 5, 6, 7)
CONTEXT = StudyContext(load_preset("mini"), DatasetInfo("0" * 64, 4096, 10**9, 2_200_000))


def flops(arm: str, depth: int) -> float:
    """FLOPs of an arm's ladder run."""
    found = find_arm(arm.strip("*"))
    return CONTEXT.recipe(found).at(found, depth, CONTEXT.size_rule).flops.total


def seeds_of(arm: str, claim: str, plan: str) -> dict[int, int]:
    """Seeds by depth of one arm in one of `PLANS`; of an ablation, its own."""
    for word, own in VARIANTS.items():
        if claim.startswith(word) and arm == LADDERS[claim][0]:
            return own
    if arm in ABLATED:
        return ABLATED[arm]
    if plan == QUICKSTART:
        return dict.fromkeys(CONTEXT.preset.depths(find_arm(arm)), len(CONTEXT.preset.seeds))
    if plan == PLANS[0]:
        return NOW
    return {4: 4, 5: 4, 6: 4, 7: 2, 8: 2} | TOP.get(arm.strip("*"), {9: 1, 10: 1})


def share(claim: str, power: float, plan: str, draws: int) -> Counter[str]:
    """How often each word is said of a claim's arm, growth and range together."""
    arm, reference, multiplier, growth = LADDERS[claim]
    generator = np.random.default_rng(11)
    beside = CONTEXT.preset.arms if plan == QUICKSTART else ("vanilla", "operator-1", "untied-2")
    others = [one for one in beside if one not in (arm, reference)]
    plans = {one: seeds_of(one, claim, plan) for one in (arm, reference, *others)}
    start = max(flops(one, min(plans[one])) for one in (arm, reference))
    found: Counter[str] = Counter()
    for _ in range(draws):
        rows: list[tuple[Any, ...]] = []
        for one, seeds in plans.items():
            for depth, count in seeds.items():
                cost = flops(one, depth)
                worth = cost
                if one == arm:
                    worth *= multiplier * growth ** (power * math.log10(cost / start))
                expected = LAW[0] + LAW[1] * (worth / 1e15) ** -LAW[2] + generator.normal(0, LACK_OF_FIT)
                rows += [
                    (one, cost, expected + generator.normal(0, noise_at(NOISE, depth)), seed)
                    for seed in range(count)
                ]
        columns = dict(zip(("arm", "flops", "loss", "seed"), zip(*rows, strict=True), strict=True))
        settings = AnalysisRequest(reference, method="joint", adjust=False)
        judge = fit_ladders(read_ladders(table_from(columns, "simulated")), settings)
        [verdict] = judge.judge([(reference, arm)])
        found[verdict.better] += 1
        found[verdict.growth] += 1
    return found


def planned(place: int, runs: Runs) -> list[tuple[Run, int]]:
    """As many of the authors' runs of a quantity as run.sh makes, each with the depth whose noise it gets."""
    if place == 0:
        return [(run, FRESH[run.depth]) for run in runs if run.depth in FRESH and run.x <= 3]
    if place == 1:
        sweeps = list(by(runs, lambda run: run.budget).values())
        near = [(run, depth) for own, depth in zip(sweeps, BUDGETS, strict=False) for run in own[1:4]]
        return near
    if place == 2:
        ends = {min(run.budget for run in runs if run.depth == 8), max(run.budget for run in runs)}
        return [(r, 5) for r in runs if r.depth == 8 and r.budget in ends and r.x in (0.1, 0.2, 0.3, 0.4)]
    decays = (0.8,) if place == 3 else (0.2, 0.4, 0.8, 1.6)
    return [
        (run, REPEATED[run.depth])
        for run in runs if run.depth in REPEATED and run.x in (1, 2, 4) and run.y in decays
    ]  # fmt: skip


def share_of_sweep(place: int, draws: int) -> Counter[str]:
    """How often each verdict is given on a quantity, with the authors' runs and our noise."""
    generator = np.random.default_rng(12)
    quantity = QUANTITIES[place]
    plan = planned(place, quantity.theirs())
    found: Counter[str] = Counter()
    for _ in range(draws):
        runs = [
            replace(run, depth=depth, loss=run.loss + generator.normal(0, noise_at(NOISE, depth)))
            for run, depth in plan
        ]
        found[quantity.measured(runs, NOISE)[1]] += 1
    return found


def main(draws: int) -> None:
    """Print the shares of every claim."""
    for place, quantity in enumerate(QUANTITIES):
        print(f"{quantity.claim}: {said(share_of_sweep(place, draws), draws)}", flush=True)
    for claim, (arm, _, _, growth) in LADDERS.items():
        variant = arm in ABLATED or any(word in claim for word in VARIANTS)
        plans = PLANS[:1] if variant else PLANS if claim in QUICK else PLANS[:2]
        for plan, power in product(plans, (1, 2) if growth != 1 else (1,)):
            words = said(share(claim, power, plan, draws), draws)
            print(f"{claim} [{plan}; ×{growth**power:.3f} a decade]: {words}", flush=True)


def said(words: Counter[str], draws: int) -> str:
    """The words by their shares."""
    return ", ".join(f"{word} {count / draws:.0%}" for word, count in words.most_common())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
