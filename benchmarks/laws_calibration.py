"""Error rates, power and coverage of the verdicts, by simulation; and of the laws' intervals.

    python benchmarks/laws_calibration.py [draws]             # all tables
    python benchmarks/laws_calibration.py [draws] replicated  # noise that falls, lack of fit
    python benchmarks/laws_calibration.py [draws] alone       # pairs without replicates, other noise
    python benchmarks/laws_calibration.py [draws] drifting    # lack of fit that is correlated
    python benchmarks/laws_calibration.py [draws] paired      # seeds that arms share
    python benchmarks/laws_calibration.py [draws] held-out    # scenarios on which nothing was chosen
    python benchmarks/laws_calibration.py [draws] laws        # coverage of γ and E, families

`jobs=12` uses that many processes, `only=null` takes the scenarios with this text in their name.

A word is an answer other than *not resolved* and *undecided*. `oracle` is a test that knows every variance
and correlation. Rates of tables with several arms are means over the arms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steepen.laws.model.fit_tables import fit_tables
from steepen.laws.model.laws import Array, Cells, Laws
from steepen.laws.model.table_fit import TableFit, parameter_contrast
from steepen.laws.verdict.judge import MIN_SPARE, OUTLIER_LEVEL
from steepen.laws.verdict.questions import Contrasts, DecisionRule, contrasts, holm_levels, p_values

Law = tuple[float, float, float]  # E, A at 1e18 FLOPs, γ
PAPER = np.array([3.252e17, 1.056e18, 2.925e18, 6.743e18, 1.4977e19, 3.060e19, 5.572e19, 1.0063e20])
VANILLA: Law = (1.83, 1.5, 0.1113)
OPERATOR: Law = (1.83, 1.5 * 1.12**-0.1140, 0.1140)
SMALL: Law = (1.83, 1.02, 0.13)  # of ladders from 1e15 FLOPs
OTHER: Law = (2.1, 0.9, 0.15)  # of the held-out scenarios
BLOCK = 250
RULE = DecisionRule()


@dataclass(frozen=True)
class Scenario:
    """A table of one reference and `arms`, its noise, and what the analysis is told about it."""

    name: str
    flops: Array
    reference: Law
    arm: Law
    arms: int = 1
    seeds: tuple[int, ...] = ()  # of each rung; empty: one
    seed_sd: Array | float = 0.0
    lack_of_fit: Array | float = 0.0
    correlation: float = 0.0  # of neighbouring rungs
    shared: float = 0.0  # part of the lack of fit that arms share
    paired: float = 0.0  # part of the seeds' noise that arms share
    off: tuple[int, int] | None = None  # arm and rung with an error of 0.03
    stated: Array | float | None = None  # noise of a run that the analysis is told
    tails: float = np.inf  # degrees of freedom of Student's t, of which all noise is
    bend: float = 0.0  # of all arms alike, from the middle to the ends
    wave: float = 0.0  # amplitude of a lack of fit with a period of two decades and a random phase

    def covariance(self) -> Array:
        """Of the errors of one arm's rungs."""
        size = len(self.flops)
        apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
        sd = np.broadcast_to(self.lack_of_fit, size)
        seeds = np.broadcast_to(self.seed_sd, size) ** 2 / np.array(self.seeds or (1,) * size)
        turn = np.pi * np.log10(self.flops)
        waves = 0.5 * self.wave**2 * np.cos(np.subtract.outer(turn, turn))
        return self.correlation**apart * np.outer(sd, sd) + np.diag(seeds) + waves


@dataclass
class Rates:
    """Sums over draws and arms."""

    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, **rates: NDArray[np.bool_]) -> None:
        """Add one array of outcomes for each name."""
        for name, values in rates.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(np.sum(values))
        self.count += len(next(iter(rates.values())))

    def __getitem__(self, name: str) -> float:
        return self.sums[name] / self.count


