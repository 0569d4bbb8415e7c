"""Run the tests that use a GPU, on a machine that has one: several pytest processes at once, one exit code.

    python tools/test_on_gpu.py [--jobs 16] [FILE_OR_FOLDER …] [-- ARGUMENTS OF PYTEST]

A test waits for the host most of the time, to compile kernels and to launch small ones, so one GPU serves
all processes. Files of many tests are run in parts. CUDA is hidden from files that fork: a process that has
used it cannot be forked. They, and `tests/model`, which computes on the CPU, run only where they are named.
Only the output of parts that fail is printed; pytest's plugins are not needed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ON_GPU = ("kernels", "execution", "optim", "training", "evaluation", "inference")
FORKING = ("distributed", "launch", "studies/test_kill_and_resume.py", "studies/test_branches.py")
FORKS = re.compile(r"^from (ranks|fork_server) import", re.MULTILINE)
# Tests of one process at most. Those of `test_export` share what takes a minute to make; torch.compile and
# references in fp64 are slow. What is named is started first.
PART = 40
PARTS = {"test_export": 1000, "test_execution_on_gpu": 15, "test_optimizer": 24, "test_triton_compilation": 1}
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|xfailed)")
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Part:
    """Every `of`-th test of a file."""

    file: str
    number: int
    of: int

    @property
    def hides_gpu(self) -> bool:
        """Whether its tests fork, or imagine GPUs of their own."""
        inside = any(self.file.startswith(f"tests/{folder}") for folder in FORKING)
        return inside or bool(FORKS.search((REPOSITORY / self.file).read_text(encoding="utf-8")))

    @property
    def name(self) -> str:
        """For people."""
        return self.file + (f", part {self.number + 1} of {self.of}" if self.of > 1 else "")


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    part: Part
    code: int
    output: str
    seconds: float

    @property
    def counts(self) -> Counter[str]:
        """Passed, failed, skipped … by pytest's last line."""
        lines = self.output.strip().splitlines() or [""]
        return Counter({word: int(number) for number, word in COUNTS.findall(lines[-1])})

    @property
    def failed(self) -> bool:
        """Whether a test failed, or pytest itself."""
        return self.code not in (0, NO_TESTS)


def pytest_process(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest here, with one thread each: as many processes run as there are cores."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, env=variables, cwd=REPOSITORY, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def collect(paths: list[str]) -> list[Part]:
    """The parts of these files and folders, the slow ones first."""
    done = pytest_process(["--collect-only", "-q", *paths])
    found = re.findall(r"^(tests/\S+\.py): (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        sys.exit(f"pytest cannot collect the tests:\n{done.stdout}")
    parts: list[Part] = []
    for file, count in found:
        of = -(-int(count) // PARTS.get(Path(file).stem, PART))
        parts += [Part(file, number, of) for number in range(of)]
    slow = list(PARTS)
    first = {part: slow.index(stem) for part in parts if (stem := Path(part.file).stem) in slow}
    return sorted(parts, key=lambda part: (first.get(part, len(slow)), -part.of, part.file))


def run(part: Part, words: list[str]) -> Outcome:
    """Run one part to its end."""
    began = time.monotonic()
    environment = {"STEEPEN_TEST_PART": f"{part.number}/{part.of}"}
    if part.hides_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = pytest_process([part.file, *words], **environment)
    return Outcome(part, done.returncode, done.stdout, time.monotonic() - began)


def show(outcome: Outcome) -> None:
    """Print a line, and all that pytest said if something failed."""
    counts = ", ".join(f"{number} {word}" for word, number in outcome.counts.items())
    gpu = ", GPU hidden" if outcome.part.hides_gpu else ""
    print(f"{outcome.seconds:6.1f} s  {outcome.part.name}: {counts}{gpu}", flush=True)
    if outcome.failed:
        print(f"{outcome.output}\n^ {outcome.part.name}, exit code {outcome.code}", flush=True)


def main() -> int:
    """Run the parts, a line for each, and print what failed; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="default: what uses the GPU")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    given = [*sys.argv[1:], "--"]
    own, words = given[: given.index("--")], given[given.index("--") + 1 : -1]
    args = parser.parse_args(own)
    began, total, failed = time.monotonic(), Counter[str](), list[Outcome]()
    with ThreadPoolExecutor(args.jobs) as pool:
        parts = collect(args.paths or [f"tests/{folder}" for folder in ON_GPU])
        parts = [part for part in parts if args.paths or not part.hides_gpu]
        pending = [pool.submit(run, part, words) for part in parts]
        try:
            for future in as_completed(pending):
                outcome = future.result()
                total += outcome.counts
                failed += [outcome] if outcome.failed else []
                show(outcome)
        except KeyboardInterrupt:  # the processes have received it too
            pool.shutdown(cancel_futures=True)
            return 130
    counts = ", ".join(f"{number} {word}" for word, number in total.items())
    print(f"{counts} in {time.monotonic() - began:.0f} s, {args.jobs} processes")
    for outcome in failed:
        print(f"FAILED {outcome.part.name}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
