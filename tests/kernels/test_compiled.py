"""Every Triton kernel passes Triton's compiler and fits the GPUs it is meant for: none is needed to see that.

The interpreter that the other tests run on takes what the compiler refuses. Here the functions that launch
the kernels are called as training calls them, with tensors of GPUs that are not there: shapes and types
without memory. Triton compiles for those GPUs, down to machine code; where it would launch, nothing happens.

Run as a script, outside of Triton's interpreter, this file prints what each kernel takes of each GPU.
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

# Compute capability, without its point → bytes of shared memory a block may have (CUDA's programming guide).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
HOPPER = 90  # sees every kernel
EIGHT_BITS, COPY_ENGINE = 89, 90  # the first with products in eight bits, the first with `odds`
# Narrow rows share a program, and narrow products have smaller tiles. To save time one GPU sees both widths,
# and the newest the head alone.
WIDTHS = {80: [384], 89: [1024], 90: [384, 1024], 100: []}
# Kernels that may keep numbers in memory for want of registers, with the flags they do it with, and why.
SPILLS = {
    **dict.fromkeys(
        (
            "fused_linear_cross_entropy._odds_kernel CAPPED STORE",
            "fused_linear_cross_entropy._odds_kernel CAPPED STORE EVEN",
        ),
        "logits are needed again after their odds; a cap is not the default",
    ),
}
EPS = 1.2e-7
BATCH, TIME = 16, 2048


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs the assembler that Triton brings for Linux on x86-64",
)
def test_every_kernel_compiles_and_fits_the_gpus(tmp_path: Path) -> None:
    from steepen.kernels import fused_linear_cross_entropy as odds

    source = str(Path(odds.__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # what was compiled before must not count
        "CUDA_VISIBLE_DEVICES": "",  # a GPU that is there must not be asked
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    every = [kernel for kernel in report["kernels"] if kernel["capability"] == HOPPER]
    assert {kernel["name"] for kernel in every} == set(report["launched"])
    flags = {(kernel["name"], *flag) for kernel in every for flag in kernel["flags"].items()}
    assert not [flag for flag in flags if (*flag[:2], not flag[2]) not in flags], "compiled only this way"
    for kernel in report["kernels"]:
        most = SHARED_MEMORY[kernel["capability"]]
        if kernel["name"] == "fused_linear_cross_entropy._odds_kernel":
            most = odds.SHARED_MEMORY  # by which it is decided whether it fits
            assert kernel["keeps_nan"], "the limit on odds would hide what is no number"
        assert kernel["shared"] <= most, kernel
        way = [kernel["name"], *(flag for flag, value in kernel["flags"].items() if value)]
        assert kernel["stack"] == 0 or " ".join(way) in SPILLS, kernel


def main() -> None:
    """Compile every kernel for every GPU that it is used on, and print what came out as JSON."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    pretend()
    for capability, widths in WIDTHS.items():
        print(f"Compute capability {capability}:", file=sys.stderr)  # what goes wrong is printed below
        with FakeTensorMode(), torch.device("cuda", capability):
            for width in widths:
                call_block(width, eight=False)
                if capability >= EIGHT_BITS:
                    call_block(width, eight=True)
                call_muon(width)
            for vocabulary in (50_304, 8_192):
                for softcap in (None, 15.0):
                    call_head(vocabulary, softcap, capability)
    kernels = launched_kernels()
    found = [
        {"name": name, "capability": capability, **usage(compiled)}
        for name, kernel in kernels.items()
        for capability in WIDTHS
        for compiled in kernel.device_caches[capability][0].values()
    ]
    print(json.dumps({"launched": list(kernels), "kernels": found}))


