"""The paper's claims, judged by its authors' runs and by one's own: agrees, differs, undecided or not run.

`judge_claims(rows)` takes the rows of runs.csv. Three kinds of claims:

- a ladder over another (`Gain`): the words of `steepen fit`, with all ladders of the table sharing one E;
- a quantity of a sweep (`Quantity`), such as the best number of passes: its 90% interval under the noise of
  a run, by redrawing every loss, against the range that the claim allows. It agrees where the interval is
  inside, differs where it is outside, and is undecided where it reaches across;
- the order of the arms, KL effective depth, the growth target and the registered forecasts, each by its rule.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from steepen import fit
from steepen.laws.analysis import AnalysisRequest
from steepen.laws.ladder import make_ladder, read_ladders
from steepen.laws.registered_forecasts import ScoredForecast
from steepen.laws.verdict.judge import fit_ladders
from steepen.reproduction.tables import table
from steepen.studies.design.growth_target import Choice, choose
from steepen.studies.design.matched_compute import envelope_compute, loss_at
from steepen.tables.table import MIN_REFERENCE_RUNGS, table_from
from steepen.utils.formatting import format_flops

Row = Mapping[str, Any]
LADDER = "ladder"  # studies whose names begin so are one set of ladders
MAIN = "fineweb_ladders"  # the authors' eight ladders
# Studies whose runs are an arm of the ladder but for one thing, which its name has in brackets.
VARIANTS = {"transfer": "vanilla recipe", "adamw": "adamw", "fp8": "fp8"}
COMPARED = (LADDER, "ablations", *VARIANTS)  # studies whose runs are ladders at their own tokens
NOISE = 0.004  # of a run, where no seeds say what it is; the authors' runs have one seed: .0015
AUTHORS_NOISE = 0.0015
DRAWS = 300
SAME_BUDGET = 1.03
MIN_REPEATS = 8  # runs with another seed beside them, for the noise of a depth
NOT_RUN = "not run"


@dataclass(frozen=True)
class Judged:
    """A row of the table of claims: what the authors' runs say, what these say, and the verdict."""

    claim: str
    figure: str
    authors: str
    ours: str
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return (self.claim, self.figure, self.authors, self.ours, self.verdict)


@dataclass(frozen=True)
class Gain:
    """The paper says `word` of an arm over another: of its growth, or (better, worse) of the measured range.

    `authors` are the two ladders' names in the authors' table, where they are others.
    """

    claim: str
    figure: str
    arm: str
    reference: str
    word: str
    source: str = MAIN
    authors: tuple[str, str] | None = None

    def judge(self, rows: Sequence[Row]) -> Judged:
        """Both tables' words, and whether ours is the paper's."""
        pair = self.authors or (self.arm, self.reference)
        theirs = _authors_gain(self.source, *pair)
        title = f"{self.claim}: {self.arm} over {self.reference}: {self.word}"
        own = compared(rows, self.arm, self.reference)
        if not {self.arm, self.reference} <= {row["arm"] for row in own}:
            return Judged(title, self.figure, self._said(theirs), "–", NOT_RUN)
        # The eight arms share the level among them; an ablation is one comparison.
        found = gains(own, self.reference, adjust=self.source == MAIN).get(self.arm)
        if found is None:
            return Judged(title, self.figure, self._said(theirs), "too few rungs", NOT_RUN)
        word = found[self._question]
        open_ = word in ("undecided", "not resolved")
        if word == "no difference" and theirs is not None:  # within 5%: is the authors' effect as small?
            open_ = found["multiplier_low"] <= theirs["multiplier"] <= found["multiplier_high"]
        verdict = "undecided" if open_ else "agrees" if word == self.word else "differs"
        return Judged(title, self.figure, self._said(theirs), self._said(found), verdict)

    @property
    def _question(self) -> str:
        return "better" if self.word in ("better", "worse") else "growth"

    def _said(self, found: Row | None) -> str:
        if found is None:
            return "–"
        each, low, high = found["growth_per_decade"], found["multiplier_low"], found["multiplier_high"]
        return (
            f"{found[self._question]}: {found['multiplier']:.2f}× ({low:.2f}–{high:.2f}), ×{each:.3f} a "
            f"decade (p = {found['p_growth']:.2g})"
        )


