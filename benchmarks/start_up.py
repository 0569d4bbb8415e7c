"""Where the time of a short `steepen train` goes, from the start of the process to its end.

    python benchmarks/start_up.py --data data/mini --tokens 4M
    python benchmarks/start_up.py --data data/mini --tokens 4M --source src ../before/src --times 2

Runs the command in new processes, a run of its own each time, and prints one line per run: wall time,
training, and the overhead, which is all else; then (without `--short`) when the phases of the process began
and ended. `--source` compares versions of the package, in turns. Each turn begins with a process that only
imports torch: what a run needs beyond it is printed too. The first run starts with an empty kernel cache,
which the others reuse; `--cache FOLDER` keeps one. Options after `--` go to `steepen train`. With `--study N`
it ends with N runs of about ten seconds through the local launcher, as a study makes them. On a CPU:

    python benchmarks/start_up.py --data data/tiny --depth 1 --tokens 8k --study 2 --study-tokens 8e3 \\
        --batch-tokens 2048 -- --precision fp32
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Functions that are timed, by module.
PHASES = {
    "steepen.requests.train": ["open_data", "Train.find_spec"],
    "steepen.optim.optimizer": ["Optimizer.warm_up"],
    "steepen.execution.cuda_graphs": ["CudaGraphCache.capture"],
    "steepen.training.run": ["make_loaders", "write_run_tokenizer"],
    "steepen.training.run_state": ["StateLoader.load_or_init"],
    "steepen.training.train_step": [
        "compile_beforehand",
        "GradientAccumulator.__call__",
        "TrainStep.warmup_and_capture",
        "TrainStep.__call__",
        "mean_loss",
    ],
    "steepen.training.trainer": [
        "Trainer.run",
        "Trainer._prepare_steps",
        "Trainer._loop",
        "Trainer._save",
        "Trainer._validate",
        "Trainer._finish",
    ],
    "steepen.training.device": ["git_state", "versions", "hardware"],
}
LISTED = 2  # calls of one function, at most


def train_timed(file: Path, words: list[str]) -> None:
    """Run a command in this process and leave its phases in a file: [name, begin, end], in Unix time."""
    spans: list[tuple[str, float, float]] = [("interpreter started", time.time(), time.time())]
    wrapped: set[str] = set()
    importing = builtins.__import__

    def timed(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.time()
            try:
                return function(*arguments, **options)
            finally:
                if sum(span[0] == name for span in spans) < LISTED:
                    spans.append((name, begin, time.time()))

        return call

    def hooked(name: str, *arguments: Any, **options: Any) -> Any:
        begin, new = time.time(), name == "torch" and "torch" not in sys.modules
        found = importing(name, *arguments, **options)
        if new:
            spans.append(("import torch", begin, time.time()))
        for module in [m for m in PHASES if m in sys.modules and m not in wrapped]:
            wrap(module)
        return found

    def wrap(module: str) -> None:
        loaded: Any = sys.modules[module]
        if getattr(loaded.__spec__, "_initializing", False):
            return
        wrapped.add(module)
        for path in PHASES[module]:
            owner, _, name = path.rpartition(".")
            place = getattr(loaded, owner) if owner else loaded
            if hasattr(place, name):  # another version may not have it
                setattr(place, name, timed(path, getattr(place, name)))

    builtins.__import__ = hooked
    from steepen.requests.app import main

    spans.append(("command line imported", spans[0][2], time.time()))
    code = main(words)
    spans.append(("command ended", time.time(), time.time()))
    compiler = [name for name in ("torch._dynamo", "sympy", "triton") if name in sys.modules]
    file.write_text(json.dumps({"spans": spans, "imported": compiler}))
    try:
        from steepen.utils.process import exit_process
    except ImportError:
        sys.exit(code)
    exit_process(code)


def import_seconds() -> float:
    """Seconds from the start of a process to the end of its import of torch."""
    began = time.time()
    program = "import os, torch; os._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.time() - began


def run_once(options: Any, source: Path, folder: Path, number: int, cache: Path, floor: float) -> None:
    """Train once in a new process and print what it took, and how much beyond `floor` seconds."""
    runs = folder / f"runs-{number}"
    words = ["train", "--arm", options.arm, "--depth", str(options.depth), "--tokens", options.tokens]
    words += ["--data", str(options.data), "--runs", str(runs), *options.words]
    words += ["--batch-tokens", str(options.batch_tokens)] if options.batch_tokens else []
    environment = {**os.environ, "PYTHONPATH": str(source), "TRITON_CACHE_DIR": str(cache)}
    kernels = "warm" if cache.exists() else "empty"
    began = time.time()
    command = [sys.executable, __file__, "--child", str(folder / "phases.json"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.time() - began
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        raise SystemExit(f"the command failed with {source}")
    (record,) = (json.loads(path.read_text()) for path in runs.glob("*/record.json"))
    phases = json.loads((folder / "phases.json").read_text())
    steps = [end for name, _, end in phases["spans"] if name == "Trainer._prepare_steps"]
    training = record["seconds_training"]
    ready, overhead = steps[0] - began, wall - training
    print(
        f"{source}, {kernels} kernel cache: wall {wall:.2f} s, training {training:.2f}, ready for the first "
        f"step after {ready:.2f} ({ready - floor:.2f} beyond importing torch), overhead {overhead:.2f} "
        f"({overhead - floor:.2f} beyond); loaded {', '.join(phases['imported'])}",
        flush=True,
    )
    if options.short:
        return
    for name, begin, end in sorted(phases["spans"], key=lambda span: span[1]):
        print(f"    {begin - began:6.2f} – {end - began:5.2f} s  {name}")
    print(f"    {wall:6.2f} s  process ended\n", flush=True)


def study(options: Any, folder: Path) -> None:
    """Runs of about ten seconds through the local launcher, as a study makes them."""
    from steepen.launch.base import LaunchContext
    from steepen.launch.local import LocalLauncher
    from steepen.requests.spec import spec
    from steepen.runs.store import RunStore

    made = {"tokens": options.study_tokens, "batch_tokens": options.batch_tokens}
    made |= {"epochs": 1000, "precision": "auto"}
    specs = [spec(options.arm, options.depth, options.data, seed=n, **made) for n in range(options.study)]
    began = time.perf_counter()
    launcher = LocalLauncher(LaunchContext(options.data, RunStore(folder / "study")))
    training: list[float] = []
    start = 0.0  # of the first run, once its process has imported everything
    for outcome in launcher.launch(specs):
        if outcome.record is None:
            raise SystemExit(f"a run failed: {outcome.failure}")
        start = start or time.perf_counter() - began - outcome.record.seconds_total
        training.append(outcome.record.seconds_training)
    launcher.close()
    wall, total = time.perf_counter() - began, sum(training) / launcher.slots
    print(
        f"study of {len(training)} runs, {launcher.slots} at a time: wall {wall:.1f} s, training "
        f"{', '.join(f'{each:.1f}' for each in training)} s, wall / training {wall / total:.3f}; from the "
        f"first run on, which began after {start:.1f} s, {(wall - start) / total:.3f}"
    )


def main() -> None:
    """Print the runs in turns, then the study."""
    if "--child" in sys.argv:
        place = sys.argv.index("--child")
        train_timed(Path(sys.argv[place + 1]), sys.argv[place + 2 :])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--tokens", default="4M")
    parser.add_argument(
        "--source", type=Path, nargs="+", default=[Path(__file__).resolve().parents[1] / "src"]
    )
    parser.add_argument("--times", type=int, default=3, help="processes of each version")
    parser.add_argument("--cache", type=Path, help="of kernels; default: a new one")
    parser.add_argument("--study", type=int, default=0, help="runs of the study; 0: none")
    parser.add_argument("--study-tokens", type=float, default=60e6, help="of each of its runs")
    parser.add_argument("--batch-tokens", type=int, help="of a step; default: the recipe's")
    parser.add_argument("--short", action="store_true", help="without the phases")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        cache = options.cache or Path(temporary) / "cache"
        for number in range(options.times):
            floor = import_seconds()
            print(f"import torch, alone: {floor:.2f} s from the start of the process")
            for index, source in enumerate(options.source):
                folder = Path(temporary) / str(index)
                folder.mkdir(exist_ok=True)
                run_once(options, source.resolve(), folder, number, cache, floor)
        if options.study:  # with the package that this process imports
            os.environ["TRITON_CACHE_DIR"] = str(cache)
            study(options, Path(temporary))


if __name__ == "__main__":
    main()
