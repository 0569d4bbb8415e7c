"""Faults of one rank stop all: a thread of each rank watches the heartbeats and progress of the others.

A rank that fails tells the others through the key-value store. One that was killed, or whose machine is
gone, stops sending heartbeats; one that hangs sends them, but its progress stands still. In each case the
first rank to notice reports one sentence that names rank and step, and every rank exits, even one that is
blocked in a collective. The process that hosts the store exits last.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from steepen.errors import Failure, SteepenError, first_line
from steepen.utils.codec import from_builtins, to_builtins

FAULT_DIRECTORY_VARIABLE = "STEEPEN_FAULT_DIRECTORY"  # set by `steepen train --gpus`, which prints the faults
BEAT_SECONDS = 0.5
SILENT_SECONDS = 60.0  # without a heartbeat: the rank is gone
SILENT_AFTER_ERROR_SECONDS = 3.0  # the same, once a collective has failed
LINGER_SECONDS = 5.0  # at most, for the others to hear of a fault before the store is closed
LOST_EXIT_CODE = os.EX_TEMPFAIL  # of ranks that stop because another was lost: another attempt may succeed


class RankLost(SteepenError):
    """Another rank was killed, hangs or cannot be reached."""

    exit_code = LOST_EXIT_CODE
    transient = True


class Monitor:
    """Publishes this rank's heartbeat and progress, and watches those of the others."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, *, hosts_store: bool = False
    ) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.hosts_store = hosts_store  # in this process: it ends with it
        self.on_fault: Callable[[Failure], None] | None = None  # called on rank 0
        self._marks = 0  # rises whenever this rank gets further
        self._step, self._phase = 0, "starting"
        self._beats = 0
        self._seen: list[tuple[str, float]] = []  # of each rank: the last heartbeat, and when it changed
        self._moved: list[tuple[int, float]] = []  # of each rank: its progress, and when it changed
        self._where = [(0, "starting")] * size
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="steepen-monitor", daemon=True)

    def start(self, barrier: Callable[[], None]) -> None:
        """Publish the first heartbeat and start the thread once every rank has."""
        self._beat()
        barrier()
        now = time.monotonic()
        self._seen, self._moved = [("", now)] * self.size, [(-1, now)] * self.size
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def progress(self, step: int, phase: str) -> None:
        """Note that this rank has come to `phase` of step `step` (steps completed)."""
        self._marks += 1
        self._step, self._phase = step, phase

    def announce(self, failure: Failure) -> bool:
        """Tell every rank to stop; returns whether this rank was the first to say so.

        If it was, the others have heard of it before the store is closed.
        """
        text = json.dumps({"rank": self.rank, "failure": to_builtins(failure)})
        with self._lock:
            first = json.loads(self.store.compare_set("fault", "", text))["rank"] == self.rank
        if first:
            self._leave_store()
        return first

    def _leave_store(self) -> None:
        """Note that this rank needs the store no longer; if this process hosts it, wait for the others."""
        deadline = time.monotonic() + LINGER_SECONDS
        with contextlib.suppress(RuntimeError):
            with self._lock:
                self.store.set(f"left/{self.rank}", "1")
            keys = [f"left/{rank}" for rank in range(self.size)]
            while self.hosts_store and time.monotonic() < deadline:
                with self._lock:
                    if self.store.check(keys):
                        return
                time.sleep(0.05)

    def explain(self, error: BaseException) -> RankLost:
        """The error to raise where a collective failed: names the rank that is gone, once that shows.

        If another rank has announced a fault, this process exits here.
        """
        deadline = time.monotonic() + 4 * SILENT_AFTER_ERROR_SECONDS
        while time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.1)
            try:
                self._check_announced()
            except RuntimeError:  # the store is gone, and no heartbeat is seen: the thread ends this process
                continue
            others = [(when, rank) for rank, (_, when) in enumerate(self._seen) if rank != self.rank]
            when, rank = min(others)
            if time.monotonic() - when > SILENT_AFTER_ERROR_SECONDS:
                return RankLost(self._silent_sentence(rank))
        reason = first_line(error)
        return RankLost(
            f"rank {self.rank} lost its connection to the others at step {self._step:,} ({reason})."
        )

    def exit_as_announced(self) -> NoReturn:
        """End this process as another rank's announcement says."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._check_announced()
                time.sleep(0.1)
        os._exit(LOST_EXIT_CODE)  # the store is gone, with the rank that has reported the fault

    def _silent_sentence(self, rank: int) -> str:
        # The last heartbeat may be many short steps old; ranks are in step, so this one's is better known.
        step = max(self._step, self._where[rank][0])
        return (
            f"rank {rank} has stopped responding at step {step:,}: it was killed or its machine is gone; run "
            "the same command to resume from the last checkpoint."
        )

    def _beat(self) -> None:
        self._beats += 1
        with self._lock:
            self.store.set(f"beat/{self.rank}", f"{self._beats} {self._marks} {self._step} {self._phase}")

    def _watch(self) -> None:
        failures = 0
        while not self._stop.wait(BEAT_SECONDS):
            try:
                self._beat()
                self._check_announced()
                self._look_around()
                failures = 0
            except RuntimeError:  # the store is gone: with rank 0, or for a moment
                failures += 1
                if failures * BEAT_SECONDS > SILENT_AFTER_ERROR_SECONDS and not self._stop.is_set():
                    _exit(_lost("RankLost", self._silent_sentence(0)), speak=self.rank == 1)

    def _check_announced(self) -> None:
        with self._lock:
            if not self.store.check(["fault"]):
                return
            fault = json.loads(self.store.get("fault"))
        if fault["rank"] == self.rank:
            return
        self._leave_store()
        self._end(from_builtins(Failure, fault["failure"]), speak=False)

    def _look_around(self) -> None:
        now = time.monotonic()
        with self._lock:
            values = [self.store.get(f"beat/{rank}").decode() for rank in range(self.size)]
        for rank, value in enumerate(values):
            beats, marks, step, phase = value.split(" ", 3)
            self._where[rank] = (int(step), phase)
            if beats != self._seen[rank][0]:
                self._seen[rank] = (beats, now)
            if int(marks) != self._moved[rank][0]:
                self._moved[rank] = (int(marks), now)
        for rank, (_, when) in enumerate(self._seen):
            if rank != self.rank and now - when > SILENT_SECONDS:
                self._report("RankLost", self._silent_sentence(rank))
        # Ranks that wait for a slower one have gone further than it has.
        slowest = min(range(self.size), key=lambda rank: self._moved[rank])
        if now - self._moved[slowest][1] > self.timeout:
            step, phase = self._where[slowest]
            self._report(
                "RankHung",
                f"rank {slowest} has made no progress for {self.timeout:,.0f} s at step {step:,} ({phase}); "
                "run the same command to resume from the last checkpoint.",
            )

    def _report(self, kind: str, sentence: str) -> None:
        failure = _lost(kind, sentence)
        self._end(failure, speak=self.announce(failure))

    def _end(self, failure: Failure, *, speak: bool) -> None:
        if self.rank == 0 and self.on_fault is not None:
            with contextlib.suppress(OSError):
                self.on_fault(failure)
        _exit(failure, speak=speak)


def _lost(kind: str, sentence: str) -> Failure:
    return Failure(kind, sentence, LOST_EXIT_CODE, transient=True)


def report_fault(failure: Failure) -> bool:
    """Leave a fault for the process that started the ranks; False if there is no such process."""
    folder = os.environ.get(FAULT_DIRECTORY_VARIABLE)
    if folder is None:
        return False
    path = Path(folder) / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.json"
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(to_builtins(failure)), encoding="utf-8")
    partial.replace(path)
    return True


def rank_exit_code(failure: Failure) -> int:
    """0 if another attempt would fail alike and somebody knows: torchrun restarts what exits with an error.

    `steepen train --gpus` then returns the exit code of the fault.
    """
    reported = os.environ.get(FAULT_DIRECTORY_VARIABLE) is not None
    return 0 if reported and failure.exit_code != LOST_EXIT_CODE else failure.exit_code


def _exit(failure: Failure, *, speak: bool) -> None:
    """End this process at once: its main thread may be blocked in a collective."""
    if speak and not report_fault(failure):
        print(f"steepen: {failure.message}", file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(rank_exit_code(failure))
