"""The local launcher: retries, failures, waiting, stopping, GPUs and threads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from steepen.launch import local as local_module
from steepen.launch.base import MAX_RETRIES_WITHOUT_PROGRESS, Job, LaunchContext, Outcome
from steepen.launch.local import CONTROL, PIPE_VARIABLE, LocalLauncher, MultiProcessService
from steepen.launch.worker import Worker, python_path
from steepen.runs.spec import RunSpec
from steepen.utils.files import GPU_LOCKS_VARIABLE, RUNS_PER_GPU_VARIABLE

Spec = Callable[..., RunSpec]


def by_seed(outcomes: Iterator[Outcome]) -> dict[int, Outcome]:
    return {outcome.spec.seed: outcome for outcome in outcomes}


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_failed_run_is_reported_and_the_others_finish(
    local: LocalLauncher, spec: Spec, trainer: ModuleType
) -> None:
    found = by_seed(local.launch([spec(13), spec(99), spec(50), spec(1), spec(2)]))
    assert set(found) == {13, 99, 50, 1, 2}
    for seed in (1, 2, 50):
        record = found[seed].record
        assert record is not None and found[seed].failure is None
        assert record.validation_loss == trainer.record_of(spec(seed)).validation_loss
    # Diverging again would be the same: it is not tried again.
    diverged = found[13].failure
    assert diverged is not None and (diverged.kind, diverged.message) == ("Diverged", trainer.DIVERGED)
    assert found[13].retries == 0
    # Killed half-way, once: it goes on from what it had saved.
    assert found[50].retries == 1 and found[50].record is not None and found[50].record.resumed == 1
    # Killed at every start: given up after the retries that could have helped.
    killed = found[99].failure
    assert killed is not None and killed.kind == "Killed" and "SIGKILL" in killed.message
    assert found[99].retries == MAX_RETRIES_WITHOUT_PROGRESS


def test_a_usage_error_of_the_training_process_is_reported_and_not_retried(
    context: LaunchContext, spec: Spec
) -> None:
    launcher = LocalLauncher(replace(context, options={"no_such_field": 1}), 1)
    (outcome,) = launcher.launch([spec(1)])
    assert outcome.failure is not None and outcome.failure.kind == "UsageError"
    assert "no_such_field" in outcome.failure.message and outcome.retries == 0


def test_a_run_with_a_usage_error_is_listed_as_failed_until_it_is_trained(
    context: LaunchContext, spec: Spec
) -> None:
    launcher = LocalLauncher(replace(context, options={"no_such_field": 1}), 1)
    assert [outcome.failure is None for outcome in launcher.launch([spec(1), spec(2)])] == [False, False]
    rows = [row for row in context.store.rows() if row.status == "failed"]
    assert sorted(row.seed for row in rows) == [1, 2]
    assert all("UsageError: " in row.cause and "no_such_field" in row.cause for row in rows)
    list(LocalLauncher(context, 1).launch([spec(1)]))
    assert [row.seed for row in context.store.rows() if row.status == "failed"] == [2]


def test_a_usage_error_does_not_overwrite_the_failure_file_of_a_diverged_run(
    context: LaunchContext, spec: Spec
) -> None:
    run = context.store.run(spec(1))
    run.path.mkdir(parents=True)
    run.failure_file.write_text('{"kind": "Diverged", "message": "long ago."}')
    list(LocalLauncher(replace(context, options={"no_such_field": 1}), 1).launch([spec(1)]))
    assert run.failure() == ("Diverged", "long ago.")


def test_an_old_failure_file_is_not_reported_as_the_cause_of_a_new_failure(
    context: LaunchContext, spec: Spec
) -> None:
    run = context.store.run(spec(1))
    run.path.mkdir(parents=True)
    run.failure_file.write_text('{"kind": "Diverged", "message": "long ago."}')
    launcher = LocalLauncher(replace(context, options={"no_such_field": 1}), 1)
    (outcome,) = launcher.launch([spec(1)])
    assert outcome.failure is not None and outcome.failure.kind == "UsageError"


def test_two_launchers_on_one_directory_train_every_run_once(context: LaunchContext, spec: Spec) -> None:
    specs = [spec(seed) for seed in range(4)]
    found: list[dict[int, Outcome]] = []
    # Each in the main thread of a process would be the same; threads are quicker to start.
    threads = [
        threading.Thread(target=lambda: found.append(by_seed(LocalLauncher(context, 2).launch(specs))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(outcome.record is not None for one in found for outcome in one.values())
    for one in specs:
        assert (context.store.run(one).path / "trained.txt").read_text() == "once\n"


def test_the_launcher_waits_for_a_run_that_another_process_trains(
    local: LocalLauncher, spec: Spec, trainer: ModuleType
) -> None:
    wanted = spec(1)
    run = local.context.store.run(wanted)
    outcomes: list[Outcome] = []
    with run.lock():
        thread = threading.Thread(target=lambda: outcomes.extend(local.launch([wanted])))
        thread.start()
        wait_for((run.path / "log.txt").exists)
        time.sleep(0.5)
        assert not outcomes and not run.checkpoints.exists()
    thread.join()
    assert outcomes[0].record is not None and outcomes[0].retries == 0


def test_specs_are_consumed_only_when_a_slot_is_free(context: LaunchContext, spec: Spec) -> None:
    drawn: list[int] = []

    def supply() -> Iterator[RunSpec]:
        for seed in range(3):
            drawn.append(seed)
            yield spec(seed)

    outcomes = LocalLauncher(context, 1).launch(supply())
    next(outcomes)
    assert drawn == [0]
    outcomes.close()


def test_closing_the_generator_stops_runs_after_a_checkpoint(
    context: LaunchContext, spec: Spec, trainer: ModuleType
) -> None:
    slow, quick = spec(1, steps=400), spec(2)
    outcomes = LocalLauncher(context, 2).launch([slow, quick])
    next(outcomes)
    run = context.store.run(slow)
    wait_for(run.checkpoints.exists)
    outcomes.close()
    assert not run.busy() and run.record() is None and any(run.checkpoints.iterdir())


def test_stop_waits_for_the_slowest_process(context: LaunchContext, spec: Spec, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"  # the one with seed 2 takes its time to stop
    slow.write_text(
        "import os, pathlib, signal, sys, time\n"
        "from steepen.requests import worker\n"
        "def run(request):\n"
        "    wait = 0.6 if request['spec']['seed'] == 2 else 0\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(wait), os._exit(143)))\n"
        "    (pathlib.Path(request['runs']) / f'ready{request[\"spec\"][\"seed\"]}').touch()\n"
        "    time.sleep(60)\n"
        "worker.main(run)\n"
    )
    launcher = LocalLauncher(LaunchContext(context.data, context.store, program=(str(slow),)), 2)
    jobs = [Job(one, context.store.run(one)) for one in (spec(1), spec(2))]
    launcher.start(jobs)
    wait_for(lambda: all((context.store.root / f"ready{job.spec.seed}").exists() for job in jobs))
    launcher.stop(jobs)
    assert [job.handle[0].poll().failure.exit_code for job in jobs] == [143, 143]


def test_training_stops_when_its_launcher_is_killed(
    context: LaunchContext, spec: Spec, tmp_path: Path
) -> None:
    wanted = spec(1, steps=2000)
    run = context.store.run(wanted)
    code = f"from steepen.launch.worker import *; begin_task({context.task(wanted)!r}).wait()"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": python_path()})
    try:
        wait_for(run.checkpoints.exists)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not run.busy())
    assert run.record() is None


def test_each_gpu_gets_one_run_or_runs_per_gpu(
    context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("0", "H100"), ("1", "H100")])
    assert LocalLauncher(context).devices == ["0", "1"]
    assert LocalLauncher(context, runs_per_gpu=2).devices == ["0", "1", "0", "1"]
    assert LocalLauncher(context, 3).devices == ["0", "1", "0"]
    on_cpu = LaunchContext(context.data, context.store, {"device": "cpu"})
    monkeypatch.setattr(local_module, "available_cores", lambda: 8)
    assert LocalLauncher(on_cpu).devices == [None] * 8
    assert LocalLauncher(on_cpu, threads=3).slots == 2


def test_device_cuda_n_uses_only_that_gpu(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("4", "H100"), ("7", "H100")])
    launcher = LocalLauncher(LaunchContext(context.data, context.store, {"device": "cuda:1"}), 2)
    assert launcher.devices == ["7", "7"]
    assert launcher.context.task(spec(1)).request["device"] == "cuda"
    launcher = LocalLauncher(LaunchContext(context.data, context.store, {"device": "cuda"}))
    assert launcher.devices == ["4", "7"]


def test_a_training_process_sees_only_its_gpu_and_threads(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("7", "H100")])
    seen: list[dict[str, str]] = []
    start = Worker.__init__

    def note(self: Worker, environment: dict[str, str], program: tuple[str, ...]) -> None:
        seen.append(environment)
        start(self, environment, program)

    monkeypatch.setattr(Worker, "__init__", note)
    list(LocalLauncher(context, 2).launch([spec(1), spec(2)]))
    assert seen == [{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "7"}] * 2


PID_SCRIPT = """
import os, pathlib
from steepen.errors import SteepenError
from steepen.requests import worker
from steepen.runs.spec import RunSpec
def run(request):
    spec = RunSpec.from_dict(request['spec'])
    (pathlib.Path(request['runs']) / spec.hash / 'pid').write_text(str(os.getpid()))
    print('seed', spec.seed)
    if spec.seed == 13:
        raise SteepenError('it fails.')
