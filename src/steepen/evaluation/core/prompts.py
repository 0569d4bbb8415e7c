"""Order of a task's examples and random choice of few-shot demonstrations, as in nanochat, with a seed."""

from __future__ import annotations

import random

from steepen.evaluation.core.bundle import Item, Task

ORDER_SEED = 1337  # nanochat shuffles the examples of every task with it
SHOT_SEED = 1234  # nanochat draws the demonstrations of example i with seed 1234 + i
SEED_STRIDE = 1_000_003  # added per evaluation seed; larger than any task
DEMONSTRATION_SEPARATOR = "\n\n"  # after each demonstration


def shuffled(task: Task) -> tuple[Item, ...]:
    """The task's items in a fixed shuffled order; a subset is the first n of them."""
    items = list(task.items)
    random.Random(ORDER_SEED).shuffle(items)
    return tuple(items)


def draw_shots(count: int, index: int, shots: int, seed: int) -> list[int]:
    """Indices (in shuffled order) of the demonstrations for the example at `index`, itself excluded.

    Seed 0 draws what nanochat draws, from the whole task even if only a subset is evaluated.
    """
    rng = random.Random(SHOT_SEED + index + SEED_STRIDE * seed)
    drawn = rng.sample(range(count - 1), shots)
    return [other + (other >= index) for other in drawn]


def demonstration(task: Task, item: Item) -> str:
    """The text of a demonstration: context, delimiter and right answer."""
    context, answer = item.candidate(item.gold)
    return context + task.delimiter + answer
