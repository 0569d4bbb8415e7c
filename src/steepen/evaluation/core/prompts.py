"""Order of a task's examples and random choice of few-shot demonstrations, by a seed."""

from __future__ import annotations

import random

from steepen.evaluation.core.bundle import Item, Task

ORDER_SEED = 1337  # shuffles the examples of every task, in both conventions
DEMONSTRATION_SEPARATOR = "\n\n"  # after each demonstration


def shuffled(task: Task) -> tuple[Item, ...]:
    """The task's items in a fixed shuffled order; a subset is the first n of them."""
    items = list(task.items)
    random.Random(ORDER_SEED).shuffle(items)
    return tuple(items)


def draw_shots(count: int, index: int, shots: int, seed: int) -> list[int]:
    """Indices (in shuffled order) of the demonstrations for the example at `index`, itself excluded.

    They are drawn from the whole task even if only a subset is evaluated, by a generator seeded seed + index.
    """
    drawn = random.Random(seed + index).sample(range(count - 1), shots)
    return [other + (other >= index) for other in drawn]


def demonstration(task: Task, item: Item) -> str:
    """The text of a demonstration: context, delimiter and right answer."""
    context, answer = item.candidate(item.gold)
    return context + task.delimiter + answer
