"""Analyse ladders of several arms: one model, laws, a verdict for each arm, multipliers and hold-outs.

The flow: `analyse_table` makes ladders of a table of runs, `analyse` fits the model of the whole table
(`fit_ladders`), from which laws, verdicts, multipliers and the scores of hold-outs all come. Runs that the
model finds off the others are left out before any of them, so that no number rests on runs that another
leaves out. Warnings about the table and its laws are a sentence each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import Prior
from steepen.laws.fits.compute_law import AnalysisRequest, ComputeFit, fit_paper, law_dict
from steepen.laws.ladder import Ladder, check_ladders, plain_name
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.holdout import HeldOutLoss, hold_out_rungs, score_hold_outs
from steepen.laws.verdict.judge import Outlier, TableJudge, fit_ladders
from steepen.laws.verdict.multipliers import Multiplier, fitted_multipliers, interpolated_multipliers
from steepen.tables.table import Table

MIN_PLAUSIBLE_FLOPS = 1e6  # a training run takes more; smaller numbers are in another unit
MAX_PLAUSIBLE_LOSS = 20.0  # nats per token: more is a perplexity
MAX_NAMED = 3


def collect_warnings(
    given: dict[str, Ladder], judge: TableJudge, fit: ComputeFit, unit: str = "FLOPs"
) -> tuple[str, ...]:
    """Warnings about the ladders as `given` and what was fitted; `unit` is that of their x axis."""
    return (*_of_model(judge, fit, unit), *_of_table(given, unit), *_of_losses(judge.ladders, fit))


def _of_model(judge: TableJudge, fit: ComputeFit, unit: str) -> Iterable[str]:
    for outlier in judge.outliers:
        run = "" if outlier.seed is None else f"run {outlier.seed + 1} of "
        side = "above" if outlier.deviation > 0 else "below"
        yield (
            f"{outlier.place}: {run}{outlier.arm} at {outlier.flops:.3g} {unit} is left out of everything:"
            f" its loss is {abs(outlier.deviation):.4f} {side} the law of the others"
            f" (p = {outlier.p_value:.2g}); check what was run there"
        )
    if fit.at_bound:  # the one bound is E ≥ 0
        yield (
            "the fitted irreducible loss E is 0, its lower bound: these runs do not show one, γ is the slope"
            " over their own range only, and intervals take E as known"
        )
    if judge.own_e:
        yield (
            f"the arms do not share one irreducible loss E (p = {judge.p_one_e:.2g}): every arm has its own"
            " here, and growth is that of the multiplier within the common range"
        )


def _of_table(ladders: dict[str, Ladder], unit: str) -> Iterable[str]:
    lowest = min(float(ladder.flops.min()) for ladder in ladders.values())
    if unit == "FLOPs" and lowest < MIN_PLAUSIBLE_FLOPS:
        yield (
            f"the lowest compute is {lowest:.3g} FLOPs, less than any training run takes: the column is in"
            " another unit, and so is every number of FLOPs printed here; convert it"
            " (1 PF-day is 8.64e19 FLOPs)"
        )
    highest = max(float(ladder.loss.max()) for ladder in ladders.values())
    if highest > MAX_PLAUSIBLE_LOSS:
        yield f"the highest loss is {highest:.4g}: if these are perplexities, give their logarithms"
    places = [
        ladder.row_labels[k]
        for ladder in ladders.values()
        for k, runs in enumerate(ladder.runs)
        if len(runs) > 1 and np.ptp(runs) == 0
    ]
    if places:
        yield (
            f"{places[0]}: the seeds of {'this rung' if len(places) == 1 else f'{len(places)} rungs'} have"
            " equal losses to all digits: copies of a run are no replicates"
        )
    for first, second in combinations(ladders, 2):
        if plain_name(first) == plain_name(second):
            yield f"'{first}' and '{second}' are different arms here; if they are one, spell them alike"


def _of_losses(ladders: dict[str, Ladder], fit: ComputeFit) -> Iterable[str]:
    flat = [name for name, ladder in ladders.items() if ladder.loss[-1] >= ladder.loss[0]]
    if flat:
        yield (
            f"the loss of {', '.join(repr(name) for name in flat[:MAX_NAMED])} is no lower at the highest"
            " compute than at the lowest: multipliers of such a ladder mean nothing"
        )
    found: list[str] = []
    for name, ladder in ladders.items():
        e, rows = fit.arms[name].e.value, ladder.row_labels
        rise = np.flatnonzero(np.diff(ladder.loss) > 0) + 1
        found += [f"{rows[i]}: the loss of '{ladder.arm}' rises with compute here" for i in rise]
        found += [
            f"{rows[i]}: the loss {ladder.loss[i]:.4f} is not above the fitted E = {e:.4f}; the law cannot"
            " hold there"
            for i in np.flatnonzero(ladder.loss <= e)
        ]
    yield from found[:MAX_NAMED]
    if len(found) > MAX_NAMED:
        yield f"and {len(found) - MAX_NAMED} more of this kind"


@dataclass(frozen=True)
class SweptE:
    """The answers if E were known to be `e`: by arm, those to the first two questions."""

    e: float
    answers: dict[str, str]


@dataclass(frozen=True)
class LadderAnalysis:
    """The laws by each method, a verdict and multipliers for each arm, scored hold-outs and warnings.

    `pairs` are the verdicts of every pair of arms, where they were asked for. `left_out` are runs that took
    part in nothing.
    """

    request: AnalysisRequest
    fits: dict[str, ComputeFit]
    verdicts: dict[str, Verdict]
    pairs: tuple[Verdict, ...]
    multipliers: dict[str, tuple[Multiplier, ...]]
    hold_out: tuple[HeldOutLoss, ...]
    left_out: tuple[Outlier, ...]
    lack_of_fit: float
    seed_noise: tuple[tuple[float, float], ...]  # compute and SD of a seed; empty without replicates
    p_shared_irreducible_loss: float | None
    warnings: tuple[str, ...]
    judge: TableJudge

    @cached_property
    def e_sweep(self) -> tuple[SweptE, ...]:
        """What hangs on E; five more fits, half the time of an analysis, so made only for those who ask."""
        return _sweep_e(self.judge, list(self.verdicts))

    @property
    def primary_fit(self) -> ComputeFit:
        """The joint fit, or the paper's if only that was requested."""
        return self.fits.get("joint") or self.fits["paper"]

    @property
    def one_e_rejected(self) -> bool:
        """Whether every arm has an E of its own, because the data reject one for all."""
        return self.judge.own_e

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON (`to_json` writes infinities and NaN as null)."""
        arms: dict[str, Any] = {}
        for name, law in self.primary_fit.arms.items():
            verdict = self.verdicts.get(name)
            arms[name] = {
                **law_dict(law),
                "verdict": verdict.to_dict() if verdict else None,
                "multipliers": [asdict(m) for m in self.multipliers.get(name, ())],
                **{method: law_dict(fit.arms[name]) for method, fit in self.fits.items()},
            }
        return {
            "law": "compute",
            "form": "loss = e + exp(log_a) * (flops / c0) ** -gamma",
            "reference": self.request.reference,
            "method": self.primary_fit.settings.method,
            "settings": asdict(self.request),
            "c0": self.primary_fit.c0,
            "sigma": self.primary_fit.sigma,
            "lack_of_fit": self.lack_of_fit,
            "seed_noise": [list(pair) for pair in self.seed_noise],
            "degrees_of_freedom": self.primary_fit.degrees_of_freedom,
            "arms": arms,
            "pairs": [verdict.to_dict() for verdict in self.pairs],
            "hold_out": [asdict(h) for h in self.hold_out],
            "left_out": [asdict(one) for one in self.left_out],
            "e_sweep": [asdict(one) for one in self.e_sweep],
            "p_shared_irreducible_loss": self.p_shared_irreducible_loss,
            "warnings": list(self.warnings),
        }


def fit_compute(ladders: dict[str, Ladder], settings: AnalysisRequest) -> ComputeFit:
    """Fit L(C) = E + A·(C/C0)^−γ to every arm, by the paper's method if it is named, else jointly."""
    ladders, _ = check_ladders(ladders, settings.reference)
    if settings.method == "paper":
        return fit_paper(ladders, settings)
    return fit_ladders(ladders, settings).laws()


