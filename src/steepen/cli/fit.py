"""`steepen fit`: fit a scaling law to a table of runs, and judge each arm against a reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.api.result import Result
    from steepen.laws.fits.chinchilla import ChinchillaLoss
    from steepen.laws.fits.vertex import VertexMethod
    from steepen.laws.table import Table
    from steepen.laws.table_fits import SweepLoss

# Panels of --help.
COMPUTE = "Law: compute"
CHINCHILLA = "Law: chinchilla"
ISOFLOP = "Law: isoflop"
INTERVALS = "Intervals"
OUTPUT = "Output"


LAWS = ("compute", "chinchilla", "isoflop")
MAX_CHINCHILLA_BOOTSTRAP = 500  # a percentile interval no longer changes; more draws only take time


def fit(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV, TSV, JSON, Parquet or Excel, or the paper's own runs: paper:fineweb,"
            " paper:fineweb-edu. Columns for --law compute: arm, flops, loss; chinchilla:"
            " parameters, tokens, loss; isoflop: budget, x, loss (and arm). A seed column"
            " distinguishes repeated runs.",
            show_default=False,
        ),
    ],
    *,
    reference: Annotated[
        str | None,
        typer.Option(help="Arm that every other arm is compared with.", show_default=False),
    ] = None,
    law: Annotated[str, typer.Option(help="compute, chinchilla or isoflop.")] = "compute",
    columns: Annotated[
        str | None,
        typer.Option(
            help="Names of the table's columns: loss=loss_c4_val,arm=dataset. Usual names (C, compute,"
            " params, N, D, val_loss) are recognized.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Use only the rows with dataset=c4, arm=a,b, arm!=c or params>=1e8. Repeatable.",
            show_default=False,
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Objective of the fit: huber (of log losses), mse or log-mse; for compute also raw-huber."
            " For compute it is how the paper's method fits E: its authors took raw-huber, of the losses"
            " themselves. Default: raw-huber; huber for chinchilla, log-mse for isoflop.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="joint (one E fitted to all arms), paper (E fitted to the reference alone), or both.",
            rich_help_panel=COMPUTE,
        ),
    ] = "both",
    reference_law: Annotated[
        str,
        typer.Option(
            help="Where the paper's method takes the reference's own γ from: regression at E, like every"
            " arm, or free-fit, the fit that gave E.",
            rich_help_panel=COMPUTE,
        ),
    ] = "regression",
    interpolate: Annotated[
        str,
        typer.Option(
            help="What is linear in log compute between rungs in interpolated multipliers: raw-loss"
            " (reproduces the paper's numbers) or log-loss (what its text says).",
            rich_help_panel=COMPUTE,
        ),
    ] = "raw-loss",
    hold_out: Annotated[
        list[str] | None,
        typer.Option(
            help="Hold runs out of the fit and score their prediction: FLOPS (every run at or above it),"
            " ARM:FLOPS, or a table of runs; none for no run. Repeatable.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Compute in FLOPs to predict at, besides 10 and 1000 times the top rung.",
            show_default=False,
            min=1,
            max=1e60,
        ),
    ] = None,
    extrapolate: Annotated[
        bool,
        typer.Option(
            "--extrapolate",
            help="Also print fitted multipliers beyond the ladders, marked †.",
            rich_help_panel=COMPUTE,
        ),
    ] = False,
    c0: Annotated[
        float | None,
        typer.Option(
            help="C0 in FLOPs. Default: geometric mean of the reference's FLOPs; for paper:…, the FLOPs of"
            " its d8 run.",
            show_default=False,
            rich_help_panel=COMPUTE,
            min=1,
            max=1e60,
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Known standard deviation of a run's loss. Default: estimated from the residuals.",
            show_default=False,
            rich_help_panel=COMPUTE,
            min=1e-09,
            max=100,
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            help="Confidence level of the intervals.", rich_help_panel=INTERVALS, min=0.01, max=0.9999
        ),
    ] = 0.90,
    level: Annotated[
        float,
        typer.Option(
            help="Family-wise significance level of the verdicts.",
            rich_help_panel=COMPUTE,
            min=1e-06,
            max=0.5,
        ),
    ] = 0.05,
    adjust: Annotated[
        bool,
        typer.Option(
            "--adjust/--no-adjust",
            help="Share the level among the arms (Holm), or give it to each.",
            rich_help_panel=COMPUTE,
        ),
    ] = True,
    lr_regret: Annotated[
        float | None,
        typer.Option(
            help="Regret of a learning rate off by 2×, measured in a sweep: mistuning that would change a"
            " verdict is then also given as a factor in the learning rate.",
            show_default=False,
            rich_help_panel=COMPUTE,
            min=0,
            max=100,
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            help="Largest |Δγ|/γ that still counts as a constant gain.",
            rich_help_panel=COMPUTE,
            min=0,
            max=10,
        ),
    ] = 0.025,
    draws: Annotated[
        int,
        typer.Option(
            help="Bootstrap resamples per arm (chinchilla: at most 500).",
            min=0,
            max=1_000_000,
            rich_help_panel=INTERVALS,
        ),
    ] = 2000,
    seed: Annotated[
        int,
        typer.Option(help="Random seed of the bootstrap.", min=0, max=2**32 - 1, rich_help_panel=INTERVALS),
    ] = 0,
    delta: Annotated[
        float,
        typer.Option(
            help="Delta of the Huber objective, in log loss.",
            rich_help_panel=CHINCHILLA,
            min=1e-09,
            max=1_000,
        ),
    ] = 1e-3,
    equal_exponents: Annotated[
        bool,
        typer.Option(
            "--equal-exponents",
            help="One exponent, α = β: four parameters, so five runs are enough.",
            rich_help_panel=CHINCHILLA,
        ),
    ] = False,
    vertex: Annotated[
        str, typer.Option(help="Minimum of a quadratic or an akima curve.", rich_help_panel=ISOFLOP)
    ] = "quadratic",
    nearest: Annotated[
        int | None,
        typer.Option(
            help="Fit only this many points around each minimum.",
            show_default=False,
            rich_help_panel=ISOFLOP,
            min=3,
            max=10_000,
        ),
    ] = None,
    register: Annotated[
        Path | None,
        typer.Option(
            help="Add every arm's forecast at --budget to this file, to be scored once the runs exist:"
            " law, hash of the data, date and interval.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    score: Annotated[
        Path | None,
        typer.Option(
            help="Score the forecasts of a file of --register against the runs of the table.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Draw the fit to this .pdf, .png or .svg.", show_default=False, rich_help_panel=OUTPUT
        ),
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            "--write-table",
            help="Write laws and verdicts to this .tex (booktabs), .csv (every digit) or .md. Repeatable.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Fit a scaling law to a table of runs and judge each arm against a reference.

    [bold]steepen fit runs.csv --reference vanilla[/bold] fits
    L = E + A·(C/C0)^−γ to every arm and answers two questions: does the arm's
    gain grow with compute (grows, constant, shrinks, worse or undecided), and
    by what (exponent, irreducible loss, both or either)? Each answer comes
    with intervals and what would change it.

    [bold]--law chinchilla[/bold] fits L = E + A/N^α + B/D^β;
    [bold]--law isoflop[/bold] fits the optimum of each fixed-compute sweep.
    """
    from steepen.laws.paper_ladders import PREFIX, paper_ladders
    from steepen.laws.read_table import read_table
    from steepen.laws.table import parse_columns

    for option, value, choices in (
        ("--method", method, ("both", "joint", "paper")),
        ("--reference-law", reference_law, ("regression", "free-fit")),
        ("--interpolate", interpolate, ("raw-loss", "log-loss")),
        ("--vertex", vertex, ("quadratic", "akima")),
        ("--objective", objective or "mse", ("raw-huber", "huber", "mse", "log-mse")),
    ):  # also where the law at hand does not use them
        if value not in choices:
            raise UsageError(f"{option} {value!r} is not valid: choose one of {', '.join(choices)}.")
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence} is not valid: it must be between 0 and 1.")
    if law not in LAWS:
        raise UsageError(f"law is {law!r}; choose one of {', '.join(LAWS)}.")
    if figure is not None and figure.suffix.lower() not in (".pdf", ".png", ".svg"):
        raise UsageError(f"the figure {figure.name} must end in .pdf, .png or .svg.")
    for path in tables or ():
        if path.suffix.lower() not in (".tex", ".csv", ".md"):
            raise UsageError(f"the table {path.name} must end in .tex, .csv or .md.")
    if (register or score) and law != "compute":
        raise UsageError("--register and --score are for --law compute.")
    if register and budget is None:
        raise UsageError("say with --budget at which FLOPs to forecast, for --register.")
    if score and not score.is_file():
        raise UsageError(f"there are no registered forecasts at {score}; --register writes them.")
    if budget is not None and not 0 < budget < float("inf"):
        raise UsageError(f"budget is {budget}; give FLOPs greater than zero.")
    data = read_table(table, columns=parse_columns(columns), where=where or [])
    if str(table).startswith(PREFIX):
        published = paper_ladders(str(table))
        reference = reference or published.reference
        hold_out = hold_out or list(published.hold_out)
        c0 = c0 or published.c0
    run: Callable[..., Result]
    options: dict[str, Any] = {"budget": budget, "hold_out": hold_out or [], "confidence": confidence}
    if law == "compute":
        run = _fit_compute
        options |= {"reference": reference, "method": method, "loss": objective or "raw-huber", "c0": c0}
        options |= {"reference_law": reference_law, "interpolate": interpolate}
        options |= {
            "noise": noise,
            "level": level,
            "adjust": adjust,
            "margin": margin,
            "draws": draws,
            "seed": seed,
        }
        options |= {"extrapolate": extrapolate, "register": register, "score": score}
        options |= {"lr_regret": lr_regret}
    elif law == "chinchilla":
        run = _fit_chinchilla
        options |= {"loss": objective or "huber", "draws": draws, "seed": seed, "reference": reference}
        options |= {"delta": delta, "tied": equal_exponents}
    else:
        run = _fit_isoflop
        options |= {"loss": objective or "log-mse", "vertex": vertex, "nearest": nearest}
    result = run(data, as_json=as_json, figure=figure, **options)
    for path in tables or ():
        result.write_table(path)
    if not as_json:
        for kind, path in (("figure", figure), *(("table", path) for path in tables or ())):
            if path is not None:
                typer.echo(f"{kind}: {path}")