def compared(rows: Sequence[Row], *arms: str) -> list[Row]:
    """The ladders' rows, and those of other arms named; of AdamW's sweep the best rate at each rung."""
    found = [
        row for row in rows
        if row["study"].startswith(LADDER) or (row["study"].startswith(COMPARED) and row["arm"] in arms)
    ]  # fmt: skip
    best: dict[str, Row] = {}  # a choice among losses, which favours AdamW
    for row in found:
        if row["study"] == "adamw":
            best[row["depth"]] = min(best.get(row["depth"], row), row, key=lambda one: float(one["loss"]))
    return [row for row in found if row["study"] != "adamw"] + list(best.values())


def fit_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The columns that `steepen fit` needs."""
    kept = ("arm", "depth", "seed", "tokens", "flops", "loss")
    return [{name: row[name] if name == "arm" else float(row[name]) for name in kept} for row in rows]


def gains(rows: Sequence[Row], reference: str, adjust: bool = True) -> dict[str, dict[str, Any]]:
    """The rows of `steepen fit` by arm; none where the reference is absent or has too few rungs."""
    return _gains(tuple(tuple(sorted(row.items())) for row in fit_table(rows)), reference, adjust)


@functools.cache
def _gains(rows: tuple[tuple[tuple[str, Any], ...], ...], reference: str, adjust: bool) -> dict[str, Any]:
    found = [dict(row) for row in rows]
    if len({row["flops"] for row in found if row["arm"] == reference}) < MIN_REFERENCE_RUNGS:
        return {}
    answer = fit(found, reference=reference, method="joint", adjust=adjust, draws=100)
    return {row["arm"]: row for row in answer.to_rows() if row["growth"] is not None}


def _authors_rows(source: str, *arms: str) -> list[Row]:
    """The authors' ladders of a table; of these arms alone, where some are named."""
    return [
        {**row, "seed": 0, "flops": row["compute_flops"], "loss": row["val_loss"]}
        for row in table(source) if not arms or row["arm"] in arms
    ]  # fmt: skip


def _authors_gain(source: str, arm: str, reference: str) -> dict[str, Any] | None:
    """A pair of the authors' ladders: beside the eight, or beside the two that tell E of a table."""
    names = () if source == MAIN else (arm, reference, "vanilla", "operator-1")
    return gains(_authors_rows(source, *names), reference, adjust=source == MAIN).get(arm)


@dataclass(frozen=True)
class Run:
    """A run of a sweep. `x` is what is swept, `y` its weight decay, `budget` its FLOPs or their like."""

    budget: float
    depth: int
    x: float
    loss: float
    y: float = 0.0


Runs = Sequence[Run]


def best_x(x: Sequence[float], loss: Sequence[float]) -> float:
    """The minimum of a parabola through the points; the best point where there is none between them.

    As `laws.fits.vertex.find_vertex` has it, without its intervals: sweeps are drawn hundreds of times.
    """
    u, v = np.asarray(x, float), np.asarray(loss, float)
    if len(set(x)) >= 3:
        curve, slope, _ = np.polyfit(u, v, 2)
        if curve > 0 and u.min() < -slope / (2 * curve) < u.max():
            return float(-slope / (2 * curve))
    return float(u[np.argmin(v)])


