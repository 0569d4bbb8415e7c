"""`steepen.fit` and `steepen.power`: scaling laws and verdicts of a table, and the power of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steepen.api.frames import as_table
from steepen.api.result import Result, new_axes
from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.chinchilla_table import ChinchillaTableFit
    from steepen.laws.ladder import Ladder
    from steepen.laws.power import CheapestLadder, LadderPlan, Power
    from steepen.laws.table_fits import IsoflopTableFit
    from steepen.laws.verdict.evidence import Verdict

LAWS = ("compute", "chinchilla", "isoflop")


def fit(
    data: Any,
    *,
    law: str = "compute",
    arm: str | None = None,
    flops: str | None = None,
    loss: str | None = None,
    seed: str | None = None,
    parameters: str | None = None,
    tokens: str | None = None,
    x: str | None = None,
    reference: str | None = None,
    where: Sequence[str] | str = (),
    hold_out: Sequence[str | float] | str | float = (),
    at: float | None = None,
    **settings: Any,
) -> ComputeResult | ChinchillaResult | IsoflopResult:
    """Fit a scaling law to a table of runs, and judge every arm against a reference.

    `data` is a file, a pandas, polars or Arrow frame, a dict of columns, a list of dicts, `open_runs(...)`,
    or the paper's own runs, `"paper:fineweb"`. `arm`, `flops`, `loss`, `seed`, `parameters`, `tokens` and `x`
    name its columns where they have other names than these (usual ones, as `C`, `params` and `val_loss`, are
    recognized). A table without an arm column is one arm.

    `law` is `"compute"` (arm, flops, loss: laws with verdicts), `"chinchilla"` (parameters, tokens, loss) or
    `"isoflop"` (flops, x, loss). `where` keeps rows (`"dataset=c4"`), `hold_out` scores the prediction of
    others (`1e20`, `"vanilla:1e20"`), `at` is a compute in FLOPs to predict at. Further settings are those of
    `AnalysisRequest`, `ChinchillaSettings` or `fit_isoflop_table`, as `margin`, `level`, `noise`, `draws`,
    `confidence` and `objective` (the loss of the fit: `"huber"`, `"mse"`, …).
    """
    from steepen.laws.paper_ladders import PREFIX, paper_ladders

    if law not in LAWS:
        raise UsageError(f"law is {law!r}; choose one of {', '.join(LAWS)}.")
    given = {
        "arm": arm,
        "budget" if law == "isoflop" else "flops": flops,
        "loss": loss,
        "seed": seed,
        "parameters": parameters,
        "tokens": tokens,
        "x": x,
    }
    columns = {ours: theirs for ours, theirs in given.items() if theirs is not None}
    table = as_table(data, columns=columns, where=[where] if isinstance(where, str) else where)
    held = [hold_out] if isinstance(hold_out, str | float | int) else list(hold_out)
    held = [value if isinstance(value, str) else f"{value!r}" for value in held]
    if "objective" in settings:
        settings["loss"] = settings.pop("objective")
    if law == "compute" and not table.has("arm"):
        table.require(["flops", "loss"])  # before the arm is added, which the data do not have
        table = replace(table, columns={**table.columns, "arm": ("runs",) * len(table)})
    if isinstance(data, str | Path) and str(data).startswith(PREFIX):
        published = paper_ladders(str(data))
        reference, held = reference or published.reference, held or list(published.hold_out)
        settings.setdefault("c0", published.c0)
    try:
        if law == "compute":
            return _fit_compute(table, reference, held, at, settings)
        if law == "chinchilla":
            return _fit_chinchilla(table, reference, held, at, settings)
        return IsoflopResult(_isoflop(table, held, at, settings))
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        name = str(error).rpartition("argument ")[2].strip("'\" ")
        raise UsageError(f"fit(law={law!r}) has no setting {name}; see help(steepen.fit).") from None


def _fit_compute(
    table: Any, reference: str | None, held: list[str], at: float | None, settings: dict[str, Any]
) -> ComputeResult:
    from steepen.laws.analysis import AnalysisRequest
    from steepen.laws.ladder import read_ladders
    from steepen.laws.table_fits import analyse_table, choose_reference

    ladders = read_ladders(table)
    if reference is None and len(ladders) > 1:
        raise UsageError(f"name the arm to judge against: reference={next(iter(ladders))!r}, for one of "
                         f"{', '.join(ladders)}.")  # fmt: skip
    request = AnalysisRequest(reference=choose_reference(ladders, reference), budget=at, **settings)
    return ComputeResult(*analyse_table(table, request, held))


def _fit_chinchilla(
    table: Any, reference: str | None, held: list[str], at: float | None, settings: dict[str, Any]
) -> ChinchillaResult:
    from steepen.laws.chinchilla_table import fit_chinchilla_table
    from steepen.laws.fits.chinchilla import ChinchillaSettings

    if "draws" in settings:
        settings["bootstrap"] = settings.pop("draws")
    return ChinchillaResult(
        fit_chinchilla_table(
            table, ChinchillaSettings(**settings), reference=reference, budget=at, hold_out=held
        )
    )


def _isoflop(table: Any, held: list[str], at: float | None, settings: dict[str, Any]) -> IsoflopTableFit:
    from steepen.laws.table_fits import fit_isoflop_table

    return fit_isoflop_table(table, budget=at, hold_out=held, **settings)


def verdict_words(verdicts: dict[str, Verdict], most: int = 4) -> str:
    """The words of some verdicts in one line, each with its arm."""
    words = [f"{arm} {verdict.word}" for arm, verdict in verdicts.items()]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@dataclass(frozen=True, eq=False, repr=False)
class ComputeResult(Result):
    """Compute laws of the arms of a table, with a verdict on each against the reference.

    `analysis` has everything that was measured; `ladders` the rungs that were fitted.
    """

    analysis: LadderAnalysis
    ladders: dict[str, Ladder]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each arm but the reference."""
        return self.analysis.verdicts

    def __getitem__(self, arm: str) -> Verdict:
        """The verdict on an arm."""
        if arm not in self.verdicts:
            raise UsageError(f"there is no verdict on {arm!r}; there is one on {', '.join(self.verdicts)}.")
        return self.verdicts[arm]

    def headline(self) -> str:
        """The verdicts in one line."""
        reference = self.analysis.request.reference
        if not self.verdicts:
            gamma = self.analysis.primary_fit.arms[reference].gamma.value
            return f"compute law of {reference}: γ = {gamma:.4f}"
        return f"against {reference}: {verdict_words(self.verdicts)}"

    def summary(self) -> str:
        """Laws, verdicts, hold-outs and warnings as text."""
        return self.analysis.summary()

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers, as `steepen fit --json` prints it."""
        return self.analysis.to_dict()

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per arm: its law, its difference from the reference, and the verdict."""
        rows: list[dict[str, Any]] = []
        for arm, law in self.analysis.primary_fit.arms.items():
            verdict = self.verdicts.get(arm)
            row: dict[str, Any] = {
                "arm": arm,
                "verdict": verdict.word if verdict else "reference",
                "gamma": law.gamma.value,
                "gamma_low": law.gamma.unconditional[0],
                "gamma_high": law.gamma.unconditional[1],
                "E": law.e.value,
                "log_A": law.log_a.value,
                "C0": law.c0,
                "rungs": len(self.ladders[arm].flops),
                "delta_gamma": verdict.delta_gamma if verdict else None,
                "delta_gamma_low": verdict.delta_gamma_interval[0] if verdict else None,
                "delta_gamma_high": verdict.delta_gamma_interval[1] if verdict else None,
                "multiplier": verdict.multiplier if verdict else None,
                "multiplier_flops": verdict.multiplier_flops if verdict else None,
                "p_growth": verdict.p_slope if verdict else None,
                "sentence": verdict.sentence if verdict else "",
            }
            rows.append(row)
        return rows

    def shown_columns(self) -> list[str]:
        """Without columns that do not fit a page."""
        shown = ["arm", "verdict", "gamma", "gamma_low", "gamma_high", "E"]
        return shown if not self.verdicts else [*shown, "delta_gamma", "multiplier", "p_growth"]

    def heading(self, column: str) -> str:
        """With the level of γ's interval."""
        if column in ("gamma_low", "gamma_high"):
            confidence = self.analysis.primary_fit.settings.confidence
            return f"γ {100 * confidence:g}% {column.removeprefix('gamma_')}"
        return super().heading(column)

    def plot(self, ax: Any = None) -> Any:
        """Draw loss against compute with the fitted laws; returns the Axes."""
        from steepen.report.colours import ARM_TITLES
        from steepen.report.figure import draw_panel
        from steepen.report.law_panels import loss_panel

        ax = new_axes(ax)
        draw_panel(ax, loss_panel(self.analysis, self.ladders), ARM_TITLES)
        return ax

    def save_figure(self, path: str | Path) -> Path:
        """Write the figure of `steepen fit --figure` (laws, multipliers, exponents) as PDF, SVG or PNG."""
        from steepen.report.figure import save_panels
        from steepen.report.law_panels import compute_panels

        save_panels(compute_panels(self.analysis, self.ladders), Path(path))
        return Path(path)