def _fit_compute(
    data: Table,
    *,
    reference: str | None,
    hold_out: list[str],
    as_json: bool,
    figure: Path | None,
    register: Path | None,
    score: Path | None,
    **options: Any,
) -> Result:
    from steepen.api.fits import ComputeResult
    from steepen.cli.fit_tables import print_analysis, print_registered, spinner
    from steepen.laws.analysis import AnalysisRequest
    from steepen.laws.ladder import read_ladders
    from steepen.laws.registered_forecasts import read_registered, register_forecasts, score_registered
    from steepen.laws.table_fits import analyse_table, choose_reference
    from steepen.utils.process_pool import usable_cores

    arms = read_ladders(data)
    request = AnalysisRequest(reference=choose_reference(arms, reference), **options)
    with spinner(f"fitting {len(arms)} arms", as_json) as update:
        done: list[str] = []

        def arm_done(arm: str) -> None:
            done.append(arm)
            update(f"judged {len(done)} of {len(arms) - 1} arms (last: {arm})")

        analysis, ladders = analyse_table(data, request, hold_out, arm_done, usable_cores())
    if figure is not None:
        from steepen.report.figure import save_panels
        from steepen.report.law_panels import compute_panels

        save_panels(compute_panels(analysis, ladders), figure)
    scored = score_registered(read_registered(score), arms) if score else []
    registered = (
        score_registered(register_forecasts(register, analysis, ladders, analysis.request.budget, arms), {})
        if register and analysis.request.budget
        else []
    )
    if as_json:
        found = analysis.to_dict()
        for name, forecasts in (("registered", registered), ("scored", scored)):
            if forecasts:
                found[name] = [one.to_dict() for one in forecasts]
        _echo_json(found)
    else:
        print_analysis(analysis)
        print_registered([*registered, *scored])
    return ComputeResult(analysis, ladders)


