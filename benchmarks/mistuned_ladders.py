"""Put ladders together from runs at several rates, and count the planted errors that are found in them.

    python benchmarks/mistuned_ladders.py                                  # simulated ladders, a minute
    python benchmarks/mistuned_ladders.py --runs runs/mistuned             # trained, two CPU cores
    python benchmarks/mistuned_ladders.py --runs runs/mistuned --preset mini --data data/fineweb   # a GPU

Simulated ladders differ as tuned ladders of `tiny` and `mini` do, and answer to a wrong rate as weakly as one
of them. With `--runs` an arm's rungs are trained at 1/2 to 2 times its rate with several seeds (finished runs
are used again). Ladders are drawn from them, a seed for each rung: all at the recipe's rate (false alarms),
one rung at twice or half of it, and a rate that drifts from half to twice, or back, along the ladder.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import stats

from steepen.launch.base import LaunchContext, make_launcher
from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.context import StudyContext, open_data
from steepen.studies.driver.drive import drive
from steepen.studies.mistuning import RunTrace, find_mistuned, read_trace
from steepen.studies.preset import load_preset
from steepen.utils.arrays import Array

MULTIPLES = (0.5, math.sqrt(0.5), 1.0, math.sqrt(2), 2.0)
DRAWS = 100  # ladders of each kind
# How tuned ladders differ (docs/log.md): standard deviations of the slope per unit of log compute, and of the
# ends above the middle, for the four numbers of a run; of what a preset's arms share, and of an arm.
SHARED = ((0.0, 0.010, 0.0, 0.02), (0.010, 0.015, 0.05, 0.12))
OF_ARM = ((0.0, 0.007, 0.0, 0.063), (0.008, 0.010, 0.046, 0.075))
NOISE = np.array([0.0035, 0.0045, 0.05, 0.05])  # of the numbers of a simulated run
Traces = dict[tuple[int, float, int], RunTrace]  # by depth, multiple and seed


def score(traces: Traces, rng: np.random.Generator, *, trends: bool = False) -> None:
    """Print how often errors are found, and how often there is an alarm without one.

    With `trends`, every ladder has slopes and bends of its own, as tuned ladders differ in.
    """
    depths = sorted({depth for depth, _, _ in traces})
    known: dict[tuple[int, float], list[RunTrace]] = {}
    for (depth, multiple, _), trace in traces.items():
        known.setdefault((depth, multiple), []).append(trace)

    def draw(multiples: Sequence[float], shared: Array, name: str = "drawn") -> list[RunTrace]:
        choices = [known[at] for at in zip(depths, multiples, strict=True)]
        own = [seeds[int(rng.integers(len(seeds)))] for seeds in choices]
        x = np.log([trace.flops for trace in own])
        x -= x.mean()
        trend = shared + rng.normal(0.0, OF_ARM)
        along = trends * (np.outer(x, trend[0]) + np.outer((x / np.abs(x).max()) ** 2, trend[1]))
        return [
            replace(
                trace, ladder=name, setting=f"{name} {trace.depth}", seed=0, loss=trace.loss + change[0],
                fall=trace.fall + change[1], gradient=trace.gradient + change[2],
                stream=trace.stream + change[3],
            )
            for trace, change in zip(own, along.tolist(), strict=True)
        ]  # fmt: skip

    right = [1.0] * len(depths)
    drift = [2 ** (2 * i / (len(depths) - 1) - 1) for i in range(len(depths))]
    drift = [min(MULTIPLES, key=lambda one, at=at: abs(math.log(one / at))) for at in drift]

    def share(kinds: Sequence[float], depth: int | None, *, beside: bool) -> float:
        hits = 0
        for _ in range(DRAWS):
            shared = rng.normal(0.0, SHARED)
            ladder = draw(kinds, shared) + (draw(right, shared, "other") if beside else [])
            found = [one for one in find_mistuned(ladder) if one.ladder == "drawn"]
            hits += any(depth is None or one.depth == depth for one in found)
        return hits / DRAWS

    for beside in (False, True):
        print("beside a ladder at the recipe's rate:" if beside else "alone:")
        print(f"  alarms without an error   {share(right, None, beside=beside):.1%}")
        for multiple in (0.5, 2.0):
            each = []
            for i, depth in enumerate(depths):
                planted = [*right[:i], multiple, *right[i + 1 :]]
                each.append(share(planted, depth, beside=beside))
            words = ", ".join(f"d{depth} {one:.0%}" for depth, one in zip(depths, each, strict=True))
            print(f"  one rung at {multiple:g} times       {np.mean(each):.1%} ({words})")
        print(f"  drift up                  {share(drift, None, beside=beside):.1%}")
        print(f"  drift down                {share(drift[::-1], None, beside=beside):.1%}")


def means(multiple: float) -> tuple[float, float, float, float]:
    """What a rate that is off does to a run's numbers: as weakly as at `tiny` or `mini` (docs/log.md)."""
    wrong = math.log2(multiple)
    high, low = max(0.0, wrong), min(0.0, wrong)
    return 0.005 * low**2 + 0.01 * high**2, -0.005 * wrong, 0.3 * high**2, 0.35 * high + 0.4 * low


