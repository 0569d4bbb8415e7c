"""What bounds a training step on one GPU: its products, attention, kernels and power, each measured alone.

    python benchmarks/ceilings.py                                      # every section, d8
    python benchmarks/ceilings.py --depth 12 --only products --only floor
    python benchmarks/ceilings.py --json ceilings.json

products       every product of a micro-batch, cold (a burst after idling) and hot
tiles          products with a weight in the tiles we choose against torch's choice, in turns and each kept up
floor          all products and attention of a micro-batch in training's order, back to back, and nothing
               else: what a step would take if the rest, optimizer included, were free
attention      cuDNN's against flash, forward and backward of one block
streams        products and memory-bound sums one after the other, and on two streams
cross-entropy  our kernel against torch's, forward and backward; bytes are one reading and one writing
head           the logits' product and then that kernel, against the two in one (odds); a piece of the tokens
splits         gradients of weights cut up in other ways: in two at every 512th row, on their side, by tokens
profile        the kernels of a step of our own network by group, cold and hot

Hot is after --warm-up seconds of large products; what is compared takes turns, so a drift of the clock meets
all alike, and times are medians. FLOPs are counted as in the paper (causal attention), against the GPU's
dense bf16 peak. Watts and MHz are the GPU's own, sampled while it was hot. A section that fails says so, and
the others go on; the exit code is then 1.
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
from ceiling_clocks import ON_GPU, Call, cold, hot, load, power
from ceiling_gemms import Attention, Matrix, MicroBatch, normal, torch_gemm
from ceiling_kernels import Row, profile
from throughput import DEVICE, Sampler, time_calls
from torch.nn import functional
from torch.nn.attention import SDPBackend

from steepen.execution.linear import accumulate_gemm_
from steepen.kernels.cublaslt_gemm import selected_tile
from steepen.kernels.dispatch import kernels_for
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.accounting import flops_per_token
from steepen.training.device import fast_kernels, peak_flops

WAYS = ("forward", "dgrad", "wgrad")
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHUNKS = 4  # of tokens, for batched gradients of weights
FORMATS = {
    "ms": ".3f",
    "TFLOP/s": ".1f",
    "TB/s": ".2f",
    "tokens/s": ",.0f",
    "MFU": ".1%",
    "share": ".1%",
    "ratio": ".3f",
}


def products(given: Any) -> list[Row]:
    batch = MicroBatch(given.shape, given.tokens, blocks=1)
    matrices = {name: [matrix] for name, matrix in batch.blocks[0].items()} | {"head": batch.head}
    calls: dict[str, Call] = {}
    flops: dict[str, float] = {}
    often: dict[str, int] = {}
    for name, parts in matrices.items():
        for way in WAYS:
            row, works = f"{name} {way}", [getattr(part, way) for part in parts]
            calls[row] = lambda works=works: [work() for work in works]
            flops[row] = sum(part.flops for part in parts)
            often[row] = 1 if name == "head" else given.blocks
    burst = {row: cold(call, given.idle) for row, call in calls.items()}
    loaded, sampled = hot(calls, given.seconds, given.warm_up)
    for values in (flops, burst, loaded):
        values["all, as often as that"] = sum(often[row] * values[row] for row in calls)
    return [
        {
            "product": row,
            "a micro-batch": often.get(row),
            "cold ms": 1e3 * burst[row],
            "cold TFLOP/s": flops[row] / burst[row] / 1e12,
            "hot ms": 1e3 * loaded[row],
            "hot TFLOP/s": flops[row] / loaded[row] / 1e12,
            **sampled,
        }
        for row in flops
    ]


def tiles(given: Any) -> list[Row]:
    batch = MicroBatch(given.shape, given.tokens, blocks=1)
    rows = list[Row]()
    load(given.warm_up)
    for name, matrix in (batch.blocks[0] | {"head": batch.head[0]}).items():
        for way in ("forward", "dgrad"):
            ours: Any = getattr(matrix, way)
            calls = {"torch": partial(ours, torch_gemm), "tiles": ours}
            in_turns, _ = hot(calls, given.seconds, 0.0)
            kept_up: dict[str, float] = {}
            sampled: Row = {}
            for which, call in calls.items():
                with Sampler() as sampler:
                    each = max(1, round(0.02 / in_turns[which]))
                    kept_up[which] = time_calls(call, given.seconds, 0.3, each=each)
                sampled |= {f"{which}, {unit}": value for unit, value in power(sampler).items()}
            x, weight = (matrix.x, matrix.weight.t()) if way == "forward" else (matrix.d, matrix.weight)
            tile = selected_tile(x, weight, accumulate_into=matrix.stream if way == "forward" else None)
            row: Row = {"product": f"{name} {way}", "terms": x.shape[1]}
            row["tile"] = "torch's" if tile is None else f"{tile[0]}×{tile[1]}"
            for heading, times in (("in turns", in_turns), ("kept up", kept_up)):
                row |= {f"{heading}, {which}, ms": 1e3 * s for which, s in times.items()}
                row[f"{heading}, ratio"] = times["torch"] / times["tiles"]
            rows.append(row | sampled)
    return rows


def floor(given: Any) -> list[Row]:
    batch = MicroBatch(given.shape, given.tokens, given.blocks)
    attention = Attention(given.shape, given.rows, SDPBackend.CUDNN_ATTENTION)
    order: list[Any] = []  # as model/fast.py has it: all of the head's products are made on the way forward
    for b in batch.blocks:
        order += [b["qkv"].forward, attention.forward]
        order += [b["out"].forward, b["gate_up"].forward, b["down"].forward]
    for piece in batch.head:
        order += [piece.forward, piece.wgrad, piece.dgrad]
    for b in reversed(batch.blocks):
        order += [b["down"].dgrad, b["down"].wgrad, b["gate_up"].wgrad, b["gate_up"].dgrad]
        order += [b["out"].wgrad, b["out"].dgrad, attention.backward]
        order += [b["qkv"].wgrad, b["qkv"].dgrad]
    multiplied = [call for call in order if isinstance(call.__self__, Matrix)]
    matmul = given.cost.matmul + given.cost.head
    counted = sum(call.__self__.flops for call in multiplied) / given.tokens
    assert counted == matmul, f"{counted} FLOPs a token, where the accounting has {matmul}"
    parts = {
        "products and attention": (order, given.cost.total),
        "products": (multiplied, matmul),
        "attention": ([call for call in order if call.__self__ is attention], given.cost.attention),
    }
    peak, rows = peak_flops(DEVICE), list[Row]()
    for name, (calls, flops) in parts.items():
        with Sampler() as sampler:
            whole = lambda calls=calls: [call() for call in calls]  # noqa: E731
            seconds = time_calls(whole, given.sustained, given.warm_up, each=4)
        rate = given.tokens / seconds
        row = {"sustained": name, "ms": 1e3 * seconds, "tokens/s": rate, "TFLOP/s": rate * flops / 1e12}
        row |= {"MFU": rate * flops / peak if peak else None}
        rows.append(row | power(sampler))
    return rows


def attention(given: Any) -> list[Row]:
    calls: dict[str, Call] = {}
    for name, backend in BACKENDS.items():
        one = Attention(given.shape, given.rows, backend)
        one.forward()
        calls[f"{name} forward"] = lambda one=one: (one.forward(), one.kept.pop())
        calls[f"{name} backward"] = partial(one.backward, keep=True)
    found, sampled = hot(calls, given.seconds, given.warm_up)
    forward = given.tokens * given.cost.attention / given.blocks / 3
    flops = {name: forward if name.endswith("forward") else 2 * forward for name in calls}
    return [
        {"attention": name, "ms": 1e3 * s, "TFLOP/s": flops[name] / s / 1e12, **sampled}
        for name, s in found.items()
    ]


def streams(given: Any) -> list[Row]:
    qkv = MicroBatch(given.shape, given.tokens, blocks=1).blocks[0]["qkv"]
    a, b, out = (normal(given.tokens, given.shape.hidden) for _ in range(3))
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    add = partial(torch.add, a, b, out=out)

    def four(*works: Call) -> None:
        for _ in range(4):
            for work in works:
                work()

    def two_streams(product: Call) -> None:
        side.wait_stream(here)
        with torch.cuda.stream(side):
            four(add)
        four(product)
        here.wait_stream(side)

    calls: dict[str, Call] = {f"4 sums of {out.nbytes / 1e6:,.0f} MB": partial(four, add)}
    for way in ("forward", "wgrad"):
        product = getattr(qkv, way)
        calls[f"4 qkv {way}"] = partial(four, product)
        calls[f"4 qkv {way} and 4 sums, one after the other"] = partial(four, product, add)
        calls[f"4 qkv {way} and 4 sums, on two streams"] = partial(two_streams, product)
    found, sampled = hot(calls, given.seconds, given.warm_up)
    return [{"what": name, "ms": 1e3 * s, **sampled} for name, s in found.items()]


def cross_entropy(given: Any) -> list[Row]:
    calls: dict[str, Call] = {}
    before: dict[str, Call] = {}
    moved: dict[str, int] = {}
    for rows, columns in given.logits:
        start, targets = normal(rows, columns), torch.randint(columns, (rows,), device=DEVICE)
        logits, leaf = start.clone(), start.detach().requires_grad_()
        ours, theirs = (f"{rows:,} × {columns:,}, {name}" for name in ("kernel", "torch"))
        calls[ours] = partial(kernels_for(logits).cross_entropy_, logits, targets, 1 / rows, None)
        before[ours] = partial(logits.copy_, start)  # the gradient takes the logits' place
        calls[theirs] = lambda x=leaf, y=targets: torch.autograd.grad(functional.cross_entropy(x, y), x)
        moved[ours] = moved[theirs] = 2 * start.nbytes
    found, sampled = hot(calls, given.seconds, given.warm_up, before)
    return [
        {"logits": name, "ms": 1e3 * s, "TB/s": moved[name] / s / 1e12, **sampled}
        for name, s in found.items()
    ]


def head(given: Any) -> list[Row]:
    piece = MicroBatch(given.shape, given.tokens, blocks=1).head[0]
    n, weight = piece.x, piece.weight
    logits = n.new_empty(len(n), len(weight))
    targets = torch.randint(len(weight), (len(n),), device=DEVICE)
    kernels = kernels_for(n)

    def apart() -> torch.Tensor:
        torch.mm(n, weight.t(), out=logits)
        return kernels.cross_entropy_(logits, targets, 1.0, None)[0]

    def in_one() -> torch.Tensor:
        return kernels.fused_linear_cross_entropy(n, weight, targets, 1.0, None, gradient=True)[0]

    gap = (apart() - in_one()).abs().max().item()
    assert gap < 0.1, f"losses differ by {gap:.2g}"  # logits rounded to bf16 and logits that are not
    calls: dict[str, Call] = {
        "product": lambda: torch.mm(n, weight.t(), out=logits),
        "product, then cross-entropy": apart,
        "the two in one": in_one,
    }
    found, sampled = hot(calls, given.seconds, given.warm_up)
    return [
        {
            f"{len(n):,} × {len(weight):,} logits": name,
            "ms": 1e3 * s,
            "TFLOP/s": piece.flops / s / 1e12,
            **sampled,
        }
        for name, s in found.items()
    ]


def has_fused_head(given: Any) -> bool:
    few = torch.empty(1, given.shape.width, dtype=torch.bfloat16, device=DEVICE)
    return kernels_for(few).supports_fused_linear_cross_entropy(few, few.expand(given.shape.vocabulary, -1))


def splits(given: Any) -> list[Row]:
    block = MicroBatch(given.shape, given.tokens, blocks=1).blocks[0]
    return [row for name, matrix in block.items() for row in splits_of(name, matrix, given)]


def splits_of(name: str, matrix: Matrix, given: Any) -> list[Row]:
    total, x, d, height = matrix.total, matrix.x, matrix.d, len(matrix.total)
    turned, sums = torch.zeros_like(total.t().contiguous()), torch.zeros_like(total)
    several = torch.zeros(CHUNKS, *total.shape, device=DEVICE)
    left, right = d.unflatten(0, (CHUNKS, -1)).mT, x.unflatten(0, (CHUNKS, -1))

    def cut(at: int) -> None:
        for part in (slice(at), slice(at, None)):
            accumulate_gemm_(total[part], d[:, part].t(), x, 1.0)

    def batched() -> None:
        if ON_GPU:
            torch.bmm(left, right, out_dtype=torch.float32, out=several)
        else:  # only a GPU's library mixes precisions in one product
            torch.bmm(left.float(), right.float(), out=several)
        total.add_(torch.sum(several, 0, out=sums))

    calls: dict[str, Call] = {"whole": matrix.wgrad}
    for at in range(given.cut, height, given.cut):
        calls[f"{at} + {height - at} rows"] = partial(cut, at)
    calls["transposed"] = partial(accumulate_gemm_, turned, x.t(), d, 1.0)
    calls[f"{CHUNKS} batches over tokens, and a sum"] = batched
    whole = torch.zeros_like(total)
    accumulate_gemm_(whole, d.t(), x, 1.0)
    for way, call in calls.items():
        total.zero_()
        call()
        gap = ((turned.t() if way == "transposed" else total) - whole).abs().max() / whole.abs().max()
        assert gap < 1e-3, f"{name}, {way}: differs from the whole by {gap:.2g} of its largest number"
    found, sampled = hot(calls, given.seconds, given.warm_up)
    return [
        {"matrix": name, "gradient": way, "ms": 1e3 * s, "TFLOP/s": matrix.flops / s / 1e12, **sampled}
        for way, s in found.items()
    ]


SECTIONS: dict[str, Callable[[Any], list[Row]]] = {
    "products": products,
    "tiles": tiles,
    "floor": floor,
    "attention": attention,
    "streams": streams,
    "cross-entropy": cross_entropy,
    "head": head,
    "splits": splits,
    "profile": profile,
}
NEED_A_GPU = ("attention", "streams")


def run(name: str, given: Any) -> Row:
    """A section's rows, or why there are none: what goes wrong in one stays in it."""
    if name in NEED_A_GPU and not ON_GPU:
        return {"left_out": "it needs a CUDA GPU"}
    if name == "head" and not has_fused_head(given):
        return {"left_out": "there is no such kernel for this GPU, or this size"}
    try:
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        return {"rows": SECTIONS[name](given)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:{FORMATS.get(key.rpartition(' ')[-1], '.0f')}}" if isinstance(value, float) else str(value)
    )


