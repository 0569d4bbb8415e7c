"""Mutated specs, presets, recipes and command lines are read or rejected, at once and with one sentence.

The short form runs in `make test`. STEEPEN_CHAOS is the number of inputs of each kind, STEEPEN_CHAOS_SEED
the seed, STEEPEN_CHAOS_REPORT a file to which each test adds a line.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mutations import mutate
from steepen.data import Dataset
from steepen.errors import SteepenError
from steepen.recipe.paper_tables import PAPER
from steepen.recipe.recipe_choice import RecipeFile, read_recipe
from steepen.requests.app import all_commands, main
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.preset import load_preset
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import with_checksum, write_json

COUNT = int(os.environ.get("STEEPEN_CHAOS", "0"))  # 0: the short form
SEED = int(os.environ.get("STEEPEN_CHAOS_SEED", "0"))
REPORT = os.environ.get("STEEPEN_CHAOS_REPORT")
SECONDS = 10.0  # no command may take longer to reject its input
MakeSpec = Callable[..., RunSpec]


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
    for _ in range(4 * COUNT or 60):
        value, read = choose.choice(readers)
        changed = mutate(value, choose)
        began = time.process_time()
        try:
            read(changed)
        except SteepenError as error:
            assert len(str(error)) < 2000
        assert time.process_time() - began < SECONDS, changed
    note("specs, presets and recipes", 4 * COUNT)


WORDS = [
    "", "-1", "0", "1", "2.5", "1e308", "-1e308", "inf", "nan", "x", "1-999999999", "3-1", "1,,2", "[", "{",
    "evil:arm", "\x1b[2J", "[/red]", "a=b", "1e10", "9" * 5000, "٣", "²", "vanilla", "../..", "/dev/null",
    ".", "depth > 3", "'x' * 99999999", "90s", "auto",
]  # fmt: skip
COMMANDS = [
    ["arms"],
    ["plan", "--arm", "untied-grow", "--depth", "8"],
    ["power", "--delta-gamma", "0.005", "--draws", "20", "--no-search"],
    ["fit", "paper:fineweb", "--law", "chinchilla", "--draws", "5"],
    ["fit", "t.csv", "--law", "isoflop"],
    ["study", "ladder", "--preset", "tiny", "--arms", "vanilla,operator-1", "--dry-run"],
    ["runs", "--runs", "."],
    ["status", "--studies", "."],
    ["report", "nowhere"],
    ["forecast", "t.csv"],
    ["eval", "nowhere"],
    ["generate", "nowhere", "--prompt", "x"],
    ["train", "--data", "nowhere", "--arm", "vanilla", "--depth", "2"],
    ["data", "show", "nowhere"],
    ["data", "prepare", "nowhere.txt", "--out", "d"],
    ["export", "nowhere", "--out", "e"],
    ["unpack", "t.csv"],
]
TABLE = "arm,flops,loss,budget,x,accuracy\n" + "".join(
    f"{arm},{10**n},{3.5 - 0.1 * n / 18},{10**n},{n},{0.1 + n / 100}\n"
    for arm in ("vanilla", "b")
    for n in range(17, 22)
)


def options_of(words: list[str]) -> list[str]:
    """The options of a command that take a value; never those that leave a dry run or change files."""
    commands = dict(all_commands())
    names = (" ".join(words[:2]), words[0], f"{words[0]} checkpoint")
    command = next(commands[name] for name in names if name in commands)
    options = [option for option in command.params if not getattr(option, "is_flag", True)]
    return [option.opts[0] for option in options if option.opts[0] not in ("--gpus", "--hf")] or ["--none"]


def test_mutated_command_lines_give_no_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    choose = random.Random(SEED)
    options = [options_of(words) for words in COMMANDS]
    wrong: list[tuple[list[str], str]] = []
    for _ in range(COUNT or 15):
        (tmp_path / "t.csv").write_text(TABLE)  # an option may have named it as a file to write
        number = choose.randrange(len(COMMANDS))
        words = list(COMMANDS[number])
        for _ in range(choose.choice((1, 1, 2))):
            words.append(f"{choose.choice(options[number])}={choose.choice(WORDS)}")
        began = time.process_time()
        code = main(words)
        said = capsys.readouterr()
        if code not in (0, 1, 2) or "\x1b[2J" in said.out + said.err:
            wrong.append((words, said.err[-300:]))
        if time.process_time() - began > SECONDS:
            wrong.append((words, f"took {time.process_time() - began:.0f} s"))
    assert not wrong, "\n".join(map(str, wrong))
    note("command lines", COUNT)


def note(what: str, count: int) -> None:
    if REPORT:
        with Path(REPORT).open("a", encoding="utf-8") as file:
            file.write(f"{count} mutated {what}: read or rejected, seed {SEED}\n")


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
