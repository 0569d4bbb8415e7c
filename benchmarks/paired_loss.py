"""What settings of a run cost in loss and speed: runs paired by seed.

    python benchmarks/paired_loss.py DATA OUT.jsonl --columns fp32 bf16=optimizer.embedding_precision=bf16
        [--arms vanilla operator-1] [--depths 2 3 4] [--tokens 65536000] [--seeds 3] [--seconds 1500]

A column is NAME or NAME=SETTING[,SETTING…], settings as `steepen train --set` takes them. A seed fixes
weights and data order, so the columns of one seed differ by their settings only; a column that repeats the
first under another name shows what the order of sums makes. Shapes, batch and learning rate are those of the
preset; without --tokens each depth has the tokens of its recipe.

    residual stream:  --columns bf16=model.residual_stream=bf16 fp32 bf16-again=model.residual_stream=bf16
    fp8:              --columns bf16 fp8=precision=fp8 bf16-again
    as the authors store: --columns fp32 authors=optimizer.embedding_precision=bf16,model.rope_table=bf16

One JSON line per finished run is appended to OUT.jsonl; runs already in it are not repeated, and no run is
started that would probably end after --seconds. Differences are from the first column.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from steepen.data import Dataset
from steepen.model.arms import find_arm
from steepen.runs.spec import RunSpec, override
from steepen.runs.store import RunStore
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.training.run import train
from steepen.training.train_options import TrainOptions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", nargs="+", required=True)
    parser.add_argument("--arms", nargs="+", default=["vanilla"])
    parser.add_argument("--depths", nargs="+", type=int, default=[5])
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run that would end later")
    args = parser.parse_args()
    columns = {
        name: rest.split(",") if rest else [] for name, _, rest in (c.partition("=") for c in args.columns)
    }
    started = time.monotonic()
    dataset = Dataset.open(args.data)
    info = DatasetInfo(
        dataset.identity,
        dataset.padded_vocabulary,
        len(dataset.tokens("train")),
        len(dataset.tokens("val")),
        real_vocabulary=dataset.vocabulary,
    )
    context = StudyContext(load_preset(args.preset), info, epochs=1000)

    def make_spec(arm: str, depth: int, column: str, seed: int) -> RunSpec:
        found = find_arm(arm)
        recipe, size = context.recipe(found), context.size_rule
        rung = recipe.at(found, depth, size)
        if args.tokens is not None:
            rung = recipe.at_budget(found, depth, size, tokens=args.tokens)
        return override(context.spec(rung, seed=seed), columns[column])

    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    known = {(row["run"], row["column"]) for row in rows}
    took: dict[tuple[str, int], float] = {}
    wanted = [
        (s, d, c, a) for s in range(args.seeds) for d in args.depths for c in columns for a in args.arms
    ]
    for seed, depth, column, arm in wanted:
        spec = make_spec(arm, depth, column, seed)
        if (spec.hash, column) in known:
            continue
        expected = took.get((arm, depth), max(took.values(), default=0.0))
        if time.monotonic() - started + 1.1 * expected > args.seconds:
            print(f"out of time before {arm} d{depth} {column} seed {seed}", flush=True)
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            quiet = TrainOptions(
                device=args.device, quiet=True, checkpoint_every=spec.steps, checkpoint_minutes=1e6
            )
            record = train(spec, dataset, RunStore(Path(folder)), quiet)
        took[arm, depth] = time.monotonic() - begun
        row = {
            "arm": arm, "depth": depth, "column": column, "settings": columns[column], "seed": seed,
            "run": spec.hash, "steps": spec.steps, "tokens": spec.tokens, "loss": record.validation_loss,
            "tokens_per_second": record.tokens_per_second, "seconds": took[arm, depth],
            "peak_gib": (record.peak_memory_bytes or 0) / 2**30,
        }  # fmt: skip
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    summarize(rows, args.arms, args.depths, list(columns))


def summarize(rows: list[dict[str, Any]], arms: list[str], depths: list[int], columns: list[str]) -> None:
    """Losses and speeds by arm and depth, and differences from the first column, paired by seed."""
    first = columns[0]
    for arm, depth in itertools.product(arms, depths):
        own = [row for row in rows if (row["arm"], row["depth"]) == (arm, depth)]
        by = {column: {row["seed"]: row for row in own if row["column"] == column} for column in columns}
        print(f"\n{arm} d{depth}")
        for column, found in by.items():
            pairs = sorted(found.keys() & by[first].keys())
            if not pairs:
                continue
            loss, base_loss = ([by[c][s]["loss"] for s in pairs] for c in (column, first))
            speed, base = (
                statistics.mean(by[c][s]["tokens_per_second"] for s in pairs) for c in (column, first)
            )
            line = f"{column:<14} loss {statistics.mean(loss):.5f}  {speed:>12,.0f} tokens/s"
            if column != first:
                gaps = [a - b for a, b in zip(loss, base_loss, strict=True)]
                error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
                line += (
                    f" ({speed / base - 1:+.1%})  minus {first}: {statistics.mean(gaps):+.5f} ± {error:.5f}"
                )
                line += f" ({' '.join(f'{gap:+.5f}' for gap in gaps)})"
            print(line)


if __name__ == "__main__":
    main()
