"""Effect of fp8 on the loss: paired runs in bf16 and fp8, compared with the standard deviation over seeds.

    python benchmarks/fp8_loss.py [--data DIR] [--depth 6] [--steps 300] [--seeds 3]

Without --data, the built-in corpus is prepared in a temporary folder. A seed determines weights and data
order, so the two runs of a seed differ only in precision. Validation is in bf16.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.planner import make_plan
from steepen.runs.record import RunRecord
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import train


def spread(values: list[float]) -> float:
    """Standard deviation; NaN of a single value."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder made by `steepen data prepare`")
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--aspect", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=8192,
        help="of the tokenizer trained on the built-in corpus",
    )
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs=2, default=["bf16", "fp8"], help="baseline and alternative")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            request = PrepareRequest(("builtin",), tokenizer=f"bpe:{args.vocabulary}")
            dataset = prepare(request, Path(folder) / "data")
        else:
            dataset = Dataset.open(args.data)
        compare(args, dataset, RunStore(Path(folder) / "runs"))


def compare(args: argparse.Namespace, dataset: Dataset, store: RunStore) -> None:
    arm = find_arm(args.arm)
    scale = SizeRule(
        aspect=args.aspect,
        head_dim=args.head_dim,
        context=args.context,
        vocabulary=dataset.padded_vocabulary,
    )
    tokens = args.steps * args.batch_tokens
    recipe = replace(recipe_of(arm), batch_tokens=args.batch_tokens)
    rung = make_plan(arm, depth=args.depth, size_rule=scale, tokens=tokens, recipe=recipe).run
    data = DataConfig(dataset.identity, epochs=1 + tokens // len(dataset.tokens("train")))
    available = len(dataset.tokens("val")) // (args.context + 1) * args.context
    options = TrainOptions(device=args.device, quiet=True, checkpoint_every=args.steps)
    base, other = args.precisions
    records: dict[tuple[str, int], RunRecord] = {}
    size = f"width {rung.shape.width}, vocabulary {rung.shape.vocabulary:,}, context {args.context}"
    print(f"{arm.title} d{args.depth}, {size}, {rung.steps} steps of {args.batch_tokens:,} tokens")
    print(f"{'seed':<6}{'precision':<11}{'train':>9}{'validation':>12}{'tokens/s':>12}{'seconds':>9}")
    for seed in range(args.seeds):
        for precision in (base, other):
            spec = RunSpec.from_plan(
                rung, data, seed=seed, precision=precision, validation_tokens=min(1_048_576, available)
            )
            begun = time.perf_counter()
            record = records[precision, seed] = train(spec, dataset, store, options)
            line = f"{seed:<6}{precision:<11}{record.train_loss:>9.4f}{record.validation_loss:>12.4f}"
            print(f"{line}{record.tokens_per_second:>12,.0f}{time.perf_counter() - begun:>9.1f}", flush=True)
    for metric in ("train_loss", "validation_loss"):
        losses = {p: [getattr(records[p, seed], metric) for seed in range(args.seeds)] for p in (base, other)}
        gaps = [b - a for a, b in zip(losses[base], losses[other], strict=True)]
        error = spread(gaps) / len(gaps) ** 0.5
        print(
            f"\n{metric.replace('_', ' ')}: {base} {statistics.mean(losses[base]):.4f}, standard deviation "
            f"{spread(losses[base]):.4f}; {other} − {base} = {statistics.mean(gaps):+.4f} ± {error:.4f}"
        )


if __name__ == "__main__":
    main()
