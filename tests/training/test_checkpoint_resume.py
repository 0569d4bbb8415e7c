"""A run killed at any point and resumed equals the uninterrupted run bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from steepen.data import Dataset
from steepen.errors import SteepenError, UsageError
from steepen.model.block import TransformerBlock
from steepen.model.stages import Stage, StageSchedule
from steepen.optim.optimizer import Optimizer
from steepen.runs.spec import DataConfig, RunSpec, code_digest
from steepen.runs.store import RunBusy, RunStore, read_metrics
from steepen.training import checkpoint as checkpoints
from steepen.training import trainer as training_run
from steepen.training.run import train
from steepen.training.stopping import Interrupted
from steepen.utils.json_io import with_checksum, write_json
from steepen.utils.progress import ProgressDisplay
from training_fixtures import QUIET, assert_same_result, metrics

MakeSpec = Callable[..., RunSpec]
WholeRun = Callable[[RunSpec], RunStore]


class Killed(BaseException):
    """Simulates SIGKILL inside one process: no handler in steepen catches it."""


def losses(store: RunStore, spec: RunSpec) -> list[float]:
    return [line["loss"] for line in read_metrics(store.run(spec).metrics_file) if "loss" in line]


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("step", 1), ("step", 6), ("step", 7), ("step", 10), ("grow", 1),
        ("save", 1), ("save", 2), ("save", 3), ("rename", 1), ("rename", 2), ("prune", 2), ("record", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "arm",
    [
        "untied-grow",
        "untied-grow clipped",
        "random-loop-grow",
        "untied-grow+experts=4+window=9",
        "untied-grow+streams=2+kv_heads=1",
    ],
)
def test_run_killed_at_any_point_ends_with_the_same_weights(
    arm: str, where: str, call: int, make_spec: MakeSpec, whole_run: WholeRun, tiny_data: Dataset,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name, _, clipped = arm.partition(" ")
    spec = make_spec(name)
    if clipped:
        spec = replace(spec, optimizer=replace(spec.optimizer, clip=0.01))
    broken = RunStore(tmp_path / "broken")
    targets: dict[str, tuple[Any, str, bool]] = {
        "step": (Optimizer, "step", False),
        "grow": (training_run.StateLoader, "grow", True),
        "save": (checkpoints, "save_file", False),
        "rename": (Path, "rename", False),
        "prune": (checkpoints, "prune", False),
        "record": (training_run, "write_json", False),
    }
    owner, name, after = targets[where]
    original = getattr(owner, name)
    count = 0

    def deadly(*words: Any, **options: Any) -> Any:
        nonlocal count
        if where == "record" and not str(words[0]).endswith("record.json"):
            return original(*words, **options)
        if where == "rename" and not words[0].name.startswith(".writing-"):
            return original(*words, **options)
        count += 1
        if count == call and not after:
            raise Killed
        result = original(*words, **options)
        if count == call:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, deadly)
        with pytest.raises(Killed):
            train(spec, tiny_data, broken, QUIET)
    assert broken.record(spec) is None
    record = train(spec, tiny_data, broken, QUIET)
    assert_same_result(whole_run(spec), broken, spec)
    assert record.resumed == (0 if count == 1 and where in ("step", "save", "rename") else 1)


def test_checksum_of_a_checkpoint_is_its_files_or_that_of_all_files(tmp_path: Path) -> None:
    def checksum(files: dict[str, str]) -> str:
        (folder := tmp_path / f"{len(files)}" / "00000003").mkdir(parents=True, exist_ok=True)
        write_json(folder / checkpoints.META_FILE, with_checksum({"step": 3, "files": files}))
        return checkpoints.Checkpoint(folder).sha256

    one, other = "a" * 64, "b" * 64
    assert checksum({checkpoints.STATE_FILE: one}) == one  # scores are named after it: it stays
    both = checksum({"rank0": one, "rank1": other})
    assert both == hashlib.sha256(f"{one}{other}".encode()).hexdigest()
    assert checksum({"rank1": other, "rank0": one}) == both
    assert checksum({"rank0": other, "rank1": one}) != both


def test_a_run_killed_as_its_record_is_written_leaves_no_old_checkpoint(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = make_spec(), RunStore(tmp_path)

    def deadly(path: Path, *words: Any, original: Any = write_json) -> None:
        original(path, *words)
        if path.name == "record.json":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "write_json", deadly)
        with pytest.raises(Killed):
            train(spec, tiny_data, store, QUIET)
    train(spec, tiny_data, store, QUIET)
    found = checkpoints.list_checkpoints(store.run(spec).checkpoints)
    kinds = [checkpoint.training_progress().kind for checkpoint in found]
    assert kinds[-1] == "final" and "regular" not in kinds


@pytest.mark.parametrize(
    "content",
    [None, b"\xff\xfe", b"null", b"[]", b"{}", b'{"step": 3, "loss": "x"}', b'{"step": 3, "lr": "x"}'],
)
def test_damaged_metrics_are_reported_and_the_run_resumes(
    content: bytes | None, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spec, store = make_spec(), RunStore(tmp_path)

    def killed_at_ten(
        self: Optimizer, factor: float, step: int | None = None, original: Any = Optimizer.step
    ) -> Tensor:
        if step == 9:
            raise Killed
        return original(self, factor, step)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", killed_at_ten)
        with pytest.raises(Killed):
            train(spec, tiny_data, store, QUIET)
    file = store.run(spec).metrics_file
    lines = file.read_bytes().split(b"\n")
    if content is not None:
        lines[2] = content
    file.write_bytes(b"\n".join(lines))
    assert store.rows()[0].status == "interrupted"
    train(spec, tiny_data, store, replace(QUIET, quiet=False))
    printed = capfd.readouterr().err
    kept = [line["step"] for line in metrics(store, spec) if "loss" in line]
    if content is None:
        assert "damaged" not in printed and kept == [*range(1, 13)]
    else:
        assert "metrics.jsonl has 1 damaged line," in printed and kept == [1, 2, *range(4, 13)]


def test_metrics_are_not_written_through_a_link_of_another_user(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store, victim = make_spec(), RunStore(tmp_path / "runs"), tmp_path / "victim"
    victim.write_text("precious")
    folder = store.run(spec).path
    folder.mkdir(parents=True)
    (folder / "metrics.tmp").symlink_to(victim)
    train(spec, tiny_data, store, QUIET)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "options",
    [{}, {"windows": "fixed"}, {"pool": "sample"}, {"pool": "sample", "windows": "fixed"}],
    ids=["recut", "fixed", "sampled documents", "sampled windows"],
)
@pytest.mark.parametrize("call", [4, 5, 8])
def test_run_of_several_epochs_killed_in_any_of_them_ends_with_the_same_weights(
    options: dict[str, Any], call: int, make_spec: MakeSpec, whole_run: WholeRun, tiny_data: Dataset,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    data = DataConfig(tiny_data.identity, pool_tokens=36 * 33, epochs=3, **options)  # 4 batches an epoch
    spec = make_spec("vanilla", data=data)
    broken = RunStore(tmp_path / "broken")
    original, count = Optimizer.step, 0

    def deadly(*words: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Killed
        return original(*words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", deadly)
        with pytest.raises(Killed):
            train(spec, tiny_data, broken, QUIET)
    assert train(spec, tiny_data, broken, QUIET).resumed == 1
    assert_same_result(whole_run(spec), broken, spec)


def test_pool_and_windows_change_what_a_run_learns(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    store, found = RunStore(tmp_path), []
    choices: list[dict[str, Any]] = [{}, {"windows": "fixed"}, {"pool": "sample"}]
    for options in choices:
        data = DataConfig(tiny_data.identity, pool_tokens=36 * 33, epochs=3, **options)
        spec = make_spec("vanilla", data=data)
        train(spec, tiny_data, store, QUIET)
        found.append(losses(store, spec))
    assert len({tuple(values) for values in found}) == 3


def command(spec_file: Path, data: Path, runs: Path, *more: str) -> list[str]:
    words = ["--spec", spec_file, "--data", data, "--runs", runs, "--device", "cpu", "--checkpoint-every", 3]
    return [sys.executable, "-m", "steepen", "train", *map(str, words), *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": "src"}


def test_run_killed_by_sigkill_at_random_ends_with_the_same_weights(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec(steps=60)
    whole, broken = RunStore(tmp_path / "whole"), RunStore(tmp_path / "broken")
    options = replace(QUIET, validate_every=None)
    train(spec, tiny_data, whole, options)
    write_json(tmp_path / "spec.json", spec.to_dict())
    words = command(tmp_path / "spec.json", tiny_data.directory, broken.root)
    seed = time.time_ns()
    print(f"seed {seed}")  # shown where the test fails
    choose = random.Random(seed)
    folder, kills = broken.run(spec).checkpoints, 0
    while broken.record(spec) is None and kills < 1:  # many kills: tests/chaos/test_kill_storms.py
        before = len(list(folder.glob("*"))) if folder.exists() else 0
        process = subprocess.Popen(
            words, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        # Wait until it is at work, then strike at a moment of no one's choosing.
        while process.poll() is None and time.monotonic() < deadline:
            if folder.exists() and len(list(folder.glob("*"))) != before:
                break
            time.sleep(0.005)
        time.sleep(choose.uniform(0, 0.15))
        process.kill()
        process.wait()
        kills += 1
    assert kills >= 1
    done = subprocess.run(words, check=False, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_same_result(whole, broken, spec)


def test_run_killed_while_removing_an_old_checkpoint_resumes(
    make_spec: MakeSpec,
    whole_run: WholeRun,
    tiny_data: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec()
    broken = RunStore(tmp_path / "broken")
    remove = checkpoints.shutil.rmtree

    def killed(path: Path, *rest: Any, **more: Any) -> None:
        if (path / checkpoints.META_FILE).exists():
            (path / checkpoints.META_FILE).unlink()
            raise Killed
        remove(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            train(spec, tiny_data, broken, QUIET)
    train(spec, tiny_data, broken, QUIET)
    assert_same_result(whole_run(spec), broken, spec)
    assert not list(broken.run(spec).checkpoints.glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_a_checkpoint_and_prints_how_to_resume(
    number: signal.Signals,
    make_spec: MakeSpec,
    whole_run: WholeRun,
    tiny_data: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec()
    stopped = RunStore(tmp_path / "stopped")
    original, count = Optimizer.step, 0

    def step(self: Optimizer, factor: float, step: int | None = None) -> Tensor:
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), number)
        return original(self, factor, step)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", step)
        with pytest.raises(Interrupted, match="after step 5, which is saved") as stop:
            train(spec, tiny_data, stopped, QUIET)
    assert stop.value.exit_code == 128 + number
    assert [c.step for c in checkpoints.list_checkpoints(stopped.run(spec).checkpoints)][-1] == 5
    assert not (stopped.run(spec).path / "failure.json").exists()
    train(spec, tiny_data, stopped, QUIET)
    assert_same_result(whole_run(spec), stopped, spec)


PHASES: dict[str, tuple[Any, str, int]] = {  # where SIGTERM arrives: at the beginning of the so-manyth call
    "start": (training_run.StateLoader, "load_or_init", 1),
    "compilation": (training_run.Trainer, "_prepare_steps", 1),
    "first step": (Optimizer, "step", 1),
    "checkpoint": (checkpoints, "write_checkpoint", 1),
    "last checkpoint": (checkpoints, "write_checkpoint", 4),
    "rename of a checkpoint": (checkpoints, "sync", 3),
    "growth": (training_run.Trainer, "_grow", 1),
    "validation": (training_run, "mean_loss", 1),
    "last validation": (training_run, "mean_loss", 3),
    "record": (training_run.Trainer, "_record", 1),
    "writing the record": (training_run, "write_json", 1),
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_every_phase_is_resumed_to_the_bit(
    phase: str,
    make_spec: MakeSpec,
    whole_run: WholeRun,
    tiny_data: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, options = make_spec(), replace(QUIET, validate_every=4)
    stopped = RunStore(tmp_path / "stopped")
    owner, name, wanted = PHASES[phase]
    original, calls = getattr(owner, name), 0

    def interrupted(*words: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == wanted:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*words, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        try:
            train(spec, tiny_data, stopped, options)
            assert "record" in phase or "last" in phase  # nothing is left to stop
        except Interrupted as stop:
            assert stop.exit_code == 128 + signal.SIGTERM
    assert calls >= wanted
    assert not (stopped.run(spec).path / "failure.json").exists()
    assert not list(stopped.run(spec).checkpoints.glob(".*"))
    train(spec, tiny_data, stopped, options)
    assert_same_result(whole_run(spec), stopped, spec)


META_DAMAGE = {
    "null": lambda facts: None,
    "text": lambda facts: "x",
    "step": lambda facts: {**facts, "step": facts["step"] - 1},
    "step, new checksum": lambda facts: with_checksum({**facts, "step": facts["step"] - 1}),
    "step as text": lambda facts: with_checksum({**facts, "step": "x"}),
    "passes": lambda facts: with_checksum({**facts, "passes": 7}),
    "scores": lambda facts: with_checksum({**facts, "scores": [{"a": 1}]}),
}


@pytest.fixture(scope="module")
def killed_run(
    make_spec: MakeSpec, whole_run: WholeRun, tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunSpec, RunStore, RunStore]:
    """A spec, the store with its finished run, and one in which it was killed after several checkpoints."""
    spec = make_spec()
    broken = RunStore(tmp_path_factory.mktemp("killed"))

    def killed_at_ten(
        self: Optimizer, factor: float, step: int | None = None, original: Any = Optimizer.step
    ) -> Tensor:
        if len(read_metrics(broken.run(spec).metrics_file)) >= 9:
            raise Killed
        return original(self, factor, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", killed_at_ten)
        with pytest.raises(Killed):
            train(spec, tiny_data, broken, replace(QUIET, keep_last=3))
    return spec, whole_run(spec), broken


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the place of a directory."""

    def damage(path: Path) -> None:
        shutil.rmtree(path)
        make(path)

    return damage


