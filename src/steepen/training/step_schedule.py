"""The step schedule: a frozen table of learning-rate factors, networks and core passes, one row per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steepen.model.arm import StageNetwork
from steepen.optim.config import ScheduleName
from steepen.recipe.flops import (
    Flops,
    compute_active_parameters,
    flops_per_token,
    head_parameters,
    stage_starts,
    stored_parameters,
)
from steepen.runs.record import Parameters
from steepen.runs.spec import RunSpec


@dataclass(frozen=True)
class StepSchedule:
    """Columns indexed by step."""

    lr_factor: npt.NDArray[np.float64]  # learning rate ÷ its peak
    passes: npt.NDArray[np.int64]  # core passes of this step
    eval_passes: npt.NDArray[np.int64]  # passes for validation after this step
    network: npt.NDArray[np.int64]  # which of `networks` takes this step
    networks: tuple[StageNetwork, ...]

    def __post_init__(self) -> None:
        for column in (self.lr_factor, self.passes, self.eval_passes, self.network):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.lr_factor)

    def _executed(self, stop: int | None = None) -> tuple[list[tuple[StageNetwork, int]], list[int]]:
        """The networks that take steps, with their passes, and the number of steps of each."""
        pairs, steps = np.unique(
            np.stack([self.network[:stop], self.passes[:stop]]), axis=1, return_counts=True
        )
        return [(self.networks[index], passes) for index, passes in pairs.T.tolist()], steps.tolist()

    def flops(self, batch_tokens: int, stop: int | None = None) -> Flops:
        """FLOPs of the first `stop` steps, by term, from the network and the passes each step runs."""
        total = Flops(0, 0, 0)
        for (network, passes), number in zip(*self._executed(stop), strict=True):
            total += flops_per_token(network.arm, network.shape, passes) * (number * batch_tokens)
        return total

    def cumulative_flops(self, batch_tokens: int) -> npt.NDArray[np.float64]:
        """FLOPs spent before each step, and after the last: (steps + 1,)."""
        pairs = list(zip(self.network.tolist(), self.passes.tolist(), strict=True))
        cost = {
            (index, passes): flops_per_token(
                self.networks[index].arm, self.networks[index].shape, passes
            ).total
            for index, passes in set(pairs)
        }
        return np.cumsum([0.0, *(cost[pair] * batch_tokens for pair in pairs)])

    def parameters(self) -> Parameters:
        """Parameter counts of the run by every convention."""
        first, last = self.networks[int(self.network[0])], self.networks[int(self.network[-1])]
        executed, steps = self._executed()
        active = [compute_active_parameters(one.arm, one.shape, passes) for one, passes in executed]
        stored, ends = stored_parameters(last.arm, last.shape, last.passes), head_parameters(last.shape)
        return Parameters(
            stored=stored,
            initial_stored=stored_parameters(first.arm, first.shape, first.passes),
            compute_active=compute_active_parameters(last.arm, last.shape, int(self.eval_passes[-1])),
            initial_compute_active=compute_active_parameters(first.arm, first.shape, first.passes),
            mean_compute_active=float(np.average(active, weights=steps)),
            embedding=ends,
            blocks=stored - 2 * ends,
        )


def learning_rate_factors(
    steps: int,
    warmup: int,
    warmdown_fraction: float,
    *,
    decay_to_zero: bool = True,
    rewarm_steps: int = 40,
    growth_steps: Sequence[int] = (),
    name: ScheduleName = "wsd",
) -> npt.NDArray[np.float64]:
    """Linear warm-up over `warmup` steps, constant, linear warm-down over the last fraction of steps.

    With `name` linear or cosine, the warm-down begins where the warm-up ends; a cosine is half a period.

    The first step has 1/warmup of the peak. The warm-down starts after the warm-up, falls from exactly 1 and
    reaches exactly 0 at the last step. Without `decay_to_zero` it may overlap with the warm-up, where the
    smaller factor counts, and the last step has 1/warmdown_steps. For `rewarm_steps` steps from each of
    `growth_steps` the factor is multiplied by (steps since growth)/rewarm_steps.
    """
    step = np.arange(steps, dtype=np.float64)
    up = (step + 1) / warmup if warmup else np.ones(steps)
    warmdown = round(warmdown_fraction * steps) if name == "wsd" else steps
    if decay_to_zero:
        start, last = max(warmup, steps - warmdown), steps - 1
        down = (last - step) / max(1, last - start) if start <= last else np.ones(steps)
    else:
        down = (steps - step) / warmdown if warmdown else np.ones(steps)
    if name == "cosine":
        down = (1 - np.cos(np.pi * np.clip(down, 0.0, 1.0))) / 2
    factors = np.minimum(1.0, np.minimum(up, down))
    for growth in growth_steps if rewarm_steps else ():
        factors[growth:] *= np.minimum(1.0, (step[growth:] - growth) / rewarm_steps)
    return factors


def build_schedule(spec: RunSpec) -> StepSchedule:
    """Build the schedule of a run; random pass counts are drawn here, per step, from the run's seed.

    Of a run that stops early, the schedule is the beginning of the longer one.
    """
    steps, hyper = spec.planned_steps, spec.hyperparameters
    starts = stage_starts(spec.schedule, steps)
    passes, evaluated = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    for index, stage in enumerate(spec.schedule.stages):
        rows = slice(starts[index], starts[index + 1] if index + 1 < len(starts) else steps)
        # Drawn for all steps: those of a step do not depend on where its stage begins.
        draws = np.random.default_rng([spec.seed, index, 0x5EED]).integers(len(stage.passes), size=steps)
        passes[rows] = np.asarray(stage.passes)[draws[rows]]
        evaluated[rows] = stage.median_passes
    networks = tuple(network for _, network in spec.networks)
    firsts = [start for start, _ in spec.networks]
    network = np.searchsorted(firsts, np.arange(steps), side="right") - 1
    grows = np.flatnonzero(np.diff(network)) + 1
    factors = learning_rate_factors(
        steps,
        hyper.warmup_steps,
        hyper.warmdown_fraction,
        decay_to_zero=spec.lr_schedule.decay_to_zero,
        rewarm_steps=spec.lr_schedule.rewarm_steps,
        name=spec.lr_schedule.name,
        growth_steps=grows.tolist(),
    )
    stop = spec.steps
    return StepSchedule(factors[:stop], passes[:stop], evaluated[:stop], network[:stop], networks)
