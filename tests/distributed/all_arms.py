"""Train every built-in arm on 1, 2 and 4 ranks and compare the losses of every step, in fp32 on CPUs.

    python tests/distributed/all_arms.py --steps 50

Takes two minutes of CPU time an arm; `make test` compares four arms over six steps. Exits with 1 if a loss
differs by more than 5e-7.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]
sys.path.append(str(Path(__file__).resolve().parent))

from rank_kills import make_data

import ranks
from ranks import on_ranks
from steepen.data import Dataset
from steepen.distributed.world import World
from steepen.model.arms import ARMS
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from training_fixtures import SCALE

TOLERANCE = 5e-7


def make_spec(name: str, steps: int, data: Dataset) -> RunSpec:
    """A tiny run of an arm; half of it is grown where the arm grows."""
    arm = ARMS[name]
    recipe = replace(recipe_of(arm), batch_tokens=256, base_depth=6)
    rung = recipe.at_budget(arm, 6, SCALE, tokens=256 * steps, rho=0.5 if arm.passes.grows else None)
    return RunSpec.from_plan(rung, DataConfig(data.identity, epochs=100), validation_tokens=512)


def losses(world: World, specs: list[RunSpec], data: Dataset, store: Path, options: TrainOptions) -> None:
    """Train runs one after another, on the ranks of a world."""
    for spec in specs:
        train(spec, data, RunStore(store), options, world=world)


def read(store: Path, spec: RunSpec) -> list[float]:
    """Training losses of a run, in order."""
    lines = [json.loads(line) for line in (store / spec.hash / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    ranks.TIMEOUT = 1800.0  # a busy machine is no failure here
    train_options = TrainOptions(device="cpu", quiet=True, micro_batch=2)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="steepen-arms-") as name:
        folder = Path(name)
        data = make_data(folder)
        for arm in options.arms:
            spec = make_spec(arm, options.steps, data)
            cells: list[str] = []
            for shard in ("optimizer", "full"):
                # FSDP2 runs the reference execution, whose sums differ from the fused one's.
                how = replace(train_options, shard=shard, fused=None if shard == "optimizer" else False)
                losses(World(), [spec], data, folder / shard / "1", how)
                for world in options.worlds:
                    on_ranks(world, losses, [spec], data, folder / shard / str(world), how)
                    pairs = zip(
                        read(folder / shard / "1", spec), read(folder / shard / str(world), spec), strict=True
                    )
                    apart = max(abs(a - b) for a, b in pairs)
                    worst = max(worst, apart)
                    cells.append(f"{shard} {world} ranks {apart:.1e}")
            print(f"{arm}: {', '.join(cells)}", flush=True)
    print(f"{len(options.arms)} arms, {options.steps} steps: losses at most {worst:.1e} apart.")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
