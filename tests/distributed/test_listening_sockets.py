"""What listens: every command on one machine has sockets on the loopback interface only."""

from __future__ import annotations

import base64
import datetime
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fork_server import ForkedCommand, fork_ranks, fork_workers
from listeners import Listener, descendants, listeners
from ranks import free_port
from steepen.data import Dataset
from steepen.launch.worker import NODES_VARIABLE
from steepen.runs.spec import RunSpec
from steepen.utils.json_io import read_json, write_json

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MakeSpec = Callable[..., RunSpec]
SECONDS = 180.0


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork commands, ranks and workers, which import torch again otherwise; what they open is a user's."""
    fork_ranks(monkeypatch, tmp_path / "log.txt")
    fork_workers(monkeypatch)


def start(words: list[str], folder: Path, **variables: str) -> ForkedCommand:
    """`steepen` in a forked process, with its output in `folder`/log.txt."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    command = [sys.executable, "-m", "steepen", *words]
    return ForkedCommand(command, environment | variables, folder / "log.txt", folder)


def started(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """`steepen` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    with (folder / "log.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "steepen", *words],
            stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment,
        )  # fmt: skip


def watch(
    words: list[str],
    folder: Path,
    *,
    stop: Callable[[set[Listener]], object] | None = None,
    fork: bool = True,
) -> tuple[int, set[Listener], str]:
    """Run `steepen` to its end, or until `stop` is true; returns exit code, sockets and output.

    What it listens on is looked up again and again: commands must last for some tenths of a second.
    """
    process = start(words, folder) if fork else started(words, folder)
    found: set[Listener] = set()
    deadline = time.monotonic() + SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            found |= listeners(process.pid)
            if stop is not None and stop(found):
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.05)
        code = process.wait(60)
    finally:
        process.kill()
    return code, found, (folder / "log.txt").read_text()


def train_words(spec: RunSpec, data: Dataset, folder: Path) -> list[str]:
    write_json(folder / "spec.json", spec.to_dict())
    words = ["train", "--spec", folder / "spec.json", "--data", data.directory, "--runs", folder / "runs"]
    return [str(word) for word in (*words, "--device", "cpu", "--micro-batch", "2")]


def test_sockets_of_a_process_are_found() -> None:
    with socket.create_server(("0.0.0.0", 0)) as one, socket.socket(type=socket.SOCK_DGRAM) as two:
        two.bind(("127.0.0.1", 0))
        found = {(each.port, each.is_local) for each in listeners(os.getpid())}
        assert {(one.getsockname()[1], False), (two.getsockname()[1], True)} <= found


@pytest.mark.usefixtures("forking")
def test_ranks_of_one_machine_listen_on_loopback_only(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    words = train_words(make_spec("vanilla", steps=100), tiny_data, tmp_path)
    code, found, said = watch([*words, "--gpus", "2"], tmp_path)
    assert code == 0, said
    assert len(found) >= 3, found  # the store, and the ranks among each other
    assert not [one for one in found if not one.is_local]


class _Attack:
    """Leaves a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.file, "w")


def test_pickles_in_the_store_of_a_run_are_never_loaded(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    owned = tmp_path / "owned"
    content = pickle.dumps(_Attack(owned))
    attacked: dict[int, list[str]] = {}

    def attack(found: set[Listener]) -> None:
        for port in {one.port for one in found} - set(attacked):
            try:
                wait = datetime.timedelta(seconds=2)
                store: Any = TCPStore(
                    "127.0.0.1", port, is_master=False, timeout=wait, wait_for_workers=False
                )
                attacked[port] = store.list_keys()
                for key in [*attacked[port], "torch.rendezvous.steepen", "torch.rendezvous.none"]:
                    store.set(key, base64.b64encode(content) if "rendezvous" in key else content)
            except RuntimeError:  # not a store
                attacked.setdefault(port, [])

    spec = make_spec("vanilla", steps=30)
    words = train_words(spec, tiny_data, tmp_path)
    # Started, not forked: the store of the agent then waits for seconds for ranks that import torch.
    words += ["--gpus", "2", "--rank-timeout", "20"]
    code, _, said = watch(words, tmp_path, stop=attack, fork=False)
    assert any(attacked.values()), said  # a store was found, and its keys overwritten
    assert not owned.exists() and code is not None


@pytest.mark.usefixtures("forking")
def test_two_nodes_train_as_one(make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path) -> None:
    """Two agents with one rank each meet at an address, and meet again after a fault."""
    spec = make_spec("vanilla", steps=30)
    alone = tmp_path / "alone"
    alone.mkdir()
    code, found, said = watch([*train_words(spec, tiny_data, alone), "--gpus", "1"], alone)
    assert code == 0 and not found, said
    words = [*train_words(spec, tiny_data, tmp_path), "--gpus", "1", "--checkpoint-every", "5"]
    address = f"127.0.0.1:{free_port()}"
    nodes = [
        start([*words, "--max-restarts", "1"], tmp_path, **{NODES_VARIABLE: f"{node}/2 {address}"})
        for node in range(2)
    ]
    run = tmp_path / "runs" / spec.hash
    try:
        deadline = time.monotonic() + SECONDS
        while not list(run.glob("checkpoints/0*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        (rank,) = [one for one in descendants(nodes[1].pid) if one != nodes[1].pid]
        os.kill(rank, 9)
        codes = [node.wait(SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    said = (tmp_path / "log.txt").read_text()
    assert codes == [0, 0], said
    two, one = (read_json(folder / "record.json") for folder in (run, alone / "runs" / spec.hash))
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
    assert "resuming from step" in said


def small_preset(folder: Path) -> str:
    """The preset tiny with two small ladders."""
    shipped = Path(__file__).parents[2] / "src/steepen/studies/presets/tiny.yaml"
    preset = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    preset |= {"arms": ["vanilla", "operator-1"], "rungs": [1, 2, 3, 4], "arm_rungs": []}
    preset |= {"context": 16, "batch_tokens": 64, "validation_tokens": 512}
    preset |= {"recipes": [{"arm": "all", "learning_rate": 0.1, "warmup_steps": 2, "tpp": 0.06}]}
    (folder / "small.yaml").write_text(json.dumps(preset))
    return str(folder / "small.yaml")


@pytest.mark.usefixtures("forking")
def test_study_listens_on_loopback_only(tiny_data: Dataset, tmp_path: Path) -> None:
    """Ray, which takes long to start: tests/launch/test_cluster_launchers.py."""
    words = ["study", "ladder", "--preset", small_preset(tmp_path), "--device", "cpu", "--jobs", "1"]
    words += ["--data", str(tiny_data.directory)]
    code, found, said = watch(
        [*words, "--gpus-per-run", "2"], tmp_path, stop=lambda _: [*tmp_path.glob("runs/*/record.json")]
    )
    assert list(tmp_path.glob("runs/*/record.json")), (code, said)
    assert found, said
    assert not [one for one in found if not one.is_local]


@pytest.mark.usefixtures("forking")
def test_server_listens_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    _, found, said = watch(["serve", "--port", "0"], tmp_path, stop=lambda found: found)
    assert len(found) == 1 and all(one.is_local for one in found), said
    assert re.search(r"http://(127\.0\.0\.1|localhost):", said) or not said
