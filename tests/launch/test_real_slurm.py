"""Jobs of a real Slurm, without accounting, on this machine: finished, cancelled, preempted, stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from local_slurm import local_slurm, missing
from steepen.launch.base import LaunchContext, make_launcher
from steepen.launch.worker import python_path
from steepen.runs.spec import RunSpec
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("slurm"),  # one daemon of each kind
]


@pytest.fixture(scope="module")
def daemons() -> Generator[dict[str, str]]:
    folder = Path(tempfile.mkdtemp(prefix="steepen-slurm-"))  # short: the path of a socket has a limit
    try:
        with local_slurm(folder) as environment:
            yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(daemons: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    for name, value in daemons.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("steepen.launch.slurm.QUEUE_SECONDS", 0.5)
    monkeypatch.setattr("steepen.launch.slurm.RESULT_SECONDS", 1.0)
    yield
    subprocess.run(["scancel", "--user=root", "--full", "--signal=KILL"], check=False, capture_output=True)
    wait_until(lambda: queue() == [])


def queue(*words: str) -> list[str]:
    """The jobs that have not ended."""
    words = ("squeue", "-h", "-r", "-o", "%i", *words)
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()


def wait_until(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def launch(context: LaunchContext, *specs: RunSpec, jobs: int = 2) -> Generator[Any]:
    return make_launcher("slurm", context, jobs, []).launch(specs)


def test_jobs_of_sbatch_make_the_runs(slurm: None, context: LaunchContext, spec: Spec, trainer: Any) -> None:
    specs = [spec(1), spec(2), spec(3), spec(13)]
    outcomes = {outcome.spec.seed: outcome for outcome in launch(context, *specs)}
    for seed in (1, 2, 3):
        expected = trainer.record_of(spec(seed)).validation_loss
        assert outcomes[seed].record.validation_loss == pytest.approx(expected)
    assert outcomes[13].failure.kind == "Diverged"
    folder = context.store.root / ".slurm"
    assert folder.stat().st_mode & 0o077 == 0  # pickles of submitit: nobody else may put one there


def lose(job: str) -> None:
    """End every process of a job at once, as a node that fails does."""
    mark = f"SLURM_JOB_ID={job}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def cancel(job: str) -> None:
    """Slurm sends SIGTERM, on which the run saves, and later SIGKILL."""
    subprocess.run(["scancel", job], check=True)


def preempt(job: str) -> None:
    """Send the signal that comes before a time limit or a preemption: the job saves and is requeued."""
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    wait_until(lambda: queue("--states=PENDING") == [job])
    # Slurm would let it wait for two minutes; within the second of its end it refuses to start it again.
    time.sleep(2)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)


@pytest.mark.parametrize(("disturb", "jobs"), [(lose, 2), (cancel, 2), (preempt, 1)])
def test_a_job_that_is_lost_or_preempted_goes_on(
    disturb: Callable[[str], None], jobs: int, slurm: None, context: LaunchContext, spec: Spec, trainer: Any
) -> None:
    long = spec(5, steps=400)

    def act() -> None:
        wait_until(lambda: context.store.run(long).saved_step() >= 3)
        (job,) = queue()
        disturb(job)

    thread = threading.Thread(target=act)
    thread.start()
    (outcome,) = launch(context, long, jobs=1)
    thread.join()
    assert outcome.failure is None and outcome.record.resumed == 1 and outcome.retries == jobs - 1
    assert outcome.record.validation_loss == pytest.approx(trainer.record_of(long).validation_loss)
    folders = [path for path in (context.store.root / ".slurm").iterdir() if path.is_dir()]
    assert len(folders) == jobs  # one of its own for each job; a preempted one keeps it


LAUNCHER = """
import sys
from pathlib import Path
from steepen.launch.base import LaunchContext
from steepen.launch.base import make_launcher
from steepen.runs.spec import read_spec
from steepen.runs.store import RunStore

data, runs, program, *specs = sys.argv[1:]
context = LaunchContext(Path(data), RunStore(Path(runs)), program=(program,))
list(make_launcher("slurm", context, 2, []).launch(map(read_spec, map(Path, specs))))
"""


def test_a_launcher_that_is_stopped_cancels_its_jobs_and_the_runs_save(
    slurm: None, context: LaunchContext, spec: Spec
) -> None:
    specs = [spec(6, steps=2000), spec(7, steps=2000)]
    files = [context.data / f"{one.seed}.json" for one in specs]
    for one, file in zip(specs, files, strict=True):
        write_json(file, one.to_dict())
    words = [sys.executable, "-c", LAUNCHER, context.data, context.store.root, context.program[0], *files]
    with subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": python_path()}, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(lambda: all(context.store.run(one).saved_step() >= 3 for one in specs))
        assert len(queue()) == 2
        process.send_signal(signal.SIGINT)
        process.wait(60)
    wait_until(lambda: queue() == [])
    for one in specs:
        run = context.store.run(one)
        assert not run.busy() and not run.record_file.exists() and 3 <= run.saved_step() < 2000