worker.main(run)
"""


def pids(launcher: LocalLauncher, specs: list[RunSpec]) -> list[int]:
    list(launcher.launch(specs))
    return [int((launcher.context.store.run(one).path / "pid").read_text()) for one in specs]


@pytest.fixture
def in_turn(context: LaunchContext, tmp_path: Path) -> Iterator[LocalLauncher]:
    """A launcher of one run at a time, whose runs write down the process that they ran in."""
    script = tmp_path / "pid.py"
    script.write_text(PID_SCRIPT)
    launcher = LocalLauncher(LaunchContext(context.data, context.store, program=(str(script),)), 1)
    yield launcher
    launcher.close()


def test_runs_share_a_process_until_one_fails(in_turn: LocalLauncher, spec: Spec) -> None:
    first, second, failed, after = pids(in_turn, [spec(1), spec(2), spec(13), spec(3)])
    assert first == second == failed != after
    # Also from one batch of runs to the next.
    assert pids(in_turn, [spec(4)]) == [after]


def test_each_run_of_a_shared_process_has_its_own_log(in_turn: LocalLauncher, spec: Spec) -> None:
    pids(in_turn, [spec(1), spec(2)])
    for seed in (1, 2):
        log = in_turn.context.store.run(spec(seed)).path / "log.txt"
        assert log.read_text() == f"seed {seed}\n"


def test_changed_custom_code_gets_a_new_process(in_turn: LocalLauncher, spec: Spec) -> None:
    found = pids(
        in_turn, [spec(1), spec(2, code="a" * 64), spec(3), spec(4, code="a" * 64), spec(5, code="b" * 64)]
    )
    assert found[0] == found[1] == found[2] == found[3] != found[4]


def test_an_idle_worker_that_dies_is_replaced(in_turn: LocalLauncher, spec: Spec) -> None:
    (first,) = pids(in_turn, [spec(1)])
    os.kill(first, signal.SIGKILL)
    (second,) = pids(in_turn, [spec(2)])
    assert first != second


def test_close_ends_the_worker_processes(in_turn: LocalLauncher, spec: Spec) -> None:
    (pid,) = pids(in_turn, [spec(1)])
    in_turn.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_next_run_of_a_gpu_is_started_while_the_current_one_trains(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("4", "H100"), ("7", "H100")])
    launcher = LocalLauncher(context)
    assert (launcher.slots, launcher.max_started) == (2, 4)
    specs = [spec(seed) for seed in range(4)]
    jobs = [Job(one, context.store.run(one)) for one in specs]
    launcher.start(jobs)
    environments = [job.handle[0].environment for job in jobs]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["4", "7", "4", "7"]
    locks = [e[GPU_LOCKS_VARIABLE] for e in environments]
    assert locks[0] == locks[2] != locks[1] == locks[3]
    launcher.stop(jobs)
    launcher.close()


def test_a_service_for_several_processes_ends_with_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / CONTROL
    program.write_text("#!/bin/sh\necho $$ $1 > $CUDA_MPS_PIPE_DIRECTORY/said\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(PIPE_VARIABLE, raising=False)
    code = "from steepen.launch.local import MultiProcessService"
    code += "; s = MultiProcessService.start(); print(s.folder, flush=True)"
    for ending, left in (("s.stop()", False), ("import os; os.kill(os.getpid(), 9)", True)):
        command = [sys.executable, "-c", f"{code}; {ending}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        folder = Path(done.stdout.strip())
        assert folder.exists() == left, done.stderr
        if left:
            pid, word = (folder / "said").read_text().split()
            assert word == "-f"
            deadline = time.monotonic() + 10
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not Path(f"/proc/{pid}").exists()
            shutil.rmtree(folder)
    monkeypatch.setenv(PIPE_VARIABLE, "/the/users/own")
    assert not MultiProcessService.available()


class Service:
    """A multi-process service that was started and stopped so many times."""

    environment: ClassVar[dict[str, str]] = {"CUDA_MPS_PIPE_DIRECTORY": "/a/folder"}
    started = stopped = 0

    @classmethod
    def available(cls) -> bool:
        return True

    @classmethod
    def start(cls) -> Service:
        cls.started += 1
        return cls()

    def stop(self) -> None:
        type(self).stopped += 1


def test_four_runs_of_a_gpu_are_started_where_processes_can_share_it(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("4", "H100"), ("7", "H100")])
    service = type("Service", (Service,), {})
    monkeypatch.setattr(local_module, "MultiProcessService", service)
    launcher = LocalLauncher(context)
    assert (launcher.slots, launcher.max_started) == (2, 4)  # until they are known to be light
    jobs = [Job(one, context.store.run(one)) for one in (spec(0), spec(1))]
    launcher.start(jobs)
    assert launcher.max_started == 8
    monkeypatch.setattr(local_module, "is_light", lambda _: False)
    jobs.append(Job(spec(2), context.store.run(spec(2))))
    launcher.start(jobs[-1:])
    assert launcher.max_started == 4
    for job in jobs:
        environment = job.handle[0].environment
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/a/folder"
        assert environment[RUNS_PER_GPU_VARIABLE] == "4"
    launcher.stop(jobs)
    launcher.close()
    assert (service.started, service.stopped) == (1, 1)
    assert LocalLauncher(context, runs_per_gpu=1).max_started == 4  # one trains, one is set up, on each


def test_runs_that_share_a_gpu_anyway_are_not_set_up_ahead(
    context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("4", "H100")])
    assert LocalLauncher(context, runs_per_gpu=2).max_started == 2
    assert LocalLauncher(context, 3).max_started == 3
    assert LocalLauncher(context, overlap=False).max_started == 1
