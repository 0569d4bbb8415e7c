"""Work that threads do ahead of the loop that needs it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
CLOSING_SECONDS = 10.0  # that closing waits for items which are being computed


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], threads: int, ahead: int, name: str
) -> Generator[R]:
    """`function` of every item, in the order of the items, computed by threads up to `ahead` items early.

    Memory is bounded, and the result does not depend on the number of threads. An error is raised at the item
    that has it. Closing the generator ends the threads, whose names begin with `name`; one that hangs, as in
    a read of a file system that is gone, is left alone after CLOSING_SECONDS and does not keep the process
    from ending (an executor would join it).
    """
    tasks: SimpleQueue[tuple[Future[R], T] | None] = SimpleQueue()
    workers: list[Thread] = []
    computed: deque[Future[R]] = deque()

    def work() -> None:
        for future, item in iter(tasks.get, None):
            _compute(future, function, item)
            del future, item  # or the result would stay in memory until the next item

    try:
        for item in items:
            if len(workers) < threads:
                workers.append(Thread(target=work, name=f"{name}-{len(workers)}", daemon=True))
                workers[-1].start()
            computed.append(Future())
            tasks.put((computed[-1], item))
            if len(computed) > ahead:
                yield computed.popleft().result()
        while computed:
            yield computed.popleft().result()
    finally:
        for future in computed:
            future.cancel()
        for _ in workers:
            tasks.put(None)
        deadline = time.monotonic() + CLOSING_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def _compute(future: Future[R], function: Callable[[T], R], item: T) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(item))
    except BaseException as error:  # raised where the result is taken
        future.set_exception(error)
