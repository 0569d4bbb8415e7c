"""User-defined data sources: a function in Python, or "module:attribute" wherever a source is named."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources.source import Part, Source
from steepen.errors import SteepenError, UsageError
from steepen.requests.app import main

DOCS = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.fixture
def example_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example of docs/data.md as an importable module."""
    code = re.search(r"```python\n# my_corpus\.py\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "my_corpus.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_corpus", raising=False)
    (tmp_path / "notes").mkdir()
    for number in range(30):
        (tmp_path / "notes" / f"{number:02d}.txt").write_text(f"Note {number} is about the number {number}.")
    return "my_corpus"


def test_example_of_the_docs_runs_from_the_command_line(example_module: str, tmp_path: Path) -> None:
    assert main(["data", "prepare", f"{example_module}:documents", "--out", "out", "--val-tokens", "50"]) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert sum(split.documents for split in dataset.manifest.splits.values()) == 30
    assert dataset.manifest.source["name"] == "my_corpus:documents"
    assert dataset.manifest.source["kind"] == "custom"


def test_function_gives_the_same_data_as_its_file(tmp_path: Path, corpus: Path, documents: list[str]) -> None:
    function = prepare(PrepareRequest((lambda: documents,), val_tokens=2_000), tmp_path / "function")
    file = prepare(PrepareRequest((str(corpus),), val_tokens=2_000), tmp_path / "file")
    assert function.identity == file.identity


def test_one_source_needs_no_tuple(tmp_path: Path, documents: list[str]) -> None:
    request = PrepareRequest(lambda: documents, val_tokens=0)  # pyright: ignore[reportArgumentType]
    assert prepare(request, tmp_path / "out").manifest.splits["train"].documents == len(documents)


def test_changed_documents_are_another_preparation(tmp_path: Path, documents: list[str]) -> None:
    texts = list(documents)
    request = PrepareRequest((lambda: texts,))
    prepare(request, tmp_path / "out")
    assert prepare(request, tmp_path / "out").manifest.source["documents"] == len(documents)
    texts[3] += " More."
    with pytest.raises(UsageError, match="another source"):
        prepare(request, tmp_path / "out")


def test_source_object_is_not_read_twice(tmp_path: Path, documents: list[str]) -> None:
    starts: list[int] = []

    def read(start: int) -> Iterator[str]:
        starts.append(start)
        yield from documents[start:]

    def source() -> Source:
        return Source({"name": "mine", "version": 1}, 10**6, [Part("all", partial(read))])

    dataset = prepare(PrepareRequest((source,), val_tokens=0), tmp_path / "out")
    assert starts == [0]
    assert dataset.manifest.source == {"name": "mine", "version": 1}


def test_validation_can_come_from_a_function(tmp_path: Path, corpus: Path) -> None:
    request = PrepareRequest((str(corpus),), (lambda: ["Only for validation.", "This one too."],))
    assert prepare(request, tmp_path / "out").manifest.splits["val"].documents == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:documents", "could not be loaded"),
        ("math:pi", "must be a function or a Source"),
        ("os:no_such_attribute", "could not be loaded"),
    ],
)
def test_wrong_name_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(PrepareRequest((name,)), tmp_path / "out")


def test_document_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SteepenError, match="returned int, not str"):
        prepare(PrepareRequest((lambda: ["fine", 5],)), tmp_path / "out")  # pyright: ignore


def test_file_whose_name_contains_a_colon_is_a_file(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:b").write_text("<|endoftext|>".join(documents))
    assert prepare(PrepareRequest(("a:b",)), "out").manifest.source["kind"] == "files"
