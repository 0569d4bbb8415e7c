"""One run on several ranks: cost of torchrun, equality of losses, memory of an owner.

    python benchmarks/distributed.py overhead --depths 8 12    # one GPU: torchrun of one rank, against none
    python benchmarks/distributed.py equality --device cuda:0  # two ranks on one GPU (gloo), against one
    python benchmarks/distributed.py equality --device cpu --arms all --worlds 2 4 --depth 3 --steps 50
    python benchmarks/distributed.py scaling --worlds 1 2 4 8  # NCCL on one machine: speed and efficiency

Runs are on the built-in corpus. `overhead` starts a plain process and one under torchrun, which train in
turns of a few steps (`training_turns.py`), and prints the ratio of their tokens/s, turn by turn. `equality`
prints the largest difference of training losses against the run of one process with the same micro-batch
and, as a yardstick, that of one process with half the micro-batch: another order of sums. `--device cuda:0`
puts all ranks on that GPU. Peak memory is printed beside the planner's estimate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from steepen.model.arms import ARMS
from steepen.recipe.memory import training_memory
from steepen.recipe.recipe import PlannedRun
from steepen.runs.record import RunRecord

TINY = {"aspect": 16, "head_dim": 16, "mlp_multiple": 16, "context": 32, "batch_tokens": 256}


def steepen(*words: object) -> str:
    """Run a command of steepen; returns its output."""
    command = [sys.executable, "-m", "steepen", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}")
    return done.stdout


class Runs:
    """Runs of one folder, made by `steepen train`."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.data = folder / "data"
        depth = max(options.depths) if options.what == "overhead" else options.depth
        tokenizer = "bpe:300" if depth <= 3 else "gpt2"
        steepen(
            "data", "prepare", "builtin", "--out", self.data, "--tokenizer", tokenizer, "--val-tokens", 65536
        )

    def size(self, depth: int) -> dict[str, int]:
        """Options that give the size of a run: tiny up to d3."""
        size = TINY if depth <= 3 else {"batch_tokens": 524_288}
        return (
            size if self.options.batch_tokens is None else {**size, "batch_tokens": self.options.batch_tokens}
        )

    def train(self, label: str, arm: str, depth: int, *extra: object) -> tuple[RunRecord, list[float]]:
        """Train one run, with no checkpoint before its end; returns its record and its training losses."""
        options, size = self.options, self.size(depth)
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
        words += [
            "--tokens",
            options.steps * size["batch_tokens"],
            "--epochs",
            10_000,
            "--device",
            options.device,
        ]
        words += ["--precision", options.precision, "--validation-tokens", 16_384]
        words += ["--checkpoint-every", options.steps]
        words += [word for name, value in size.items() for word in (f"--{name.replace('_', '-')}", value)]
        words += ["--rho", 0.5] if ARMS[arm].passes.grows else []
        record = RunRecord.from_dict(json.loads(steepen("train", *words, *extra, "--json")))
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
    """Speed of one rank under torchrun, against a plain process: both train, in turns of a few steps."""
    steps = (options.turns + 1) * options.turn_steps
    common = {"precision": options.precision, "epochs": 10_000, "validation_tokens": 16_384}
    specs = [
        {"arm": "vanilla", "depth": depth, "tokens": steps * size["batch_tokens"], **common, **size}
        for depth in options.depths
        for size in [runs.size(depth)]
    ]
    plan = {"runs": specs, "data": str(runs.data), "turns": options.turns, "steps": options.turn_steps}
    plan |= {"device": options.device, "micro_batch": options.micro_batch}
    file = runs.folder / "turns" / "plan.json"
    file.parent.mkdir()
    file.write_text(json.dumps(plan))
    program = [str(Path(__file__).with_name("training_turns.py")), str(file)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    started = [
        subprocess.Popen([sys.executable, *words]) for words in (program, [*torchrun, *program, "--second"])
    ]
    while None in (codes := [process.poll() for process in started]) and not any(codes):
        time.sleep(0.1)
    for process in started:
        process.terminate()  # the other, if one has failed
        process.wait()
    if any(process.returncode for process in started):
        sys.exit("a process that trains in turns has failed")
    first, second = (json.loads(file.with_name(f"{name}.json").read_text()) for name in ("first", "second"))
    for depth, plain, ranked in zip(options.depths, first, second, strict=True):
        ratios = [b / a for a, b in zip(plain, ranked, strict=True)]
        print(
            f"d{depth}: plain {[round(rate) for rate in plain]} tokens/s, "
            f"torchrun {[round(rate) for rate in ranked]}; ratio of each pair "
            f"{[round(ratio, 4) for ratio in ratios]}, median {statistics.median(ratios):.4f}",
            flush=True,
        )


def equality(runs: Runs, options: argparse.Namespace) -> None:
    """Largest difference of losses between numbers of ranks, and memory against the plan."""
    arms = list(ARMS) if options.arms == ["all"] else options.arms
    half = max(1, options.micro_batch // 2)
    # On a GPU the runs are made at the same time: most of each is start and exchange.
    with ThreadPoolExecutor(1 if options.device == "cpu" else 2 + len(options.worlds)) as pool:
        for arm in arms:

            def start(label: str, micro_batch: int, *extra: object, arm: str = arm) -> Any:
                words = ["--micro-batch", micro_batch, *extra]
                return pool.submit(runs.train, label, arm, options.depth, *words)

            one, other = start("one", options.micro_batch), start("half", half)
            ranked = {
                world: start(f"ranks-{world}", options.micro_batch, "--gpus", world, "--shard", options.shard)
                for world in options.worlds
            }
            record, expected = one.result()
            yardstick = max(abs(a - b) for a, b in zip(expected, other.result()[1], strict=True))
            print(f"{arm} d{options.depth}, {len(expected)} steps: loss {expected[0]:.4f} to "
                  f"{expected[-1]:.4f}; micro-batch {half}: {yardstick:.1e} apart", flush=True)  # fmt: skip
            for world, run in ranked.items():
                found, losses = run.result()
                apart = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
                validation = abs(found.validation_loss - record.validation_loss)
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
    parser.add_argument("--batch-tokens", type=int, default=None)
    parser.add_argument("--turns", type=int, default=6, help="timed turns of each process (overhead)")
    parser.add_argument("--turn-steps", type=int, default=4, help="steps of a turn (overhead)")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--precision", default=None)
    options = parser.parse_args()
    options.precision = options.precision or ("fp32" if options.device == "cpu" else "bf16")
    options.micro_batch = options.micro_batch or (2 if max(options.depth, *options.depths) <= 3 else 32)
    with tempfile.TemporaryDirectory(prefix="steepen-distributed-") as folder:
        {"overhead": overhead, "equality": equality, "scaling": scaling}[options.what](
            Runs(Path(folder), options), options
        )


if __name__ == "__main__":
    main()
