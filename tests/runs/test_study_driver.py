"""The driver walks a study to its answer; what is finished stays finished, whatever stops it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from steepen.errors import UsageError
from steepen.launch.batch_progress import BatchProgress
from steepen.launch.budget import Budget, BudgetReached
from steepen.launch.cost_estimate import ASSUMED_CPU_FLOPS, Speed, makespan
from steepen.launch.worker import python_path
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import RunsFailed, drive, simulate_study
from steepen.studies.driver.dry_run import DryRunReport, study_status
from steepen.studies.driver.journal import Journal
from steepen.utils.formatting import format_duration
from steepen.utils.json_io import write_json

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


def test_a_study_is_sent_its_records_in_order_until_it_answers(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    answer = drive(adaptive(spec), store, instant)
    better = answer[-1]
    assert answer == [1, 2, 10 * better + 1, 10 * better, better]
    assert instant.ran == [1, 2, 10 * better + 1, 10 * better], "a finished run was launched again"
    # The second time everything comes from the store.
    instant.ran.clear()
    assert drive(adaptive(spec), store, instant) == answer and instant.ran == []


def test_a_spec_asked_for_twice_in_a_batch_runs_once(instant: Any, store: RunStore, spec: Spec) -> None:
    found = drive(seeds_of([1, 2, 1], spec=spec), store, instant)
    assert [record.spec.seed for record in found] == [1, 2, 1] and instant.ran == [1, 2]


def test_a_failed_run_is_one_sentence_after_the_others_are_done(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path, "s", {}, store.root)
    with pytest.raises(RunsFailed) as error:
        drive(seeds_of([13, 1, 14, 2], spec=spec), store, instant, journal=journal)
    assert instant.ran == [13, 1, 14, 2] and store.record(spec(2)) is not None
    sentence = str(error.value)
    assert spec(13).hash in sentence and "Diverged" in sentence and "1 more" in sentence
    assert Journal.read(tmp_path / "s").state == "failed"


def test_where_gaps_are_accepted_a_diverged_run_is_none_and_other_failures_still_raise(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    found = drive(seeds_of([13, 1], spec=spec), store, instant, accept_diverged=True)
    assert found[0] is None and found[1].spec.seed == 1
    with pytest.raises(RunsFailed, match="OutOfMemory"):
        drive(seeds_of([14], spec=spec), store, instant, accept_diverged=True)


def test_a_diverged_run_is_trained_again_only_when_asked(instant: Any, store: RunStore, spec: Spec) -> None:
    for retry, launched in ((False, [13]), (False, [13]), (True, [13, 13])):
        with pytest.raises(RunsFailed):
            drive(seeds_of([13], spec=spec), store, instant, retry_diverged=retry)
        assert instant.ran == launched


def test_a_flops_budget_stops_before_the_run_that_would_go_over(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    cost = expected_flops(spec(1))
    with pytest.raises(BudgetReached) as error:
        drive(seeds_of([1, 2, 3, 4], spec=spec), store, instant, budget=Budget(flops=2.5 * cost))
    assert instant.ran == [1, 2] and "2 runs are left" in str(error.value)
    assert error.value.exit_code == 3
    # What is finished costs nothing; the same call goes on.
    found = drive(seeds_of([1, 2, 3, 4], spec=spec), store, instant, budget=Budget(flops=2.5 * cost))
    assert instant.ran == [1, 2, 3, 4] and len(found) == 4


def test_a_time_budget_stops_before_the_run_that_would_go_over(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    slow = Speed((), expected_flops(spec(1)) / 100, "assumed")  # a run takes 100 s and the start
    progress = BatchProgress(store, speed=slow, quiet=True)
    with pytest.raises(BudgetReached):
        drive(seeds_of([1], spec=spec), store, instant, budget=Budget(seconds=60), progress=progress)
    assert instant.ran == []
    drive(seeds_of([1], spec=spec), store, instant, budget=Budget(seconds=600), progress=progress)
    assert instant.ran == [1]


def test_a_half_done_run_costs_a_budget_only_its_other_half(
    instant: Any, store: RunStore, spec: Spec
) -> None:
    wanted = spec(1, steps=10)
    (store.run(wanted).checkpoints / "00000006").mkdir(parents=True)
    budget = Budget(flops=0.5 * expected_flops(wanted))

    def study() -> Study:
        return (yield [wanted])

    drive(study(), store, instant, budget=budget)
    assert budget.spent == pytest.approx(0.4 * expected_flops(wanted))


def test_a_dry_run_names_the_next_runs_and_leaves_no_trace(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    first = simulate_study(adaptive(spec), store)
    assert [one.seed for one in first.batch] == [1, 2] and not first.complete
    assert sorted(tmp_path.rglob("*")) == before
    list(instant.launch(first.batch))
    second = simulate_study(adaptive(spec), store)
    assert second.finished == 2 and len(second.batch) == 2  # the third of the batch is finished
    list(instant.launch(second.batch))
    last = simulate_study(adaptive(spec), store)
    assert last.complete and last.batch == [] and last.answer == drive(adaptive(spec), store, instant)


def test_a_forecast_adds_up(instant: Any, store: RunStore, spec: Spec) -> None:
    speed = Speed.from_records([])
    assert f"{ASSUMED_CPU_FLOPS:.0e}" in speed.source
    forecast = DryRunReport.from_step(
        simulate_study(adaptive(spec), store), store, speed, 2, dollars_per_hour=3.6
    )
    assert forecast.flops == pytest.approx(2 * expected_flops(spec(1)))
    assert forecast.seconds == pytest.approx(forecast.machine_seconds / 2)
    assert forecast.dollars == pytest.approx(forecast.machine_seconds / 1000)
    assert json.loads(json.dumps(forecast.to_dict()))["flops"] == forecast.flops


def test_speed_is_measured_where_runs_have_finished_and_assumed_elsewhere(
    spec: Spec, trainer: ModuleType
) -> None:
    small, large = spec(1), spec(2, depth=6)
    slow = trainer.record_of(small, seconds_training=10.0, seconds_total=10.0)
    quick = trainer.record_of(large, seconds_training=20.0, seconds_total=20.0)
    speed = Speed.from_records([slow, slow, slow, quick, quick, quick])
    # Each size at the pace of its own kind.
    assert speed.seconds(small) == pytest.approx(10 + 5) and speed.seconds(large) == pytest.approx(20 + 5)
    assert Speed.from_records([slow], device="another machine").samples == ()
    assert "H100" in Speed.from_records([slow], gpu="h100", mfu=0.5).source
    assert Speed.from_records([], device="NVIDIA H200").assumed_flops_per_second == pytest.approx(
        0.4 * 989.4e12
    )


def test_the_journal_says_how_far_a_study_is_and_survives_its_end(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    options = {"arm": "vanilla", "grid": (1, 2)}
    cost = expected_flops(spec(1))
    with pytest.raises(BudgetReached):
        journal = Journal.open(tmp_path, "s", options, store.root)
        study = seeds_of([1, 2, 3], spec=spec)
        drive(study, store, instant, journal=journal, budget=Budget(flops=2.5 * cost))
    status = study_status(Journal.read(tmp_path / "s"))
    assert status.state == "stopped" and "budget" in status.message
    assert (status.counts["finished"], status.counts["waiting"]) == (2, 1)
    assert status.flops_done == pytest.approx(2 * cost) and status.flops_left == pytest.approx(cost)
    assert status.seconds_left == pytest.approx(2.0)  # as long as each of the others took
    journal = Journal.open(tmp_path, "s", options, store.root)
    drive(seeds_of([1, 2, 3], spec=spec), store, instant, journal=journal)
    status = study_status(Journal.read(tmp_path / "s"))
    assert status.state == "finished" and len(status.answer) == 3 and status.flops_left == 0


def test_other_options_under_the_same_name_are_refused(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    drive(seeds_of([1], spec=spec), store, instant, journal=Journal.open(tmp_path, "s", {"k": 1}, store.root))
    with pytest.raises(UsageError, match="k was 1"):
        Journal.open(tmp_path, "s", {"k": 2}, store.root)
    with pytest.raises(UsageError, match="can't be named"):
        Journal.open(tmp_path, "../s", {}, store.root)


def test_a_killed_driver_is_seen_as_killed_and_a_living_one_as_running(
    store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path, "s", {}, store.root)
    with journal.driving():
        assert Journal.read(tmp_path / "s").state == "running"
    assert Journal.read(tmp_path / "s").state == "killed"


@pytest.mark.parametrize(
    ("text", "flops", "seconds"),
    [
        ("1e15", 1e15, None),
        ("30m", None, 1800),
        ("1h30m", None, 5400),
        ("90 s", None, 90),
        ("2d", None, 172800),
    ],
)
def test_budgets_are_flops_or_time(text: str, flops: float | None, seconds: float | None) -> None:
    budget = Budget.parse(text)
    assert (budget.flops, budget.seconds) == (flops, seconds)


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "nan", "inf", "30x", "m"])
def test_a_budget_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        Budget.parse(text)


def test_lengths_of_time_read_well_and_queues_are_packed_in_order() -> None:
    assert [format_duration(s) for s in (0, 59, 60, 200, 7500, 90000)] == [
        "0 s", "59 s", "1 min", "3 min 20 s", "2 h 5 min", "1 d 1 h",
    ]  # fmt: skip
    assert makespan([3, 1, 1, 1], 2) == 3 and makespan([], 2) == 0 and makespan([2, 2], 1) == 4


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import TRAINER, make_spec
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.launch.base import LaunchContext
from steepen.launch.local import LocalLauncher
from steepen.runs.store import RunStore
from steepen.cli.app import main
import steepen.cli.app as app

def study():
    first = yield [make_spec(seed, steps=12) for seed in (1, 2, 3)]
    second = yield [make_spec(round(sum(r.validation_loss for r in first) * 1000), steps=12)]
    return [r.validation_loss for r in (*first, *second)]

def command():
    root = Path({root!r})
    store = RunStore(root / "runs")
    journal = Journal.open(root / "studies", "s", {{}}, store.root)
    launcher = LocalLauncher(LaunchContext(root, store, program=(str(TRAINER),)), 2)
    drive(study(), store, launcher, journal=journal)

app.app.command("go")(command)
sys.exit(main(["go"]))
"""