def analyse(
    ladders: dict[str, Ladder], request: AnalysisRequest, hold_out: dict[str, Ladder] | None = None
) -> LadderAnalysis:
    """Fit the model, judge every arm against the reference, and score the held-out rungs.

    Runs that are off the others are left out of laws, verdicts and multipliers alike.
    """
    given, short = check_ladders(ladders, request.reference)
    judge = fit_ladders(given, request)
    fits, not_fitted = _laws(judge, request)
    others = [name for name in judge.ladders if name != request.reference]
    wanted = [(request.reference, name) for name in others]
    if request.every_pair:
        wanted += list(combinations(others, 2))
    judged = judge.judge(wanted)
    primary = fits.get("joint") or fits["paper"]
    unknown = [arm for arm in hold_out or {} if arm in short and arm not in primary.arms]
    held_out = {arm: ladder for arm, ladder in (hold_out or {}).items() if arm not in unknown}
    return LadderAnalysis(
        request, fits, {verdict.arm: verdict for verdict in judged[: len(others)]},
        tuple(judged[len(others) :]),
        {name: tuple(_multipliers(judge, fits, name, request)) for name in others},
        score_hold_outs(primary, held_out, judge), judge.outliers, judge.tau, _seed_noise(judge),
        judge.p_one_e, (*short, *not_fitted, *collect_warnings(given, judge, primary, request.unit)),
        judge,
    )  # fmt: skip


