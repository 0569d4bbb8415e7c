"""`steepen forecast`: from task scores of small runs to CORE at a larger budget."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.cli.scored import Scored
    from steepen.laws.downstream import Checkpoints, DownstreamFit

LEAST = 4  # checkpoints a task law is fitted to


def forecast(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS...", help="Stores, run directories or record.json files with CORE scores."
        ),
    ],
    target: Annotated[
        list[float] | None, typer.Option(help="A budget in FLOPs to forecast CORE at (repeatable).")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="core17, all, labels with commas, or a file of `steepen eval filter --out`.")
    ] = "core17",
    hold_out: Annotated[
        list[str] | None,
        typer.Option(
            help="A run (its name's beginning) to keep from the fit; by default each arm's largest."
        ),
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms, with commas.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the forecast to this file (PNG, PDF, SVG).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
) -> None:
    """Forecast CORE for a budget, and say how well the same method foretold runs it had not seen.

    Each arm's task losses follow a power law in compute, a sigmoid per task turns loss into centred accuracy,
    one factor turns the tasks' mean into CORE. The hold-out comparison refits without the held-out runs; the
    forecast for --target uses every run.

    [bold]steepen forecast runs --target 1.2e21 --figure forecast.png[/bold]
    """
    from steepen.cli.scored import by_arm, read_scored
    from steepen.evaluation.suite import GPT3_CORE
    from steepen.laws.downstream import fit_downstream

    for budget in target or []:
        if not 0 < budget < float("inf"):
            raise UsageError(f"--target {budget} is not valid: give a positive number of FLOPs.")
    groups = by_arm(read_scored(paths))
    groups = _chosen_arms(groups, arms)
    missing = [run.run for runs in groups.values() for run in runs if run.core.get("core22") is None]
    if missing:
        raise UsageError(
            f"run {missing[0]} lacks some of the 22 tasks; evaluate it on the whole bundle first."
        )
    labels = _tasks(tasks, groups)
    kept, held = _hold_out(groups, hold_out)
    short = {name: len(runs) for name, runs in groups.items() if len(runs) < LEAST}
    if short:
        name, count = next(iter(short.items()))
        raise UsageError(
            f"{name} has {count} scored runs; a task law needs at least {LEAST} (or leave --arms)."
        )
    full = fit_downstream(_series(groups), labels)
    comparison: list[dict[str, Any]] = []
    if held:
        without = fit_downstream(_series(kept), labels)
        for name, runs in held.items():
            comparison += [
                {"run": run.run, **asdict(without.hold_out(name, run.flops, run.core["core22"]))}
                for run in runs
            ]
    budgets = target or []
    found: dict[str, Any] = {
        "tasks": labels,
        "runs": {name: [run.run for run in runs] for name, runs in groups.items()},
        "hold_out": comparison,
        "forecast": [
            {"arm": name, "flops": budget, "core": float(full.predict(name, budget)[0])}
            for budget in budgets
            for name in groups
        ],
        "compute_for": [
            {"reference": reference, "core": value, "arm": name, "flops": full.compute_for(name, value)}
            for reference, value in GPT3_CORE.items()
            for name in groups
        ],
        "r": full.r,
        "scatter": full.sigma,
    }
    if figure is not None:
        _draw(full, groups, held, budgets, figure)
        found["figure"] = str(figure)
    if as_json:
        from steepen.laws.plain import to_json

        typer.echo(to_json(found))
    else:
        _print(found, full)


def _chosen_arms(groups: dict[str, list[Scored]], arms: str | None) -> dict[str, list[Scored]]:
    if arms is None:
        return groups
    names = [name.strip() for name in arms.split(",") if name.strip()]
    for name in names:
        if name not in groups:
            raise UsageError(f"there is no scored run of {name!r}; scored arms are {', '.join(groups)}.")
    return {name: groups[name] for name in names}


def _tasks(text: str, groups: dict[str, list[Scored]]) -> list[str]:
    from steepen.evaluation.suite import CORE17, CORE22

    if text in ("core17", "all"):
        return list(CORE17 if text == "core17" else CORE22)
    path = Path(text)
    words = path.read_text().split() if path.is_file() else [word.strip() for word in text.split(",")]
    known = next(iter(groups.values()))[0].tasks
    for word in words:
        if word not in known:
            raise UsageError(f"--tasks: {word!r} is neither a task of the records nor a file of labels.")
    return words


def _hold_out(
    groups: dict[str, list[Scored]], asked: list[str] | None
) -> tuple[dict[str, list[Scored]], dict[str, list[Scored]]]:
    """Runs to fit and runs held out, by arm; an arm too short to spare one has none held out by default."""
    if asked is None:
        # The largest run is the one an extrapolation is for.
        held = {name: [runs[-1]] for name, runs in groups.items() if len(runs) > LEAST}
    elif asked == ["none"]:
        held = {}
    else:
        held: dict[str, list[Scored]] = {}
        for word in asked:
            found = [(name, run) for name, runs in groups.items() for run in runs if run.run.startswith(word)]
            if len(found) != 1:
                raise UsageError(
                    f"--hold-out {word!r} names {len(found)} of the scored runs; it must name one."
                )
            held.setdefault(found[0][0], []).append(found[0][1])
    kept = {name: [run for run in runs if run not in held.get(name, [])] for name, runs in groups.items()}
    return kept, held


def _series(groups: dict[str, list[Scored]]) -> dict[str, Checkpoints]:
    import numpy as np

    from steepen.laws.downstream import Checkpoints

    def column(runs: list[Scored], label: str, field: str) -> Any:
        return np.array([run.tasks[label][field] for run in runs], float)

    return {
        name: Checkpoints(
            np.array([run.flops for run in runs], float),
            {label: column(runs, label, "nll") for label in runs[0].tasks},
            {label: column(runs, label, "centered") for label in runs[0].tasks},
            np.array([run.core["core22"] for run in runs], float),
        )
        for name, runs in groups.items()
    }


def _draw(
    fit: DownstreamFit,
    groups: dict[str, list[Scored]],
    held: dict[str, list[Scored]],
    budgets: list[float],
    file: Path,
) -> None:
    import numpy as np

    from steepen.evaluation.figures import draw_forecast
    from steepen.evaluation.suite import GPT3_CORE

    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--figure {file} is not valid: its name must end in .png, .pdf or .svg.")
    everything = [run.flops for runs in groups.values() for run in runs]
    ends = min(everything), max([*budgets, 10 * max(everything)])
    at = np.geomspace(*ends, 200)
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_forecast(
        {name: (at.tolist(), fit.predict(name, at).tolist()) for name in groups},
        {
            name: ([run.flops for run in runs], [run.core["core22"] for run in runs])
            for name, runs in groups.items()
        },
        {name: (runs[-1].flops, runs[-1].core["core22"]) for name, runs in held.items()},
        GPT3_CORE,
        file,
        budgets[-1] if budgets else None,
    )


def _print(found: dict[str, Any], fit: DownstreamFit) -> None:
    counts = ", ".join(f"{len(runs)} of {name}" for name, runs in found["runs"].items())
    typer.echo(f"fitted on {counts}; {len(found['tasks'])} tasks; r = {fit.r:.4f}; scatter {fit.sigma:.4f}")
    for row in found["hold_out"]:
        typer.echo(
            f"held out {row['run']} ({row['series']}, {row['flops']:.3e} FLOPs): CORE {row['observed']:.4f}, "
            f"forecast without it {row['forecast']:.4f}, miss {row['miss']:+.4f} "
            f"({row['miss_sigma']:+.1f} × scatter)"
        )
    if not found["hold_out"]:
        typer.echo(f"nothing held out (by default an arm with more than {LEAST} runs spares its largest).")
    for row in found["forecast"]:
        typer.echo(f"{row['arm']} at {row['flops']:.3e} FLOPs: CORE {row['core']:.4f}")
    for row in found["compute_for"]:
        need = f"{row['flops']:.2e} FLOPs"
        if not math.isfinite(row["flops"]):
            need = "out of reach" if row["flops"] > 0 else "below any forecast"
        typer.echo(f"{row['arm']} to match {row['reference']} (CORE {row['core']:.4f}): {need}")
