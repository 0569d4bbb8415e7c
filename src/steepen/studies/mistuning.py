"""Is a rung mistuned? Found from the losses, rates and gradient norms that its run has written.

Loss curves of a well-tuned ladder collapse when scaled (arXiv 2507.02119): a number that is read off
them changes smoothly with compute. Three numbers of a run are compared with those of its ladder's other
rungs, and with other ladders of the study where there are any: its final loss, how far the loss still fell
after its first tenth, and the early gradient norm over the late one. Too low a rate leaves loss and fall
high, too high a rate raises the early gradients. `find_mistuned` decides; status, page and verdicts show what
it finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy import stats

from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory, read_metrics
from steepen.utils.arrays import Array

Scatter = tuple[float, float, float]
Kind = Literal["rate", "drift", "spike", "decay", "edge"]

LEVEL = 0.05  # of a false alarm among the rungs of a ladder
MIN_RUNGS, MIN_STEPS = 4, 20
# Standard deviations of log loss, fall and log gradient ratio of a well-tuned rung about the line through the
# others, and about that line beside other ladders, whose trends bend alike; how many degrees of freedom they
# count for (benchmarks/mistuned_ladders.py; docs/log.md).
ALONE, BESIDE, PRIOR_FREEDOM = (0.006, 0.012, 0.08), (0.005, 0.010, 0.08), 3
# What a rate that is too low, one that is too high, and one that is either do to the three, in deviations.
DIRECTIONS = ((1.0, 1.0, 0.0), (0.5, -0.5, 1.0), (1.0, 0.0, 0.0))
BOTH = (math.sqrt(2), math.sqrt(0.5))
FACTORS = (*BOTH, None)  # of the rate that would check it
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
    rate: float  # its learning rate
    setting: str  # what else was chosen: runs of one setting differ in rate alone
    loss: float  # log of the validation loss
    fall: float  # log of the loss from a tenth to four tenths of the run, over the validation loss
    gradient: float  # log of the gradient norm in the first fifth, over that of the last third
    last_rate: float  # of its peak
    spike: tuple[int, float] | None  # step and log loss above its running median

    @property
    def numbers(self) -> tuple[float, float, float]:
        """What is compared from rung to rung."""
        return self.loss, self.fall, self.gradient


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
    parts = [(at > low) & (at <= high) for low, high in ((0.1, 0.4), (0.05, 0.2), (0.7, 1.0))]
    if not all(part.any() for part in parts):
        return None
    return RunTrace(
        run=record.run, ladder=ladder or spec.arm.name, arm=spec.arm.name, depth=spec.shape.depth,
        seed=spec.seed, flops=record.flops, rate=spec.hyperparameters.learning_rate,
        setting=f"{spec.arm.name} {spec.shape.depth} {spec.steps} {spec.seed} {spec.schedule}",
        loss=final, fall=float(log_loss[parts[0]].mean()) - final,
        gradient=float(np.median(norms[parts[1]]) - np.median(norms[parts[2]])),
        last_rate=float(rate[-1] / rate.max()), spike=find_spike(log_loss, at),
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
        if len(x) >= MIN_RUNGS and alone:
            others = [(rungs[other][0], rungs[other][1]) for other in rungs if other != name]
            left = numbers - _expected(x, others) if (others := _alike(x, others)) else numbers
            rates = [
                Mistuning("rate", name, own[0].arm, tops[i].depth, tops[i].run, factor, p)
                for i, factor, p in _off_the_curve(x, left, BESIDE if others else ALONE)
            ]
            seen += [one for one in rates if one.depth not in marked]
            if others and not rates and (drift := _drift(x, left)) is not None:
                top = tops[-1]
                seen.append(Mistuning("drift", name, top.arm, top.depth, top.run, *drift))
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


Rungs = tuple[Array, Array, list[RunTrace]]  # log compute (n), numbers (n, 3), a run of each


def _rungs(traces: Sequence[RunTrace]) -> Rungs:
    """The rungs of a ladder in order of compute, each the mean over its seeds."""
    depths: dict[int, list[RunTrace]] = {}
    for trace in traces:
        depths.setdefault(trace.depth, []).append(trace)
    own = sorted(depths.values(), key=lambda seeds: seeds[0].flops)
    x = np.array([math.log(seeds[0].flops) for seeds in own])
    numbers = np.array([np.mean([trace.numbers for trace in seeds], axis=0) for seeds in own])
    return x, numbers.reshape(len(own), 3), [seeds[0] for seeds in own]


def _alike(x: Array, others: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Ladders that span most of this one's compute."""
    span = float(np.ptp(x))
    return [
        (at, numbers)
        for at, numbers in others
        if len(at) >= MIN_RUNGS and min(x[-1], at[-1]) - max(x[0], at[0]) >= 0.75 * span
    ]


