"""Lead a study through its batches, and run independent parts of one concurrently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Work

T = TypeVar("T")


def lead(study: Work[T], answer: Callable[[Sequence[RunSpec]], Sequence[RunRecord | None]]) -> T:
    """Send a study the records that `answer` gives for each batch, until it returns."""
    try:
        specs = next(study)
        while True:
            specs = study.send(answer(specs))
    except StopIteration as end:
        return end.value


def run_concurrently(parts: Sequence[Work[Any]]) -> Work[Any]:
    """Run the parts in lockstep and return their results in order.

    The batches that they yield at each step become one, so that a dry run lists them together and all slots
    are used.
    """
    results: list[Any] = [None] * len(parts)
    requested: dict[int, Sequence[RunSpec]] = {}
    answers: dict[int, Sequence[RunRecord | None] | None] = dict.fromkeys(range(len(parts)))
    while True:
        for i, answer in answers.items():
            try:
                requested[i] = next(parts[i]) if answer is None else parts[i].send(answer)
            except StopIteration as end:
                results[i] = end.value
                requested.pop(i, None)
        if not requested:
            return results
        records = yield [spec for specs in requested.values() for spec in specs]
        answers, start = {}, 0
        for i, specs in requested.items():
            answers[i] = records[start : start + len(specs)]
            start += len(specs)