def start_driver(root: Path) -> subprocess.Popen[bytes]:
    code = DRIVER.format(tests=str(Path(__file__).parent), root=str(root))
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)


def losses(root: Path) -> dict[str, float]:
    files = (root / "runs").glob("*/record.json")
    records = [RunRecord.from_dict(json.loads(file.read_text())) for file in files]
    return {record.run: record.validation_loss for record in records}


def test_a_study_killed_at_random_moments_gives_the_answer_of_an_undisturbed_one(tmp_path: Path) -> None:
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
    last = start_driver(wild)
    _, said = last.communicate()
    assert last.returncode == 0, said.decode()
    assert losses(wild) == losses(calm) and len(losses(calm)) == 4
    answers = [Journal.read(root / "studies" / "s").entry.answer for root in (calm, wild)]
    assert answers[0] == answers[1] and answers[0] is not None
    assert kills >= 2


def kill_holder(lock: Path) -> None:
    """SIGKILL the stand-in that holds a run, if one does."""
    words = lock.read_text().split()
    if len(words) < 2:
        return
    command = Path(f"/proc/{words[1]}/cmdline")
    if command.exists() and b"fake_trainer" in command.read_bytes():
        os.kill(int(words[1]), signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_study_saves_its_runs_and_goes_on(number: int, code: int, tmp_path: Path) -> None:
    driver = start_driver(tmp_path)
    deadline = time.monotonic() + 20
    while not list((tmp_path / "runs").glob("*/checkpoints/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(number)
    _, said = driver.communicate(timeout=20)
    assert driver.returncode == code and said.count(b"\n") == 1 and b"Traceback" not in said
    store = RunStore(tmp_path / "runs")
    statuses = {row.status for row in store.rows()}
    assert "running" not in statuses and "failed" not in statuses
    assert Journal.read(tmp_path / "studies" / "s").state == "stopped"


def test_a_spec_that_waits_is_listed_as_waiting(store: RunStore, spec: Spec) -> None:
    write_json(store.run(spec(1)).spec_file, spec(1).to_dict())
    (row,) = store.rows()
    assert (row.status, row.flops) == ("waiting", expected_flops(spec(1)))