def _expected(x: Array, others: Sequence[tuple[Array, Array]]) -> Array:
    """The median over other ladders at the compute of this one's rungs; the ends go on straight."""
    found: list[Array] = []
    for at, numbers in others:
        columns = [np.interp(x, at, column) for column in numbers.T]
        for column, values in zip(columns, numbers.T, strict=True):
            for outside, (i, j) in ((x < at[0], (0, 1)), (x > at[-1], (-1, -2))):
                slope = (values[i] - values[j]) / (at[i] - at[j])
                column[outside] = values[i] + slope * (x[outside] - at[i])
        found.append(np.stack(columns, axis=1))
    return np.median(found, axis=0)


def _off_the_curve(x: Array, numbers: Array, scatter: Scatter) -> list[tuple[int, float | None, float]]:
    """Rungs off the line through the others, most significant first, each with the factor that checks it."""
    found: list[tuple[int, float | None, float]] = []
    rungs = np.arange(len(x))
    while len(rungs) >= MIN_RUNGS:
        tests = len(DIRECTIONS) * len(rungs)
        p, i, k = min(_tests(x[rungs], numbers[rungs], scatter))
        if p * tests > LEVEL:
            break
        found.append((int(rungs[i]), FACTORS[k], p * tests))
        rungs = np.delete(rungs, i)
    return found


def _tests(x: Array, numbers: Array, scatter: Scatter) -> list[tuple[float, int, int]]:
    """One-sided p of every rung and direction: its distance from the line through the other rungs."""
    found: list[tuple[float, int, int]] = []
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        miss, spread, freedom = _predict(x[rest], numbers[rest], x[i], numbers[i], scatter)
        for k, direction in enumerate(DIRECTIONS):
            weights = np.array(direction)
            score = float(weights @ (miss / spread)) / float(np.linalg.norm(weights))
            found.append((float(stats.t.sf(score, freedom)), i, k))
    return found


def _predict(
    x: Array, numbers: Array, at: float, value: Array, scatter: Scatter
) -> tuple[Array, Array, float]:
    """How far values are from the line through others, the deviation of that, and its degrees of freedom."""
    design = np.stack([np.ones_like(x), x - x.mean()], axis=1)
    line, *_ = np.linalg.lstsq(design, numbers, rcond=None)
    spare = len(x) - 2
    residual = ((numbers - design @ line) ** 2).sum(axis=0)
    variance = (PRIOR_FREEDOM * np.array(scatter) ** 2 + residual) / (PRIOR_FREEDOM + spare)
    row = np.array([1.0, at - x.mean()])
    leverage = float(row @ np.linalg.inv(design.T @ design) @ row)
    return value - row @ line, np.sqrt(variance * (1 + leverage)), PRIOR_FREEDOM + spare


def _drift(x: Array, numbers: Array) -> tuple[float, float] | None:
    """The factor that checks the top, and p, where the difference from other ladders changes with compute."""
    design = np.stack([np.ones_like(x), x - x.mean()], axis=1)
    weights = np.array([0.0, -1.0, 1.0]) / math.sqrt(2)
    index = numbers / np.array(BESIDE) @ weights
    line, *_ = np.linalg.lstsq(design, index, rcond=None)
    spare = len(x) - 2
    residual = float(((index - design @ line) ** 2).sum())
    # Both ladders are uncertain, hence twice.
    variance = (2 * PRIOR_FREEDOM + residual) / (PRIOR_FREEDOM + spare) / float(((x - x.mean()) ** 2).sum())
    p = float(2 * stats.t.sf(abs(line[1]) / math.sqrt(variance), PRIOR_FREEDOM + spare))
    return (math.sqrt(0.5) if line[1] > 0 else math.sqrt(2), p) if p <= LEVEL else None