@dataclass(frozen=True, eq=False, repr=False)
class ChinchillaResult(Result):
    """L(N, D) = E + A/N^α + B/D^β of a table; `table_fit` has the law, the optimum and hold-outs."""

    table_fit: ChinchillaTableFit

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or 'N*'} ∝ C^{one.fit.parameters_exponent:.3f}" for arm, one in self.table_fit.arms.items()
        ]
        return f"Chinchilla law of {len(self.to_rows())} runs: {', '.join(laws)}"

    def summary(self) -> str:
        """The law, the optimum and the hold-outs."""
        return self.table_fit.summary()

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per fitted run: parameters, tokens, loss, and what the law says."""
        return [
            {"arm": arm, "parameters": float(n), "tokens": float(d), "loss": float(y), "law": float(law),
             "residual": float(y - law)}
            for arm, one in self.table_fit.arms.items()
            for n, d, y, law in zip(one.parameters, one.tokens, one.loss,
                                    one.fit.predict(one.parameters, one.tokens), strict=True)
        ]  # fmt: skip

    def plot(self, ax: Any = None) -> Any:
        """Draw the residuals against compute; returns the Axes."""
        ax = new_axes(ax)
        rows = self.to_rows()
        ax.axhline(0, color="#111111", lw=0.8)
        ax.plot([6 * r["parameters"] * r["tokens"] for r in rows], [r["residual"] for r in rows], "o", ms=4)
        ax.set(xscale="log", xlabel="6 · N · D (FLOPs)", ylabel="loss − law")
        return ax


@dataclass(frozen=True, eq=False, repr=False)
class IsoflopResult(Result):
    """The optimum of every fixed-compute sweep of a table, and the law of the optima, by arm."""

    table_fit: IsoflopTableFit

    def headline(self) -> str:
        """The exponents in one line."""
        laws = [
            f"{arm or 'x*'} ∝ C^{sweeps.fit.law.exponent:.3f}"
            for arm, sweeps in self.table_fit.arms.items()
            if sweeps.fit.law is not None
        ]
        return f"iso-compute optima: {', '.join(laws) or 'no law'}"

    def summary(self) -> str:
        """The vertices, their law and the forecasts."""
        return self.table_fit.summary()

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers."""
        return self.table_fit.to_dict()

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per sweep: its budget, optimum, loss there, and whether the optimum lies inside it."""
        return [
            {"arm": arm, "budget": v.budget, "x": v.x, "loss": v.loss, "interior": v.interior}
            for arm, sweeps in self.table_fit.arms.items()
            for v in sweeps.fit.vertices
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the optima against the budget with their law; returns the Axes."""
        import numpy as np

        ax = new_axes(ax)
        for arm, sweeps in self.table_fit.arms.items():
            budgets = [v.budget for v in sweeps.fit.vertices]
            points = ax.plot(budgets, [v.x for v in sweeps.fit.vertices], "*", ms=8, label=arm or None)
            if (law := sweeps.fit.law) is not None:
                line = np.geomspace(min(budgets), max(budgets), 50)
                ax.plot(line, [law.predict(float(b)) for b in line], color=points[0].get_color(), lw=1)
        ax.set(xscale="log", yscale="log", xlabel="budget (FLOPs)", ylabel="best x")
        if self.table_fit.has_arms:
            ax.legend()
        return ax


