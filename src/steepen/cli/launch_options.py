"""Options of the commands that launch runs, and the text of `--dry-run`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.runs.record import RunRecord
    from steepen.runs.spec import RunSpec
    from steepen.studies.driver.drive import StudyGenerator
    from steepen.studies.driver.dry_run import DryRunReport

# Panels of --help.
LAUNCH = "Launching"
ESTIMATE = "Budget and cost"

LauncherName = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="Launcher: local, slurm, ray, or a custom module:attribute.",
        rich_help_panel=LAUNCH,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        help="Max runs at a time (default: one per GPU, else per CPU core).",
        min=1,
        max=10_000,
        rich_help_panel=LAUNCH,
    ),
]
LauncherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--launcher-option",
        metavar="KEY=VALUE",
        help="Option of the launcher (repeatable). local: runs_per_gpu, threads. slurm: partition, "
        "timeout_min, gpus_per_node, max_gpus_per_node, runs_per_job, account and any other of submitit. "
        "ray: address, num_cpus, num_gpus, max_gpus_per_node, threads.",
        rich_help_panel=LAUNCH,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the remaining runs with FLOPs, time and cost; start none.",
        rich_help_panel=ESTIMATE,
    ),
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Start only runs that fit: FLOPs (1e15) or time (90s, 30m, 2h, 1d).",
        rich_help_panel=ESTIMATE,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="Estimate time for this GPU (a100, h100, …) instead of from finished runs.",
        rich_help_panel=ESTIMATE,
    ),
]
Mfu = Annotated[
    float | None,
    typer.Option(
        "--mfu",
        help="Estimate time for this fraction of the GPU's peak (0.4).",
        min=1e-6,
        max=1.0,
        rich_help_panel=ESTIMATE,
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--dollars-per-hour",
        help="Price per hour of the resources of one run.",
        min=0.0,
        max=1e6,
        rich_help_panel=ESTIMATE,
    ),
]
GpusPerRunText = Annotated[
    str,
    typer.Option(
        "--gpus-per-run",
        help="GPUs of each run, or auto: the fewest on which the planner expects it to fit in memory and"
        " to finish within a day.",
        rich_help_panel=LAUNCH,
    ),
]
ShardText = Annotated[
    str,
    typer.Option(
        "--shard",
        help="Sharding of a run on several GPUs: optimizer (state and fp32 weights, ZeRO-1), or full"
        " (weights and gradients too, FSDP2).",
        rich_help_panel=LAUNCH,
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N.", rich_help_panel=LAUNCH)]
SampleEvery = Annotated[
    int | None,
    typer.Option(
        "--sample-every",
        help="Every run generates sample text every so many steps into samples.jsonl.",
        show_default="the preset's, else none",
        min=1,
        max=10**12,
        rich_help_panel=LAUNCH,
    ),
]
SamplePrompt = Annotated[
    list[str] | None,
    typer.Option(
        "--sample-prompt",
        help="What they continue (repeatable).",
        show_default="the start of a document",
        rich_help_panel=LAUNCH,
    ),
]
Runs = Annotated[Path, typer.Option("--runs", help="Directory of all runs.")]
Studies = Annotated[Path, typer.Option("--studies", help="Directory of studies.")]
RetryDiverged = Annotated[
    bool, typer.Option("--retry-diverged", help="Retrain runs whose loss diverged.", rich_help_panel=LAUNCH)
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        help="Tracker that every run logs to: wandb, tensorboard, mlflow or trackio (repeatable).",
        rich_help_panel=LAUNCH,
    ),
]

GPU_HINT_SECONDS = 3 * 86400.0  # estimates on a CPU above this suggest --gpu


def launch_study(
    make_study: Callable[[], StudyGenerator[Any]],
    *,
    name: str,
    options: dict[str, Any],
    data: Path,
    runs: Path = Path("runs"),
    studies: Path = Path("studies"),
    launcher: str = "local",
    jobs: int | None = None,
    launcher_options: list[str] | None = None,
    dry_run: bool = False,
    budget: str | None = None,
    gpu: str | None = None,
    mfu: float | None = None,
    dollars_per_hour: float | None = None,
    device: str = "auto",
    gpus_per_run: str = "1",
    shard: str = "optimizer",
    trackers: tuple[str, ...] = (),
    retry_diverged: bool = False,
    accept_diverged: bool = False,
    as_json: bool = False,
    stand_ins: Sequence[Callable[[RunSpec], RunRecord]] = (),
    sample_every: int | None = None,
    sample_prompts: Sequence[str] = (),
) -> Any:
    """Run a study to its answer, or with `dry_run` print its next runs and return None."""
    from steepen.launch.budget import Budget
    from steepen.studies.driver import launch
    from steepen.utils.formatting import wrap_to_terminal

    limit = None if budget is None else Budget.parse(budget)
    check_device(device, launcher, dry_run)
    launching = launch.LaunchSettings(
        data, runs, launcher, jobs, tuple(launcher_options or ()), device, gpu, mfu, gpus_per_run,
        shard, trackers,
        sample_every, tuple(sample_prompts),
    )  # fmt: skip
    if not dry_run:
        return launch.launch_study(
            make_study,
            launching,
            name=name,
            options=options,
            studies=studies,
            budget=limit,
            accept_diverged=accept_diverged,
            retry_diverged=retry_diverged,
        )
    report = launch.dry_run_study(
        make_study,
        launching,
        stand_ins=stand_ins,
        accept_diverged=accept_diverged,
        dollars_per_hour=dollars_per_hour,
    )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        text = describe(report, suggest_gpu=launching.estimated_on_cpu())
        print(wrap_to_terminal(text, sys.stdout))
    return None


def check_device(device: str, launcher: str = "local", dry_run: bool = False) -> None:
    """Raise UsageError for a device that this machine does not have, before any run starts.

    For a cluster, whose devices are not known here, and for a dry run only the name is checked.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device {device!r} is not known: use auto, cpu, cuda or cuda:N.")
    if launcher == "local" and not dry_run and device.startswith("cuda"):
        from steepen.training.device import find_device  # imports torch, which no other device needs here

        find_device(device)


