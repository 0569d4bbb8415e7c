"""Names of code in files: nothing is imported or called that the command line has not named.

Two kinds of escape are tried: names that lead out of steepen or of a trusted module at every extension point,
and one name in place of every text of every file that a command reads.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos.test_mutated_files import KINDS, Kind
from clean_place import Place, make_place, no_hang
from run_fixtures import make_spec as a_spec
from steepen.data import Dataset
from steepen.data.sources.resolve import custom_source
from steepen.data.sources.source import Source
from steepen.errors import UsageError
from steepen.launch.base import LAUNCHERS, LaunchContext, find_launcher
from steepen.model.arm import OWN_CODE, Arm
from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock, find_block
from steepen.model.boundary import find_boundary
from steepen.optim.config import OptimizerConfig
from steepen.optim.custom_optimizer import CustomOptimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.recipe_choice import RecipeFile, write_recipe
from steepen.requests.app import main
from steepen.runs.spec import RunSpec, code_digest
from steepen.runs.store import RunStore
from steepen.studies.registry import STUDIES, find_study
from steepen.utils.imports import code_from, import_object
from steepen.utils.json_io import read_json, with_checksum, write_json
from training_fixtures import make_spec, tiny_data

__all__ = ["make_spec", "tiny_data"]

NO_HYPERPARAMETERS: Any = None  # used when an optimizer is built, after it is found
POINTS: dict[str, Callable[[str], object]] = {
    "arm": find_arm,
    "block": find_block,
    "boundary": find_boundary,
    "optimizer": lambda name: CustomOptimizer(OptimizerConfig(kind=name), NO_HYPERPARAMETERS),
    "source": custom_source,
    "study": find_study,
    "launcher": find_launcher,
    "code of an arm": lambda name: code_digest(Arm("mine", block=name)),
    "code of an optimizer": lambda name: code_digest(find_arm("vanilla"), OptimizerConfig(kind=name)),
}
OUT_OF_STEEPEN = [
    "steepen.utils.files:os.abort",
    "steepen.utils.files:os.sys.breakpointhook",
    "steepen.utils.files:os.sys.exit",
    "steepen.utils.files:os",
    "steepen.utils.imports:importlib.import_module",
    "steepen.utils.imports:sys.modules",
    "steepen.utils.imports:code_from",
    "steepen.utils.imports:import_object.__globals__",
    "steepen.utils.imports:import_object.__class__",
    "steepen.utils.imports:__builtins__.breakpoint",
    "steepen.utils.imports:__spec__.loader",
    "steepen.utils.imports:Path.cwd",
    "steepen.errors:UsageError.__mro__",
    "steepen.errors:UsageError.__init__.__globals__",
    "steepen.model.arm:dataclass",
    "steepen.model.arm:Arm.__class__",
    "steepen.model.arm:Any.__class__",
    "steepen.model.block:nn.Module",
    "steepen.model.block:torch.ops",
    "steepen.model.block:TransformerBlock.forward",
    "steepen.model.arms:ARMS.clear",
    "steepen.requests.app:main",
    "steepen.requests.app:main",
    "steepen.requests.app:root_command",
    "steepen.launch.local:subprocess.Popen",
    "steepen.launch.worker:run_attempt",
    "steepen.requests.worker:main",
    "steepen.__main__:run",
    "steepen:report",
    "steepen:fit",
    "steepen:sys",
    "steepen:importlib.sys.modules",
    "steepen.not_there:x",
    "os:abort",
    "builtins:breakpoint",
    "__main__:x",
    "antigravity:fly_id",
]  # what a module named "steepen…" offers without having been made for it, and other modules
OUT_OF_A_TRUSTED_MODULE = [
    "lab:abort",
    "lab:alias",
    "lab:os.abort",
    "lab:os",
    "lab:again.documents",
    "lab:partial",
    "lab:bound",
    "lab:instance",
    "lab:instance.call",
    "lab:instance.__class__",
    "lab:Lab.__class__",
    "lab:Lab.__init__",
    "lab:Lab.call",
    "lab:Lab.borrowed",
    "lab:Borrowed",
    "lab:documents.__globals__",
    "lab:documents.__class__",
    "lab:renamed",
    "lab:lazy",
    "lab:__builtins__",
    "lab:__loader__",
    "lab:__dict__",
    "lab.os:abort",
    "lab.sub:documents",
    "laboratory:documents",
    "lab :documents",
]
LAB = """
import functools, os
from os import abort
from collections import OrderedDict as Borrowed
import lab as again
from steepen.data.sources.source import Part, Source
from steepen.model.arm import Arm

