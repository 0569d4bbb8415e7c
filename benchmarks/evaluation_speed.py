"""Speed of the batched CORE scorer against one example at a time, with equal scores, in one run.

    python benchmarks/evaluation_speed.py BUNDLE --device cuda                     # d8, all examples, bf16
    python benchmarks/evaluation_speed.py BUNDLE --small --examples 12 --reference-examples 2
    python benchmarks/evaluation_speed.py BUNDLE --count    # tokens with and without prefix sharing

BUNDLE is a CORE bundle's folder or its archive. The network has random weights: speed does not depend on
them. The reference (tests/evaluation/core_reference.py) follows the protocol literally, one example at a
time: each prompt encoded as one text, each choice in a separate row, every logit computed. It is timed on the
first --reference-examples of every task, and each task's mean time is multiplied by its number of examples;
with --reference-examples 0 it is timed on all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch

from steepen.data import Tokenizer
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.core.prompt_encoding import TaskEncoder
from steepen.evaluation.core.run_suite import CoreOptions, evaluate_core
from steepen.evaluation.core.scorer import make_batches, make_rows, padded_length
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "evaluation"))
from core_reference import score_one

SMALL = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=512)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny network (d4, width 64, context 512)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on a GPU")
    parser.add_argument("--examples", type=int, help="maximum per task; default: all")
    parser.add_argument("--reference-examples", type=int, default=50)
    parser.add_argument("--token-budget", type=int)
    parser.add_argument("--no-sharing", action="store_true", help="each choice in a separate row")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the batched scorer")
    parser.add_argument("--count", action="store_true", help="only count tokens, one seed, context 2048")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = args.bundle
        if folder.is_file():
            with tarfile.open(folder) as archive:
                archive.extractall(place, filter="data")
            folder = Path(place)
        if args.count:
            count(Bundle.open(folder), args.examples)
        else:
            compare(args, Bundle.open(folder), Path(place) / "outcomes")


def count(bundle: Bundle, examples: int | None) -> None:
    """Print the tokens a network processes, by task: choices separate, prefixes shared, and padded."""
    tokenizer, begun = Tokenizer.gpt2(), time.perf_counter()
    totals = [0, 0, 0, 0]
    for task in bundle.tasks:
        encoder = TaskEncoder(task, tokenizer, 2048)
        size = min(len(task.items), examples or len(task.items))
        encoded = [encoder.example(index, 0) for index in range(size)]
        rows = [row for example in encoded for row in make_rows(example, 0)]
        padded = [len(batch) * padded_length(batch) for batch in make_batches(rows, 131_072, 1 << 26)]
        separate = sum(len(sequence) for example in encoded for sequence in example.sequences)
        numbers = [separate, sum(map(len, rows)), sum(padded), len(padded)]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        print(f"{task.label:<34} {size:>7,} examples  separate {separate:>12,}  shared {numbers[1]:>12,}")
    print(
        f"separate {totals[0]:,}, shared {totals[1]:,}, padded {totals[2]:,} in {totals[3]} batches; ", end=""
    )
    print(f"prompts encoded in {time.perf_counter() - begun:.1f} s")


def build(args: argparse.Namespace) -> Network:
    arm, scale = find_arm(args.arm), SMALL if args.small else SizeRule()
    depth = 4 if args.small else args.depth
    network = materialize(build_on_meta(arm.shape(depth, scale), arm), args.device, embedding_std=0.1)
    generator = torch.Generator(args.device).manual_seed(0)
    for parameter in network.parameters():  # some are zero at first, where every choice ties
        noise = torch.randn(parameter.shape, generator=generator, device=args.device)
        parameter.data.add_(0.5 * parameter.shape[-1] ** -0.5 * noise)
    precision = args.precision or ("bf16" if args.device.startswith("cuda") else "fp32")
    print(f"{args.arm} d{depth}, {precision}, {args.device}, torch {torch.__version__}")
    return network.to(torch.bfloat16) if precision == "bf16" else network


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def compare(args: argparse.Namespace, bundle: Bundle, folder: Path) -> None:
    network, tokenizer = build(args), Tokenizer.gpt2()
    sizes = {task.label: min(len(task.items), args.examples or len(task.items)) for task in bundle.tasks}
    options = CoreOptions(
        (0,), args.examples, token_budget=args.token_budget, share_prefixes=not args.no_sharing
    )
    evaluate_core(network, tokenizer, bundle, CoreOptions((0,), 2))  # warm-up

    estimate, exact = 0.0, {}
    for task in bundle.tasks:
        count = min(sizes[task.label], args.reference_examples or sizes[task.label])
        score_one(network, tokenizer, task, 0)
        synchronize(args.device)
        begun = time.perf_counter()
        exact[task.label] = [score_one(network, tokenizer, task, index) for index in range(count)]
        synchronize(args.device)
        estimate += (time.perf_counter() - begun) * sizes[task.label] / count
    measured = sum(map(len, exact.values()))
    total = sum(sizes.values())
    print(f"one at a time: {estimate:.1f} s for {total:,} examples (timed on {measured:,})")

    if args.compile:
        for block in network.blocks():
            block.compile(dynamic=True)
        evaluate_core(network, tokenizer, bundle, CoreOptions((0,), 40))
    synchronize(args.device)
    begun = time.perf_counter()
    scores = evaluate_core(network, tokenizer, bundle, options, folder=folder)
    synchronize(args.device)
    fast = time.perf_counter() - begun
    print(f"batched:       {fast:.1f} s for {total:,} examples")

    worst, differing = 0.0, 0
    for label, outcomes in exact.items():
        lines = (folder / f"{label}.seed0.jsonl").read_text().splitlines()
        for slow, line in zip(outcomes, lines, strict=False):
            quick = json.loads(line)
            differing += slow.correct != quick["correct"]
            pairs = zip(slow.losses or (slow.nll,), quick["losses"] or (quick["nll"],), strict=True)
            worst = max([worst, *(abs(a - b) for a, b in pairs if a is not None and b is not None)])
    print(f"same {measured:,} examples: largest difference of a mean loss {worst:.2e} nats, ", end="")
    print(f"{differing} different answers; CORE of the random network {scores.mean(list(sizes)) or 0:.4f}")
    print(f"ratio {estimate / fast:.1f}")


if __name__ == "__main__":
    main()