@dataclass(frozen=True)
class Draws:
    """Simulated tables: mean losses, sums of squares of seeds and of sums over arms, and the true laws."""

    cells: Cells
    loss: Array
    squares: Array
    paired: Array | None
    laws: Laws

    def fit(self, **settings: Any) -> TableFit:
        """The model of every table."""
        return fit_tables(self.cells, self.loss, self.squares, self.laws, paired=self.paired, **settings)


def simulate(one: Scenario, draws: int, rng: np.random.Generator) -> Draws:
    """Draw tables of a scenario."""
    size, arms = len(one.flops), one.arms + 1
    c0 = float(np.exp(np.log(one.flops).mean()))
    x = np.tile(np.log(one.flops / c0), (arms, 1))
    seeds = np.tile(np.array(one.seeds or (1,) * size, float), (arms, 1))
    stated = np.zeros((arms, size)) if one.stated is None else np.tile(
        np.broadcast_to(one.stated, size) ** 2, (arms, 1)
    ) / seeds  # fmt: skip
    partners = np.tile(np.arange(size), (arms, 1)) if size >= 6 else None
    groups = np.where(seeds > 1, np.cumsum(seeds > 1, axis=1) - 1, -1).astype(int)
    same = groups if groups.max() >= 0 else None
    cells = Cells(x, np.ones(x.shape, bool), seeds, seeds - 1, stated, partners=partners, paired=same)
    every = [one.reference, *[one.arm] * one.arms]
    laws = Laws(
        np.full(draws, one.reference[0]),
        np.tile([np.log(a) - g * np.log(c0 / 1e18) for _, a, g in every], (draws, 1)),
        np.tile([g for *_, g in every], (draws, 1)),
    )
    shape = (draws, arms, size)

    def unit() -> Array:
        if np.isinf(one.tails):
            return rng.standard_normal(shape)
        return rng.standard_t(one.tails, shape) * np.sqrt(1 - 2 / one.tails)

    z = unit()
    if one.shared:
        own = unit()
        z = np.sqrt(one.shared) * z[:, :1] + np.sqrt(1 - one.shared) * own
    for i in range(1, size if one.correlation else 0):
        z[:, :, i] = one.correlation * z[:, :, i - 1] + np.sqrt(1 - one.correlation**2) * z[:, :, i]
    sd = np.broadcast_to(one.seed_sd, size)
    loss = laws.predict(x) + np.asarray(one.lack_of_fit) * z + one.bend * (x / x.max()) ** 2
    if one.wave:
        phase = 2 * np.pi * rng.random((draws, arms, 1))
        loss = loss + one.wave * np.cos(np.pi * np.log10(one.flops) + phase)
    squares, paired = np.zeros(shape), None
    if one.seeds:
        taken = np.arange(max(one.seeds)) < seeds[..., None]
        runs = np.stack([unit() for _ in range(max(one.seeds))], axis=3)
        if one.paired:
            common = rng.standard_normal(runs[:, :1].shape)
            runs = np.sqrt(one.paired) * common + np.sqrt(1 - one.paired) * runs
        runs = sd[:, None] * runs * taken
        mean = runs.sum(axis=3) / seeds
        squares = ((runs - mean[..., None]) ** 2 * taken).sum(axis=3)
        paired = (((runs - mean[..., None]) * taken).sum(axis=1) ** 2).sum(axis=2)[:, seeds[0] > 1]
        loss = loss + mean
    if one.off is not None:
        loss[:, one.off[0], one.off[1]] += 0.03
    return Draws(cells, loss, squares, paired, laws)


def fit_without_outliers(tables: Draws) -> TableFit:
    """The model of each table without the rung that is furthest off, as measured tables are fitted."""
    found = tables.fit()
    if tables.cells.mask.sum() - 2 * len(tables.cells.x) - 2 < MIN_SPARE:
        return found
    p, _ = found.outliers()
    worst = p.reshape(len(p), -1).argmin(axis=1)
    dropped = np.zeros(p.shape, bool).reshape(len(p), -1)
    dropped[np.arange(len(p)), worst] = p.reshape(len(p), -1).min(axis=1) < OUTLIER_LEVEL
    return tables.fit(dropped=dropped.reshape(p.shape)) if dropped.any() else found


