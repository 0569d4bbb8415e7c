"""Read and check a CORE bundle: core.yaml, eval_meta_data.csv and eval_data/.

All three task types have one form: contexts, answers and the index of the right one. Multiple choice has one
context and several answers, schema several contexts and one answer, language modelling one of each.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from steepen.errors import UsageError, is_whole, nearest, show
from steepen.evaluation.core.suite import CORE22
from steepen.utils.files import read_text
from steepen.utils.json_io import parse_json
from steepen.utils.yaml_io import load_yaml

# `Bundle.identity` of nanochat's copy of DCLM's 22 tasks, on which the paper's scores were measured.
CORE_IDENTITY = "d04b7d0f445115214d9f97b7363f66841560a5d3e78961a33157945d724123e1"
CONFIG, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
Kind = Literal["multiple_choice", "schema", "language_modeling"]
KINDS: tuple[Kind, ...] = ("multiple_choice", "schema", "language_modeling")


class BadBundle(UsageError):
    """A bundle that cannot be evaluated; the message names the file and the line."""

    def __init__(self, file: Path, line: int | None, problem: str) -> None:
        place = f"{file}" if line is None else f"{file}, line {line}"
        super().__init__(f"bad bundle: {place}: {problem}")


@dataclass(frozen=True)
class Item:
    """One example. Candidate i is contexts[i] or the only context, then answers[i] or the only answer."""

    line: int  # in its file, from 1
    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    gold: int

    @property
    def candidates(self) -> int:
        """Number of candidates."""
        return max(len(self.contexts), len(self.answers))

    def candidate(self, index: int) -> tuple[str, str]:
        """Context and answer of one candidate."""
        context = self.contexts[min(index, len(self.contexts) - 1)]
        return context, self.answers[min(index, len(self.answers) - 1)]


@dataclass(frozen=True)
class Task:
    """One task of a bundle with its items, in the order of the file."""

    label: str
    kind: Kind
    file: Path
    shots: int
    delimiter: str  # between context and answer
    baseline: float  # accuracy of random guessing, in [0, 1)
    items: tuple[Item, ...]

    def centered(self, accuracy: float) -> float:
        """Centred accuracy: 0 is chance, 1 is perfect."""
        return (accuracy - self.baseline) / (1.0 - self.baseline)


@dataclass(frozen=True)
class Bundle:
    """The tasks of a bundle, in the order of its core.yaml."""

    directory: Path
    tasks: tuple[Task, ...]

    @staticmethod
    def open(directory: str | Path) -> Bundle:
        """Read and check a bundle; an error names the file and the line."""
        root = Path(directory)
        if not (root / CONFIG).is_file() and (root / "eval_bundle" / CONFIG).is_file():
            root = root / "eval_bundle"
        if not (root / CONFIG).is_file():
            hint = "unpack the archive and give its folder" if root.is_file() else "give the unpacked folder"
            raise UsageError(f"{root} is not a CORE bundle (it has no {CONFIG}); {hint}.")
        baselines = _read_baselines(root / BASELINES)
        files: dict[tuple[Path, str], tuple[Item, ...]] = {}
        tasks: dict[str, Task] = {}
        for entry, line in _read_config(root / CONFIG):
            task = _read_task(root, entry, line, baselines, files)
            if tasks.setdefault(task.label, task) is not task:
                raise BadBundle(root / CONFIG, None, f"the label {task.label!r} occurs more than once.")
        return Bundle(root, tuple(tasks.values()))

    @property
    def examples(self) -> int:
        """Number of examples of all tasks (CORE: 91,037)."""
        return sum(len(task.items) for task in self.tasks)

    @cached_property
    def identity(self) -> str:
        """Hex SHA-256 of all that decides a score: tasks, settings, baselines, examples."""
        digest = hashlib.sha256(b"steepen-bundle-1\n")
        for task in self.tasks:
            head = [task.label, task.kind, task.shots, task.delimiter, task.baseline]
            digest.update(json.dumps(head).encode())
            for item in task.items:
                digest.update(json.dumps([item.contexts, item.answers, item.gold]).encode())
        return digest.hexdigest()

    @property
    def altered_core(self) -> bool:
        """Whether it has the 22 tasks of CORE, but with other examples or settings than published."""
        return {task.label for task in self.tasks} >= set(CORE22) and self.identity != CORE_IDENTITY

    def task(self, label: str) -> Task:
        """A task by its label."""
        for task in self.tasks:
            if task.label == label:
                return task
        labels = [task.label for task in self.tasks]
        raise UsageError(f"the bundle has no task {label!r}; the nearest are {nearest(label, labels)}.")


def _read_text(file: Path) -> str:
    try:
        return read_text(file)
    except FileNotFoundError:
        raise BadBundle(file, None, "the file is missing; unpack the bundle again.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadBundle(file, None, f"the file cannot be read ({error}).") from error


def _read_config(file: Path) -> list[tuple[dict[str, Any], int]]:
    """The task entries of core.yaml with the line each begins on."""
    text = _read_text(file)
    try:
        value, node = load_yaml(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise BadBundle(file, mark.line + 1 if mark else None, "this is not YAML.") from error
    entries = value.get("icl_tasks") if isinstance(value, dict) else None
    if not isinstance(entries, list) or not entries or not isinstance(node, yaml.MappingNode):
        raise BadBundle(file, 1, "it has no list of tasks under icl_tasks.")
    listed = next(child for key, child in node.value if key.value == "icl_tasks")
    lines = [child.start_mark.line + 1 for child in listed.value]
    for entry, line in zip(entries, lines, strict=True):
        if not isinstance(entry, dict):
            raise BadBundle(file, line, "a task must be an entry with label, dataset_uri and icl_task_type.")
    return list(zip(cast("list[dict[str, Any]]", entries), lines, strict=True))


def _read_baselines(file: Path) -> dict[str, float]:
    """Accuracy of random guessing by task label, in per cent as in the file."""
    try:
        rows = csv.DictReader(_read_text(file).splitlines())
        names, lines = rows.fieldnames or [], list(rows)
    except csv.Error as error:
        raise BadBundle(file, None, f"the file cannot be read ({error}).") from error
    for column in ("Eval Task", "Random baseline"):
        if column not in names:
            raise BadBundle(file, 1, f"there is no column {column!r}.")
    found: dict[str, float] = {}
    for row in lines:
        try:
            found[row["Eval Task"]] = float(row["Random baseline"])
        except (TypeError, ValueError):
            continue  # the file also lists other tasks; a missing baseline is reported where it is needed
    return found


def _read_task(
    root: Path,
    entry: dict[str, Any],
    line: int,
    baselines: dict[str, float],
    files: dict[tuple[Path, str], tuple[Item, ...]],
) -> Task:
    def need(holds: bool, problem: str) -> None:
        if not holds:
            raise BadBundle(root / CONFIG, line, problem)

    def field(name: str, kind: type, default: Any = None) -> Any:
        value = entry.get(name, default)
        good = isinstance(value, kind)
        need(good, f"{name} = {show(value)} is not valid: it must be a {kind.__name__}.")
        return value

    label = field("label", str)
    kind: Any = entry.get("icl_task_type")
    good = re.fullmatch(r"[\w.-]+", label) is not None
    need(good, f"the label {show(label)} is not valid: use letters, digits, _, - and dots.")
    need(kind in KINDS, f"{label} has the unknown task type {show(kind)}; known are {', '.join(KINDS)}.")
    given = field("num_fewshot", list)
    good = len(given) == 1 and is_whole(given[0]) and given[0] >= 0
    need(good, f"num_fewshot = {show(given)} is not valid: it must be a list of one count.")
    baseline = baselines.get(label)
    if baseline is None or not 0 <= baseline < 100:
        raise BadBundle(
            root / BASELINES, None, f"there is no random baseline between 0 and 100 (per cent) for {label!r}."
        )
    name = field("dataset_uri", str)
    file = _inside(root / DATA, name)
    if file is None:
        problem = f"dataset_uri = {show(name)} is not valid: it must be a file in {DATA}."
        raise BadBundle(root / CONFIG, line, problem)
    if (file, kind) not in files:
        files[file, kind] = _read_items(file, kind)
    items, shots = files[file, kind], given[0]
    need(shots < len(items), f"{label} needs {shots} demonstrations, but its file has {len(items)} examples.")
    return Task(label, kind, file, shots, field("continuation_delimiter", str, " "), baseline / 100, items)


def _inside(folder: Path, name: str) -> Path | None:
    """The file of that name in the folder; None for a name that leads out of it, also through links."""
    try:
        return folder / name if (folder / name).resolve().is_relative_to(folder.resolve()) else None
    except (OSError, ValueError, RuntimeError):  # a loop of links, a null character
        return None


def _read_items(file: Path, kind: Kind) -> tuple[Item, ...]:
    lines = _read_text(file).split("\n")
    if lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise BadBundle(file, None, "the file has no examples.")
    return tuple(_read_item(file, number, line, kind) for number, line in enumerate(lines, start=1))


def _read_item(file: Path, number: int, line: str, kind: Kind) -> Item:
    def need(holds: bool, problem: str) -> None:
        if not holds:
            raise BadBundle(file, number, problem)

    try:
        value = parse_json(line)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise BadBundle(file, number, f"this is not JSON ({reason}).") from None
    need(isinstance(value, dict), "an example must be an object with fields.")

    def text(name: str) -> str:
        need(isinstance(value.get(name), str), f"the field {name!r} must be text.")
        return value[name]

    def texts(name: str) -> tuple[str, ...]:
        found = value.get(name)
        good = isinstance(found, list) and len(found) > 1 and all(isinstance(one, str) for one in found)
        need(good, f"the field {name!r} must be a list of at least two texts.")
        return tuple(found)

    if kind == "language_modeling":
        # Contexts may end in blanks, which would become part of the answer's first token.
        item = Item(number, (text("context").strip(),), (text("continuation"),), 0)
    elif kind == "schema":
        item = Item(number, texts("context_options"), (text("continuation"),), value.get("gold", -1))
    else:
        item = Item(number, (text("query"),), texts("choices"), value.get("gold", -1))
    good = type(item.gold) is int and 0 <= item.gold < item.candidates
    need(good, f"gold = {show(item.gold)} is not valid: it must be from 0 to {item.candidates - 1}.")
    need(all(answer.strip() for answer in item.answers), "an answer has no text.")
    return item
