"""The execution mode chosen for a block, a precision, a device and the user's switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from steepen.errors import UsageError
from steepen.execution.select import (
    CUDA_GRAPH_MAX_FLOPS_PER_STEP,
    ExecutionMode,
    choose_execution_mode,
)
from steepen.kernels.triton_backend import has_triton_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = 1e9  # FLOPs per step
REFERENCE = ExecutionMode(fused=False, compiled=False, cuda_graphs=False)
COMPILED = ExecutionMode(fused=False, compiled=True, cuda_graphs=False)


def choose(
    device: torch.device,
    *,
    block: str = "transformer",
    precision: str = "bf16",
    flops_per_step: float = SMALL,
    fused: bool | None = None,
    compile: bool | None = None,
) -> ExecutionMode:
    return choose_execution_mode(
        block == "transformer", precision, device, flops_per_step=flops_per_step, fused=fused, compile=compile
    )


@pytest.fixture
def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Simulate a GPU of some compute capability, with or without Triton."""

    def simulate(capability: tuple[int, int], triton: bool = True) -> None:
        has_triton_kernels.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if triton else None)

    yield simulate
    has_triton_kernels.cache_clear()


def test_gpu_runs_small_steps_fused_and_as_cuda_graphs(simulate_gpu: Callable[..., None]) -> None:
    simulate_gpu((8, 0))
    assert choose(GPU) == ExecutionMode(fused=True, compiled=False, cuda_graphs=True)
    assert choose(GPU, fused=False) == COMPILED
    assert choose(GPU, compile=True) == COMPILED  # --compile switches the fused block off
    with pytest.raises(UsageError, match="and no --compile"):
        choose(GPU, fused=True, compile=True)
    assert choose(GPU, precision="fp32") == COMPILED
    for compile in (None, True):
        assert choose(GPU, block="steepen.model.block:TransformerBlock", compile=compile) == ExecutionMode(
            fused=True, compiled=True, cuda_graphs=False
        )


def test_gpu_runs_large_steps_without_cuda_graphs(simulate_gpu: Callable[..., None]) -> None:
    simulate_gpu((8, 0))
    assert choose(GPU, flops_per_step=CUDA_GRAPH_MAX_FLOPS_PER_STEP).cuda_graphs
    assert not choose(GPU, flops_per_step=1.01 * CUDA_GRAPH_MAX_FLOPS_PER_STEP).cuda_graphs


@pytest.mark.parametrize(("capability", "triton"), [((7, 5), True), ((9, 0), False)])
def test_gpu_too_old_or_without_triton_runs_the_reference(
    capability: tuple[int, int], triton: bool, simulate_gpu: Callable[..., None]
) -> None:
    simulate_gpu(capability, triton)
    assert choose(GPU) == REFERENCE
    with pytest.raises(UsageError, match=r"--fused needs a GPU of compute capability 8\.0"):
        choose(GPU, fused=True)


def test_fp8_needs_fp8_tensor_cores_and_fused_kernels(simulate_gpu: Callable[..., None]) -> None:
    with pytest.raises(UsageError, match="fp8 needs a CUDA GPU"):
        choose(CPU, precision="fp8")
    simulate_gpu((8, 0))
    with pytest.raises(UsageError, match="fp8 tensor cores"):
        choose(GPU, precision="fp8")
    simulate_gpu((8, 9))
    assert choose(GPU, precision="fp8").fused
    with pytest.raises(UsageError, match="needs the fused kernels"):
        choose(GPU, precision="fp8", fused=False)


def test_cpu_runs_fused_blocks_unless_compiled_or_switched_off() -> None:
    assert choose(CPU, precision="fp32") == ExecutionMode(fused=True, compiled=False, cuda_graphs=False)
    assert choose(CPU, precision="fp32", fused=False) == REFERENCE
    assert choose(CPU, precision="fp32", compile=True) == COMPILED
    with pytest.raises(UsageError, match="and no --compile"):
        choose(CPU, precision="fp32", fused=True, compile=True)
