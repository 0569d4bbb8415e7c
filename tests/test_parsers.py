"""Every parser of what a user or a file may hold: any text gives a value in range, or one sentence.

Where a value can be written as text, it also survives being written and parsed. PARSERS lists them all.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from run_fixtures import make_spec
from steepen.data.dataset import MANIFEST, Manifest
from steepen.data.sources.tokenizers import parse_tokenizer
from steepen.data.tokenize_source import JOURNAL, read_journal
from steepen.data.tokenizer import MAX_BPE, Tokenizer
from steepen.distributed.environment import first_host, process_environment
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.evaluate_many import choose_part
from steepen.launch.base import _parse_option as parse_launcher_option
from steepen.launch.cost_estimate import MAX_FLOPS, MAX_GPUS, Budget
from steepen.laws.registered_forecasts import read_registered
from steepen.model.arms import find_arm
from steepen.model.stages import MAX_PASSES
from steepen.recipe.accelerators import find_accelerator
from steepen.recipe.paper_tables import PAPER
from steepen.recipe.recipe_choice import RecipeFile, choose_recipes, read_recipe
from steepen.requests.data import Prepare
from steepen.requests.request import decode
from steepen.requests.runs import ListRuns
from steepen.requests.study import request_of
from steepen.requests.train import Train
from steepen.runs.fields import sort_by_field
from steepen.runs.record import RunRecord
from steepen.runs.row import STATUSES
from steepen.runs.spec import RunSpec, override
from steepen.runs.store import read_metrics
from steepen.studies.answer import Answer
from steepen.studies.driver.journal import Journal
from steepen.studies.preset import load_preset
from steepen.tables.read_table import read_table
from steepen.tables.table import table_from
from steepen.tables.table_selection import parse_flops
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.expression import parse_condition
from steepen.utils.imports import code_from
from steepen.utils.json_io import parse_json, with_checksum, without_checksum
from steepen.utils.values import MAX_LIST, MAX_SECONDS, parse_words
from steepen.utils.yaml_io import load_yaml

SPEC = make_spec()
FIELDS = ["arm", "depth", "loss", "tokens"]
ROW = {"arm": "vanilla", "depth": 4, "loss": 3.5, "tokens": None}
SIGNS = "0123456789.,:;-+_/*<>=!()[]{}'\"\n\t eEinfatkMBT²٣%ab"
HUGE = "1" * 5000
TABLE = table_from({"arm": ["a", "b"], "flops": [1e18, 2e18], "loss": [3.0, 2.9]})


def file_with(text: str | bytes, name: str, parse: Callable[[Path], object]) -> object:
    """What a parser of files makes of this content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        return parse(path)