def _slots(count: int) -> str:
    return "one" if count == 1 else str(count)


def describe(report: DryRunReport, suggest_gpu: bool = False) -> str:
    """The text that a dry run prints."""
    from steepen.utils.formatting import format_bytes, format_duration

    done = f"{report.finished} finished" if report.finished else "none finished yet"
    if report.complete:
        return f"Nothing is left to run ({done}): the study has its answer."
    seeds = len({run.seed for run in report.runs}) > 1
    several = any(run.gpus > 1 for run in report.runs)
    rows = [
        (
            "run", "arm", "depth", *(("seed",) if seeds else ()), "tokens", "FLOPs",
            *(("GPUs",) if several else ()), "time",
        )
    ]  # fmt: skip
    rows += [
        (
            run.run if report.data_known else "–", run.arm, str(run.depth),
            *((str(run.seed),) if seeds else ()), f"{run.tokens:,}", f"{run.flops:.2e}",
            *((str(run.gpus),) if several else ()), format_duration(run.seconds),
        )
        for run in report.runs
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    noun = "run" if len(report.runs) == 1 else "runs"
    lines += [
        "",
        f"{len(report.runs)} {noun} to make ({done}): {report.flops:.3g} FLOPs, "
        f"{format_duration(report.machine_seconds)} of machine time, "
        f"{format_duration(report.seconds)} with {_slots(report.slots)} at a time ({report.speed}).",
    ]
    if not report.data_known:
        lines.append("Runs have no names (hashes) yet: the data is part of them and is not prepared.")
    if report.runs:
        lines.append(f"Disk: {format_bytes(report.disk_bytes)} of checkpoints, one of each run.")
    if report.dollars is not None:
        lines.append(f"Cost: ${report.dollars:,.2f} at ${report.dollars_per_hour:g} an hour.")
    if report.later_runs:
        noun = "run" if report.later_runs == 1 else "runs"
        lines.append(
            f"then about {report.later_runs} more {noun}, {report.later_flops:.3g} FLOPs "
            "(their settings depend on results)."
        )
    if suggest_gpu and report.seconds > GPU_HINT_SECONDS:
        lines.append(
            f"That is {report.seconds / 86400:,.0f} days on CPUs; `--gpu h100` estimates it for a GPU."
        )
    return "\n".join(lines)