def judge(fit: TableFit, arm: int) -> Contrasts:
    """The contrasts of an arm against the first."""
    x = fit.cells.x
    return contrasts(fit, (0, arm), float(x[0].min()), float(x[0].max()))


def measure(one: Scenario, draws: int, seed: int = 11) -> tuple[Rates, Rates]:
    """Rates of the analysis and of the oracle."""
    rng = np.random.default_rng(seed)
    ours, oracle = Rates(), Rates()
    for begin in range(0, draws, BLOCK):
        tables = simulate(one, min(BLOCK, draws - begin), rng)
        off = None
        if one.off is not None:
            off = np.zeros(tables.loss.shape, bool)
            off[:, one.off[0], one.off[1]] = True
        known = np.tile(one.covariance(), (one.arms + 1, 1, 1))
        exact = replace(tables, loss=tables.laws.predict(tables.cells.x))
        truth = judge(exact.fit(covariance=known), 1)
        gain, slope = float(truth.gain.mean[0]), float(truth.slope.mean[0])
        fits = ((ours, fit_without_outliers(tables)), (oracle, tables.fit(covariance=known, dropped=off)))
        for rates, fit in fits:
            for arm in range(1, one.arms + 1):
                rates.add(**outcomes(judge(fit, arm), gain, slope))
    return ours, oracle


def outcomes(found: Contrasts, gain: float, slope: float) -> dict[str, NDArray[np.bool_]]:
    """For each draw: whether each word is given, whether it is false, and whether the truth is covered."""
    p = p_values(found, RULE)
    better, growth = p.better(RULE.level), p.growth(RULE.level)
    right = {"better"} if gain > 1e-9 else {"worse"} if gain < -1e-9 else {"no difference"}
    if abs(gain) < np.log1p(RULE.equivalence):
        right.add("no difference")
    grows = {"grows"} if slope > 1e-9 else {"shrinks"} if slope < -1e-9 else {"constant"}
    below = [part.below(truth) for part, truth in ((found.gain, gain), (found.slope, slope))]
    return {
        "better": better == "better",
        "grows": growth == "grows",
        "false_better": ~np.isin(better, [*right, "not resolved"]),
        "false_growth": ~np.isin(growth, [*grows, "undecided"]),
        "cover_gain": (below[0] > 0.05) & (below[0] < 0.95),
        "cover_slope": (below[1] > 0.05) & (below[1] < 0.95),
    }


def show(title: str, scenarios: Iterable[Scenario], draws: int, jobs: int) -> None:
    """A row for each scenario."""
    print(f"\n{title}, {draws} draws each")
    print(f"{'':<44}{'false word':^16}{'found (oracle)':^32}{'90% covers':^16}")
    names = ("scenario", "better", "growth", "better", "grows", "gain", "Δγ")
    print("{:<44}{:>8}{:>8}{:>16}{:>16}{:>8}{:>8}".format(*names))
    listed = list(scenarios)
    with ProcessPoolExecutor(jobs) as pool:
        for one, (ours, oracle) in zip(listed, pool.map(partial(measure, draws=draws), listed), strict=True):
            found = [f"{ours[name]:.3f} ({oracle[name]:.3f})" for name in ("better", "grows")]
            rates = [f"{ours[name]:8.3f}" for name in ("false_better", "false_growth")]
            covers = [f"{ours[name]:8.3f}" for name in ("cover_gain", "cover_slope")]
            print(f"{one.name:<44}{''.join(rates)}{found[0]:>16}{found[1]:>16}{''.join(covers)}", flush=True)


