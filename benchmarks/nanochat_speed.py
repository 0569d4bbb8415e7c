"""Whole training steps of steepen, as configured by default, against nanochat's and the limit, on one GPU.

    python benchmarks/nanochat_speed.py PATH --depths 8 12 20 [--precision fp8]
    python benchmarks/nanochat_speed.py --depths 3 4 --small --rounds 200

PATH is a checkout of nanochat, whose model, optimizer and fp8 layers are imported and compiled as its own
training script does; without it only the limit is measured beside our step. Both models have this depth,
width, heads, vocabulary and context, and full attention in every layer; nanochat's block has as many
parameters in its matrices (an MLP of 4 × width without a gate), and value embeddings besides. A step is a
whole optimizer step; no weight is zero. The limit is the GEMMs and attention of our step alone (`ceilings.py
--only limit`), in bf16. Printed are tokens/s, the ratio to nanochat, the fraction of the limit, and peak
memory. Steps alternate, so that a drift of the clock affects all.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from gemm_workload import Attention, MicroBatch, calls_of_step
from gpu_timing import DEVICE, ON_GPU, SAMPLE_SECONDS, time_interleaved
from throughput import FusedStep, build, install
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from steepen.model.shape import Shape, SizeRule
from steepen.recipe.flops import flops_per_token
from steepen.training.device import configure_backends

SMALLEST_FP8 = 128  # features of a layer that nanochat's training script computes in fp8


class NanochatStep:
    """An optimizer step of nanochat's compiled model."""

    def __init__(self, shape: Shape, rows: int, precision: str) -> None:
        gpt = importlib.import_module("nanochat.gpt")
        config = gpt.GPTConfig(
            sequence_len=shape.context, vocab_size=shape.vocabulary, n_layer=shape.depth,
            n_head=shape.heads, n_kv_head=shape.heads, n_embd=shape.width, window_pattern="L",
        )  # fmt: skip
        with torch.device("meta"):
            model = gpt.GPT(config)
        model.to_empty(device=DEVICE)
        model.init_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.add_(0.5 * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
        if precision == "fp8":
            fp8 = importlib.import_module("nanochat.fp8")
            recipe = fp8.Float8LinearConfig.from_recipe_name("tensorwise")
            fp8.convert_to_float8_training(model, config=recipe, module_filter_fn=fits_fp8)
        self.rows = rows
        self.optimizer = model.setup_optimizer()
        self.model: Any = torch.compile(model, dynamic=False) if ON_GPU else model

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=inputs.device)
        micro_batches = len(inputs) // self.rows
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = self.model(x, y) / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        return total


def fits_fp8(module: nn.Module, name: str) -> bool:
    """The layers that nanochat's training script converts."""
    if not isinstance(module, nn.Linear):
        return False
    sizes = module.in_features, module.out_features
    return all(size % 16 == 0 for size in sizes) and min(sizes) >= SMALLEST_FP8


def peak_memory(step: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, float]:
    """A step's function, made and run twice, and the most memory it had allocated beyond what was before."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    made = step()
    for _ in range(2):
        made(*batch)
    return made, ((torch.cuda.max_memory_allocated() if ON_GPU else 0) - before) / 2**30


def compare(depth: int, rule: SizeRule, rows: int, batch: tuple[Tensor, Tensor], args: Any) -> dict[str, Any]:
    """One row: the steps at one depth."""
    network = build("vanilla", depth, rule, DEVICE, args)
    shape, tokens = network.shape, batch[0].numel()

    def ours() -> FusedStep:
        graphs = install(network, args.precision, tokens)
        return FusedStep(network, network.passes, rows, len(batch[0]), 1e-4, graphs)

    step, memory = peak_memory(ours, batch)
    calls = {"steepen": lambda: step(*batch)}
    other_memory = None
    if args.path is not None:
        other, other_memory = peak_memory(lambda: NanochatStep(shape, rows, args.precision), batch)
        calls["nanochat"] = lambda: other(*batch)
    if args.precision == "bf16":
        work = MicroBatch(shape, rows * shape.context, shape.allocation.executed(network.passes))
        order = calls_of_step(work, Attention(shape, rows, SDPBackend.CUDNN_ATTENTION))
        order *= len(batch[0]) // rows
        calls["limit"] = lambda: [call() for call in order]
    seconds, power = time_interleaved(calls, args.rounds * SAMPLE_SECONDS, args.warm_up)
    rates = {name: tokens / value for name, value in seconds.items()}
    cost = flops_per_token(network.arm, shape, network.passes).total
    return {
        "depth": depth, "precision": args.precision, "tokens_per_second": rates["steepen"],
        **{name: rates.get(name) for name in ("nanochat", "limit")},
        "ratio": rates["steepen"] / rates["nanochat"] if "nanochat" in rates else None,
        "fraction": rates["steepen"] / rates["limit"] if "limit" in rates else None,
        "tflops": rates["steepen"] * cost / 1e12, "gib": memory, "nanochat_gib": other_memory, **power,
    }  # fmt: skip


def main() -> None:
    """Print one row per depth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, nargs="?", help="a checkout of nanochat; default: without it")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 12])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--rows", type=int, default=32, help="micro-batch, in sequences")
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    parser.add_argument("--precision", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each, in turn")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds of GEMMs before")
    parser.add_argument("--small", action="store_true", help="8k vocabulary, 64×1024 tokens, as at d3 and d4")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.residual_stream, args.weights = "fp32", "random"
    if args.small:
        args.context, args.vocabulary, args.rows, args.batch_tokens = 1024, 8192, 64, 65_536
    rule = SizeRule(context=args.context, vocabulary=args.vocabulary)
    if args.tiny:
        args.depths, args.context, args.vocabulary, args.rows, args.batch_tokens = [2], 128, 256, 2, 512
        rule = SizeRule(aspect=32, head_dim=32, mlp_multiple=32, context=128, vocabulary=256)
    if args.path is not None:
        sys.path.insert(0, str(args.path))
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = args.batch_tokens // args.context, args.context + 1
    text = torch.randint(0, args.vocabulary, size, generator=generator, device=DEVICE)
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    found: list[dict[str, Any]] = []
    with configure_backends(DEVICE):
        for depth in args.depths:
            found.append(compare(depth, rule, args.rows, batch, args))
            torch._dynamo.reset()
    if args.json:
        print(json.dumps(found))
        return
    columns = {  # each with its name in a row
        "steepen": ("tokens_per_second", ",.0f"), "nanochat": ("nanochat", ",.0f"), "ratio": ("ratio", ".3f"),
        "limit": ("limit", ",.0f"), "fraction": ("fraction", ".1%"), "GiB": ("gib", ".1f"),
        "nanochat GiB": ("nanochat_gib", ".1f"), "W": ("W", ".0f"), "MHz": ("MHz", ".0f"),
    }  # fmt: skip
    print(f"tokens/s{''.join(f'{title:>13}' for title in columns)}")
    for row in found:
        cells = ["-" if row[key] is None else f"{row[key]:{form}}" for key, form in columns.values()]
        print(f"d{row['depth']:<7}{''.join(f'{cell:>13}' for cell in cells)}")


if __name__ == "__main__":
    main()
