"""Attacks with a seed: SIGKILL at random moments, damaged files, mutated specs, presets, recipes and options.

The short form runs in `make test`. STEEPEN_CHAOS is the number of attacks of each kind, STEEPEN_CHAOS_SEED
the seed: `STEEPEN_CHAOS=1000 STEEPEN_CHAOS_SEED=7 python -m pytest tests/chaos`.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
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
from safetensors.torch import load_file

from steepen.cli.app import main
from steepen.data import Dataset
from steepen.errors import SteepenError
from steepen.recipe.paper_tables import PAPER
from steepen.recipe.recipe_file import RecipeFile, read_recipe
from steepen.runs.metrics import read_metrics
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.preset import load_preset
from steepen.training.checkpoint import STATE_FILE, list_checkpoints
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import train
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import with_checksum, write_json

COUNT = int(os.environ.get("STEEPEN_CHAOS", "0"))  # 0: the short form
SEED = int(os.environ.get("STEEPEN_CHAOS_SEED", "0"))
SECONDS = 10.0  # no command may take longer to reject its input
MakeSpec = Callable[..., RunSpec]
TIMING = {"tokens_per_second", "data_wait", "checkpoint_wait"}


def metrics_of(store: RunStore, spec: RunSpec) -> list[dict[str, Any]]:
    lines = read_metrics(store.run(spec).metrics_file)
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


@pytest.mark.parametrize("clip", [None, 0.01], ids=["", "clipped"])
def test_training_survives_a_storm_of_kills(
    clip: float | None, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    """Weights, losses, metrics and scores of a growing run equal the undisturbed run's; no file is left."""
    plain = make_spec("untied-grow", steps=60)
    spec = replace(plain, optimizer=replace(plain.optimizer, clip=clip))
    whole, broken = RunStore(tmp_path / "whole"), RunStore(tmp_path / "broken")
    expected = train(
        spec, tiny_data, whole, TrainOptions(device="cpu", quiet=True, checkpoint_every=3, validate_every=4)
    )
    write_json(tmp_path / "spec.json", spec.to_dict())
    command = [sys.executable, "-m", "steepen", "train", "--spec", str(tmp_path / "spec.json")]
    command += ["--data", str(tiny_data.directory), "--runs", str(broken.root), "--device", "cpu"]
    command += ["--checkpoint-every", "3", "--validate-every", "4"]
    choose = random.Random(SEED)
    for _ in range(COUNT or 1):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        start = len(metrics_of(broken, spec))
        while process.poll() is None and time.monotonic() < until:  # into the training, not the imports
            if len(metrics_of(broken, spec)) not in (start, 0):
                break
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if broken.record(spec) is not None:
            assert broken.record(spec) is not None
            shutil.rmtree(broken.root)  # finished: begin again
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = broken.record(spec)
    assert record is not None and record.validation_scores == expected.validation_scores
    assert metrics_of(whole, spec) == metrics_of(broken, spec)
    one, two = (
        load_file(list_checkpoints(s.run(spec).checkpoints)[-1].path / STATE_FILE) for s in (whole, broken)
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    left = [
        str(path) for path in broken.root.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"
    ]
    assert not left


def damaged(content: bytes, choose: random.Random) -> bytes:
    """The content truncated, with a flipped bit, or replaced."""
    position = choose.randrange(max(1, len(content)))
    flipped = (content or b"x")[position] ^ (1 << choose.randrange(8))
    return choose.choice(
        (
            content[:position],
            content[:position] + bytes([flipped]) + content[position + 1 :],
            content[:position] + b"\xff\x00" + content[position:],
            choose.choice((b"", b"null", b"[]", b'"x"', b"{}", b"[" * 50_000, b"\xff\xfe", b"NaN")),
        )
    )


def test_any_damaged_file_of_a_run_is_rejected_reported_or_harmless(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss that is printed after any damage is the right one, or the command fails with a sentence."""
    spec, choose = make_spec("untied-grow", steps=6), random.Random(SEED)
    options = TrainOptions(device="cpu", quiet=True, checkpoint_every=2, keep_last=3)
    store = RunStore(tmp_path / "clean")
    loss = train(spec, tiny_data, store, options).validation_loss
    for attack in range(COUNT or 8):
        place = RunStore(tmp_path / f"attack-{attack}")
        shutil.copytree(store.root, place.root)
        if attack % 2:
            place.run(spec).record_file.unlink()  # resumes from the newest checkpoint
        files = sorted(path for path in place.run(spec).path.rglob("*") if path.is_file())
        file = choose.choice([f for f in files if f.name not in ("lock", "spec.json", "tokenizer.json")])
        file.write_bytes(damaged(file.read_bytes(), choose))
        assert main(["runs", "--runs", str(place.root)]) == 0, file
        try:
            found = train(spec, tiny_data, place, options)
        except SteepenError as error:
            assert str(error), file
        else:
            assert found.validation_loss == loss, file
        capsys.readouterr()
        shutil.rmtree(place.root)


VALUES = [
    None, True, -1, 0, 1e30, 1e308, -1e308, 10**40, float("inf"), float("nan"), "", "x" * 1000, "evil:arm",
    [], [[]], {}, {"a": 1}, "\x1b[2J", "[/red]", "1e9", "../../x", 0.5,
]  # fmt: skip


def mutate(value: Any, choose: random.Random) -> Any:
    """A copy with one field replaced, removed or added somewhere."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((node, key))
            walk(child)

    walk(value)
    node, key = choose.choice(places)
    how = choose.random()
    if how < 0.7:
        node[key] = choose.choice(VALUES)
    elif how < 0.85:
        del node[key]
    elif isinstance(node, dict):
        node[choose.choice(["", "x", "__class__"])] = choose.choice(VALUES)
    return value


def test_mutated_specs_presets_and_recipes_are_read_or_rejected(make_spec: MakeSpec, tmp_path: Path) -> None:
    choose = random.Random(SEED)
    spec = make_spec("untied-grow").to_dict()
    preset = to_builtins(load_preset("tiny"))
    recipe = to_builtins(RecipeFile("untied-grow", PAPER["untied-grow"]))
    recipe_file, preset_file = tmp_path / "recipe.yaml", tmp_path / "preset.yaml"

    def read_preset(value: Any) -> object:
        preset_file.write_text(json.dumps(value))
        return load_preset(str(preset_file))

    def read_recipe_(value: Any) -> object:
        recipe_file.write_text(json.dumps(value))
        return read_recipe(recipe_file)

    readers: list[tuple[Any, Callable[[Any], object]]] = [
        (spec, lambda value: RunSpec.from_dict(value).hash), (preset, read_preset), (recipe, read_recipe_),
    ]  # fmt: skip
    for _ in range(COUNT or 60):
        value, read = choose.choice(readers)
        changed = mutate(value, choose)
        began = time.monotonic()
        try:
            read(changed)
        except SteepenError as error:
            assert len(str(error)) < 2000
        assert time.monotonic() - began < SECONDS, changed


WORDS = [
    "",
    "-1",
    "0",
    "1e308",
    "inf",
    "nan",
    "x",
    "1-999999999",
    "[",
    "{",
    "evil:arm",
    "\x1b[2J",
    "a=b",
    "1e10",
]
COMMANDS = [
    ["plan", "--arm", "untied-grow", "--depth", "8"],
    ["fit", "paper:fineweb", "--law", "chinchilla", "--draws", "5"],
    ["study", "ladder", "--preset", "tiny", "--arms", "vanilla,operator-1", "--dry-run"],
    ["runs", "--runs", "."],
    ["data", "show", "nowhere"],
]
OPTIONS = [
    "--depth", "--tokens", "--flops", "--rho", "--tpp", "--aspect", "--head-dim", "--context", "--recipe",
    "--draws", "--confidence", "--seed", "--rungs", "--seeds", "--jobs", "--launcher-option", "--budget",
    "--sort", "--status", "--arms", "--preset",
]  # fmt: skip


def test_mutated_command_lines_give_no_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    choose = random.Random(SEED)
    for _ in range(COUNT or 15):
        words = [*choose.choice(COMMANDS), choose.choice(OPTIONS), choose.choice(WORDS)]
        began = time.monotonic()
        code = main(words)
        said = capsys.readouterr()
        assert code in (0, 1, 2), (words, said.err)
        assert "\x1b[2J" not in said.out + said.err, words
        assert time.monotonic() - began < SECONDS, words


def test_altered_record_with_a_new_checksum_is_still_bound_to_its_run(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store = make_spec("vanilla", steps=2), RunStore(tmp_path)
    train(spec, tiny_data, store, TrainOptions(device="cpu", quiet=True))
    file = store.run(spec).record_file
    value = json.loads(file.read_text())
    value["spec"]["seed"] += 1
    write_json(file, with_checksum(value))
    with pytest.raises(SteepenError, match="spec's hash"):
        store.record(spec)