def replicated() -> Iterable[Scenario]:
    """Six arms: seed noise that falls tenfold, lack of fit, both; null, constant and growing gains."""
    growth = {4: 0.012, 6: 0.008, 8: 0.005}
    for rungs in (4, 6, 8):
        flops = np.geomspace(1.3e15, 7.5e16 * 10 ** (0.4 * (rungs - 4)), rungs)
        falling = np.geomspace(0.05, 0.005, rungs)
        mixed = (4, 3, *[2] * (rungs - 2))
        kinds = (
            ("falling", falling, 0.0, mixed),
            ("falling, 2 seeds", falling, 0.0, (2,) * rungs),
            ("lack of fit .004", np.full(rungs, 0.004), 0.004, mixed),
            ("lack of fit .01", np.full(rungs, 0.004), 0.01, mixed),
            ("falling + .004", falling, 0.004, mixed),
            ("falling + .01", falling, 0.01, mixed),
        )
        e, a, gamma = SMALL
        for name, sd, tau, seeds in kinds:
            truths: dict[str, Law] = {
                "null": SMALL,
                "1.15x": (e, a * 1.15**-gamma, gamma),
                "grows": (e, a, gamma + growth[rungs]),
            }
            for truth, law in truths.items():
                yield Scenario(f"{rungs} rungs, {name}, {truth}", flops, SMALL, law, 5, seeds, sd, tau)


def drifting() -> Iterable[Scenario]:
    """Lack of fit that is correlated along the ladders of tables with replicates."""
    for rungs in (4, 6, 8):
        flops = np.geomspace(1.3e15, 7.5e16 * 10 ** (0.4 * (rungs - 4)), rungs)
        falling, seeds = np.geomspace(0.05, 0.005, rungs), (4, 3, *[2] * (rungs - 2))
        yield Scenario(
            f"{rungs} rungs, falling + AR(0.8) .01, null", flops, SMALL, SMALL, 5, seeds, falling, 0.01, 0.8
        )


def paired() -> Iterable[Scenario]:
    """Replicates of all arms with the same seeds, which may have the same noise."""
    e, a, gamma = SMALL
    for rungs in (4, 8):
        flops = np.geomspace(1.3e15, 7.5e16 * 10 ** (0.4 * (rungs - 4)), rungs)
        falling, seeds = np.geomspace(0.05, 0.005, rungs), (4, 3, *[2] * (rungs - 2))
        for truth, law in (("null", SMALL), ("1.08x", (e, a * 1.08**-gamma, gamma))):
            for part in (0.0, 0.5, 0.9):
                yield Scenario(
                    f"{rungs} rungs, falling + .002, {part:g} shared, {truth}", flops, SMALL, law, 5, seeds,
                    falling, 0.002, paired=part,
                )  # fmt: skip


def alone() -> Iterable[Scenario]:
    """Pairs on the paper's ladder, mostly without replicates, under noise that is not simply independent."""
    sd = 2e-3
    low = sd * np.array([5.0, 5.0, *[1.0] * 6])
    kinds: dict[str, dict[str, object]] = {
        "independent": {"lack_of_fit": sd},
        "two lowest rungs x5": {"lack_of_fit": low},
        "the same with a column loss_sd": {"lack_of_fit": low, "stated": low},
        "AR(0.8) along the ladder": {"lack_of_fit": sd, "correlation": 0.8},
        **{
            f"+0.03 at {whose} {where}": {"lack_of_fit": sd, "off": (arm, rung)}
            for arm, whose in enumerate(("reference's", "arm's"))
            for where, rung in (("bottom", 0), ("middle", 4), ("top", 7))
        },
        "seeds 10,5,3,2,1.. + rung error": {
            "lack_of_fit": sd, "seed_sd": sd, "seeds": (10, 5, 3, 2, 1, 1, 1, 1),
        },
        "three seeds + rung error": {"lack_of_fit": sd, "seed_sd": sd, "seeds": (3,) * 8},
        "--noise half the truth": {"lack_of_fit": sd, "stated": sd / 2},
        "--noise twice the truth": {"lack_of_fit": sd, "stated": sd * 2},
        "arms correlated 0.9": {"lack_of_fit": sd, "shared": 0.9},
    }  # fmt: skip
    e, a, gamma = VANILLA
    truths: dict[str, Law] = {
        "null": VANILLA,
        "1.2x": (e, a * 1.2**-gamma, gamma),
        "Op-1": OPERATOR,
    }
    for name, kind in kinds.items():
        for truth, law in truths.items():
            yield Scenario(f"{name}, {truth}", PAPER, VANILLA, law, **kind)  # type: ignore[arg-type]


