"""A sweep of tokens as branches of one trunk, against the same runs made separately: FLOPs and losses.

    python benchmarks/token_branches.py                 # two CPU cores, about a minute
    python benchmarks/token_branches.py --preset mini --data data/fineweb --seeds 0,1 --again     # a GPU
    python benchmarks/token_branches.py --launcher slurm --launcher-option partition=gpu --jobs 2

Prints one line for each run and the totals. On a CPU the losses must be equal to the last bit; on a GPU the
root mean square of their differences must be below the standard deviation that separate runs of several seeds
have. With `--again` the first seed's separate runs are trained twice: what the device itself does not repeat.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from steepen.launch.base import LaunchContext, Launcher, make_launcher
from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.context import StudyContext, open_data
from steepen.studies.driver.drive import drive
from steepen.studies.preset import load_preset

LIMIT = 0.45  # of the FLOPs of separate runs


def sweep(specs: Sequence[RunSpec]) -> Generator[Sequence[RunSpec], list[RunRecord], list[RunRecord]]:
    """A study of one batch."""
    return (yield specs)


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tpp", default="4,5,6,7,8")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--again", action="store_true", help="train the first seed's separate runs twice")
    parser.add_argument("--warmdown", type=float, default=0.2)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--launcher", default="local")
    parser.add_argument("--launcher-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--folder", type=Path, default=None, help="of the runs; all nodes must see it")
    return parser.parse_args()


def train(chosen: argparse.Namespace, folder: Path) -> Iterator[list[RunRecord]]:
    """Records of the branches, of the separate runs, and of the first seed's separate runs again."""
    preset = replace(load_preset(chosen.preset), branches=chosen.warmdown)
    arm = find_arm(chosen.arm)
    path, facts = open_data(preset, chosen.data, folder / "branches", False, (folder / "studies", "sweep"))
    context = StudyContext(preset, facts)
    specs: list[RunSpec] = []
    for seed in map(int, chosen.seeds.split(",")):
        for word in chosen.tpp.split(","):
            tokens = float(word) * context.stored_parameters(arm, chosen.depth)
            run = context.constant_recipe(arm).at_budget(arm, chosen.depth, context.size_rule, tokens=tokens)
            specs.append(context.spec(run, seed=seed, branch=True))

    def launcher(name: str) -> tuple[RunStore, Launcher]:
        store = RunStore(folder / name)
        options = LaunchContext(path, store), chosen.jobs, chosen.launcher_option
        return store, make_launcher(chosen.launcher, *options)

    def separately(name: str, wanted: Sequence[RunSpec]) -> list[RunRecord]:
        # Without a study nothing notes what the runs have in common, so each trains all its steps.
        found = {one.spec.hash: one for one in launcher(name)[1].launch(wanted)}
        records = [found[spec.hash].record for spec in wanted]
        if failed := [one.failure for one in found.values() if one.failure is not None]:
            raise SystemExit(f"a run failed: {failed[0].kind}: {failed[0].message}")
        return [record for record in records if record is not None]

    yield drive(sweep(specs), *launcher("branches"))
    yield separately("alone", specs)
    if chosen.again:
        yield separately("again", specs[: len(chosen.tpp.split(","))])


def main() -> int:
    chosen, began = arguments(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        stages = train(chosen, Path(temporary))
        branches = next(stages)
        print(f"branches: {time.monotonic() - began:.0f} s", flush=True)
        alone = next(stages)
        print(f"and separate runs: {time.monotonic() - began:.0f} s")
        failed = compare(branches, alone, len(chosen.seeds.split(",")))
        for again in stages:
            pairs = zip(alone, again, strict=False)  # those of the first seed
            same = max(abs(one.validation_loss - other.validation_loss) for one, other in pairs)
            print(f"a separate run less itself, trained again: largest {same:.2g}")
    return failed


def compare(branches: Sequence[RunRecord], alone: Sequence[RunRecord], seeds: int) -> int:
    """Print losses, FLOPs and noise; the exit code: 1 where branches cost too much, or differ by more."""
    for branch, separate in zip(branches, alone, strict=True):
        print(
            f"seed {branch.spec.seed} {branch.tokens:>12,} tokens  loss {branch.validation_loss:.6f}, alone "
            f"{separate.validation_loss:.6f}  {branch.spent_flops:.3g} of {branch.flops:.3g} FLOPs spent"
        )
    losses = np.array([record.validation_loss for record in alone])
    gaps = np.array([record.validation_loss for record in branches]) - losses
    spent = sum(record.spent_flops for record in branches)
    ratio = spent / sum(record.spent_flops for record in alone)
    print(f"{spent:.4g} FLOPs spent, {ratio:.1%} of separate runs")
    typical, noise = math.sqrt(float(np.mean(gaps**2))), math.inf
    print(f"branch less separate run: {typical:.2g} (root mean square), largest {np.abs(gaps).max():.2g}")
    if seeds > 1:
        noise = math.sqrt(float(losses.reshape(seeds, -1).var(axis=0, ddof=1).mean()))
        print(f"separate runs of several seeds: {noise:.2g} (standard deviation)", flush=True)
    on_cpu = branches[0].hardware.get("device") == "cpu"
    return int(ratio > LIMIT or typical > (0.0 if on_cpu else noise))


if __name__ == "__main__":
    sys.exit(main())
