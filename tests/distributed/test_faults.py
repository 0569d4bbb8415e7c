"""A fault of one rank stops all ranks with one sentence that names rank and step; restarts lose nothing."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fork_server import ForkedCommand, ForkedProcess, children, fork_ranks
from ranks import free_port
from steepen.data import Dataset
from steepen.requests.app import main
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


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """Variables that torchrun sets."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def srun(rank: int, size: int, port: int) -> dict[str, str]:
    """Variables that srun sets on one node; the port is in the user's environment."""
    place = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_LOCALID": str(rank)}
    return {**place, "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}


def run_ranks(
    size: int,
    words: list[str],
    output: Path,
    *,
    at_step: int = -1,
    fault: Fault | None = None,
    rank: int = 1,
    more_words: tuple[str, ...] = (),
    variables: Callable[[int, int, int], dict[str, str]] = torchrun,
    timeout: float = 60,
) -> list[int]:
    """Run `steepen` as forked ranks, as torchrun or srun would; one rank has a `fault` in one step, or
    `more_words` on its command line.

    With the fault `hang`, a rank counts as hung after 3 s from that step on, not before: starting may take
    longer on a busy machine.
    Returns the exit codes; standard error of all ranks goes to `output`.
    """
    port = free_port()

    def child(mine: int) -> None:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 2)
        sys.stderr = os.fdopen(target, "w", buffering=1)
        os.environ.update(variables(mine, size, port))
        torch.set_num_threads(1)
        original = train_step.TrainStep.__call__

        def step(self: Any, *arguments: Any) -> Any:
            result = original(self, *arguments)
            if fault is hang and arguments[-1] == at_step:
                self.optimizer.world.monitor.timeout = 3.0
            if fault is not None and mine == rank and arguments[-1] == at_step:
                returned: Any = fault()
                return result if returned is None else (returned, result[1])
            return result

        patched: Any = step
        train_step.TrainStep.__call__ = patched
        os._exit(main([*words, *(more_words if mine == rank else ())]))

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
    ("fault", "rank", "expected", "codes"),
    [
        (die, 1, "rank 1 has stopped responding at step [45]", [75, -9]),
        (die, 0, "rank 0 has stopped responding at step [45]", [-9, 75, 75, 75]),  # with the key-value store
        (hang, 1, "rank 1 has made no progress for 3 s at step 4", [75, 75]),
        (out_of_memory, 0, "rank 0 failed at step 4: out of memory", [1, 1]),
        (not_finite, 1, "the loss is nan, the gradient norm", [1, 1]),
    ],
    ids=["killed", "rank 0 killed", "hung", "out of memory", "not finite"],
)
def test_fault_of_one_rank_stops_all_with_one_sentence(
    fault: Any,
    rank: int,
    expected: str,
    codes: list[int],
    make_spec: MakeSpec,
    tiny_data: Dataset,
    tmp_path: Path,
) -> None:
    words = words_for(make_spec("vanilla", steps=8), tiny_data, tmp_path)
    starter = srun if fault is not_finite else torchrun
    found = run_ranks(
        len(codes), words, tmp_path / "err", at_step=4, fault=fault, rank=rank, variables=starter
    )
    (sentence,) = sentences(tmp_path / "err")
    assert re.search(expected, sentence)
    if fault is not_finite:
        assert "(on rank 1) at step 5" in sentence
    assert found == codes
    failed = list((tmp_path / "runs").glob("*/failure.json"))
    transient = 75 in codes  # an interruption: the run is not marked as failed
    assert len(failed) == (0 if transient else 1)
    if not transient:
        kind = json.loads(failed[0].read_text())["kind"]
        assert kind == ("Diverged" if fault is not_finite else "OutOfMemory")


def test_a_rank_with_another_spec_stops_all_at_the_start(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    words = words_for(make_spec("vanilla", steps=8), tiny_data, tmp_path)
    codes = run_ranks(2, words, tmp_path / "err", more_words=("--set", "learning_rate=0.01"))
    assert codes == [2, 2]
    (sentence,) = sentences(tmp_path / "err")
    assert re.search(r"^steepen: rank 1 has another spec \(\w{16}\) than rank 0 \(\w{16}\)", sentence)
    assert not (tmp_path / "runs").exists()  # nothing was begun


def test_ranks_with_other_data_code_or_spec_are_rejected() -> None:
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


def saved_steps(runs: Path) -> list[int]:
    return [int(path.name) for path in runs.glob("*/checkpoints/*") if path.name.isdigit()]


def wait_for_step(runs: Path, step: int, process: ForkedProcess, log: Path) -> None:
    """Wait until a run has saved a checkpoint at or after a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if max(saved_steps(runs), default=0) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"no checkpoint of step {step}: {log.read_text()}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_gpus_option_restarts_after_a_killed_rank_and_saves_once_on_sigterm(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, log = tmp_path / "runs", tmp_path / "log"
    # The agent and its ranks are forked; apart from that they are those of a user.
    fork_ranks(monkeypatch, log)
    spec = make_spec("vanilla", steps=100)
    spec = replace(spec, steps=400, data=replace(spec.data, epochs=100))
    command = [sys.executable, "-m", "steepen", *words_for(spec, tiny_data, tmp_path)]
    process = ForkedCommand([*command, "--gpus", "2", "--max-restarts", "1"], dict(os.environ), log)
    try:
        wait_for_step(runs, 4, process, log)
        os.kill(children(process.pid)[1], signal.SIGKILL)  # rank 1
        time.sleep(1)
        wait_for_step(runs, max(saved_steps(runs)) + 4, process, log)  # it goes on
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
    said = log.read_text()
    assert code == 143, said
    assert said.count("stopped by SIGTERM after step") == 1
    assert said.count("rank 1 has stopped responding at step") == 1
    assert "resuming from step" in said
    step = int(said.split("stopped by SIGTERM after step ")[1].split(",")[0])
    assert max(saved_steps(runs)) == step
