"""Wall-clock time of a study against the training time of its runs, and against a new process per run.

    python benchmarks/study_overhead.py --preset mini --data data/mini --runs 24
    python benchmarks/study_overhead.py --preset tiny --data data/tiny --runs 6

Trains the first runs of `study chain-tuning` twice, in interleaved batches: through the local launcher as a
study does, and with a new process for every run (the reference). Both write to a temporary directory.
`--runs 0` runs the whole study once, without the reference.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from steepen.data import Dataset
from steepen.launch.base import LaunchContext
from steepen.launch.local import LocalLauncher
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.drive import drive
from steepen.studies.preset import load_preset
from steepen.studies.registry import STUDIES


def first_specs(context: StudyContext, arm: str, count: int, steps: int | None) -> list[RunSpec]:
    """The first batches of chain tuning hold its learning-rate sweep, which depends on no result."""
    study = STUDIES["chain-tuning"].start(context, {"arms": [arm]})
    batch = list(next(study))
    seeds = -(-count // len(batch))
    changes = {} if steps is None else {"steps": steps}
    return [
        RunSpec.from_dict({**spec.to_dict(), **changes, "seed": seed})
        for seed in range(seeds)
        for spec in batch
    ][:count]


def launch_seconds(launcher: LocalLauncher, specs: Sequence[RunSpec], *, new_process: bool) -> float:
    """Wall-clock seconds of these runs."""
    started = time.perf_counter()
    batches = [[spec] for spec in specs] if new_process else [list(specs)]
    for batch in batches:
        for outcome in launcher.launch(batch):
            if outcome.record is None:
                raise SystemExit(f"a run failed: {outcome.failure}")
        if new_process:
            launcher.close()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--runs", type=int, default=24, help="of each side; 0: the whole study, once")
    parser.add_argument("--batch", type=int, default=6, help="runs of one side before the other's turn")
    parser.add_argument("--steps", type=int, default=None, help="of each run, if not the study's own number")
    parser.add_argument("--jobs", type=int, default=None)
    options = parser.parse_args()
    dataset = Dataset.open(options.data)
    context = StudyContext(
        load_preset(options.preset),
        DatasetInfo(
            dataset.identity,
            dataset.padded_vocabulary,
            len(dataset.tokens("train")),
            len(dataset.tokens("val")),
        ),
        epochs=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        sides: list[str] = ["shared"] if options.runs == 0 else ["shared", "new process"]
        stores = {side: RunStore(Path(folder) / side.replace(" ", "-")) for side in sides}
        launchers = {
            side: LocalLauncher(LaunchContext(options.data, store), options.jobs, overlap=side == "shared")
            for side, store in stores.items()
        }
        wall = dict.fromkeys(sides, 0.0)
        if options.runs == 0:
            started = time.perf_counter()
            drive(
                STUDIES["chain-tuning"].start(context, {"arms": [options.arm]}),
                stores["shared"], launchers["shared"], accept_diverged=True,
            )  # fmt: skip
            wall["shared"] = time.perf_counter() - started
        else:
            specs = first_specs(context, options.arm, options.runs, options.steps)
            for first in range(0, len(specs), options.batch):
                for side, launcher in launchers.items():
                    wall[side] += launch_seconds(
                        launcher, specs[first : first + options.batch], new_process=side != "shared"
                    )
        for launcher in launchers.values():
            launcher.close()
        for side, store in stores.items():
            records = list(store.records())
            training = sum(record.seconds_training for record in records)
            slots = launchers[side].slots
            print(
                f"{side:12} {len(records):4} runs  wall {wall[side]:7.1f} s  training {training:7.1f} s  "
                f"wall × {slots} / training {wall[side] * slots / training:.2f}"
            )
        if len(sides) == 2:
            print(f"shared / a new process per run: {wall['shared'] / wall['new process']:.2f}")


if __name__ == "__main__":
    main()
