"""Causal attention, forward and backward: FlashAttention-3 and torch's flash kernel against cuDNN's.

    python benchmarks/attention_backends.py [--seconds 1] [--depths 8 12 18]

Heads of 128, contexts of 2,048, 65,536 tokens a call, bf16, queries and keys as training has them (views of
one tensor). Backends take turns; ratios are to cuDNN. FlashAttention-3 is listed where `flash_attn_interface`
is installed (`steepen.training.device.flash_attention_3`).
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from gpu_timing import DEVICE, ON_GPU, time_calls
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from steepen.training.device import flash_attention_3

CONTEXT, HEAD, TOKENS = 2048, 128, 65_536
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 12, 18])
    options = parser.parse_args()
    if not ON_GPU:
        raise SystemExit("this benchmark needs a GPU.")
    with flash_attention_3(DEVICE) as installed:
        pass
    kinds = {
        "cuDNN": (SDPBackend.CUDNN_ATTENTION, False),
        "flash (torch)": (SDPBackend.FLASH_ATTENTION, False),
    }
    if installed:
        kinds["FlashAttention-3"] = (SDPBackend.FLASH_ATTENTION, True)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, FlashAttention-3 installed: {installed}"
    )
    for depth in options.depths:
        shape = (TOKENS // CONTEXT, CONTEXT, 3, depth, HEAD)
        qkv = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        d = torch.randn(shape[0], depth, CONTEXT, HEAD, device=DEVICE, dtype=torch.bfloat16)

        def call() -> torch.Tensor:
            query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))  # noqa: B023
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
            out.backward(d)  # noqa: B023
            return out

        seconds: dict[str, float] = {}
        outputs: dict[str, torch.Tensor] = {}
        for _ in range(TURNS):
            for name, (backend, third) in kinds.items():
                chosen = flash_attention_3(DEVICE) if third else contextlib.nullcontext()
                with chosen, sdpa_kernel(backend):
                    outputs[name] = call().detach()
                    found = time_calls(call, options.seconds / TURNS, 0.2)
                seconds[name] = min(found, seconds.get(name, found))
        flops = 3.5 * 4 * TOKENS * depth * HEAD * (CONTEXT + 1) / 2
        for name, took in seconds.items():
            away = (outputs[name] - outputs["cuDNN"]).abs().max().item()
            print(
                f"d{depth:<3} {name:17} {1e3 * took:7.3f} ms  {flops / took / 1e12:6.0f} TFLOP/s  "
                f"{seconds['cuDNN'] / took:.2f} x cuDNN  largest difference {away:.1e}"
            )


if __name__ == "__main__":
    main()
