"""Cost of runs before they start: exact FLOPs, and time from measured or assumed speed."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from steepen.launch.gpus_per_run import GpusPerRun
from steepen.recipe.hardware import ACCELERATORS, find_accelerator
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory
from steepen.utils.validate import is_whole

ASSUMED_CPU_FLOPS = 1e10  # per second and process; used until a run has been measured
ASSUMED_MFU = 0.4  # fraction of a GPU's peak; used until a run has been measured
START_SECONDS = 5.0  # to import torch, open the data and validate


def remaining_flops(spec: RunSpec, run: RunDirectory) -> float:
    """FLOPs from the newest checkpoint to the end, in proportion to steps."""
    done = max(0, run.saved_step()) / spec.steps
    return expected_flops(spec) * max(0.0, 1 - done)


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

    def gpus(self, spec: RunSpec) -> int:
        """GPUs that a run has."""
        return self.gpus_per_run.of(spec)

    def seconds(self, spec: RunSpec, flops: float | None = None) -> float:
        """Estimated seconds of a run, or of the part of it that costs `flops`."""
        whole = expected_flops(spec)
        flops = whole if flops is None else flops
        samples = self._samples_like([spec])
        if not samples:
            return flops / self.assumed_flops_per_second / self.gpus(spec) + START_SECONDS
        size = whole / spec.tokens
        near = sorted(samples, key=lambda sample: abs(math.log(sample.flops_per_token / size)))[:3]
        rate = statistics.median(sample.flops_per_second for sample in near)
        overhead = statistics.median(sample.overhead_seconds for sample in near)
        return flops / rate / self.gpus(spec) + overhead + START_SECONDS

    def source(self, specs: Sequence[RunSpec]) -> str:
        """How the speed of these runs was obtained, for messages."""
        found = len(self._samples_like(specs))
        return f"measured on {found} finished {'run' if found == 1 else 'runs'}" if found else self.assumption

    def _samples_like(self, specs: Sequence[RunSpec]) -> list[SpeedSample]:
        """The samples that have the precision of one of these runs."""
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
        one = "one" if gpus.single else "each"
        if gpu is not None or mfu is not None:
            found = find_accelerator(gpu or "h100")
            fraction = ASSUMED_MFU if mfu is None else mfu
            rate = found.peak_flops * fraction
            return Speed((), rate, f"assuming {fraction:.0%} of the peak of {one} {found.name.upper()}", gpus)
        samples = speed_samples(
            record for record in records if device is None or hardware_name(record) == device
        )
        name = (device or "").lower().replace(" ", "")
        known = [each for each in ACCELERATORS.values() if each.name in name]
        if known:
            best = max(known, key=lambda each: len(each.name))
            rate = best.peak_flops * ASSUMED_MFU
            assumption = f"assuming {ASSUMED_MFU:.0%} of the peak of {one} {best.name.upper()}"
            return Speed(samples, rate, assumption, gpus)
        why = "no run of this precision" if samples else "nothing"
        assumption = f"assuming {ASSUMED_CPU_FLOPS:.0e} FLOPs/s per process, as {why} is measured yet"
        return Speed(samples, ASSUMED_CPU_FLOPS, assumption, gpus)


def speed_samples(records: Iterable[RunRecord]) -> tuple[SpeedSample, ...]:
    """The speeds of finished runs that trained for some time."""
    return tuple(
        SpeedSample(
            record.spec.precision,
            record.flops / record.tokens,
            record.flops / record.seconds_training * _runs_per_gpu(record) / _ranks(record),
            max(0.0, record.seconds_total - record.seconds_training),
        )
        for record in records
        if record.seconds_training > 0 and record.tokens > 0 and record.flops > 0
    )


def _ranks(record: RunRecord) -> int:
    """GPUs, or processes of a CPU, that a run had."""
    return _count(record, "ranks")


def _runs_per_gpu(record: RunRecord) -> int:
    """Runs that trained on its GPU at the same time: all of them together are its speed."""
    return _count(record, "runs_per_gpu")


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


def makespan(seconds: Sequence[float], slots: int) -> float:
    """Seconds until a queue of runs is done on `slots` slots, started in order."""
    ends = [0.0] * max(1, slots)
    for duration in seconds:
        first = min(range(len(ends)), key=ends.__getitem__)
        ends[first] += duration
    return max(ends)
