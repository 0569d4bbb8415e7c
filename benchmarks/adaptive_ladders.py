"""Ladders that are run until their question is decided, against fixed ones of equal power; and a replay.

    python benchmarks/adaptive_ladders.py [draws]             # all
    python benchmarks/adaptive_ladders.py [draws] simulated   # known truth, by scale, noise and truth
    python benchmarks/adaptive_ladders.py [draws] mini        # one scale of them: mini or paper
    python benchmarks/adaptive_ladders.py [draws] arms        # two arms, of which one is decided early
    python benchmarks/adaptive_ladders.py replayed            # the authors' 58 runs, bought one by one

`jobs=2` uses that many processes. The lack of fit of a rung is drawn once: further seeds do not change it.
The effect that is asked for is the one that the fixed ladder finds with a power of .9, by simulation.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
from laws_calibration import RULE, VANILLA, Law, Scenario, fit_without_outliers, judge, simulate

import steepen
from steepen.laws.fits.compute_law import AnalysisRequest
from steepen.laws.ladder import Ladder, make_ladder, read_ladders
from steepen.laws.next_runs import QUESTIONS, Offer, Question
from steepen.laws.stopping import Stopping, StoppingRule
from steepen.laws.verdict.judge import fit_ladders
from steepen.laws.verdict.questions import p_values
from steepen.requests.tables import as_table
from steepen.tables.clean_table import Cleaning, clean

MAX_SEEDS = 5
FIRST_SEED = 1001  # the limits of stopping.py were chosen on smaller ones
NO_CLAIM = ("not resolved", "no difference", "undecided", "constant")
REPLAY_PART = 0.45  # of the FLOPs, which may be spent
REPLAY_EFFECT: dict[Question, float] = {"better": 1.1, "grows": 1.05}
MINI: Law = (2.44, math.exp(0.0229) * (5.926e15 / 1e18) ** 0.21, 0.21)  # of a trained ladder at this scale


@dataclass(frozen=True)
class Scale:
    """A fixed ladder of two arms, and the noise of its runs."""

    name: str
    flops: tuple[float, ...]
    seeds: int
    law: Law
    seed_sd: tuple[float, ...]  # at the fixed ladder's rungs
    lack_of_fit: float
    start: int = 4  # rungs, with two seeds each

    @property
    def cost(self) -> float:
        """Of the fixed ladder."""
        return 2 * self.seeds * sum(self.flops)

    def scenario(self, factor: float) -> Scenario:
        """The fixed ladder of an arm whose multiplier is 1.1 at the bottom and grows by a factor a decade."""
        return Scenario(
            self.name, np.array(self.flops), self.law, self.arm(1.1, factor), 1,
            (self.seeds,) * len(self.flops), np.array(self.seed_sd), self.lack_of_fit,
        )  # fmt: skip

    def arm(self, multiplier: float, factor: float) -> Law:
        """The law of an arm with a multiplier at the bottom rung, and its growth per decade."""
        e, a, gamma = self.law
        steeper = gamma * (1 + math.log(factor) / math.log(10))
        low = self.flops[0]
        # The loss of the arm at low/multiplier is that of the reference at low.
        return e, a * (low / 1e18) ** -gamma * (low / multiplier / 1e18) ** steeper, steeper


def paper(name: str, sd: float, tau: float) -> Scale:
    rungs = (3.252e17, 1.056e18, 2.925e18, 6.743e18, 1.4977e19, 3.060e19, 5.572e19, 1.0063e20)
    return Scale(f"paper, {name}", rungs, 2, VANILLA, (sd,) * 8, tau)


def mini(name: str, low: float, high: float, tau: float) -> Scale:
    rungs = np.geomspace(8.8e13, 5.9e15, 8)
    return Scale(
        f"mini, {name}", tuple(rungs.tolist()), 2, MINI, tuple(np.geomspace(low, high, 8).tolist()), tau
    )


SCALES = (
    paper("σ .002, τ .001", 2e-3, 1e-3),
    paper("σ .002, τ .002", 2e-3, 2e-3),
    mini("σ .005, τ .004", 5e-3, 5e-3, 4e-3),
    mini("σ .05 to .005, τ .004", 5e-2, 5e-3, 4e-3),
)


@cache
def asked_effect(scale: Scale, draws: int = 400) -> float:
    """The growth per decade that the fixed ladder finds with a power of .9."""
    low, high = 1.005, 2.0
    for _ in range(9):
        middle = math.sqrt(low * high)
        tables = simulate(scale.scenario(middle), draws, np.random.default_rng(5))
        found = p_values(judge(fit_without_outliers(tables), 1), RULE)
        power = float((found.growth(0.05) == "grows").mean())
        low, high = (low, middle) if power >= 0.9 else (middle, high)
    return high


@dataclass
class World:
    """Runs that can be bought: their losses follow the laws, with a scale's noise."""

    scale: Scale
    laws: dict[str, Law]
    rng: np.random.Generator
    runs: dict[str, list[tuple[float, float]]] = field(default_factory=dict[str, list[tuple[float, float]]])
    off: dict[tuple[str, float], float] = field(default_factory=dict[tuple[str, float], float])
    cost: float = 0.0

    def buy(self, arm: str, flops: float) -> None:
        """Make a run."""
        e, a, gamma = self.laws[arm]
        key = (arm, round(math.log(flops), 6))
        if key not in self.off:
            self.off[key] = self.scale.lack_of_fit * self.rng.standard_normal()
        sd = math.exp(float(np.interp(math.log(flops), np.log(self.scale.flops), np.log(self.scale.seed_sd))))
        loss = e + a * (flops / 1e18) ** -gamma + self.off[key] + sd * self.rng.standard_normal()
        self.runs.setdefault(arm, []).append((flops, max(loss, 1e-6)))
        self.cost += flops

    def ladders(self) -> dict[str, Ladder]:
        """The runs so far."""
        found: dict[str, Ladder] = {}
        for arm, runs in self.runs.items():
            flops, loss = (np.array(part) for part in zip(*runs, strict=True))
            found[arm] = make_ladder(arm, flops, loss)
        return found

    def offers(self) -> list[Offer]:
        """Seeds of the fixed ladder's rungs and of those between them."""
        rungs = np.array(self.scale.flops)
        grid = np.sort(np.concatenate([rungs, np.sqrt(rungs[1:] * rungs[:-1])])).tolist()
        found: list[Offer] = []
        for arm in self.laws:
            for flops in grid:
                have = sum(abs(flops / one - 1) < 1e-6 for one, _ in self.runs.get(arm, ()))
                if have < MAX_SEEDS:
                    found.append(Offer(arm, flops, flops, MAX_SEEDS - have))
        return found


