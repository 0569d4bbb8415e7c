"""Batches prepared ahead of time by a background thread, in pinned memory for a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from steepen.data.loader import BatchLoader

if TYPE_CHECKING:
    import torch

    Item = tuple[int, torch.Tensor, torch.Tensor]


class Prefetcher:
    """Iterates (step, inputs, targets) from `start_step` on: int64 on `device`, (rows of this rank, context).

    The batches depend on the loader and the step number alone, not on the thread. For CUDA they are copied
    from pinned memory without blocking. Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        batches: BatchLoader,
        start_step: int,
        device: torch.device | str,
        *,
        stop_step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        queue_size: int = 4,
    ) -> None:
        import torch

        self._batches = batches
        self._device = torch.device(device)
        self._stop_step = batches.steps if stop_step is None else stop_step
        batches.require_steps(self._stop_step)
        self._first, self._last = batches.row_range(rank, world_size)
        self._ready: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=max(1, queue_size))
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(start_step,), name="steepen-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        while not self._closing.is_set():
            item = self._ready.get()
            if item is None or isinstance(item, BaseException):
                self.close()
                if item is not None:
                    raise item
                return
            step, inputs, targets = item
            yield (
                step,
                inputs.to(self._device, non_blocking=True),
                targets.to(self._device, non_blocking=True),
            )

    def close(self) -> None:
        """Stop the thread. There is no state to save: the position is the caller's step number."""
        self._closing.set()
        while True:  # empty the queue, so that a blocked put() returns and the thread sees the flag
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, step: int) -> None:
        import torch

        try:
            while step < self._stop_step and not self._closing.is_set():
                pair = [
                    torch.from_numpy(ids) for ids in self._batches.batch_rows(step, self._first, self._last)
                ]
                if self._device.type == "cuda":
                    pair = [ids.pin_memory() for ids in pair]
                self._put((step, pair[0], pair[1]))
                step += 1
            self._put(None)
        except BaseException as error:  # passed to the consumer, which raises it in its own thread
            self._put(error)

    def _put(self, item: Item | BaseException | None) -> None:
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