alias = os.abort
partial = functools.partial(os.abort)

class Lab:
    borrowed = os.abort
    def __init__(self): os.abort()
    def __call__(self, *_): os.abort()
    call = __call__

instance = object.__new__(Lab)
bound = instance.__call__

def documents():
    yield "text"

renamed = documents
ARM = Arm("mine")
SOURCE = Source({"kind": "custom"}, 1, [Part("a", lambda start: iter(["text"]))])

def __getattr__(name):
    if name == "lazy":
        return os.abort
    raise AttributeError(name)
"""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called of that which no file may call."""
    found: list[str] = []
    monkeypatch.setattr(os, "abort", lambda *_: found.append("os.abort"))
    monkeypatch.setattr(sys, "breakpointhook", lambda *_: found.append("breakpoint"))
    return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    """A module `lab` of the user, in the current directory, which holds doors to elsewhere."""
    (tmp_path / "lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "lab", raising=False)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", OUT_OF_STEEPEN)
def test_name_in_a_file_does_not_reach_through_steepen(name: str, point: str, called: list[str]) -> None:
    before = set(sys.modules)
    with (
        code_from(["study", "ladder", "--preset", "theirs.yaml"]),
        pytest.raises(UsageError, match="trust-code"),
    ):
        POINTS[point](name)
    assert not called and not {"antigravity"} & (set(sys.modules) - before)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", OUT_OF_A_TRUSTED_MODULE)
def test_name_in_a_file_does_not_reach_through_a_trusted_module(
    name: str, point: str, lab: None, called: list[str]
) -> None:
    with code_from(["--arm", "lab:ARM"]):
        assert find_arm("lab:ARM").name == "mine"
        with pytest.raises(UsageError, match="trust-code"):
            POINTS[point](name)
    assert not called


def test_name_in_a_file_finds_what_a_trusted_module_defines(lab: None, called: list[str]) -> None:
    with code_from(["study", "lab:study_of_mine"]):
        assert find_arm("lab:ARM").name == "mine"
        assert custom_source("lab:documents").size == 4
        assert isinstance(custom_source("lab:SOURCE"), Source)
        with pytest.raises(UsageError, match="does not define it itself"):
            find_launcher("lab:ARM")  # an Arm where a launcher is expected
    assert not called


@pytest.mark.parametrize("name", ["lab:renamed", "lab:bound", "lab:again.documents", "lab:lazy"])
def test_name_on_the_command_line_may_be_any(name: str, lab: None) -> None:
    with code_from([f"--source={name}"]):
        assert callable(import_object(name, "data source"))


@pytest.mark.parametrize("word", ["tell me of lab:documents", "lab:documents.", "x/lab:documents", "lab:"])
def test_name_inside_a_text_is_not_taken_for_a_name(word: str, lab: None) -> None:
    with code_from(["generate", "runs/x", "--prompt", word]), pytest.raises(UsageError, match="trust-code"):
        custom_source("lab:documents")


def test_own_objects_can_be_named_in_files() -> None:
    with code_from([]):
        assert find_block("steepen.model.block:TransformerBlock") is TransformerBlock
        for name in OWN_CODE - {"steepen.model.block:TransformerBlock"}:
            assert f"{find_boundary(name).__module__}:{find_boundary(name).__qualname__}" == name
        assert code_digest(Arm("mine", block=TransformerBlock)) is not None
        for entry in STUDIES.values():
            assert callable(entry.function) and find_study(entry.target).target == entry.target
        for name, target in LAUNCHERS.items():
            assert find_launcher(name) == find_launcher(target)


