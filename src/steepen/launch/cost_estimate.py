"""What runs cost before they start: GPUs, FLOPs, time from measured or assumed speed; and a limit on it.

`GpusPerRun` says how many GPUs a run gets, `Speed` how long it takes there, and `Budget` admits runs, in
order, as long as their FLOPs or seconds fit into what one command may spend.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steepen.errors import SteepenError, UsageError, is_whole, shorten
from steepen.recipe.accelerators import Accelerator, accelerator_of, find_accelerator
from steepen.recipe.memory import largest_micro_batch
from steepen.recipe.sharding import Shard
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops, is_light
from steepen.utils.formatting import format_duration
from steepen.utils.values import parse_duration

MAX_HOURS = 24.0  # `auto` takes more GPUs for a run that would train for longer
MAX_GPUS = 1024
ASSUMED_CPU_FLOPS = 1e10  # per second and process; used until a run has been measured
ASSUMED_MFU = 0.4  # fraction of a GPU's peak; used until a run has been measured
LIGHT_MFU = 0.15  # the same of small runs that share a GPU: 10% (d4) to 16% on an H200 (docs/log.md)


@dataclass(frozen=True)
class GpusPerRun:
    """A number of GPUs, or "auto" for the fewest that suffice: powers of two that divide the batch."""

    count: int | Literal["auto"] = 1
    gpu: Accelerator | None = None  # whose memory and speed `auto` assumes; None: an H100
    shard: Shard = "optimizer"  # what several GPUs divide among them
    available: int = MAX_GPUS  # that there are for all runs together

    @property
    def single(self) -> bool:
        """Whether every run has one GPU."""
        return self.count == 1

    def of(self, spec: RunSpec) -> int:
        """GPUs for a run; raises SteepenError if no number suffices."""
        if self.count != "auto":
            if spec.batch_sequences % self.count:
                raise UsageError(
                    f"`gpus_per_run` = {self.count} is not possible: a batch of {spec.batch_sequences:,} "
                    "sequences cannot be divided evenly."
                )
            return self.count
        return _fewest(spec, self.gpu or find_accelerator("h100"), self.shard, self.available)


@functools.lru_cache(maxsize=4096)  # asked again whenever a launcher or its display looks at what waits
def _fewest(spec: RunSpec, gpu: Accelerator, shard: Shard, available: int) -> int:
    """The fewest GPUs on which a run fits in memory and time."""
    for recompute in (False, True):  # more GPUs cost less than computing blocks again in the backward
        how: dict[str, Any] = {"shard": shard, "optimizer": spec.optimizer, "options": spec.options}
        gpus, fits = 1, 0
        while gpus <= min(available, spec.batch_sequences) and spec.batch_sequences % gpus == 0:
            if largest_micro_batch(spec.planned_run, gpus, gpu, recompute=recompute, **how) >= 1:
                fits = gpus
                if expected_flops(spec) / (gpus * gpu.peak_flops * ASSUMED_MFU) <= 3600 * MAX_HOURS:
                    return gpus
            gpus *= 2
        if fits:  # too long on any number of GPUs: as many as the batch allows
            return fits
    other = "`shard` full, " if shard == "optimizer" else ""
    raise SteepenError(
        f"{spec.arm.name} d{spec.shape.depth} does not fit on any number of {gpu.name} GPUs by the "
        f"planner; use {other}`gpu` with more memory, or give `gpus_per_run` a number."
    )


START_SECONDS = 5.0  # to import torch, open the data and validate


def remaining_flops(spec: RunSpec, start: int) -> float:
    """FLOPs from a step to the end: from that of its newest checkpoint, or where it branches off a trunk."""
    return expected_flops(spec) - expected_flops(spec, stop=min(start, spec.steps))


@dataclass(frozen=True)
class SpeedSample:
    """Speed of one finished run."""

    precision: str
    flops_per_token: float
    flops_per_second: float  # of one GPU, or process of a CPU
    overhead_seconds: float  # outside training: validation, checkpoints, compilation


@dataclass(frozen=True)
class Speed:
    """Speed of runs. Samples of the same precision and similar size are used: small networks are slower."""

    samples: tuple[SpeedSample, ...]
    assumed_flops_per_second: float  # of one GPU, used for a precision without samples
    assumption: str  # where that rate comes from, for messages
    gpus_per_run: GpusPerRun = field(default_factory=GpusPerRun)  # several are that many times as fast as one
    light: float = 1.0  # times the assumed rate, for runs whose steps leave most of a GPU idle

    def seconds(self, spec: RunSpec, flops: float | None = None) -> float:
        """Estimated seconds of a run, or of the part of it that costs `flops`."""
        whole = expected_flops(spec)
        flops = whole if flops is None else flops
        samples = self._samples_like([spec])
        if not samples:
            assumed = self.assumed_flops_per_second * (self.light if is_light(spec) else 1)
            return flops / assumed / self.gpus_per_run.of(spec) + START_SECONDS
        # Small networks leave a device idle, so speed depends on size: the three runs nearest to it count.
        # The median leaves out one that was disturbed, or was the first and compiled for all.
        size = whole / spec.tokens
        near = sorted(samples, key=lambda sample: abs(math.log(sample.flops_per_token / size)))[:3]
        rate = statistics.median(sample.flops_per_second for sample in near)
        overhead = statistics.median(sample.overhead_seconds for sample in near)
        return flops / rate / self.gpus_per_run.of(spec) + overhead + START_SECONDS

    def source(self, specs: Sequence[RunSpec]) -> str:
        """How the speed of these runs was obtained, for messages."""
        found = len(self._samples_like(specs))
        if found:
            return f"measured on {found} finished {'run' if found == 1 else 'runs'}"
        small = self.light != 1 and any(map(is_light, specs))
        return self.assumption + f", {LIGHT_MFU:.0%} for small runs" * small

    def _samples_like(self, specs: Sequence[RunSpec]) -> list[SpeedSample]:
        precisions = {spec.precision for spec in specs}
        return [sample for sample in self.samples if sample.precision in precisions]

    @staticmethod
    def from_records(
        records: Iterable[RunRecord],
        *,
        device: str | None = None,
        gpu: str | None = None,
        mfu: float | None = None,
        gpus_per_run: GpusPerRun | None = None,
    ) -> Speed:
        """Speed from finished runs on one kind of hardware, else from a GPU's peak, else the CPU default.

        `device` is a hardware name (see `local_hardware_name`); None uses all records. A `gpu` or `mfu`
        overrides the records.
        """
        gpus = gpus_per_run or GpusPerRun()
        fraction = ASSUMED_MFU if mfu is None else mfu
        samples: tuple[SpeedSample, ...] = ()
        if gpu is not None or mfu is not None:
            accelerator = find_accelerator(gpu or "h100")
        else:
            samples = speed_samples(r for r in records if device is None or hardware_name(r) == device)
            accelerator = accelerator_of(device or "")
        if accelerator is not None:
            whose = f"{'one' if gpus.single else 'each'} {accelerator.name.upper()}"
            assumption = f"assuming {fraction:.0%} of the peak of {whose}"
            light = LIGHT_MFU / fraction if mfu is None else 1.0
            return Speed(samples, accelerator.peak_flops * fraction, assumption, gpus, light)
        why = "no run of this precision" if samples else "nothing"
        assumption = f"assuming {ASSUMED_CPU_FLOPS:.0e} FLOPs/s per process, as {why} is measured yet"
        return Speed(samples, ASSUMED_CPU_FLOPS, assumption, gpus_per_run=gpus)


def speed_samples(records: Iterable[RunRecord]) -> tuple[SpeedSample, ...]:
    """The speeds of finished runs that trained for some time."""
    # Runs that train on a GPU at the same time are its speed together; a run may have several GPUs, or
    # processes of a CPU.
    return tuple(
        SpeedSample(
            record.spec.precision,
            record.flops / record.tokens,
            record.spent_flops
            / record.seconds_training
            * _count(record, "runs_per_gpu")
            / _count(record, "ranks"),
            max(0.0, record.seconds_total - record.seconds_training),
        )
        for record in records
        if record.seconds_training > 0 and record.tokens > 0 and record.spent_flops > 0
    )


def _count(record: RunRecord, name: str) -> int:
    found = record.hardware.get(name, 1)
    return found if is_whole(found) and found >= 1 else 1


def hardware_name(record: RunRecord) -> str:
    """Hardware of a record: a GPU's product name, or the host name of a CPU machine."""
    facts = record.hardware
    return str(facts.get("name") if facts.get("device") == "cuda" else facts.get("host"))


