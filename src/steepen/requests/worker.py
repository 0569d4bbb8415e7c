"""Run requests that arrive as JSON: the program of workers and ranks (`python -m steepen.requests.worker`).

A request in a process of its own pays for imports, the GPU's context and the loading of kernels, which takes
longer than a small run trains. A worker pays once. Standard input carries one JSON object per task:
`request` (see `decode`), `trust`, whether the code that it names may be imported, and `log`, the file that
receives its output. The worker answers each with one line on its original standard output, {"result": …} or
{"failure": …}, and exits after a failure, so that what it left behind (a CUDA error, exhausted memory,
changed globals) cannot reach another task. End of input ends the worker.

With a file as argument it is one rank of a run: the file holds `request` and `trust`, and a failure is left
for the process that started the ranks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from steepen.errors import Failure, failure_of
from steepen.launch.worker import PARENT_PID_VARIABLE
from steepen.utils.codec import to_builtins
from steepen.utils.files import GPU_LOCKS_VARIABLE, open_without_links
from steepen.utils.formatting import printable_output
from steepen.utils.imports import code_from
from steepen.utils.json_io import read_json, to_json
from steepen.utils.process import create_cuda_context, exit_process

_PR_SET_PDEATHSIG = 1
Run = Callable[[dict[str, Any]], Any]


def run_request(value: dict[str, Any]) -> Any:
    """Run a request that arrived as JSON; returns the JSON of its result."""
    from steepen.requests.request import decode

    return decode(value).run_in_worker()


def main(run: Run = run_request) -> int:
    """Run tasks until standard input ends or one fails; returns the exit code of the process."""
    terminate_with_parent()
    # Before a time limit or a preemption Slurm signals every process of a job: the job sends SIGTERM here.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if GPU_LOCKS_VARIABLE in os.environ:  # of a worker that trains on a GPU
        create_cuda_context("cuda")
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    for line in sys.stdin:
        task = json.loads(line)
        log = open_without_links(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        outcome = run_task(task, run)
        sys.stdout.flush()
        sys.stderr.flush()
        failure = outcome.get("failure")
        if failure is None:
            free_resources()
        with os.fdopen(os.dup(answers), "w", encoding="utf-8") as stream:
            stream.write(to_json(outcome, indent=None) + "\n")
        if failure is not None:
            return int(failure["exit_code"])
    return 0


def run_task(task: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """The outcome of a task as JSON values: its result, or why there is none."""
    try:
        with code_from([], trust_all=bool(task["trust"])), printable_output():
            return {"result": run(task["request"])}
    except SystemExit as stop:  # of custom code
        code = stop.code if isinstance(stop.code, int) else 1
        failure = Failure("SystemExit", f"its code ended the process with exit code {code}.", code or 1)
    except (Exception, KeyboardInterrupt) as error:
        failure = failure_of(error)
    print(f"steepen: {failure.message}", file=sys.stderr)
    return {"failure": to_builtins(failure)}


def run_rank(file: Path) -> int:
    """Run one rank; returns the exit code of the process."""
    from steepen.distributed.monitor import report_fault

    terminate_with_parent()
    task = read_json(file)
    try:
        with code_from([], trust_all=bool(task["trust"])), printable_output():
            run_request(task["request"])
    except (Exception, KeyboardInterrupt) as error:
        failure = failure_of(error)
        report_fault(failure)
        return failure.exit_code
    return 0


def terminate_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent ends; exit if it has ended already.

    A launcher that receives SIGKILL cannot stop its runs. On Linux the kernel then sends each of them
    SIGTERM, on which training saves and stops; on other systems they train to their end, and a new launcher
    waits for them.
    """
    parent = os.environ.pop(PARENT_PID_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before prctl
        sys.exit(128 + signal.SIGTERM)


def free_resources() -> None:
    """Free what the last task left: its memory, compiled code for its shapes and signal handlers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    torch: Any = sys.modules.get("torch")
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # each run has other shapes, and a function keeps few compiled versions
    gc.collect()
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        code = run_rank(Path(sys.argv[1]))
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's teardown: a thread of torch's process group that still runs then aborts
        # the process ("terminate called without an active exception"), after the run has ended well.
        os._exit(code)
    exit_process(main())
