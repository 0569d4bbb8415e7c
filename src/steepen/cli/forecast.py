"""`steepen forecast`: from task scores of small runs to CORE at a larger budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.errors import UsageError, nearest

if TYPE_CHECKING:
    from steepen.evaluation.scored_runs import Scored
    from steepen.laws.fits.downstream import Checkpoints, DownstreamFit

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
        str,
        typer.Option(
            help="core17, all, labels with commas, or a file of `steepen eval filter --out`. Where a run "
            "lacks some of CORE's 22 tasks, the mean of the named ones is forecast instead."
        ),
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
    from steepen.evaluation.core.suite import GPT3_CORE
    from steepen.evaluation.scored_runs import by_arm, read_scored
    from steepen.laws.fits.downstream import fit_downstream

    for budget in target or []:
        if not 0 < budget < float("inf"):
            raise UsageError(f"--target {budget} is not valid: give a positive number of FLOPs.")
    groups = by_arm(read_scored(paths))
    groups = _chosen_arms(groups, arms)
    labels = _tasks(tasks, groups)
    # Without all 22 tasks there is no CORE: the named tasks' own mean is forecast, and GPT-3 has none.
    whole = all(run.core.get("core22") is not None for runs in groups.values() for run in runs)
    references = GPT3_CORE if whole else {}

    def score(run: Scored) -> float:
        return float(run.core["core22"]) if whole else run.mean_centered(labels)

    kept, held = _hold_out(groups, hold_out)
    short = {name: len(runs) for name, runs in groups.items() if len(runs) < LEAST}
    if short:
        name, count = next(iter(short.items()))
        raise UsageError(
            f"{name} has {count} scored runs; a task law needs at least {LEAST} (or leave --arms)."
        )
    full = fit_downstream(_series(groups, labels, score), labels)
    comparison: list[dict[str, Any]] = []
    if held:
        without = fit_downstream(_series(kept, labels, score), labels)
        for name, runs in held.items():
            comparison += [
                {"run": run.run, **asdict(without.hold_out(name, run.flops, score(run)))} for run in runs
            ]
    budgets = target or []
    key = "core" if whole else "mean_centered"
    found: dict[str, Any] = {
        "score": key,
        "tasks": labels,
        "runs": {name: [run.run for run in runs] for name, runs in groups.items()},
        "hold_out": comparison,
        "forecast": [
            {"arm": name, "flops": budget, key: float(full.predict(name, budget)[0])}
            for budget in budgets
            for name in groups
        ],
        "compute_for": [
            {"reference": reference, "core": value, "arm": name, "flops": full.compute_for(name, value)}
            for reference, value in references.items()
            for name in groups
        ],
        "r": full.r,
        "scatter": full.sigma,
    }
    if figure is not None:
        _draw(full, groups, held, budgets, figure, score, references)
        found["figure"] = str(figure)
    if as_json:
        from steepen.utils.json_io import to_json

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
    from steepen.evaluation.core.suite import CORE17, CORE22

    runs = [run for group in groups.values() for run in group]
    if text in ("core17", "all"):
        if missing := [run.run for run in runs if run.core.get("core22") is None]:
            raise UsageError(
                f"run {missing[0]} lacks some of the 22 tasks; evaluate it on the whole bundle first, or "
                "name tasks that every run has with --tasks."
            )
        return list(CORE17 if text == "core17" else CORE22)
    path = Path(text)
    words = path.read_text().split() if path.is_file() else [word.strip() for word in text.split(",")]
    labels = list(dict.fromkeys(word for word in words if word))
    if not labels:
        raise UsageError(f"--tasks {text!r} names no task; name one or more.")
    known = dict.fromkeys(label for run in runs for label in run.tasks)
    for label in labels:
        if label not in known:
            raise UsageError(
                f"--tasks: {label!r} is neither a task of the records nor a file of labels; "
                f"the nearest tasks are {nearest(label, known)}."
            )
        if without := [run.run for run in runs if label not in run.tasks]:
            raise UsageError(
                f"--tasks: run {without[0]} has no score of {label!r}; evaluate it on that task first."
            )
    return labels


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


def _series(
    groups: dict[str, list[Scored]], labels: list[str], score: Callable[[Scored], float]
) -> dict[str, Checkpoints]:
    import numpy as np

    from steepen.laws.fits.downstream import Checkpoints

    def column(runs: list[Scored], label: str, field: str) -> Any:
        return np.array([run.tasks[label][field] for run in runs], float)

    return {
        name: Checkpoints(
            np.array([run.flops for run in runs], float),
            {label: column(runs, label, "nll") for label in labels},
            {label: column(runs, label, "centered") for label in labels},
            np.array([score(run) for run in runs], float),
        )
        for name, runs in groups.items()
    }


def _draw(
    fit: DownstreamFit,
    groups: dict[str, list[Scored]],
    held: dict[str, list[Scored]],
    budgets: list[float],
    file: Path,
    score: Callable[[Scored], float],
    references: dict[str, float],
) -> None:
    import numpy as np

    from steepen.report.evaluation_figures import draw_forecast

    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--figure {file} is not valid: its name must end in .png, .pdf or .svg.")
    everything = [run.flops for runs in groups.values() for run in runs]
    ends = min(everything), max([*budgets, 10 * max(everything)])
    at = np.geomspace(*ends, 200)
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_forecast(
        {name: (at.tolist(), fit.predict(name, at).tolist()) for name in groups},
        {name: ([run.flops for run in runs], [score(run) for run in runs]) for name, runs in groups.items()},
        {name: (runs[-1].flops, score(runs[-1])) for name, runs in held.items()},
        references,
        file,
        budgets[-1] if budgets else None,
        "CORE" if references else f"mean centred accuracy of {len(fit.tasks)} tasks",
    )


def _print(found: dict[str, Any], fit: DownstreamFit) -> None:
    counts = ", ".join(f"{len(runs)} of {arm}" for arm, runs in found["runs"].items())
    name = "CORE" if found["score"] == "core" else "mean centred accuracy"
    typer.echo(f"fitted on {counts}; {len(found['tasks'])} tasks; r = {fit.r:.4f}; scatter {fit.sigma:.4f}")
    for row in found["hold_out"]:
        typer.echo(
            f"held out {row['run']} ({row['series']}, {row['flops']:.3e} FLOPs): {name} "
            f"{row['observed']:.4f}, forecast without it {row['forecast']:.4f}, miss {row['miss']:+.4f} "
            f"({row['miss_sigma']:+.1f} × scatter)"
        )
    if not found["hold_out"]:
        typer.echo(f"nothing held out (by default an arm with more than {LEAST} runs spares its largest).")
    for row in found["forecast"]:
        typer.echo(f"{row['arm']} at {row['flops']:.3e} FLOPs: {name} {row[found['score']]:.4f}")
    if found["score"] != "core":
        typer.echo(
            f"the score is the mean of {', '.join(found['tasks'])}, not CORE: some of its 22 tasks were not "
            "scored, so GPT-3's CORE is left out."
        )
    for row in found["compute_for"]:
        need = f"{row['flops']:.2e} FLOPs"
        if not math.isfinite(row["flops"]):
            need = "out of reach" if row["flops"] > 0 else "below any forecast"
        typer.echo(f"{row['arm']} to match {row['reference']} (CORE {row['core']:.4f}): {need}")
