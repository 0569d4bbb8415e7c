"""The embedded corpus: there without a download, real prose, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from steepen.data.prepare import prepare
from steepen.data.prepare_options import PrepareRequest
from steepen.data.sources import builtin as embedded
from steepen.errors import UsageError


def test_speeches_make_millions_of_tokens_and_nothing_is_downloaded(tmp_path: Path) -> None:
    dataset = prepare(PrepareRequest(("embedded:speeches",), tokenizer="bpe:4096"), tmp_path / "out")
    assert dataset.manifest.splits["train"].tokens > 2_000_000
    assert dataset.manifest.splits["val"].tokens >= 50_000
    start = dataset.tokens("train").read(0, 200)
    assert "the" in dataset.tokenizer().decode(start).split()


def test_every_speech_is_there_once() -> None:
    speeches = embedded.speeches()
    assert len(speeches) == len(set(speeches)) > 200
    assert any(speech.startswith("Fellow-Citizens of the Senate") for speech in speeches)


def test_documentation_is_prose_and_never_repeats_a_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "DOCUMENTED", ("networkx",))
    documents = embedded.documentation.__wrapped__()
    paragraphs = [paragraph for document in documents for paragraph in document.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 5_000
    assert not any(">>>" in paragraph or "----" in paragraph for paragraph in paragraphs)
    assert documents == embedded.documentation.__wrapped__()


def test_markup_code_and_tables_are_left_out() -> None:
    text = """
    Summary of the function, which returns the `value` of :func:`~numpy.mean` over **all** of the axes given.

    Parameters
    ----------
    x : array_like
        The values over which the mean is to be taken, in any order that you like.

    >>> mean([1, 2, 3])  # and so on, with words enough to look like a sentence.

    .. versionadded:: 1.0
    """
    assert list(embedded.prose(text)) == [
        "Summary of the function, which returns the value of numpy.mean over all of the axes given.",
        "The values over which the mean is to be taken, in any order that you like.",
    ]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UsageError, match="accepted are speeches, documentation"):
        embedded.source("poems")
