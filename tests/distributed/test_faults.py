"""A fault of one rank stops all ranks with one sentence that names rank and step; restarts lose nothing."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import free_port
from steepen.cli.app import main
from steepen.data import Dataset
from steepen.runs.spec import RunSpec
from steepen.training import train_step
from steepen.utils.json_io import write_json

MakeSpec = Callable[..., RunSpec]
Fault = Callable[[], None]


def words_for(spec: RunSpec, data: Dataset, folder: Path) -> list[str]:
    """Arguments of `steepen train` for a spec, on CPUs."""
    file = folder / "spec.json"
    write_json(file, spec.to_dict())
    words = ["train", "--spec", file, "--data", data.directory, "--runs", folder / "runs", "--device", "cpu"]
    return [str(word) for word in (*words, "--micro-batch", "2", "--checkpoint-every", "2")]


def run_ranks(
    size: int,
    words: list[str],
    output: Path,
    *,
    at_step: int,
    fault: Fault,
    rank: int = 1,
    timeout: float = 60,
) -> list[int]:
    """Run `steepen` as forked ranks, as torchrun would; `fault` is called on one rank in one step.

    Returns the exit codes; standard error of all ranks goes to `output`.
    """
    port = free_port()

    def child(mine: int) -> None:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 2)
        sys.stderr = os.fdopen(target, "w", buffering=1)
        os.environ.update(RANK=str(mine), WORLD_SIZE=str(size), LOCAL_RANK=str(mine))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        original = train_step.TrainStep.__call__

        def step(self: Any, *arguments: Any) -> Any:
            result = original(self, *arguments)
            if mine == rank and arguments[-1] == at_step:
                returned: Any = fault()
                return result if returned is None else (returned, result[1])
            return result

        patched: Any = step
        train_step.TrainStep.__call__ = patched
        os._exit(main(words))

    context = multiprocessing.get_context("fork")
    processes: list[Any] = [context.Process(target=child, args=(mine,)) for mine in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def sentences(output: Path) -> list[str]:
    return [line for line in output.read_text().splitlines() if line.startswith("steepen: ")]


def hang() -> None:
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def not_finite() -> torch.Tensor:
    return torch.tensor(math.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("fault", "expected", "codes"),
    [
        (die, "rank 1 has stopped responding at step [45]", [75, -9]),
        (hang, "rank 1 has made no progress for 6 s at step 4", [75, 75]),
        (out_of_memory, "rank 1 failed at step 4: out of memory", [1, 1]),
        (not_finite, "the loss is nan, the gradient norm", [1, 1]),
    ],
    ids=["killed", "hung", "out of memory", "not finite"],
)
def test_fault_of_one_rank_stops_all_with_one_sentence(
    fault: Any, expected: str, codes: list[int], make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    words = words_for(make_spec("vanilla", steps=8), tiny_data, tmp_path)
    words += ["--rank-timeout", "6"]
    found = run_ranks(2, words, tmp_path / "err", at_step=4, fault=fault)
    (sentence,) = sentences(tmp_path / "err")
    assert re.search(expected, sentence)
    if fault is not_finite:
        assert "(on rank 1) at step 5" in sentence
    assert found == codes
    failed = list((tmp_path / "runs").glob("*/failure.json"))
    transient = codes[0] == 75  # an interruption: the run is not marked as failed
    assert len(failed) == (0 if transient else 1)
    if not transient:
        kind = json.loads(failed[0].read_text())["kind"]
        assert kind == ("Diverged" if fault is not_finite else "OutOfMemory")


def test_ranks_with_other_data_code_or_spec_are_rejected(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    from ranks import on_ranks
    from steepen.distributed.world import World
    from steepen.errors import UsageError

    def compare(world: World) -> str:
        facts = {"spec": "a", "data": "b" if world.rank == 2 else "c"}
        with pytest.raises(UsageError) as rejected:
            world.require_agreement(facts)
        return str(rejected.value)

    for message in on_ranks(3, compare):
        assert "rank 2 has another data (b) than rank 0 (c)" in message


def start(words: list[str], *extra: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "steepen", *words, *extra]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that a `steepen train --gpus` has started, by rank."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        try:
            if (
                folder.name.isdigit()
                and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process.pid
            ):
                variables = dict(
                    line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line
                )
                found[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError, IndexError):
            continue
    return found


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has saved a checkpoint at or after a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        saved = [int(p.name) for p in run.glob("*/checkpoints/*") if p.name.isdigit()]
        if saved and max(saved) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"no checkpoint of step {step}: {process.communicate(timeout=5)}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_gpus_option_restarts_after_a_killed_rank_and_saves_once_on_sigterm(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("untied-grow", steps=100)
    spec = replace(spec, steps=400, data=replace(spec.data, epochs=100))
    words = words_for(spec, tiny_data, tmp_path)
    process = start(words, "--gpus", "2", "--max-restarts", "1")
    wait_for_step(tmp_path / "runs", 10, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    time.sleep(1)
    saved = max(int(p.name) for p in (tmp_path / "runs").glob("*/checkpoints/*") if p.name.isdigit())
    wait_for_step(tmp_path / "runs", saved + 20, process)  # it goes on
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert said.count("stopped by SIGTERM after step") == 1
    assert said.count("rank 1 has stopped responding at step") == 1
    assert "resuming from step" in said
    step = int(said.split("stopped by SIGTERM after step ")[1].split(",")[0])
    newest = max(int(p.name) for p in (tmp_path / "runs").glob("*/checkpoints/*") if p.name.isdigit())
    assert newest == step
