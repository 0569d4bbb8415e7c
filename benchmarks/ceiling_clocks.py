"""How `ceilings.py` takes the time of calls: on a cold GPU, and in turns on a hot one."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from ceiling_gemms import normal
from throughput import DEVICE, Sampler

from steepen.training.device import synchronise

ON_GPU = DEVICE.type == "cuda"
TURN = 0.02  # seconds of one call's turn among others, and of a burst: a cold GPU is to stay cold
Call = Callable[[], object]


def stamp() -> Any:
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timed(call: Call, times: int, before: Call | None = None) -> float:
    """Mean seconds of so many calls in a row; `before` is done before each and not counted."""
    looks: list[tuple[Any, Any]] = []
    for _ in range(times if before else 1):
        if before:
            before()
        begin = stamp()
        for _ in range(1 if before else times):
            call()
        looks.append((begin, stamp()))
    synchronise(DEVICE)
    return sum(b.elapsed_time(e) / 1e3 if ON_GPU else e - b for b, e in looks) / times


def calls_in(seconds: float, call: Call) -> int:
    """How many calls take so long; the first of all is not counted: it compiles, or chooses an algorithm."""
    call()
    return max(1, round(seconds / timed(call, 3)))


def load(seconds: float) -> None:
    """Keep the GPU busy with large products."""
    side = 8192 if ON_GPU else 64
    a, b, out = normal(side, side), normal(side, side), normal(side, side)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, b, out=out)
        synchronise(DEVICE)


def cold(call: Call, idle: float) -> float:
    """Seconds of a call in a burst after idling."""
    times = calls_in(TURN, call)
    time.sleep(idle)
    call()  # the first after a pause also wakes the GPU
    return timed(call, times)


def power(sampler: Sampler) -> dict[str, float | None]:
    """What was sampled; None where there was nothing to, or no time."""
    found = {"W": sampler.watts, "MHz": sampler.mhz}
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def hot(
    calls: dict[str, Call], seconds: float, warm_up: float, before: dict[str, Call] | None = None
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Median seconds of each call, in turns on a loaded GPU; and its watts and MHz meanwhile."""
    times = {name: calls_in(TURN, call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    load(warm_up)
    with Sampler() as sampler:
        for _ in range(max(3, round(seconds / TURN))):
            for name, call in calls.items():
                found[name].append(timed(call, times[name], (before or {}).get(name)))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians, power(sampler)
