"""Attacks with a seed: SIGKILL at random moments, damaged files, mutated specs, presets, recipes and options.

The short form runs in `make test`. STEEPEN_CHAOS is the number of attacks of each kind, STEEPEN_CHAOS_SEED
the seed: `STEEPEN_CHAOS=1000 STEEPEN_CHAOS_SEED=7 python -m pytest tests/chaos`.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steepen.cli.app import main
from steepen.data import Dataset
from steepen.errors import SteepenError
from steepen.recipe.paper_tables import PAPER
from steepen.recipe.recipe_file import RecipeFile, read_recipe
from steepen.runs.metrics import read_metrics
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.preset import load_preset
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
