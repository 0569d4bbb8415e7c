"""Train runs one after another in this process (`python -m steepen.launch.worker_process`).

A run in a process of its own pays for imports, the GPU's context and the loading of kernels, which takes
longer than a small run trains. A worker process pays once.

Standard input carries one JSON object per run: `program` (arguments of the Python interpreter), `arguments`
of that program, and the `log` file that receives its output. The worker answers with the line "done" on its
original standard output when a run has exited with 0, and waits for the next. Any other exit code becomes
the worker's own, so what a failure left behind (a CUDA error, exhausted memory, changed globals) cannot
reach another run. End of input ends the worker.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from typing import Any

from steepen.launch.subprocess_entry import terminate_with_parent
from steepen.utils.files import open_without_links

DONE = b"done\n"


def run_program(program: list[str], arguments: list[str]) -> int:
    """Run a Python program as `python *program *arguments` would, in this process; returns its exit code."""
    before = sys.argv
    try:
        if program[0] == "-m":
            sys.argv = [program[1], *program[2:], *arguments]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*program, *arguments]
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0


def free_resources() -> None:
    """Free what the last run left: its memory, compiled code for its shapes and signal handlers."""
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


def main() -> int:
    """Train runs until standard input ends or a run fails; returns the exit code of the process."""
    terminate_with_parent()
    # Before a time limit or a preemption Slurm signals every process of a job: the job sends SIGTERM here.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    for line in sys.stdin:
        request = json.loads(line)
        log = open_without_links(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code = run_program(request["program"], request["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        if code != 0:
            return code
        free_resources()
        os.write(answers, DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
