"""Work ahead by threads: order, bounded memory, errors, and threads that end with the loop."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from steepen.utils.threads import map_ahead

HANGING = """
import os, signal, sys, threading, time
from steepen.utils import threads

def read(item):
    if item == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(600)
    return item

threads.CLOSING_SECONDS = 0.5
try:
    for item in threads.map_ahead(read, range(5), 1, 2, "steepen-test"):
        print(item, flush=True)
except KeyboardInterrupt:
    sys.exit(3)
"""


def own_threads() -> list[str]:
    """The names of the threads that `map_ahead` has started here."""
    return [each.name for each in threading.enumerate() if each.name.startswith("steepen-test")]


@pytest.mark.parametrize(("threads", "ahead"), [(1, 0), (1, 3), (4, 2), (4, 100)])
def test_results_come_in_the_order_of_the_items_and_no_further_ahead(threads: int, ahead: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    for number, found in enumerate(
        map_ahead(lambda item: item * item, items(), threads, ahead, "steepen-test")
    ):
        assert found == number * number
        assert len(taken) <= number + ahead + 1
    assert len(taken) == 20
    assert not own_threads()


def test_an_error_is_raised_at_its_item_and_ends_the_threads() -> None:
    found: list[float] = []
    with pytest.raises(ZeroDivisionError):
        for value in map_ahead(lambda item: 1 / (3 - item), range(10), 2, 5, "steepen-test"):
            found.append(value)
    assert found == [1 / 3, 1 / 2, 1.0]
    assert not own_threads()


def test_closing_ends_the_threads_and_computes_nothing_more() -> None:
    computed: list[int] = []
    values = map_ahead(computed.append, range(1000), 2, 4, "steepen-test")
    next(values)
    values.close()
    assert len(computed) <= 5
    assert not own_threads()


def test_an_item_that_hangs_does_not_keep_an_interrupted_process_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.returncode) == ("0\n", 3), ended.stderr