CHECKPOINT_DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncate": lambda path: os.truncate(path / checkpoints.STATE_FILE, 1000),
    "no meta": lambda path: (path / checkpoints.META_FILE).unlink(),
    "empty meta": lambda path: os.truncate(path / checkpoints.META_FILE, 0),
    "no state": lambda path: (path / checkpoints.STATE_FILE).unlink(),
    "empty directory": replace_by(lambda path: path.mkdir()),
    "a file": replace_by(lambda path: path.write_text("x")),
    "a dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
    "a loop of links": replace_by(lambda path: path.symlink_to(path)),
    "a pipe": replace_by(os.mkfifo),
}


@pytest.mark.parametrize("damage", ["flip", *CHECKPOINT_DAMAGE, *META_DAMAGE])
def test_corrupt_newest_checkpoint_is_reported_and_the_previous_one_used(
    damage: str, killed_run: tuple[RunSpec, RunStore, RunStore], tiny_data: Dataset, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spec, whole, killed = killed_run
    broken = RunStore(shutil.copytree(killed.root, tmp_path / "broken"))
    saved = checkpoints.list_checkpoints(broken.run(spec).checkpoints)
    assert len(saved) >= 2
    newest = saved[-1].path
    if damage == "flip":
        content = bytearray((newest / checkpoints.STATE_FILE).read_bytes())
        content[-5] ^= 1
        (newest / checkpoints.STATE_FILE).write_bytes(content)
    elif damage in META_DAMAGE:
        meta = newest / checkpoints.META_FILE
        write_json(meta, META_DAMAGE[damage](json.loads(meta.read_text())))
    else:
        CHECKPOINT_DAMAGE[damage](newest)
    train(spec, tiny_data, broken, replace(QUIET, quiet=False))
    said = capfd.readouterr().err
    assert newest.name in said and "Trying the one before it" in said
    assert f"resuming from step {saved[-2].step}" in said
    assert_same_result(whole, broken, spec)


@pytest.mark.parametrize("link", [False, True])
def test_file_in_place_of_the_checkpoints_is_set_aside(
    link: bool, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store = make_spec(steps=4), RunStore(tmp_path)
    folder = store.run(spec).checkpoints
    folder.parent.mkdir(parents=True)
    _ = folder.symlink_to("nowhere") if link else folder.write_text("not a directory")
    train(spec, tiny_data, store, QUIET)
    aside = folder.with_name("checkpoints.corrupt")
    assert folder.is_dir() and (aside.is_symlink() if link else aside.read_text() == "not a directory")


def test_corrupt_checkpoint_is_set_aside_and_a_restart_is_reported(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A corrupt checkpoint of a later step must not count as the newest, or every kill restarts the run."""
    spec, store = make_spec(), RunStore(tmp_path)
    folder = store.run(spec).checkpoints
    options = replace(QUIET, quiet=False, checkpoint_every=2, keep_last=1, validate_every=None)

    def killed_at(step: int) -> None:
        def deadly(
            self: Optimizer, factor: float, number: int | None = None, original: Any = Optimizer.step
        ) -> Tensor:
            if len(read_metrics(store.run(spec).metrics_file)) >= step:
                raise Killed
            return original(self, factor, number)

        with monkeypatch.context() as patch:
            patch.setattr(Optimizer, "step", deadly)
            with pytest.raises(Killed):
                train(spec, tiny_data, store, options)

    killed_at(5)
    (newest,) = checkpoints.list_checkpoints(folder)
    (newest.path / checkpoints.STATE_FILE).write_bytes(b"")
    capfd.readouterr()
    killed_at(3)  # from the beginning again, past one checkpoint at least
    said = capfd.readouterr().err
    assert f"{newest.path} is corrupt" in said and "None is left: the run starts over." in said
    assert "the one before it" not in said
    (kept,) = checkpoints.list_checkpoints(folder)
    kept.verify()
    assert newest.path.with_name(f"{newest.path.name}.corrupt").is_dir()
    assert train(spec, tiny_data, store, options).resumed == 1


def test_signal_interrupts_a_validation(
    make_spec: MakeSpec,
    whole_run: WholeRun,
    tiny_data: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec()
    stopped = RunStore(tmp_path / "stopped")
    original = training_run.mean_loss

    def interrupted(*words: Any, **options: Any) -> Any:
        if "apart" in options:  # not the loss before and after growth, which ends what it has begun
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*words, **options)

    for step in (4, 12):  # in mid-run, and at the end
        with monkeypatch.context() as patch:
            patch.setattr(training_run, "mean_loss", interrupted)
            with pytest.raises(Interrupted, match=f"after step {step},"):
                train(spec, tiny_data, stopped, replace(QUIET, validate_every=4 if step == 4 else None))
    train(spec, tiny_data, stopped, QUIET)
    assert losses(whole_run(spec), spec) == losses(stopped, spec)
    record = stopped.record(spec)
    assert record is not None and [score.step for score in record.validation_scores] == [12]


class DroppingBlock(TransformerBlock):
    """A custom block that draws random numbers."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: a custom block may leave `cache` out
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.2, self.training), rotary, mask)


@pytest.mark.parametrize("arm", ["untied-grow", "untied-random"])
def test_custom_block_resumes_exactly_and_validation_does_not_change_it(
    arm: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_spec("untied-grow")
    mine = replace(plain.arm, name="mine", block=f"{__name__}:DroppingBlock")
    spec = replace(plain, arm=mine, code=code_digest(mine))
    if arm == "untied-random":
        spec = replace(spec, schedule=StageSchedule((Stage((2,)), Stage((1, 2, 3, 4), 0.5))))
    whole, broken, unseen = (RunStore(tmp_path / name) for name in ("whole", "broken", "unseen"))
    train(spec, tiny_data, whole, QUIET)
    train(spec, tiny_data, unseen, replace(QUIET, validate_every=None))
    assert losses(whole, spec) == losses(unseen, spec)

    def deadly(
        self: Optimizer, factor: float, step: int | None = None, original: Any = Optimizer.step
    ) -> Tensor:
        if len(read_metrics(broken.run(spec).metrics_file)) >= 9:
            raise Killed
        return original(self, factor, step)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", deadly)
        with pytest.raises(Killed):
            train(spec, tiny_data, broken, QUIET)
    train(spec, tiny_data, broken, QUIET)
    assert_same_result(whole, broken, spec)
    with pytest.raises(UsageError, match="custom code of arm"):
        train(replace(spec, code="0" * 16), tiny_data, whole, QUIET)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(28, "No space left on device"), "free some disk space"),
        (OSError(122, "Disk quota exceeded"), "free some disk space"),
        (SafetensorError("Error while serializing: I/O error: (os error 28)"), "free some disk space"),
        (OSError(5, "Input/output error"), "(Input/output error); mend that"),
    ],
)
def test_full_or_broken_disk_is_reported_and_loses_only_steps_since_the_last_checkpoint(
    error: Exception,
    remedy: str,
    make_spec: MakeSpec,
    whole_run: WholeRun,
    tiny_data: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec()
    full = RunStore(tmp_path / "full")
    original, count = checkpoints.save_file, 0

    def save_file(tensors: Any, path: Path) -> None:
        nonlocal count
        count += 1
        if count == 2:
            path.write_bytes(b"half")
            raise error
        original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", save_file)
        with pytest.raises(SteepenError, match="00000006 could not be written") as told:
            train(spec, tiny_data, full, QUIET)
    assert "\n" not in str(told.value) and remedy in str(told.value).replace("[Errno 5] ", "")
    assert [c.step for c in checkpoints.list_checkpoints(full.run(spec).checkpoints)] == [3]
    assert not list(full.run(spec).checkpoints.glob(".*"))
    train(spec, tiny_data, full, QUIET)
    assert_same_result(whole_run(spec), full, spec)


@pytest.mark.parametrize("stop", [False, True])
def test_a_last_checkpoint_that_fails_while_validation_runs_is_reported(
    stop: bool, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = make_spec(), RunStore(tmp_path)
    save, mean = checkpoints.save_file, training_run.mean_loss

    def save_file(tensors: Any, path: Path) -> None:
        if "00000012" in str(path):
            raise OSError(28, "No space left on device")
        save(tensors, path)

    def stopped(*words: Any, **options: Any) -> Any:
        if stop and "apart" in options:  # not the loss before and after growth
            os.kill(os.getpid(), signal.SIGTERM)
        return mean(*words, **options)

    monkeypatch.setattr(checkpoints, "save_file", save_file)
    monkeypatch.setattr(training_run, "mean_loss", stopped)
    with pytest.raises(SteepenError, match=r"00000012 could not be written .* free some disk space"):
        train(spec, tiny_data, store, replace(QUIET, validate_every=None))
    assert store.record(spec) is None
    assert [c.step for c in checkpoints.list_checkpoints(store.run(spec).checkpoints)][-1] == 9


def test_a_checkpoint_for_which_memory_is_too_small_leaves_nothing(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store, original = make_spec(), RunStore(tmp_path), checkpoints.save_file

    def save_file(tensors: Any, path: Path) -> None:
        original(tensors, path)
        if "00000006" in str(path):
            raise MemoryError

    monkeypatch.setattr(checkpoints, "save_file", save_file)
    with pytest.raises(SteepenError, match="out of memory"):
        train(spec, tiny_data, store, QUIET)
    assert [path.name for path in store.run(spec).checkpoints.iterdir()] == ["00000003"]


def test_a_display_that_cannot_be_closed_is_no_failure_of_the_run(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: ProgressDisplay) -> None:
        raise BrokenPipeError

    spec, store = make_spec(steps=2), RunStore(tmp_path)
    monkeypatch.setattr(ProgressDisplay, "close", close)
    with pytest.raises(BrokenPipeError):
        train(spec, tiny_data, store, QUIET)
    assert store.record(spec) is not None
    assert not store.run(spec).failure_file.exists()


def test_a_checkpoint_that_is_being_replaced_is_never_lost(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = make_spec("vanilla", steps=3), RunStore(tmp_path / "runs")
    train(spec, tiny_data, store, QUIET)
    folder = store.run(spec).checkpoints
    (last,) = checkpoints.list_checkpoints(folder)
    before = last.checksums()
    progress, rename = last.training_progress(), Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-"):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            checkpoints.write_checkpoint(folder, progress, {"x": torch.zeros(1)})
    assert checkpoints.list_checkpoints(folder) == []
    checkpoints.remove_partial(folder)
    assert [c.checksums() for c in checkpoints.list_checkpoints(folder)] == [before]
    checkpoints.write_checkpoint(folder, progress, {"x": torch.zeros(1)})
    assert [path.name for path in folder.iterdir()] == [last.path.name]


def test_second_process_on_one_run_is_rejected(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store = make_spec("vanilla", steps=3), RunStore(tmp_path / "runs")
    write_json(tmp_path / "spec.json", spec.to_dict())
    with store.run(spec).lock():
        done = subprocess.run(
            command(tmp_path / "spec.json", tiny_data.directory, store.root),
            env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        with pytest.raises(RunBusy):
            train(spec, tiny_data, store, QUIET)
    assert done.returncode == 1 and f"process {os.getpid()}" in done.stderr and "--wait" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert train(spec, tiny_data, store, QUIET).tokens == 768


def test_run_resumed_just_before_growth_warms_up_with_its_parameters(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up before the first step runs before the network grows."""
    monkeypatch.setattr("steepen.execution.select.compile_network", lambda network: None)
    spec, options = make_spec("untied-grow"), replace(QUIET, compile=True)
    whole, broken = RunStore(tmp_path / "whole"), RunStore(tmp_path / "broken")
    train(spec, tiny_data, whole, options)

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(training_run.StateLoader, "grow", killed)
        with pytest.raises(Killed):
            train(spec, tiny_data, broken, options)
    train(spec, tiny_data, broken, options)
    assert_same_result(whole, broken, spec)
