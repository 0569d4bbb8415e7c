"""The way a network computes on the machine at hand: by fast paths of our own, compiled, or plainly."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from steepen.errors import UsageError
from steepen.execution import cpu_fused as cpu
from steepen.execution.float8_linear import float8_linear_where_aligned
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.kernels import has_kernels
from steepen.model.network import Network
from steepen.recipe.accounting import flops_per_token
from steepen.runs.spec import RunSpec

# Steps of more FLOPs keep the GPU busy however they are launched; a graph would only hold memory.
GRAPH_FLOPS = 5e13


@dataclass(frozen=True)
class ExecutionMode:
    """What is switched on for a run."""

    fused: bool  # forward and backward written out, for the built-in block
    compiled: bool  # by torch.compile, what is not fast
    graphs: bool  # whole steps recorded and replayed


def choose_execution_mode(
    spec: RunSpec, device: torch.device, *, fast: bool | None, compile: bool | None
) -> ExecutionMode:
    """The fastest way there is, unless told otherwise."""
    on_gpu = device.type == "cuda"
    # On a GPU the kernels are Triton's, and for less than fp32.
    able = has_kernels(device)
    # Of the built-in block the fast path leaves nothing to compile: who asks for that is not given this.
    built_in = spec.arm.block == "transformer"
    serves = able and spec.precision != "fp32" and not (built_in and compile) if on_gpu else not compile
    if fast and not serves:
        raise UsageError(
            "--fast needs a GPU of compute capability 8.0 or more with Triton and --precision bf16 or fp8, "
            "or a CPU, and no --compile beside it: leave --fast out."
        )
    fast = serves and fast is not False
    built_in = built_in and fast
    compiled = able and not built_in if compile is None else compile  # on a GPU the compiler needs Triton too
    small = spec.batch_tokens * flops_per_token(spec.arm, spec.shape, 1).total <= GRAPH_FLOPS
    return ExecutionMode(fast, compiled, graphs=on_gpu and built_in and small)


def check_execution_mode(
    spec: RunSpec, device: torch.device, *, fast: bool | None, compile: bool | None
) -> None:
    """Refuse a run that this device cannot compute as its spec asks."""
    way = choose_execution_mode(spec, device, fast=fast, compile=compile)
    if spec.precision == "fp8":
        require_fp8_support(device, fast=way.fused)


def apply_execution_mode(network: Network, precision: str, *, fast: bool, compiled: bool) -> None:
    """Set a network's precision and the way it computes."""
    device = network.embedding.device
    if precision == "fp8":
        require_fp8_support(device, fast=fast)
    if precision != "fp32":
        network.compute_dtype = torch.bfloat16
    if fast and device.type == "cpu":
        cpu.install_fused_cpu(network)
    elif fast:
        make = float8_linear_where_aligned if precision == "fp8" else FusedLinear
        install_fused_gpu(network, functools.partial(make, dtype=torch.bfloat16))
    if compiled:
        compile_network(network)


def require_fp8_support(device: torch.device, *, fast: bool) -> None:
    """Refuse to compute in fp8 where there is nothing to do it with."""
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
    if not fast:
        raise UsageError(
            "precision fp8 needs the fast path: install Triton and leave out --no-fast and --compile, "
            "or use bf16."
        )


def compile_network(network: Network) -> None:
    """Compile block by block, and what stands between: the number of passes then changes nothing."""
    dynamo: Any = torch._dynamo  # pyright: ignore[reportPrivateUsage]
    # All blocks share one compiled program; each micro-batch size, with and without gradients, adds one.
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 64)
    compile_blocks(network)
    for name in () if network.fused is not None else ("core_boundary", "coda_boundary", "loss"):
        setattr(network, name, torch.compile(getattr(network, name), dynamic=False))


def compile_blocks(network: Network) -> None:
    """Have every block run compiled; blocks gained by growth find their program in the cache."""
    for block in network.blocks():
        if getattr(block, "fused_forward", None) is None:
            block.compile(dynamic=False)
