"""Runs `steepen` commands in forked processes, so that a storm of kills pays for `import torch` once.

Standard input carries one JSON object per attempt: `commands`, lists of arguments that are run at the same
time; `environments`, one per command; and the `log` that receives their output. The server answers with the
process ids, and, when those processes and all their descendants have ended, with their exit codes (−9 after
SIGKILL) and the orphans: descendants that lived longer than ORPHAN_SECONDS after the last of them.

Worker processes of a study are forked too (`ForkedWorker`), where they would otherwise be started anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from steepen.launch.worker import python_path
from steepen.requests.app import main
from steepen.requests.worker import run_rank, terminate_with_parent

if TYPE_CHECKING:
    import pytest

ORPHAN_SECONDS = 30.0  # for the workers of a killed study to save and end
_PR_SET_CHILD_SUBREAPER = 36
PRELOADED = (  # what the commands import
    "torch._dynamo",
    "rich.table",
    "steepen.data.prepare",
    "steepen.evaluation.evaluate_run",
    "steepen.results.study",
    "steepen.training.run",
)


def become(
    commands: list[str],
    environment: dict[str, str],
    log: str,
    run: Callable[[list[str]], int] = main,
) -> NoReturn:
    """Run one command in this forked process, as a process of its own would."""
    _redirect(os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    os.environ.update(environment)
    # The parent may have other handlers: torch's agent leaves its own behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    code = 70
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = run(commands)
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:  # before the command has begun
        code = 128 + signal.SIGINT
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        os._exit(code)


def _redirect(stdin: int, stdout: int, stderr: int | None = None) -> None:
    """Make these the standard streams, and let go of every other file, as exec would.

    The other descriptors become those of /dev/null. Were they closed, files opened later would have their
    numbers, and the end of an object of the parent that owns such a number would close one of those.
    """
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stdout if stderr is None else stderr, 2)
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if number > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.fstat(number)
                os.dup2(null, number, inheritable=False)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")  # pyright: ignore[reportArgumentType]
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))  # pyright: ignore[reportArgumentType]


class ForkedProcess:
    """What `subprocess.Popen` gives of a process that was forked: without starting Python anew."""

    def __init__(self, process: int) -> None:
        self.pid = process
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _as_if_started(environment: dict[str, str]) -> None:
    """Give this forked process its own session, environment and signals."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class ForkedCommand(ForkedProcess):
    """A `python -m steepen …`, or a rank that it starts, with its output in `log`."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], log: Path, cwd: Path | None = None
    ) -> None:
        assert command[1] == "-m" and command[2] in ("steepen", "steepen.requests.worker"), command
        super().__init__(os.fork())
        if not self.pid:
            _as_if_started(env)
            os.chdir(cwd or Path.cwd())
            terminate_with_parent()
            run = main if command[2] == "steepen" else lambda words: run_rank(Path(words[0]))
            become(list(command[3:]), {}, str(log), run)


def fork_ranks(patch: pytest.MonkeyPatch, log: Path) -> None:
    """Fork the ranks that torch's agent starts, with their output in `log`: torch is imported already.

    Where there is a GPU they are started: a process that has looked for one cannot be forked.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    if torch.cuda.is_available():
        return
    patch.setattr(SubprocessHandler, "_popen", lambda self, command, env: ForkedCommand(command, env, log))


class ForkedWorker(ForkedProcess):
    """A worker process of the launcher of local runs."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
        assert command[1:] == ["-m", "steepen.requests.worker"], command
        requests, answers = os.pipe(), os.pipe()
        super().__init__(os.fork())
        if not self.pid:
            code = 70
            try:
                _redirect(requests[0], answers[1], os.open(os.devnull, os.O_WRONLY))
                _as_if_started(env)
                from steepen.requests import worker

                code = worker.main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            finally:
                os._exit(code)
        os.close(requests[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(answers[0], "rb")


FORKING: Any = types.SimpleNamespace(
    Popen=ForkedWorker, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
)  # in the place of the module `subprocess`


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Fork the worker processes of studies; where there is a GPU they are started."""
    import torch

    if torch.cuda.is_available():
        return
    patch.setattr("steepen.launch.worker.subprocess", FORKING)


def children(process: int) -> list[int]:
    """Process ids of the children of a process, in the order of their start."""
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def descendants(process: int) -> list[int]:
    """Process ids of the children of a process, and of theirs."""
    found: list[int] = []
    for child in children(process):
        found += [child, *descendants(child)]
    return found


def _wait_for_all(processes: list[int]) -> dict[str, Any]:
    """Wait for the processes, then for their descendants, which the kernel has made children of this one."""
    codes: dict[int, int] = {}
    since: float | None = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return {"codes": [codes[process] for process in processes], "orphans": 0}
        if ended:
            codes[ended] = os.waitstatus_to_exitcode(status)
            continue
        if since is None and all(process in codes for process in processes):
            since = time.monotonic()
        if since is not None and time.monotonic() > since + ORPHAN_SECONDS:
            orphans = descendants(os.getpid())
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
            return {"codes": [codes[process] for process in processes], "orphans": len(orphans)}
        time.sleep(0.002)


def serve() -> None:
    """Fork what is asked for until standard input ends."""
    import torch

    import steepen.data.tokenize_source
    import steepen.launch.worker
    import steepen.studies.ladders.ladder_runs

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Small enough for preparations of a fraction of a second to be resumed in the middle.
    steepen.data.tokenize_source.JOURNAL_SECONDS = 0.005
    steepen.studies.ladders.ladder_runs.DRAWS = 100
    steepen.launch.worker.subprocess = FORKING
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until a forked command has begun
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        processes: list[int] = []
        for command, environment in zip(request["commands"], request["environments"], strict=True):
            child = os.fork()
            if not child:
                become(command, environment, request["log"])
            processes.append(child)
        print(json.dumps(processes), file=answers, flush=True)
        print(json.dumps(_wait_for_all(processes)), file=answers, flush=True)


class ForkServer:
    """The client: starts commands, and waits for them with a limit."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "PYTHONUNBUFFERED": "1",
            },
        )
        assert self._answer(900) == "ready"  # imports take seconds, on a busy machine minutes

    def _answer(self, seconds: float) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], seconds)[0], f"no answer; see {self.log}"
        return self.process.stdout.readline().decode().strip()

    def start(self, *commands: list[str], environments: list[dict[str, str]] | None = None) -> list[int]:
        """Fork one process per command; returns their ids."""
        assert self.process.stdin is not None
        request = {"commands": commands, "environments": environments or [{} for _ in commands]}
        self.process.stdin.write(json.dumps({**request, "log": str(self.log)}).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self._answer(300))

    def wait(self, seconds: float = 600) -> list[int]:
        """Exit codes, once the processes and all their descendants have ended; fails where one does not."""
        ended = json.loads(self._answer(seconds + ORPHAN_SECONDS))
        assert not ended["orphans"], f"{ended['orphans']} orphans; see {self.log}"
        return ended["codes"]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


if __name__ == "__main__":
    serve()