def simulate(rng: np.random.Generator, rungs: int, ratio: float, seeds: int = 40) -> Traces:
    """Runs at rungs whose compute grows by a ratio, with noise."""
    found: Traces = {}
    for i in range(rungs):
        for multiple in MULTIPLES:
            tuned = np.array([1.5 - 0.06 * i, 0.25, 0.5 - 0.2 * i, 1.0])
            for seed in range(seeds):
                a, b, c, d = (tuned + means(multiple) + NOISE * rng.standard_normal(4)).tolist()
                found[i + 2, multiple, seed] = RunTrace(
                    "run", "arm", "arm", i + 2, seed, 1e10 * ratio**i, 5000, multiple, "", a, b, c, d, 0.0,
                    None,
                )  # fmt: skip
    return found


def best_power(multiples: Sequence[float], ratio: float) -> float:
    """How often an error is found by the best test with 5% false alarms that knows which error there may be.

    It is linear, and knows responses, noise and trends exactly, but for the slopes of loss and gradients.
    """
    rungs = len(multiples)
    x = np.arange(rungs) * math.log(ratio)
    x -= x.mean()
    response = np.array([means(multiple) for multiple in multiples])
    slopes, bends = (np.hypot(shared, own) for shared, own in zip(SHARED, OF_ARM, strict=True))
    squared = 0.0
    for k in range(4):
        free = slopes[k] or 1e3  # what tuned ladders of any size may have
        shapes = ((np.ones(rungs), 1e3), (x, free), ((x / x.max()) ** 2, bends[k]))
        covariance = NOISE[k] ** 2 * np.eye(rungs)
        for shape, size in shapes:
            covariance += size**2 * np.outer(shape, shape)
        squared += float(response[:, k] @ np.linalg.solve(covariance, response[:, k]))
    return float(stats.norm.sf(stats.norm.isf(0.05) - math.sqrt(squared)))


def print_best(rungs: int, ratio: float) -> None:
    """Print what the best test would find in a simulated ladder alone."""
    parts: list[str] = []
    for multiple in (0.5, 2.0):
        each = [best_power([multiple if k == i else 1.0 for k in range(rungs)], ratio) for i in range(rungs)]
        parts.append(f"one rung at {multiple:g} times {np.mean(each):.0%} ({min(each):.0%} at an end)")
    up = [2 ** (2 * i / (rungs - 1) - 1) for i in range(rungs)]
    parts.append(f"a drift up {best_power(up, ratio):.0%}, down {best_power(up[::-1], ratio):.0%}")
    print(f"the best test of a known kind would find alone: {'; '.join(parts)}")


def study(specs: Sequence[RunSpec]) -> Generator[Sequence[RunSpec], list[RunRecord], list[RunRecord]]:
    """A study of one batch."""
    return (yield specs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=None)
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    if chosen.runs is None:
        for rungs, ratio in ((5, 2.0), (7, 2.5)):
            print(f"\n{rungs} rungs, each with {ratio:g} times the compute of the one before")
            print_best(rungs, ratio)
            score(simulate(rng, rungs, ratio), rng, trends=True)
        return 0
    preset, arm = load_preset(chosen.preset), find_arm(chosen.arm)
    path, facts = open_data(preset, chosen.data, chosen.runs, False, (chosen.runs / "studies", "mistuned"))
    context, store = StudyContext(preset, facts), RunStore(chosen.runs)
    recipe = context.recipe(arm)
    specs: dict[tuple[int, float, int], RunSpec] = {}
    for seed in range(chosen.seeds):
        for depth in preset.depths(arm):
            for multiple in MULTIPLES:
                run = recipe.at(arm, depth, context.size_rule)
                rate = run.hyperparameters.learning_rate * multiple
                run = replace(run, hyperparameters=replace(run.hyperparameters, learning_rate=rate))
                specs[depth, multiple, seed] = context.spec(run, seed=seed)
    launcher = make_launcher("local", LaunchContext(path, store), chosen.jobs)
    drive(study(list(specs.values())), store, launcher)
    traces: Traces = {}
    for key, spec in specs.items():
        record = store.record(spec)
        trace = None if record is None else read_trace(store.run(spec), record)
        if trace is not None:
            traces[key] = trace
    for (depth, multiple, seed), trace in traces.items():
        print(f"d{depth} ×{multiple:.3g} seed {seed}: " + " ".join(f"{one:+.4f}" for one in trace.numbers))
    score(traces, rng)
    return 0


if __name__ == "__main__":
    sys.exit(main())
