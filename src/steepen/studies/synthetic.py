"""Run a study with losses from a formula instead of training: for tests, trials and dry runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from steepen.recipe.flops import (
    compute_active_parameters,
    flops_per_token,
    recipe_parameters,
    stored_parameters,
)
from steepen.runs.record import Parameters, RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.answer import Answer, Study
from steepen.studies.cells import lead

LossFunction = Callable[[RunSpec], float]
FLOPS_PER_SECOND = 1e10  # of the simulated runs


def initial_parameters(spec: RunSpec) -> int:
    """The parameters that tokens per parameter and the learning-rate rule count."""
    return recipe_parameters(spec.arm, spec.shape, spec.schedule.initial)


def tokens_per_parameter(spec: RunSpec) -> float:
    """Tokens per stored parameter that the run's compute would buy without growth."""
    cost = flops_per_token(spec.arm, spec.shape, spec.schedule.initial).total
    return expected_flops(spec) / (cost * initial_parameters(spec))


def growth_fraction_of(spec: RunSpec) -> float:
    """ρ, the fraction of tokens after growth; zero if nothing grows."""
    stages = spec.schedule.stages
    return 1.0 - (stages[1].start or 0.0) if len(stages) > 1 else 0.0


def fabricate_record(spec: RunSpec, loss: float) -> RunRecord:
    """A record as training would write it, with a given loss."""
    flops, stored = expected_flops(spec), stored_parameters(spec.arm, spec.shape, spec.schedule.initial)
    active = compute_active_parameters(spec.arm, spec.shape, spec.schedule.final)
    return RunRecord(
        spec=spec, run=spec.hash, validation_loss=loss, validation_bits_per_byte=None,
        validation_identity="synthetic", validation_scores=(), train_loss=loss,
        tokens=spec.tokens, flops=flops, flops_by_term={"total": flops},
        parameters=Parameters(stored, stored, active, active, float(active), 0, stored),
        seconds_training=flops / FLOPS_PER_SECOND, seconds_total=flops / FLOPS_PER_SECOND + 1,
        tokens_per_second=spec.tokens * FLOPS_PER_SECOND / flops, mfu=None, peak_memory_bytes=None,
        hardware={"device": "none", "host": "synthetic"}, versions={}, git=None, finished="",
    )  # fmt: skip


def simulated_record(spec: RunSpec, side: int) -> RunRecord:
    """A simulated record for dry runs. Its loss has an optimum inside every sweep, shifted up or down.

    `side` is +1 or −1. Runs that a study requests with both are certain; the others depend on results.
    """
    h, power = spec.hyperparameters, 0.3 - 0.2 * side
    offsets = [
        math.log((value + 0.001) / centre) - side * math.log(1.9)
        for value, centre in (
            (h.learning_rate * initial_parameters(spec) ** power, 0.08 * 1e5**power),
            (tokens_per_parameter(spec), 6.0),
            (h.embedding_lr_multiplier, 0.4),
            (h.head_lr_multiplier, 0.4),
            (h.weight_decay, 0.2),
            (h.warmdown_fraction, 0.5),
            (h.injection_weight, 0.3),
        )
    ]
    offsets.append(2 * (growth_fraction_of(spec) - 0.35 - 0.15 * side))
    flops = expected_flops(spec)
    return fabricate_record(spec, 2.0 + 5.0 * flops**-0.05 + 0.01 * sum(value**2 for value in offsets))


SIMULATED_RECORDS = (partial(simulated_record, side=1), partial(simulated_record, side=-1))


@dataclass
class Formula:
    """Drives a study with losses from a formula; a NaN loss is a run that diverged."""

    loss: LossFunction
    batches: list[list[RunSpec]] = field(default_factory=list[list[RunSpec]])

    def answer(self, study: Study) -> Answer:
        """Drive a study to its answer."""

        def records(specs: Sequence[RunSpec]) -> list[RunRecord | None]:
            self.batches.append(list(specs))
            return [self._record(spec) for spec in specs]

        return lead(study, records)

    def _record(self, spec: RunSpec) -> RunRecord | None:
        loss = self.loss(spec)
        return None if math.isnan(loss) else fabricate_record(spec, loss)

    @property
    def specs(self) -> list[RunSpec]:
        """Every run requested, in order."""
        return [spec for batch in self.batches for spec in batch]