def held_out() -> Iterable[Scenario]:
    """Other rungs, arms, laws and noise than those on which priors were chosen; fixed before it was run."""

    def ladder(rungs: int, decades: float) -> Array:
        return np.geomspace(2e16, 2e16 * 10**decades, rungs)

    def falls(rungs: int, factor: float, top: float) -> Array:
        return np.geomspace(factor * top, top, rungs)

    one, two, ends = (
        np.array(shape) for shape in ([8.0, *[1] * 7], [1, 1, 1, 5, 1, 1, 1], [3, 1, 1, 1, 1, 3])
    )
    kinds: dict[str, tuple[Array, int, dict[str, object]]] = {
        "5 rungs, 3 arms, 3 seeds, t(4)": (
            ladder(5, 2), 2, {"seeds": (3,) * 5, "seed_sd": 6e-3, "lack_of_fit": 3e-3, "tails": 4.0},
        ),
        "7 rungs, 4 arms, seeds below": (
            ladder(7, 2.5), 3, {
                "seeds": (5, 4, 3, 1, 1, 1, 1), "lack_of_fit": 2e-3,
                "seed_sd": np.maximum(falls(7, 8, 2e-3), 4e-3),
            },
        ),
        "10 rungs, pair, 2 seeds": (ladder(10, 3), 1, {"seeds": (2,) * 10, "seed_sd": 3e-3}),
        "6 rungs, 3 arms, noisy ends": (
            ladder(6, 2), 2, {"seeds": (3,) * 6, "seed_sd": 2e-3 * ends, "lack_of_fit": 2e-3},
        ),
        "8 rungs, 6 arms, seeds, shared .7": (
            ladder(8, 2.5), 5, {"seeds": (2,) * 8, "seed_sd": 2e-3, "lack_of_fit": 4e-3, "shared": 0.7},
        ),
        "6 rungs, 3 arms, t(5)": (ladder(6, 2), 2, {"lack_of_fit": 3e-3, "tails": 5.0}),
        "10 rungs, pair, falls 6x": (ladder(10, 3), 1, {"lack_of_fit": falls(10, 6, 1.5e-3)}),
        "8 rungs, 5 arms, AR(0.5)": (ladder(8, 2.5), 4, {"lack_of_fit": 2e-3, "correlation": 0.5}),
        "7 rungs, 3 arms, middle x5": (ladder(7, 2.5), 2, {"lack_of_fit": 2e-3 * two}),
        "5 rungs, pair": (ladder(5, 2), 1, {"lack_of_fit": 2e-3}),
        "12 rungs, pair, waves": (ladder(12, 3), 1, {"lack_of_fit": 1e-3, "wave": 3e-3}),
        "9 rungs, 4 arms, AR(0.6), shared .6": (
            ladder(9, 2.5), 3, {"lack_of_fit": 3e-3, "correlation": 0.6, "shared": 0.6},
        ),
        "8 rungs, 3 arms, loss_sd 0.7 of it": (
            ladder(8, 2.5), 2, {"lack_of_fit": falls(8, 5, 2e-3), "stated": 0.7 * falls(8, 5, 2e-3)},
        ),
        "8 rungs, 3 arms, lowest x8": (ladder(8, 2.5), 2, {"lack_of_fit": 2e-3 * one}),
    }  # fmt: skip
    e, a, gamma = OTHER
    for name, (flops, arms, kind) in kinds.items():
        steeper = 0.02 / np.log10(flops[-1] / flops[0])
        truths: dict[str, Law] = {
            "null": OTHER,
            "1.12x": (e, a * 1.12**-gamma, gamma),
            "grows": (e, a * (flops[0] / 1e18) ** steeper, gamma + steeper),  # from equal at the bottom
        }
        for truth, law in truths.items():
            yield Scenario(f"{name}, {truth}", flops, OTHER, law, arms, **kind)  # type: ignore[arg-type]
    for seeds in ((), (2,) * 7):
        name = f"7 rungs, 3 arms, {'2 seeds, ' if seeds else ''}bent, null"
        sd, tau = (2e-3, 0.0) if seeds else (0.0, 2e-3)
        yield Scenario(name, ladder(7, 2.5), OTHER, OTHER, 2, seeds, sd, tau, bend=0.01)


