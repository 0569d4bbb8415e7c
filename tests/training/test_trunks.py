"""Runs that share their first steps: each equals, to the bit, the run that trained all steps itself."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from steepen.data import Dataset
from steepen.model.stages import Stage, StageSchedule
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.runs.trunk import first_steps, share
from steepen.training import checkpoint as checkpoints
from steepen.training.run import train
from steepen.training.step_schedule import build_schedule
from steepen.training.stopping import Interrupted
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import with_checksum, write_json
from training_fixtures import QUIET, assert_same_result

MakeSpec = Callable[..., RunSpec]
WholeRun = Callable[[RunSpec], RunStore]


def sweep(
    make_spec: MakeSpec, arm: str = "operator-1", steps: tuple[int, ...] = (20, 14, 8)
) -> list[RunSpec]:
    """Runs of several lengths on one pool, with a warm-down over a quarter of each."""
    found: list[RunSpec] = []
    for count in steps:
        spec = make_spec(arm, steps=count)
        hyper = replace(spec.hyperparameters, warmdown_fraction=0.25)
        data = replace(spec.data, pool_tokens=7_000)
        found.append(replace(spec, hyperparameters=hyper, data=data))
    return found


def kept_steps(store: RunStore, spec: RunSpec) -> list[int]:
    return [saved.step for saved in checkpoints.list_checkpoints(store.run(spec).checkpoints)]


@pytest.mark.parametrize("arm", ["operator-1", "untied-grow"])
def test_a_branch_equals_the_run_trained_alone(
    arm: str, make_spec: MakeSpec, whole_run: WholeRun, tiny_data: Dataset, tmp_path: Path
) -> None:
    specs = sweep(make_spec, arm)
    together = RunStore(tmp_path / "together")
    assert share(together, specs) == specs[1:]
    points = [spec.branch_point for spec in specs]
    assert points == ([15, 10, 6] if arm == "operator-1" else [10, 7, 4])  # untied-grow: where it grows
    records = [train(spec, tiny_data, together, QUIET) for spec in specs]
    for spec in specs:
        assert_same_result(together, whole_run(spec), spec)
    first, *others = records
    assert (first.trunk, first.trunk_steps, first.spent_flops) == ("", 0, first.flops)
    for record, point in zip(others, points[1:], strict=True):
        assert (record.trunk, record.trunk_steps, record.resumed) == (first.run, point, 0)
        steps = build_schedule(record.spec).flops(256, point).total
        assert record.trunk_flops == steps and record.spent_flops == record.flops - steps
    # Nothing is kept that no run needs: the last checkpoint, and those before growth.
    growth = [] if arm == "operator-1" else [10]
    assert kept_steps(together, specs[0]) == [*growth, 20]
    assert not list((tmp_path / "together" / ".trunks").iterdir())


def test_the_trunk_keeps_its_branch_points_until_every_branch_has_finished(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    specs, store = sweep(make_spec), RunStore(tmp_path)
    share(store, specs)
    train(specs[0], tiny_data, store, QUIET)
    assert kept_steps(store, specs[0]) == [6, 10, 20]
    train(specs[1], tiny_data, store, QUIET)
    assert kept_steps(store, specs[0]) == [6, 10, 20]
    train(specs[2], tiny_data, store, QUIET)
    assert [kept_steps(store, spec) for spec in specs] == [[20], [14], [8]]


@pytest.mark.parametrize("stop", [1, 5, 8, 13])
def test_a_trunk_and_a_branch_that_were_killed_resume_to_the_same_bits(
    stop: int, make_spec: MakeSpec, whole_run: WholeRun, tiny_data: Dataset, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    specs = sweep(make_spec, "untied-grow")
    broken = RunStore(tmp_path / "broken")
    share(broken, specs)
    for spec in specs:
        with monkeypatch.context() as patch:
            interrupt_after(patch, stop)
            with contextlib.suppress(Interrupted):
                train(spec, tiny_data, broken, QUIET)
        train(spec, tiny_data, broken, QUIET)
        assert_same_result(broken, whole_run(spec), spec)
    second = broken.record(specs[1])
    assert second is not None and second.trunk == specs[0].hash and second.trunk_steps == 7


def interrupt_after(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Make the trainer see a SIGTERM after so many steps of this process."""
    from steepen.training import trainer as training_run

    original, count = training_run.Trainer._between_steps, 0  # pyright: ignore[reportPrivateUsage]

    def between(self: Any) -> None:
        nonlocal count
        count += 1
        if count == calls:
            self.stop_signals.signal = 15
        original(self)

    patch.setattr(training_run.Trainer, "_between_steps", between)