def until_decided(
    seed: int, scale: Scale, laws: dict[str, Law], rule: StoppingRule
) -> tuple[Stopping, World]:
    """The looks and the runs of a ladder that is run until every arm is decided."""
    world = World(scale, laws, np.random.default_rng(seed))
    for flops in scale.flops[: scale.start]:
        for arm in laws:
            for _ in range(2):
                world.buy(arm, flops)
    stopping = Stopping(rule)
    while True:
        look = stopping.look(world.ladders(), world.offers(), world.cost)
        if not look.batch:
            return stopping, world
        for offer in look.batch:
            world.buy(offer.arm, offer.flops)


def one_ladder(
    seed: int, scale: Scale, laws: dict[str, Law], rule: StoppingRule
) -> tuple[str, float, int, str]:
    """The word, the cost, the looks and why it stopped, of a ladder that is run until it is decided."""
    stopping, world = until_decided(seed, scale, laws, rule)
    end = stopping.closed["arm"]
    return end.word, world.cost, len(stopping.looks), str(end.closed)


def final_words(
    seed: int, scale: Scale, laws: dict[str, Law], rule: StoppingRule
) -> dict[str, tuple[str, str, str]]:
    """Of every arm: the word of its look, of its verdict, and of all runs at the strictest of the levels."""
    stopping, _ = until_decided(seed, scale, laws, rule)
    final, verdicts = stopping.judge, stopping.verdicts()
    assert final is not None
    settings = replace(final.settings, level=min(map(stopping.level, stopping.closed)), adjust=False)
    strictest = replace(final, settings=settings)
    asked = strictest.ask([(rule.reference, name) for name in stopping.closed])
    return {
        name: (end.word, verdicts[name].growth, one.answers(one.levels)[1])
        for (name, end), one in zip(stopping.closed.items(), asked, strict=True)
    }


