"""Every Triton kernel compiles for the GPUs it is meant for and fits them; no GPU is needed for this test.

The interpreter that the other tests run on accepts code that the compiler rejects. Here the launching
functions are called as training calls them, on fake tensors of simulated GPUs: shapes and dtypes without
memory. Triton compiles for those GPUs, down to machine code, and launches nothing.

`make test` compiles each kernel once, for Hopper. With STEEPEN_EVERY_GPU=1 in the environment, as in CI, each
is compiled with all flags for every GPU, which takes two minutes: run it so after changes to a kernel.

Run as a script, outside of Triton's interpreter, this file prints the resources each kernel uses.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.kernels.fp8 import RowwiseFp8, defer_quantization_of_norm
from steepen.kernels.split_fp32 import SplitFp32

# Compute capability × 10 → bytes of shared memory per thread block (CUDA programming guide).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
HOPPER = 90  # runs every kernel
FP8_CAPABILITY, TMA_CAPABILITY = 89, 90  # the first with fp8 GEMMs; with fused linear cross-entropy
# Narrow rows share a program, and narrow GEMMs have smaller tiles. To save time only Hopper compiles for both
# widths, and Blackwell only the head.
WIDTHS = {80: [384], 89: [1024], 90: [384, 1024], 100: []}
# Kernels that may spill registers, with the flags for which they do, and why that is acceptable.
SPILLS = {
    **dict.fromkeys(
        (
            "fused_linear_cross_entropy._exp_difference_kernel SOFTCAP STORE",
            "fused_linear_cross_entropy._exp_difference_kernel SOFTCAP STORE EVEN",
        ),
        "the softcap's gradient needs the logits again; a softcap is not the default",
    ),
    **dict.fromkeys(
        (f"decode._choose_kernel{flags}" for flags in ("", " SOFTCAP")),
        "8 bytes for capability 8.9 without programmatic dependent launch, which hides in reading logits",
    ),
}
EVERY_GPU = os.environ.get("STEEPEN_EVERY_GPU", "") not in ("", "0")
EPS = 1.2e-7
BATCH, TIME = 16, 2048


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs the assembler that Triton brings for Linux on x86-64",
)
def test_every_kernel_compiles_and_fits_its_gpus(tmp_path: Path) -> None:
    from steepen.kernels import fused_linear_cross_entropy

    source = str(Path(fused_linear_cross_entropy.__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # nothing compiled earlier may be reused
        "CUDA_VISIBLE_DEVICES": "",  # a real GPU must not be used
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    every = [kernel for kernel in report["kernels"] if kernel["capability"] == HOPPER]
    assert {kernel["name"] for kernel in every} == set(report["launched"])
    if EVERY_GPU:
        assert {kernel["capability"] for kernel in report["kernels"]} == set(SHARED_MEMORY)
        flags = {(kernel["name"], *flag) for kernel in every for flag in kernel["flags"].items()}
        assert not [flag for flag in flags if (*flag[:2], not flag[2]) not in flags], (
            "compiled with one value of this flag only"
        )
    for kernel in report["kernels"]:
        limit = SHARED_MEMORY[kernel["capability"]]
        if kernel["name"] == "fused_linear_cross_entropy._exp_difference_kernel":
            limit = fused_linear_cross_entropy.HEAD_SHARED_MEMORY  # what its support check requires
            assert kernel["keeps_nan"], "the clamp would hide NaN"
        assert kernel["shared"] <= limit, kernel
        variant = [kernel["name"], *(flag for flag, value in kernel["flags"].items() if value)]
        assert kernel["stack"] == 0 or " ".join(variant) in SPILLS, kernel


def main() -> None:
    """Compile the kernels for the GPUs they are used on, and print their resources as JSON."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    simulate_gpus()
    if not EVERY_GPU:
        compile_only_first_calls()
    gpus = WIDTHS if EVERY_GPU else {HOPPER: [1024]}
    for capability, widths in gpus.items():
        print(f"Compute capability {capability}:", file=sys.stderr)  # errors are printed below it
        with FakeTensorMode(), torch.device("cuda", capability):
            for width in widths:
                call_block(width, fp8=False)
                if capability >= FP8_CAPABILITY:
                    call_block(width, fp8=True)
                call_muon(width)
                call_decode(width)
            for vocabulary in (50_304, 8_192):
                for softcap in (None, 15.0):
                    call_head(vocabulary, softcap, capability)
    kernels = launched_kernels()
    found = [
        {"name": name, "capability": capability, **usage(compiled)}
        for name, kernel in kernels.items()
        for capability in gpus
        for compiled in kernel.device_caches[capability][0].values()
    ]
    print(json.dumps({"launched": list(kernels), "kernels": found}))