def by(runs: Runs, key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    """The runs in groups, in order of the key."""
    groups: dict[Any, list[Run]] = {}
    for run in sorted(runs, key=key):
        groups.setdefault(key(run), []).append(run)
    return groups


def best_passes(runs: Runs) -> list[float]:
    """The best number of passes (x) at six budgets at matched compute, from the lowest."""
    counts = by(runs, lambda run: run.x)
    ladders = {
        count: make_ladder(str(count), *np.array([(run.budget, run.loss) for run in own]).T)
        for count, own in counts.items() if len({run.budget for run in own}) > 1
    }  # fmt: skip
    if len(ladders) < 3:
        return []
    low = sorted(float(one.flops[0]) for one in ladders.values())[2]
    high = min(float(one.flops[-1]) for one in ladders.values())
    found: list[float] = []
    for budget in np.geomspace(low * (1 + 1e-9), high * (1 - 1e-9), 6) if low < high else ():
        losses = {count: loss_at(one, float(budget), "log-log") for count, one in ladders.items()}
        known = {math.log(count): loss for count, loss in losses.items() if loss is not None}
        found.append(math.exp(best_x(list(known), list(known.values()))))
    return found


def mean_passes(runs: Runs) -> float:
    """The geometric mean of the best numbers of passes over the budgets."""
    return statistics.geometric_mean(best_passes(runs))


def rise_of_passes(runs: Runs) -> float:
    """The best number of passes at the highest budget over that at the lowest."""
    found = best_passes(runs)
    return found[-1] / found[0]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of a line through the points."""
    return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])


def token_drift(runs: Runs) -> float:
    """The exponent of the best tokens per parameter (x) against compute."""
    groups = by(runs, lambda run: run.budget)
    best = [best_x([math.log(run.x) for run in own], [run.loss for run in own]) for own in groups.values()]
    return slope(np.log(list(groups)).tolist(), best)


def rho_rise(runs: Runs) -> float:
    """How much ρ* (x) rises for e times the tokens per parameter, at one depth; the mean over depths."""
    slopes: list[float] = []
    for own in by(runs, lambda run: run.depth).values():
        sweeps = by(own, lambda run: run.budget)
        if len(sweeps) > 1:
            best = [best_x([r.x for r in one], [r.loss for r in one]) for one in sweeps.values()]
            slopes.append(slope(np.log(list(sweeps)).tolist(), best))
    return statistics.fmean(slopes)


def decay_rise(runs: Runs) -> float:
    """The exponent of the best weight decay (y) in depth, or by how much it is more than that in passes."""
    groups = by(runs, lambda run: (run.depth, run.x))
    best = [best_x([math.log(run.y) for run in own], [run.loss for run in own]) for own in groups.values()]
    design = np.array([[1.0, math.log(depth), math.log(passes)] for depth, passes in groups])
    _, depth, passes = np.linalg.lstsq(design, np.array(best), rcond=None)[0]
    return float(min(depth, depth - passes))


def loops_over_size(runs: Runs, decay: float) -> float:
    """Compute of the best run of one pass, any decay, over that of more passes at one decay for its loss."""
    best = min((run for run in runs if run.x == 1), key=lambda run: run.loss)
    more = [run for run in runs if run.x > 1 and run.y == decay]
    flops, loss = (np.array([getattr(run, name) for run in more]) for name in ("budget", "loss"))
    if best.loss > loss.max():  # cheaper than the cheapest
        return best.budget / float(flops.min())
    needed = envelope_compute(flops, loss, best.loss)
    return best.budget / needed if math.isfinite(needed) else 0.0  # no number of passes reaches it


@dataclass(frozen=True)
class Quantity:
    """A number that the paper says lies in a range, from the runs of a sweep."""

    claim: str
    figure: str
    compute: Callable[[Runs], float]
    ours: Callable[[Sequence[Row]], Runs]
    theirs: Callable[[], Runs]
    low: float
    high: float = math.inf

    def judge(self, rows: Sequence[Row]) -> Judged:
        """The number of both, with 90% intervals, and whether ours is in the range."""
        authors, _ = self.measured(self.theirs(), {})
        runs = self.ours(rows)
        if not runs:
            return Judged(self.claim, self.figure, authors, "–", NOT_RUN)
        return Judged(self.claim, self.figure, authors, *self.measured(runs, noise_by_depth(rows)))

    def measured(self, runs: Runs, noise: Mapping[int, float]) -> tuple[str, str]:
        """The number with its 90% interval, and the verdict."""
        try:
            value, low, high = spread(runs, noise, self.compute)
        except (statistics.StatisticsError, IndexError, ValueError, np.linalg.LinAlgError):
            return "too few runs", NOT_RUN
        # Strictly: a number of passes that is 1 in every draw is no optimum above 1.
        inside, outside = self.low < low and high < self.high, high <= self.low or low >= self.high
        verdict = "agrees" if inside else "differs" if outside else "undecided"
        return f"{value:.2f} ({low:.2f} to {high:.2f})", verdict


def spread(
    runs: Runs, noise: Mapping[int, float], compute: Callable[[Runs], float]
) -> tuple[float, float, float]:
    """A number and its 90% interval, from the runs with their losses redrawn. No noise: the authors' runs."""
    generator = np.random.default_rng(0)
    sd = np.array([noise_at(noise, run.depth) if noise else AUTHORS_NOISE for run in runs])
    drawn = [
        compute([replace(run, loss=run.loss + error) for run, error in zip(runs, errors, strict=True)])
        for errors in generator.normal(0, sd, (DRAWS, len(runs)))
    ]
    low, high = np.quantile(drawn, [0.05, 0.95])
    return compute(runs), float(low), float(high)


def noise_by_depth(rows: Sequence[Row]) -> dict[int, float]:
    """The standard deviation of a run's loss by depth, pooled over all ladders' runs with several seeds."""
    groups: dict[tuple[Any, int], list[float]] = {}
    for row in rows:
        if LADDER in row["study"]:  # former ones too, each with its rates
            key = (row["arm"], row.get("learning_rate")), int(row["depth"])
            groups.setdefault(key, []).append(float(row["loss"]))
    squares: dict[int, list[float]] = {}  # of deviations; one degree of freedom less for each arm
    for (_, depth), losses in groups.items():
        mean = statistics.fmean(losses)
        squares.setdefault(depth, []).extend(len(losses) / (len(losses) - 1) * (x - mean) ** 2
                                             for x in losses if len(losses) > 1)  # fmt: skip
    enough = {depth: own for depth, own in squares.items() if len(own) >= MIN_REPEATS}
    return {depth: math.sqrt(statistics.fmean(own)) for depth, own in enough.items()} or {0: NOISE}


def noise_at(noise: Mapping[int, float], depth: int) -> float:
    """The noise of the nearest depth that has one."""
    return noise[min(noise, key=lambda one: (abs(one - depth), one))]


def sweep(rows: Sequence[Row], study: str, x: Callable[[Row], float], together: bool = False) -> list[Run]:
    """The runs of a study as a sweep. `together`: FLOPs that are equal but for whole steps are one budget."""
    found: list[Run] = []
    budget = math.nan
    for row in sorted((row for row in rows if row["study"] == study), key=lambda row: float(row["flops"])):
        flops = float(row["flops"])
        budget = budget if together and flops < budget * SAME_BUDGET else flops
        found.append(Run(budget, int(row["depth"]), x(row), float(row["loss"]), float(row["weight_decay"])))
    return found


def passes_of(row: Row) -> float:
    """The passes of a tied arm by its name: operator-1, loop-3."""
    return float(row["arm"].rpartition("-")[2])


def target_of(row: Row) -> float:
    """The passes that an arm grows to, by its name: loop-grow, loop-grow-to-6."""
    return float(row["arm"].partition("-to-")[2] or 4)


def tokens_per_parameter(row: Row) -> float:
    """Tokens per stored parameter at the start."""
    return float(row["tokens"]) / float(row["parameters"])


def authors_grid() -> list[Run]:
    """The authors' grid of depths, passes and weight decays on repeated data."""
    return [
        Run(row["matrix_flops"], row["depth"], row["loops"], row["val_loss"], row["weight_decay"])
        for row in table("data_constrained_grid")
    ]


def authors_passes() -> list[Run]:
    """The authors' tied passes on fresh data."""
    rows = table("fresh_recurrence").where(family="tied")
    return [Run(row["matrix_flops"], row["depth"], row["loops"], row["val_loss"]) for row in rows]


def authors_tokens() -> list[Run]:
    """The authors' sweeps of Vanilla's tokens per parameter, each budget by its mean FLOPs."""
    groups = table("tpp_sweeps").where(arm="vanilla").by("budget")
    means = {name: statistics.fmean(own.column("matrix_flops")) for name, own in groups.items()}
    return [
        Run(means[name], row["depth"], row["tpp"], row["val_loss"])
        for name, own in groups.items() for row in own
    ]  # fmt: skip


def authors_timing() -> list[Run]:
    """The authors' sweeps of Untied-Grow's ρ, each budget by its tokens per parameter without growth."""
    found: list[Run] = []
    for own in table("growth_timing").where(arm="untied-grow").by("budget", "depth").values():
        start = min(own, key=lambda row: row["rho"])
        tokens = start["tokens"] / start["params_stored"]
        found += [Run(tokens, row["depth"], row["rho"], row["val_loss"]) for row in own]
    return found


def common_grid(runs: Runs) -> list[Run]:
    """The runs of depths that have every number of passes up to six."""
    wanted = {1.0, 2.0, 3.0, 4.0, 6.0}
    depths = by(runs, lambda run: run.depth)
    return [
        run for own in depths.values() if wanted <= {run.x for run in own} for run in own if run.x in wanted
    ]


def repeated_data(rows: Sequence[Row]) -> list[Run]:
    """The runs on repeated data."""
    return sweep(rows, "data-constrained", passes_of)


def at_fixed_decay(runs: Runs) -> list[Run]:
    """The runs at the decay that is held fixed."""
    return [run for run in runs if run.y == fixed_decay(runs)]


def fixed_decay(runs: Runs) -> float:
    """The decay that is held fixed: the paper's 0.8, or 1.2 where the preset has a lower rate."""
    return next((decay for decay in (0.8, 1.2) if any(run.y == decay for run in runs)), math.nan)


GAINS = (  # section 4.2, then appendix B
    Gain("the boundary operator raises the exponent", "3", "operator-1", "vanilla", "grows"),
    Gain("growth raises the exponent, untied", "3", "untied-grow", "untied-2", "grows"),
    Gain("growth raises the exponent, tied", "3", "loop-grow", "loop-2", "grows"),
    Gain("growth does not need the operator", "3", "deep-vanilla-grow", "deep-vanilla", "grows"),
    Gain("untying is a constant factor", "3", "untied-2", "loop-2", "constant"),
    Gain("untying is a constant factor, grown", "3", "untied-grow", "loop-grow", "constant"),
    Gain("depth without the operator is a constant factor", "3", "deep-vanilla", "vanilla", "constant"),
    Gain("all together", "3", "untied-grow", "vanilla", "grows"),
    Gain("Vanilla's recipe hides the growth", "16b", "operator-1 (vanilla recipe)", "vanilla", "constant",
         "ablation_ladders", ("operator-1-vanilla-recipe", "vanilla")),
    Gain("and costs compute", "16b", "operator-1 (vanilla recipe)", "operator-1", "worse",
         "ablation_ladders", ("operator-1-vanilla-recipe", "operator-1")),
    Gain("width alone: a constant factor", "16e", "width-only-operator-1", "width-only-vanilla", "constant",
         "width_optimizer_ladders", ("untied-2-width-only", "deep-vanilla-width-only")),
    Gain("no injection before the coda", "15a", "loop-2-no-coda-injection", "loop-2", "worse",
         "ablation_ladders"),
    Gain("2/C/3 allocation", "15a", "loop-2-nci-2-c-3", "loop-2", "worse", "ablation_ladders",
         ("loop-2-no-coda-injection-2c3", "loop-2")),
    Gain("random recurrence", "16d", "random-loop-grow", "loop-grow", "worse", "random_recurrence_ladders",
         ("loop-grow-random", "loop-grow")),
    Gain("AdamW instead of Muon", "16f", "vanilla (adamw)", "vanilla", "worse", "width_optimizer_ladders",
         ("vanilla-adam", "vanilla")),
)  # fmt: skip
QUANTITIES = (  # a drift of tokens per parameter by .2 is less than half that of Kaplan et al., −.46
    Quantity("best number of passes on fresh data: 1 to 2", "8", mean_passes,
             lambda rows: sweep(rows, "passes", passes_of), lambda: common_grid(authors_passes()), 1, 2),
    Quantity("tokens per parameter do not drift (Vanilla): exponent 0 ± .2", "12", token_drift,
             lambda rows: sweep(rows, "tpp", tokens_per_parameter, together=True), authors_tokens, -0.2, 0.2),
    Quantity("ρ* rises with tokens per parameter (Untied-Grow): > 0 for e times as many", "10b", rho_rise,
             lambda rows: sweep(rows, "growth-timing", lambda row: float(row["rho"]), together=True),
             authors_timing, 0),
    Quantity("repeated data: the best number of passes rises with compute, ratio > 1", "5", rise_of_passes,
             lambda rows: at_fixed_decay(repeated_data(rows)),
             lambda: common_grid(at_fixed_decay(authors_grid())), 1),
    Quantity("repeated data: the best weight decay rises with depth, not with passes, exponent > 0", "5",
             decay_rise, repeated_data, lambda: [run for run in authors_grid() if run.depth > 4], 0),
    Quantity("repeated data: passes beat size, compute ratio > 1", "5",
             lambda runs: loops_over_size(runs, fixed_decay(runs)), repeated_data, authors_grid, 1),
)  # fmt: skip


def judge_order(rows: Sequence[Row]) -> Judged:
    """The order of the arms: every two of them by which is better where both were measured.

    It agrees where no two that are told apart are in another order than the authors' and most of those that
    theirs tell apart are in the same, and differs where one is reversed.
    """
    theirs = _order(_authors_rows(MAIN))
    title, figure = "order of the arms, two by two", "3"
    said = f"{len(theirs)} of 28 told apart"
    own, names = compared(rows), {name for pair in theirs for name in pair}
    if not names <= {row["arm"] for row in own}:
        return Judged(title, figure, said, "–", NOT_RUN)
    ours = _order([row for row in own if row["arm"] in names])
    same, reversed_ = len(ours & theirs), sorted(pair for pair in ours if pair[::-1] in theirs)
    words = f"{same} in the same order, {len(reversed_)} reversed"
    if reversed_:
        words += f" ({'; '.join(f'{better} over {worse}' for better, worse in reversed_)})"
    verdict = "differs" if reversed_ else "agrees" if 2 * same > len(theirs) else "undecided"
    return Judged(title, figure, said, words, verdict)


def _order(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """The pairs (better, worse) among the arms, which share the level among them."""
    names = ("arm", "flops", "loss", "seed")
    columns = {name: [row[name] for row in fit_table(rows)] for name in names}
    arms = sorted(set(columns["arm"]))
    settings = AnalysisRequest("vanilla", method="joint")
    judge = fit_ladders(read_ladders(table_from(columns, "the ladders")), settings)
    pairs = list(combinations(arms, 2))  # the first is the reference
    words = [asked.answers(asked.levels)[0] for asked in judge.ask(pairs)]
    return {
        (arm, other) if word == "better" else (other, arm)
        for (other, arm), word in zip(pairs, words, strict=True) if word in ("better", "worse")
    }  # fmt: skip


def judge_target(rows: Sequence[Row]) -> Judged:
    """The growth target with the lowest loss over budgets; decided where no other ties with it."""
    title, figure = "growth from 2 passes: 4 is the best target", "7"
    theirs = choose(
        {(row["target_passes"], row["mean_passes"]): row["val_loss"] for row in table("growth_targets")
         if row["mean_passes"] > 2}, NOISE,
    )  # fmt: skip
    grown = [row for row in rows if row["study"] == "growth-target" and row["arm"].startswith("loop-grow")]
    runs = sweep(grown, "growth-target", target_of, together=True)
    if len({run.x for run in runs}) < 2:
        return Judged(title, figure, _target_words(theirs), "–", NOT_RUN)
    ours = choose({(int(run.x), run.budget): run.loss for run in runs}, NOISE)
    verdict = "undecided" if ours.best == 4 or 4 in ours.ties else "differs"
    if ours.best == 4 and not ours.ties:
        verdict = "agrees"
    return Judged(title, figure, _target_words(theirs), _target_words(ours), verdict)


def _target_words(found: Choice) -> str:
    tied = f", a tie with {' and '.join(map(str, sorted(found.ties)))}" if found.ties else ""
    return f"{found.best}{tied}"


DEPTHS = (  # arms by the passes that they end with: their KL effective depths rise from group to group
    ("vanilla", "operator-1"),
    ("deep-vanilla", "loop-2", "untied-2"),
    ("deep-vanilla-grow", "loop-grow", "untied-grow"),
)


def judge_depth(rows: Sequence[Row], nats: int) -> Judged:
    """KL effective depth by arm at the largest depth that all have: one pass, two, grown."""
    title = f"KL effective depth within {nats} nat{'s'[: nats > 1]}: one pass < two < grown"
    theirs = {row["arm"]: row["effective_depth"] for row in table("effective_depth").where(depth=18)}
    known = [row for row in rows if row.get(f"kl_depth_{nats}")]
    measured = [row for row in known if row["study"].startswith(LADDER)]
    former = "" if measured else "former ladder, "
    measured = measured or [row for row in known if row["study"].startswith(f"former-{LADDER}")]
    at: dict[int, dict[str, float]] = {}
    for row in measured:
        at.setdefault(int(row["depth"]), {})[row["arm"]] = float(row[f"kl_depth_{nats}"])
    full = [depth for depth, own in at.items() if all(arm in own for group in DEPTHS for arm in group)]
    if not full:
        return Judged(title, "6", _depth_words(theirs)[0], "–", NOT_RUN)
    said, verdict = _depth_words(at[max(full)])
    return Judged(title, "6", _depth_words(theirs)[0], f"{former}d{max(full)}: {said}", verdict)


def _depth_words(depths: Mapping[str, float]) -> tuple[str, str]:
    """The groups' depths, and whether they are apart (agrees), overlap (undecided) or fall (differs)."""
    groups = [[depths[arm] for arm in group if arm in depths] for group in DEPTHS]
    said = ", ".join("–".join(f"{value:g}" for value in sorted({min(own), max(own)})) for own in groups)
    apart = all(max(low) < min(high) for low, high in pairwise(groups))
    falls = any(min(low) > max(high) for low, high in pairwise(groups))
    return said, "agrees" if apart else "differs" if falls else "undecided"


def judge_forecasts(ledger: Sequence[ScoredForecast]) -> list[Judged]:
    """The registered forecasts: a run inside its 90% interval agrees with the law."""
    found: list[Judged] = []
    for one in ledger:
        title = f"the fitted law predicts {one.registered.arm} at {format_flops(one.registered.flops)} FLOPs"
        verdict = NOT_RUN if one.inside is None else "agrees" if one.inside else "differs"
        low, high = one.interval or one.registered.interval
        measured = f"{one.observed:.4f}" if one.observed is not None else "–"
        forecast = one.registered.forecast if one.forecast is None else one.forecast
        said = f"{measured}, forecast {forecast:.4f} ({low:.4f} to {high:.4f})"
        found.append(Judged(title, "4", "0.03 below the forecast, at 8 times", said, verdict))
    if not found:
        found.append(Judged("the fitted law predicts a run at 5 times", "4", "0.03 below", "–", NOT_RUN))
    return found


def judge_claims(rows: Sequence[Row], ledger: Sequence[ScoredForecast] = ()) -> list[Judged]:
    """Every claim, by the rows of runs.csv and the ledger of forecasts."""
    return [
        *(one.judge(rows) for one in GAINS[:8]),
        judge_order(rows), judge_depth(rows, 1), judge_depth(rows, 2), *judge_forecasts(ledger),
        *(one.judge(rows) for one in GAINS[8:]),
        judge_target(rows),
        *(one.judge(rows) for one in QUANTITIES),
    ]  # fmt: skip
