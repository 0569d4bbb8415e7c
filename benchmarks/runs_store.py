"""Time listing, filtering and loading a run store of ten thousand records.

    python benchmarks/runs_store.py [--records 10000]

The records are synthetic: real specs of several arms, depths, seeds and learning rates, with drawn losses.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.model.arms import find_arm
from steepen.recipe.flops import compute_active_parameters, stored_parameters
from steepen.recipe.paper_tables import recipe_of
from steepen.runs import index
from steepen.runs.record import Parameters, RunRecord, ValidationScore
from steepen.runs.spec import DataConfig, RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.utils.json_io import read_json

ARMS = ("vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow")


def make_record(arm: str, depth: int, seed: int, learning_rate: float) -> RunRecord:
    """A record as training writes it, with a random loss."""
    found_arm = find_arm(arm)
    spec = RunSpec.from_plan(recipe_of(found_arm).at(found_arm, depth), DataConfig("0" * 64), seed=seed)
    spec = replace(spec, hyperparameters=replace(spec.hyperparameters, learning_rate=learning_rate))
    flops = expected_flops(spec)
    passes = spec.schedule.final
    stored = stored_parameters(found_arm, spec.shape, passes)
    active = compute_active_parameters(found_arm, spec.shape, passes)
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
    """Write `count` run directories with a spec and a record each."""
    for number in range(count):
        arm, depth = ARMS[number % len(ARMS)], 4 + 2 * (number // len(ARMS) % 8)
        record = make_record(arm, depth, seed=number, learning_rate=0.01 * (1 + number % 7))
        folder = root / record.run
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(record.spec.to_dict(), indent=2))
        (folder / "record.json").write_text(json.dumps(record.to_dict(), indent=2))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usage)


def median_seconds(action: Callable[[], Any], repeats: int = 3) -> tuple[float, float, Any]:
    """Median wall-clock and CPU seconds of a few calls, and what the last call returned."""
    wall: list[float] = []
    cpu: list[float] = []
    result: Any = None
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), _cpu_seconds()
        result = action()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(_cpu_seconds() - cpu_start)
    return statistics.median(wall), statistics.median(cpu), result


def main() -> None:
    """Make the store, then print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fill(root, count)
        time.sleep(index.SETTLED_SECONDS)
        store = RunStore(root)

        def without_index() -> list[Any]:
            (root / index.FILE).unlink(missing_ok=True)
            index._indexes.clear()
            return store.rows()

        def with_index() -> list[Any]:
            index._indexes.clear()
            return store.rows()

        reference = 0.0
        print(f"{count:,} records {'wall':>17} {'CPU':>10} {'ratio':>7}")
        for what, action in (
            ("parse every record.json", lambda: [read_json(run.record_file) for run in store.runs()]),
            ("list all, make the index", without_index),
            ("list all, read the index", with_index),
            ("load all records", store.records),
            ("steepen runs", lambda: command("runs", "--runs", folder)),
            (
                "steepen runs show",
                lambda: command("runs", "show", store.runs()[0].path.name[:8], "--runs", folder),
            ),
        ):
            wall, cpu, result = median_seconds(action)
            reference = reference or cpu
            print(f"{what:24} {wall:7.3f} s {cpu:8.3f} s {cpu / reference:7.2f}   ({len(result):,})")


def command(*words: str) -> str:
    """What a command prints in a process of its own."""
    words = (sys.executable, "-m", "steepen", *words)
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
