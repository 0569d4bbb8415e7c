"""What an example, a task and the suite gave, and how the last follows from the first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steepen.evaluation.core.bundle import Kind, Task
from steepen.evaluation.core.suite import CORE17, CORE22


@dataclass(frozen=True)
class Outcome:
    """One example: right or not, and the mean loss per token of the right answer and of every candidate."""

    index: int  # place in the task's shuffled order
    line: int  # in the task's file
    correct: bool
    nll: float | None  # None where the right answer has no token of its own
    chosen: int | None = None  # None for language modelling, where nothing is chosen
    gold: int | None = None
    losses: tuple[float | None, ...] = ()


def judge(kind: Kind, index: int, line: int, gold: int, means: Sequence[float], exact: bool) -> Outcome:
    """An example's outcome from its candidates' mean losses and, for language modelling, exactness.

    The lowest loss is chosen, the first of equals. A candidate that is a beginning of another has no token of
    its own and no loss; as in the suite's reference code it neither beats an earlier candidate nor, where it
    comes first, is beaten.
    """
    if kind == "language_modeling":
        return Outcome(index, line, exact, means[0])
    chosen = 0
    for place, value in enumerate(means):
        if value < means[chosen]:
            chosen = place
    plain = tuple(None if math.isnan(value) else value for value in means)
    return Outcome(index, line, chosen == gold, plain[gold], chosen, gold, plain)


@dataclass(frozen=True)
class SeedScore:
    """A task's scores with one draw of demonstrations."""

    seed: int
    accuracy: float
    nll: float


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

    @staticmethod
    def of(task: Task, outcomes: dict[int, Sequence[Outcome]]) -> TaskScore:
        """The score of a task from its examples' outcomes by seed."""
        seeds: list[SeedScore] = []
        for seed, examples in outcomes.items():
            losses = [example.nll for example in examples if example.nll is not None]
            accuracy = sum(example.correct for example in examples) / len(examples)
            seeds.append(SeedScore(seed, accuracy, math.fsum(losses) / max(1, len(losses))))
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
            tuple(seeds),
        )

    def centered_at(self, seed: int) -> float:
        """Centred accuracy with one seed; a zero-shot task has the same with every seed."""
        found = next((score for score in self.seeds if score.seed == seed), self.seeds[0])
        return (found.accuracy - self.baseline) / (1 - self.baseline)


@dataclass(frozen=True)
class SuiteScores:
    """Every task's score and the averages over them; an average is None where one of its tasks is missing."""

    tasks: tuple[TaskScore, ...]
    seeds: tuple[int, ...]

    def mean(self, labels: Sequence[str], field: str = "centered") -> float | None:
        """Plain average of a field over tasks."""
        by_label = {task.label: task for task in self.tasks}
        if any(label not in by_label for label in labels) or not labels:
            return None
        return statistics.fmean(getattr(by_label[label], field) for label in labels)

    @property
    def core22(self) -> float | None:
        """CORE: mean centred accuracy of the 22 tasks."""
        return self.mean(CORE22)

    @property
    def core17(self) -> float | None:
        """The same over the paper's frozen 17-task subset."""
        return self.mean(CORE17)

    @property
    def nll22(self) -> float | None:
        """CORE NLL: answer NLL averaged over the 22 tasks."""
        return self.mean(CORE22, "nll")

    def core22_by_seed(self) -> list[float] | None:
        """CORE with each seed's demonstrations alone: its scatter is what demonstrations matter."""
        by_label = {task.label: task for task in self.tasks}
        if any(label not in by_label for label in CORE22):
            return None
        return [
            statistics.fmean(by_label[label].centered_at(seed) for label in CORE22) for seed in self.seeds
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in scores.json and in a run's record."""
        labels = [task.label for task in self.tasks]
        by_seed = self.core22_by_seed()
        return {
            "core22": self.core22,
            "core22_by_seed": by_seed,
            "core22_seed_sd": statistics.stdev(by_seed) if by_seed and len(by_seed) > 1 else None,
            "core17": self.core17,
            "nll22": self.nll22,
            "mean_centered": self.mean(labels),  # over the tasks evaluated, whichever they are
            "mean_nll": self.mean(labels, "nll"),
            "seeds": list(self.seeds),
            "tasks": {
                task.label: {k: v for k, v in asdict(task).items() if k != "label"} for task in self.tasks
            },
        }


def covers(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a CORE result may stand where an older one stood: it has no fewer tasks, seeds or examples.

    Of one bundle, the very tasks and seeds must be there. Of two bundles only their numbers can be compared.
    """
    if new["bundle"] == old["bundle"]:
        most = [math.inf if core["examples"] is None else core["examples"] for core in (old, new)]
        return most[0] <= most[1] and all(set(old[name]) <= set(new[name]) for name in ("tasks", "seeds"))
    sizes = [
        (len(core["tasks"]), len(core["seeds"]), sum(task["examples"] for task in core["tasks"].values()))
        for core in (old, new)
    ]
    return all(before <= now for before, now in zip(*sizes, strict=True))
