"""Parts of a study that do not need one another's results ask for their runs in one batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec

Work: TypeAlias = Generator[Sequence[RunSpec], Sequence[RunRecord | None], Any]


def run_concurrently(works: Sequence[Work]) -> Work:
    """What each part returns, in their order.

    The parts go in step: what they ask for at a time is one batch, so that a dry run can list it, and as many
    runs as there are slots happen at once.
    """
    results: list[Any] = [None] * len(works)
    asked: dict[int, Sequence[RunSpec]] = {}
    answers: dict[int, Sequence[RunRecord | None] | None] = dict.fromkeys(range(len(works)))
    while True:
        for i, answer in answers.items():
            try:
                asked[i] = next(works[i]) if answer is None else works[i].send(answer)
            except StopIteration as end:
                results[i] = end.value
                asked.pop(i, None)
        if not asked:
            return results
        records = yield [spec for specs in asked.values() for spec in specs]
        answers, start = {}, 0
        for i, specs in asked.items():
            answers[i] = records[start : start + len(specs)]
            start += len(specs)
