"""For `ceilings.py`: the kernels of a training step of our own network by group, on a cold and a hot GPU."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from ceiling_clocks import ON_GPU, Call, calls_in, load
from throughput import DEVICE, OurStepper, build
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity

from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.training.device import synchronise

GROUPS = {  # of kernels by what their names hold, the first that fits; `aten` and `cpu` are a CPU's
    "attention, backward": ("bprop", "cpu_backward"),
    "attention, forward": ("fprop", "attention_for_cpu"),
    "attention, helpers": ("cudnn", "flash", "fmha"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "aten::mm", "aten::addmm"),
    "SwiGLU, forward": ("_swiglu_kernel",),
    "SwiGLU, backward": ("_swiglu_backward_kernel",),
    "head, its product and loss in one": ("_odds_kernel", "_target_kernel", "_finish_kernel"),
    "cross-entropy": ("_cross_entropy_kernel",),
    "rotation, forward": ("_rotate_norm_kernel",),
    "rotation, backward": ("_rotate_norm_backward_kernel",),
    "norms": ("rms_norm", "_embed_norm"),
}
OPTIMIZER = "optimizer, of a whole step"
Row = dict[str, Any]


def profile(given: Any) -> list[Row]:
    """The section of `ceilings.py`: milliseconds and share of each group, of a micro-batch."""
    network = build("vanilla", given.depth, given.scale, DEVICE, "random")
    network.compute_dtype = torch.bfloat16
    install_fused_gpu(network, partial(FusedLinear, dtype=torch.bfloat16))
    batch, size = given.micro_batches * given.rows, given.shape.context
    step = OurStepper(network, 1, given.rows, batch, lr=1e-4, graphs=False).stepper
    inputs, targets = (torch.randint(given.shape.vocabulary, (batch, size), device=DEVICE) for _ in range(2))

    def gradients() -> None:
        step.optimizer.zero_grad()
        step.accumulator(inputs, targets, 1)

    def optimize() -> None:
        step.optimizer.step(1.0)

    gradients()
    optimize()
    kernels(gradients, 1)  # the profiler's first use also sets it up
    found: dict[str, Row] = {}
    for state in ("cold", "hot"):
        spent: list[dict[str, float]] = []
        for call in (gradients, optimize):
            times = calls_in(2 * given.seconds, call) if state == "hot" else 1
            if state == "hot":
                load(given.warm_up)
            else:
                time.sleep(given.idle)
            spent.append(kernels(call, times))
        groups = {name: ms / given.micro_batches for name, ms in spent[0].items()}
        found[state] = {**groups, "together": sum(groups.values()), OPTIMIZER: sum(spent[1].values())}
    rows: list[Row] = []
    for name in found["cold"]:
        row: Row = {"kernels, a micro-batch": name}
        for state, ms in found.items():
            share = None if name == OPTIMIZER else ms[name] / ms["together"]
            row |= {f"{state} ms": ms[name], f"{state} share": share}
        rows.append(row)
    return rows


def kernels(call: Call, times: int) -> dict[str, float]:
    """Milliseconds of a call by group of kernels (on a CPU: of operators)."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.profiler.profile(activities=kinds) as measured:
        for _ in range(times):
            call()
        synchronise(DEVICE)
    wanted = DeviceType.CUDA if ON_GPU else DeviceType.CPU
    found = dict.fromkeys([*GROUPS, "other"], 0.0)
    for event in measured.key_averages():
        # Operators are there too, with the time of the kernels they launched; and named ranges of kernels.
        if event.device_type != wanted or event.is_user_annotation:
            continue
        spent = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
        fits = (group for group, words in GROUPS.items() if any(word in event.key for word in words))
        found[next(fits, "other")] += spent / 1e3 / times
    if not any(found.values()):
        raise RuntimeError("the profiler saw no kernels")
    return found
