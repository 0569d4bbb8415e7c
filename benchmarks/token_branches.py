"""A sweep of tokens as branches of one trunk, against the same runs made separately: FLOPs and losses.

    python benchmarks/token_branches.py                 # two CPU cores, about a minute
    python benchmarks/token_branches.py --preset mini --data data/fineweb --depth 4     # a GPU, a minute
    python benchmarks/token_branches.py --launcher slurm --launcher-option partition=gpu --jobs 2

Prints one line for each run and the totals. On a CPU the losses must be equal to the last bit, so the script
fails where they are not; on a GPU it prints the largest difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from steepen.launch.base import LaunchContext, make_launcher
from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.cells import plan_grid
from steepen.studies.context import StudyContext, open_data
from steepen.studies.driver.drive import drive
from steepen.studies.preset import load_preset

LIMIT = 0.45  # of the FLOPs of separate runs


def sweep(specs: Sequence[RunSpec]) -> Generator[Sequence[RunSpec], list[RunRecord], list[RunRecord]]:
    """A study of one batch."""
    return (yield specs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tpp", default="4,5,6,7,8")
    parser.add_argument("--warmdown", type=float, default=0.2)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--launcher", default="local")
    parser.add_argument("--launcher-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--folder", type=Path, default=None, help="of the runs; all nodes must see it")
    chosen = parser.parse_args()
    preset = replace(load_preset(chosen.preset), branches=chosen.warmdown)
    arm = find_arm(chosen.arm)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        folder = Path(temporary)
        runs = folder / "together"
        path, facts = open_data(preset, chosen.data, runs, False, (folder / "studies", "sweep"))
        context = StudyContext(preset, facts)

        def plan(tpp: float) -> tuple[RunSpec, dict[str, float]]:
            tokens = tpp * context.stored_parameters(arm, chosen.depth)
            recipe = context.constant_recipe(arm)
            run = recipe.at_budget(arm, chosen.depth, context.size_rule, tokens=tokens)
            return context.spec(run, branch=True), {}

        plans = plan_grid(plan, tpp=[float(word) for word in chosen.tpp.split(",")])
        specs = [spec for spec, _ in plans if isinstance(spec, RunSpec)]

        def train(name: str, batches: Sequence[Sequence[RunSpec]]) -> list[RunRecord]:
            store = RunStore(folder / name)
            context, options = LaunchContext(path, store), chosen.launcher_option
            launcher = make_launcher(chosen.launcher, context, chosen.jobs, options)
            return [record for batch in batches for record in drive(sweep(batch), store, launcher)]

        together = train("together", [specs])
        alone = train("alone", [[spec] for spec in specs])  # a batch of one shares its steps with none
    worst = 0.0
    for branch, separate in zip(together, alone, strict=True):
        gap = abs(branch.validation_loss - separate.validation_loss)
        worst = max(worst, gap)
        print(
            f"{branch.tokens:>12,} tokens  loss {branch.validation_loss:.6f}, alone "
            f"{separate.validation_loss:.6f}  {branch.spent_flops:.3g} of {branch.flops:.3g} FLOPs spent"
        )
    spent = sum(record.spent_flops for record in together)
    ratio = spent / sum(record.spent_flops for record in alone)
    print(f"{spent:.4g} FLOPs spent, {ratio:.1%} of separate runs; largest difference of losses {worst:.2g}")
    on_cpu = together[0].hardware.get("device") == "cpu"
    return 1 if ratio > LIMIT or (on_cpu and worst > 0) else 0


if __name__ == "__main__":
    sys.exit(main())
