"""`steepen power`: statistical power of a planned ladder, and the cheapest ladder with a target power."""

from __future__ import annotations

from typing import Annotated

import typer

from steepen.errors import UsageError

# Panels of --help.
LADDER = "Planned ladder"
LAWS = "Assumed laws"
TESTS = "Tests and search"


def power(
    *,
    delta_gamma: Annotated[
        float,
        typer.Option(help="Expected difference in exponent, e.g. 0.0027.", show_default=False, min=-1, max=1),
    ],
    rungs: Annotated[
        int, typer.Option(help="Rungs of each ladder.", rich_help_panel=LADDER, min=3, max=1_000)
    ] = 8,
    lowest: Annotated[
        float, typer.Option(help="FLOPs of the lowest rung.", rich_help_panel=LADDER, min=1, max=1e40)
    ] = 3.25e17,
    highest: Annotated[
        float | None,
        typer.Option(
            help="FLOPs of the highest rung. Default: 1.01e20, or by --span.",
            show_default=False,
            rich_help_panel=LADDER,
            min=1,
            max=1e40,
        ),
    ] = None,
    span: Annotated[
        float | None,
        typer.Option(
            help="Decades from lowest to highest, instead of --highest.",
            show_default=False,
            rich_help_panel=LADDER,
            min=0.01,
            max=40,
        ),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(help="Standard deviation of a run's loss.", rich_help_panel=LADDER, min=1e-09, max=100),
    ] = 1e-3,
    seeds: Annotated[
        int, typer.Option(help="Seeds (runs) per rung.", rich_help_panel=LADDER, min=1, max=1_000)
    ] = 1,
    gamma: Annotated[
        float, typer.Option(help="The reference's exponent γ.", rich_help_panel=LAWS, min=0.001, max=10)
    ] = 0.1113,
    irreducible_loss: Annotated[
        float,
        typer.Option(
            help="The irreducible loss E, the same for both arms.", rich_help_panel=LAWS, min=0, max=1_000
        ),
    ] = 1.83,
    constant: Annotated[
        float,
        typer.Option(
            help="A of the reference, for C0 = 1e18 FLOPs.", rich_help_panel=LAWS, min=1e-06, max=1000000.0
        ),
    ] = 1.5,
    multiplier: Annotated[
        float,
        typer.Option(
            help="The arm's compute multiplier at the lowest rung.",
            rich_help_panel=LAWS,
            min=0.001,
            max=1000.0,
        ),
    ] = 1.1,
    level: Annotated[
        float,
        typer.Option(
            help="Family-wise significance level of the F-tests.", rich_help_panel=TESTS, min=1e-06, max=0.5
        ),
    ] = 0.05,
    margin: Annotated[
        float,
        typer.Option(
            help="Largest |Δγ|/γ that still counts as a constant gain.", rich_help_panel=TESTS, min=0, max=10
        ),
    ] = 0.025,
    comparisons: Annotated[
        int,
        typer.Option(
            help="Arms that are compared with the reference and share the level (Holm).",
            min=1,
            max=10_000,
            rich_help_panel=TESTS,
        ),
    ] = 1,
    goal: Annotated[
        float,
        typer.Option(
            help="Target power of the cheapest ladder.", rich_help_panel=TESTS, min=0.01, max=0.9999
        ),
    ] = 0.90,
    search: Annotated[
        bool,
        typer.Option("--search/--no-search", help="Search for the cheapest ladder.", rich_help_panel=TESTS),
    ] = True,
    draws: Annotated[
        int,
        typer.Option(help="Simulated pairs of ladders.", min=1, max=1_000_000, rich_help_panel=TESTS),
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Estimate the power of a planned ladder, and find the cheapest one.

    [bold]steepen power --delta-gamma 0.0027[/bold] simulates the plan and
    counts what steepen fit would claim, after all its checks. Two targets:
    [bold]growth[/bold], the gain grows with compute; [bold]exponent[/bold],
    it is also shown to grow by a larger exponent and not by a lower E, which
    takes far more compute.
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
        arms=comparisons,
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
