"""`fit`: scaling laws of a table of runs, and a verdict on each arm against a reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from steepen.errors import UsageError
from steepen.requests.request import Request, function
from steepen.requests.tables import TABLE, ReadsTable
from steepen.results.fit import ComputeResult
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table
from steepen.results.text import Block, Paragraph
from steepen.utils.codec import HelpPanel, Range, option
from steepen.utils.console import spinner
from steepen.utils.values import Confidence, Flops, Level, Noise, Numbers, Seed

if TYPE_CHECKING:
    from steepen.laws.distributions import Prior
    from steepen.laws.fits.chinchilla import ChinchillaLoss
    from steepen.laws.isoflop_table import SweepLoss
    from steepen.laws.ladder import Ladder
    from steepen.results.chinchilla import ChinchillaResult
    from steepen.results.isoflop import IsoflopResult
    from steepen.studies.answer import Answer
    from steepen.tables.table import Table as RunTable

    OneFit: TypeAlias = ComputeResult | ChinchillaResult | IsoflopResult

# Panels of --help.
COMPUTE = HelpPanel("Law: compute")
CHINCHILLA = HelpPanel("Law: chinchilla, looped")
ISOFLOP = HelpPanel("Law: isoflop")
INTERVALS = HelpPanel("Intervals")
FORECASTS = HelpPanel("Registered forecasts")

NEEDS = {  # columns of each law
    "compute": ("flops", "loss"),
    "chinchilla": ("parameters", "tokens", "loss"),
    "looped": ("passes", "tokens", "loss"),  # n_once and n_rec may be zero: checked where they are read
    "isoflop": ("budget", "x", "loss"),
}


@dataclass(frozen=True, eq=False, repr=False)
class FitsBy(Result):
    """Results by the value of the column `by`; `left_out_parts` says which values could not be fitted."""

    schema = "steepen.fit.by/1"

    by: str
    results: Mapping[str, Result]
    left_out_parts: tuple[str, ...] = ()

    def __getitem__(self, value: str) -> Any:
        """The result of a value."""
        return self.results[value]

    @property
    def exit_code(self) -> int:
        """That of the first result with another than 0."""
        return max(one.exit_code for one in self.results.values())

    def _each(self, of: Callable[[Any], Iterable[Any]]) -> list[tuple[str, Any]]:
        """The items that `of` gives of every result, each with the result's value."""
        return [(value, item) for value, one in self.results.items() for item in of(one)]

    @property
    def verdicts(self) -> dict[str, Any]:
        """The verdicts by arm and value, where the law has some."""
        judged = self._each(lambda one: getattr(one, "verdicts", {}).items())
        return {f"{arm} ({value})": verdict for value, (arm, verdict) in judged}

    def page_content(self) -> Answer:
        """The pages of all results as one, each part under its value."""
        own, pages = (
            super().page_content(),
            {value: one.page_content() for value, one in self.results.items()},
        )
        verdicts = [replace(one, part=value) for value, page in pages.items() for one in page.verdicts]
        first = next(iter(pages.values()))
        return replace(
            own, question=f"{first.question} By {self.by}", findings=() if verdicts else own.findings,
            verdicts=tuple(verdicts),
            tables=tuple(replace(table, title=f"{value}: {table.title}")
                         for value, page in pages.items() for table in page.tables),
            warnings=(*self.left_out_parts, *(f"{value}: {line}" for value, page in pages.items()
                                              for line in page.warnings)),
        )  # fmt: skip

    @property
    def rows(self) -> Sequence[Any]:
        """The rows of all results."""
        return [row for _, row in self._each(attrgetter("rows"))]

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows of all results, with the value of the column."""
        return [{self.by: value, **row} for value, row in self._each(methodcaller("to_rows"))]

    def table(self, caption: str = "") -> Table:
        """The tables of all results as one, with the value of the column first."""
        first = next(iter(self.results.values())).table()
        rows = tuple((value, *row) for value, row in self._each(lambda one: one.table().rows))
        shown = (Column(self.by), *first.shown)
        return Table(self.headline(), (self.by, *first.columns), rows, caption, shown=shown)

    def headline(self) -> str:
        """The headline of every result."""
        return "; ".join(f"{value}: {one.headline()}" for value, one in self.results.items())

    def to_dict(self) -> dict[str, Any]:
        """The JSON of every result by value."""
        found = {value: json.loads(one.to_json()) for value, one in self.results.items()}
        return {"by": self.by, "results": found, "left_out": list(self.left_out_parts)}

    def panels(self) -> Sequence[Panel]:
        """The panels of all results."""
        return [
            replace(panel, title=f"{value}: {panel.title}", group=panel.group and f"{value}: {panel.group}")
            for value, panel in self._each(methodcaller("panels"))
        ]

    def blocks(self, width: int) -> Iterable[Block]:
        """Every result under its value."""
        for sentence in self.left_out_parts:
            yield Paragraph(f" {sentence}", "left out:", "yellow")
        for value, one in self.results.items():
            yield Paragraph(f" {value}", f"{self.by}:", "bold")
            yield from one.blocks(width)
            yield Paragraph()


@dataclass(frozen=True, kw_only=True)
class Fit(ReadsTable, Request["OneFit | FitsBy"]):
    """Fit a scaling law to a table of runs and judge each arm against a reference.

    One model of the table, with the compute law L = E + A·(C/C0)^−γ of every arm (columns arm, flops, loss),
    answers three questions: is the arm better where both were measured, does the gain grow with compute, and
    by what? A table without an arm column is one arm; a seed column distinguishes repeated runs.

    `law` chinchilla fits L = E + A/N^α + B/D^β (columns parameters, tokens, loss); `law` looped the same with
    N = N_once + r^φ·N_rec (columns n_once, n_rec, passes, tokens, loss); `law` isoflop the optimum of each
    fixed-compute sweep (columns budget, x, loss).
    """

    examples = (
        "steepen fit paper:fineweb --figure laws.png",
        "steepen fit runs.csv --reference vanilla --hold-out 1e20",
        "steepen fit sizes.csv --law chinchilla --columns parameters=N,tokens=D --budget 1e24",
        "steepen fit sweeps.csv --law isoflop --reference vanilla",
    )
    figure = tables = True

    by: str | None = TABLE("Fit the rows of every value of this column by themselves: dataset.")
    reference: str | None = option("Arm that every other arm is compared with.")
    full: bool = option("Print everything: sentences, what would change them, laws and multipliers.", False)
    exit_code: bool = COMPUTE(
        "For programs: exit with 3 if it is not resolved for some arm whether it is better.", False
    )
    law: Literal["compute", "chinchilla", "looped", "isoflop"] = option(
        "compute, chinchilla, looped or isoflop.", "compute"
    )
    objective: Literal["raw-huber", "huber", "mse", "log-mse"] | None = option(
        "Objective of the fit: huber (of log losses), mse or log-mse; for compute also raw-huber. For "
        "compute it is how the paper's method fits E: its authors took raw-huber, of the losses themselves. "
        "Default: raw-huber; huber for chinchilla and looped, log-mse for isoflop."
    )
    hold_out: tuple[str | float, ...] = option(
        "Hold runs out of the fit and score their prediction: FLOPS (every run at or above it), ARM:FLOPS, "
        "or a table of runs; none for no run. Repeatable.",
        (),
    )
    budget: Flops | None = option("Compute in FLOPs to predict at, besides 10 and 1000 times the top rung.")
    predict: Numbers | None = COMPUTE(
        "Print the loss of every arm at these FLOPs, with intervals for one run: 1e21,1e22."
    )

    method: Literal["both", "joint", "paper"] = COMPUTE(
        "joint (one E fitted to all arms), paper (E fitted to the reference alone), or both.", "both"
    )
    reference_law: Literal["regression", "free-fit"] = COMPUTE(
        "Where the paper's method takes the reference's own γ from: regression at E, like every arm, or "
        "free-fit, the fit that gave E.",
        "regression",
    )
    interpolate: Literal["raw-loss", "log-loss"] = COMPUTE(
        "What is linear in log compute between rungs in interpolated multipliers: raw-loss (reproduces the "
        "paper's numbers) or log-loss (what its text says).",
        "raw-loss",
    )
    extrapolate: bool = COMPUTE("Also print fitted multipliers beyond the ladders, marked †.", False)
    c0: Flops | None = COMPUTE(
        "C0 in FLOPs. Default: geometric mean of the reference's FLOPs; for paper:…, the FLOPs of its d8 run."
    )
    noise: Noise | None = COMPUTE("Known standard deviation of a run's loss; lack of fit is added to it.")
    irreducible_loss: str | float | None = COMPUTE(
        "E, if it is known: 1.69, or 1.69±0.05 (also 1.69+-0.05) with its error. Also for chinchilla and "
        "looped."
    )
    against: Literal["reference", "all"] = COMPUTE(
        "Compare arms with the reference, or all with each other.", "reference"
    )
    level: Level = COMPUTE("Family-wise significance level of each of the three questions.", 0.05)
    adjust: bool = COMPUTE("Share the level among the arms (Holm), or give it to each.", True)
    lr_regret: float | None = COMPUTE(
        "Regret of a learning rate off by 2×, measured in a sweep: mistuning that would change a verdict is "
        "then also given as a factor in the learning rate.",
        limits=Range(0, 100),
    )
    margin: float = COMPUTE("Largest |Δγ|/γ that still counts as a constant gain.", 0.025, Range(0, 10))
    equivalence: float = COMPUTE(
        "Largest difference in compute that counts as no difference: 0.05 is ±5%.", 0.05, Range(1e-6, 10)
    )

    confidence: Confidence = INTERVALS("Confidence level of the intervals.", 0.90)
    draws: int = INTERVALS("Draws of the intervals of interpolated multipliers.", 2000, Range(0, 1_000_000))
    seed: Seed = INTERVALS("Random seed of the draws.", 0)

    delta: float = CHINCHILLA("Delta of the Huber objective, in log loss.", 1e-3, Range(1e-9, 1_000))
    equal_exponents: bool = CHINCHILLA(
        "One exponent, α = β: four parameters, so five runs are enough.", False
    )

    vertex: Literal["quadratic", "akima"] = ISOFLOP("Minimum of a quadratic or an akima curve.", "quadratic")
    nearest: int | None = ISOFLOP("Fit only this many points around each minimum.", limits=Range(3, 10_000))

    register: Path | None = FORECASTS(
        "Add every arm's forecast at `budget` to this file, to be scored once the runs exist: law, hash of "
        "the data, date and interval."
    )
    score: Path | None = FORECASTS(
        "Score the forecasts of a file of `register` against the runs of the table, and add what was "
        "measured to it; `steepen ledger` shows all, of any number of tables."
    )

    def check(self) -> None:
        """Reject registered forecasts of other laws, without a budget, or that are not there."""
        if self.law != "compute" and (self.x != "flops" or self.predict or self.exit_code):
            raise UsageError("`x`, `predict` and `exit_code` are for `law` compute.")
        if self.law == "isoflop" and self.irreducible_loss is not None:
            raise UsageError("`irreducible_loss` is for the laws that have one, not for `law` isoflop.")
        if self.register or self.score:
            if self.law != "compute":
                raise UsageError("`register` and `score` are for `law` compute.")
            if self.by:
                raise UsageError("forecasts are of one data set: choose it with `where`, not with `by`.")
        if self.register and self.budget is None:
            raise UsageError("say with `budget` at which FLOPs to forecast, for `register`.")
        if self.score and not self.score.is_file():
            raise UsageError(f"there are no registered forecasts at {self.score}; `register` writes them.")

    def run(self) -> OneFit | FitsBy:
        """Read the table and fit the law; with `by`, to each part of the table."""
        from steepen.tables.clean_table import merged, worst_first

        fits = {
            "compute": _fit_compute, "chinchilla": _fit_chinchilla, "looped": _fit_chinchilla,
            "isoflop": _fit_isoflop,
        }  # fmt: skip
        request, tables = self._as_published(), self.read_table(NEEDS[self.law], self.by)
        if self.by is None:
            return fits[self.law](request, tables[""]).with_problems(tables[""].problems)
        found: dict[str, OneFit] = {}
        short: list[str] = []
        for value, table in tables.items():
            try:
                found[value] = fits[self.law](request, table)
            except UsageError as error:
                short.append(str(error))
        if not found:
            raise UsageError("\n".join(short))
        problems = [one for value in found for one in tables[value].problems]
        return FitsBy(self.by, found, tuple(short)).with_problems(worst_first(merged(problems)))

    def _as_published(self) -> Fit:
        """The request, with the paper's reference, hold-outs and C0 for the paper's own ladders."""
        from steepen.tables.paper_ladders import PREFIX, paper_ladders

        if not isinstance(self.table, str | Path) or not str(self.table).startswith(PREFIX):
            return self
        published = paper_ladders(str(self.table))
        return replace(
            self,
            reference=self.reference or published.reference,
            hold_out=self.hold_out or published.hold_out,
            c0=self.c0 or published.c0,
        )

    def known_e(self) -> Prior | None:
        """What is known of E."""
        from steepen.laws.distributions import Prior

        return None if self.irreducible_loss is None else Prior.from_text(str(self.irreducible_loss))

    def held_out(self) -> list[str]:
        """The hold-outs as text."""
        return [one if isinstance(one, str) else repr(one) for one in self.hold_out]


def _fit_compute(request: Fit, table: RunTable) -> ComputeResult:
    """Fit every arm's compute law, judge the arms, and register or score forecasts."""
    from steepen.laws.analysis import AnalysisRequest, analyse_table, choose_reference
    from steepen.laws.ladder import read_ladders

    if not table.has("arm"):
        table = replace(table, columns={**table.columns, "arm": ("runs",) * len(table)})
    arms = read_ladders(table)
    settings = AnalysisRequest(
        reference=choose_reference(arms, request.reference), loss=request.objective or "raw-huber",
        method=request.method, reference_law=request.reference_law, interpolate=request.interpolate,
        c0=request.c0, noise=request.noise, level=request.level, adjust=request.adjust, margin=request.margin,
        equivalence=request.equivalence, irreducible_loss=request.known_e(),
        every_pair=request.against == "all", lr_regret=request.lr_regret, confidence=request.confidence,
        draws=request.draws, seed=request.seed, budget=request.budget, extrapolate=request.extrapolate,
        unit=table.axis.unit,
    )  # fmt: skip
    with spinner(f"fitting {len(arms)} arms"):
        analysis, ladders = analyse_table(table, settings, request.held_out())
    found = ComputeResult(analysis, ladders, full=request.full, exit_codes=request.exit_code)
    if request.register or request.score:
        found = _with_forecasts(request, found, arms)
    return replace(found, predictions=found.predict(request.predict)) if request.predict else found


