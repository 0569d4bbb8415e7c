"""The built-in corpus: shipped with the package, with a fixed identity, prose only."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources.builtin import builtin_source, read_part
from steepen.data.tokenizer import Tokenizer
from steepen.errors import SteepenError, UsageError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_builtin_corpus.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The script that made the corpus."""
    spec = importlib.util.spec_from_file_location("make_builtin_corpus", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_identity_of_the_corpus_is_pinned() -> None:
    description = builtin_source().description
    assert description["sha256"] == "131829fdd2c3ed1b2e964529412095025d62df1f0858edc16877e0b7c1b92e68"
    assert description["documents"] == {"speeches": 249, "documentation": 2325}
    assert description["bytes"] == {"speeches": 12_185_751, "documentation": 8_707_958}


def test_shipped_tokenizer_is_what_training_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    train = Tokenizer.train

    def counted(texts: Iterable[str], size: int) -> Tokenizer:
        calls.append(size)
        return train(texts, size)

    monkeypatch.setattr(Tokenizer, "train", counted)
    request = PrepareRequest(("builtin",), tokenizer="bpe:512", max_tokens=200_000)
    shipped = prepare(request, tmp_path / "shipped")
    assert calls == []
    monkeypatch.setattr("steepen.data.sources.builtin.TOKENIZER_TEXTS", "other texts")
    trained = prepare(request, tmp_path / "trained")
    assert calls == [512]
    assert shipped.tokenizer().identity == trained.tokenizer().identity
    assert shipped.identity == trained.identity


def test_speeches_make_millions_of_tokens_without_a_download(tmp_path: Path) -> None:
    dataset = prepare(PrepareRequest(("builtin:speeches",), tokenizer="bpe:4096"), tmp_path / "out")
    assert dataset.manifest.splits["train"].tokens > 2_000_000
    assert dataset.manifest.splits["val"].tokens >= 50_000
    start = dataset.tokens("train").read(0, 200)
    assert "the" in dataset.tokenizer().decode(start).split()


def test_no_speech_is_repeated() -> None:
    speeches = read_part("speeches")
    assert len(speeches) == len(set(speeches)) > 200
    assert any(speech.startswith("Fellow-Citizens of the Senate") for speech in speeches)


def test_documentation_is_prose_and_never_repeats_a_paragraph() -> None:
    paragraphs = [paragraph for text in read_part("documentation") for paragraph in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 5_000
    assert not any(">>>" in paragraph or "----" in paragraph for paragraph in paragraphs)


def test_damaged_asset_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepen.data.sources.builtin.read_part", lambda name: read_part(name)[1:])
    with pytest.raises(SteepenError, match="damaged; reinstall steepen"):
        builtin_source()


def test_tool_leaves_out_markup_code_and_tables(tool: ModuleType) -> None:
    text = """
    Summary of the function, which returns the `value` of :func:`~numpy.mean` over **all** of the axes given.

    Parameters
    ----------
    x : array_like
        The values over which the mean is to be taken, in any order that you like.

    >>> mean([1, 2, 3])  # and so on, with words enough to look like a sentence.

    .. versionadded:: 1.0
    """
    assert list(tool.prose_paragraphs(text)) == [
        "Summary of the function, which returns the value of numpy.mean over all of the axes given.",
        "The values over which the mean is to be taken, in any order that you like.",
    ]


def test_unknown_part_is_rejected() -> None:
    with pytest.raises(UsageError, match="accepted are speeches, documentation"):
        builtin_source("poems")
