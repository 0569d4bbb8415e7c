"""Speed of BatchLoader against random slices of a numpy.memmap, on one core from the page cache, in one run.

    python benchmarks/data_loader.py [--tokens N] [--context N] [--batch-tokens N] [--documents N]

The reference draws random offsets into one `numpy.memmap` and stacks the slices as int64, without epochs,
resumable position or shards. Target: at least 50M tokens/s, and less than 1% of a training step spent waiting
for data. Documents have 700 tokens on average, like FineWeb's. The start of an epoch (a shuffle of all
documents) is timed on document ends alone, --documents of them: 43 million are 30 billion tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from steepen.data import BatchLoader, Dataset, Prefetcher, Tokenizer
from steepen.data.dataset import TOKENIZER, Manifest, SplitRecord, TokenizerRecord, documents_file
from steepen.data.shard_writer import ShardWriter
from steepen.data.shards import HEADER, write_block_sums
from steepen.data.windows import RecutWindows
from steepen.utils.files import sha256_of_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--documents", type=int, default=4_300_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dataset = random_dataset(Path(folder), options.tokens)
        batches = BatchLoader(dataset, options.context, options.batch_tokens, seed=0)
        steps = min(options.steps, batches.steps)
        flat = np.memmap(dataset.directory / "train_00000.bin", np.uint16, mode="r", offset=HEADER.size)
        generator = np.random.default_rng(0)

        def reference(_: int) -> None:
            starts = generator.integers(0, len(flat) - options.context - 1, batches.rows)
            np.stack([flat[s : s + options.context].astype(np.int64) for s in starts])
            np.stack([flat[s + 1 : s + 1 + options.context].astype(np.int64) for s in starts])

        fixed = BatchLoader(dataset, options.context, options.batch_tokens, seed=0, windows="fixed")
        batches.at(0)  # the first batch shuffles the documents, which is timed below
        loader_speeds, fixed_speeds, reference_speeds = [], [], []
        for _ in range(5):
            reference_speeds.append(speed(reference, steps, options.batch_tokens))
            loader_speeds.append(speed(batches.at, steps, options.batch_tokens))
            fixed_speeds.append(speed(fixed.at, steps, options.batch_tokens))
        size = f"context {options.context}, batch {options.batch_tokens:,}"
        print(f"{options.tokens:,} tokens, {size}, one thread")
        print(f"numpy memmap, random offsets  {statistics.median(reference_speeds) / 1e6:8.0f} M tokens/s")
        speed_of_loader = statistics.median(loader_speeds) / 1e6
        print(f"steepen BatchLoader.at        {speed_of_loader:8.0f} M tokens/s   target: 50")
        print(f'  with windows="fixed"         {statistics.median(fixed_speeds) / 1e6:8.0f} M tokens/s')
        ratio = statistics.median(o / t for o, t in zip(loader_speeds, reference_speeds, strict=True))
        print(f"ratio (steepen / numpy)       {ratio:8.2f}")
        # Faster than training: one GPU needs about ten times as long for a batch of this size.
        fraction, rate = wait_fraction(batches, min(steps, 50), 0.1), options.batch_tokens / 0.1 / 1e6
        print(
            f"waiting in a step of 100 ms   {fraction:8.2%} of it ({rate:.1f} M tokens/s)   target: below 1%"
        )
    print(epoch_start(options.documents, options.context, options.batch_tokens))


def epoch_start(documents: int, context: int, batch_tokens: int) -> str:
    """The time and memory until the first windows of an epoch are known."""
    ends = np.cumsum(np.random.default_rng(0).integers(2, 1_399, documents))
    rows = batch_tokens // context
    tracemalloc.start()
    started = time.process_time()
    order = RecutWindows(ends, context + 1, rows, seed=0, epochs=1, pool="prefix", pool_tokens=None)
    order.pieces(0, 0, rows)
    seconds, (held, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (
        f"start of an epoch of {documents:,} documents, {ends[-1] / 1e9:.1f}B tokens: {seconds:.1f} s of CPU "
        f"time, {held / documents:.0f} bytes a document held, {peak / 2**20:,.0f} MiB at most"
    )


def speed(batch: Callable[[int], object], steps: int, tokens: int) -> float:
    started = time.perf_counter()
    for step in range(steps):
        batch(step)
    return steps * tokens / (time.perf_counter() - started)


def wait_fraction(batches: BatchLoader, steps: int, seconds: float) -> float:
    """Fraction of the step time spent waiting for a batch, for steps that compute for `seconds`."""
    waited = 0.0
    with Prefetcher(batches, 0, "cpu", stop_step=steps) as prefetcher:
        iterator = iter(prefetcher)
        next(iterator)  # the first batch is start-up
        for _ in range(steps - 1):
            time.sleep(seconds)
            started = time.perf_counter()
            next(iterator)
            waited += time.perf_counter() - started
    return waited / (waited + seconds * (steps - 1))


def random_dataset(folder: Path, tokens: int) -> Dataset:
    """Random token ids in two shards, one long and one short."""
    tokenizer, generator = Tokenizer.gpt2(), np.random.default_rng(0)
    writers = {
        split: ShardWriter(folder, split, "uint16", tokenizer.size, int(0.9 * tokens))
        for split in ("train", "val")
    }
    ends = np.cumsum(generator.integers(2, 1_399, tokens // 700))
    ends = np.append(ends[ends < tokens], tokens)
    for start in range(0, tokens, 1 << 22):
        ids = generator.integers(0, tokenizer.size, min(1 << 22, tokens - start), dtype=np.uint16)
        writers["train"].append(ids)
    for writer in writers.values():
        writer.finish_shard()
    documents = {"train": ends, "val": ends[:0]}
    for split, positions in documents.items():
        positions.astype("<i8").tofile(documents_file(folder, split))
    tokenizer.save(folder / TOKENIZER)
    shards = {
        name: [each.shard(folder, "uint16", tokenizer.size) for each in writer.finished]
        for name, writer in writers.items()
    }
    Manifest(
        dtype="uint16",
        tokenizer=TokenizerRecord(tokenizer.name, tokenizer.size, tokenizer.identity),
        splits={
            name: SplitRecord(
                len(documents[name]),
                writer.tokens,
                sha256_of_file(documents_file(folder, name)),
                write_block_sums(folder, name, shards[name]),
            )
            for name, writer in writers.items()
        },
        shards=tuple(shard for writer in writers.values() for shard in writer.finished),
    ).write(folder)
    return Dataset.open(folder)


if __name__ == "__main__":
    main()
