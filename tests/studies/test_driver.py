"""The study driver: records in order, failures, kills and stops; finished runs are never repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkedProcess, become
from run_fixtures import TRAINER, make_spec
from steepen.errors import SteepenError
from steepen.launch.base import LaunchContext
from steepen.launch.local import LocalLauncher
from steepen.requests.registry import VERBS, Verb
from steepen.requests.request import Request
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer
from steepen.studies.driver.drive import RunsFailed, drive
from steepen.studies.driver.journal import Journal

Spec = Callable[..., RunSpec]


Study = Generator[list[RunSpec], Any, Any]


def adaptive(spec: Spec) -> Study:
    """Two seeds, then more of them at whichever did better."""
    first = yield [spec(1), spec(2)]
    better = min(first, key=lambda record: record.validation_loss).spec.seed
    second = yield [spec(10 * better + 1), spec(10 * better), spec(better)]
    return [record.spec.seed for record in (*first, *second)]


def seeds_of(*batches: list[int], spec: Spec) -> Study:
    """Batches of seeds, whatever comes out; returns what came."""
    found: list[Any] = []
    for batch in batches:
        found += yield [spec(seed) for seed in batch]
    return found


def test_a_study_gets_its_records_in_order_until_it_returns(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    answer = drive(adaptive(spec), store, instant)
    better = answer[-1]
    assert answer == [1, 2, 10 * better + 1, 10 * better, better]
    assert instant.ran == [1, 2, 10 * better + 1, 10 * better], "a finished run was launched again"
    # The second time everything comes from the store.
    instant.ran.clear()
    assert drive(adaptive(spec), store, instant) == answer and instant.ran == []


def test_runs_that_are_no_fair_ones_are_noted_in_the_answer(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    def study() -> Study:
        one = spec(1)
        fair, short = (
            replace(one, hyperparameters=replace(one.hyperparameters, warmup_steps=steps))
            for steps in (0, one.steps)
        )
        yield [fair, short]
        return Answer("own", "?", "", (), {}, warnings=("first",))

    first, noted = drive(study(), store, instant).warnings
    assert first == "first" and "no more than the" in noted and noted.count("(") == 2


def test_a_spec_repeated_in_a_batch_runs_once(instant: Any, store: RunStore, spec: Spec) -> None:
    found = drive(seeds_of([1, 2, 1], spec=spec), store, instant)
    assert [record.spec.seed for record in found] == [1, 2, 1] and instant.ran == [1, 2]


def test_a_failed_run_raises_after_the_others_have_finished(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path, "s", {}, store.root)
    with pytest.raises(RunsFailed) as error:
        drive(seeds_of([13, 1, 14, 2], spec=spec), store, instant, journal=journal)
    assert instant.ran == [13, 1, 14, 2] and store.record(spec(2)) is not None
    sentence = str(error.value)
    assert spec(13).hash in sentence and "Diverged" in sentence and "1 more" in sentence
    assert Journal.read(tmp_path / "s").live_status == "failed"


def test_an_answer_stays_until_its_successor_is_written(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    def read() -> Any:
        return Journal.read(tmp_path / "s").entry

    drive(seeds_of([1, 2], spec=spec), store, instant, journal=Journal.open(tmp_path, "s", {}, store.root))
    first = read()
    assert first.answer is not None and first.status == "finished"

    def stopped() -> Study:
        seen = read()
        assert (seen.status, seen.answer, seen.runs) == ("running", first.answer, first.runs)
        yield [spec(2), spec(3)]
        assert [asked.seed for asked in read().runs] == [2, 3, 1]  # none is an orphan meanwhile
        raise KeyboardInterrupt

    with pytest.raises(SteepenError, match="stopped by Ctrl-C"):
        drive(stopped(), store, instant, journal=Journal.open(tmp_path, "s", {}, store.root))
    assert read().answer == first.answer and read().status == "stopped"
    drive(seeds_of([3], spec=spec), store, instant, journal=Journal.open(tmp_path, "s", {}, store.root))
    assert [asked.seed for asked in read().runs] == [3] and read().answer != first.answer


def test_a_second_driver_does_not_erase_the_answer_of_the_first(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    late = Journal.open(tmp_path, "s", {}, store.root)
    with late.driving():
        drive(seeds_of([1], spec=spec), store, instant, journal=Journal.open(tmp_path, "s", {}, store.root))
        answer = Journal.read(tmp_path / "s").entry.answer
        late.add_batch([spec(1)])
        assert answer is not None and Journal.read(tmp_path / "s").entry.answer == answer


def test_accept_diverged_gives_none_and_other_failures_still_raise(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    found = drive(seeds_of([13, 1], spec=spec), store, instant, accept_diverged=True)
    assert found[0] is None and found[1].spec.seed == 1
    with pytest.raises(RunsFailed, match="OutOfMemory"):
        drive(seeds_of([14], spec=spec), store, instant, accept_diverged=True)


def test_a_diverged_run_is_retrained_only_with_retry_diverged(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    for retry, launched in ((False, [13]), (False, [13]), (True, [13, 13])):
        with pytest.raises(RunsFailed):
            drive(seeds_of([13], spec=spec), store, instant, retry_diverged=retry)
        assert instant.ran == launched


def four_runs() -> Generator[list[RunSpec], list[RunRecord], list[float]]:
    """Three runs, and a fourth that depends on what they gave."""
    first = yield [make_spec(seed, steps=12) for seed in (1, 2, 3)]
    second = yield [make_spec(round(sum(r.validation_loss for r in first) * 1000), steps=12)]
    return [r.validation_loss for r in (*first, *second)]


@dataclass(frozen=True)
class Go(Request[None]):
    """Drive the study in the current directory."""

    def run(self) -> None:
        root = Path.cwd()
        store = RunStore(root / "runs")
        journal = Journal.open(root / "studies", "s", {}, store.root)
        launcher = LocalLauncher(LaunchContext(root, store, program=(str(TRAINER),)), 2)
        drive(four_runs(), store, launcher, journal=journal)  # pyright: ignore[reportArgumentType]


def start_driver(root: Path) -> ForkedProcess:
    """The command of a study, in a forked process; what it says is in `root`/said.txt."""
    root.mkdir(exist_ok=True)
    process = ForkedProcess(os.fork())
    if not process.pid:
        os.chdir(root)
        sys.modules["steepen.requests.go"] = sys.modules[__name__]
        VERBS["go"] = Verb("go", "go:Go", "")
        become(["go"], {}, str(root / "said.txt"))
    return process


def losses(root: Path) -> dict[str, float]:
    files = (root / "runs").glob("*/record.json")
    records = [RunRecord.from_dict(json.loads(file.read_text())) for file in files]
    return {record.run: record.validation_loss for record in records}


def test_a_study_killed_at_random_moments_gives_the_same_answer(tmp_path: Path) -> None:
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    begun = time.monotonic()
    assert start_driver(calm).wait() == 0
    undisturbed = time.monotonic() - begun
    draw = random.Random(time.time_ns())
    kills = 0
    while kills < 10 and not losses(wild).keys() >= losses(calm).keys():
        driver = start_driver(wild)
        time.sleep(draw.uniform(0.1, 0.6) * undisturbed)
        if draw.random() < 0.5:  # a worker, which the driver should survive
            for lock in (wild / "runs").glob("*/lock"):
                kill_holder(lock)
            time.sleep(draw.uniform(0.0, 0.3))
        driver.kill()
        driver.wait()
        kills += 1
    assert start_driver(wild).wait() == 0, (wild / "said.txt").read_text()
    assert losses(wild) == losses(calm) and len(losses(calm)) == 4
    answers = [Journal.read(root / "studies" / "s").entry.answer for root in (calm, wild)]
    assert answers[0] == answers[1] and answers[0] is not None
    assert kills >= 2


def kill_holder(lock: Path) -> None:
    """SIGKILL the fake trainer that holds the lock of a run."""
    words = lock.read_text().split()
    if len(words) < 2:
        return
    command = Path(f"/proc/{words[1]}/cmdline")
    if command.exists() and b"fake_trainer" in command.read_bytes():
        os.kill(int(words[1]), signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_study_saves_its_runs(number: int, code: int, tmp_path: Path) -> None:
    driver = start_driver(tmp_path)
    deadline = time.monotonic() + 20
    while not list((tmp_path / "runs").glob("*/checkpoints/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(number)
    assert driver.wait(20) == code
    said = (tmp_path / "said.txt").read_text()
    assert said.count("\n") == 1 and "Traceback" not in said
    store = RunStore(tmp_path / "runs")
    statuses = {row.status for row in store.rows()}
    assert "running" not in statuses and "failed" not in statuses
    assert Journal.read(tmp_path / "studies" / "s").live_status == "stopped"
