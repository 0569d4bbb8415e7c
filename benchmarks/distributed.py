"""One run on several ranks: cost of torchrun, equality of losses, memory of an owner.

    python benchmarks/distributed.py overhead --depths 8 12    # one GPU: torchrun of one rank, against none
    python benchmarks/distributed.py equality --device cuda:0  # two ranks on one GPU (gloo), against one
    python benchmarks/distributed.py equality --device cpu --arms all --worlds 2 4 --depth 3 --steps 50
    python benchmarks/distributed.py scaling --worlds 1 2 4 8  # NCCL on one machine: speed and efficiency

Every run is a `steepen train` of its own on the built-in corpus. `overhead` alternates plain runs and runs
under torchrun and prints the ratio of tokens/s. `equality` prints the largest difference of training losses
against the run of one process with the same micro-batch and, as a yardstick, that of one process with half
the micro-batch: another order of sums. `--device cuda:0` puts all ranks on that GPU. Peak memory is printed
beside the planner's estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from steepen.model.arms import ARMS
from steepen.recipe.memory import training_memory
from steepen.recipe.recipe import PlannedRun
from steepen.runs.record import RunRecord

TINY = {"aspect": 16, "head-dim": 16, "mlp-multiple": 16, "context": 32, "batch-tokens": 256}


def steepen(*words: object, torchrun: bool = False) -> str:
    """Run a command of steepen, with `torchrun` as the single rank of torchrun; returns its output."""
    program = ["-m", "steepen"]
    if torchrun:
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *program]
    command = [sys.executable, *program, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ})
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}")
    return done.stdout


class Runs:
    """Runs of one folder, made by `steepen train`."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.data = folder / "data"
        tokenizer = "bpe:300" if options.depth <= 3 else "gpt2"
        steepen(
            "data", "prepare", "builtin", "--out", self.data, "--tokenizer", tokenizer, "--val-tokens", 65536
        )

    def train(
        self, label: str, arm: str, depth: int, *extra: object, torchrun: bool = False
    ) -> tuple[RunRecord, list[float]]:
        """Train one run; returns its record and its training losses."""
        options = self.options
        size = TINY if depth <= 3 else {}
        batch = size.get("batch-tokens", 524_288)
        words: list[object] = [
            "--arm",
            arm,
            "--depth",
            depth,
            "--data",
            self.data,
            "--runs",
            self.folder / label,
        ]
        words += ["--tokens", options.steps * batch, "--epochs", 10_000, "--device", options.device]
        words += ["--precision", options.precision, "--validation-tokens", 16_384, "--keep-last", 1]
        words += [word for name, value in size.items() for word in (f"--{name}", value)]
        words += ["--rho", 0.5] if ARMS[arm].passes.grows else []
        record = RunRecord.from_dict(
            json.loads(steepen("train", *words, *extra, "--json", torchrun=torchrun))
        )
        lines = (self.folder / label / record.run / "metrics.jsonl").read_text().splitlines()
        return record, [value["loss"] for line in lines if "loss" in (value := json.loads(line))]


def planned_memory(record: RunRecord, ranks: int, micro_batch: int, shard: Any) -> float:
    """The planner's estimate of the peak memory of a run, in GiB."""
    spec = record.spec
    rung = PlannedRun(
        spec.arm, spec.shape, spec.schedule, None, spec.hyperparameters, spec.batch_tokens, spec.steps
    )
    estimate = training_memory(
        rung, ranks, micro_batch, shard=shard, optimizer=spec.optimizer, options=spec.options
    )
    return estimate.total / 2**30


def overhead(runs: Runs, options: argparse.Namespace) -> None:
    """Speed of one rank under torchrun, against a plain process, alternating."""
    for depth in options.depths:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(options.repeats):
            for torchrun in (False, True):
                record, _ = runs.train(f"overhead-{depth}", "vanilla", depth, "--seed", 2 * repeat + torchrun,
                                       "--micro-batch", 32, torchrun=torchrun)  # fmt: skip
                rates[torchrun].append(record.tokens_per_second)
        plain, ranked = (statistics.median(rates[key]) for key in (False, True))
        print(
            f"d{depth}: plain {[round(rate) for rate in rates[False]]} tokens/s, "
            f"torchrun {[round(rate) for rate in rates[True]]}; ratio of medians {ranked / plain:.4f}",
            flush=True,
        )


def equality(runs: Runs, options: argparse.Namespace) -> None:
    """Largest difference of losses between numbers of ranks, and memory against the plan."""
    arms = list(ARMS) if options.arms == ["all"] else options.arms
    for arm in arms:
        size = ["--micro-batch", options.micro_batch]
        one, expected = runs.train("one", arm, options.depth, *size)
        half = max(1, options.micro_batch // 2)
        _, other = runs.train("half", arm, options.depth, "--micro-batch", half)
        yardstick = max(abs(a - b) for a, b in zip(expected, other, strict=True))
        print(f"{arm} d{options.depth}, {len(expected)} steps: loss {expected[0]:.4f} to {expected[-1]:.4f}; "
              f"micro-batch {half}: {yardstick:.1e} apart", flush=True)  # fmt: skip
        for world in options.worlds:
            found, losses = runs.train(
                f"ranks-{world}", arm, options.depth, *size, "--gpus", world, "--shard", options.shard
            )
            apart = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
            validation = abs(found.validation_loss - one.validation_loss)
            line = f"  {world} ranks: {apart:.1e} apart, validation {validation:.1e}"
            if found.peak_memory_bytes is not None:
                planned = planned_memory(found, world, options.micro_batch, options.shard)
                line += f", peak {found.peak_memory_bytes / 2**30:.2f} GiB (planned {planned:.2f})"
            print(line, flush=True)


def scaling(runs: Runs, options: argparse.Namespace) -> None:
    """Tokens/s on several GPUs of this machine, and their efficiency against the first number of them."""
    first: tuple[int, float] | None = None
    for world in options.worlds:
        record, _ = runs.train(f"scaling-{world}", options.arms[0], options.depth, "--shard", options.shard,
                               "--micro-batch", options.micro_batch, "--gpus", world)  # fmt: skip
        rate = record.tokens_per_second
        first = first or (world, rate)
        planned = planned_memory(record, world, options.micro_batch, options.shard if world > 1 else None)
        efficiency = rate / world / (first[1] / first[0])
        peak = (record.peak_memory_bytes or 0) / 2**30
        print(
            f"{world} GPUs: {rate:,.0f} tokens/s, efficiency {efficiency:.1%}, "
            f"peak {peak:.1f} GiB (planned {planned:.1f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "equality", "scaling"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--arms", nargs="+", default=["vanilla"])
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 12])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--shard", default="optimizer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--precision", default=None)
    options = parser.parse_args()
    options.precision = options.precision or ("fp32" if options.device == "cpu" else "bf16")
    options.micro_batch = options.micro_batch or (2 if options.depth <= 3 else 32)
    with tempfile.TemporaryDirectory(prefix="steepen-distributed-") as folder:
        {"overhead": overhead, "equality": equality, "scaling": scaling}[options.what](
            Runs(Path(folder), options), options
        )


if __name__ == "__main__":
    main()
