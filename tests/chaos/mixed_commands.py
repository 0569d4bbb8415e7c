"""Mix commands on one store, kill and damage at random, and check after each that nothing was lost.

    python tests/chaos/mixed_commands.py --minutes 240 --seed 0

One or two commands run at a time (training, a study, evaluation, preparation, packs, exports, listings). A
third are sent SIGKILL, SIGTERM or SIGINT at a random moment, and in every other round files are damaged
whose loss steepen must survive. After each: exit codes are known ones, nothing printed is a traceback or an
internal error, no process is left, and what was finished (losses, the answer, the pack, data) is there and is
what an undisturbed store has. A round ends with everything run to its end and compared to the bit. `make
test` does not run it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import yaml

from chaos.test_fault_matrix import CONTENTS, DAMAGES, damage
from chaos.test_kill_storms import same_run, state_of
from core_bundle import write_bundle
from fork_server import ForkServer, descendants
from steepen.model.arms import find_arm
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.studies.preset import load_preset
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import read_json, write_json
from training_fixtures import SCALE, prepare_words

KILLED, DAMAGED = 1 / 3, 1 / 10  # of all commands
STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
GOOD = {0, 1, 2, 130, 128 + signal.SIGTERM}
ENDED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
PREPARE = ("--tokenizer", "bpe:300", "--val-tokens", "2000", "--shard-tokens", "16384")
# Files whose damage must cost no more than the work since the file before.
EXPENDABLE = (
    "runs/.index",
    "runs/*/lock",
    "runs/*/failure.json",
    "runs/*/metrics.jsonl",
    "runs/*/checkpoints/*/state.safetensors",
    "runs/*/checkpoints/*/checkpoint.json",
    "runs/*/evaluation/*/core/*/*.jsonl",
)
WRITTEN = tuple(CONTENTS)  # damages of what a file holds
NEVER_REPLACED = ("lock", "metrics.jsonl", "failure.json")  # a link or folder there is left to the user


def make_specs(data_identity: str) -> list[RunSpec]:
    """Three runs of some seconds: fixed, grown and clipped."""
    found: list[RunSpec] = []
    for name, clip in (("vanilla", None), ("untied-grow", None), ("loop-2", 0.01)):
        arm = find_arm(name)
        recipe = replace(recipe_of(arm), batch_tokens=256, base_depth=2)
        rung = recipe.at_budget(arm, 2, SCALE, tokens=256 * 30, rho=0.5 if arm.passes.grows else None)
        rung = replace(rung, hyperparameters=replace(rung.hyperparameters, warmup_steps=2))
        spec = RunSpec.from_plan(rung, DataConfig(data_identity), validation_tokens=512)
        found.append(replace(spec, optimizer=replace(spec.optimizer, clip=clip)))
    return found


@dataclass
class Store:
    """A folder on which all commands work, and the words of each."""

    root: Path
    shared: Path
    specs: list[RunSpec]

    def commands(self, run: str) -> dict[str, list[list[str]]]:
        """Every command by name, in the forms in which it may be chosen; `run` is the run they name."""
        root, runs, device = str(self.root), ["--runs", f"{self.root}/runs"], ["--device", "cpu"]
        data, studies = ["--data", f"{self.shared}/data"], ["--studies", f"{root}/studies"]
        save = ["--checkpoint-every", "3", "--validate-every", "10"]
        path = f"{root}/runs/{run}"
        return {
            "train": [
                ["train", "--spec", f"{self.shared}/{spec.hash}.json", *data, *runs, *device, *save]
                for spec in self.specs
            ],
            "study": [self.study()],
            "eval": [["eval", path, *data, *device, "--core", f"{self.shared}/bundle", "--tasks", "choose"]],
            "data": [["data", "prepare", f"{self.shared}/text.txt", "--out", f"{root}/data", *PREPARE]],
            "files": [
                ["pack", "ladder", "--out", f"{root}/ladder.tar.gz", *studies],
                ["unpack", f"{root}/ladder.tar.gz", "--out", f"{root}/unpacked"],
                ["export", path, f"{root}/export"],
                ["import", f"{root}/export", "--runs", f"{root}/imported"],
                ["report", "ladder", *studies, "--out", f"{root}/page", "--format", "svg"],
            ],
            "show": [
                ["runs", *runs],
                ["runs", "show", run, *runs],
                ["runs", "clean", "--failed", "--yes", *runs, *studies],
                ["status", *studies],
                ["status", "ladder", *studies],
                ["data", "verify", f"{root}/data"],
                ["generate", path, "--prompt", "the", "--max-tokens", "2", *device],
            ],
        }

    def study(self) -> list[str]:
        """A ladder of two arms on four rungs."""
        words = ["study", "ladder", "--preset", f"{self.shared}/small.yaml", "--arms", "vanilla,untied-grow"]
        words += ["--data", f"{self.shared}/data", "--device", "cpu", "--jobs", "2", "--name", "ladder"]
        return [*words, "--runs", f"{self.root}/runs", "--studies", f"{self.root}/studies"]

    def finish(self, server: ForkServer) -> None:
        """Run everything that makes something to its end."""
        commands = self.commands(self.specs[0].hash)
        for words in (*commands["train"], *commands["study"], *commands["data"]):
            server.start(words)
            assert server.wait() == [0], (words, server.log.read_text()[-3000:])

    def losses(self) -> dict[str, float]:
        """The validation loss of every finished run."""
        found = self.root.glob("runs/*/record.json")
        return {file.parent.name: read_json(file)["validation_loss"] for file in found}

    def answer(self) -> list[str] | None:
        """The findings of the study, if it has an answer."""
        file = self.root / "studies/ladder/study.json"
        found = read_json(file).get("answer") if file.exists() else None
        return None if found is None else found["findings"]


@dataclass
class Mix:
    """Random commands on a store, compared with an undisturbed one."""

    server: ForkServer
    whole: Store
    store: Store
    seed: int
    done: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # that each took last
    counts: collections.Counter[str] = field(default_factory=collections.Counter[str])

    def run(self, minutes: float) -> None:
        """Mix until the time is over, starting anew whenever everything is finished."""
        choose = random.Random(self.seed)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            self._one(choose)
            self.check()
            if choose.random() < 0.02:
                self.finish()
        self.finish()

    def _one(self, choose: random.Random) -> None:
        self.server.log.write_text("")
        commands: list[list[str]] = []
        for _ in range(choose.choice((1, 1, 2))):
            table = self.store.commands(choose.choice(sorted(self.whole.losses())))
            weights = {"train": 4, "study": 2, "eval": 2, "data": 2, "files": 3, "show": 4}
            (name,) = choose.choices([*weights], [*weights.values()])
            commands.append(choose.choice(table[name]))
            self.counts[f"{commands[-1][0]}"] += 1
        processes = self.server.start(*commands)
        killed = choose.random() < KILLED
        words, began = " ".join(word[0] for word in commands), time.monotonic()
        if killed:
            time.sleep(choose.uniform(0, 1) * self.seconds.get(words, 1.0))
            victim, number = choose.choice(processes), choose.choice(STOPS)
            victims = [victim, *descendants(victim)] if choose.random() < 0.2 else [victim]
            for process in victims:
                if state_of(process) != "Z":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                        self.counts[signal.Signals(number).name] += 1
        codes = self.server.wait()
        if not killed:
            self.seconds[words] = time.monotonic() - began
        # Python prints an interrupt that arrives in a callback of its own, and goes on.
        said = re.sub(
            r"Exception ignored in.*?\nKeyboardInterrupt.*?\n", "", self.server.log.read_text(), flags=re.S
        )
        assert set(codes) <= GOOD | (ENDED if killed else set()), (commands, codes, said[-3000:])
        assert "Traceback" not in said and "internal error" not in said, (commands, said[-3000:])
        found = (file for pattern in EXPENDABLE for file in self.store.root.glob(pattern))
        files = sorted(file for file in found if file.is_file() and not file.is_symlink())
        if files and self.counts["rounds"] % 2 and choose.random() < DAMAGED:
            file = choose.choice(files)
            damage(file, choose.choice(WRITTEN if file.name in NEVER_REPLACED else DAMAGES))
            self.counts["damaged files"] += 1
        if choose.random() < DAMAGED:  # so that they are made again
            for folder in ("export", "imported", "unpacked"):
                shutil.rmtree(self.store.root / folder, ignore_errors=True)

    def check(self) -> None:
        """What was finished once is there, and is what an undisturbed store has."""
        whole = self.whole.losses()
        found = self.store.losses()
        assert found.items() <= whole.items(), (found, whole)
        answer = self.store.answer()
        assert answer is None or answer == self.whole.answer(), answer
        now = {
            "runs": set(found),
            "answer": {"ladder"} if answer is not None else set[str](),
            "data": {"data"} if (self.store.root / "data/manifest.json").exists() else set[str](),
            "pack": {"pack"} if (self.store.root / "ladder.tar.gz").exists() else set[str](),
        }
        for kind, names in now.items():
            assert names >= self.done.get(kind, set()), (kind, self.done[kind] - names)
        self.done = now

    def finish(self) -> None:
        """Run everything to its end and compare it to the bit; then begin with an empty store."""
        self.store.finish(self.server)
        self.check()
        assert self.store.losses() == self.whole.losses() and self.store.answer() == self.whole.answer()
        for spec in self.store.specs:
            kept = [store.root / "runs" / spec.hash for store in (self.whole, self.store)]
            if not self.counts["rounds"] % 2:  # else files were damaged, of which some are not made again
                same_run(kept[0], kept[1], "evaluation")  # of which the undisturbed store has none
        left = [path for path in self.store.root.rglob("*") if path.name.endswith((".tmp", ".partial"))]
        left += list(self.store.root.rglob(".writing-*"))
        assert not left, left
        self.counts["rounds"] += 1
        shutil.rmtree(self.store.root)
        self.store.root.mkdir()
        self.done = {}


def main() -> None:
    """Parse the options, prepare both stores and mix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name)
        data = prepare_words(shared, documents=400, val_tokens=2_000, seed=0)
        write_bundle(shared / "bundle")
        preset = to_builtins(load_preset("tiny"))
        preset |= {"context": 16, "batch_tokens": 64, "validation_tokens": 512, "rungs": [1, 2, 3, 4]}
        rates = {"arm": "all", "learning_rate": 0.1, "warmup_steps": 2, "tpp": 0.03}
        preset |= {"arm_rungs": [], "recipes": [rates, {"arm": "untied-grow", "rho": 0.4}]}
        kept = {key: value for key, value in preset.items() if value is not None}
        (shared / "small.yaml").write_text(yaml.safe_dump(kept))
        specs = make_specs(data.identity)
        for spec in specs:
            write_json(shared / f"{spec.hash}.json", spec.to_dict())
        server = ForkServer(shared / "log.txt")
        stores = [Store(shared / place, shared, specs) for place in ("whole", "disturbed")]
        for store in stores:
            store.root.mkdir()
        stores[0].finish(server)
        mix = Mix(server, stores[0], stores[1], options.seed)
        began = time.monotonic()
        try:
            mix.run(options.minutes)
        finally:
            server.close()
            print(f"{(time.monotonic() - began) / 60:.1f} min, seed {options.seed}: {json.dumps(mix.counts)}")


if __name__ == "__main__":
    main()
