"""CUDA graph capture and replay of functions from tensors to tensors, and work on parallel CUDA streams."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph with the static tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def replay(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Copy new inputs into the static ones, replay the graph and return copies of its outputs."""
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class CudaGraphCache:
    """CUDA graphs by key. They share one memory pool, so no two of them may run at the same time."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, CapturedGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable) -> CapturedGraph | None:
        """Return the graph captured under `key`, or None."""
        return self._graphs.get(key)

    def capture(self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        """Capture `function(*inputs)` and store the graph under `key`.

        Every kernel and every persistent buffer of the function must exist already: call it once before.
        A failed capture raises RuntimeError and stores nothing.
        """
        static = tuple(tensor.clone() for tensor in inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (the batch prefetcher) may call the CUDA driver during capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function(*static)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = CapturedGraph(graph, static, outputs)

    def clear(self) -> None:
        """Drop all graphs; the memory pool is freed with the last graph that uses it."""
        self._graphs.clear()
        self._pool = None
