"""Is a rung mistuned? Found from losses, rates, gradient norms and residual streams that runs have written.

Loss curves of a well-tuned ladder collapse when scaled (arXiv 2507.02119): a number that is read off
them changes smoothly with compute. Four numbers of a run are compared with those of its ladder's other
rungs, and with other ladders of the study where there are any: its final loss, how far the loss still fell
after its first twentieth, the early gradient norm over the late one, and the size of the final residual
stream. Too low a rate leaves loss and fall high and the stream small; too high a rate leaves a small
fall, large early gradients and a large stream. `tuned_ladder` tells such errors from what tuned ladders have
too; `find_mistuned` decides; status, page and verdicts show what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory, read_metrics
from steepen.studies.tuned_ladder import BOTH, MIN_RUNGS, Numbers, off_the_curve
from steepen.utils.arrays import Array

Kind = Literal["rate", "drift", "spike", "decay", "edge"]

MIN_STEPS = 20
MIN_SPAN = 2.0  # of a ladder's compute: sizes at one compute have a best one, not a smooth curve
MIN_STREAM_STEPS = 64  # in fewer the stream explodes at the best rate (45 steps of `tiny` d2)
LARGE_STREAM = 1.5  # log of its size, above which it explodes with the rate and counts by its logarithm
SPIKE, SPIKE_SCATTER = 0.1, 8.0  # of log loss over its running median, and in deviations of it
UNFINISHED = 0.2  # of the peak rate at the last step


@dataclass(frozen=True)
class RunTrace:
    """What is looked at of a finished run."""

    run: str
    ladder: str
    arm: str
    depth: int
    seed: int
    flops: float
    steps: int
    rate: float  # its learning rate
    setting: str  # what else was chosen: runs of one setting differ in rate alone
    loss: float  # log of the validation loss
    fall: float  # log of the loss from a twentieth to a fifth of the run, over the validation loss
    gradient: float  # log of the gradient norm in the first fifth, over that of the last third
    stream: float  # log of the root mean square of the final residual stream; NaN where it is not known
    last_rate: float  # of its peak; 0 where the schedule has no decay that could be unfinished
    spike: tuple[int, float] | None  # step and log loss above its running median

    @property
    def numbers(self) -> Numbers:
        """What is compared from rung to rung."""
        stream = self.stream
        if stream > LARGE_STREAM:
            stream = LARGE_STREAM * (1 + math.log(stream / LARGE_STREAM))
        return self.loss, self.fall, self.gradient, stream


@dataclass(frozen=True)
class Mistuning:
    """A run that looks mistuned, or a ladder whose rate drifts (`depth` is its top), and how to check."""

    kind: Kind
    ladder: str
    arm: str
    depth: int
    run: str
    factor: float | None  # of the rate that would check it: √2 or 1/√2; None: either may be it
    p_value: float | None = None

    @property
    def reason(self) -> str:
        """What was seen."""
        rate = "wrong" if self.factor is None else "too low" if self.factor > 1 else "too high"
        p = "" if self.p_value is None else f" (p = {self.p_value:.1g})"
        return {
            "rate": f"{self._rung} is off the curve of its ladder, as with a rate that is {rate}{p}",
            "drift": f"the rate of {self.ladder} drifts along its ladder: {rate} at the top{p}",
            "spike": f"the loss of {self._rung} has a spike, as with a rate that is {rate}",
            "decay": f"the rate of {self._rung} had not fallen when the run ended",
            "edge": f"the best rate of {self._rung} is at the edge of its sweep",
        }[self.kind]

    @property
    def rates(self) -> tuple[float, ...]:
        """The multiples of its rate that would check it; none where its decay has to end first."""
        if self.kind == "decay":
            return ()
        return BOTH if self.factor is None else (self.factor,)

    @property
    def check(self) -> str:
        """The run that would check it."""
        if not self.rates:
            return f"check: {self.arm} d{self.depth} to the end of its warm-down"
        sign = " and ".join("×" if rate > 1 else "÷" for rate in self.rates)
        return f"check: {self.arm} d{self.depth} at its rate {sign} √2"

    @property
    def sentence(self) -> str:
        """Reason and check."""
        return f"{self.reason}; {self.check}."

    @property
    def _rung(self) -> str:
        return f"{self.ladder} d{self.depth}"


def read_trace(run: RunDirectory, record: RunRecord, ladder: str = "") -> RunTrace | None:
    """The trace of a finished run; None where its metrics are missing or too short."""
    lines = [
        line for line in read_metrics(run.metrics_file) if {"loss", "lr", "gradient_norm"} <= line.keys()
    ]
    if len(lines) < MIN_STEPS:
        return None
    loss, rate, gradient = (
        np.array([line[name] for line in lines], float) for name in ("loss", "lr", "gradient_norm")
    )
    if not (np.all(loss > 0) and np.all(gradient > 0) and rate.max() > 0):
        return None
    spec = record.spec
    at = np.array([line["step"] for line in lines]) / spec.steps
    final, log_loss, norms = math.log(record.validation_loss), np.log(loss), np.log(gradient)
    parts = [(at > low) & (at <= high) for low, high in ((0.05, 0.2), (0.7, 1.0))]
    if not all(part.any() for part in parts):
        return None
    streams = list[float]()
    if record.validation_scores and spec.steps >= MIN_STREAM_STEPS:
        streams = [*record.validation_scores[-1].residual_rms.values()]
    decays = spec.lr_schedule.name != "wsd" or spec.hyperparameters.warmdown_fraction > 0
    return RunTrace(
        run=record.run, ladder=ladder or spec.arm.name, arm=spec.arm.name, depth=spec.shape.depth,
        seed=spec.seed, flops=record.flops, steps=spec.steps, rate=spec.hyperparameters.learning_rate,
        setting=f"{spec.arm.name} {spec.shape.depth} {spec.steps} {spec.seed} {spec.schedule}",
        loss=final, fall=float(log_loss[parts[0]].mean()) - final,
        gradient=float(np.median(norms[parts[0]]) - np.median(norms[parts[1]])),
        stream=math.log(streams[-1]) if streams and streams[-1] > 0 else math.nan,
        last_rate=float(rate[-1] / rate.max()) if decays else 0.0, spike=find_spike(log_loss, at),
    )  # fmt: skip


def mistuned_runs(runs_directory: Path, records: Iterable[RunRecord]) -> tuple[Mistuning, ...]:
    """What looks mistuned among the finished runs of a study."""
    traces = [read_trace(RunDirectory(runs_directory / record.run), record) for record in records]
    return find_mistuned(trace for trace in traces if trace is not None)


def find_spike(log_loss: Array, at: Array) -> tuple[int, float] | None:
    """The largest rise of three steps over the running median after the first tenth, if it is a spike."""
    width = max(25, len(log_loss) // 10) | 1
    if len(log_loss) < 2 * width:
        return None
    around = np.lib.stride_tricks.sliding_window_view(np.pad(log_loss, width // 2, mode="edge"), width)
    above = log_loss - np.median(around, axis=1)
    # One batch of harder text is no spike; three in a row are.
    above = np.minimum(np.minimum(above, np.roll(above, 1)), np.roll(above, -1))
    scatter = 1.4826 * float(np.median(np.abs(above - np.median(above))))
    above = np.where(at > 0.1, above, -np.inf)
    worst = int(np.argmax(above))
    if above[worst] > max(SPIKE, SPIKE_SCATTER * scatter):
        return worst, float(above[worst])
    return None


def find_mistuned(traces: Iterable[RunTrace]) -> tuple[Mistuning, ...]:
    """What looks mistuned among the finished runs of a study, ladder by ladder, the surest first in each."""
    every = list(traces)
    swept = _edges(every)
    in_sweeps = {trace.setting for trace in every if _rates(every, trace.setting) > 1}
    ladders: dict[str, list[RunTrace]] = {}
    for trace in every:
        if trace.setting not in in_sweeps:
            ladders.setdefault(trace.ladder, []).append(trace)
    rungs = {name: _rungs(own) for name, own in ladders.items()}
    found: list[Mistuning] = [*swept]
    for name, own in ladders.items():
        seen = [*_single(own)]
        marked = {one.depth for one in seen}
        x, numbers, tops = rungs[name]
        # Several runs of a depth and seed are a sweep, whose runs differ for other reasons.
        alone = len({(trace.depth, trace.seed) for trace in own}) == len(own)
        if len(x) >= MIN_RUNGS and alone and x[-1] - x[0] >= math.log(MIN_SPAN):
            others = [(rungs[other][0], rungs[other][1]) for other in rungs if other != name]
            steps = np.array([top.steps for top in tops])
            for one in off_the_curve(x, numbers, steps, _alike(x, others)):
                place = -1 if one.rung is None else one.rung
                kind: Kind = "drift" if one.rung is None else "rate"
                if kind == "drift" or tops[place].depth not in marked:
                    top = tops[place]
                    seen.append(Mistuning(kind, name, top.arm, top.depth, top.run, one.factor, one.p_value))
        found += seen
    return tuple(found)


def _rates(traces: Sequence[RunTrace], setting: str) -> int:
    return len({trace.rate for trace in traces if trace.setting == setting})


def _edges(traces: Sequence[RunTrace]) -> list[Mistuning]:
    """Sweeps of the rate alone, of three values or more, whose best is the smallest or largest."""
    groups: dict[str, list[RunTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.setting, []).append(trace)
    found: list[Mistuning] = []
    for own in groups.values():
        own.sort(key=lambda trace: trace.rate)
        best = min(own, key=lambda trace: trace.loss)
        if len({trace.rate for trace in own}) >= 3 and best.rate in (own[0].rate, own[-1].rate):
            factor = math.sqrt(2) if best.rate == own[-1].rate else math.sqrt(0.5)
            found.append(Mistuning("edge", best.ladder, best.arm, best.depth, best.run, factor))
    return found


def _single(traces: Sequence[RunTrace]) -> list[Mistuning]:
    """What one run shows by itself."""
    found: list[Mistuning] = []
    for one in traces:
        kinds: list[tuple[Kind, bool]] = [
            ("spike", one.spike is not None),
            ("decay", one.last_rate > UNFINISHED),
        ]
        found += [
            Mistuning(kind, one.ladder, one.arm, one.depth, one.run, math.sqrt(0.5))
            for kind, seen in kinds
            if seen
        ]
    return found


Rungs = tuple[Array, Array, list[RunTrace]]  # log compute (n), numbers (n, 4), a run of each


def _rungs(traces: Sequence[RunTrace]) -> Rungs:
    """The rungs of a ladder in order of compute, each the mean over its seeds."""
    depths: dict[int, list[RunTrace]] = {}
    for trace in traces:
        depths.setdefault(trace.depth, []).append(trace)
    own = sorted(depths.values(), key=lambda seeds: seeds[0].flops)
    x = np.array([math.log(seeds[0].flops) for seeds in own])
    numbers = np.array([np.mean([trace.numbers for trace in seeds], axis=0) for seeds in own])
    return x, numbers.reshape(len(own), 4), [seeds[0] for seeds in own]


def _alike(x: Array, others: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Ladders that span most of this one's compute."""
    span = float(np.ptp(x))
    return [
        (at, numbers)
        for at, numbers in others
        if len(at) >= MIN_RUNGS and min(x[-1], at[-1]) - max(x[0], at[0]) >= 0.75 * span
    ]