def simulate_gpus() -> None:
    """Make torch and Triton see GPUs, numbered by their capability, on which launches do nothing."""
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def properties(device: torch.device) -> SimpleNamespace:
        memory = SHARED_MEMORY[device.index]
        return SimpleNamespace(
            major=device.index // 10, multi_processor_count=132, shared_memory_per_block_optin=memory
        )

    cuda: Any = torch.cuda
    cuda.get_device_properties = properties
    cuda.get_device_capability = lambda device: divmod(device.index, 10)
    # Aligned, as torch's memory is, and distinct: kernels assert that output and input differ.
    fake: Any = FakeTensor
    fake.data_ptr = lambda tensor: 16 * id(tensor)

    def current() -> int:
        return torch.get_default_device().index

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[device]},
        # Returns module, function, registers, spills and the maximum of threads per block.
        load_binary=lambda name, binary, shared, device: (0, 0, 0, 0, 1024),
    )
    fake_driver: Any = SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        get_current_device=current,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", current(), 32),
    )
    driver.set_active(fake_driver)


def compile_only_first_calls() -> None:
    """Leave out calls of kernels that have been compiled, though with other flags or shapes."""
    from triton import JITFunction

    jit: Any = JITFunction
    run = jit.run

    def run_first(kernel: Any, *arguments: Any, **options: Any) -> Any:
        if not kernel.device_caches[HOPPER][0]:
            return run(kernel, *arguments, **options)

    jit.run = run_first


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def call_block(width: int, *, fp8: bool) -> None:
    """Launch a block's kernels, forward and backward; without fp8 also the embedding's and the boundary's."""
    from steepen.kernels import dispatch

    rows, heads, hidden = BATCH * TIME, width // 128, 256 * -(-8 * width // (3 * 256))
    x, rstd = empty(rows, width), empty(rows, dtype=torch.float32)
    kernels = dispatch.block_kernels_for(x, fp8=fp8)
    assert kernels is (dispatch.TRITON_FP8_BLOCK if fp8 else dispatch.TRITON_BLOCK)
    stream = empty(rows, width, dtype=torch.float32)
    for residual in (x, stream):
        kernels.rms_norm(residual, EPS, torch.bfloat16)
        kernels.add_rms_norm(residual, (x,), EPS, torch.bfloat16, keep_sum=False)
        kernels.add_rms_norm(residual, (x, x), EPS, torch.bfloat16)
        kernels.rms_norm_backward(x, x, rstd, residual)
    table = empty(2, TIME, 64)
    for kv in (heads, 1):
        qkv = empty(BATCH, TIME, heads + 2 * kv, 128)
        qk_rstd = kernels.rotate_norm_(qkv, table, EPS, kv)
        dq, dk, dv = (empty(BATCH, count, TIME, 128).transpose(1, 2) for count in (heads, kv, kv))
        kernels.rotate_norm_backward(dq, dk, dv, qkv, qk_rstd, table)
    kernels.swiglu(empty(rows, 2 * hidden))
    kernels.swiglu_backward_(empty(rows, 2 * hidden), empty(rows, hidden))
    kernels.quantize_activation(x)
    gradient = kernels.quantize_gradient(x)
    if fp8:
        gemms = dispatch.fp8_gemm_kernels_for(x)
        assert gemms is dispatch.TRITON_FP8_GEMM and isinstance(gradient, RowwiseFp8)
        data = empty(hidden, width, dtype=torch.float8_e4m3fn)
        transposed = empty(width, hidden, dtype=torch.float8_e4m3fn)
        scale, transposed_scale = (empty(1, side, dtype=torch.float32) for side in (hidden, width))
        amax = empty(hidden + width, dtype=torch.int32)
        gemms.quantize_weight_(data, scale, transposed, transposed_scale, amax, empty(hidden, width))
        gemms.transpose_quantize(gradient, gemms.tensor_scale(gradient))
        gemms.transpose_quantize(defer_quantization_of_norm(x), empty(dtype=torch.float32))
    else:
        others = dispatch.kernels_for(x)
        assert others is dispatch.TRITON
        tokens, embedding = empty(rows, dtype=torch.int64), empty(8_192, width, dtype=torch.float32)
        for residual in (x, stream):
            others.rms_norm_backward(x, x, rstd, residual)
            others.embed_norm(tokens, embedding, EPS, residual.dtype)
            others.embed_norm_backward_(embedding, tokens, residual, residual, rstd)
            others.norm_inject(residual, residual, 0.7, EPS)
            others.norm_inject_backward(residual, residual, rstd, 0.7)
        others.rms_norm_backward(x, x, rstd)
        split = SplitFp32.empty(rows, width, x.device)
        others.inject_norm(stream, stream, 0.7, EPS, torch.bfloat16)
        for residual in (stream, split):
            others.inject_norm_backward(x, x, rstd, residual, stream, rstd, 0.7)
        kernels.rms_norm_backward(x, x, rstd, split)
        others.rms_norm_backward(x, x, rstd, split)


