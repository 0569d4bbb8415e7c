"""Works that do not wait for each other, done at once on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class StreamPool:
    """Does works at once, all but the first on streams of their own; the current stream waits for all.

    Streams are kept. What a work leaves behind is safe to use and to free on the current stream: its own
    stream does nothing again before that one has come as far.
    """

    def __init__(self) -> None:
        self.sides: list[torch.cuda.Stream] = []

    def __call__(self, works: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
        """Do the works on a GPU; returns what they return."""
        here = torch.cuda.current_stream(device)
        while len(self.sides) < len(works) - 1:
            self.sides.append(torch.cuda.Stream(device))
        begun: list[torch.cuda.Stream] = []
        results: list[Any] = []
        try:
            for side, work in zip(self.sides, works[1:], strict=False):
                side.wait_stream(here)
                begun.append(side)
                with torch.cuda.stream(side):
                    results.append(work())
            return [works[0](), *results]
        finally:  # also where a work failed: what it began may still be reading
            for side in begun:
                here.wait_stream(side)


def run_sequentially(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Does works in turn; returns what they return."""
    return [work() for work in works]
