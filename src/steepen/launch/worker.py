"""Tasks and the processes that run them: a request goes out as JSON, its outcome comes back as JSON.

`begin_task` hands a task to a `Worker`, a process that runs one after another (`steepen.requests.worker`).
`Task` and `Attempt` are pickled to and from other machines, so they hold builtin values only.
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
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepen.errors import Failure
from steepen.utils.codec import from_builtins
from steepen.utils.files import open_without_links

PARENT_PID_VARIABLE = "STEEPEN_PARENT"  # set for workers and ranks, to the process that they end with
# Set for a task on one node of several: "NODE/NODES HOST:PORT", this node's number, how many there are, and
# where on node 0 they meet.
NODES_VARIABLE = "STEEPEN_NODES"
PROGRAM = ("-m", "steepen.requests.worker")


@dataclass(frozen=True)
class Task:
    """A request for a worker; every machine must see its paths alike."""

    request: dict[str, Any]  # as `Request.to_dict` writes it
    log: str  # the file to which its output is appended
    environment: dict[str, str] = field(default_factory=dict[str, str])
    # Digest of the custom source that the request names, None without any. The launcher has imported that
    # code, so it was trusted.
    code: str | None = None
    program: tuple[str, ...] = PROGRAM  # arguments of the Python interpreter that start a worker

    def to_line(self) -> bytes:
        """One line of a worker's standard input."""
        value = {"request": self.request, "trust": self.code is not None, "log": self.log}
        return json.dumps(value).encode() + b"\n"


@dataclass(frozen=True)
class Attempt:
    """How an attempt at a task ended: the JSON of its result, or the failure."""

    failure: Failure | None = None
    result: Any = None
    host: str = ""


class Worker:
    """A process that runs one task after another; it ends with a failed one."""

    def __init__(self, environment: dict[str, str], program: tuple[str, ...] = PROGRAM) -> None:
        self.environment, self.program = {**_environment(), **environment}, program
        self.code: str | None = None  # digest of the custom source that it has imported
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # between tasks only: a task's output goes to its log
            # A new session: Ctrl-C in the terminal reaches only the launcher, which then sends one SIGTERM.
            start_new_session=True,
            env={**self.environment, PARENT_PID_VARIABLE: str(os.getpid())},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.tasks, self.answers = self.process.stdin, self.process.stdout
        self.answer = b""  # what has arrived of the line that answers the current task
        self.attempt: Attempt | None = None  # at the current task, once it has ended
        self.failed = False  # its last task: it is about to exit
        os.set_blocking(self.answers.fileno(), False)

    def accepts(self, task: Task) -> bool:
        """Whether this worker may run a task: alive, same program and environment, no other custom code.

        A module is imported once per process, so custom code that was edited between two tasks needs a new
        process.
        """
        return (
            not self.failed
            and self.process.poll() is None
            and self.program == task.program
            and {**_environment(), **task.environment} == self.environment
            and (task.code is None or self.code is None or task.code == self.code)
        )

    def poll(self) -> Attempt | None:
        """The outcome of the task once there is one; a process that ended without any was lost."""
        if self.attempt is not None:
            return self.attempt
        ended = self.process.poll()  # before the last read: what a dead process has written is all there is
        while part := self.answers.read(1 << 16):
            self.answer += part
        host = socket.gethostname()
        if self.answer.endswith(b"\n"):
            outcome = json.loads(self.answer)
            self.failed = "failure" in outcome
            failure = from_builtins(Failure, outcome["failure"]) if self.failed else None
            self.attempt = Attempt(failure, outcome.get("result"), host)
        elif ended is not None:
            self.attempt = Attempt(_lost_process(ended, host), host=host)
        return self.attempt

    def wait(self) -> Attempt:
        """Block until the task has ended."""
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

    def close(self) -> None:
        """Let the process exit; it must be between two tasks."""
        with contextlib.suppress(OSError):
            self.tasks.close()
        self.process.wait()
        self.answers.close()


def _lost_process(exit_code: int, host: str) -> Failure:
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in signal.valid_signals() and number > 0:
        hint = "; the machine may be short of memory" if number == signal.SIGKILL else ""
        message = f"it was stopped by {signal.Signals(number).name} on {host}{hint}."
        return Failure("Killed", message, 128 + number, transient=True)
    message = f"its process ended with exit code {exit_code} on {host}; see its log.txt."
    # The code of ranks that stop because another one was lost.
    return Failure("WorkerLost", message, exit_code, transient=exit_code == os.EX_TEMPFAIL)


def begin_task(task: Task, worker: Worker | None = None) -> Worker:
    """Hand a task to the worker of earlier ones, or to a new one if that is None or unfit; returns it."""
    path = Path(task.log)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=open_without_links):  # fails here if it cannot be written
        pass
    if worker is not None and not worker.accepts(task):
        worker.close()
        worker = None
    worker = worker or Worker(task.environment, task.program)
    worker.code, worker.answer, worker.attempt = task.code or worker.code, b"", None
    with contextlib.suppress(BrokenPipeError):  # it has just died: `poll` will say so
        worker.tasks.write(task.to_line())
        worker.tasks.flush()
    return worker


_idle_workers: list[Worker] = []  # between two calls of run_task: at most one


def run_task(task: Task) -> Attempt:
    """Run one task to its end; if this process is interrupted, the run saves and stops.

    The worker process stays for the next call.
    """
    worker = begin_task(task, _idle_workers.pop() if _idle_workers else None)
    try:
        attempt = worker.wait()
    except BaseException:
        worker.terminate()
        raise
    _idle_workers.append(worker)
    return attempt


def python_path() -> str:
    """PYTHONPATH with this source tree first, so that a worker runs the launcher's code."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))


@contextlib.contextmanager
def variable(name: str, value: str) -> Generator[None]:
    """Set an environment variable, for what is started in the block; afterwards it is as it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _environment() -> dict[str, str]:
    """This environment, without spinning threads (they slow down concurrent runs), and with a safe path."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # no module of the current directory replaces another
    }
