"""SIGKILL at random moments of studies, training, data preparation and evaluation, with a seed.

Each storm repeats one command until it ends by itself, killing it at a random moment of every attempt, and
compares what it has left with an undisturbed run of the command; then it begins again. STEEPEN_CHAOS is the
number of kills of all storms together, STEEPEN_CHAOS_SEED the seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from core_bundle import write_bundle
from fork_server import ForkServer, descendants
from ranks import free_port
from steepen.data import Dataset
from steepen.runs.spec import RunSpec
from steepen.runs.store import read_metrics
from steepen.studies.preset import load_preset
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import write_json
from training_fixtures import WORDS

LONG = "STEEPEN_CHAOS" in os.environ
KILLS = int(os.environ.get("STEEPEN_CHAOS", "0")) or 7
SEED = int(os.environ.get("STEEPEN_CHAOS_SEED", "0"))
REPORT = os.environ.get("STEEPEN_CHAOS_REPORT")  # a file to which each storm adds a line
SHARES = {"train": 0.24, "clipped": 0.2, "ranks": 0.12, "prepare": 0.2, "study": 0.12, "evaluate": 0.12}
TIMES = {"seconds_training", "seconds_total", "tokens_per_second", "mfu", "finished", "resumed"}
SECONDS = {"tokens_per_second", "data_wait", "checkpoint_wait"}  # in metrics
# Of an undisturbed run's time: beyond it, so that some attempts end by themselves and are compared.
LATEST = 1.25
MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ForkServer]:
    found = ForkServer(tmp_path_factory.mktemp("server") / "log.txt")
    yield found
    found.close()


@dataclass
class Storm:
    """Kills one command until there were enough kills; `check` compares what it has left."""

    name: str
    server: ForkServer
    folder: Path
    commands: Callable[[Path], Sequence[list[str]]]  # of a folder that an attempt may write to
    check: Callable[[Path, Path], None]  # of the undisturbed folder and a disturbed one
    begin: Callable[[Path], None] = lambda folder: folder.mkdir()
    # Files that must never be written twice, as patterns.
    once: tuple[str, ...] = ()
    kills: int = 0
    rounds: int = 0
    written: dict[Path, tuple[int, int]] = field(default_factory=dict[Path, tuple[int, int]])

    def __post_init__(self) -> None:
        self.choose = random.Random(f"{SEED} {self.name}")
        self.wanted = max(1, round(KILLS * SHARES[self.name]))

    def run(self) -> None:
        """Undisturbed first, then killed until there were enough kills and the command has ended."""
        whole = self.folder / "whole"
        self.begin(whole)
        began = time.monotonic()
        self._start(whole)
        codes = self.server.wait()
        longest = time.monotonic() - began
        assert not any(codes), self.server.log.read_text()[-3000:]
        storm_began = time.monotonic()
        try:
            while self.kills < self.wanted:
                self._round(whole, longest)
        finally:
            if REPORT:
                seconds = time.monotonic() - storm_began
                with Path(REPORT).open("a", encoding="utf-8") as file:
                    line = f"{self.name}: {self.kills} SIGKILLs, {self.rounds} rounds equal, {seconds:.0f} s"
                    file.write(f"{line}, seed {SEED}\n")

    def _round(self, whole: Path, longest: float) -> None:
        """Kill until the command ends by itself, and compare."""
        disturbed = self.folder / f"round-{self.rounds}"
        self.begin(disturbed)
        self.written.clear()
        while not self._attempt(disturbed, longest):
            pass
        self.check(whole, disturbed)
        assert files(whole) == files(disturbed)
        self._start(disturbed)  # finished: nothing is done again
        assert not any(self.server.wait())
        self._notice(disturbed)
        shutil.rmtree(disturbed)
        self.rounds += 1

    def _start(self, folder: Path) -> list[int]:
        commands = self.commands(folder)
        if len(commands) == 1:
            return self.server.start(*commands)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(len(commands)),
        }
        places = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(commands))]
        return self.server.start(*commands, environments=places)

    def _attempt(self, folder: Path, longest: float) -> bool:
        """Run the command, kill it at a random moment; returns whether it ended before."""
        enough = self.kills >= self.wanted
        processes = self._start(folder)
        killed: list[int] = []
        if not enough:
            moment = self.choose.uniform(0, LATEST * longest)
            if self.name == "study" and self.choose.random() < 0.5:  # a worker first, which is started anew
                part = self.choose.uniform(0, moment)
                time.sleep(part)
                moment -= part
                self._kill(
                    self.choose.sample(workers := descendants(processes[0]), min(1, len(workers))), killed
                )
            time.sleep(moment)
            self._kill(self._victims(processes), killed)
            if len(processes) > 1 and len(killed) == 1:  # what torchrun's agent does
                time.sleep(self.choose.uniform(0, 0.3))
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGTERM)
        codes = self.server.wait()
        self.kills += len(killed)
        self._notice(folder)
        ended = not any(codes)
        good = {0, -signal.SIGKILL} if len(processes) == 1 else None
        assert good is None or set(codes) <= good, self.server.log.read_text()[-3000:]
        assert ended or killed, self.server.log.read_text()[-3000:]
        return ended

    def _victims(self, processes: list[int]) -> list[int]:
        if len(processes) > 1:
            return processes if self.choose.random() < 0.5 else [self.choose.choice(processes)]
        if self.name == "study" and self.choose.random() < 0.3:  # at once, as a machine that fails
            return [*processes, *descendants(processes[0])]
        return processes

    def _kill(self, victims: Sequence[int], killed: list[int]) -> None:
        for process in victims:
            with contextlib.suppress(ProcessLookupError):
                # A process that has just ended is gone or a zombie, which counts for nothing.
                alive = Path(f"/proc/{process}/stat").exists() and "Z" not in state_of(process)
                os.kill(process, signal.SIGKILL)
                if alive:
                    killed.append(process)

    def _notice(self, folder: Path) -> None:
        """Files that are written once must stay what they were when they first appeared."""
        for pattern in self.once:
            for path in folder.glob(pattern):
                facts = path.stat()
                version = (facts.st_ino, facts.st_mtime_ns)
                assert self.written.setdefault(path, version) == version, f"{path} was written again"


def state_of(process: int) -> str:
    """The state letter of a process, Z where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def files(folder: Path) -> list[str]:
    """Everything in a folder: no temporary file may be left."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def without_times(record: Path, *also: str) -> dict[str, Any]:
    value = json.loads(record.read_text())
    return {name: item for name, item in value.items() if name not in TIMES | {"checksum", "git", *also}}


def same_run(one: Path, two: Path, *but: str) -> None:
    """Weights, optimizer state, losses, metrics and record (`but` its fields) are equal to the bit."""
    assert without_times(one / "record.json", *but) == without_times(two / "record.json", *but)
    metrics = [
        [{k: v for k, v in line.items() if k not in SECONDS} for line in lines]
        for lines in (read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl"))
    ]
    assert metrics[0] == metrics[1]
    tensors = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert tensors
    for path in tensors:
        assert (one / path).read_bytes() == (two / path).read_bytes(), path


def same_runs(one: Path, two: Path) -> None:
    names = sorted(path.parent.name for path in one.glob("*/record.json"))
    assert names and names == sorted(path.parent.name for path in two.glob("*/record.json"))
    for name in names:
        same_run(one / name, two / name)


@pytest.mark.parametrize("name", ["clipped", *(["train", "ranks"] if LONG else [])])
def test_training_survives_kills(
    name: str, server: ForkServer, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    """With growth, with and without clipping, and on two ranks."""
    plain = make_spec("untied-grow", depth=2, steps=12)
    clip = 0.01 if name == "clipped" else None
    write_json(
        tmp_path / "spec.json", replace(plain, optimizer=replace(plain.optimizer, clip=clip)).to_dict()
    )

    def commands(folder: Path) -> list[list[str]]:
        words = ["train", "--spec", str(tmp_path / "spec.json"), "--data", str(tiny_data.directory)]
        words += ["--runs", str(folder), "--device", "cpu"]
        words += ["--checkpoint-every", "2", "--validate-every", "5"]
        return [words] * (2 if name == "ranks" else 1)

    Storm(name, server, tmp_path, commands, same_runs, once=("*/record.json",)).run()


def test_preparation_survives_kills(server: ForkServer, tmp_path: Path) -> None:
    choose = random.Random(1)
    documents = [" ".join(choose.choices(WORDS, k=60)) for _ in range(3_000)]
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(documents))

    def commands(folder: Path) -> list[list[str]]:
        words = ["data", "prepare", str(tmp_path / "text.txt"), "--out", str(folder / "data")]
        return [[*words, "--tokenizer", "bpe:300", "--val-tokens", "2000", "--shard-tokens", "16384"]]

    def check(one: Path, two: Path) -> None:
        for name in files(one):
            if (one / name).is_file():
                assert (one / name).read_bytes() == (two / name).read_bytes(), name

    Storm("prepare", server, tmp_path, commands, check, once=("data/*",)).run()


@pytest.mark.skipif(not LONG, reason="20 s; tests/studies/test_kill_and_resume.py kills a study too")
def test_study_survives_kills(server: ForkServer, tiny_data: Dataset, tmp_path: Path) -> None:
    preset = to_builtins(load_preset("tiny"))
    preset |= {"context": 16, "batch_tokens": 64, "validation_tokens": 512, "rungs": [1, 2, 3, 4]}
    rates = {"arm": "all", "learning_rate": 0.1, "warmup_steps": 2, "tpp": 0.03}
    preset |= {"arm_rungs": [], "recipes": [rates, {"arm": "untied-grow", "rho": 0.4}]}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({k: v for k, v in preset.items() if v is not None}))

    def commands(folder: Path) -> list[list[str]]:
        words = ["study", "ladder", "--preset", str(tmp_path / "small.yaml"), "--arms", "vanilla,untied-grow"]
        words += ["--data", str(tiny_data.directory), "--device", "cpu", "--jobs", "2", "--name", "ladder"]
        return [[*words, "--runs", str(folder / "runs"), "--studies", str(folder / "studies")]]

    def answer(folder: Path) -> str:
        found = json.loads((folder / "studies/ladder/study.json").read_text())["answer"]
        values = {name: value for name, value in found["values"].items() if name != "seconds"}
        tables = [t for t in found["tables"] if "time" not in t["title"] and t["title"] != "Runs"]
        panels = [panel for panel in found["panels"] if "time" not in panel["title"].lower()]
        kept = {name: found[name] for name in ("findings", "method", "runs", "question")}
        return json.dumps([kept, values, tables, panels])

    def check(one: Path, two: Path) -> None:
        same_runs(one / "runs", two / "runs")
        assert answer(one) == answer(two)

    Storm("study", server, tmp_path, commands, check, once=("runs/*/record.json",)).run()


def test_evaluation_survives_kills(
    server: ForkServer, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    spec = make_spec("untied-grow", depth=2, steps=6)
    write_json(tmp_path / "spec.json", spec.to_dict())
    words = ["train", "--spec", str(tmp_path / "spec.json"), "--data", str(tiny_data.directory)]
    server.start([*words, "--runs", str(tmp_path / "trained"), "--device", "cpu"])
    assert server.wait() == [0]

    def begin(folder: Path) -> None:
        shutil.copytree(tmp_path / "trained", folder)

    def commands(folder: Path) -> list[list[str]]:
        words = ["eval", str(folder / spec.hash), "--data", str(tiny_data.directory), "--device", "cpu"]
        return [[*words, "--core", str(bundle), "--kl-depth", "--passes", "1-4"]]

    def scores(folder: Path) -> tuple[Any, dict[str, bytes]]:
        found: Any = without_times(folder / spec.hash / "record.json")
        found["evaluation"]["core"].pop("outcomes")  # a path
        saved = {p.name: p.read_bytes() for p in folder.rglob("evaluation/*/core/*/*.jsonl")}
        return found, saved

    def check(one: Path, two: Path) -> None:
        assert scores(one) == scores(two) and scores(one)[1]

    once = (f"{spec.hash}/evaluation/*/core/*/*.jsonl",)
    Storm("evaluate", server, tmp_path, commands, check, begin, once).run()