def call_head(vocabulary: int, softcap: float | None, capability: int) -> None:
    """Launch the kernels of head and loss: fused, with and without gradients, and separate."""
    from steepen.kernels.dispatch import TRITON, TRITON_FP8_GEMM

    rows, width, real = 4096, 1024, {50_304: 50_257}.get(vocabulary, vocabulary)
    n, weight, targets = empty(rows, width), empty(vocabulary, width), empty(rows, dtype=torch.int64)
    assert TRITON.supports_fused_linear_cross_entropy(n, weight) == (capability >= TMA_CAPABILITY)
    if capability >= TMA_CAPABILITY:
        loss_of = TRITON.fused_linear_cross_entropy
        _, found = loss_of(n, weight, targets, 1 / rows, softcap, real, gradient=True)
        loss_of(n, weight, targets, 1 / rows, softcap, real, gradient=False)
        assert found is not None
        rstd = empty(rows, dtype=torch.float32)
        TRITON.rms_norm_backward(n, n, rstd, row_factor=found.row_factor, out=n)
        out = empty(rows, width, dtype=torch.float32)
        TRITON.rms_norm_backward(n, n, rstd, row_factor=found.row_factor, out=out)
    TRITON.cross_entropy_(empty(rows, vocabulary), targets, 1 / rows, softcap, real)
    if capability >= FP8_CAPABILITY:
        logits, transposed = empty(rows, vocabulary), empty(vocabulary, rows, dtype=torch.float8_e5m2)
        TRITON_FP8_GEMM.cross_entropy(logits, targets, transposed, 1 / rows, softcap, real)


def call_muon(width: int) -> None:
    """Launch the optimizer's kernels: wide and tall matrices, sides that fill tiles and that do not."""
    from steepen.kernels.dispatch import TRITON
    from steepen.kernels.muon_update import row_square_parts

    weight = empty(3, width, width, dtype=torch.float32)
    for nesterov, direction in ((False, empty(3, width, width)), (True, empty(3, width, width).mT)):
        squares = empty(3, row_square_parts(width), width, dtype=torch.float32)
        for sums in (None, [squares]):
            TRITON.update_momentum([direction], [weight], [weight], sums, beta=0.95, nesterov=nesterov)
        by_row, by_column = (empty(3, *shape, dtype=torch.float32) for shape in ((width, 1), (1, width)))
        for factors in (None, [by_row], [by_column]):
            for cautious in (False, True):
                TRITON.apply_update(
                    [weight], [direction], [1.0], factors, lr=0.02, weight_decay=0.1, cautious=cautious
                )
        for factor in (by_row, by_column):
            TRITON.scale_matrices_(empty(3, width, width), factor)
    for rows, columns in ((width, 4 * width), (1040, 1040)):
        gram = TRITON.gram(TRITON.frobenius_normalize(empty(3, rows, columns), 1.02, 1e-7))
        TRITON.symmetric_polynomial(gram, -4.775, 2.0315, a=3.4445)


def call_decode(width: int) -> None:
    """Launch the kernels of a decode step: one text and several, with and without PDL, greedy and sampled."""
    from steepen.kernels import decode

    heads, hidden, vocabulary, length = width // 128, 256 * -(-8 * width // (3 * 256)), 50_257, 512
    options = decode.launch_options
    for rows, pdl in ((1, True), (1, False), (32, True)):
        decode.launch_options = options if pdl else lambda device, rows: {"PDL": False}
        x, index = empty(rows, width, dtype=torch.float32), empty(rows, dtype=torch.int64)
        keys = empty(rows, heads, length, 128)
        for window in (None, 256):
            attend = decode.DecodeAttention(
                empty(2, TIME, 64), index, index, heads=heads, length=length, window=window, scale=1, eps=EPS
            )
            attended = attend(decode.decode_linear(x, empty(3 * width, width), norm_eps=EPS), keys, keys)
        decode.decode_linear(attended, empty(width, width), epilogue="add", residual=x, factor=0.5)
        h = decode.decode_linear(x, empty(2 * hidden, width), norm_eps=EPS, epilogue="swiglu")
        decode.decode_linear(x, empty(hidden, width), norm_eps=EPS, epilogue="relu2")
        decode.decode_linear(h, empty(width, hidden), epilogue="add", residual=x, factor=0.5, out=x)
        raw = decode.decode_linear(x, empty(vocabulary, width), norm_eps=EPS)
        found = empty(rows, 64, dtype=torch.int64)
        for temperature, softcap in ((0.0, None), (0.8, None), (0.8, 15.0), (0.0, 15.0)):
            decode.DecodeChoice(
                empty(rows, 64, dtype=torch.float32), index, found, index, prompt=9, multiplier=0.5,
                softcap=softcap, temperature=temperature, top_p=0.9,
            )(raw)  # fmt: skip
    decode.launch_options = options


def launched_kernels() -> dict[str, Any]:
    """The package's launched kernels, without functions that only kernels call: `module.name` → kernel."""
    from triton import JITFunction

    from steepen import kernels

    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"steepen.kernels.{info.name}")
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and re.search(rf"\b{name}\[", source):
                found[f"{info.name}.{name}"] = value
    return found


def usage(compiled: Any) -> dict[str, Any]:
    """The flags a kernel was compiled with, and its resources: bytes of memory and registers."""
    from triton import knobs

    [binary] = [path for path in compiled.metadata_group.values() if str(path).endswith(".cubin")]
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    names = compiled.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in compiled.src.constants.items()}
    return {
        "flags": {name: value for name, value in constants.items() if isinstance(value, bool)},
        "shared": compiled.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "keeps_nan": "min.NaN.f32" in compiled.asm["ptx"] and "min.f32" not in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    main()
