"""What runs cost before they happen: FLOPs exactly, time from measured speed or a stated assumption."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steepen.recipe.hardware import ACCELERATORS, find_accelerator
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory

CPU_FLOPS = 1e10  # per second and process: an assumption, used only while nothing has been measured
MFU = 0.4  # and on a GPU this share of its peak
START_SECONDS = 5.0  # a process that imports torch, opens the data and validates


def flops_left(spec: RunSpec, run: RunDirectory) -> float:
    """FLOPs from the newest checkpoint to the end, by steps."""
    done = max(0, run.saved_step()) / spec.steps
    return expected_flops(spec) * max(0.0, 1 - done)


@dataclass(frozen=True)
class Sample:
    """How fast one finished run was."""

    size: float  # FLOPs per token
    flops_per_second: float
    overhead: float  # seconds beside training


@dataclass(frozen=True)
class Speed:
    """How fast runs go; small networks are slower per FLOP, so the nearest sizes are asked."""

    samples: tuple[Sample, ...]
    assumed: float  # FLOPs per second where there is no sample
    source: str  # in words

    def seconds(self, spec: RunSpec, flops: float | None = None) -> float:
        """How long a run takes, or the part of it that costs `flops`."""
        whole = expected_flops(spec)
        flops = whole if flops is None else flops
        if not self.samples:
            return flops / self.assumed + START_SECONDS
        size = whole / spec.tokens
        near = sorted(self.samples, key=lambda sample: abs(math.log(sample.size / size)))[:3]
        rate = statistics.median(sample.flops_per_second for sample in near)
        return flops / rate + statistics.median(sample.overhead for sample in near) + START_SECONDS

    @staticmethod
    def of(
        records: Iterable[RunRecord],
        *,
        device: str | None = None,
        gpu: str | None = None,
        mfu: float | None = None,
    ) -> Speed:
        """Speed from finished records on one kind of hardware, else from a GPU's peak, else a CPU's default.

        `device` is the name of the hardware the runs will have (see `here`); None takes any record. A GPU or
        MFU given by hand is believed rather than records.
        """
        if gpu is not None or mfu is not None:
            found = find_accelerator(gpu or "h100")
            share = MFU if mfu is None else mfu
            rate = found.peak_flops * share
            return Speed((), rate, f"assuming {share:.0%} of the peak of one {found.name.upper()}")
        chosen = [record for record in records if device is None or device_name(record) == device]
        samples = tuple(
            Sample(
                record.flops / record.tokens,
                record.flops / record.seconds_training,
                max(0.0, record.seconds_total - record.seconds_training),
            )
            for record in chosen
            if record.seconds_training > 0 and record.tokens > 0 and record.flops > 0
        )
        if samples:
            noun = "run" if len(samples) == 1 else "runs"
            return Speed(samples, CPU_FLOPS, f"measured on {len(samples)} finished {noun}")
        known = [one for one in ACCELERATORS.values() if one.name in (device or "").lower().replace(" ", "")]
        if known:
            best = max(known, key=lambda one: len(one.name))
            return Speed(
                (), best.peak_flops * MFU, f"assuming {MFU:.0%} of the peak of one {best.name.upper()}"
            )
        return Speed(
            (), CPU_FLOPS, f"assuming {CPU_FLOPS:.0e} FLOPs/s per process, as nothing is measured yet"
        )


def device_name(record: RunRecord) -> str:
    """The hardware of a record in one word or two: a GPU's product, or a CPU's machine."""
    facts = record.hardware
    return str(facts.get("name") if facts.get("device") == "cuda" else facts.get("host"))


def here() -> str:
    """The hardware of this machine, under the same name."""
    from steepen.launch.local import gpus

    found = gpus()
    return found[0][1] if found else platform.node()


def makespan(seconds: Sequence[float], slots: int) -> float:
    """How long a queue of runs takes on so many slots, started in order."""
    ends = [0.0] * max(1, slots)
    for duration in seconds:
        first = min(range(len(ends)), key=ends.__getitem__)
        ends[first] += duration
    return max(ends)
