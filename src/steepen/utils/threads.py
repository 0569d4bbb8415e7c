"""Work that threads do ahead of the loop that needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], threads: int, ahead: int, name: str
) -> Generator[R]:
    """`function` of every item, in the order of the items, computed by threads up to `ahead` items early.

    Memory is bounded, and the result does not depend on the number of threads. An error is raised at the item
    that has it. Closing the generator ends the threads, whose names begin with `name`.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    computed: deque[Future[R]] = deque()
    try:
        for item in items:
            computed.append(pool.submit(function, item))
            if len(computed) > ahead:
                yield computed.popleft().result()
        while computed:
            yield computed.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