def in_bundle(text: str, file: str) -> object:
    """A small CORE bundle with this text as one of its files."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "eval_data").mkdir()
        task = "{label: t, dataset_uri: t.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}"
        (root / "core.yaml").write_text(f"icl_tasks: [{task}]")
        (root / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nt,25\n")
        (root / "eval_data/t.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}\n')
        (root / file).write_bytes(text.encode("utf-8", "replace"))
        return Bundle.open(root)


def token_count(text: str) -> int | None:
    return Prepare("builtin", Path("out"), val_tokens=text).val_tokens  # pyright: ignore[reportArgumentType]


def whole(low: int, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and low <= value <= high


def between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: math.isfinite(value) and low <= value <= high


def anything(value: Any) -> bool:
    return True


def rungs(text: str) -> list[int]:
    """The depths that a study is asked for."""
    return list(cast("Any", decode({"request": "study ladder", "rungs": text})).rungs)


def columns(text: str) -> dict[str, str]:
    """The names that a fit gives to columns."""
    return dict(cast("Any", decode({"request": "fit", "table": "t.csv", "columns": text})).columns)


# Name: the parser, and what its values satisfy. Texts in files of JSON and YAML follow below.
PARSERS: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool]]] = {
    "lists of words": (parse_words, lambda found: all(word and "," not in word for word in found)),
    "lists of integers": (
        rungs,
        lambda found: len(found) <= MAX_LIST + 1 and all(0 <= n <= MAX_LIST for n in found),
    ),
    "token counts": (token_count, whole(0, 10**15)),
    "micro-batch": (
        lambda text: Train({}, micro_batch=text).micro_batch,  # pyright: ignore[reportArgumentType]
        lambda found: found == "auto" or 1 <= found <= 10**9,
    ),
    "budget": (
        Budget.parse,
        lambda found: 0 < (found.flops or 1) <= MAX_FLOPS and 0 < (found.seconds or 1) <= MAX_SECONDS,
    ),
    "GPUs per run": (
        lambda text: request_of("ladder")(gpus_per_run=text).gpus_per_run,  # pyright: ignore[reportArgumentType]
        lambda found: found == "auto" or 1 <= found <= MAX_GPUS,
    ),
    "launcher option": (
        parse_launcher_option,
        lambda found: found[0] and not isinstance(found[1], list | dict),
    ),
    "part of the runs": (
        lambda text: choose_part([Path("a"), Path("b")], text),
        lambda found: len(found) <= 2,
    ),
    "FLOPs of a hold-out": (lambda text: parse_flops(text, text), between(0, math.inf)),
    "columns of a table": (columns, lambda found: all(map(all, found.items()))),
    "--where of a table": (lambda text: TABLE.where([text]), lambda found: 1 <= len(found) <= 2),
    "--where of runs": (
        lambda text: parse_condition(text, FIELDS)(ROW),
        lambda found: isinstance(found, bool),
    ),
    "--sort of runs": (lambda text: sort_by_field([], text), lambda found: found == []),
    "--status": (lambda text: ListRuns(status=cast("Any", text)).status, lambda found: found in STATUSES),
    "formats of figures": (lambda text: decode({"request": "report", "study": "s", "formats": text}), bool),
    "tokenizer": (parse_tokenizer, lambda found: found is None or 258 <= found <= MAX_BPE),
    "arm": (find_arm, lambda found: all(p <= MAX_PASSES for s in found.passes.stages for p in s.passes)),
    "accelerator": (find_accelerator, lambda found: found.peak_flops > 0),
    "--recipe": (lambda text: choose_recipes([text[:80]]), anything),  # a longer one is no file name
    "--set": (lambda text: override(SPEC, [text]), lambda found: isinstance(found, RunSpec)),
    "--set of a number": (lambda text: override(SPEC, [f"learning_rate={text}"]), anything),
    "Slurm's node list": (first_host, bool),
    "variables of torchrun": (
        lambda text: process_environment({"RANK": text, "WORLD_SIZE": text, "MASTER_PORT": text}),
        anything,
    ),
    "JSON": (parse_json, anything),
    "YAML": (load_yaml, anything),
    "spec": (lambda text: RunSpec.from_dict(load_yaml(text)), anything),
    "record": (lambda text: RunRecord.from_dict(load_yaml(text)), anything),
    "answer": (lambda text: Answer.from_dict(load_yaml(text)), anything),
    "preset": (lambda text: file_with(text, "preset.yaml", lambda path: load_preset(str(path))), anything),
    "recipe file": (lambda text: file_with(text, "recipe.yaml", read_recipe), anything),
    "metrics": (
        lambda text: file_with(text, "metrics.jsonl", read_metrics),
        lambda found: isinstance(found, list),
    ),
    "manifest": (lambda text: file_with(text, MANIFEST, lambda path: Manifest.read(path.parent)), anything),
    "journal of a preparation": (
        lambda text: file_with(text, JOURNAL, lambda path: read_journal(path.parent)),
        anything,
    ),
    "journal of a study": (
        lambda text: file_with(text, "study.json", lambda path: Journal.read(path.parent)),
        anything,
    ),
    "tokenizer file": (lambda text: file_with(text, "tokenizer.json", Tokenizer.load), anything),
    "registered forecasts": (
        lambda text: file_with(text, "forecasts.jsonl", read_registered),
        lambda found: isinstance(found, list),
    ),
    "table": (lambda text: file_with(text, "table.csv", read_table), lambda found: len(found) > 0),
    "table in JSON": (lambda text: file_with(text, "table.json", read_table), lambda found: len(found) > 0),
    "tasks of a bundle": (lambda text: in_bundle(text, "core.yaml"), anything),
    "baselines of a bundle": (lambda text: in_bundle(text, "eval_meta_data.csv"), anything),
    "examples of a bundle": (lambda text: in_bundle(text, "eval_data/t.jsonl"), anything),
}
REFUSALS = (SteepenError, typer.BadParameter)
VALUE_ERRORS = {"JSON": ValueError, "YAML": yaml.YAMLError, "spec": yaml.YAMLError}
VALUE_ERRORS |= {"record": yaml.YAMLError, "answer": yaml.YAMLError}  # as the readers of files catch them

json_text = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
).map(json.dumps)
texts = st.text(SIGNS, max_size=24) | st.text(max_size=12) | json_text


@pytest.mark.parametrize("name", PARSERS)
@given(text=texts)
@example(text="")
@example(text=HUGE)
@example(text="-" + HUGE)
@example(text="1e400")
@example(text="nan")
@example(text="²")
@example(text="[" * 1_500)
@example(text="\x00\x1b[2J")
@example(text="null")
@example(text='{"a": 1}')
@example(text="bpe:²")
@example(text="bpe:1__0")
@example(text=f"loop-{HUGE}")
@example(text=f"bpe:{HUGE}")
@example(text=f"0/{HUGE}")
@example(text="'x' * 99999999999 == arm")
@example(text="evil:arm")
@settings(max_examples=10, derandomize=True)
def test_any_text_gives_a_value_of_the_stated_range_or_one_sentence(name: str, text: str) -> None:
    parse, holds = PARSERS[name]
    try:
        with code_from([]):  # a name in a text imports nothing
            found = parse(text)
    except (*REFUSALS, VALUE_ERRORS.get(name, SteepenError)) as error:
        assert name in VALUE_ERRORS or 0 < len(str(error)) < 2000
    else:
        assert holds(found), found


@given(numbers=st.lists(st.integers(0, MAX_LIST), min_size=1, max_size=20))
@settings(max_examples=30)
def test_integers_survive_being_written_as_a_list(numbers: list[int]) -> None:
    assert rungs(",".join(map(str, numbers))) == sorted(set(numbers))


@given(first=st.integers(0, 500), length=st.integers(0, 500), step=st.integers(1, 9))
@settings(max_examples=30)
def test_ranges_are_those_of_python(first: int, length: int, step: int) -> None:
    text = f"{first}-{first + length}:{step}"
    assert rungs(text) == list(range(first, first + length + 1, step))


@given(count=st.integers(0, 10**15), unit=st.sampled_from(["", "K", "m", "B", "t"]))
@settings(max_examples=50)
def test_token_counts_survive_units(count: int, unit: str) -> None:
    factor = {"": 1, "K": 10**3, "m": 10**6, "B": 10**9, "t": 10**12}[unit]
    count = min(count, 10**15 // factor)
    assert token_count(f"{count}{unit}") == count * factor


@given(flops=st.floats(1, 1e40))
@settings(max_examples=30)
def test_budgets_and_hold_outs_survive_being_written(flops: float) -> None:
    assert Budget.parse(repr(flops)).flops == flops == parse_flops(repr(flops), "")


@given(size=st.integers(258, MAX_BPE), name=st.text(min_size=1, max_size=9), number=st.integers(-99, 99))
@settings(max_examples=30)
def test_names_survive_being_written(size: int, name: str, number: int) -> None:
    assert parse_tokenizer(f"bpe:{size}") == size
    assert parse_launcher_option(f"threads={number}") == ("threads", number)
    if "," not in name and "=" not in name and name.strip():
        assert columns(f"loss={name}") == {"loss": name.strip()}


def test_specs_recipes_and_presets_survive_being_written(tmp_path: Path) -> None:
    assert RunSpec.from_dict(parse_json(json.dumps(SPEC.to_dict()))) == SPEC
    for arm, recipe in PAPER.items():
        file = RecipeFile(arm, recipe)
        assert from_builtins(RecipeFile, load_yaml(yaml.safe_dump(to_builtins(file)))) == file
    value = with_checksum({"a": [1, 2.5, None]})
    assert without_checksum(parse_json(json.dumps(value))) == {"a": [1, 2.5, None]}


@given(depth=st.integers(-5, 20), bound=st.integers(-5, 20))
@settings(max_examples=30)
def test_conditions_compare_as_python_does(depth: int, bound: int) -> None:
    row = {**ROW, "depth": depth}
    for sign, expected in (("<", depth < bound), ("==", depth == bound), (">=", depth >= bound)):
        assert parse_condition(f"depth {sign} {bound}", FIELDS)(row) is expected
    with pytest.raises(UsageError, match="for numbers"):
        parse_condition("arm * 99999999999 == arm", FIELDS)(row)
