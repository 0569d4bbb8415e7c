"""`steepen forecast`: forecast CORE, or any task of a table, at a larger compute from smaller runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.evaluation.forecast import Forecast
    from steepen.laws.downstream_table import Chain
    from steepen.laws.fits.downstream import RatioFrom, TaskResiduals


def forecast(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Stores, run directories or record.json files with CORE scores; or one table with"
            " columns accuracy or error, and flops, loss or both (and arm).",
        ),
    ],
    target: Annotated[
        list[float] | None,
        typer.Option(
            help="Compute in FLOPs to forecast at (a loss, for a table without flops); repeatable.",
            min=1e-9,
            max=1e60,
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="core17, all, comma-separated labels, or a file of `steepen eval filter --out`. If a run "
            "lacks some of CORE's 22 tasks, the mean of the named ones is forecast instead."
        ),
    ] = "core17",
    hold_out: Annotated[
        list[str] | None,
        typer.Option(
            help="Hold a run (a unique prefix of its name; FLOPS or ARM:FLOPS of a table) out of every fit, "
            "forecast and figure; `none` for no run. Default: forecast from all runs, and check the method "
            "on the largest run of each arm."
        ),
    ] = None,
    residuals: Annotated[
        str,
        typer.Option(
            help="Residuals that the task laws are fitted to: raw-nll (the paper's authors) or log-nll."
        ),
    ] = "raw-nll",
    ratio: Annotated[
        str,
        typer.Option(
            help="What the factor from the tasks to CORE is fitted to: the measured mean accuracy of the "
            "tasks (the paper's authors) or the predicted one."
        ),
    ] = "measured",
    chain: Annotated[
        str,
        typer.Option(
            help="table: how accuracy follows loss: gadre (exponential), olmo (sigmoid of four parameters), "
            "paper (sigmoid of two), or direct (a power law of the error in compute)."
        ),
    ] = "gadre",
    columns: Annotated[
        str | None,
        typer.Option(help="table: names of its columns, e.g. loss=answer_nll,accuracy=core_accuracy."),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="table: only rows with arm=a,b or params>=1e8. Repeatable.")
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms, comma-separated.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the forecast to this file (PNG, PDF, SVG).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Forecast CORE at a larger compute, and check the method on held-out runs.

    Each arm's task losses follow a power law in compute, a sigmoid per task
    maps loss to centred accuracy, and one factor maps the mean of the tasks to
    CORE. A run named by --hold-out takes no part in the fit, so the forecast,
    the crossings and the figure do not know it.

    [bold]steepen forecast runs --target 1.2e21 --figure forecast.png[/bold]

    For a table, compute gives loss by a power law and loss gives accuracy by
    the chain: [bold]steepen forecast table.csv --chain olmo --target 1e21[/bold]
    """
    if len(paths) == 1 and _is_table(paths[0]):
        _forecast_table(paths[0], chain, columns, where, target, hold_out, figure, as_json)
        return
    if columns or where:
        raise UsageError("--columns and --where are for a table.")
    from steepen.evaluation.forecast import forecast as compute
    from steepen.evaluation.scored_runs import group_series, read_scored_runs, require_core

    names = [] if arms is None else [name.strip() for name in arms.split(",") if name.strip()]
    found = compute(
        group_series(require_core(read_scored_runs(paths)), names),
        tasks=_labels(tasks),
        held_out=[] if hold_out == ["none"] else hold_out,
        targets=target or [],
        residuals=cast("TaskResiduals", residuals),
        ratio=cast("RatioFrom", ratio),
    )
    if figure is not None:
        from steepen.report.figure import save_panels
        from steepen.report.score_panels import forecast_panel

        save_panels([forecast_panel(found)], figure)
    if as_json:
        from steepen.utils.json_io import to_json

        extra = {} if figure is None else {"figure": str(figure)}
        typer.echo(to_json({**found.to_dict(), **extra}))
    else:
        _print(found)


def _is_table(path: Path) -> bool:
    """Whether a path is a table of runs, and not a record or a directory."""
    return str(path).startswith("paper:") or (path.is_file() and path.name != "record.json")


def _forecast_table(
    path: Path,
    chain: str,
    columns: str | None,
    where: list[str] | None,
    target: list[float] | None,
    hold_out: list[str] | None,
    figure: Path | None,
    as_json: bool,
) -> None:
    from steepen.laws.downstream_table import forecast_table
    from steepen.laws.read_table import read_table
    from steepen.laws.table import parse_columns

    if figure is not None:
        raise UsageError("--figure is for runs, not for a table.")
    table = read_table(path, columns=parse_columns(columns), where=where or [])
    found = forecast_table(table, cast("Chain", chain), targets=target or [], hold_out=hold_out)
    if as_json:
        from steepen.utils.json_io import to_json

        typer.echo(to_json(found.to_dict()))
    else:
        typer.echo(found.summary())


def _labels(text: str) -> str | list[str]:
    """core17 and all as they are; else the labels of a file or of a list with commas."""
    if text in ("core17", "all"):
        return text
    from steepen.utils.files import read_text

    path = Path(text)
    try:
        words = read_text(path).split() if path.is_file() else [word.strip() for word in text.split(",")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks: {path} cannot be read ({error}).") from None
    labels = [word for word in words if word]
    if not labels:
        raise UsageError(f"--tasks {text!r} names no task; name one or more.")
    return labels


def _print(found: Forecast) -> None:
    from steepen.evaluation.forecast import MIN_RUNS

    counts = ", ".join(f"{len(one.runs)} of {one.label}" for one in found.series)
    name = "CORE" if found.is_core else "mean centred accuracy"
    fit = found.fit
    typer.echo(f"fitted to {counts}; {len(found.tasks)} tasks; r = {fit.r:.4f}; residual SD {fit.sigma:.4f}")
    for run, result in found.hold_out_scores:
        typer.echo(
            f"held out {run.run} ({run.arm}, {run.flops:.3e} FLOPs): {name} {result.observed:.4f}, forecast "
            f"without it {result.forecast:.4f}, error {result.error:+.4f} "
            f"({result.error_in_sigma:+.1f} residual SD)"
        )
    if not found.hold_out_scores:
        typer.echo(
            f"nothing held out (by default the largest run of each arm with more than {MIN_RUNS} runs)."
        )
    for arm, flops, score in found.at_targets():
        typer.echo(f"{arm} at {flops:.3e} FLOPs: {name} {score:.4f}")
    if not found.is_core:
        typer.echo(
            f"the score is the mean of {', '.join(found.tasks)}, not CORE: some of its 22 tasks were not "
            "evaluated, so GPT-3's CORE is left out."
        )
    for reference, own in found.crossings.items():
        for arm, flops in own.items():
            need = f"{flops:.2e} FLOPs"
            if not math.isfinite(flops):
                need = "out of reach" if flops > 0 else "below any forecast"
            typer.echo(f"{arm} to match {reference} (CORE {found.references[reference]:.4f}): {need}")
