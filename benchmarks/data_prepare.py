"""Speed of `prepare` against tiktoken's batch call, same text, same cores, in one run.

    python benchmarks/data_prepare.py [FILES...] [--threads N] [--repeats N]

The reference is `tiktoken.Encoding.encode_ordinary_batch` on texts already in memory, writing nothing.
`prepare` also reads Parquet, hashes, splits, writes shards and hashes them. Target: a ratio of at least 0.80.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from steepen.data import Tokenizer
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources.builtin import read_part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "files",
        nargs="*",
        help="Parquet files with a field `text`; default: the speeches of the built-in corpus",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = options.files or [str(speeches_as_parquet(Path(folder)))]
        texts = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
        tokenizer = Tokenizer.gpt2()
        tokenizer.encode("warm")  # builds the encoder
        reference = tokenizer._encoding  # pyright: ignore[reportPrivateUsage]
        reference_seconds, prepare_seconds, cpu_ratios, tokens = [], [], [], 0
        for repeat in range(options.repeats):  # interleaved, so that other load affects both
            started, cpu_started = time.perf_counter(), time.process_time()
            tokens = sum(map(len, reference.encode_ordinary_batch(texts, num_threads=options.threads)))
            reference_seconds.append(time.perf_counter() - started)
            started, cpu_middle = time.perf_counter(), time.process_time()
            dataset = prepare(
                PrepareRequest(tuple(files)), Path(folder) / f"out{repeat}", threads=options.threads
            )
            prepare_seconds.append(time.perf_counter() - started)
            cpu_ratios.append((cpu_middle - cpu_started) / (time.process_time() - cpu_middle))
            written = sum(split.tokens for split in dataset.manifest.splits.values())
            documents = sum(split.documents for split in dataset.manifest.splits.values())
            assert written == tokens + documents, "the token counts differ"
    how = f"{options.threads} threads, median of {options.repeats}"
    print(f"{tokens:,} tokens in {len(texts):,} documents, {how}")
    print(f"tiktoken encode_ordinary_batch  {tokens / statistics.median(reference_seconds):12,.0f} tokens/s")
    print(f"steepen prepare                 {tokens / statistics.median(prepare_seconds):12,.0f} tokens/s")
    ratio = statistics.median(reference_seconds) / statistics.median(prepare_seconds)
    print(f"ratio (steepen / tiktoken)      {ratio:12.2f}   target: 0.80 or more")
    print(f"ratio of CPU time               {statistics.median(cpu_ratios):12.2f}   (less noisy under load)")


def speeches_as_parquet(folder: Path) -> Path:
    """Write the speeches four times, each copy with another prefix, in documents of 4,000 characters."""
    documents = [
        f"{copy} {speech[start : start + 4_000]}"
        for copy in range(4)
        for speech in read_part("speeches")
        for start in range(0, len(speech), 4_000)
    ]
    pq.write_table(pa.table({"text": documents}), folder / "speeches.parquet", row_group_size=1_000)
    return folder / "speeches.parquet"


if __name__ == "__main__":
    main()
