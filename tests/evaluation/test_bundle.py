"""Bundles: read completely, or rejected naming file and line; centred scores equal published ones."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from steepen.errors import UsageError
from steepen.evaluation.core.bundle import BadBundle, Bundle
from steepen.evaluation.core.suite import CORE17, CORE22


def test_bundle_is_read_with_its_settings(bundle_folder: Path) -> None:
    found = Bundle.open(bundle_folder)
    assert [task.label for task in found.tasks] == ["choose", "choose_shots", "ending", "complete"]
    assert [task.shots for task in found.tasks] == [0, 3, 2, 2]
    assert found.tasks[0].delimiter == " " and found.tasks[1].delimiter == "\nAnswer: "
    assert found.tasks[0].baseline == 0.30
    assert found.examples == 14 + 14 + 9 + 11
    assert Bundle.open(bundle_folder.parent / "bundle").identity == found.identity


def test_identity_changes_with_everything_that_affects_a_score(bundle_folder: Path) -> None:
    before = Bundle.open(bundle_folder).identity
    config = bundle_folder / "core.yaml"
    config.write_text(config.read_text().replace("num_fewshot: [3]", "num_fewshot: [4]"))
    assert Bundle.open(bundle_folder).identity != before


def change(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def set_line(folder: Path, file: str, number: int, text: str) -> None:
    path = folder / file
    lines = path.read_text().split("\n")
    lines[number - 1] = text
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"query": "x", "choices": ["a", "b"], "gold": 0', "not JSON"),
        ("", "not JSON"),
        ("[1, 2]", "object"),
        ('{"query": 3, "choices": ["a", "b"], "gold": 0}', "'query' must be text"),
        ('{"query": "x", "choices": ["a"], "gold": 0}', "'choices' must be a list of at least two"),
        ('{"query": "x", "choices": ["a", 2], "gold": 0}', "'choices' must be a list of at least two"),
        ('{"query": "x", "choices": ["a", "b"], "gold": 2}', "gold = 2 is not valid"),
        ('{"query": "x", "choices": ["a", "b"]}', "gold = -1 is not valid"),
        ('{"query": "x", "choices": ["a", "b"], "gold": true}', "gold = True is not valid"),
        ('{"query": "x", "choices": ["a", " "], "gold": 0}', "no text"),
    ],
)
def test_malformed_line_is_named(bundle_folder: Path, text: str, says: str) -> None:
    set_line(bundle_folder, "eval_data/one/choose.jsonl", 5, text)
    with pytest.raises(BadBundle, match=r"choose\.jsonl, line 5: .*" + re.escape(says)):
        Bundle.open(bundle_folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("core.yaml", "schema", "essay", r"core\.yaml, line 14: ending has the unknown task type 'essay'"),
        ("core.yaml", "num_fewshot: [3]", "num_fewshot: 3", r"core\.yaml, line 8: num_fewshot = 3"),
        ("core.yaml", "num_fewshot: [3]", "num_fewshot: [14]", r"line 8: choose_shots needs 14"),
        ("core.yaml", "label: ending", "label: choose", "'choose' occurs more than once"),
        ("core.yaml", "label: ending", "label: ../x", r"line 14: the label '../x'"),
        ("core.yaml", "two/ending", "two/gone", r"two/gone\.jsonl: the file is missing"),
        ("core.yaml", "icl_tasks:", "tasks:", r"core\.yaml, line 1: .*icl_tasks"),
        ("core.yaml", "label: choose\n", "label: [\n", r"core\.yaml, line \d+: this is not YAML"),
        ("eval_meta_data.csv", "ending,50", "other,50", r"eval_meta_data\.csv: .*'ending'"),
        ("eval_meta_data.csv", "ending,50", "ending,100", r"eval_meta_data\.csv: .*'ending'"),
        ("eval_meta_data.csv", "Random baseline", "Chance", r"line 1: there is no column 'Random baseline'"),
    ],
)
def test_bad_setting_is_named(bundle_folder: Path, file: str, old: str, new: str, says: str) -> None:
    change(bundle_folder, file, old, new)
    with pytest.raises(BadBundle, match=says) as caught:
        Bundle.open(bundle_folder)
    assert caught.value.exit_code == 2


def test_folder_without_a_bundle_is_rejected(tmp_path: Path, bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="not a CORE bundle"):
        Bundle.open(tmp_path / "nowhere")
    archive = tmp_path / "eval_bundle.tar.xz"
    archive.write_bytes(b"x")
    with pytest.raises(UsageError, match="unpack the archive"):
        Bundle.open(archive)
    with pytest.raises(UsageError, match="no task 'chose'; the nearest are choose"):
        Bundle.open(bundle_folder).task("chose")


def test_blanks_around_a_language_modelling_context_are_dropped(bundle_folder: Path) -> None:
    line = json.dumps({"context": " \n the cat  \n", "continuation": "sat"})
    set_line(bundle_folder, "eval_data/two/complete.jsonl", 2, line)
    assert Bundle.open(bundle_folder).task("complete").items[1].contexts == ("the cat",)


@pytest.mark.parametrize("name", ["../../secret.jsonl", "/etc/hostname", "one/link.jsonl", "one/loop.jsonl"])
def test_files_outside_the_bundle_are_not_read(name: str, bundle_folder: Path) -> None:
    (bundle_folder.parent / "secret.jsonl").write_text("{}\n")
    (bundle_folder / "eval_data/one/link.jsonl").symlink_to(bundle_folder.parent / "secret.jsonl")
    (bundle_folder / "eval_data/one/loop.jsonl").symlink_to("loop.jsonl")
    config = bundle_folder / "core.yaml"
    config.write_text(config.read_text().replace("two/ending.jsonl", name))
    with pytest.raises(BadBundle, match="must be a file in eval_data"):
        Bundle.open(bundle_folder)


def test_subset_is_the_papers() -> None:
    assert len(CORE22) == 22 and len(CORE17) == 17 and set(CORE17) < set(CORE22)


def test_core_bundle_is_whole_and_centres_published_scores(core_bundle: Bundle) -> None:
    assert core_bundle.examples == 91_037
    assert tuple(task.label for task in core_bundle.tasks) == CORE22
    with (core_bundle.directory / "openai-community-gpt2.csv").open() as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    published = {row[0]: (float(row[1]), float(row[2])) for row in rows[1:-1]}
    for task in core_bundle.tasks:
        accuracy, centered = published[task.label]
        assert task.centered(accuracy) == pytest.approx(centered, abs=2e-6)
    mean = sum(task.centered(published[task.label][0]) for task in core_bundle.tasks) / 22
    assert mean == pytest.approx(0.113891, abs=1e-6)
