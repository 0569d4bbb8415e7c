"""Map a function over items in several processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
MIN_ITEMS_PER_WORKER = 4  # with fewer, starting processes takes longer than it saves


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_processes(function: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Results in the order of `items`; in this process where other processes would not help or are unsafe.

    Workers are forked, so a script needs no `__main__` guard; not where torch is loaded, whose threads do
    not survive a fork.
    """
    workers = min(workers, len(items) // MIN_ITEMS_PER_WORKER)
    forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    if workers < 2 or not forks or "torch" in sys.modules:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(function, items)
