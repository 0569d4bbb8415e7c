"""Hardware limits of a training step on one GPU: GEMMs, attention, kernels and power, each measured alone.

    python benchmarks/ceilings.py                                      # every section, d8
    python benchmarks/ceilings.py --depth 12 --only gemms --only limit
    python benchmarks/ceilings.py --json ceilings.json

gemms          every GEMM of a micro-batch, cold (a burst after idling) and hot
tiles          forward and dgrad GEMMs with our cuBLASLt algorithm and with torch's, interleaved and sustained
limit          all GEMMs and attention of a micro-batch in training's order and nothing else: the time of a
               step if everything else, optimizer included, were free
attention      cuDNN against flash, forward and backward of one block
streams        GEMMs and memory-bound additions one after the other, and on two CUDA streams
cross-entropy  our kernel against torch's, forward and backward; bytes count each logit read and written once
head           logits GEMM, then cross-entropy kernel, against fused linear cross-entropy; one chunk of tokens
splits         wgrad GEMMs split in other ways: in two at every 512th row, transposed, batched over tokens
profile        GPU time of a training step by group of kernels, cold and hot

Hot means after --warm-up seconds of large GEMMs. Alternatives are interleaved, so that a drift of the clock
affects all of them, and times are medians. FLOPs are counted as in the paper (causal attention); MFU is
relative to the GPU's dense bf16 peak. Watts and MHz are sampled while the GPU is hot. A section that fails
prints its error, the others still run, and the exit code is 1. The sections gemms and limit can also be
selected by their former names, products and floor.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemm_workload import Attention, Linear, MicroBatch, calls_of_step, normal, torch_gemm
from gpu_timing import (
    DEVICE,
    ON_GPU,
    Call,
    PowerSampler,
    heat_up,
    power,
    time_calls,
    time_cold,
    time_interleaved,
)
from kernel_profile import Row, profile
from torch.nn import functional
from torch.nn.attention import SDPBackend

from steepen.kernels.cublaslt_gemm import accumulate_gemm_, selected_tile
from steepen.kernels.dispatch import kernels_for
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.flops import flops_per_token
from steepen.training.device import configure_backends, peak_flops

DIRECTIONS = ("forward", "dgrad", "wgrad")
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHUNKS = 4  # of tokens, for batched wgrad GEMMs
FORMATS = {
    "ms": ".3f",
    "TFLOP/s": ".1f",
    "TB/s": ".2f",
    "tokens/s": ",.0f",
    "MFU": ".1%",
    "fraction": ".1%",
    "ratio": ".3f",
}


def gemms(args: Any) -> list[Row]:
    batch = MicroBatch(args.shape, args.tokens, blocks=1)
    linears = {name: [linear] for name, linear in batch.blocks[0].items()} | {"head": batch.head}
    calls: dict[str, Call] = {}
    flops: dict[str, float] = {}
    count: dict[str, int] = {}  # per micro-batch
    for name, chunks in linears.items():
        for direction in DIRECTIONS:
            row, functions = f"{name} {direction}", [getattr(chunk, direction) for chunk in chunks]
            calls[row] = lambda functions=functions: [function() for function in functions]
            flops[row] = sum(chunk.flops for chunk in chunks)
            count[row] = 1 if name == "head" else args.blocks
    cold = {row: time_cold(call, args.idle) for row, call in calls.items()}
    hot, sampled = time_interleaved(calls, args.seconds, args.warm_up)
    for values in (flops, cold, hot):
        values["micro-batch"] = sum(count[row] * values[row] for row in calls)
    return [
        {
            "GEMM": row,
            "per micro-batch": count.get(row),
            "cold ms": 1e3 * cold[row],
            "cold TFLOP/s": flops[row] / cold[row] / 1e12,
            "hot ms": 1e3 * hot[row],
            "hot TFLOP/s": flops[row] / hot[row] / 1e12,
            **sampled,
        }
        for row in flops
    ]


def tiles(args: Any) -> list[Row]:
    batch = MicroBatch(args.shape, args.tokens, blocks=1)
    rows = list[Row]()
    heat_up(args.warm_up)
    for name, linear in (batch.blocks[0] | {"head": batch.head[0]}).items():
        for direction in ("forward", "dgrad"):
            run: Any = getattr(linear, direction)
            calls = {"torch": partial(run, torch_gemm), "selected": run}
            interleaved, _ = time_interleaved(calls, args.seconds, 0.0)
            sustained: dict[str, float] = {}
            sampled: Row = {}
            for which, call in calls.items():
                with PowerSampler() as sampler:
                    count = max(1, round(0.02 / interleaved[which]))
                    sustained[which] = time_calls(call, args.seconds, 0.3, calls_per_sample=count)
                sampled |= {f"{which}, {unit}": value for unit, value in power(sampler).items()}
            forward = direction == "forward"
            x, weight = (linear.x, linear.weight.t()) if forward else (linear.d, linear.weight)
            tile = selected_tile(x, weight, accumulate_into=linear.residual if forward else None)
            row: Row = {"GEMM": f"{name} {direction}", "contraction": x.shape[1]}
            row["tile"] = "torch's" if tile is None else f"{tile[0]}×{tile[1]}"
            for heading, times in (("interleaved", interleaved), ("sustained", sustained)):
                row |= {f"{heading}, {which}, ms": 1e3 * s for which, s in times.items()}
                row[f"{heading}, ratio"] = times["torch"] / times["selected"]
            rows.append(row | sampled)
    return rows


def limit(args: Any) -> list[Row]:
    batch = MicroBatch(args.shape, args.tokens, args.blocks)
    attention = Attention(args.shape, args.rows, SDPBackend.CUDNN_ATTENTION)
    order = calls_of_step(batch, attention)
    gemm_calls = [call for call in order if isinstance(call.__self__, Linear)]
    matmul = args.cost.matmul + args.cost.head
    counted = sum(call.__self__.flops for call in gemm_calls) / args.tokens
    assert counted == matmul, f"{counted} FLOPs per token, but flops_per_token says {matmul}"
    parts = {
        "GEMMs and attention": (order, args.cost.total),
        "GEMMs": (gemm_calls, matmul),
        "attention": ([call for call in order if call.__self__ is attention], args.cost.attention),
    }
    peak, rows = peak_flops(DEVICE), list[Row]()
    for name, (calls, flops) in parts.items():
        with PowerSampler() as sampler:
            whole = lambda calls=calls: [call() for call in calls]  # noqa: E731
            seconds = time_calls(whole, args.sustained, args.warm_up, calls_per_sample=4)
        rate = args.tokens / seconds
        row = {"sustained": name, "ms": 1e3 * seconds, "tokens/s": rate, "TFLOP/s": rate * flops / 1e12}
        row |= {"MFU": rate * flops / peak if peak else None}
        rows.append(row | power(sampler))
    return rows


def attention(args: Any) -> list[Row]:
    calls: dict[str, Call] = {}
    for name, backend in BACKENDS.items():
        block = Attention(args.shape, args.rows, backend)
        block.forward()
        calls[f"{name} forward"] = lambda block=block: (block.forward(), block.outputs.pop())
        calls[f"{name} backward"] = partial(block.backward, retain=True)
    seconds_by_call, sampled = time_interleaved(calls, args.seconds, args.warm_up)
    forward = args.tokens * args.cost.attention / args.blocks / 3
    flops = {name: forward if name.endswith("forward") else 2 * forward for name in calls}
    return [
        {"attention": name, "ms": 1e3 * s, "TFLOP/s": flops[name] / s / 1e12, **sampled}
        for name, s in seconds_by_call.items()
    ]


def streams(args: Any) -> list[Row]:
    qkv = MicroBatch(args.shape, args.tokens, blocks=1).blocks[0]["qkv"]
    a, b, out = (normal(args.tokens, args.shape.mlp_width) for _ in range(3))
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    add = partial(torch.add, a, b, out=out)

    def four_times(*functions: Call) -> None:
        for _ in range(4):
            for function in functions:
                function()

    def two_streams(gemm: Call) -> None:
        side.wait_stream(here)
        with torch.cuda.stream(side):
            four_times(add)
        four_times(gemm)
        here.wait_stream(side)

    calls: dict[str, Call] = {f"4 additions of {out.nbytes / 1e6:,.0f} MB": partial(four_times, add)}
    for direction in ("forward", "wgrad"):
        gemm = getattr(qkv, direction)
        calls[f"4 qkv {direction}"] = partial(four_times, gemm)
        calls[f"4 qkv {direction} and 4 additions, one after the other"] = partial(four_times, gemm, add)
        calls[f"4 qkv {direction} and 4 additions, on two streams"] = partial(two_streams, gemm)
    seconds_by_call, sampled = time_interleaved(calls, args.seconds, args.warm_up)
    return [{"work": name, "ms": 1e3 * s, **sampled} for name, s in seconds_by_call.items()]


def cross_entropy(args: Any) -> list[Row]:
    calls: dict[str, Call] = {}
    before: dict[str, Call] = {}
    moved: dict[str, int] = {}
    for rows, columns in args.logits:
        start, targets = normal(rows, columns), torch.randint(columns, (rows,), device=DEVICE)
        logits, leaf = start.clone(), start.detach().requires_grad_()
        ours, theirs = (f"{rows:,} × {columns:,}, {name}" for name in ("kernel", "torch"))
        calls[ours] = partial(kernels_for(logits).cross_entropy_, logits, targets, 1 / rows, None)
        before[ours] = partial(logits.copy_, start)  # the gradient overwrites the logits
        calls[theirs] = lambda x=leaf, y=targets: torch.autograd.grad(functional.cross_entropy(x, y), x)
        moved[ours] = moved[theirs] = 2 * start.nbytes
    seconds_by_call, sampled = time_interleaved(calls, args.seconds, args.warm_up, before)
    return [
        {"logits": name, "ms": 1e3 * s, "TB/s": moved[name] / s / 1e12, **sampled}
        for name, s in seconds_by_call.items()
    ]


def head(args: Any) -> list[Row]:
    chunk = MicroBatch(args.shape, args.tokens, blocks=1).head[0]
    n, weight = chunk.x, chunk.weight
    logits = n.new_empty(len(n), len(weight))
    targets = torch.randint(len(weight), (len(n),), device=DEVICE)
    kernels = kernels_for(n)

    def separate() -> torch.Tensor:
        torch.mm(n, weight.t(), out=logits)
        return kernels.cross_entropy_(logits, targets, 1.0, None)[0]

    def fused() -> torch.Tensor:
        return kernels.fused_linear_cross_entropy(n, weight, targets, 1.0, None, gradient=True)[0]

    gap = (separate() - fused()).abs().max().item()
    assert gap < 0.1, f"losses differ by {gap:.2g}"  # only the separate form rounds logits to bf16
    calls: dict[str, Call] = {
        "GEMM": lambda: torch.mm(n, weight.t(), out=logits),
        "GEMM, then cross-entropy": separate,
        "fused linear cross-entropy": fused,
    }
    seconds_by_call, sampled = time_interleaved(calls, args.seconds, args.warm_up)
    return [
        {
            f"{len(n):,} × {len(weight):,} logits": name,
            "ms": 1e3 * s,
            "TFLOP/s": chunk.flops / s / 1e12,
            **sampled,
        }
        for name, s in seconds_by_call.items()
    ]


def has_fused_head(args: Any) -> bool:
    row = torch.empty(1, args.shape.width, dtype=torch.bfloat16, device=DEVICE)
    return kernels_for(row).supports_fused_linear_cross_entropy(row, row.expand(args.shape.vocabulary, -1))


def splits(args: Any) -> list[Row]:
    block = MicroBatch(args.shape, args.tokens, blocks=1).blocks[0]
    return [row for name, linear in block.items() for row in splits_of(name, linear, args)]


def splits_of(name: str, linear: Linear, args: Any) -> list[Row]:
    total, x, d, height = linear.grad, linear.x, linear.d, len(linear.grad)
    transposed, sums = torch.zeros_like(total.t().contiguous()), torch.zeros_like(total)
    partial_sums = torch.zeros(CHUNKS, *total.shape, device=DEVICE)
    left, right = d.unflatten(0, (CHUNKS, -1)).mT, x.unflatten(0, (CHUNKS, -1))

    def split(at: int) -> None:
        for part in (slice(at), slice(at, None)):
            accumulate_gemm_(total[part], d[:, part].t(), x, 1.0)

    def batched() -> None:
        if ON_GPU:
            torch.bmm(left, right, out_dtype=torch.float32, out=partial_sums)
        else:  # GEMMs with mixed dtypes exist only on a GPU
            torch.bmm(left.float(), right.float(), out=partial_sums)
        total.add_(torch.sum(partial_sums, 0, out=sums))

    calls: dict[str, Call] = {"whole": linear.wgrad}
    for at in range(args.cut, height, args.cut):
        calls[f"{at} + {height - at} rows"] = partial(split, at)
    calls["transposed"] = partial(accumulate_gemm_, transposed, x.t(), d, 1.0)
    calls[f"{CHUNKS} batches over tokens and a sum"] = batched
    whole = torch.zeros_like(total)
    accumulate_gemm_(whole, d.t(), x, 1.0)
    for variant, call in calls.items():
        total.zero_()
        call()
        result = transposed.t() if variant == "transposed" else total
        gap = (result - whole).abs().max() / whole.abs().max()
        assert gap < 1e-3, f"{name}, {variant}: differs from the whole GEMM by {gap:.2g} of its amax"
    seconds_by_call, sampled = time_interleaved(calls, args.seconds, args.warm_up)
    return [
        {"linear": name, "wgrad": variant, "ms": 1e3 * s, "TFLOP/s": linear.flops / s / 1e12, **sampled}
        for variant, s in seconds_by_call.items()
    ]


SECTIONS: dict[str, Callable[[Any], list[Row]]] = {
    "gemms": gemms,
    "tiles": tiles,
    "limit": limit,
    "attention": attention,
    "streams": streams,
    "cross-entropy": cross_entropy,
    "head": head,
    "splits": splits,
    "profile": profile,
}
NEED_A_GPU = ("attention", "streams")


def run(name: str, args: Any) -> Row:
    """The rows of a section, or the reason why there are none; an error does not stop the other sections."""
    if name in NEED_A_GPU and not ON_GPU:
        return {"skipped": "needs a CUDA GPU"}
    if name == "head" and not has_fused_head(args):
        return {"skipped": "fused linear cross-entropy does not support this GPU or this size"}
    try:
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        return {"rows": SECTIONS[name](args)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:{FORMATS.get(key.rpartition(' ')[-1], '.0f')}}" if isinstance(value, float) else str(value)
    )


def print_section(name: str, result: Row) -> None:
    print(f"\n{name}")
    if "rows" not in result:
        print("  " + "".join(f"{outcome}: {reason}" for outcome, reason in result.items()))
        return
    rows = result["rows"]
    lines = [list(rows[0]), *([cell(key, value) for key, value in row.items()] for row in rows)]
    sides = ["<" if isinstance(value, str) else ">" for value in rows[0].values()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, sides, widths, strict=True)
        print("  " + "   ".join(f"{text:{side}{width}}" for text, side, width in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(SECTIONS),
        help="measure this section; repeat for several",
    )
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--rows", type=int, default=32, help="micro-batch, in sequences")
    parser.add_argument("--micro-batches", type=int, default=2, help="of the profiled step")
    parser.add_argument("--seconds", type=float, default=0.4, help="of measurement per row")
    parser.add_argument("--sustained", type=float, default=6.0, help="seconds per row of the section limit")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds of load before hot measurements")
    parser.add_argument(
        "--idle", type=float, default=1.0, help="seconds without load before cold measurements"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="test this script with a tiny model, on any machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()
    if not ON_GPU and not args.tiny:
        parser.error("no CUDA GPU seconds_by_call; --tiny tests the script without one")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: no such directory: {args.json.parent}")
    scale = SizeRule(context=args.context, vocabulary=args.vocabulary)
    logits, cut = [(65_536, 8_192), (8_192, args.vocabulary)], 512
    if args.tiny:
        args.depth, args.rows, args.warm_up, args.idle = 2, 4, 0.0, 0.0
        scale = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=256)
        logits, cut = [(32, 64), (16, 256)], 32
    arm = find_arm("vanilla")
    args.scale, args.shape, args.logits, args.cut = scale, arm.shape(args.depth, scale), logits, cut
    args.cost, args.blocks = flops_per_token(arm, args.shape, 1), args.shape.allocation.executed(1)
    args.tokens = args.rows * scale.context

    machine = torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(f"{machine}, torch {torch.__version__}, bf16")
    print(f"d{args.depth}: width {args.shape.width}, MLP {args.shape.mlp_width}, {args.blocks} blocks")
    print(f"{args.rows}×{scale.context} tokens per micro-batch, vocabulary {scale.vocabulary:,}")
    settings = {
        key: getattr(args, key) for key in ("depth", "rows", "seconds", "sustained", "warm_up", "idle")
    }
    about = {"device": machine, "torch": torch.__version__, **settings, "micro_batches": args.micro_batches}
    about |= {"context": scale.context, "vocabulary": scale.vocabulary}
    results: dict[str, Row] = {}
    with configure_backends(DEVICE):
        for name in args.only or SECTIONS:
            results[name] = run(name, args)
            print_section(name, results[name])
            if args.json:  # after each section, so that an interruption loses one at most
                args.json.write_text(json.dumps({**about, "sections": results}, indent=1) + "\n")
    if any("error" in result for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
