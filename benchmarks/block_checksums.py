"""Cost of comparing token blocks with their checksums, as a fraction of the training time of a run.

    python benchmarks/block_checksums.py [--tokens N] [--depth N] [--aspect N] [--context N] [--steps N]

Blocks are checked when they are first read. The reference is the same read with every block checked before.
The difference, in ns of one core a token, is divided by the time that training takes for a token on this
device. The loader reads ahead in a thread, so this is the most that a run can lose. Target: at most 0.5%.

Every batch then asks whether the shards it came from have changed meanwhile: here one shard, with large data
one for each of its rows at most (printed too). Target: at most 0.1%.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from steepen.data.dataset import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.shard_writer import ShardWriter
from steepen.data.shards import Shard, TokenStream, read_block_sums, write_block_sums
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions


def check_seconds(folder: Path, tokens: int) -> tuple[float, float]:
    """Seconds of one core for the checksums of a token, and for asking whether a shard has changed.

    The first is a first read minus a second one, from the page cache.
    """
    folder.mkdir()
    writer = ShardWriter(folder, "train", "uint16", 50_257, tokens)
    writer.append(np.random.default_rng(0).integers(0, 50_257, tokens, dtype=np.uint16))
    writer.finish_shard()
    shards = [Shard(folder / "train_00000.bin", "uint16", tokens, 50_257)]
    sums = read_block_sums(folder, "train", write_block_sums(folder, "train", shards))
    found: list[float] = []
    stream = TokenStream(shards, sums)
    for _ in range(5):
        stream = TokenStream(shards, sums)
        times: list[float] = []
        for _ in range(2):
            started = time.process_time()
            for first in range(0, tokens, 1 << 20):
                stream.read(first, min(first + (1 << 20), tokens))
            times.append(time.process_time() - started)
        found.append((times[0] - times[1]) / tokens)
    started = time.process_time()
    for _ in range(100_000):
        stream._has_changed(0)  # pyright: ignore[reportPrivateUsage]
    return statistics.median(found), (time.process_time() - started) / 100_000


def training_seconds(folder: Path, options: argparse.Namespace) -> tuple[float, str]:
    """Seconds per token of a short run on this device, and its name."""
    prepare(PrepareRequest(("builtin",), tokenizer="bpe:512", max_tokens=3_000_000), folder / "data")
    data = Dataset.open(folder / "data")
    arm = find_arm("vanilla")
    size = SizeRule(options.aspect, options.aspect, options.aspect, options.context, data.padded_vocabulary)
    recipe = replace(recipe_of(arm), batch_tokens=options.batch_tokens)
    rung = recipe.at_budget(arm, options.depth, size, tokens=options.batch_tokens * options.steps)
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    spec = RunSpec.from_plan(
        rung, DataConfig(data.identity, epochs=1000), validation_tokens=8192, precision=precision
    )
    record = train(spec, data, RunStore(folder / "runs"), TrainOptions(quiet=True))
    return 1 / record.tokens_per_second, f"d{options.depth} on {record.hardware['name']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--aspect", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checks, version = check_seconds(Path(name) / "shards", options.tokens)
        training, what = training_seconds(Path(name), options)
    print(f"checksums of blocks   {1e9 * checks:10.2f} ns a token, one core, once per token of the data")
    print(f"training              {1e9 * training:10.0f} ns a token, {what}")
    print(f"ratio                 {checks / training:10.4%} of the training time   target: at most 0.5%")
    batch, rows = options.batch_tokens * training, options.batch_tokens // options.context
    print(f"version of a shard    {1e9 * version:10.0f} ns")
    print(f"ratio, one shard      {version / batch:10.4%} of the training time   target: at most 0.1%")
    print(f"ratio, {rows:4} shards    {rows * version / batch:10.4%} of the training time")


if __name__ == "__main__":
    main()
