"""Time of a training step when several small runs share one GPU, against one run alone.

    python benchmarks/runs_at_once.py --depths 4,6,8 --batch-tokens 8192

For each depth of the narrow shape (width 32·depth): one run; `--runs` runs in processes of their own, with
the GPU's time sliced between them and, where the driver has it, with the Multi-Process Service (MPS); and one
run with as many times the batch. The last is a bound: the rows of all runs in every kernel, as if their
weights were one, so no way to train several runs at once can be faster. Captured steps (CUDA graphs), bf16,
no data loading, random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 300, 30
SHAPE: dict[str, Any] = {"context": 512, "aspect": 32, "head_dim": 32, "mlp_multiple": 32, "base_depth": 8}
START_SECONDS = 90.0  # for all processes to be ready


def step_seconds(depth: int, batch_tokens: int, arm: str, data: str, folder: Path | None = None) -> float:
    """Mean seconds of a step; with `folder` after all processes that share it have captured theirs."""
    import torch

    import steepen
    from steepen.data import Dataset
    from steepen.distributed.world import World
    from steepen.runs.store import RunStore
    from steepen.training.run_state import load_or_init
    from steepen.training.train_options import TrainOptions
    from steepen.training.trainer import Trainer, make_loaders
    from steepen.utils.progress import ProgressDisplay

    spec = steepen.spec(
        arm, depth, data, tokens=batch_tokens * 1000, batch_tokens=batch_tokens, precision="bf16",
        validation_tokens=batch_tokens, epochs=10_000, **SHAPE,
    )  # fmt: skip
    device, options = torch.device("cuda"), TrainOptions(quiet=True)
    with tempfile.TemporaryDirectory() as runs:
        directory = RunStore(Path(runs)).run(spec)
        loaders = make_loaders(spec, Dataset.open(Path(data)))
        trainer = Trainer(spec, *loaders, directory, options, ProgressDisplay(quiet=True), device, World())
        trainer.network, trainer.optimizer, _ = load_or_init(
            spec, directory.checkpoints, device, trainer.mode, lambda _: None
        )
        trainer._prepare_steps()  # pyright: ignore[reportPrivateUsage]
    rows = spec.batch_sequences, spec.shape.context
    inputs, targets = (torch.randint(0, spec.shape.token_ids, rows, device=device) for _ in range(2))

    def train(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(count):
            trainer.train_step(inputs, targets, int(trainer.schedule.passes[0]), 1.0, step)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    train(WARM_UP)
    if folder is not None:
        (folder / f"ready-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.001)
    return train(STEPS)


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


@contextlib.contextmanager
def multi_process_service() -> Generator[dict[str, str] | None]:
    """Start MPS in a folder of its own; gives the environment of its clients, or None without MPS."""
    with tempfile.TemporaryDirectory() as name:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": name, "CUDA_MPS_LOG_DIRECTORY": name}
        environment = {**os.environ, **variables}
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            yield None
            return
        try:
            yield variables
        finally:
            quit_ = ["nvidia-cuda-mps-control"]
            subprocess.run(quit_, input="quit", text=True, env=environment, check=False, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", default="4,6,8")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--data", help="prepared data; without it the built-in corpus is prepared")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that was started here
    given = parser.parse_args()
    if given.folder is not None:
        print(step_seconds(int(given.depths), given.batch_tokens, given.arm, given.data, given.folder))
        return
    with tempfile.TemporaryDirectory() as name:
        if given.data is None:
            given.data = f"{name}/data"
            prepare = ["data", "prepare", "builtin", "--tokenizer", "bpe:2048", "--out", given.data]
            subprocess.run([sys.executable, "-m", "steepen", *prepare], check=True, capture_output=True)
        print(f"ms a step of {given.arm}, {given.batch_tokens:,} tokens; {given.runs} runs against one")
        for depth in (int(word) for word in given.depths.split(",")):
            size = ["--batch-tokens", str(given.batch_tokens), "--arm", given.arm, "--data", given.data]
            words = ["--depths", str(depth), *size]
            one = in_processes(1, words, {})
            found = {"time slices": in_processes(given.runs, words, {})}
            with multi_process_service() as service:
                if service is not None:
                    found["MPS"] = in_processes(given.runs, words, service)
            size[1] = str(given.batch_tokens * given.runs)
            found["bound"] = in_processes(1, ["--depths", str(depth), *size], {})
            shown = ", ".join(f"{way} {t * 1e3:.2f} ({t / one:.2f}×)" for way, t in found.items())
            print(f"d{depth}: one {one * 1e3:.2f}, {shown}", flush=True)


if __name__ == "__main__":
    main()
