"""Which examples are asked, and which stand solved before each: nanochat's draws, with a seed."""

from __future__ import annotations

import random

from steepen.evaluation.core.bundle import Item, Task

ORDER_SEED = 1337  # nanochat shuffles every task's examples with it before taking a subset
SHOT_SEED = 1234  # and draws the demonstrations of example i from 1234 + i
SEED_STRIDE = 1_000_003  # evaluation seed s starts here × s further on; no task has that many examples
BETWEEN = "\n\n"  # after each demonstration


def shuffled(task: Task) -> tuple[Item, ...]:
    """The task's items in the suite's fixed shuffled order; a subset is its first so many."""
    items = list(task.items)
    random.Random(ORDER_SEED).shuffle(items)
    return tuple(items)


def draw_shots(count: int, index: int, shots: int, seed: int) -> list[int]:
    """Places (in shuffled order) of the demonstrations for the example at `index`, itself excluded.

    Seed 0 draws what nanochat draws. The whole task is drawn from even where only a subset is asked.
    """
    rng = random.Random(SHOT_SEED + index + SEED_STRIDE * seed)
    drawn = rng.sample(range(count - 1), shots)
    return [place + (place >= index) for place in drawn]


def solved(task: Task, item: Item) -> str:
    """A demonstration: context, delimiter and the right answer."""
    context, answer = item.candidate(item.gold)
    return context + task.delimiter + answer
