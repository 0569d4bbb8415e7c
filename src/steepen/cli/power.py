"""`steepen power`: how likely a planned ladder is to reach a verdict, and the cheapest ladder that is."""

from __future__ import annotations

from typing import Annotated

import typer

from steepen.errors import UsageError


def power(
    *,
    delta_gamma: Annotated[
        float, typer.Option(help="The difference in exponent you expect: 0.0027.", show_default=False)
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
    seeds: Annotated[int, typer.Option(help="Runs at every rung.")] = 1,
    gamma: Annotated[float, typer.Option(help="The reference's exponent γ.")] = 0.1113,
    irreducible_loss: Annotated[
        float, typer.Option(help="The irreducible loss E, the same for both arms.")
    ] = 1.83,
    constant: Annotated[float, typer.Option(help="The reference's A at 1e18 FLOPs.")] = 1.5,
    multiplier: Annotated[float, typer.Option(help="The arm's compute multiplier at the lowest rung.")] = 1.1,
    level: Annotated[float, typer.Option(help="Level of the F-tests.")] = 0.05,
    margin: Annotated[
        float, typer.Option(help="Largest |Δγ|/γ that still counts as a constant gain.")
    ] = 0.025,
    goal: Annotated[float, typer.Option(help="Power that the cheapest ladder must reach.")] = 0.90,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Search for the cheapest ladder.")
    ] = True,
    draws: Annotated[int, typer.Option(help="Simulated pairs of ladders.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Estimate the power of a planned ladder, and find the cheapest one.

    [bold]steepen power --delta-gamma 0.0027[/bold] simulates the plan and
    counts the verdicts. Two targets: [bold]slope[/bold], the arm gains with
    compute, given one irreducible loss E; [bold]verdict[/bold], the gain is
    a larger exponent and not a lower E, which takes far more compute.
    """
    from steepen.cli.fit_tables import print_power, spinner
    from steepen.laws.power import TARGETS, CheapestLadder, LadderPlan, cheapest_ladder, simulate_power
    from steepen.utils.json_io import to_json

    if span is not None and highest is not None:
        raise UsageError("give --highest or --span, not both.")
    top = highest if highest is not None else (lowest * 10**span if span is not None else 1.01e20)
    plan = LadderPlan(
        delta_gamma=delta_gamma,
        rungs=rungs,
        lowest=lowest,
        highest=top,
        noise=noise,
        seeds=seeds,
        gamma=gamma,
        irreducible_loss=irreducible_loss,
        constant=constant,
        multiplier=multiplier,
        level=level,
        margin=margin,
    )
    with spinner("simulating ladders", as_json):
        result = simulate_power(plan, draws)
        found: list[CheapestLadder] = []
        if search and delta_gamma != 0:
            found = [cheapest_ladder(plan, target, goal, draws=draws) for target in TARGETS]
    if as_json:
        typer.echo(to_json({**result.to_dict(), "cheapest": {c.target: c.to_dict() for c in found}}))
    else:
        print_power(result, found)