def _with_forecasts(request: Fit, found: ComputeResult, arms: dict[str, Ladder]) -> ComputeResult:
    """The result with the forecasts that were scored against its runs, and those that it registers."""
    from steepen.laws import registered_forecasts as forecasts

    if request.score:
        scored = tuple(forecasts.score_registered(forecasts.read_registered(request.score), arms))
        forecasts.record_scores(request.score, scored)
        over_all = forecasts.calibration(forecasts.read_ledger(request.score))
        found = replace(found, scored=scored, calibration=over_all)
    if request.register and request.budget:
        written = forecasts.register_forecasts(
            request.register, found.analysis, found.ladders, request.budget, arms
        )
        found = replace(found, registered=tuple(forecasts.score_registered(written, {})))
    return found


def _fit_chinchilla(request: Fit, table: RunTable) -> ChinchillaResult:
    """Fit L(N, D) to every arm (one law for looped models), and compare arms with a reference."""
    from steepen.laws.chinchilla_table import fit_chinchilla_table
    from steepen.laws.fits.chinchilla import ChinchillaSettings
    from steepen.results.chinchilla import ChinchillaResult

    settings = ChinchillaSettings(
        loss=cast("ChinchillaLoss", request.objective or "huber"), delta=request.delta,
        tied=request.equal_exponents, confidence=request.confidence, irreducible_loss=request.known_e(),
    )  # fmt: skip
    with spinner(f"fitting {len(table)} runs"):
        found = fit_chinchilla_table(
            table,
            settings,
            looped=request.law == "looped",
            reference=request.reference,
            budget=request.budget,
            hold_out=request.held_out(),
        )
    return ChinchillaResult(found)


def _fit_isoflop(request: Fit, table: RunTable) -> IsoflopResult:
    from steepen.laws.isoflop_table import fit_isoflop_table
    from steepen.results.isoflop import IsoflopResult

    found = fit_isoflop_table(
        table, loss=cast("SweepLoss", request.objective or "log-mse"), vertex=request.vertex,
        nearest=request.nearest, confidence=request.confidence, reference=request.reference,
        budget=request.budget, hold_out=request.held_out(),
    )  # fmt: skip
    return IsoflopResult(found)


fit = function(Fit)
