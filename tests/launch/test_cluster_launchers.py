"""The same specs give the same results on every launcher, trained for real, a worker killed in mid-run."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from listeners import listeners
from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.launch.base import LaunchContext, Outcome, make_launcher
from steepen.launch.cost_estimate import GpusPerRun
from steepen.launch.ray import RayLauncher
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory, RunStore
from steepen.studies.driver.drive import drive

Spec = Callable[..., RunSpec]
needs_ray, needs_submitit = (
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("ray", "submitit")
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = ["law", "loss", "scale", "depth", "token", "model", "falls", "grows", "over", "under"]
    draw = random.Random(1)
    text = "<|endoftext|>".join(" ".join(draw.choices(words, k=50)) for _ in range(300))
    (folder / "text.txt").write_text(text)
    prepare(
        PrepareRequest((str(folder / "text.txt"),), tokenizer="bpe:300", val_tokens=1_000), folder / "out"
    )
    return folder / "out"


@pytest.fixture(scope="module")
def specs(data: Path, spec: Spec) -> list[RunSpec]:
    identity = Dataset.open(data).identity
    return [spec(seed, arm="untied-grow", steps=40, identity=identity) for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(data: Path, specs: list[RunSpec], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses as the local launcher finds them."""
    context = LaunchContext(data, RunStore(tmp_path_factory.mktemp("local")), {"device": "cpu"})
    bad = replace(specs[0], data=replace(specs[0].data, identity="another"))
    found = {
        outcome.spec: outcome for outcome in make_launcher("local", context, 2, []).launch([bad, *specs])
    }
    rejected = found[bad].failure
    assert rejected is not None and rejected.kind == "UsageError" and "asks for data" in rejected.message
    records = [found[spec].record for spec in specs]
    assert all(record is not None for record in records)
    assert all(record.flops == pytest.approx(expected_flops(record.spec)) for record in records if record)
    return {record.spec.seed: record.validation_loss for record in records if record}


class Killer(threading.Thread):
    """Kills the worker of a run as soon as it has saved something."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(daemon=True)
        self.run_directory = run
        self.killed: int | None = None

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.run_directory.checkpoints.exists() and self.run_directory.busy():
                trainer = self.run_directory.lock_file.read_text().split()[1]
                status = Path(f"/proc/{trainer}/stat").read_text()
                self.killed = int(status.rpartition(")")[2].split()[1])
                os.kill(self.killed, signal.SIGKILL)
                return
            time.sleep(0.002)


def check(outcomes: list[Outcome], expected: dict[int, float]) -> None:
    found = {outcome.spec.seed: outcome for outcome in outcomes}
    assert {seed: one.failure for seed, one in found.items() if one.failure} == {}
    losses = {seed: one.record.validation_loss for seed, one in found.items() if one.record}
    assert losses == expected
    assert found[1].retries == 1, "the killed worker was not noticed"
    assert found[1].record is not None and found[1].record.resumed == 1


@needs_ray
def test_ray_gives_the_same_results_though_a_worker_is_killed(
    data: Path, specs: list[RunSpec], expected: dict[int, float], tmp_path: Path
) -> None:
    context = LaunchContext(data, RunStore(tmp_path / "runs"), {"device": "cpu"})
    launcher = make_launcher("ray", context, 2, [])
    assert isinstance(launcher, RayLauncher)
    killer = Killer(context.store.run(specs[0]))
    killer.start()
    before_ray = listeners(os.getpid())
    try:
        check(list(launcher.launch(specs)), expected)
        assert killer.killed
        started = listeners(os.getpid()) - before_ray
        assert {"gcs_server", "raylet"} <= {one.process for one in started}
        assert not [one for one in started if not one.is_local]
        # Nothing finished is repeated, by whatever launcher.
        before = context.store.run(specs[1]).record_file.stat()
        (again,) = make_launcher("local", context, 1, []).launch([specs[1]])
        assert again.record is not None and context.store.run(specs[1]).record_file.stat() == before
    finally:
        launcher.close()


@needs_submitit
def test_submitit_gives_the_same_results_though_a_worker_is_killed(
    data: Path,
    specs: list[RunSpec],
    expected: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steepen.launch.slurm.RESULT_SECONDS", 1.0)
    context = LaunchContext(data, RunStore(tmp_path / "runs"), {"device": "cpu"})
    killer = Killer(context.store.run(specs[0]))
    killer.start()
    check(list(make_launcher("slurm", context, 2, ["cluster=local"]).launch(specs)), expected)
    assert killer.killed


@pytest.fixture(scope="module")
def branches(data: Path, spec: Spec) -> list[RunSpec]:
    """Runs of three lengths that share their first steps."""
    base = spec(7, arm="vanilla", steps=24, identity=Dataset.open(data).identity)
    text = replace(base.data, pool_tokens=6_500)
    hyper = replace(base.hyperparameters, warmdown_fraction=0.3, warmup_steps=1)
    return [replace(base, steps=steps, data=text, hyperparameters=hyper) for steps in (16, 20, 24)]


@pytest.fixture(scope="module")
def separate(data: Path, branches: list[RunSpec], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Their losses if each is trained alone."""
    found: list[float] = []
    for one in branches:
        context = LaunchContext(data, RunStore(tmp_path_factory.mktemp("alone")), {"device": "cpu"})
        (record,) = drive(sweep([one]), context.store, make_launcher("local", context, 1, []))
        assert record.trunk_steps == 0
        found.append(record.validation_loss)
    return found