def _fit_chinchilla(
    data: Table,
    *,
    reference: str | None,
    loss: str,
    delta: float,
    tied: bool,
    draws: int,
    seed: int,
    confidence: float,
    budget: float | None,
    hold_out: list[str],
    as_json: bool,
    figure: Path | None,
) -> Result:
    from steepen.api.size_laws import ChinchillaResult
    from steepen.cli.fit_tables import spinner
    from steepen.laws.chinchilla_table import fit_chinchilla_table
    from steepen.laws.fits.chinchilla import ChinchillaSettings

    settings = ChinchillaSettings(
        loss=cast("ChinchillaLoss", loss),
        delta=delta,
        tied=tied,
        bootstrap=min(draws, MAX_CHINCHILLA_BOOTSTRAP),
        confidence=confidence,
        seed=seed,
    )
    with spinner(f"fitting {len(data)} runs", as_json):
        found = fit_chinchilla_table(data, settings, reference=reference, budget=budget, hold_out=hold_out)
    if figure is not None:
        from steepen.report.figure import save_panels
        from steepen.report.law_panels import chinchilla_panels

        shown = found.first
        save_panels(chinchilla_panels(shown.fit, shown.parameters, shown.tokens, shown.loss), figure)
    if as_json:
        _echo_json(found.to_dict())
    else:
        typer.echo(found.summary())
    return ChinchillaResult(found)


def _fit_isoflop(
    data: Table,
    *,
    loss: str,
    vertex: str,
    nearest: int | None,
    confidence: float,
    budget: float | None,
    hold_out: list[str],
    as_json: bool,
    figure: Path | None,
) -> Result:
    from steepen.api.size_laws import IsoflopResult
    from steepen.laws.table_fits import fit_isoflop_table

    found = fit_isoflop_table(
        data,
        loss=cast("SweepLoss", loss),
        vertex=cast("VertexMethod", vertex),
        nearest=nearest,
        confidence=confidence,
        budget=budget,
        hold_out=hold_out,
    )
    if figure is not None:
        from steepen.report.figure import save_panels
        from steepen.report.law_panels import isoflop_panels

        fits = {arm: sweeps.fit for arm, sweeps in found.arms.items()}
        save_panels(isoflop_panels(fits, {arm: sweeps.data for arm, sweeps in found.arms.items()}), figure)
    if as_json:
        _echo_json(found.to_dict())
    else:
        typer.echo(found.summary())
    return IsoflopResult(found)


def _echo_json(data: dict[str, Any]) -> None:
    from steepen.utils.json_io import to_json

    typer.echo(to_json(data))
