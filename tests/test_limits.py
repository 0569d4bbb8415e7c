"""Absurd numbers are rejected at once, with the limit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from run_fixtures import make_spec
from steepen.errors import UsageError
from steepen.model.arm import AllocationRule
from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock
from steepen.model.shape import BlockAllocation
from steepen.model.stages import Stage
from steepen.recipe.paper_tables import PAPER
from steepen.recipe.recipe_choice import RecipeFile, choose_recipes, write_recipe
from steepen.requests.app import all_commands, main
from steepen.requests.data import Prepare
from steepen.requests.registry import VERBS
from steepen.requests.request import Argument, Request, fields_of
from steepen.runs.spec import RunSpec
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import Preset, load_preset
from steepen.studies.registry import STUDIES
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.values import metavar

COMMANDS = [
    "study ladder --preset tiny --rungs 1-999999999 --dry-run",
    "study ladder --preset tiny --seeds 0-999999999 --dry-run",
    "power --rungs 4 --draws 10000000000",
    "fit paper:fineweb --law isoflop --confidence 7",
    "fit paper:fineweb --seed -1",
    "study ladder --preset tiny --dry-run --jobs 99999999999",
    "study ladder --preset tiny --dry-run --launcher-option threads=x",
    "study ladder --preset tiny --dry-run --launcher-option threads=[1]",
    "study ladder --preset tiny --dry-run --launcher-option threads={",
    "fit paper:fineweb --draws -99999999999",
]


def numeric_options() -> dict[str, Any]:
    """Every option of every command that takes a number, by command and name."""
    return {
        f"{path} {option.opts[0]}": option
        for path, command in all_commands()
        for option in command.params
        if option.type_descriptor.annotation in (int, float, list[int], list[float])
    }


def requests() -> dict[str, type[Request[Any]]]:
    """The requests by the words of their commands."""
    loaded = {name: verb.load() for name, verb in VERBS.items() if verb.target}
    return {name: kind for name, kind in loaded.items() if isinstance(kind, type)}


def numeric_fields() -> dict[str, list[str]]:
    """Every number of every request: its name, with a command line that gives all that is required."""
    found: dict[str, list[str]] = {}
    for name, kind in requests().items():
        required = [field for field in fields_of(kind) if field.required]
        words = ["x" if isinstance(one.option, Argument) else f"{one.flags[0]}=0.1" for one in required]
        for field in fields_of(kind):
            if metavar(field.hint) in ("<int>", "<float>"):
                found[f"{name} {field.flags[0]}"] = [*name.split(), *words]
    return found


def test_every_number_on_the_command_line_has_a_stated_range() -> None:
    options = numeric_options()
    assert len(options) + len(numeric_fields()) > 70
    for name, option in options.items():
        if option.metavar == "COUNT≤1e15":  # token counts with a suffix, as 100M
            continue
        assert option.min is not None and option.max is not None and option.min < option.max, name


def test_every_number_on_the_command_line_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    values = itertools.cycle(["nan", "inf", "-1e99", "1e99", "1" * 5000, "x"])
    commands = {name: name.split()[:-1] for name in numeric_options()} | numeric_fields()
    for (name, command), value in zip(commands.items(), values, strict=False):
        option = name.split()[-1]
        assert main([*command, f"{option}={value}"]) == 2, name
        said = capsys.readouterr().err
        assert option in said and "internal" not in said, (name, said)


@pytest.mark.parametrize("command", COMMANDS)
def test_absurd_option_is_rejected_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(command.split()) == 2
    assert time.monotonic() - began < 10
    assert "internal error" not in capsys.readouterr().err


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "depth": lambda spec: spec["shape"].update(depth=1e30),
    "width": lambda spec: spec["shape"].update(width=10**30),
    "vocabulary": lambda spec: spec["shape"].update(vocabulary=1e30),
    "passes": lambda spec: spec["schedule"]["stages"][0].update(passes=[10**9]),
    "epochs": lambda spec: spec["data"].update(epochs=1e308),
    "steps": lambda spec: spec.update(steps=10**30),
    "learning rate": lambda spec: spec["hyperparameters"].update(learning_rate=1e308),
    "orthogonalization": lambda spec: spec["optimizer"].update(orthogonalization_steps=10**9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_absurd_field_of_a_spec_is_rejected(change: str) -> None:
    value = make_spec().to_dict()
    CHANGES[change](value)
    with pytest.raises(UsageError, match="must be"):
        RunSpec.from_dict(value)


def test_absurd_products_of_sizes_are_rejected() -> None:
    """Each size alone is in its range."""
    value = make_spec().to_dict()
    value["shape"]["allocation"] = {"prelude": 0, "core": 50_000, "coda": 1}
    with pytest.raises(UsageError, match="at most 10,000 blocks, not 50,001"):
        RunSpec.from_dict(value)
    value = make_spec().to_dict()
    value["shape"] |= {"width": 10**8, "heads": 1, "vocabulary": 10**8}
    with pytest.raises(UsageError, match="no matrix has over 1e"):
        RunSpec.from_dict(value)


@pytest.mark.parametrize("options", [{"tokenizer": "bpe:999999999"}, {"shard_tokens": 1}, {"val_tokens": -1}])
def test_absurd_preparation_is_rejected(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Prepare(("tiny",), out=tmp_path / "data", **options).run()


@pytest.mark.parametrize(
    "option", ["--method=x", "--reference-law=x", "--interpolate=x", "--vertex=x", "--objective=x"]
)
@pytest.mark.parametrize("law", ["compute", "chinchilla", "isoflop"])
def test_wrong_value_is_rejected_by_laws_that_ignore_the_option(law: str, option: str) -> None:
    assert main(["fit", "paper:fineweb", "--law", law, option]) == 2


@pytest.mark.parametrize(("column", "value"), [("params", "1e-308"), ("loss", "1e300"), ("tokens", "1e200")])
def test_absurd_cell_of_a_table_is_rejected(
    column: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"params": f"{10**n}", "tokens": f"{20 * 10**n}", "loss": f"{4 - n / 10}"} for n in range(5, 12)]
    rows[0][column] = value
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert main(["fit", str(tmp_path / "t.csv"), "--law", "chinchilla"]) == 2
    assert "line 2" in capsys.readouterr().err


def test_absurd_blocks_and_passes_are_rejected() -> None:
    wrong: list[dict[str, Any]] = [{"per_depth": 0}, {"per_depth": 10**9}, {"blocks": 0}]
    wrong.append({"prelude": -1, "coda": 1})
    for fields in wrong:
        with pytest.raises(UsageError, match="must be"):
            AllocationRule(**fields)
    for tpp in (math.inf, 1e300, 0.0, math.nan):
        with pytest.raises(UsageError, match="tpp"):
            replace(PAPER["vanilla"], tpp=tpp)
    with pytest.raises(UsageError, match="from 0 to 100,000"):
        BlockAllocation(1, 10**7, 1)
    with pytest.raises(UsageError, match="from 1 to 10,000"):
        Stage((10**9,))


@pytest.mark.parametrize("arm", ["loop-6", "untied-grwo", "evil:arm"])
@pytest.mark.parametrize("study", STUDIES)
def test_recipe_for_an_arm_that_is_not_in_the_study_is_rejected(
    study: str, arm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path / "r.yaml", RecipeFile(arm, replace(PAPER["vanilla"]), "tiny"))
    words = ["study", study, "--preset", "tiny", "--dry-run", "--recipe", str(tmp_path / "r.yaml")]
    assert main(words) == 2
    sentence = "--trust-code" if ":" in arm else f"for {arm}, which is not among the arms"
    assert sentence in capsys.readouterr().err


class OwnBlock(TransformerBlock):
    """A custom block; its arm is own-block."""


def test_recipe_for_a_custom_arm_is_found_by_the_arms_own_name(tmp_path: Path) -> None:
    write_recipe(tmp_path / "r.yaml", RecipeFile("own-block", replace(PAPER["vanilla"], tpp=7.5), "tiny"))
    choice = choose_recipes([str(tmp_path / "r.yaml")])
    context = StudyContext(load_preset("tiny"), DatasetInfo("d", 512, 10**9, 10**6), choice=choice)
    STUDIES["ladder"].check(context, {"arms": ["vanilla", find_arm(OwnBlock)]})
    assert context.recipe(find_arm(OwnBlock)).tpp == 7.5
    with pytest.raises(UsageError, match="is for own-block, not for vanilla"):
        choice.require_file_for(find_arm("vanilla"))


# One of everything that a spec, a preset and a recipe may hold, with a number wherever one is possible.
def full_spec() -> dict[str, Any]:
    value = make_spec(arm="loop-grow").to_dict()
    value["arm"]["allocation"] |= {"blocks": 6, "prelude": 2, "coda": 2}
    value["arm"]["backprop_passes"] = 2
    value["arm"]["block_options"] = {"kv_heads": 1, "window": 8, "experts": 4, "active_experts": 1}
    value["arm"]["block_options"] |= {"shared_experts": 1, "streams": 2}
    value["schedule_steps"] = value["steps"] + 1
    value["arm"]["passes"]["stages"][1]["start"] = 0.5
    for passes in (value["arm"]["passes"], value["schedule"]):
        passes["stages"][0] |= {"blocks": 0.5, "width": 0.5, "context": 0.5, "experts": 0.5}
    value["shape"]["real_vocabulary"] = 300
    value["data"]["pool_tokens"] = 10_000
    value["optimizer"]["clip"] = value["options"]["softcap"] = 1.0
    return value


def full_recipe() -> dict[str, Any]:
    value = to_builtins(RecipeFile("untied-grow", PAPER["untied-grow"]))
    value["recipe"] |= {"rho": 0.5, "learning_rate_base": 0.1, "measured": [4, 8]}
    value["recipe"]["scaling"] = [{"hyperparameter": "weight_decay", "exponent": 0.5}]
    return value


def full_preset() -> dict[str, Any]:
    value = to_builtins(load_preset("tiny"))
    value |= {"sample_every": 9, "base_steps": 9, "max_tokens": 10**6, "branches": 0.2}
    value["arm_rungs"] = [{"arm": "vanilla", "depths": [2, 3]}]
    value["options"]["softcap"] = 1.0
    base = to_builtins(PAPER["vanilla"].base)
    value["recipes"] = [{"arm": "all", **base, "learning_rate_exponent": 0.1, "tpp": 9.0, "rho": 0.5}]
    return value


FULL: dict[type, Callable[[], dict[str, Any]]] = {
    RunSpec: full_spec,
    RecipeFile: full_recipe,
    Preset: full_preset,
}


def number_types(kind: Any, path: str = "") -> Generator[str]:
    """The paths of all fields below a dataclass whose type is a number."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield from number_types(hints[field.name], f"{path}.{field.name}")
    elif kind in (int, float):
        yield path
    else:
        for part in get_args(kind):
            yield from number_types(part, path)


def number_places(value: Any, place: tuple[Any, ...] = ()) -> Generator[tuple[Any, ...]]:
    """The keys that lead to each number of a JSON value."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from number_places(item, (*place, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.__name__)
def test_every_number_in_a_file_has_a_range(kind: type) -> None:
    value = FULL[kind]()
    from_builtins(kind, value)
    places = list(number_places(value))
    shown = {"".join(f".{key}" for key in place if isinstance(key, str)) for place in places}
    assert set(number_types(kind)) <= shown, "the example lacks a number"
    for place in places:
        *path, last = place
        changed = copy.deepcopy(value)
        node = functools.reduce(operator.getitem, path, changed)
        for number in (1e308, -1e308, math.inf, math.nan, 10**40):
            node[last] = number
            with pytest.raises(UsageError) as error:
                from_builtins(kind, changed)
            assert len(str(error.value)) < 1500, place