def families(draws: int) -> None:
    """Any false word in a table of eight arms with the reference's law, with and without Holm."""
    one = Scenario("", PAPER, VANILLA, VANILLA, 7, (3,) * 8, 2e-3, 2e-3)
    rng = np.random.default_rng(3)
    wrong = np.zeros((2, 2))
    for begin in range(0, draws, BLOCK):
        sets = min(BLOCK, draws - begin)
        fit = simulate(one, sets, rng).fit()
        found = [p_values(judge(fit, arm), RULE) for arm in range(1, 8)]
        for question, p in enumerate((np.stack([f.gain for f in found]), np.stack([f.slope for f in found]))):
            wrong[question, 0] += (p < RULE.level).any(axis=0).sum()
            for i in range(sets):
                levels = holm_levels(p[:, i].tolist(), RULE.level)
                wrong[question, 1] += bool((p[:, i] < levels).any())
    wrong /= draws
    print(f"\nAny false word in a table of seven arms that equal the reference, {draws} draws")
    for question, row in zip(("better or worse", "grows or shrinks"), wrong, strict=True):
        print(f"{question:<18} each arm at 5%: {row[0]:.3f}, with Holm {row[1]:.3f}")


def laws_coverage(draws: int) -> None:
    """90% intervals of γ and E of the model's laws, four arms."""
    print(f"\n90% intervals of γ and E, four arms on the paper's ladder, {draws} draws each")
    print(f"{'noise':>8} {'seeds':>6} {'γ':>8} {'E':>8}")
    for noise, seeds in ((1e-3, 1), (3e-3, 1), (1e-3, 3), (3e-3, 3)):
        one = Scenario("", PAPER, VANILLA, OPERATOR, 3, (seeds,) * 8, noise, 0.0)
        rng, inside, count = np.random.default_rng(7), np.zeros(2), 0
        for begin in range(0, draws, BLOCK):
            tables = simulate(one, min(BLOCK, draws - begin), rng)
            fit, truths = tables.fit(), (tables.laws.gamma[:, 1], tables.laws.e)
            for k, (index, truth) in enumerate(zip((1, 2), truths, strict=True)):
                below = fit.mixture(parameter_contrast(fit.laws, 1, index)).below(truth)
                inside[k] += ((below > 0.05) & (below < 0.95)).sum()
            count += len(tables.loss)
        print(f"{noise:8.0e} {seeds:6d} {inside[0] / count:8.3f} {inside[1] / count:8.3f}", flush=True)


def laws(draws: int) -> None:
    """The tables that are not about single verdicts."""
    families(draws)
    laws_coverage(draws)


TITLES: dict[str, tuple[str, Callable[[], Iterable[Scenario]]]] = {
    "replicated": ("Six arms with replicates", replicated),
    "alone": ("Pairs on the paper's ladder, noise 0.002", alone),
    "drifting": ("Six arms with replicates, correlated lack of fit", drifting),
    "paired": ("Six arms with the same seeds", paired),
    "held-out": ("Held-out scenarios", held_out),
}

if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word in (*TITLES, "laws")]
    number = next((int(word) for word in sys.argv[1:] if word.isdigit()), 2000)
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    jobs, only = int(options.get("jobs", 1)), options.get("only", "")
    begun = time.perf_counter()
    for name, (title, scenarios) in TITLES.items():
        if name in given or not given:
            show(title, (one for one in scenarios() if only in one.name), number, jobs)
    if "laws" in given or not given:
        laws(number)
    print(f"\n{time.perf_counter() - begun:.0f} s")
