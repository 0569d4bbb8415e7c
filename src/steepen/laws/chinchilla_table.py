"""Fit laws in model size and tokens to a table of runs, compare its arms, and score the runs held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from steepen.errors import UsageError, require_reference
from steepen.laws.arm_fits import compare_arms, fit_arms, held_rows
from steepen.laws.distributions import Interval
from steepen.laws.fits.chinchilla import ChinchillaFit, ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.size_law_comparison import ArmRuns, LawComparison, compare_laws
from steepen.laws.fits.size_law_solver import IntArray, ModelSize
from steepen.laws.verdict.questions import holm
from steepen.tables.table import Table
from steepen.tables.table_selection import parse_hold_outs
from steepen.utils.arrays import Array, Mask, take_rows

LOOPED_COLUMNS = ("n_once", "n_rec", "passes")  # of looped models, in place of parameters


@dataclass(frozen=True)
class ComputeOptimum:
    """The split of `flops` into parameters and tokens with the lowest predicted loss."""

    flops: float
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class HeldOutChinchillaLoss:
    """A row held out of the Chinchilla fit; `error` is observed minus forecast.

    `interval` covers a run's loss: the law's own error and the noise of a run. `error_in_sigma` is the error
    in residual standard deviations, `error_in_standard_errors` in standard errors of the forecast.
    """

    row: int
    parameters: float
    tokens: float
    observed: float
    forecast: float
    interval: Interval
    error: float
    error_in_sigma: float
    error_in_standard_errors: float


@dataclass(frozen=True, eq=False)
class ArmChinchilla:
    """The law of one arm, its optimum at a budget, the forecasts of held-out rows, and the rows fitted."""

    fit: ChinchillaFit
    optimum: ComputeOptimum | None
    hold_out: tuple[HeldOutChinchillaLoss, ...]
    size: ModelSize
    runs: ArmRuns

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        optimum = {} if self.optimum is None else {"optimum": asdict(self.optimum)}
        return {**self.fit.to_dict(), "hold_out": [asdict(run) for run in self.hold_out], **optimum}


@dataclass(frozen=True, eq=False)
class ChinchillaTableFit:
    """Laws of every arm of a table; one law, under "", if there is no arm column.

    `p_better` and `p_growth` are p-values of the comparisons, adjusted for the number of arms (Holm).
    """

    arms: dict[str, ArmChinchilla]
    reference: str | None
    comparisons: dict[str, LawComparison]
    row_word: str
    warnings: tuple[str, ...]

    @property
    def first(self) -> ArmChinchilla:
        """The reference's law, or the first arm's."""
        return self.arms[self.reference] if self.reference else next(iter(self.arms.values()))

    @property
    def p_better(self) -> dict[str, float]:
        """Adjusted p-value of no difference, by arm."""
        return holm({arm: one.multiplier.p for arm, one in self.comparisons.items()})

    @property
    def p_growth(self) -> dict[str, float]:
        """Adjusted p-value of a constant multiplier, by arm."""
        return holm({arm: one.p_growth for arm, one in self.comparisons.items()})

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON: the only arm's law at the top, every arm's in `arms`."""
        warnings = {"warnings": list(self.warnings)}
        if "" in self.arms:
            return self.first.to_dict() | warnings
        only = self.first.to_dict() if len(self.arms) == 1 else {"law": "chinchilla"}
        better, growth = self.p_better, self.p_growth
        return {
            **only, **warnings, "reference": self.reference,
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "comparisons": {
                name: {**asdict(one), "p_better_holm": better[name], "p_growth_holm": growth[name]}
                for name, one in self.comparisons.items()
            },
        }  # fmt: skip


def fit_chinchilla_table(
    table: Table,
    settings: ChinchillaSettings | None = None,
    *,
    looped: bool = False,
    reference: str | None = None,
    budget: float | None = None,
    hold_out: Sequence[str] = (),
) -> ChinchillaTableFit:
    """Fit L(N, D) = E + A/N^α + B/D^β to columns parameters, tokens, loss (and arm, run, seed, flops).

    Every arm has its own law. Hold-outs are FLOPS, ARM:FLOPS or a table's path; FLOPs are the table's, or
    6·N·D. Rows with the same `run` (checkpoints of one training run) are one observation for intervals.
    `looped` fits one law with φ to all rows, from columns n_once, n_rec, passes, tokens, loss.
    """
    settings = settings or ChinchillaSettings()
    if looped and reference is not None:
        raise UsageError("`law` looped fits one law to the runs of all arms; leave `reference` out.")
    if looped and budget is not None:
        raise UsageError("`law` looped has no compute-optimal split of N and D; leave `budget` out.")
    rows = _Rows.read(table, looped, with_arms=reference is not None)
    arms = list(dict.fromkeys(rows.arm.tolist()))
    if reference is not None:
        require_reference(reference, arms)
    held, further = _hold_out(table, rows, arms, hold_out, looped)
    warnings = list[str]()

    def fit_arm(arm: str) -> ArmChinchilla:
        own = rows.arm == arm
        scored = [take_rows(rows, own & held), *(take_rows(other, other.arm == arm) for other in further)]
        found = _fit_arm(take_rows(rows, own & ~held), scored, settings, looped, budget)
        warnings.extend(f"{arm}: {flag}" if arm else flag for flag in found.fit.flags)
        return found

    fits = fit_arms(arms, reference, fit_arm, warnings)
    if not fits:
        raise UsageError("no arm has the runs that its law needs: " + "; ".join(warnings))
    comparisons: dict[str, LawComparison] = {}
    if reference is not None:
        base = fits[reference].runs
        others = [name for name in fits if name != reference]
        comparisons = compare_arms(others, lambda name: compare_laws(base, fits[name].runs, budget), warnings)
        if rows.run is not None and len(set(rows.run.tolist())) < len(rows.run):
            warnings.append("rows share training runs; comparisons treat them as independent")
    return ChinchillaTableFit(fits, reference, comparisons, table.row_word, tuple(warnings))


