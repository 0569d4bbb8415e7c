"""A network computes the fastest way that the machine at hand can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.execution.select import ExecutionMode, choose_execution_mode
from steepen.kernels import has_kernels
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import train

MakeSpec = Callable[..., RunSpec]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAIN, COMPILED = (
    ExecutionMode(fused=False, compiled=False, graphs=False),
    ExecutionMode(fused=False, compiled=True, graphs=False),
)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that there is a GPU of some capability, with Triton or without."""

    def pretend(capability: tuple[int, int], triton: bool = True) -> None:
        has_kernels.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if triton else None)

    yield pretend
    has_kernels.cache_clear()


def test_on_a_gpu_small_steps_are_fast_and_recorded(
    make_spec: MakeSpec, on_a_gpu: Callable[..., None]
) -> None:
    on_a_gpu((8, 0))
    spec = replace(make_spec(), precision="bf16")
    assert choose_execution_mode(spec, GPU, fast=None, compile=None) == ExecutionMode(
        fused=True, compiled=False, graphs=True
    )
    assert choose_execution_mode(spec, GPU, fast=False, compile=None) == COMPILED
    assert choose_execution_mode(spec, GPU, fast=None, compile=True) == COMPILED  # who asks for it gets it
    with pytest.raises(UsageError, match="and no --compile"):
        choose_execution_mode(spec, GPU, fast=True, compile=True)
    assert choose_execution_mode(replace(spec, precision="fp32"), GPU, fast=None, compile=None) == COMPILED
    own = replace(spec, arm=replace(spec.arm, block="steepen.model.block:TransformerBlock"))
    for compile in (None, True):
        assert choose_execution_mode(own, GPU, fast=None, compile=compile) == ExecutionMode(
            fused=True, compiled=True, graphs=False
        )


@pytest.mark.parametrize(("capability", "triton"), [((7, 5), True), ((9, 0), False)])
def test_a_gpu_without_triton_or_too_old_for_it_computes_plainly(
    capability: tuple[int, int], triton: bool, make_spec: MakeSpec, on_a_gpu: Callable[..., None]
) -> None:
    on_a_gpu(capability, triton)
    spec = replace(make_spec(), precision="bf16")
    assert choose_execution_mode(spec, GPU, fast=None, compile=None) == PLAIN
    with pytest.raises(UsageError, match=r"--fast needs a GPU of compute capability 8\.0"):
        choose_execution_mode(spec, GPU, fast=True, compile=None)


def test_on_a_cpu_blocks_are_fast_unless_compiled_or_told_otherwise(make_spec: MakeSpec) -> None:
    spec = make_spec()
    assert choose_execution_mode(spec, CPU, fast=None, compile=None) == ExecutionMode(
        fused=True, compiled=False, graphs=False
    )
    assert choose_execution_mode(spec, CPU, fast=False, compile=None) == PLAIN
    assert choose_execution_mode(spec, CPU, fast=None, compile=True) == COMPILED
    with pytest.raises(UsageError, match="and no --compile"):
        choose_execution_mode(spec, CPU, fast=True, compile=True)


@pytest.mark.parametrize("options", [{}, {"fast": True, "compile": True}])
def test_a_run_that_cannot_be_computed_here_leaves_nothing_behind(
    options: dict[str, bool], make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec() if options else replace(make_spec(), precision="fp8")
    with pytest.raises(UsageError, match="--fast needs" if options else "fp8 needs a CUDA GPU"):
        train(spec, tiny_data, RunStore(tmp_path / "runs"), TrainOptions(device="cpu", quiet=True, **options))
    assert not list(tmp_path.rglob("*.json"))