def power(
    delta_gamma: float,
    *,
    rungs: int = 8,
    lowest: float = 3.25e17,
    highest: float = 1.01e20,
    noise: float = 1e-3,
    seeds: int = 1,
    goal: float = 0.90,
    search: bool = True,
    draws: int = 1000,
    arms: int = 1,
    **laws: float,
) -> PowerResult:
    """Simulate how often a planned ladder claims the right answers, and find the cheapest one that does.

    `delta_gamma` is the expected difference of exponents, `lowest` and `highest` are FLOPs of the end rungs,
    `noise` the standard deviation of a run's loss, `arms` the arms of the table, which share the level.
    Further laws are fields of `LadderPlan`: `gamma`, `irreducible_loss`, `constant`, `multiplier`, `level`,
    `margin`. `search=False` leaves the search out.
    """
    from steepen.laws.power import TARGETS, LadderPlan, cheapest_ladder, simulate_power

    plan = LadderPlan(
        delta_gamma=delta_gamma, rungs=rungs, lowest=lowest, highest=highest, noise=noise, seeds=seeds,
        arms=arms, **laws,
    )  # fmt: skip
    found = simulate_power(plan, draws)
    cheapest: list[CheapestLadder] = []
    if search and delta_gamma != 0:
        cheapest = [cheapest_ladder(plan, target, goal, draws=draws) for target in TARGETS]
    return PowerResult(found, tuple(cheapest))


