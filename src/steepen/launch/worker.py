"""One attempt at one run, in a worker process on the machine that the launcher chose.

`TrainCommand` and `Attempt` are pickled to and from other machines, so they hold builtin values only.
"""

from __future__ import annotations

import contextlib
import json
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
from steepen.launch.worker_process import DONE
from steepen.utils.files import open_without_links

# Set for `steepen train --gpus` on one node of several: "NODE/NODES HOST:PORT", this node's number, how many
# there are, and where on node 0 they meet.
NODES_VARIABLE = "STEEPEN_NODES"
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
    code: str | None = None  # digest of the run's custom source, None without any

    @property
    def program_arguments(self) -> list[str]:
        """The arguments that follow `program`."""
        run = Path(self.run_directory)
        options = ("--spec", str(run / "spec.json"), "--data", self.data, "--runs", str(run.parent), "--wait")
        # The launcher has imported the custom code of this spec, so it was trusted.
        trust = () if self.code is None else ("--trust-code",)
        return [*options, *trust, *self.arguments]

    @property
    def argv(self) -> list[str]:
        """The command line that makes this attempt in a process of its own."""
        return [sys.executable, *self.program, *self.program_arguments]


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended; exit code None means that the worker was lost."""

    exit_code: int | None
    output: str = ""  # the last characters that it printed
    host: str = ""


class Worker:
    """A process that makes one attempt after another (see `worker_process`); it ends with a failed one."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {**_environment(), **environment}
        self.code: str | None = None  # digest of the custom source that it has imported
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steepen.launch.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # between runs only: a run's output goes to its log
            # A new session: Ctrl-C in the terminal reaches only the launcher, which then sends one SIGTERM.
            start_new_session=True,
            env={**self.environment, PARENT_PID_VARIABLE: str(os.getpid())},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        os.set_blocking(self.answers.fileno(), False)

    def accepts(self, command: TrainCommand) -> bool:
        """Whether this worker may make an attempt: alive, same environment, no other custom code.

        A module is imported once per process, so custom code that was edited between two runs needs a new
        process.
        """
        return (
            self.process.poll() is None
            and {**_environment(), **command.environment} == self.environment
            and (command.code is None or self.code is None or command.code == self.code)
        )

    def begin(self, command: TrainCommand, log: Path) -> None:
        """Hand over an attempt; `exit_code` tells when it has ended."""
        self.code = command.code or self.code
        request = {
            "program": list(command.program),
            "arguments": command.program_arguments,
            "log": str(log.absolute()),
        }
        with contextlib.suppress(BrokenPipeError):  # it has just died: exit_code will say so
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()

    def exit_code(self) -> int | None:
        """Exit code of the current attempt: 0 once it is done, the process's if that has ended, else None."""
        if self.answers.read(len(DONE)) == DONE:
            return 0
        return self.process.poll()

    def close(self) -> None:
        """Let the process exit; it must be between two attempts."""
        with contextlib.suppress(OSError):
            self.requests.close()
        self.process.wait()
        self.answers.close()


class TrainProcess:
    """One attempt, in a worker process; what it prints is appended to log.txt in the run directory.

    `worker` is one that earlier attempts have used; if it is None or cannot be used, a new one is started.
    """

    def __init__(self, command: TrainCommand, worker: Worker | None = None) -> None:
        path = Path(command.run_directory) / "log.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log: BinaryIO = open(path, "ab+", opener=open_without_links)  # noqa: SIM115
        self.log_start = self.log.seek(0, os.SEEK_END)
        self.attempt: Attempt | None = None
        if worker is not None and not worker.accepts(command):
            worker.close()
            worker = None
        self.worker = worker or Worker(command.environment)
        self.process = self.worker.process
        self.worker.begin(command, path)

    def poll(self) -> Attempt | None:
        """The attempt once it has ended, else None; may be called again."""
        if self.attempt is None and (code := self.worker.exit_code()) is not None:
            self.log.seek(self.log_start)
            output = self.log.read().decode(errors="replace")[-_OUTPUT_TAIL:]
            self.log.close()
            self.attempt = Attempt(code, output, socket.gethostname())
        return self.attempt

    def wait(self) -> Attempt:
        """Block until the attempt has ended."""
        # Short sleeps, not one long wait: an interrupt of the launcher must be handled.
        while (attempt := self.poll()) is None:
            time.sleep(0.02)
        return attempt

    def terminate(self) -> None:
        """Send SIGTERM, on which training saves a checkpoint and the process ends."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; the last checkpoint stays."""
        if self.process.poll() is None:
            self.process.kill()


_idle_workers: list[Worker] = []  # between two calls of run_attempt: at most one


def run_attempt(command: TrainCommand) -> Attempt:
    """Run one attempt to its end; if this process is interrupted, the run saves and stops.

    The worker process stays for the next call.
    """
    process = TrainProcess(command, _idle_workers.pop() if _idle_workers else None)
    try:
        attempt = process.wait()
    except BaseException:
        process.terminate()
        raise
    _idle_workers.append(process.worker)
    return attempt


def python_path() -> str:
    """PYTHONPATH with this source tree first, so that a worker runs the launcher's code."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))


def _environment() -> dict[str, str]:
    """This environment, without spinning threads (they slow down concurrent runs), and with a safe path."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # no module of the current directory replaces another
    }
