"""Kill ranks at random with SIGKILL until a run ends, and compare it with an uninterrupted one.

    python tests/distributed/rank_kills.py --kills 200 --ranks 2 4 --seed 0

After a kill the other ranks must stop by themselves; the run is then started again, on a random number of
ranks, and must resume from its last checkpoint. Runs are repeated until there were enough kills. Losses must
equal those of one process to 5e-7. Takes some seconds a kill; `make test` does not run it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import torch

from ranks import free_port
from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.distributed.monitor import LOST_EXIT_CODE
from steepen.errors import SteepenError
from steepen.model.arms import find_arm
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from training_fixtures import SCALE, WORDS

OPTIONS = TrainOptions(device="cpu", quiet=True, micro_batch=1, checkpoint_every=3)


def make_data(folder: Path) -> Dataset:
    """A small data set of random words."""
    choose = random.Random(0)
    documents = [" ".join(choose.choices(WORDS, k=60)) for _ in range(400)]
    (folder / "text.txt").write_text("<|endoftext|>".join(documents))
    prepare(
        PrepareRequest((str(folder / "text.txt"),), tokenizer="bpe:300", val_tokens=2_000), folder / "data"
    )
    return Dataset.open(folder / "data")


def make_spec(data: Dataset, steps: int, seed: int) -> RunSpec:
    """A run of untied growth, half of it grown."""
    arm = find_arm("untied-grow")
    recipe = replace(recipe_of(arm), batch_tokens=256, base_depth=3)
    rung = recipe.at_budget(arm, 3, SCALE, tokens=256 * steps, rho=0.5)
    spec = RunSpec.from_plan(rung, DataConfig(data.identity, epochs=1000), validation_tokens=512)
    return replace(spec, seed=seed)


def losses(store: Path, spec: RunSpec) -> list[float]:
    """Training losses of a run, in order."""
    lines = [json.loads(line) for line in (store / spec.hash / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def rank_process(rank: int, size: int, port: int, spec: RunSpec, data: Dataset, store: Path) -> None:
    """One rank of a run, as torchrun would start it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    try:
        train(spec, data, RunStore(store), OPTIONS)
    except SteepenError as error:
        os._exit(error.exit_code)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    os._exit(0)


def attempt(
    size: int, spec: RunSpec, data: Dataset, store: Path, choose: random.Random, longest: float
) -> bool:
    """Start ranks and kill one of them within `longest` seconds; returns whether one was killed."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    arguments = (size, port, spec, data, store)
    ranks: list[Any] = [context.Process(target=rank_process, args=(rank, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    if longest:
        time.sleep(choose.uniform(0.0, longest))
    victim = choose.randrange(size)
    alive = longest > 0 and ranks[victim].is_alive()
    if alive:
        os.kill(ranks[victim].pid, signal.SIGKILL)
    met = (store / spec.hash / "metrics.jsonl").exists()  # the ranks had met at least once
    deadline = time.monotonic() + (90 if met else 20)
    for process in ranks:
        process.join(max(0.1, deadline - time.monotonic()) if alive else 120)
    for rank, process in enumerate(ranks):
        # Ranks that still wait for each other at the start are ended by torchrun; so they are here.
        if process.is_alive():
            process.terminate()
            process.join(60)
        if process.is_alive():
            sys.exit(f"rank {rank} of {size} did not stop after rank {victim} was killed")
        expected = {0, LOST_EXIT_CODE, 1, -signal.SIGTERM, 143} if alive else {0}
        if rank != victim and process.exitcode not in expected:
            sys.exit(f"rank {rank} of {size} ended with exit code {process.exitcode}")
    return alive


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    kills = runs = 0
    with tempfile.TemporaryDirectory(prefix="steepen-kills-") as name:
        folder = Path(name)
        data = make_data(folder)
        while kills < options.kills:
            spec = make_spec(data, options.steps, runs)
            train(spec, data, RunStore(folder / "one"), OPTIONS)
            whole, started = folder / "whole", time.monotonic()
            attempt(max(options.ranks), spec, data, whole, choose, longest=0)
            longest = time.monotonic() - started  # of an undisturbed run, on a machine as busy as it is now
            store = folder / "killed"
            while not (store / spec.hash / "record.json").exists():
                enough = kills >= options.kills
                kills += attempt(
                    choose.choice(options.ranks), spec, data, store, choose, longest * (not enough)
                )
            expected, found = losses(folder / "one", spec), losses(store, spec)
            apart = max(abs(a - b) for a, b in zip(expected, found, strict=True))
            record = RunStore(store).record(spec)
            assert record is not None
            runs += 1
            print(
                f"{kills} kills, run {runs}: resumed {record.resumed}×, losses {apart:.1e} apart", flush=True
            )
            if apart > 5e-7:
                sys.exit("the losses differ")
    print(f"{runs} runs with {kills} SIGKILLs of ranks ended as uninterrupted ones (seed {options.seed}).")


if __name__ == "__main__":
    main()
