"""Times the run store on ten thousand records, against plainly parsing every record.json, in one run.

    python benchmarks/runs_store.py [--records 10000]

The records are copies of one made up from a real spec, with arms, depths, seeds and learning rates that vary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.model.arms import find_arm
from steepen.recipe.accounting import compute_active_parameters, stored_parameters
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.index import NAME, SETTLED_SECONDS, Index
from steepen.runs.record import Parameters, RunRecord, ValidationScore
from steepen.runs.spec import DataConfig, RunSpec, expected_flops
from steepen.runs.store import RunStore

ARMS = ("vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow")


def make_record(arm: str, depth: int, seed: int, learning_rate: float) -> RunRecord:
    """A record such as training writes, its numbers drawn rather than trained."""
    found = find_arm(arm)
    spec = RunSpec.of(recipe_of(found).at(found, depth), DataConfig("0" * 64), seed=seed)
    spec = replace(spec, hyperparameters=replace(spec.hyperparameters, learning_rate=learning_rate))
    flops = expected_flops(spec)
    passes = spec.schedule.final
    stored = stored_parameters(found, spec.shape, passes)
    active = compute_active_parameters(found, spec.shape, passes)
    loss = 2.5 + random.random()
    return RunRecord(
        spec=spec,
        run=spec.hash,
        validation_loss=loss,
        validation_bits_per_byte=loss / 3,
        validation_identity="f" * 64,
        validation_scores=tuple(
            ValidationScore(step, loss + 0.1, loss / 3, passes) for step in (100, 200, 300)
        ),
        train_loss=loss,
        tokens=spec.tokens,
        flops=flops,
        flops_by_term={"matmul": flops * 0.8, "attention": flops * 0.1, "head": flops * 0.1, "total": flops},
        parameters=Parameters(stored, stored, active, active, float(active), 100, stored - 200),
        seconds_training=100.0,
        seconds_total=110.0,
        tokens_per_second=spec.tokens / 100,
        mfu=0.4,
        peak_memory_bytes=10**9,
        hardware={"device": "cuda", "name": "a GPU", "cpus": 16, "threads": 1, "host": "here", "gpus": 1},
        versions={"steepen": "0.1.0", "python": "3.11", "torch": "2.13", "numpy": "2.4"},
        git={"commit": "0" * 40, "dirty": False},
        finished="2026-01-01T00:00:00+00:00",
    )


def fill(root: Path, count: int) -> None:
    """So many run directories, their files old enough to be indexed."""
    old = time.time() - 10 * SETTLED_SECONDS
    for number in range(count):
        arm, depth = ARMS[number % len(ARMS)], 4 + 2 * (number // len(ARMS) % 8)
        record = make_record(arm, depth, seed=number, learning_rate=0.01 * (1 + number % 7))
        folder = root / record.run
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(record.spec.to_dict(), indent=2))
        file = folder / "record.json"
        file.write_text(json.dumps(record.to_dict(), indent=2))
        os.utime(file, (old, old))


class Timed:
    """Median seconds of a few calls, by the clock and by the processor, and what the last call returned."""

    def __init__(self, action: Callable[[], Any], repeats: int = 3) -> None:
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(repeats):
            begun, used = time.perf_counter(), time.process_time()
            self.result: Any = action()
            wall.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - used)
        self.wall, self.cpu = statistics.median(wall), statistics.median(cpu)


def plainly(root: Path) -> list[RunRecord]:
    """Every record by parsing its file."""
    return [RunRecord.from_dict(json.loads(path.read_text())) for path in sorted(root.glob("*/record.json"))]


def main() -> None:
    """Make the store, then print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fill(root, count)
        store = RunStore(root)
        parse = Timed(lambda: plainly(root), repeats=1)
        build = Timed(Index(root).rebuild, repeats=1)
        listing = Timed(store.rows)
        filtering = Timed(lambda: store.rows(arm="untied-grow", depth=8))
        loading = Timed(store.records)
        few = Timed(lambda: store.records(arm="untied-grow", depth=8))
        assert loading.result == parse.result, "the index must give exactly what the files hold"
        assert len(listing.result) == count and len(filtering.result) == len(few.result) > 0
        size = (root / NAME).stat().st_size / 1e6
        print(f"{count:,} records, index {size:.1f} MB (made once in {build.wall:.2f} s)")
        print(f"{'':26} {'clock':>9} {'processor':>10}")
        print(f"{'parse every record.json':26} {parse.wall:7.3f} s {parse.cpu:8.3f} s")
        for what, one in (
            ("list", listing),
            (f"filter ({len(filtering.result):,} rows)", filtering),
            (f"load {len(few.result):,} records", few),
            ("load all records", loading),
        ):
            ratio = parse.cpu / one.cpu
            print(f"{what:26} {one.wall:7.3f} s {one.cpu:8.3f} s   {ratio:.1f}× less processor time")
        together = (listing, filtering, loading)
        wall, cpu = sum(one.wall for one in together), sum(one.cpu for one in together)
        print(f"{'list + filter + load all':26} {wall:7.3f} s {cpu:8.3f} s")


if __name__ == "__main__":
    main()
