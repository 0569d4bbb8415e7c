"""Works that do not wait for each other, done at once on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class SideBySide:
    """Does works at once, all but the first on streams of their own; the current stream waits for all.

    Streams are kept. What a work leaves behind is safe to use and to free on the current stream: its own
    stream does nothing again before that one has come as far.
    """

    def __init__(self) -> None:
        self.sides: list[torch.cuda.Stream] = []

    def __call__(self, works: Iterable[Callable[[], object]], device: torch.device) -> None:
        """Do the works."""
        here = torch.cuda.current_stream(device)
        first, *others = works
        while len(self.sides) < len(others):
            self.sides.append(torch.cuda.Stream(device))
        sides = self.sides[: len(others)]
        for side, work in zip(sides, others, strict=True):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                work()
        first()
        for side in sides:
            here.wait_stream(side)