def test_without_a_valid_checkpoint_of_the_trunk_a_branch_trains_every_step(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    specs = sweep(make_spec)
    damaged, alone = RunStore(tmp_path / "damaged"), RunStore(tmp_path / "alone")
    share(damaged, specs)
    train(specs[0], tiny_data, damaged, QUIET)
    saved = checkpoints.list_checkpoints(damaged.run(specs[0]).checkpoints)
    for one in saved[:2]:  # steps 6 and 10
        (one.path / checkpoints.STATE_FILE).write_bytes(b"damaged")
    record = train(specs[1], tiny_data, damaged, QUIET)
    train(specs[1], tiny_data, alone, QUIET)
    assert_same_result(damaged, alone, specs[1])
    assert record.trunk == "" and record.spent_flops == record.flops
    assert kept_steps(damaged, specs[0]) == [6, 10, 20], "another run's checkpoints are not touched"


def forge_note(store: RunStore, spec: RunSpec, other: RunSpec, data: Dataset) -> None:
    """Train `other` with all its checkpoints, and name it alone as a run of the trunk of `spec`."""
    train(other, data, store, replace(QUIET, keep_every=1))
    notes = store.root / ".trunks" / str(spec.trunk)
    shutil.rmtree(notes)
    notes.mkdir()
    (notes / f"{spec.branch_point}-{other.hash}").touch()


def of_another_trunk(spec: RunSpec) -> RunSpec:
    return replace(spec, hyperparameters=replace(spec.hyperparameters, learning_rate=0.5))


def branching_off_earlier(spec: RunSpec) -> RunSpec:
    return replace(spec, hyperparameters=replace(spec.hyperparameters, warmdown_fraction=0.9))


@pytest.mark.parametrize("change", [of_another_trunk, branching_off_earlier])
def test_a_note_of_a_run_that_takes_other_steps_is_not_believed(
    change: Callable[[RunSpec], RunSpec], make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    specs = sweep(make_spec)
    noted, alone = RunStore(tmp_path / "noted"), RunStore(tmp_path / "alone")
    share(noted, specs)
    forge_note(noted, specs[1], change(specs[0]), tiny_data)
    record = train(specs[1], tiny_data, noted, QUIET)
    train(specs[1], tiny_data, alone, QUIET)
    assert_same_result(noted, alone, specs[1])
    assert record.trunk == ""


def test_only_what_was_kept_for_the_trunk_is_deleted_with_it(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    specs, store = sweep(make_spec), RunStore(tmp_path)
    share(store, specs)
    other = of_another_trunk(specs[0])
    for spec in (specs[0], specs[1], other):
        train(spec, tiny_data, store, replace(QUIET, keep_every=3))
    assert kept_steps(store, specs[0]) == [3, 6, 9, 10, 12, 15, 18, 20]
    (tmp_path / ".trunks" / str(specs[0].trunk) / f"3-{other.hash}").touch()
    before = kept_steps(store, other)
    train(specs[2], tiny_data, store, QUIET)  # without keep_every, as a later command may be
    assert kept_steps(store, specs[0]) == [3, 9, 12, 15, 18, 20] and kept_steps(store, other) == before


def without_optimizer(store: RunStore, spec: RunSpec) -> None:
    """What `import` makes of a run."""
    for saved in checkpoints.list_checkpoints(store.run(spec).checkpoints):
        file = saved.path / checkpoints.STATE_FILE
        save_file({key: value for key, value in load_file(file).items() if "optimizer" not in key}, file)
        metadata = {**saved.metadata(), "files": {file.name: sha256_of_file(file)}}
        write_json(saved.path / checkpoints.META_FILE, with_checksum(metadata))


def with_a_pipe_for_metrics(store: RunStore, spec: RunSpec) -> None:
    store.run(spec).metrics_file.unlink()
    os.mkfifo(store.run(spec).metrics_file)


@pytest.mark.parametrize(("damage", "trunk_steps"), [(without_optimizer, 0), (with_a_pipe_for_metrics, 10)])
def test_damage_of_the_run_that_trained_the_trunk_stops_no_other(
    damage: Callable[[RunStore, RunSpec], None], trunk_steps: int,
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path,
) -> None:  # fmt: skip
    specs = sweep(make_spec)
    damaged, alone = RunStore(tmp_path / "damaged"), RunStore(tmp_path / "alone")
    share(damaged, specs)
    train(specs[0], tiny_data, damaged, QUIET)
    damage(damaged, specs[0])
    record = train(specs[1], tiny_data, damaged, QUIET)
    expected = train(specs[1], tiny_data, alone, QUIET)
    assert (record.validation_loss, record.trunk_steps) == (expected.validation_loss, trunk_steps)


def test_the_schedule_before_the_branch_point_does_not_depend_on_what_follows(make_spec: MakeSpec) -> None:
    """Rows of two runs of one trunk are equal up to the earlier branch point, and the batches with them."""
    checked = 0
    for arm in ("vanilla", "operator-1", "untied-grow", "loop-grow"):
        for name in ("wsd", "linear", "cosine"):
            for to_zero in (True, False):
                for fraction in (0.0, 0.1, 0.5, 0.9, 1.0):
                    base = make_spec(arm, steps=30)
                    schedule = replace(base.lr_schedule, name=name, decay_to_zero=to_zero)
                    hyper = replace(base.hyperparameters, warmdown_fraction=fraction, warmup_steps=4)
                    data = replace(base.data, pool_tokens=7_000)
                    one = replace(base, lr_schedule=schedule, hyperparameters=hyper, data=data)
                    for other in (
                        replace(one, steps=50),
                        replace(one, steps=3),
                        replace(one, steps=20, schedule_steps=70),
                        replace(one, steps=200, data=replace(data, epochs=8)),
                        replace(one, steps=60, hyperparameters=replace(hyper, warmdown_fraction=0.2)),
                    ):
                        assert one.trunk == other.trunk is not None
                        shared = min(one.branch_point, other.branch_point)
                        for column in ("lr_factor", "passes", "network"):
                            rows = [getattr(build_schedule(s), column)[:shared] for s in (one, other)]
                            assert len(rows[0]) == shared and np.array_equal(*rows)
                        checked += shared
    assert checked > 1_000


def test_runs_that_differ_before_their_branch_points_have_other_trunks(make_spec: MakeSpec) -> None:
    spec = sweep(make_spec)[0]
    others = [
        replace(spec, seed=1),
        replace(spec, data=replace(spec.data, pool_tokens=6_999)),
        replace(spec, hyperparameters=replace(spec.hyperparameters, learning_rate=0.5)),
        replace(spec, hyperparameters=replace(spec.hyperparameters, warmup_steps=3)),
        replace(spec, batch_tokens=512),
        replace(spec, precision="bf16"),
        replace(spec, schedule=StageSchedule.fixed(2)),
        sweep(make_spec, "loop-2")[0],
        make_spec("operator-1", depth=4, data=spec.data),
    ]
    assert len({spec.trunk, *(other.trunk for other in others)}) == 1 + len(others)
    # Where the length of the run decides on its data or passes, it has none.
    assert make_spec("operator-1").trunk is None
    for passes in ((1, 2), (1, 2, 3)):
        assert replace(spec, schedule=StageSchedule((Stage(passes),))).trunk is None


def test_only_runs_without_a_checkpoint_wait_for_their_trunk(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    specs, store = sweep(make_spec), RunStore(tmp_path)
    assert first_steps(store, specs) == {specs[0].hash: 0, specs[1].hash: 10, specs[2].hash: 6}
    assert share(store, specs[1:]) == specs[2:]
    train(specs[1], tiny_data, store, QUIET)
    assert share(store, specs) == [], "one has a checkpoint to start from, the other is longer"
    assert first_steps(store, specs) == {specs[0].hash: 6, specs[1].hash: 14, specs[2].hash: 6}