def several_arms(draws: int, jobs: int) -> None:
    """Arms that are decided at different looks: are the verdicts those of the looks, and how often false?"""
    print(f"\nTwo arms, question grows, {draws} draws each")
    head = ("scale and noise", "truth", "arm", "false", "found", "verdict the same", "with one level: found")
    print("{:<28}{:<14}{:<7}{:>7}{:>7}{:>18}{:>23}".format(*head))
    with ProcessPoolExecutor(jobs) as pool:
        for scale in (SCALES[0], SCALES[2]):
            effect = asked_effect(scale)
            rule = StoppingRule("reference", "grows", effect, budget=1.5 * scale.cost)
            sure, grows, same = scale.arm(1.1, 1 + 2 * (effect - 1)), scale.arm(1.1, effect), scale.law
            for truth, laws in (
                ("grows, grows", {"sure": sure, "arm": grows}), ("grows, null", {"sure": sure, "arm": same}),
                ("null, null", {"sure": same, "arm": same}),
            ):  # fmt: skip
                every = {"reference": scale.law, **laws}
                work = partial(final_words, scale=scale, laws=every, rule=rule)
                found = list(pool.map(work, range(FIRST_SEED, FIRST_SEED + draws), chunksize=4))
                for name, law in laws.items():
                    words = [one[name] for one in found]
                    wrong = ("grows", "shrinks") if law is same else ("shrinks",)
                    false = np.mean([word[1] in wrong for word in words])
                    right, one_level = (np.mean([word[k] == "grows" for word in words]) for k in (1, 2))
                    equal = np.mean([word[0] == word[1] for word in words])
                    print(
                        f"{scale.name:<28}{truth:<14}{name:<7}{false:7.3f}{right:7.3f}{equal:18.3f}"
                        f"{one_level:23.3f}", flush=True,
                    )  # fmt: skip


def simulated(draws: int, jobs: int, scales: Sequence[Scale] = SCALES) -> None:
    """Error rates, power and cost by scale, noise and truth."""
    print(f"\nRun until decided, question grows, {draws} draws each")
    head = ("scale and noise", "truth", "asked", "false", "found", "FLOPs/fixed", "±", "looks")
    print("{:<28}{:<12}{:>7}{:>7}{:>7}{:>12}{:>7}{:>7}".format(*head), " why it stopped")
    with ProcessPoolExecutor(jobs) as pool:
        for scale, effect in zip(scales, pool.map(asked_effect, scales), strict=True):
            rule = StoppingRule("reference", "grows", effect, budget=scale.cost)
            truths = {
                "null": scale.law, "1.1x": scale.arm(1.1, 1.0), "grows": scale.arm(1.1, effect),
            }  # fmt: skip
            for truth, law in truths.items():
                laws = {"reference": scale.law, "arm": law}
                work = partial(one_ladder, scale=scale, laws=laws, rule=rule)
                found = list(pool.map(work, range(FIRST_SEED, FIRST_SEED + draws), chunksize=8))
                words = [word for word, *_ in found]
                right = {"grows"} if truth.startswith("grows") else {"constant"}
                false = sum(word not in (*right, "undecided") for word in words) / draws
                power = sum(word in right for word in words) / draws
                costs = np.array([one[1] for one in found]) / scale.cost
                cost, error = costs.mean(), costs.std() / math.sqrt(draws)
                looks = sum(one[2] for one in found) / draws
                why = {reason: sum(one[3] == reason for one in found) for reason in {one[3] for one in found}}
                ends = ", ".join(f"{reason} {count / draws:.2f}" for reason, count in sorted(why.items()))
                print(
                    f"{scale.name:<28}{truth:<12}{effect:7.3f}{false:7.3f}{power:7.3f}{cost:12.3f}{error:7.3f}"
                    f"{looks:7.1f}  {ends}", flush=True,
                )  # fmt: skip


def replayed(jobs: int) -> None:
    """The full table's answers for arms that are claims there, from every starting pair of rungs.

    The budget is a part of the FLOPs of the ladders involved: vanilla's and those of the claims.
    """
    ladders = read_ladders(clean(as_table("paper:fineweb"), Cleaning()))
    fitted: Any = steepen.fit("paper:fineweb", reference="vanilla", method="joint", draws=100)
    full = fitted.verdicts
    pairs = list(combinations(range(min(len(one.flops) for one in ladders.values())), 2))
    below = np.array([top < pairs[-1][1] for _, top in pairs])
    print(
        f"\nThe authors' runs, bought one by one, for {REPLAY_PART:.0%} of the FLOPs of the ladders involved"
    )
    print(f"from {len(pairs)} starting pairs of rungs; without top: the {below.sum()} without a highest rung")
    print("pairs with one: part of the FLOPs that the start takes; sets of runs to buy that have all words")
    head = ("question", "arm", "full table", "same", "other", "FLOPs", "without top: same", "FLOPs")
    print("{:<10}{:<20}{:<12}{:>7}{:>7}{:>7}{:>19}{:>7}".format(*head))
    row = "{:<10}{:<20}{:<12}{:7.2f}{:7.2f}{:7.2f}{:19.2f}{:7.2f}"
    for question in ("better", "grows"):
        words = {name: one.better if question == "better" else one.growth for name, one in full.items()}
        claims = {name: word for name, word in words.items() if word not in NO_CLAIM}
        own = {name: ladders[name] for name in ("vanilla", *claims)}
        with ProcessPoolExecutor(jobs) as pool:
            found = list(pool.map(partial(replay, ladders=own, question=question), pairs))
        costs = np.array([cost for _, cost in found])
        every: list[list[float]] = []
        for name, word in claims.items():
            given = np.array([ends.get(name, "undecided") for ends, _ in found])
            same, other = given == word, ~np.isin(given, (word, *NO_CLAIM))
            every.append([same.mean(), other.mean(), costs.mean(), same[below].mean(), costs[below].mean()])
            print(row.format(question, name, word, *every[-1]))
        print(row.format(question, "mean", "", *np.mean(every, axis=0)), flush=True)
        for start in np.array(pairs)[~below].tolist():
            part, sets, same = every_choice(start, own, question, claims)
            print(f"  rungs {start[0] + 1} and {start[1] + 1}: {part:.3f}, {same} of {sets}", flush=True)


