"""Section `profile` of `ceilings.py`: GPU time of a training step by group of kernels, cold and hot."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from gpu_timing import DEVICE, ON_GPU, Call, calls_in, heat_up
from throughput import FusedStep, build
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity

from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.training.device import synchronize

# Group → substrings of kernel names; the first match counts. `aten` and `cpu` are operators on a CPU.
GROUPS = {
    "attention, backward": ("bprop", "cpu_backward"),
    "attention, forward": ("fprop", "attention_for_cpu"),
    "attention, helpers": ("cudnn", "flash", "fmha"),
    "GEMMs": ("nvjet", "gemm", "cutlass", "cublas", "aten::mm", "aten::addmm"),
    "SwiGLU, forward": ("_swiglu_kernel",),
    "SwiGLU, backward": ("_swiglu_backward_kernel",),
    "fused linear cross-entropy": ("_exp_difference_kernel", "_target_logit_kernel", "_finish_kernel"),
    "cross-entropy": ("_cross_entropy_kernel",),
    "RoPE and QK norm, forward": ("_rotate_norm_kernel",),
    "RoPE and QK norm, backward": ("_rotate_norm_backward_kernel",),
    "norms": ("rms_norm", "_embed_norm"),
}
OPTIMIZER = "optimizer, per step"
Row = dict[str, Any]


def profile(args: Any) -> list[Row]:
    """Milliseconds per micro-batch and fraction of the total of each group."""
    network = build(
        "vanilla",
        args.depth,
        args.scale,
        DEVICE,
        argparse.Namespace(weights="random", residual_stream="fp32"),
    )
    network.compute_dtype = torch.bfloat16
    install_fused_gpu(network, partial(FusedLinear, dtype=torch.bfloat16))
    batch, size = args.micro_batches * args.rows, args.shape.context
    step = FusedStep(network, 1, args.rows, batch, lr=1e-4, cuda_graphs=False).train_step
    inputs, targets = (torch.randint(args.shape.vocabulary, (batch, size), device=DEVICE) for _ in range(2))

    def gradients() -> None:
        step.optimizer.zero_grad()
        step.accumulator(inputs, targets, 1)

    def optimize() -> None:
        step.optimizer.step(1.0)

    gradients()
    optimize()
    milliseconds_by_group(gradients, 1)  # the first use of the profiler also sets it up
    by_state: dict[str, Row] = {}
    for state in ("cold", "hot"):
        spent: list[dict[str, float]] = []
        for call in (gradients, optimize):
            times = calls_in(2 * args.seconds, call) if state == "hot" else 1
            if state == "hot":
                heat_up(args.warm_up)
            else:
                time.sleep(args.idle)
            spent.append(milliseconds_by_group(call, times))
        groups = {name: ms / args.micro_batches for name, ms in spent[0].items()}
        by_state[state] = {**groups, "total": sum(groups.values()), OPTIMIZER: sum(spent[1].values())}
    rows: list[Row] = []
    for name in by_state["cold"]:
        row: Row = {"kernels, per micro-batch": name}
        for state, ms in by_state.items():
            fraction = None if name == OPTIMIZER else ms[name] / ms["total"]
            row |= {f"{state} ms": ms[name], f"{state} fraction": fraction}
        rows.append(row)
    return rows


def milliseconds_by_group(call: Call, times: int) -> dict[str, float]:
    """Milliseconds of a call by group of kernels (on a CPU: of operators)."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.profiler.profile(activities=kinds) as measured:
        for _ in range(times):
            call()
        synchronize(DEVICE)
    device_type = DeviceType.CUDA if ON_GPU else DeviceType.CPU
    milliseconds = dict.fromkeys([*GROUPS, "other"], 0.0)
    for event in measured.key_averages():
        # Operators, which include the time of the kernels they launched, and named ranges are skipped.
        if event.device_type != device_type or event.is_user_annotation:
            continue
        spent = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
        matches = (group for group, names in GROUPS.items() if any(name in event.key for name in names))
        milliseconds[next(matches, "other")] += spent / 1e3 / times
    if not any(milliseconds.values()):
        raise RuntimeError("the profiler saw no kernels")
    return milliseconds
