"""Outcomes of examples, scores of tasks, and their averages over the suite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steepen.evaluation.core.bundle import Kind, Task
from steepen.evaluation.core.prompt_encoding import Example
from steepen.evaluation.core.suite import CORE17, CORE22


@dataclass(frozen=True)
class Outcome:
    """One example: whether it is correct, and the mean loss per token of every candidate."""

    index: int  # in the task's shuffled order
    line: int  # in the task's file
    correct: bool
    nll: float | None  # of the right answer; None if it has no token of its own (convention nanochat)
    chosen: int | None = None  # None for language modelling
    gold: int | None = None
    losses: tuple[float | None, ...] = ()
    bits_per_byte: float | None = None  # of the right answer; None where only a part of it is scored


def make_outcome(
    kind: Kind, example: Example, means: Sequence[float], exact: bool, nll: float | None, bits: float | None
) -> Outcome:
    """The outcome of an example from the mean losses of its candidates, or, for language modelling, `exact`.

    `nll` is the mean loss of the whole right answer, and `bits` that per byte; None takes the loss of the
    right candidate. The candidate with the lowest loss is chosen, the first on ties. A candidate that is a
    prefix of another has no token of its own and NaN loss; as in both conventions, it is chosen if and only
    if it comes first, since comparisons with NaN are false.
    """
    index, line, gold = example.index, example.line, example.gold
    if kind == "language_modeling":
        return Outcome(index, line, exact, means[0], bits_per_byte=bits)
    chosen = 0
    for candidate, value in enumerate(means):
        if value < means[chosen]:
            chosen = candidate
    losses = tuple(None if math.isnan(value) else value for value in means)
    nll = losses[gold] if nll is None else nll
    return Outcome(index, line, chosen == gold, nll, chosen, gold, losses, bits)


@dataclass(frozen=True)
class SeedScore:
    """A task's scores with one seed of the demonstrations."""

    seed: int
    accuracy: float
    nll: float
    bits_per_byte: float | None = None

    @staticmethod
    def of(seed: int, examples: Sequence[Outcome]) -> SeedScore:
        """The scores from the outcomes of all examples."""
        losses = [example.nll for example in examples if example.nll is not None]
        accuracy = sum(example.correct for example in examples) / len(examples)
        bits = _mean_known(example.bits_per_byte for example in examples)
        return SeedScore(seed, accuracy, math.fsum(losses) / max(1, len(losses)), bits)


def _mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class TaskScore:
    """A task's scores, averaged over seeds."""

    label: str
    kind: str
    shots: int
    examples: int
    baseline: float
    accuracy: float
    centered: float
    nll: float  # answer NLL: nats per token of the right answer, averaged over examples
    seeds: tuple[SeedScore, ...]
    bits_per_byte: float | None = None  # of the right answer, averaged over examples

    @staticmethod
    def of(task: Task, outcomes: dict[int, Sequence[Outcome]]) -> TaskScore:
        """The score of a task from its examples' outcomes by seed."""
        seeds = tuple(SeedScore.of(seed, examples) for seed, examples in outcomes.items())
        accuracy = statistics.fmean(seed.accuracy for seed in seeds)
        return TaskScore(
            task.label,
            task.kind,
            task.shots,
            len(next(iter(outcomes.values()))),
            task.baseline,
            accuracy,
            task.centered(accuracy),
            statistics.fmean(seed.nll for seed in seeds),
            seeds,
            _mean_known(seed.bits_per_byte for seed in seeds),
        )

    def centered_at(self, seed: int) -> float:
        """Centred accuracy with one seed; a zero-shot task has the same with every seed."""
        found = next((score for score in self.seeds if score.seed == seed), self.seeds[0])
        return (found.accuracy - self.baseline) / (1 - self.baseline)


@dataclass(frozen=True)
class SuiteScores:
    """Scores of all tasks and their averages; an average is None if one of its tasks is missing."""

    tasks: tuple[TaskScore, ...]
    seeds: tuple[int, ...]
    convention: str

    def mean(self, labels: Sequence[str], field: str = "centered") -> float | None:
        """Unweighted mean of a field over tasks."""
        by_label = {task.label: task for task in self.tasks}
        if any(label not in by_label for label in labels) or not labels:
            return None
        values = [getattr(by_label[label], field) for label in labels]
        return None if None in values else statistics.fmean(values)

    def by_seed(self, labels: Sequence[str]) -> list[float] | None:
        """Mean centred accuracy for each seed separately; its spread shows the effect of demonstrations."""
        by_label = {task.label: task for task in self.tasks}
        if any(label not in by_label for label in labels):
            return None
        return [
            statistics.fmean(by_label[label].centered_at(seed) for label in labels) for seed in self.seeds
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as in scores.json and in a run's record."""

        def deviation(by_seed: Sequence[float] | None) -> float | None:
            # As the authors compute it, dividing by n.
            return statistics.pstdev(by_seed) if by_seed and len(by_seed) > 1 else None

        labels = [task.label for task in self.tasks]
        by_seed = self.by_seed(CORE22)
        return {
            "convention": self.convention,
            "core22": self.mean(CORE22),  # CORE: mean centred accuracy of the 22 tasks
            "core22_by_seed": by_seed,
            "core22_seed_sd": deviation(by_seed),
            "core17": self.mean(CORE17),
            "core17_seed_sd": deviation(self.by_seed(CORE17)),
            "nll22": self.mean(CORE22, "nll"),
            "bits_per_byte22": self.mean(CORE22, "bits_per_byte"),
            "mean_centered": self.mean(labels),  # over the evaluated tasks
            "mean_nll": self.mean(labels, "nll"),
            "seeds": list(self.seeds),
            "tasks": {
                task.label: {k: v for k, v in asdict(task).items() if k != "label"} for task in self.tasks
            },
        }


def count_examples(core: Mapping[str, Any]) -> int:
    """Examples of all tasks; 0 for published scores, which do not say."""
    return sum(task.get("examples") or 0 for task in core["tasks"].values())


def may_replace(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a CORE result may replace an older one: it has no fewer tasks, seeds or examples.

    For one bundle and convention, the old tasks and seeds must be included; else only their numbers are
    compared.
    """
    if new["bundle"] == old.get("bundle") and new.get("convention") == old.get("convention"):
        limits = [math.inf if core.get("examples") is None else core["examples"] for core in (old, new)]
        same = all(set(old.get(name) or ()) <= set(new[name]) for name in ("tasks", "seeds"))
        return limits[0] <= limits[1] and same
    sizes = [(len(core["tasks"]), len(core.get("seeds") or ()), count_examples(core)) for core in (old, new)]
    return all(before <= now for before, now in zip(*sizes, strict=True))
