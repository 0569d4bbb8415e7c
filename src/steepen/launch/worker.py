"""One attempt at one run: the training process, on the machine that the launcher chose.

`TrainCommand` and `Attempt` are pickled to and from workers, so they hold builtin values only.
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

from steepen.launch.subprocess_entry import PARENT_PID_VARIABLE

PROGRAM = ("-m", "steepen.launch.subprocess_entry", "train")
_OUTPUT_TAIL = 4000  # characters of output that come back with an attempt


@dataclass(frozen=True)
class TrainCommand:
    """The command of one attempt; every machine must see the run directory under the same path."""

    run_directory: str  # holds spec.json
    data: str
    arguments: tuple[str, ...] = ()  # further options of `steepen train`
    environment: dict[str, str] = field(default_factory=dict[str, str])
    program: tuple[str, ...] = PROGRAM  # arguments of the Python interpreter

    @property
    def argv(self) -> list[str]:
        """The command line."""
        run = Path(self.run_directory)
        options = ("--spec", str(run / "spec.json"), "--data", self.data, "--runs", str(run.parent), "--wait")
        return [sys.executable, *self.program, *options, *self.arguments]


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended; exit code None means that the worker was lost."""

    exit_code: int | None
    output: str = ""  # the last characters that it printed
    host: str = ""


class TrainProcess:
    """A training process whose output is appended to log.txt in the run directory."""

    def __init__(self, command: TrainCommand) -> None:
        path = Path(command.run_directory) / "log.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log: BinaryIO = path.open("ab+")
        self.log_start = self.log.seek(0, os.SEEK_END)
        self.attempt: Attempt | None = None
        self.process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            # A new session: Ctrl-C in the terminal reaches only the launcher, which then sends one SIGTERM.
            start_new_session=True,
            env={**_environment(), **command.environment, PARENT_PID_VARIABLE: str(os.getpid())},
        )

    def poll(self) -> Attempt | None:
        """The attempt once the process has ended, else None; may be called again."""
        code = self.process.poll()
        if code is not None and self.attempt is None:
            self.log.seek(self.log_start)
            output = self.log.read().decode(errors="replace")[-_OUTPUT_TAIL:]
            self.log.close()
            self.attempt = Attempt(code, output, socket.gethostname())
        return self.attempt

    def wait(self) -> Attempt:
        """Block until the process has ended."""
        # Short sleeps, not one long wait: an interrupt of the worker must be handled.
        while (attempt := self.poll()) is None:
            time.sleep(0.05)
        return attempt

    def terminate(self) -> None:
        """Send SIGTERM, on which training saves a checkpoint and stops."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; the last checkpoint stays."""
        if self.process.poll() is None:
            self.process.kill()


def run_attempt(command: TrainCommand) -> Attempt:
    """Run one attempt to its end; if this process is interrupted, the training process saves and stops."""
    process = TrainProcess(command)
    try:
        return process.wait()
    finally:
        process.terminate()


def python_path() -> str:
    """PYTHONPATH with this source tree first, so that a worker runs the launcher's code."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))


def _environment() -> dict[str, str]:
    """This environment, with OMP_WAIT_POLICY=PASSIVE: spinning threads slow down concurrent runs."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
