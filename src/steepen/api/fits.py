"""`steepen.fit`: scaling laws and verdicts of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.frames import as_table
from steepen.api.result import Result, marked_rows, new_axes, wrap
from steepen.errors import UsageError
from steepen.utils.formatting import format_flops, pretty_exponents

if TYPE_CHECKING:
    from steepen.api.size_laws import ChinchillaResult, IsoflopResult
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.ladder import Ladder
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
    budget: float | None = None,
    **settings: Any,
) -> ComputeResult | ChinchillaResult | IsoflopResult:
    """Fit a scaling law to a table of runs, and judge every arm against a reference.

    `data` is a file, a pandas, polars or Arrow frame, a dict of columns, a list of dicts, `open_runs(...)`,
    or the paper's own runs, `"paper:fineweb"`. `arm`, `flops`, `loss`, `seed`, `parameters`, `tokens` and `x`
    name its columns where they have other names than these (usual ones, as `C`, `params` and `val_loss`, are
    recognized). A table without an arm column is one arm.

    `law` is `"compute"` (arm, flops, loss: laws with verdicts), `"chinchilla"` (parameters, tokens, loss) or
    `"isoflop"` (flops, x, loss). `where` keeps rows (`"dataset=c4"`), `hold_out` scores the prediction of
    others (`1e20`, `"vanilla:1e20"`), `budget` is a compute in FLOPs to predict at. Further settings are
    those of `AnalysisRequest`, `ChinchillaSettings` or `fit_isoflop_table`, as `margin`, `level`, `noise`,
    `draws`, `confidence` and `objective` (the loss of the fit: `"huber"`, `"mse"`, …).
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
            return _fit_compute(table, reference, held, budget, settings)
        if law == "chinchilla":
            return _fit_chinchilla(table, reference, held, budget, settings)
        return _fit_isoflop(table, held, budget, settings)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        name = str(error).rpartition("argument ")[2].strip("'\" ")
        raise UsageError(f"fit(law={law!r}) has no setting {name}; see help(steepen.fit).") from None


def _fit_compute(
    table: Any, reference: str | None, held: list[str], budget: float | None, settings: dict[str, Any]
) -> ComputeResult:
    from steepen.laws.analysis import AnalysisRequest
    from steepen.laws.ladder import read_ladders
    from steepen.laws.table_fits import analyse_table, choose_reference

    ladders = read_ladders(table)
    if reference is None and len(ladders) > 1:
        raise UsageError(f"name the arm to judge against: reference={next(iter(ladders))!r}, for one of "
                         f"{', '.join(ladders)}.")  # fmt: skip
    request = AnalysisRequest(reference=choose_reference(ladders, reference), budget=budget, **settings)
    return ComputeResult(*analyse_table(table, request, held))


def _fit_chinchilla(
    table: Any, reference: str | None, held: list[str], budget: float | None, settings: dict[str, Any]
) -> ChinchillaResult:
    from steepen.api.size_laws import ChinchillaResult
    from steepen.laws.chinchilla_table import fit_chinchilla_table
    from steepen.laws.fits.chinchilla import ChinchillaSettings

    if "draws" in settings:
        settings["bootstrap"] = settings.pop("draws")
    return ChinchillaResult(
        fit_chinchilla_table(
            table, ChinchillaSettings(**settings), reference=reference, budget=budget, hold_out=held
        )
    )


def _fit_isoflop(
    table: Any, held: list[str], budget: float | None, settings: dict[str, Any]
) -> IsoflopResult:
    from steepen.api.size_laws import IsoflopResult
    from steepen.laws.table_fits import fit_isoflop_table

    return IsoflopResult(fit_isoflop_table(table, budget=budget, hold_out=held, **settings))


def verdict_words(verdicts: dict[str, Verdict], most: int = 4) -> str:
    """The words of some verdicts in one line, each with its arm; "?" marks what is fragile."""
    words = [f"{arm} {verdict.marked_word}" for arm, verdict in verdicts.items()]
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
        return f"fit against {reference}: {verdict_words(self.verdicts)}"

    def summary(self) -> str:
        """Verdicts, laws, hold-outs and warnings as text of 80 columns."""
        return wrap(self.analysis.summary())

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
                "claim": verdict.claim if verdict else None,
                "by_what_claim": verdict.by_what_claim if verdict else None,
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

    def shown_rows(self) -> list[dict[str, Any]]:
        """With "?" behind an answer that is fragile, so not a claim."""
        rows = self.to_rows()
        judged = [self.verdicts.get(row["arm"]) for row in rows]
        return marked_rows(rows, [verdict.marked_word if verdict else "" for verdict in judged])

    def heading(self, column: str) -> str:
        """With the level of γ's interval, and the compute of the multiplier where it is one for all arms."""
        at = {format_flops(verdict.multiplier_flops, 2) for verdict in self.verdicts.values()}
        if column == "multiplier" and len(at) == 1:
            return f"multiplier at {pretty_exponents(at.pop())}"
        if column in ("gamma_low", "gamma_high"):
            confidence = self.analysis.primary_fit.settings.confidence
            return f"γ {100 * confidence:g}% {column.removeprefix('gamma_')}"
        return super().heading(column)

    def plot(self, ax: Any = None) -> Any:
        """Draw loss against compute with the fitted laws; returns the Axes."""
        from steepen.report.colours import ARM_TITLES
        from steepen.report.figure import plot_panel
        from steepen.report.law_panels import loss_panel

        ax = new_axes(ax)
        plot_panel(ax, loss_panel(self.analysis, self.ladders), ARM_TITLES)
        return ax

    def save_figure(self, path: str | Path) -> Path:
        """Write the figure of `steepen fit --figure` (laws, multipliers, exponents) as PDF, SVG or PNG."""
        from steepen.report.figure import save_panels
        from steepen.report.law_panels import compute_panels

        save_panels(compute_panels(self.analysis, self.ladders), Path(path))
        return Path(path)
