"""Independent work on parallel CUDA streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class StreamPool:
    """Runs functions on parallel CUDA streams, the first of them on the current stream.

    The current stream then waits for all of them, and the side streams are reused. Tensors made on a side
    stream are safe to use and to free on the current stream: the side stream does nothing further until the
    current stream has caught up.
    """

    def __init__(self) -> None:
        self.side_streams: list[torch.cuda.Stream] = []

    def __call__(self, functions: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
        """Run the functions on a GPU; returns their results in order."""
        current = torch.cuda.current_stream(device)
        while len(self.side_streams) < len(functions) - 1:
            self.side_streams.append(torch.cuda.Stream(device))
        started: list[torch.cuda.Stream] = []
        results: list[Any] = []
        try:
            for stream, function in zip(self.side_streams, functions[1:], strict=False):
                stream.wait_stream(current)
                started.append(stream)
                with torch.cuda.stream(stream):
                    results.append(function())
            return [functions[0](), *results]
        finally:  # also after an exception: kernels already launched may still read their inputs
            for stream in started:
                current.wait_stream(stream)


def run_sequentially(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the functions one after another; returns their results in order."""
    return [function() for function in functions]
