"""What the precision of the residual stream (and of the GEMMs) costs in loss and speed: paired runs.

    python benchmarks/residual_stream_loss.py DATA OUT.jsonl [--seconds 1500] [--depth 5] [--tokens 65536000]
        [--arms vanilla untied-grow] [--seeds 3] [--columns bf16 fp32 fp8 bf16-again]

DATA is a folder prepared with an 8k tokenizer (bpe:8192). Shapes, batch and learning rate are those of
preset mini. A column is GEMM precision + residual stream; a seed fixes weights and data order, so the columns
of one seed differ in precision only. "bf16-again" repeats bf16: the difference that the order of sums makes.
Differences are from the first column; what fp8 costs is `--columns fp32 fp8-fp32 fp32-again`.
One JSON line per finished run is appended to OUT.jsonl; runs already in it are not repeated. No run is
started that would probably end after --seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.data import Dataset
from steepen.model.arms import find_arm
from steepen.runs.store import RunStore
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import train

COLUMNS = {  # precision of the GEMMs, residual stream
    "bf16": ("bf16", "bf16"),
    "fp32": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16"),
    "fp8-fp32": ("fp8", "fp32"),
    "bf16-again": ("bf16", "bf16"),
    "fp32-again": ("bf16", "fp32"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--tokens", type=float, default=65_536_000)
    parser.add_argument("--arms", nargs="+", default=["vanilla", "untied-grow"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--columns", nargs="+", default=["bf16", "fp32", "fp8", "bf16-again"])
    parser.add_argument("--preset", default="mini")
    args = parser.parse_args()
    started = time.monotonic()
    dataset = Dataset.open(args.data)
    train_tokens = len(dataset.tokens("train"))
    info = DatasetInfo(
        dataset.identity,
        dataset.padded_vocabulary,
        train_tokens,
        len(dataset.tokens("val")),
        real_vocabulary=dataset.vocabulary,
    )
    epochs = 2 + int(args.tokens) // train_tokens
    context = StudyContext(load_preset(args.preset), info, epochs=epochs)

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["arm"], row["depth"], row["tokens"], row["column"], row["seed"]

    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    durations: dict[tuple[str, str], float] = {}
    for seed in range(args.seeds):
        for column in args.columns:
            for name in args.arms:
                arm = find_arm(name)
                rung = context.recipe(arm).at_budget(arm, args.depth, context.size_rule, tokens=args.tokens)
                precision, stream = COLUMNS[column]
                spec = context.spec(rung, seed=seed)
                options = replace(spec.options, residual_stream=stream)
                spec = replace(spec, precision=precision, options=options)
                facts = {
                    "arm": name,
                    "depth": args.depth,
                    "tokens": rung.tokens,
                    "column": column,
                    "seed": seed,
                }
                if key(facts) in {key(row) for row in rows}:
                    continue
                expected = durations.get((name, column), max(durations.values(), default=0.0))
                if time.monotonic() - started + 1.1 * expected > args.seconds:
                    print(json.dumps({"stopped": "out of time", **facts}), flush=True)
                    continue
                begun = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    quiet = TrainOptions(quiet=True, checkpoint_every=rung.steps, checkpoint_minutes=1e6)
                    record = train(spec, dataset, RunStore(Path(folder)), quiet)
                durations[name, column] = time.monotonic() - begun
                row = {
                    **facts,
                    "precision": precision,
                    "residual_stream": stream,
                    "growth_step": rung.growth_step,
                    "steps": rung.steps,
                    "validation_loss": record.validation_loss,
                    "train_loss": record.train_loss,
                    "tokens_per_second": record.tokens_per_second,
                    "peak_gib": (record.peak_memory_bytes or 0) / 2**30,
                    "seconds": durations[name, column],
                    "run": record.run,
                }
                rows.append(row)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    summarize(rows, args)


def summarize(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Differences from the first column, paired by seed, and speeds."""
    first = args.columns[0]
    for name in args.arms:
        mine = [row for row in rows if row["arm"] == name and row["depth"] == args.depth]
        by = {column: {r["seed"]: r for r in mine if r["column"] == column} for column in COLUMNS}
        print(f"\n{name} d{args.depth}")
        for column, found in by.items():
            if not found:
                continue
            losses = [row["validation_loss"] for row in found.values()]
            speed = statistics.mean(row["tokens_per_second"] for row in found.values())
            pairs = sorted(found.keys() & by[first].keys())
            gaps = [found[s]["validation_loss"] - by[first][s]["validation_loss"] for s in pairs]
            line = f"{column:<11} loss {statistics.mean(losses):.5f}  {speed:>12,.0f} tokens/s"
            if by[first]:
                base = statistics.mean(row["tokens_per_second"] for row in by[first].values())
                line += f" ({speed / base - 1:+.1%})"
            if column != first and gaps:
                error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
                each = " ".join(f"{gap:+.5f}" for gap in gaps)
                line += f"  minus {first}: {statistics.mean(gaps):+.5f} ± {error:.5f} (seeds: {each})"
            print(line)


if __name__ == "__main__":
    main()
