"""Put ladders together from runs at several rates, and count the planted errors that are found in them.

    python benchmarks/mistuned_ladders.py                                  # simulated ladders, two minutes
    python benchmarks/mistuned_ladders.py --runs runs/mistuned             # trained, two CPU cores
    python benchmarks/mistuned_ladders.py --runs runs/mistuned --preset mini --data data/fineweb   # a GPU
    python benchmarks/mistuned_ladders.py --check runs/narrow/studies/ladder*   # ladders that were trained

Simulated ladders differ as tuned ladders of `tiny` and `mini` do, and answer to a wrong rate as weakly as one
of them. With `--runs` an arm's rungs are trained at 1/2 to 2 times its rate with several seeds (finished runs
are used again). Ladders are drawn from them, a seed for each rung: all at the recipe's rate (false alarms),
one rung at twice or half of it, and a rate that drifts from half to twice, or back, along the ladder.

`--check` looks at every ladder of studies, or of folders of runs, alone. Other runs in the same folders that
differ from a rung's in rate alone, by a factor of 1.8 to 2.2, are put in its place as planted errors.

Of trained ladders alone, what the best test that knows rung, side and size of the one error would find there
is printed too. Of simulated ladders alone the best test is printed: the one that finds most on average of
any test with 5% false alarms. It knows responses, noise and trends exactly, but not which error there is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats
from scipy.special import logsumexp

from steepen.launch.base import LaunchContext, make_launcher
from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.context import StudyContext, open_data
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import JOURNAL, Journal
from steepen.studies.mistuning import RunTrace, find_mistuned, read_trace
from steepen.studies.preset import load_preset
from steepen.studies.tuned_ladder import MIN_RUNGS, OWN, RUNG, SHARED, LadderTest
from steepen.utils.arrays import Array

MULTIPLES = (0.5, math.sqrt(0.5), 1.0, math.sqrt(2), 2.0)
DRAWS, TUNED = 400, 2000  # ladders of each error, and without one
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
        trend = shared + rng.normal(0.0, np.where(np.isfinite(OWN), OWN, 0.0))
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
    drift = [
        min((m for d, m in known if d == depth), key=lambda one, at=at: abs(math.log(one / at)))
        for depth, at in zip(depths, drifting(len(depths)), strict=True)
    ]

    def share(kinds: Sequence[float], depth: int | None, *, beside: bool) -> float:
        hits, draws = 0, TUNED if kinds == right else DRAWS
        for _ in range(draws):
            shared = rng.normal(0.0, SHARED)
            ladder = draw(kinds, shared) + (draw(right, shared, "other") if beside else [])
            found = [one for one in find_mistuned(ladder) if one.ladder == "drawn"]
            hits += any(depth is None or one.depth == depth for one in found)
        return hits / draws

    for beside in (False, True):
        print("beside a ladder at the recipe's rate:" if beside else "alone:")
        print(f"  alarms without an error   {share(right, None, beside=beside):.1%}")
        for multiple in (0.5, 2.0):
            each = []
            for i, depth in enumerate(depths):
                planted = [*right[:i], multiple, *right[i + 1 :]]
                each.append(share(planted, depth, beside=beside))
            words = ", ".join(f"d{depth} {one:.0%}" for depth, one in zip(depths, each, strict=True))
            if not (trends or beside):
                best = [best_known(known, depths, i, multiple) for i in range(len(depths))]
                words += "; at best " + ", ".join(f"{one:.0%}" for one in best)
            print(f"  one rung at {multiple:g} times       {np.mean(each):.1%} ({words})")
        print(f"  drift up                  {share(drift, None, beside=beside):.1%}")
        print(f"  drift down                {share(drift[::-1], None, beside=beside):.1%}", flush=True)


def best_known(
    known: dict[tuple[int, float], list[RunTrace]], depths: Sequence[int], rung: int, multiple: float
) -> float:
    """How often a linear test at 5% finds a rung at a multiple, knowing the error and its response."""
    tuned = [known[depth, 1.0] for depth in depths]
    numbers = np.array([np.mean([trace.numbers for trace in own], axis=0) for own in tuned])
    at = np.mean([trace.numbers for trace in known[depths[rung], multiple]], axis=0)
    x = np.log([own[0].flops for own in tuned])
    slopes, bends = np.hypot(SHARED, OWN).tolist()
    steps = np.array([own[0].steps for own in tuned])
    squared = 0.0
    here = np.arange(len(depths)) == rung
    for column in LadderTest(x, steps, np.isfinite(numbers), (tuple(slopes), tuple(bends))).columns:
        response = np.where(here, at[column.k] - numbers[rung, column.k], 0.0)[column.own]
        if np.isfinite(response).all():
            squared += float(response @ column.inverse @ response)
    return float(stats.norm.sf(stats.norm.isf(0.05) - math.sqrt(squared)))


def drifting(rungs: int) -> list[float]:
    """Multiples of the rate that drifts from half to twice."""
    return [2 ** (2 * i / (rungs - 1) - 1) for i in range(rungs)]


def means(multiple: float) -> tuple[float, float, float, float]:
    """What a rate that is off does to a run's numbers: as weakly as at `tiny` or `mini` (docs/log.md)."""
    wrong = math.log2(multiple)
    high, low = max(0.0, wrong), min(0.0, wrong)
    return 0.005 * low**2 + 0.01 * high**2, -0.005 * wrong, 0.3 * high**2, 0.35 * high + 0.4 * low


