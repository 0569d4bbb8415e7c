"""Selection of the execution mode: fused kernels, torch.compile or the reference; CUDA graphs or not.

The flow: `choose_execution_mode` says what a device can do for an arm and a precision;
`apply_execution_mode` installs it into the network, compilation last, because it skips blocks that have a
fused forward by then. torch.compile is for custom blocks, and for networks without fused kernels. The mode
is no part of a run's hash: it changes rounding and speed, never what is computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from steepen.errors import UsageError
from steepen.execution.cpu_fused import install_fused_cpu
from steepen.execution.float8_linear import float8_linear_where_aligned
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.kernels.triton_backend import has_triton_kernels
from steepen.model.network import Network

# All blocks share one compiled program, and each micro-batch size adds one with gradients and one without.
MIN_RECOMPILE_LIMIT = 64


def compile_network(network: Network) -> None:
    """Compile the blocks, the boundary operators and the loss one by one.

    The number of passes is outside of every compiled function, so a change of passes recompiles nothing.
    """
    dynamo: Any = torch._dynamo  # pyright: ignore[reportPrivateUsage]
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MIN_RECOMPILE_LIMIT)
    compile_blocks(network)
    if network.fused is None:
        for name in ("core_boundary", "coda_boundary", "loss"):
            setattr(network, name, torch.compile(getattr(network, name), dynamic=False))


def compile_blocks(network: Network) -> None:
    """Compile every block without a fused forward; blocks added by growth reuse the cached program."""
    for block in network.blocks():
        if getattr(block, "fused_forward", None) is None:
            block.compile(dynamic=False)


# Larger steps keep the GPU busy however they are launched, and a graph would only hold memory.
CUDA_GRAPH_MAX_FLOPS_PER_STEP = 5e13


@dataclass(frozen=True)
class ExecutionMode:
    """Which implementation runs the network, and whether whole steps are CUDA graphs."""

    fused: bool  # hand-written forward and backward of the built-in block
    compiled: bool  # torch.compile of everything without a fused form
    cuda_graphs: bool  # capture each optimizer step once and replay it


def choose_execution_mode(
    has_kernels: bool,
    precision: str,
    device: torch.device,
    *,
    flops_per_step: float,
    fused: bool | None = None,
    compile: bool | None = None,
) -> ExecutionMode:
    """Return the fastest mode this device offers, or the one `fused` and `compile` ask for.

    `has_kernels`: whether the arm's blocks have fused kernels on a GPU. Raises UsageError if the device
    cannot run what is requested.
    """
    on_gpu = device.type == "cuda"
    has_triton = has_triton_kernels(device)
    # The Triton kernels compute in bf16. The fused form leaves nothing of the built-in block to compile, so
    # --compile excludes it there.
    available_on_gpu = has_triton and precision != "fp32" and not (has_kernels and compile)
    available = available_on_gpu if on_gpu else not compile
    if fused and not available:
        raise UsageError(
            "--fused needs a GPU of compute capability 8.0 or more with Triton and --precision bf16 or fp8, "
            "or a CPU, and no --compile beside it: leave --fused out."
        )
    use_fused = available and fused is not False
    fused_block = has_kernels and use_fused
    # torch.compile needs Triton on a GPU; on a CPU it compiles for longer than it saves.
    compiled = has_triton and not fused_block if compile is None else compile
    small = flops_per_step <= CUDA_GRAPH_MAX_FLOPS_PER_STEP
    if precision == "fp8":
        require_fp8_support(device, fused=use_fused)
    return ExecutionMode(use_fused, compiled, cuda_graphs=on_gpu and fused_block and small)


def apply_execution_mode(network: Network, precision: str, *, fused: bool, compiled: bool) -> None:
    """Set a network's compute dtype and install the fused or compiled implementation."""
    device = network.embedding.device
    if precision == "fp8":
        require_fp8_support(device, fused=fused)
    if precision != "fp32":
        network.compute_dtype = torch.bfloat16
    # Compilation comes last: it skips blocks that have a fused forward by then.
    if fused and device.type == "cpu":
        install_fused_cpu(network)
    elif fused:
        make_linear = float8_linear_where_aligned if precision == "fp8" else FusedLinear
        install_fused_gpu(network, functools.partial(make_linear, dtype=torch.bfloat16))
    if compiled:
        compile_network(network)


def require_fp8_support(device: torch.device, *, fused: bool) -> None:
    """Raise UsageError where fp8 GEMMs cannot run: no GPU, no fp8 tensor cores, or no fused kernels."""
    if device.type != "cuda":
        raise UsageError(
            f"precision fp8 needs a CUDA GPU, and this run is on {device.type}: use bf16 or fp32."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UsageError(
            f"precision fp8 needs a GPU with fp8 tensor cores (compute capability 8.9 or more), and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: use bf16."
        )
    if not fused:
        raise UsageError(
            "precision fp8 needs the fused kernels: install Triton and leave out --no-fused and --compile, "
            "or use bf16."
        )
