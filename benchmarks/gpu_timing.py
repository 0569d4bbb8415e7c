"""Timing of GPU work for the benchmarks: cold, hot and interleaved, or sustained, with power and clock."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from steepen.training.device import find_device, synchronize

DEVICE = find_device("auto")
ON_GPU = DEVICE.type == "cuda"
SAMPLE_SECONDS = 0.02  # of one sample: calls alternate after it, and a cold GPU stays cold during it
Call = Callable[[], object]


class PowerSampler:
    """Median power (W) and SM clock (MHz) inside a `with` block, by nvidia-smi every 200 ms; NaN on a CPU."""

    def __enter__(self) -> PowerSampler:
        command = [
            "nvidia-smi",
            "--query-gpu=power.draw,clocks.sm",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        self.watts = self.mhz = float("nan")
        self.process = None
        if DEVICE.type == "cuda":
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.terminate()
        lines = self.process.communicate()[0].splitlines()[2:]
        pairs = [[float(word) for word in line.split(",")] for line in lines if line.count(",") == 1]
        self.watts, self.mhz = (
            (statistics.median(p[i] for p in pairs) for i in (0, 1)) if pairs else (float("nan"),) * 2
        )


def time_calls(
    call: Callable[[], object], seconds: float, warm_up: float, calls_per_sample: int = 1
) -> float:
    """Median seconds per call over `seconds`, after `warm_up` seconds; each sample times several calls."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() < start + warm_up + seconds:
        synchronize(DEVICE)
        begin = time.perf_counter()
        for _ in range(calls_per_sample):
            call()
        synchronize(DEVICE)
        if time.perf_counter() > start + warm_up:
            times.append((time.perf_counter() - begin) / calls_per_sample)
    return statistics.median(times)


def timestamp() -> Any:
    """A recorded CUDA event, or the host's clock."""
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def mean_seconds(call: Call, times: int, before: Call | None = None) -> float:
    """Mean seconds of `times` consecutive calls; `before` runs before each and is not timed."""
    intervals: list[tuple[Any, Any]] = []
    for _ in range(times if before else 1):
        if before:
            before()
        begin = timestamp()
        for _ in range(1 if before else times):
            call()
        intervals.append((begin, timestamp()))
    synchronize(DEVICE)
    return sum(b.elapsed_time(e) / 1e3 if ON_GPU else e - b for b, e in intervals) / times


def calls_in(seconds: float, call: Call) -> int:
    """Number of calls that take `seconds`; the first call, which may compile, is not timed."""
    call()
    return max(1, round(seconds / mean_seconds(call, 3)))


def heat_up(seconds: float) -> None:
    """Keep the GPU busy with large GEMMs."""
    side = 8192 if ON_GPU else 64
    a, b, out = (torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, b, out=out)
        synchronize(DEVICE)


def time_cold(call: Call, idle: float) -> float:
    """Mean seconds per call in a short burst after `idle` seconds without work."""
    times = calls_in(SAMPLE_SECONDS, call)
    time.sleep(idle)
    call()  # the first call after a pause also raises the clock
    return mean_seconds(call, times)


def power(sampler: PowerSampler) -> dict[str, float | None]:
    """Sampled watts and MHz; None without samples."""
    sampled = {"W": sampler.watts, "MHz": sampler.mhz}
    return {name: None if math.isnan(value) else value for name, value in sampled.items()}


def time_interleaved(
    calls: dict[str, Call], seconds: float, warm_up: float, before: dict[str, Call] | None = None
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Median seconds of each call, interleaved on a hot GPU; also its watts and MHz.

    Interleaving exposes every call to the same drift of the clock. `before` runs before a call, untimed.
    """
    times = {name: calls_in(SAMPLE_SECONDS, call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    heat_up(warm_up)
    with PowerSampler() as sampler:
        for _ in range(max(3, round(seconds / SAMPLE_SECONDS))):
            for name, call in calls.items():
                samples[name].append(mean_seconds(call, times[name], (before or {}).get(name)))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return medians, power(sampler)