def test_launcher_replaces_the_spec_that_a_worker_will_trust(tmp_path: Path) -> None:
    context = LaunchContext(tmp_path, RunStore(tmp_path))
    spec = replace(a_spec(1), code="0123456789abcdef")
    file = context.store.run(spec).spec_file
    write_json(file, {"arm": {"block": "theirs:Block"}})
    assert json.loads(context.task(spec).to_line())["trust"]
    assert read_json(file) == spec.to_dict()


def test_optional_modules_are_not_taken_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (tmp_path / "openpyxl.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.delitem(sys.modules, "openpyxl", raising=False)
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    assert main(["fit", "table.xlsx"]) != 0
    assert capsys.readouterr().err and not (tmp_path / "imported").exists()


# One name in place of every text of every file.


class Trap(types.ModuleType):
    """A module inside steepen that notices when a name in it is looked up."""

    found: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.found.append(name)
        return lambda *_, **__: iter(["text"])


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    module = Trap("steepen.trap")
    module.found = []
    monkeypatch.setitem(sys.modules, "steepen.trap", module)
    return module.found


@pytest.fixture(scope="module")
def place(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    spec = make_spec("untied-grow", depth=2, steps=6)
    place = make_place(tmp_path_factory.mktemp("names"), spec, tiny_data.directory)
    (place.root / "unfinished" / place.run / "failure.json").unlink()
    shipped = Path(__file__).parents[1] / "src/steepen/studies/presets/tiny.yaml"
    preset = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    recipes = [{"arm": "all", "learning_rate": 0.1}]
    preset |= {"suggested_data": ["builtin"], "recipes": recipes}
    (place.root / "preset.yaml").write_text(yaml.safe_dump(preset))
    write_recipe(place.root / "recipe.yaml", RecipeFile("vanilla", recipe_of(find_arm("vanilla"))))
    spec_file = (place.root / "unfinished" / place.run / "spec.json").read_text()
    (place.root / "spec.json").write_text(spec_file)
    return place


STUDY = "study ladder --studies {root}/made --runs {root}/made-runs --device cpu"
TRAIN = "train --data {root}/data --runs {root}/made-runs --device cpu"
WITHOUT_NAMES = ("metrics", "packs", "tables of parabolas", "tables of ladders", "forecasts")
PLACES: dict[str, Kind] = {
    **{name: kind for name, kind in KINDS.items() if name not in WITHOUT_NAMES},
    "presets": Kind("preset.yaml", (f"{STUDY} --preset {{root}}/preset.yaml --dry-run",)),
    "recipes": Kind("recipe.yaml", (f"{STUDY} --preset tiny --dry-run --recipe {{root}}/recipe.yaml",)),
    "specs to train": Kind("spec.json", (f"{TRAIN} --spec {{root}}/spec.json",)),
    "specs to resume": Kind(
        "unfinished/{run}/spec.json", (f"{TRAIN} --spec {{root}}/unfinished/{{run}}/spec.json",)
    ),
}


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every text in a JSON value, of long lists to those in the first elements."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:3]) if isinstance(value, list) else items
    for key, child in items:
        yield from texts(child, (*path, key))
    if isinstance(value, str):
        yield path


def replaced(value: Any, path: tuple[Any, ...], new: str) -> Any:
    """A copy of a JSON value with another text at a path."""
    copy = json.loads(json.dumps(value))
    functools.reduce(lambda node, key: node[key], path[:-1], copy)[path[-1]] = new
    return copy


def stored(file: Path) -> Any:
    """The value of a JSON or YAML file, or of the first line of a JSON lines file."""
    text = file.read_text()
    if file.suffix == ".yaml":
        return yaml.safe_load(text)
    return json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)


@pytest.mark.parametrize("kind", PLACES)
def test_no_text_of_a_file_is_looked_up_as_code(
    kind: str, place: Place, trap: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = place.root / PLACES[kind].file.format(run=place.run)
    clean = file.read_bytes()
    value = stored(file)
    words = [text.format(root=place.root, run=place.run).split() for text in PLACES[kind].commands]
    rest = clean.partition(b"\n")[2] if file.suffix == ".jsonl" else b""

    def write(content: Any) -> None:
        file.write_bytes(b"\n".join([PLACES[kind].write(content), rest]))

    write(value)
    assert main(words[0]) == 0, capsys.readouterr().err
    shutil.rmtree(place.root / "made-runs", ignore_errors=True)
    shutil.rmtree(place.root / "imported", ignore_errors=True)
    codes: dict[str, set[int]] = {}
    try:
        for path in texts(value):
            write(replaced(value, path, "steepen.trap:door"))
            for command in words:
                with no_hang():
                    code = main(command)
                codes.setdefault(".".join(map(str, path)), set()).add(code)
                assert not trap and code in (0, 1, 2), (path, command, code, capsys.readouterr().err)
            for made in ("made", "made-runs", "imported", "page"):
                shutil.rmtree(place.root / made, ignore_errors=True)
    finally:
        file.write_bytes(clean)
    assert codes


FORGED = {
    "block": lambda spec: replace(spec, arm=replace(spec.arm, block="steepen.trap:door")),
    "boundary": lambda spec: replace(spec, arm=replace(spec.arm, core_boundary="steepen.trap:door")),
    "optimizer": lambda spec: replace(spec, optimizer=replace(spec.optimizer, kind="steepen.trap:door")),
}


@pytest.mark.parametrize("part", FORGED)
def test_run_directory_and_export_that_name_code_are_rejected(
    part: str, place: Place, trap: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = RunSpec.from_dict(stored(place.root / "spec.json"))
    forged = replace(FORGED[part](spec), code="0123456789abcdef")
    root = place.root / f"forged-{part}"
    run = root / "runs" / forged.hash
    shutil.copytree(place.root / "runs" / place.run, run)
    shutil.copytree(place.root / "export", root / "export")
    for file in root.rglob("*.json"):
        file.write_text(json.dumps(_forge(stored(file), spec, forged)))
    commands = [
        f"train --spec {run}/spec.json --data {place.root}/data --runs {root}/new --device cpu",
        f"generate {run} --prompt a --max-tokens 1 --device cpu",
        f"eval {run} --data {place.root}/data --device cpu",
        f"export {run} {root}/out",
        f"export {run} {root}/out-2 --to safetensors",
        f"import {root}/export --runs {root}/imported",
        f"runs --runs {root}/runs",
        f"runs show {forged.hash} --runs {root}/runs",
        f"runs clean --runs {root}/runs",
    ]
    codes = {command.partition(" ")[0]: main(command.split()) for command in commands}
    said = capsys.readouterr().err
    assert not trap and set(codes.values()) <= {0, 1, 2} and "Usage:" not in said, said
    assert codes["train"] == 2 and said.count("is named in a file") >= (1 if part == "optimizer" else 3), said


def _forge(value: Any, spec: RunSpec, forged: RunSpec) -> Any:
    """A JSON value with another spec and its hash wherever it holds the first, and new checksums."""
    if value == spec.to_dict():
        return forged.to_dict()
    if isinstance(value, dict):
        new = {name: _forge(item, spec, forged) for name, item in value.items() if name != "checksum"}
        return with_checksum(new) if "checksum" in value else new
    if isinstance(value, list):
        return [_forge(item, spec, forged) for item in value]
    return forged.hash if value == spec.hash else value


def test_source_of_a_preset_is_not_looked_up_as_code(
    place: Place, trap: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    preset = {**stored(place.root / "preset.yaml"), "source": "steepen.trap:door"}
    (place.root / "other.yaml").write_text(yaml.safe_dump(preset))
    words = f"{STUDY} --preset {{root}}/other.yaml".format(root=place.root).split()
    assert main(words) == 2 and not trap
    assert "'steepen.trap:door' is named in a file" in capsys.readouterr().err.replace("\n", " ")
    with code_from(["--source", "steepen.trap:door"]):  # the trap works
        custom_source("steepen.trap:door")
    assert trap
