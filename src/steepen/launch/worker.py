"""One attempt at one run: the training process, on whatever machine a launcher has put it.

This is all that travels to a worker, so it holds plain values only and returns plain values.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from steepen.launch.subprocess_entry import PARENT

PROGRAM = ("-m", "steepen.launch.subprocess_entry", "train")
_TAIL = 4000  # characters of output that come back with an attempt


@dataclass(frozen=True)
class TrainCommand:
    """What to start: one run by its directory, which every machine sees under the same path."""

    run: str  # the run's directory; spec.json is in it
    data: str
    arguments: tuple[str, ...] = ()  # more options of `steepen train`
    environment: dict[str, str] = field(default_factory=dict[str, str])
    program: tuple[str, ...] = PROGRAM  # what python is given

    @property
    def command(self) -> list[str]:
        """The command line."""
        run = Path(self.run)
        place = ("--spec", str(run / "spec.json"), "--data", self.data, "--runs", str(run.parent), "--wait")
        return [sys.executable, *self.program, *place, *self.arguments]


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended. No code: the worker itself was lost."""

    code: int | None
    output: str = ""  # the end of what it printed
    host: str = ""


class Child:
    """A training process, its output going to log.txt in the run's directory."""

    def __init__(self, task: TrainCommand) -> None:
        path = Path(task.run) / "log.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log: BinaryIO = path.open("ab+")
        self.began = self.log.seek(0, os.SEEK_END)
        self.attempt: Attempt | None = None
        self.process = subprocess.Popen(
            task.command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            # Its own session: Ctrl-C in the terminal reaches the launcher alone, which then asks once.
            start_new_session=True,
            env={**_environment(), **task.environment, PARENT: str(os.getpid())},
        )

    def ended(self) -> Attempt | None:
        """The attempt, once the process is gone; it may be asked for again."""
        code = self.process.poll()
        if code is not None and self.attempt is None:
            self.log.seek(self.began)
            output = self.log.read().decode(errors="replace")[-_TAIL:]
            self.log.close()
            self.attempt = Attempt(code, output, socket.gethostname())
        return self.attempt

    def wait(self) -> Attempt:
        """The attempt, however long it takes."""
        # Short sleeps rather than one long wait: a worker's interrupt must be able to come through.
        while (attempt := self.ended()) is None:
            time.sleep(0.05)
        return attempt

    def terminate(self) -> None:
        """Ask it to save and stop."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; its last checkpoint stays."""
        if self.process.poll() is None:
            self.process.kill()


def run_attempt(task: TrainCommand) -> Attempt:
    """Make one attempt in this process; whatever interrupts it, the child is asked to save and stop."""
    child = Child(task)
    try:
        return child.wait()
    finally:
        child.terminate()


def python_path() -> str:
    """PYTHONPATH with this very source first, so that a worker runs the code its launcher does."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))


def _environment() -> dict[str, str]:
    """Ours, with OpenMP kept from spinning while it waits: that starves the runs beside it."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