@dataclass(frozen=True, eq=False, repr=False)
class PowerResult(Result):
    """Power of a planned ladder, and the cheapest ladder with a target power for each target."""

    power: Power
    cheapest: tuple[CheapestLadder, ...] = ()

    def headline(self) -> str:
        """The power of the two questions in one line."""
        plan = self.power.plan
        return (
            f"power at Δγ = {plan.delta_gamma:g}, {plan.rungs} rungs: growth {self.power.growth:.0%}, "
            f"exponent {self.power.verdict:.0%}"
        )

    def summary(self) -> str:
        """The power of the plan, and the cheapest ladders."""
        lines = [f"{self.headline()}; {self.power.plan.cost:.3g} FLOPs"]
        for one in self.cheapest:
            if one.plan is None:
                lines.append(f"no ladder in reach has {one.goal:.0%} power for {one.target}")
            else:
                lines.append(
                    f"{one.goal:.0%} power for {one.target}: {one.plan.rungs} rungs, {one.plan.seeds} seeds, "
                    f"to {one.plan.highest:.3g} FLOPs, {one.plan.cost:.3g} FLOPs in all"
                )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers, as `steepen power --json` prints it."""
        return {**self.power.to_dict(), "cheapest": {one.target: one.to_dict() for one in self.cheapest}}

    def to_rows(self) -> list[dict[str, Any]]:
        """The plan and the cheapest ladders, one row each."""
        return [
            _power_row("plan", self.power.plan, self.power),
            *(_power_row(f"cheapest for {one.target}", one.plan, one.power) for one in self.cheapest
              if one.plan is not None),
        ]  # fmt: skip

    def plot(self, ax: Any = None) -> Any:
        """Draw how often the plan gives each answer; returns the Axes."""
        ax = new_axes(ax)
        words = {word: share for word, share in self.power.verdict_fractions.items() if share > 0}
        ax.barh(list(words), list(words.values()))
        ax.set(xlim=(0, 1), xlabel="fraction of simulated ladders")
        return ax


def _power_row(name: Literal["plan"] | str, plan: LadderPlan, power: Power | None) -> dict[str, Any]:
    return {
        "ladder": name,
        "rungs": plan.rungs,
        "seeds": plan.seeds,
        "lowest": plan.lowest,
        "highest": plan.highest,
        "cost_flops": plan.cost,
        "power_growth": power.growth if power else None,
        "power_exponent": power.verdict if power else None,
    }