def _fit_arm(
    used: _Rows, scored: Sequence[_Rows], settings: ChinchillaSettings, looped: bool, budget: float | None
) -> ArmChinchilla:
    """The law of one arm's rows, and the forecasts of the rows held out."""
    if not len(used.loss):
        raise UsageError("every run is held out, so none is left to fit.")
    fit = fit_chinchilla(
        used.size if looped else used.size.stored, used.tokens, used.loss, settings,
        runs=None if used.run is None else used.run.tolist(), flops=used.flops if used.has_flops else None,
    )  # fmt: skip
    hold_out = tuple(_score(fit, part, i, looped) for part in scored for i in range(len(part.loss)))
    optimum = None if budget is None else ComputeOptimum(budget, *fit.optimum(budget))
    runs = ArmRuns(used.size.stored, used.tokens, used.loss, used.flops, fit)
    return ArmChinchilla(fit, optimum, hold_out, used.size, runs)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The columns of a table for this law."""

    lines: IntArray
    arm: Any  # names, as an array
    size: ModelSize
    tokens: Array
    loss: Array
    flops: Array
    has_flops: bool
    run: Any | None

    @classmethod
    def read(cls, table: Table, looped: bool, *, with_arms: bool) -> _Rows:
        sizes = list(LOOPED_COLUMNS) if looped else ["parameters"]
        has_arms = not looped and table.has("arm", aliases=with_arms)
        table.require([*(["arm"] if with_arms else []), *sizes, "tokens", "loss"])
        arm = table.names("arm") if has_arms else [""] * len(table)
        d, y = table.numbers("tokens"), table.numbers("loss")
        if looped:
            once, recurrent = (table.numbers(name, positive=False) for name in sizes[:2])
            passes = table.numbers("passes")
            if (wrong := np.flatnonzero((once < 0) | (recurrent < 0) | (once + recurrent <= 0))).size:
                raise UsageError(f"{table.place(int(wrong[0]))}: n_once and n_rec must be parameter counts.")
            size = ModelSize(once, recurrent, np.log(passes))
        else:
            size, passes = ModelSize.of(table.numbers("parameters")), np.ones(len(table))
        run = None if (shared := table.training_runs()) is None else np.array(shared)
        if run is None:
            cells = list(zip(arm, size.stored.tolist(), passes.tolist(), d.tolist(), strict=True))
            what = f"{' and '.join([*sizes, 'tokens'])}{' of an arm' * has_arms}"
            table.require_unique_rows(cells, what)
        has_flops = table.has("flops")
        flops = table.numbers("flops") if has_flops else 6 * size.effective(1.0)[0] * d
        return cls(np.array(table.lines), np.array(arm), size, d, y, flops, has_flops, run)

    def names(self) -> list[tuple[Any, ...]]:
        """What identifies a run: arm, size, passes and tokens."""
        parts = (self.arm, self.size.once, self.size.recurrent, self.size.log_passes, self.tokens)
        return list(zip(*(part.tolist() for part in parts), strict=True))


def _hold_out(
    table: Table, rows: _Rows, arms: Sequence[str], hold_out: Sequence[str], looped: bool
) -> tuple[Mask, list[_Rows]]:
    """Rows to hold out, and further rows to score from other tables."""
    held, further = np.zeros(len(rows.loss), bool), list[_Rows]()
    hold_outs = parse_hold_outs(hold_out, arms, table)
    for other in hold_outs:
        if other.table is None:
            continue
        read = _Rows.read(other.table, looped, with_arms=list(arms) != [""])
        if unknown := sorted(set(read.arm.tolist()) - set(arms)):
            raise UsageError(f"hold-out {other.text}: arm '{unknown[0]}' is held out but not fitted.")
        # A run that is also in the fitted table would be scored against itself.
        theirs, known = set(read.names()), set(rows.names())
        held |= np.array([key in theirs for key in rows.names()])
        further.append(take_rows(read, np.array([key not in known for key in read.names()])))
    return held | held_rows(hold_outs, rows.arm, rows.flops), further


def _score(fit: ChinchillaFit, rows: _Rows, i: int, looped: bool) -> HeldOutChinchillaLoss:
    n, d, observed = float(rows.size.stored[i]), float(rows.tokens[i]), float(rows.loss[i])
    size = take_rows(rows.size, np.array([i])) if looped else n
    forecast = float(np.squeeze(fit.predict(size, d)))
    interval, standard_error = fit.forecast_interval(size, d)
    error = observed - forecast
    return HeldOutChinchillaLoss(
        row=int(rows.lines[i]), parameters=n, tokens=d, observed=observed, forecast=forecast,
        interval=interval, error=error, error_in_sigma=error / max(fit.residual_sd, 1e-300),
        error_in_standard_errors=error / max(standard_error, 1e-300),
    )  # fmt: skip