def local_hardware_name() -> str:
    """Hardware of this machine, named as in `hardware_name`."""
    from steepen.launch.local import visible_gpus

    found = visible_gpus()
    return found[0][1] if found else platform.node()


def makespan(
    seconds: Sequence[float], slots: int, gpus: Sequence[int] = (), available: int | None = None
) -> float:
    """Seconds until a queue of runs is done, `slots` at a time, started in order.

    Where `available` GPUs are named, each run waits until as many as it needs (`gpus`) are free.
    """
    running: list[tuple[float, int]] = []  # ends and GPUs
    now, free = 0.0, available or 0
    for duration, need in zip(seconds, gpus or [0] * len(seconds), strict=True):
        while len(running) >= max(1, slots) or (available and running and free < need):
            now, back = heapq.heappop(running)
            free += back
        heapq.heappush(running, (now + duration, need))
        free -= need
    return max((end for end, _ in running), default=0.0)


MAX_FLOPS = 1e40


class BudgetReached(SteepenError):
    """Some runs do not fit into the budget; those that were started have finished."""

    exit_code = 3
    resumable = True


@dataclass
class Budget:
    """A limit on the FLOPs of the runs admitted so far, or on the time since construction."""

    flops: float | None = None
    seconds: float | None = None
    spent: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @staticmethod
    def parse(text: str) -> Budget:
        """Parse FLOPs (`1e15`) or time (`90s`, `30m`, `2h`, `1d`, `1h30m`)."""
        with contextlib.suppress(ValueError):
            return Budget(seconds=parse_duration(text))
        try:
            value = float(text.lower().replace(" ", "").removesuffix("flops"))
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_FLOPS:
            raise UsageError(
                f"`budget` = {shorten(text)!r} is not valid: give FLOPs (1e15, at most 1e40) or time "
                "(90s, 30m, 2h, 1h30m, at most 36500d)."
            )
        return Budget(flops=value)

    def admits(self, flops: float, seconds: float) -> bool:
        """Whether a run of this cost fits; if so, count it as spent."""
        if self.flops is not None and self.spent + flops > self.flops:
            return False
        if self.seconds is not None and time.monotonic() - self.started + seconds > self.seconds:
            return False
        self.spent += flops
        return True

    def fits_fresh_budget(self, flops: float, seconds: float) -> bool:
        """Whether the same budget, given to a new command, would admit a run of this cost."""
        if self.spent == 0:  # it admitted nothing; a new one would not either
            return False
        return flops <= (self.flops or math.inf) and seconds <= (self.seconds or math.inf)

    def smallest_sufficient(self, flops: float, seconds: float) -> str:
        """The smallest budget of this kind that admits a run of this cost, rounded up."""
        if self.flops is not None:
            size = 10.0 ** (math.floor(math.log10(flops)) - 2)
            return f"{math.ceil(flops / size) * size:.3g} FLOPs"
        unit = 1 if seconds < 3600 else 60 if seconds < 86400 else 3600  # format_duration's resolution
        return format_duration((math.floor(seconds / unit) + 1) * unit)

    def __str__(self) -> str:
        if self.flops is not None:
            return f"{self.flops:.3g} FLOPs"
        return format_duration(self.seconds or 0.0)