def simulate(rng: np.random.Generator, rungs: int, ratio: float, seeds: int = 40) -> Traces:
    """Runs at rungs whose compute grows by a ratio, with noise."""
    found: Traces = {}
    for i in range(rungs):
        for multiple in sorted({0.5, 1.0, 2.0, *drifting(rungs)}):
            tuned = np.array([1.5 - 0.06 * i, 0.25, 0.5 - 0.2 * i, 1.0])
            for seed in range(seeds):
                a, b, c, d = (tuned + means(multiple) + np.array(RUNG) * rng.standard_normal(4)).tolist()
                found[i + 2, multiple, seed] = RunTrace(
                    "run", "arm", "arm", i + 2, seed, 1e10 * ratio**i, 5000, multiple, "", a, b, c, d, 0.0,
                    None,
                )  # fmt: skip
    return found


def print_best(rungs: int, ratio: float, rng: np.random.Generator) -> None:
    """Print what the best test would find in a simulated ladder alone, by the Neyman-Pearson lemma.

    It sums the odds of all errors, those of a rung weighing what they do in `tuned_ladder`.
    """
    x = np.arange(rungs) * math.log(ratio)
    x -= x.mean()
    up = drifting(rungs)
    kinds = [[m if k == i else 1.0 for k in range(rungs)] for m in (0.5, 2.0) for i in range(rungs)]
    kinds += [up, up[::-1]]
    places = np.array([*range(rungs), *range(rungs), -1, -1])
    weights = np.where(places < 0, 0.1 * rungs / 2, (1 - 0.1 * rungs) / (2 * rungs))
    responses = np.array([[means(multiple) for multiple in kind] for kind in kinds])
    slopes, bends = (np.hypot(shared, own) for shared, own in zip(SHARED, OWN, strict=True))
    products = np.zeros((len(kinds), len(kinds)))
    for k in range(4):
        covariance = RUNG[k] ** 2 * np.eye(rungs)
        for shape, size in ((np.ones(rungs), 1e3), (x, min(slopes[k], 1e3)), ((x / x.max()) ** 2, bends[k])):
            covariance += size**2 * np.outer(shape, shape)
        products += responses[:, :, k] @ np.linalg.solve(covariance, responses[:, :, k].T)
    values, vectors = np.linalg.eigh((products + products.T) / 2)
    draws = rng.standard_normal((20_000, len(kinds))) * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    constant = np.log(weights) - np.diag(products) / 2
    limit = np.quantile(logsumexp(draws + constant, axis=1), 0.95)
    shares: list[float] = []
    for i, place in enumerate(places):
        odds = draws + products[i] + constant
        found = logsumexp(odds, axis=1) > limit
        shares.append(float(np.mean(found & ((place < 0) | (places[odds.argmax(axis=1)] == place)))))
    half, twice = np.mean(shares[:rungs]), np.mean(shares[rungs:-2])
    print(f"the best test, alone: half {half:.1%}, twice {twice:.1%}, ", end="")
    print(f"drift up {shares[-2]:.1%}, down {shares[-1]:.1%}", flush=True)


def counted(hits: Sequence[bool]) -> str:
    """How many of them are true, and the exact binomial interval of their part."""
    found, of = sum(hits), len(hits)
    if not of:
        return "none to look at"
    low = stats.beta.ppf(0.025, found, of - found + 1) if found else 0.0
    high = stats.beta.ppf(0.975, found + 1, of - found) if found < of else 1.0
    return f"{found} of {of} ({low:.0%} to {high:.0%})"


def trained(folders: Sequence[Path]) -> tuple[list[tuple[RunSpec, RunTrace]], list[tuple[RunSpec, RunTrace]]]:
    """The runs of studies or folders of runs, and the other runs in the same folders, with their traces."""
    wanted: dict[Path, set[str]] = {}
    for folder in folders:
        if (folder / JOURNAL).is_file():
            journal = Journal.read(folder)
            place, names = journal.runs_directory(), {asked.run for asked in journal.entry.runs}
        else:
            place, names = folder, {run.path.name for run in RunStore(folder).runs()}
        wanted.setdefault(place.resolve(), set()).update(names)
    own, others = list[tuple[RunSpec, RunTrace]](), list[tuple[RunSpec, RunTrace]]()
    for place, names in wanted.items():
        for run in RunStore(place).runs():
            record = run.record()
            if record is None:
                continue
            ladder = f"{record.spec.arm.name} on data {record.spec.data.identity[:8]}"
            trace = read_trace(run, record, ladder)
            if trace is not None:
                (own if run.path.name in names else others).append((record.spec, trace))
    return own, others


