"""What a dry run of a study returns: the runs that it would make next, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from steepen.launch.cost_estimate import makespan
from steepen.results.result import Result
from steepen.results.table import Column, Table, columns_of, table_of
from steepen.results.text import Block, Lines, Paragraph
from steepen.utils.formatting import counted, format_bytes, format_duration

GPU_HINT_SECONDS = 3 * 86400.0  # estimates on a CPU above this suggest a GPU


@dataclass(frozen=True)
class DryRunRow:
    """A run that the study would make; `flops` are those that remain, where it has a checkpoint."""

    run: Annotated[str, Column(whole=True)]
    arm: Annotated[str, Column(whole=True)]
    depth: int
    seed: int
    tokens: Annotated[int, Column(format=",")]
    flops: Annotated[float, Column("FLOPs", ".2e")]
    seconds: Annotated[float, Column("time", format_duration, align="right")]
    disk_bytes: Annotated[int, Column(shown=False)] = 0  # of its last checkpoint, which it keeps
    gpus: Annotated[int, Column("GPUs")] = 1
    varied: str = ""  # what tells it from other runs of its arm, depth and seed
    # FLOPs of its first steps, which another of these runs trains: not in `flops`.
    shared_flops: Annotated[float, Column(shown=False)] = 0.0


@dataclass(frozen=True, eq=False, repr=False)
class DryRun(Result):
    """The known next runs of a study with their cost, and an estimate of those that follow."""

    finished: int  # runs in the store
    complete: bool  # nothing is left to run
    runs: tuple[DryRunRow, ...]
    slots: int
    speed: str  # source of the time estimate
    dollars_per_hour: float | None = None  # of one GPU
    later_runs: int = 0  # estimated number of further runs, whose settings depend on results
    later_flops: float = 0.0
    later_gpu_seconds: float = 0.0
    data_known: bool = True  # False: runs will have other names, as the data is part of a run's hash
    on_cpu: bool = field(default=False, metadata={"transient": True})  # times are of CPUs of this machine
    available: int | None = None  # GPUs that were named, which the runs share
    # What bounds a study that goes on until it is decided; empty for others.
    limit: str = field(default="", metadata={"transient": True})

    @property
    def rows(self) -> tuple[DryRunRow, ...]:
        """One row per run."""
        return self.runs

    @property
    def flops(self) -> float:
        """FLOPs of all runs together."""
        return sum(run.flops for run in self.runs)

    @property
    def shared_flops(self) -> float:
        """FLOPs of steps that several runs have in common, which one of them trains for all."""
        return sum(run.shared_flops for run in self.runs)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the checkpoints that all runs keep."""
        return sum(run.disk_bytes for run in self.runs)

    @property
    def machine_seconds(self) -> float:
        """Seconds of all runs together, one after the other."""
        return sum(run.seconds for run in self.runs)

    @property
    def gpu_seconds(self) -> float:
        """Seconds times GPUs (processes of a CPU) of all runs together."""
        return sum(run.seconds * run.gpus for run in self.runs)

    @property
    def seconds(self) -> float:
        """Seconds from start to end, with `slots` runs at a time, on the GPUs that were named."""
        gpus = [run.gpus for run in self.runs]
        return makespan([run.seconds for run in self.runs], self.slots, gpus, self.available)

    @property
    def dollars(self) -> float | None:
        """Cost of the listed runs, where a price is known."""
        return self._price(self.gpu_seconds)

    @property
    def later_dollars(self) -> float | None:
        """Estimated cost of the runs that follow."""
        return self._price(self.later_gpu_seconds)

    def _price(self, gpu_seconds: float) -> float | None:
        return None if self.dollars_per_hour is None else self.dollars_per_hour * gpu_seconds / 3600

    def headline(self) -> str:
        """How much is left."""
        return f"dry run: {len(self.runs)} runs to make, {self.finished} finished, {self.flops:.3g} FLOPs"

    def to_dict(self) -> dict[str, Any]:
        """The runs and their totals."""
        totals = ("flops", "shared_flops", "seconds", "machine_seconds", "gpu_seconds", "dollars",
                  "later_dollars", "disk_bytes")  # fmt: skip
        found = {**asdict(self), **{name: getattr(self, name) for name in totals}}
        del found["on_cpu"], found["limit"]
        return found

    def left_out(self) -> list[str]:
        """Columns that are the same for every run."""
        alike = {"seed": len({run.seed for run in self.runs}) < 2}
        alike |= {"gpus": all(run.gpus == 1 for run in self.runs)}
        alike |= {"varied": not any(run.varied for run in self.runs)}
        return [name for name, same in alike.items() if same]

    def table(self, caption: str = "") -> Table:
        """The runs, the time last; without names as long as they have none."""
        order = ("run", "arm", "depth", "seed", "varied", "tokens", "flops", "gpus", "seconds")
        hidden = [*self.left_out(), *(() if self.data_known else ("run",))]
        columns = [columns_of(DryRunRow)[name] for name in order if name not in hidden]
        return table_of(self.runs, columns, "", caption)

    def blocks(self, width: int) -> Iterable[Block]:
        """The runs, then what they cost."""
        done = f"{self.finished} finished" if self.finished else "none finished yet"
        if self.complete:
            yield Lines(f"Nothing is left to run ({done}): the study has its answer.")
            return
        yield self.table()
        several = any(run.gpus > 1 for run in self.runs)
        work = f"{format_duration(self.machine_seconds)} of machine time"
        if several or self.available:
            work = f"{self.gpu_seconds / 3600:,.3g} GPU-hours"
        how = f"with {'one' if self.slots == 1 else self.slots} at a time"
        if self.available:
            how = f"on {self.available} GPUs"
        elif several:
            most = sum(sorted((run.gpus for run in self.runs), reverse=True)[: self.slots])
            how += f" on up to {most} GPUs"
        shared = f" ({self.flops + self.shared_flops:.3g} if each trained alone)" if self.shared_flops else ""
        yield Lines(
            f"{counted(len(self.runs), 'run')} to make ({done}): {self.flops:.3g} FLOPs{shared}, {work}, "
            f"{format_duration(self.seconds)} {how} ({self.speed})."
        )
        if not self.data_known:
            yield Lines("Runs have no names (hashes) yet: the data is part of them and is not prepared.")
        if self.runs:
            yield Lines(f"Disk: {format_bytes(self.disk_bytes)} of checkpoints, one of each run.")
        if self.dollars is not None:
            later = f", and about ${self.later_dollars:,.2f} for the later runs" if self.later_runs else ""
            yield Lines(f"Cost: ${self.dollars:,.2f}{later}, at ${self.dollars_per_hour:g} per GPU-hour.")
        if self.later_runs:
            yield Lines(
                f"then about {counted(self.later_runs, 'more run')}, {self.later_flops:.3g} FLOPs (their "
                "settings depend on results)."
            )
        if self.limit:
            yield Paragraph(
                "More batches follow by what these runs show, until the question is decided or given up; "
                f"all runs together take at most {self.limit}."
            )
        if self.on_cpu and self.seconds > GPU_HINT_SECONDS:
            days = f"{self.seconds / 86400:,.0f} days on CPUs"
            yield Lines(f"That is {days}; `--gpu h100` estimates it for a GPU.")