def _laws(judge: TableJudge, request: AnalysisRequest) -> tuple[dict[str, ComputeFit], list[str]]:
    """The laws by each method that was asked for, without the same runs."""
    fits: dict[str, ComputeFit] = {}
    not_fitted: list[str] = []
    if request.method != "paper":
        fits["joint"] = judge.laws()
    if request.method != "joint":
        try:
            fits["paper"] = fit_paper(judge.ladders, request)
        except UsageError as error:
            if request.method == "paper":
                raise
            not_fitted.append(f"the paper's method is left out. {error}")
    return fits, not_fitted


def _multipliers(
    judge: TableJudge, fits: dict[str, ComputeFit], name: str, request: AnalysisRequest
) -> list[Multiplier]:
    """Measured multipliers, and those of the laws."""
    reference, arm = judge.ladders[request.reference], judge.ladders[name]
    first, second = (
        np.sqrt([judge.run_variance(float(c), float(k)) for c, k in zip(one.flops, one.seeds, strict=True)])
        for one in (reference, arm)
    )
    found = interpolated_multipliers(
        reference, arm, sigmas=(first, second), confidence=request.confidence, seed=request.seed,
        draws=request.draws, interpolate=request.interpolate,
    )  # fmt: skip
    budget = [request.budget] if request.budget is not None and request.extrapolate else []
    at = np.concatenate([reference.flops, budget])
    if "joint" in fits:
        found += judge.multipliers(name, request.reference, at, request.extrapolate)
    if "paper" in fits and not judge.own_e:  # the paper's method has one E
        leads = "joint" not in fits
        found += fitted_multipliers(fits["paper"], name, at, extrapolate=request.extrapolate, leads=leads)
    return found


def _seed_noise(judge: TableJudge) -> tuple[tuple[float, float], ...]:
    """Compute and standard deviation of a seed, in each bin of compute."""
    seeds, cells = judge.fit.seeds, judge.fit.cells
    if seeds is None:
        return ()
    found: list[tuple[float, float]] = []
    for b in range(int(seeds.bins.max()) + 1):
        own = (seeds.bins == b) & cells.mask
        compute = judge.c0 * float(np.exp(cells.x[own].mean()))
        found.append((compute, float(np.sqrt(seeds.variance[0][own][0]))))
    return tuple(found)


def _sweep_e(judge: TableJudge, others: Sequence[str]) -> tuple[SweptE, ...]:
    """The first two answers at several values of E, each taken as known; arms share the level as ever."""
    if judge.own_e or judge.fit.e_at_bound.any() or not others or len(others) > 50:
        return ()
    e, error = judge.shared_e()
    lowest = min(float(ladder.loss.min()) for ladder in judge.ladders.values())
    found: list[SweptE] = []
    values = [e + step * error for step in (-2.0, -1.0, 0.0, 1.0, 2.0)] if error > 0 else []
    for value in (value for value in values if 0 < value < lowest):
        held = fit_ladders(judge.ladders, replace(judge.settings, irreducible_loss=Prior(value)))
        pairs = [(judge.settings.reference, name) for name in others if name in held.ladders]
        asked = [one for one in held.ask(pairs) if one.span is not None]
        words = {held.names[one.pair[1]]: "; ".join(one.answers(one.levels)[:2]) for one in asked}
        found.append(SweptE(value, words))
    return tuple(found)


def choose_reference(ladders: dict[str, Ladder], reference: str | None) -> str:
    """The named reference, or the only arm of a table with one arm."""
    if reference is None and len(ladders) == 1:
        return next(iter(ladders))
    if reference is None:
        arms = ", ".join(ladders)
        raise UsageError(f"name the arm to judge against with `reference`; the arms are {arms}.")
    return reference


def analyse_table(
    table: Table, request: AnalysisRequest, hold_out: Sequence[str] = ()
) -> tuple[LadderAnalysis, dict[str, Ladder]]:
    """Analyse a table with columns arm, flops, loss (and seed); also return the ladders that were fitted.

    Those are without arms that are too short, and without runs that are off the others.
    """
    ladders, held_out = hold_out_rungs(table, hold_out)
    found = analyse(ladders, request, held_out or None)
    return found, found.judge.ladders