def check(folders: Sequence[Path]) -> None:
    """Print the alarms of trained ladders, and how many planted errors are found in those without one."""
    own, others = trained(folders)
    alarms, planted = list[bool](), dict[str, list[bool]]()
    for ladder in sorted({trace.ladder for _, trace in own}):
        runs = [(spec, trace) for spec, trace in own if trace.ladder == ladder]
        depths = " ".join(f"d{depth}" for depth in sorted({trace.depth for _, trace in runs}))
        if len({trace.depth for _, trace in runs}) < MIN_RUNGS:
            print(f"{ladder}, {depths}: {MIN_RUNGS} rungs are needed")
            continue
        if len({(trace.depth, trace.seed) for _, trace in runs}) < len(runs):
            print(f"{ladder}, {depths}: several runs of a depth and seed are no ladder")
            continue
        found = find_mistuned(trace for _, trace in runs)
        alarms.append(any(one.kind in ("rate", "drift") for one in found))
        print(f"{ladder}, {depths}: " + ("; ".join(one.reason for one in found) or "no alarm"))
        both = sorted(product(others, runs), key=lambda one: (one[0][1].depth, one[0][1].rate))
        for (spec, trace), (like, tuned) in both:
            factor = trace.rate / tuned.rate
            size = max(factor, 1 / factor)
            if alarms[-1] or not 1.8 <= size <= 2.2 or same_but_rate(spec) != same_but_rate(like):
                continue
            rest = [one for _, one in runs if one.depth != tuned.depth]
            seen = find_mistuned([*rest, trace])
            hit = any(one.depth == tuned.depth for one in seen)
            planted.setdefault("at half" if factor < 1 else "at twice", []).append(hit)
            word = "found" if hit else "not found"
            print(f"    d{tuned.depth} seed {trace.seed} at {factor:.2f} times its rate: {word}")
    print(f"ladders with an alarm: {counted(alarms)}")
    for kind, hits in planted.items():
        print(f"rungs {kind} their rate that are found: {counted(hits)}")


def same_but_rate(spec: RunSpec) -> RunSpec:
    """A run's spec with another rate."""
    return replace(spec, hyperparameters=replace(spec.hyperparameters, learning_rate=1.0))


def study(specs: Sequence[RunSpec]) -> Generator[Sequence[RunSpec], list[RunRecord], list[RunRecord]]:
    """A study of one batch."""
    return (yield specs)


def train(chosen: argparse.Namespace) -> Traces:
    """Traces of runs at the rates that the planted errors need, trained where the store has none."""
    preset, arm = load_preset(chosen.preset), find_arm(chosen.arm)
    path, facts = open_data(preset, chosen.data, chosen.runs, False, (chosen.runs / "studies", "mistuned"))
    context, store = StudyContext(preset, facts), RunStore(chosen.runs)
    recipe = context.recipe(arm)
    depths = chosen.depths or preset.depths(arm)
    up = [min(MULTIPLES, key=lambda one, at=at: abs(math.log(one / at))) for at in drifting(len(depths))]
    specs: dict[tuple[int, float, int], RunSpec] = {}
    for seed in range(chosen.seeds):
        for depth, *drifted in zip(depths, up, up[::-1], strict=True):
            for multiple in sorted({0.5, 1.0, 2.0, *drifted}):
                run = recipe.at(arm, depth, context.size_rule)
                rate = run.hyperparameters.learning_rate * multiple
                run = replace(run, hyperparameters=replace(run.hyperparameters, learning_rate=rate))
                specs[depth, multiple, seed] = context.spec(run, seed=seed)
    launcher = make_launcher("local", LaunchContext(path, store), chosen.jobs, chosen.launcher_option)
    drive(study(list(specs.values())[::-1]), store, launcher)  # the longest first
    traces: Traces = {}
    for key, spec in specs.items():
        record = store.record(spec)
        trace = None if record is None else read_trace(store.run(spec), record)
        if trace is not None:
            traces[key] = trace
    return traces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=None, help="instead of the preset's")
    parser.add_argument("--rungs", type=int, nargs="+", default=[4, 5, 6, 7, 8], help="of simulated ladders")
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--launcher-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--check", type=Path, nargs="+", default=None, metavar="STUDY", help="or runs")
    chosen = parser.parse_args()
    if chosen.check:
        check(chosen.check)
        return 0
    rng = np.random.default_rng(0)
    if chosen.runs is None:
        for rungs in chosen.rungs:
            ratio = 2.5
            print(f"\n{rungs} rungs, each with {ratio:g} times the compute of the one before")
            print_best(rungs, ratio, rng)
            score(simulate(rng, rungs, ratio), rng, trends=True)
        return 0
    traces = train(chosen)
    for (depth, multiple, seed), trace in traces.items():
        print(f"d{depth} ×{multiple:.3g} seed {seed}: " + " ".join(f"{one:+.4f}" for one in trace.numbers))
    score(traces, rng)
    return 0


if __name__ == "__main__":
    sys.exit(main())
