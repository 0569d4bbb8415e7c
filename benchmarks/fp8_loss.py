"""What fp8 does to the loss: the same runs in bf16 and in fp8, seed by seed, against the scatter of seeds.

    python benchmarks/fp8_loss.py [--data DIR] [--depth 6] [--steps 300] [--seeds 3]

Without --data, the built-in corpus is prepared in a temporary folder. A seed decides weights and data order,
so the two runs of a seed differ in precision alone. All are validated in bf16.
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
    """The standard deviation, where there are several."""
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
        "--vocabulary", type=int, default=8192, help="of the tokenizer for the built-in corpus"
    )
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs=2, default=["bf16", "fp8"], help="what is compared to what")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.data is None:
            request = PrepareRequest(("builtin",), tokenizer=f"bpe:{given.vocabulary}")
            dataset = prepare(request, Path(folder) / "data")
        else:
            dataset = Dataset.open(given.data)
        compare(given, dataset, RunStore(Path(folder) / "runs"))


def compare(given: argparse.Namespace, dataset: Dataset, store: RunStore) -> None:
    arm = find_arm(given.arm)
    scale = SizeRule(
        aspect=given.aspect,
        head_dim=given.head_dim,
        context=given.context,
        vocabulary=dataset.padded_vocabulary,
    )
    tokens = given.steps * given.batch_tokens
    recipe = replace(recipe_of(arm), batch_tokens=given.batch_tokens)
    rung = make_plan(arm, depth=given.depth, size_rule=scale, tokens=tokens, recipe=recipe).rung
    choice = DataConfig(dataset.identity, epochs=1 + tokens // len(dataset.tokens("train")))
    available = len(dataset.tokens("val")) // (given.context + 1) * given.context
    options = TrainOptions(device=given.device, quiet=True, checkpoint_every=given.steps)
    base, other = given.precisions
    found: dict[tuple[str, int], RunRecord] = {}
    size = f"width {rung.shape.width}, vocabulary {rung.shape.vocabulary:,}, context {given.context}"
    print(f"{arm.title} d{given.depth}, {size}, {rung.steps} steps of {given.batch_tokens:,} tokens")
    print(f"{'seed':<6}{'precision':<11}{'train':>9}{'validation':>12}{'tokens/s':>12}{'seconds':>9}")
    for seed in range(given.seeds):
        for precision in (base, other):
            spec = RunSpec.of(
                rung, choice, seed=seed, precision=precision, validation_tokens=min(1_048_576, available)
            )
            begun = time.perf_counter()
            record = found[precision, seed] = train(spec, dataset, store, options)
            line = f"{seed:<6}{precision:<11}{record.train_loss:>9.4f}{record.validation_loss:>12.4f}"
            print(f"{line}{record.tokens_per_second:>12,.0f}{time.perf_counter() - begun:>9.1f}", flush=True)
    for what in ("train_loss", "validation_loss"):
        losses = {p: [getattr(found[p, seed], what) for seed in range(given.seeds)] for p in (base, other)}
        gaps = [b - a for a, b in zip(losses[base], losses[other], strict=True)]
        error = spread(gaps) / len(gaps) ** 0.5
        print(
            f"\n{what.replace('_', ' ')}: {base} {statistics.mean(losses[base]):.4f}, seeds scatter by "
            f"{spread(losses[base]):.4f}; {other} − {base} = {statistics.mean(gaps):+.4f} ± {error:.4f}"
        )


if __name__ == "__main__":
    main()