def show(name: str, result: Row) -> None:
    print(f"\n{name}")
    if "rows" not in result:
        print("  " + "".join(f"{why.replace('_', ' ')}: {text}" for why, text in result.items()))
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
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="may be given several times")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--rows", type=int, default=32, help="micro-batch, in sequences")
    parser.add_argument("--micro-batches", type=int, default=2, help="of the profiled step")
    parser.add_argument("--seconds", type=float, default=0.4, help="measured per row")
    parser.add_argument("--sustained", type=float, default=6.0, help="seconds per row of the floor")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds of load before what is hot")
    parser.add_argument("--idle", type=float, default=1.0, help="seconds of rest before what is cold")
    parser.add_argument("--tiny", action="store_true", help="a check of this script itself, on any machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    given = parser.parse_args()
    if not ON_GPU and not given.tiny:
        parser.error("there is no CUDA GPU here; --tiny checks the script without one")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    scale = SizeRule(context=given.context, vocabulary=given.vocabulary)
    logits, cut = [(65_536, 8_192), (8_192, given.vocabulary)], 512
    if given.tiny:
        given.depth, given.rows, given.warm_up, given.idle = 2, 4, 0.0, 0.0
        scale = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=256)
        logits, cut = [(32, 64), (16, 256)], 32
    arm = find_arm("vanilla")
    given.scale, given.shape, given.logits, given.cut = scale, arm.shape(given.depth, scale), logits, cut
    given.cost, given.blocks = flops_per_token(arm, given.shape, 1), given.shape.allocation.executed(1)
    given.tokens = given.rows * scale.context

    machine = torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(f"{machine}, torch {torch.__version__}, bf16")
    print(f"d{given.depth}: width {given.shape.width}, MLP {given.shape.mlp_width}, {given.blocks} blocks")
    print(f"{given.rows}×{scale.context} tokens a micro-batch, vocabulary {scale.vocabulary:,}")
    asked = {key: getattr(given, key) for key in ("depth", "rows", "seconds", "sustained", "warm_up", "idle")}
    about = {"device": machine, "torch": torch.__version__, **asked, "micro_batches": given.micro_batches}
    about |= {"context": scale.context, "vocabulary": scale.vocabulary}
    results: dict[str, Row] = {}
    with fast_kernels(DEVICE):
        for name in given.only or SECTIONS:
            results[name] = run(name, given)
            show(name, results[name])
            if given.json:  # after each, so that an interruption costs no more than one
                given.json.write_text(json.dumps({**about, "sections": results}, indent=1) + "\n")
    if any("error" in result for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