def sweep(specs: Sequence[RunSpec]) -> Generator[Sequence[RunSpec], Any, list[RunRecord]]:
    return (yield specs)


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        pytest.param("ray", [], marks=needs_ray),
        pytest.param("slurm", ["cluster=local"], marks=needs_submitit),
        pytest.param("slurm", ["cluster=local", "runs_per_job=1"], marks=needs_submitit),
    ],
)
def test_branches_start_from_the_trunk_on_a_cluster_though_its_worker_is_killed(
    launcher: str,
    options: list[str],
    data: Path,
    branches: list[RunSpec],
    separate: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest run is made first, wherever it runs; the others go on from its checkpoints."""
    monkeypatch.setattr("steepen.launch.slurm.RESULT_SECONDS", 1.0)
    context = LaunchContext(data, RunStore(tmp_path / "runs"), {"device": "cpu"})
    killer = Killer(context.store.run(branches[-1]))
    killer.start()
    chosen = make_launcher(launcher, context, 2, options)
    try:
        records = drive(sweep(branches), context.store, chosen)
    finally:
        if isinstance(chosen, RayLauncher):
            chosen.close()
    assert killer.killed
    assert [record.validation_loss for record in records] == separate
    first, second, last = records
    assert (last.trunk, last.resumed) == ("", 1)
    assert first.trunk_steps == branches[0].branch_point > 0 < second.trunk_steps == branches[1].branch_point
    assert sum(record.spent_flops for record in records) < 0.6 * sum(record.flops for record in records)
    assert not any((tmp_path / "runs" / ".trunks").iterdir()), "nothing waits for the trunk any more"


@needs_ray
def test_ray_reserves_the_gpus_of_a_run_together_on_one_node_or_several(
    data: Path, specs: list[RunSpec], expected: dict[int, float], tmp_path: Path
) -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        found: set[str] = set()
        for on_node, strategy in ((2, "STRICT_PACK"), (1, "STRICT_SPREAD")):
            context = LaunchContext(
                data,
                RunStore(tmp_path / f"runs-{on_node}"),
                {"device": "cpu", "micro_batch": 1},
                gpus_per_run=GpusPerRun(2),
            )
            options = [f"address={cluster.address}", f"max_gpus_per_node={on_node}", "num_gpus=0"]
            launcher = make_launcher("ray", context, 1, options)
            assert isinstance(launcher, RayLauncher)
            (outcome,) = launcher.launch(specs[:1])
            assert outcome.record is not None, outcome.failure
            assert outcome.record.hardware["ranks"] == 2
            assert outcome.record.validation_loss == pytest.approx(expected[1], abs=1e-4)
            (name,) = placement_group_table().keys() - found
            group = placement_group_table()[name]
            found.add(name)
            assert group["strategy"] == strategy
            assert [bundle["CPU"] for bundle in group["bundles"].values()] == [on_node] * (2 // on_node)
            assert group["state"] == "REMOVED"  # its resources are free again
        # Runs on one GPU follow each other in one process of a Ray worker.
        context = LaunchContext(data, RunStore(tmp_path / "runs"), {"device": "cpu"})
        short = [replace(specs[0], seed=seed, steps=4) for seed in (3, 4)]
        launcher = make_launcher("ray", context, 1, [f"address={cluster.address}", "num_gpus=0"])
        assert [outcome.failure for outcome in launcher.launch(short)] == [None, None]
        assert len({context.store.run(one).lock_file.read_text().split()[1] for one in short}) == 1
    finally:
        ray.shutdown()
        cluster.shutdown()


@needs_submitit
def test_a_slurm_job_makes_several_runs_in_one_process(
    data: Path, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.launch.slurm.RESULT_SECONDS", 1.0)
    identity = Dataset.open(data).identity
    made = [spec(seed, arm="vanilla", steps=4, identity=identity) for seed in range(4)]
    wrong = replace(made[1], data=replace(made[1].data, identity="another"))
    context = LaunchContext(data, RunStore(tmp_path / "runs"), {"device": "cpu"})
    launcher = make_launcher("slurm", context, 1, ["cluster=local", "runs_per_job=5"])
    outcomes = {outcome.spec: outcome for outcome in launcher.launch([made[0], wrong, *made[1:]])}
    assert [outcomes[one].failure for one in made] == [None] * 4
    refused = outcomes[wrong].failure
    assert refused is not None and "asks for data" in refused.message
    # One job made all five, and the failed run cost its worker process only.
    assert len(list((tmp_path / "runs" / ".slurm").glob("[0-9]*"))) == 1
    trainers = [context.store.run(one).lock_file.read_text().split()[1] for one in made]
    assert trainers[0] != trainers[1] and len(set(trainers[1:])) == 1


@needs_submitit
def test_results_of_slurm_jobs_are_never_unpickled(
    data: Path, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import submitit.core.core

    def refuse(*arguments: object) -> None:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(submitit.core.core.utils, "pickle_load", refuse)
    context = LaunchContext(data, RunStore(tmp_path / "runs"), {"device": "cpu"})
    short = spec(3, steps=2, identity=Dataset.open(data).identity)
    (outcome,) = make_launcher("slurm", context, 1, ["cluster=local"]).launch([short])
    assert outcome.record is not None
