"""Locks of the runs on one GPU, tested without one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steepen.recipe.memory import automatic_micro_batch, training_memory
from steepen.runs.spec import RunSpec
from steepen.training import device as gpu_sharing
from steepen.training.device import GpuSharing, is_small
from steepen.utils.files import GPU_LOCKS_VARIABLE, RUNS_PER_GPU_VARIABLE

GPU = torch.device("cuda")


@pytest.fixture
def sharing(
    make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., GpuSharing]:
    """Make the locks of a run on an imagined GPU of `gib`."""
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks" / "host-0"))

    def make(gib: float = 80, stopped: Callable[[], bool] = lambda: False) -> GpuSharing:
        properties = type("Properties", (), {"total_memory": int(gib * 2**30)})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return GpuSharing(make_spec("vanilla"), GPU, stopped)

    return make


def enters_within(context: Callable[[], object], seconds: float) -> bool:
    """Whether a context manager is entered within this time (from another thread)."""
    entered = threading.Event()

    def enter() -> None:
        with context():  # type: ignore[attr-defined]
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(seconds)


def test_only_one_run_trains_at_a_time(sharing: Callable[..., GpuSharing]) -> None:
    first, second = sharing(), sharing()
    with first.turn():
        assert not enters_within(second.turn, 0.1)
    assert enters_within(second.turn, 5)


def test_small_runs_train_at_the_same_time_where_the_gpu_runs_kernels_of_several_processes(
    sharing: Callable[..., GpuSharing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_PER_GPU_VARIABLE, "4")
    first, second = sharing(), sharing()
    monkeypatch.setattr(gpu_sharing, "is_light", lambda _: False)
    heavy = sharing()
    assert (first.runs_per_gpu, heavy.runs_per_gpu) == (4, 1)
    with first.turn():
        assert enters_within(second.turn, 5)
        assert not enters_within(heavy.turn, 0.1)


def test_waiting_for_the_turn_is_counted(sharing: Callable[..., GpuSharing]) -> None:
    first, second = sharing(), sharing()
    with first.turn():
        waiting = threading.Thread(target=second.turn().__enter__)
        waiting.start()
        waiting.join(timeout=0.3)
    waiting.join()
    assert first.seconds_waited < second.seconds_waited


def test_small_runs_share_the_memory_and_large_ones_do_not(sharing: Callable[..., GpuSharing]) -> None:
    small, other, large = sharing(), sharing(), sharing(gib=0.1)
    assert small.small and not large.small
    with small.memory():
        assert enters_within(other.memory, 5)
        assert not enters_within(large.memory, 0.1)
    time.sleep(0.05)  # the thread above enters and leaves
    with large.memory():
        assert not enters_within(small.memory, 0.1)


def test_a_run_told_to_stop_does_not_wait(sharing: Callable[..., GpuSharing]) -> None:
    first, second = sharing(), sharing(stopped=lambda: True)
    with first.turn(), first.memory():
        assert enters_within(second.turn, 5)


def test_without_a_launcher_nothing_is_locked(
    make_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GPU_LOCKS_VARIABLE, raising=False)
    run = GpuSharing(make_spec("vanilla"), GPU, lambda: False)
    with run.memory(), run.turn():
        assert run.path is None and run.small


def test_is_small_follows_the_memory_estimate(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("vanilla")
    assert is_small(spec, 80 * 2**30) and not is_small(spec, 2**29)


def test_the_logits_of_fp8_count_where_runs_share_a_gpu(make_spec: Callable[..., RunSpec]) -> None:
    """A byte for each of a micro-batch, and two for every weight of a GEMM."""
    bf16 = make_spec("vanilla")
    fp8 = replace(bf16, precision="fp8")
    planned, shape = bf16.planned_run, bf16.shape
    size = automatic_micro_batch(bf16.batch_sequences, shape.context)
    needed = training_memory(planned, 1, size, optimizer=bf16.optimizer).total
    more = size * shape.context * shape.vocabulary
    more += 2 * (planned.stored_parameters - shape.vocabulary * shape.width)
    for spec, least in ((bf16, needed), (fp8, needed + more)):
        assert is_small(spec, math.ceil(6 * least) + 6) and not is_small(spec, int(6 * least) - 6)
