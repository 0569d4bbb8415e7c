"""`steepen fit` and `steepen power`: from measurements, or a plan, to a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from steepen.errors import UsageError

LAWS = ("compute", "chinchilla", "isoflop")


def fit(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV, JSON lines or Parquet. Columns: arm, flops, loss for the compute law; parameters,"
            " tokens, loss for chinchilla; budget, x, loss (and perhaps arm) for isoflop. A seed column"
            " tells repeats apart.",
            show_default=False,
        ),
    ],
    *,
    reference: Annotated[
        str | None,
        typer.Option(help="Compute law: the arm every other is judged against.", show_default=False),
    ] = None,
    law: Annotated[str, typer.Option(help="compute, chinchilla or isoflop.")] = "compute",
    loss: Annotated[
        str | None,
        typer.Option(
            help="huber (summed, of log losses), mse, or log-mse. For the compute law huber is how the"
            " paper's way finds E. Default: huber; log-mse for isoflop, whose parabolas are least squares.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="Compute law: joint (one E from all arms), paper (E from the reference), or both."),
    ] = "both",
    hold_out: Annotated[
        list[str] | None,
        typer.Option(
            help="Keep runs out of the fit and score them: FLOPS (all runs from there up), ARM:FLOPS, or a"
            " table of runs. Repeatable.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="A compute to predict at, besides 10 and 1000 times the top rung.", show_default=False
        ),
    ] = None,
    extrapolate: Annotated[
        bool,
        typer.Option(
            "--extrapolate", help="Also give fitted multipliers outside the measurements, marked as such."
        ),
    ] = False,
    c0: Annotated[
        float | None,
        typer.Option(help="Base compute C0. Default: the reference's geometric mean.", show_default=False),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Known standard deviation of a run's loss. Default: the scatter about the laws.",
            show_default=False,
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of every interval.")] = 0.90,
    level: Annotated[float, typer.Option(help="Level of the tests behind a verdict.")] = 0.05,
    margin: Annotated[float, typer.Option(help="Largest |Δγ|/γ that may be called a constant gain.")] = 0.025,
    draws: Annotated[
        int, typer.Option(help="Bootstrap draws per arm (chinchilla: redraws for intervals, at most 500).")
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    vertex: Annotated[str, typer.Option(help="Isoflop: quadratic or akima.")] = "quadratic",
    nearest: Annotated[
        int | None,
        typer.Option(help="Isoflop: fit only this many points around each minimum.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the fit into this .pdf, .png or .svg.", show_default=False)
    ] = None,
) -> None:
    """Fit scaling laws to a table of runs: exponent, constant, floor or noise?

    [bold]steepen fit runs.csv --reference vanilla[/bold] fits
    L = E + A·(C/C0)^−γ to every arm and judges each against the reference:
    steeper, lower (constant), floor, undecided, shallower or worse, with
    intervals and what would decide it. Other laws: --law chinchilla, --law isoflop.
    """
    from steepen.cli.fit_run import Output, run_chinchilla, run_compute, run_isoflop
    from steepen.laws.table import read_table

    if law not in LAWS:
        raise UsageError(f"law is {law!r}; choose one of {', '.join(LAWS)}.")
    if figure is not None and figure.suffix.lower() not in (".pdf", ".png", ".svg"):
        raise UsageError(f"the figure {figure.name} must end in .pdf, .png or .svg.")
    if budget is not None and not 0 < budget < float("inf"):
        raise UsageError(f"budget is {budget}; give FLOPs greater than zero.")
    data = read_table(table)
    output = Output(as_json=as_json, figure=figure, holds=hold_out or [], budget=budget)
    options: dict[str, Any] = {"confidence": confidence}
    if law == "compute":
        options |= {"method": method, "loss": loss or "huber", "c0": c0, "noise": noise, "level": level}
        options |= {"margin": margin, "draws": draws, "seed": seed, "extrapolate": extrapolate}
        run_compute(data, reference, options, output)
    elif law == "chinchilla":
        # A few hundred redraws settle a percentile interval; more only take time.
        options |= {"loss": loss or "huber", "bootstrap": min(draws, 500), "seed": seed}
        run_chinchilla(data, options, output)
    else:
        run_isoflop(data, loss or "log-mse", options | {"method": vertex, "nearest": nearest}, output)


def power(
    *,
    delta_gamma: Annotated[
        float, typer.Option(help="The exponent gain you expect, such as 0.0027.", show_default=False)
    ],
    rungs: Annotated[int, typer.Option(help="Rungs of each ladder.")] = 8,
    lowest: Annotated[float, typer.Option(help="Compute of the lowest rung, FLOPs.")] = 3.25e17,
    highest: Annotated[
        float | None,
        typer.Option(help="Compute of the highest rung. Default: 1.01e20, or by --span.", show_default=False),
    ] = None,
    span: Annotated[
        float | None,
        typer.Option(help="Decades from lowest to highest, instead of --highest.", show_default=False),
    ] = None,
    noise: Annotated[float, typer.Option(help="Standard deviation of a run's loss.")] = 1e-3,
    seeds: Annotated[int, typer.Option(help="Runs of every rung.")] = 1,
    gamma: Annotated[float, typer.Option(help="The reference's exponent.")] = 0.1113,
    floor: Annotated[float, typer.Option(help="The common floor E.")] = 1.83,
    constant: Annotated[float, typer.Option(help="The reference's A at 1e18 FLOPs.")] = 1.5,
    multiplier: Annotated[float, typer.Option(help="The arm's saving of compute at the lowest rung.")] = 1.1,
    level: Annotated[float, typer.Option(help="Level of the tests.")] = 0.05,
    margin: Annotated[float, typer.Option(help="Largest |Δγ|/γ that may be called a constant gain.")] = 0.025,
    goal: Annotated[float, typer.Option(help="The chance the cheapest ladder must reach.")] = 0.90,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Look for the cheapest ladder.")
    ] = True,
    draws: Annotated[int, typer.Option(help="Simulated ladders.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """The chance that a planned ladder reaches a verdict, and the cheapest one.

    Two targets are told apart. [bold]slope[/bold]: the arm gains with compute,
    given one floor. [bold]verdict[/bold]: it is a better exponent and not a
    lower floor, which takes far more.
    """
    from steepen.cli.fit_tables import show_power, status
    from steepen.laws.power import TARGETS, CheapestLadder, LadderPlan, cheapest_ladder, simulate_power
    from steepen.utils.json_io import to_json

    if span is not None and highest is not None:
        raise UsageError("give --highest or --span, not both.")
    top = highest if highest is not None else (lowest * 10**span if span is not None else 1.01e20)
    plan = LadderPlan(
        delta_gamma=delta_gamma, rungs=rungs, lowest=lowest, highest=top, noise=noise, seeds=seeds,
        gamma=gamma, irreducible_loss=floor, constant=constant, multiplier=multiplier, level=level,
        margin=margin,
    )  # fmt: skip
    with status("simulating ladders", as_json):
        result = simulate_power(plan, draws)
        found: list[CheapestLadder] = []
        if search and delta_gamma != 0:
            found = [cheapest_ladder(plan, target, goal, draws=draws) for target in TARGETS]
    if as_json:
        typer.echo(to_json({**result.to_dict(), "cheapest": {c.target: c.to_dict() for c in found}}))
    else:
        show_power(result, found)
