"""Time of a training step when several small runs share one GPU, against one run alone.

    python benchmarks/runs_at_once.py --depths 4,6,8 --runs 4,8 --batch-tokens 8192

For each depth of the narrow shape (width 32·depth) and each number of runs: processes that share the GPU's
time in slices; processes that share the GPU through the Multi-Process Service (MPS), where the driver has it;
threads of one process with a CUDA stream each; and one run with as many times the batch. The last is a bound:
the rows of all runs in every kernel, as if their weights were one, so no way to train several runs at once
can be faster. Captured steps (CUDA graphs), bf16, no data loading, random tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 300, 30
SHAPE: dict[str, Any] = {"context": 512, "aspect": 32, "head_dim": 32, "mlp_multiple": 32, "base_depth": 8}
START_SECONDS = 90.0  # for all processes to be ready


def make_steps(depth: int, batch_tokens: int, arm: str, data: str) -> Callable[[int], None]:
    """A function that makes so many captured training steps of one run and waits for them."""
    import torch

    import steepen
    from steepen.data import Dataset
    from steepen.distributed.world import World
    from steepen.runs.store import RunStore
    from steepen.training.run import make_loaders
    from steepen.training.train_options import TrainOptions
    from steepen.training.trainer import Trainer
    from steepen.utils.progress import ProgressDisplay

    spec = steepen.spec(
        arm, depth, data, tokens=batch_tokens * 1000, batch_tokens=batch_tokens, precision="bf16",
        validation_tokens=batch_tokens, epochs=10_000, **SHAPE,
    )  # fmt: skip
    world, options = World(device=torch.device("cuda")), TrainOptions(quiet=True)
    with tempfile.TemporaryDirectory() as runs:
        directory = RunStore(Path(runs)).run(spec)
        loaders = make_loaders(spec, Dataset.open(Path(data)))
        trainer = Trainer(spec, *loaders, directory, options, ProgressDisplay(quiet=True), world)
        trainer.network, trainer.optimizer, _ = trainer.states.load_or_init(directory)
        trainer.stage = 0
        trainer._prepare_steps()  # pyright: ignore[reportPrivateUsage]
    rows = spec.batch_sequences, spec.shape.context
    inputs, targets = (torch.randint(0, spec.shape.token_ids, rows, device=world.device) for _ in range(2))
    stream = torch.cuda.Stream()

    def train(count: int) -> None:
        with torch.cuda.stream(stream):
            for step in range(count):
                trainer.train_step(inputs, targets, int(trainer.schedule.passes[0]), 1.0, step)
        stream.synchronize()

    train(WARM_UP)
    return train


def step_seconds(words: argparse.Namespace) -> float:
    """Seconds in which every run of this process makes one step, after all processes have captured theirs."""
    runs = [make_steps(int(words.depths), words.batch_tokens, words.arm, words.data)
            for _ in range(words.threads)]  # fmt: skip
    (words.folder / f"ready-{os.getpid()}").touch()
    while not (words.folder / "go").exists():
        time.sleep(0.001)
    began = time.perf_counter()
    threads = [threading.Thread(target=train, args=(STEPS,)) for train in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / STEPS


def in_processes(count: int, words: list[str], environment: dict[str, str]) -> float:
    """Seconds in which `count` processes make one step each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, *words, "--folder", name]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
            for _ in range(count)
        ]
        deadline = time.monotonic() + START_SECONDS
        while len(list(folder.glob("ready-*"))) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        (folder / "go").touch()
        return max(float(process.communicate()[0].split()[-1]) for process in started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", default="4,6,8")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--runs", default="4")
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--data", help="prepared data; without it the built-in corpus is prepared")
    parser.add_argument("--ways", default="slices,mps,threads,bound")
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)  # runs of one process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that was started here
    given = parser.parse_args()
    if given.folder is not None:
        print(step_seconds(given))
        return
    from steepen.launch.local import MultiProcessService

    with tempfile.TemporaryDirectory() as name:
        if given.data is None:
            given.data = f"{name}/data"
            prepare = ["data", "prepare", "builtin", "--tokenizer", "bpe:2048", "--out", given.data]
            subprocess.run([sys.executable, "-m", "steepen", *prepare], check=True, capture_output=True)
        print(f"ms a step of {given.arm}, {given.batch_tokens:,} tokens; so many runs against one")
        for depth in (int(word) for word in given.depths.split(",")):
            batch = ["--batch-tokens", str(given.batch_tokens)]
            words = ["--depths", str(depth), "--arm", given.arm, "--data", given.data]
            one = in_processes(1, [*words, *batch], {})
            print(f"d{depth}: one {one * 1e3:.2f}", flush=True)
            for count in (int(word) for word in given.runs.split(",")):
                found: dict[str, float] = {}
                if "slices" in given.ways:
                    found["time slices"] = in_processes(count, [*words, *batch], {})
                if "mps" in given.ways:
                    service = MultiProcessService.start()
                    if service is not None:
                        found["MPS"] = in_processes(count, [*words, *batch], service.environment)
                        service.stop()
                if "threads" in given.ways:
                    found["threads"] = in_processes(1, [*words, *batch, "--threads", str(count)], {})
                if "bound" in given.ways:
                    larger = ["--batch-tokens", str(given.batch_tokens * count)]
                    found["bound"] = in_processes(1, [*words, *larger], {})
                shown = ", ".join(f"{way} {t * 1e3:.2f} ({t / one:.2f}×)" for way, t in found.items())
                print(f"d{depth}: {count} runs: {shown}", flush=True)


if __name__ == "__main__":
    main()