def pretend() -> None:
    """Have torch and Triton believe in GPUs, numbered by their capability, on which launches do nothing."""
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
    # Aligned, as memory from torch is, and no two alike: a kernel refuses to write where it reads.
    fake: Any = FakeTensor
    fake.data_ptr = lambda tensor: 16 * id(tensor)

    def current() -> int:
        return torch.get_default_device().index

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[device]},
        # Gives back a module, a function, registers, spills, and the most threads that a block may have.
        load_binary=lambda name, binary, shared, device: (0, 0, 0, 0, 1024),
    )
    nothing: Any = SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        get_current_device=current,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", current(), 32),
    )
    driver.set_active(nothing)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def call_block(width: int, *, eight: bool) -> None:
    """What a block launches, forward and back; and in sixteen bits the embedding and the boundary."""
    from steepen.kernels import kernels_for

    rows, heads, hidden = BATCH * TIME, width // 128, 256 * -(-8 * width // (3 * 256))
    x, rstd = empty(rows, width), empty(rows, dtype=torch.float32)
    kernels: Any = kernels_for(x, eight=eight)
    assert kernels.__name__ == f"steepen.kernels.fused{8 if eight else ''}"
    kernels.rms_norm(x, EPS)
    kernels.add_rms_norm(x, x, EPS)
    kernels.rms_norm_backward(x, x, rstd)
    kernels.rms_norm_backward(x, x, rstd, x)
    qkv, table = empty(BATCH, TIME, 3, heads, 128), empty(2, TIME, 64)
    sizes = kernels.rotate_norm_(qkv, table, EPS)
    dq, dk, dv = (empty(BATCH, heads, TIME, 128).transpose(1, 2) for _ in range(3))
    kernels.rotate_norm_backward(dq, dk, dv, qkv, sizes, table)
    kernels.swiglu(empty(rows, 2 * hidden))
    kernels.swiglu_backward_(empty(rows, 2 * hidden), empty(rows, hidden))
    kernels.quantise_activation(x)
    kernels.quantise_gradient(x)
    if eight:
        small = empty(hidden, width, dtype=torch.float8_e4m3fn)
        turned = empty(width, hidden, dtype=torch.float8_e4m3fn)
        scale, turned_scale = (empty(1, side, dtype=torch.float32) for side in (hidden, width))
        largest = empty(hidden + width, dtype=torch.int32)
        kernels.quantise_weight_(small, scale, turned, turned_scale, largest, empty(hidden, width))
        gradient = kernels.quantise_gradient(x)
        kernels.turn(gradient, kernels.size_of(gradient))
        kernels.turn(kernels.normed(x), empty(dtype=torch.float32))
    else:
        tokens, rows_of_all = empty(rows, dtype=torch.int64), empty(8_192, width, dtype=torch.float32)
        kernels.embed_norm(tokens, rows_of_all, EPS, torch.bfloat16)
        kernels.embed_norm_backward_(rows_of_all, tokens, x, x, rstd)
        kernels.swiglu_backward_(empty(rows, 2 * hidden), empty(rows, hidden), empty(rows, hidden))
        kernels.norm_inject(x, x, 0.7, EPS)
        kernels.norm_inject_backward(x, x, rstd, 0.7)


def call_head(vocabulary: int, softcap: float | None, capability: int) -> None:
    """What the head and its loss launch: in one product, with and without gradients, and apart."""
    from steepen.kernels import fused, fused8

    rows, width = 4096, 1024
    n, weight, targets = empty(rows, width), empty(vocabulary, width), empty(rows, dtype=torch.int64)
    assert fused.has_odds(n, weight) == (capability >= COPY_ENGINE)
    if capability >= COPY_ENGINE:
        fused.odds(n, weight, targets, 1 / rows, softcap, gradient=False)
        _, parts = fused.odds(n, weight, targets, 1 / rows, softcap, gradient=True)
        assert parts is not None
        fused.rms_norm_backward(n, n, empty(rows, dtype=torch.float32), factor=parts[1], out=n)
    fused.cross_entropy_(empty(rows, vocabulary), targets, 1 / rows, softcap)
    if capability >= EIGHT_BITS:
        fused8.cross_entropy_(empty(rows, vocabulary), targets, 1 / rows, softcap)


def call_muon(width: int) -> None:
    """What the optimizer launches: for wide matrices and tall, for sides that fill tiles and that do not."""
    from steepen.kernels import fused

    weight = empty(3, width, width, dtype=torch.float32)
    for nesterov, direction in ((False, empty(3, width, width)), (True, empty(3, width, width).mT)):
        fused.momentum_into([direction], [weight], [weight], 0.95, nesterov)
        fused.decay_and_add([weight], [direction], [1.0], 0.02, 0.1)
    for rows, columns in ((width, 4 * width), (1040, 1040)):
        gram = fused.gram(fused.normalised(empty(3, rows, columns), 1.02, 1e-7))
        fused.symmetric_polynomial(gram, -4.775, 2.0315, a=3.4445)


def launched_kernels() -> dict[str, Any]:
    """The package's kernels, without those that only others call: `module.name` → kernel."""
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
    """The flags a kernel was compiled with, and what it takes: bytes of memory and registers."""
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
