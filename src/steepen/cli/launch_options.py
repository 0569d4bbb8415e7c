"""The options of every command that launches runs, and what `--dry-run` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.launch.cost_estimate import Speed
    from steepen.runs.record import RunRecord
    from steepen.runs.spec import RunSpec
    from steepen.runs.store import RunStore
    from steepen.studies.driver.drive import Study
    from steepen.studies.driver.dry_run import DryRunReport

On = Annotated[
    str,
    typer.Option(
        "--on", help="Where runs happen: local, slurm, ray, or module:attribute of a custom launcher."
    ),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", help="Runs at a time: one per GPU, or per CPU core, by default.")
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="KEY=VALUE",
        help="How to run (repeatable). local: runs_per_gpu, threads. slurm: partition, timeout_min, "
        "gpus_per_node, account and all else submitit knows. ray: address, num_cpus, num_gpus, threads.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the runs to make with FLOPs, time and cost; start nothing.")
]
BudgetText = Annotated[
    str | None,
    typer.Option("--budget", help="Start only runs that fit: FLOPs (1e15) or time (90s, 30m, 2h)."),
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help="Estimate time for this GPU (a100, h100, …) instead of measuring.")
]
Mfu = Annotated[
    float | None, typer.Option("--mfu", help="And for this share of its peak (0.4).", min=1e-6, max=1.0)
]
Price = Annotated[
    float | None,
    typer.Option("--dollars-per-hour", help="Price of what one run occupies, e.g. one GPU.", min=0.0),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run directories live.")]
Studies = Annotated[Path, typer.Option("--studies", help="Where the journals of studies live.")]
RetryDiverged = Annotated[
    bool, typer.Option("--retry-diverged", help="Train runs again whose loss has diverged before.")
]

ABSURD_SECONDS = 3 * 86400.0  # nobody waits so long for a CPU


def launch_study(
    make_study: Callable[[], Study[Any]],
    *,
    name: str,
    options: dict[str, Any],
    data: Path,
    runs: Path = Path("runs"),
    studies: Path = Path("studies"),
    on: str = "local",
    jobs: int | None = None,
    settings: list[str] | None = None,
    dry_run: bool = False,
    budget: str | None = None,
    gpu: str | None = None,
    mfu: float | None = None,
    dollars_per_hour: float | None = None,
    device: str = "auto",
    retry_diverged: bool = False,
    gaps: bool = False,
    as_json: bool = False,
    stand_ins: Sequence[Callable[[RunSpec], RunRecord]] = (),
) -> Any:
    """Run a study to its answer, or with `dry_run` print what it would run next and return None.

    `options` are what makes this study another one than its namesake; they go to its journal. `stand_ins` are
    results a dry run may make up to see what an adaptive study would ask for next.
    """
    from steepen.launch.base import LaunchContext
    from steepen.launch.batch_progress import BatchProgress
    from steepen.launch.budget import Budget
    from steepen.launch.local import visible_gpus
    from steepen.launch.registry import make_launcher
    from steepen.runs.store import RunStore
    from steepen.studies.driver.drive import drive, look_ahead
    from steepen.studies.driver.dry_run import DryRunReport
    from steepen.studies.driver.journal import Journal

    store = RunStore(runs)
    limit = None if budget is None else Budget.parse(budget)
    check_device(device, on, dry_run)
    arguments = () if device == "auto" else ("--device", device)
    launcher = make_launcher(on, LaunchContext(data, store, arguments), jobs, settings or [])
    speed = measured_speed(store, on, device, gpu, mfu)
    if dry_run:
        rehearsal = look_ahead(make_study, store, stand_ins, accept_diverged=gaps)
        forecast = DryRunReport.from_step(rehearsal, store, speed, launcher.slots, dollars_per_hour)
        cpu = gpu is None and mfu is None and on == "local" and (device == "cpu" or not visible_gpus())
        print(json.dumps(forecast.to_dict(), indent=2) if as_json else describe(forecast, suggest_gpu=cpu))
        return None
    return drive(
        make_study(),
        store,
        launcher,
        journal=Journal.open(studies, name, options, runs),
        budget=limit,
        accept_diverged=gaps,
        retry_diverged=retry_diverged,
        progress=BatchProgress(store, speed=speed),
    )


def check_device(device: str, on: str = "local", dry_run: bool = False) -> None:
    """Refuse a device that no run could have, before any is started.

    What a cluster's nodes have is not known here, and a dry run needs no device: only the name is checked.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device {device!r} is not known: use auto, cpu, cuda or cuda:N.")
    if on == "local" and not dry_run and device.startswith("cuda"):
        from steepen.training.device import find_device  # imports torch, which no other device needs here

        find_device(device)


def measured_speed(store: RunStore, on: str, device: str, gpu: str | None, mfu: float | None) -> Speed:
    """How fast runs go: as given, or from finished runs of the hardware they will have, or assumed."""
    import platform

    from steepen.launch.cost_estimate import Speed, local_hardware_name

    # On a cluster any hardware may come: all finished runs count.
    name = None if on != "local" else platform.node() if device == "cpu" else local_hardware_name()
    return Speed.from_records(
        store.records() if gpu is None and mfu is None else (), device=name, gpu=gpu, mfu=mfu
    )


def describe(forecast: DryRunReport, suggest_gpu: bool = False) -> str:
    """What a dry run prints."""
    from steepen.utils.formatting import format_duration

    done = f"{forecast.finished} finished" if forecast.finished else "none finished yet"
    if forecast.complete:
        return f"Nothing is left to run ({done}): the study has its answer."
    lines = [f"{'run':16}  {'arm':20} {'depth':>5} {'seed':>4} {'tokens':>14} {'FLOPs':>9} {'time':>14}"]
    for run in forecast.runs:
        lines.append(
            f"{run.run:16}  {run.arm:20} {run.depth:5} {run.seed:4} {run.tokens:14,} {run.flops:9.2e} "
            f"{format_duration(run.seconds):>14}"
        )
    noun = "run" if len(forecast.runs) == 1 else "runs"
    lines += [
        "",
        f"{len(forecast.runs)} {noun} to make ({done}): {forecast.flops:.3g} FLOPs, "
        f"{format_duration(forecast.machine_seconds)} of machine time, "
        f"{format_duration(forecast.seconds)} with {forecast.slots} at a time ({forecast.speed}).",
    ]
    if forecast.dollars is not None:
        lines.append(f"Cost: ${forecast.dollars:,.2f} at ${forecast.dollars_per_hour:g} an hour.")
    if forecast.later_runs:
        noun = "run" if forecast.later_runs == 1 else "runs"
        lines.append(
            f"then about {forecast.later_runs} more {noun}, {forecast.later_flops:.3g} FLOPs "
            "(their settings depend on results)."
        )
    if suggest_gpu and forecast.seconds > ABSURD_SECONDS:
        lines.append(
            f"That is {forecast.seconds / 86400:,.0f} days on CPUs; `--gpu h100` estimates it for a GPU."
        )
    return "\n".join(lines)