def starting_rungs(start: Sequence[int], ladders: Mapping[str, Ladder]) -> dict[str, list[int]]:
    """The rungs of each ladder to begin with: the pair, and the cheapest others, as a law needs."""
    have: dict[str, list[int]] = {}
    for name, one in ladders.items():
        others = [k for k in range(len(one.flops)) if k not in start]
        have[name] = [*start, *others[: (4 if name == "vanilla" else 3) - len(start)]]
    return have


def chosen_rungs(have: Mapping[str, Sequence[int]], ladders: Mapping[str, Ladder]) -> dict[str, Ladder]:
    """The ladders with these rungs alone."""
    return {name: one.keep(np.isin(np.arange(len(one.flops)), have[name])) for name, one in ladders.items()}


def every_choice(
    start: Sequence[int], ladders: Mapping[str, Ladder], question: Question, claims: Mapping[str, str]
) -> tuple[float, int, int]:
    """The part of the FLOPs that a start takes, the sets of runs that the rest buys, those with all words.

    Each set is tested once, at the whole level.
    """
    have = starting_rungs(start, ladders)
    whole = sum(float(one.flops.sum()) for one in ladders.values())
    spent = sum(float(one.flops.sum()) for one in chosen_rungs(have, ladders).values())
    left = REPLAY_PART * whole - spent
    sets: list[tuple[tuple[str, int], ...]] = [()] if left >= 0 else []
    for name, one in ladders.items():
        for k in set(range(len(one.flops))) - set(have[name]):
            costs = [sum(float(ladders[arm].flops[at]) for arm, at in own) + one.flops[k] for own in sets]
            sets += [(*own, (name, k)) for own, cost in zip(sets, costs, strict=True) if cost <= left]
    same = 0
    for own in sets:
        more = {name: [*rungs, *(k for arm, k in own if arm == name)] for name, rungs in have.items()}
        judge = fit_ladders(chosen_rungs(more, ladders), AnalysisRequest("vanilla"))
        asked = judge.ask([("vanilla", name) for name in claims])
        words = [one.answers(one.levels)[QUESTIONS.index(question)] for one in asked]
        same += words == list(claims.values())
    return spent / whole, len(sets), same


def replay(
    start: tuple[int, int], ladders: dict[str, Ladder], question: Question
) -> tuple[dict[str, str], float]:
    """Each arm's word from a starting pair of rungs, and the part of the FLOPs; only real runs are sold."""
    have = starting_rungs(start, ladders)
    whole = sum(float(one.flops.sum()) for one in ladders.values())
    rule = StoppingRule(
        "vanilla", question, REPLAY_EFFECT[question], budget=REPLAY_PART * whole, futility=0.0
    )
    stopping = Stopping(rule)
    while True:
        bought = chosen_rungs(have, ladders)
        offers = [
            Offer(name, flops, flops)
            for name, one in ladders.items()
            for flops in one.flops[~np.isin(one.flops, bought[name].flops)].tolist()
        ]
        spent = sum(float(one.flops.sum()) for one in bought.values())
        look = stopping.look(bought, offers, spent)
        if not look.batch:
            return {name: one.word for name, one in stopping.closed.items()}, spent / whole
        for offer in look.batch:
            have[offer.arm].append(int(np.argmin(np.abs(np.log(ladders[offer.arm].flops / offer.flops)))))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word in ("simulated", "replayed", "paper", "mini", "arms")]
    number = next((int(word) for word in sys.argv[1:] if word.isdigit()), 1000)
    jobs = [int(word.removeprefix("jobs=")) for word in sys.argv[1:] if word.startswith("jobs=")]
    begun = time.perf_counter()
    chosen = [
        one for one in SCALES if not words or one.name.partition(",")[0] in words or "simulated" in words
    ]
    if chosen:
        simulated(number, jobs[0] if jobs else 1, chosen)
    if "arms" in words or not words:
        several_arms(number, jobs[0] if jobs else 1)
    if "replayed" in words or not words:
        replayed(jobs[0] if jobs else 1)
    print(f"\n{time.perf_counter() - begun:.0f} s")
