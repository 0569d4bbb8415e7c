"""Mixtures: shares of the tokens from the first document on, and a validation set of each source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hub_server import HubServer
from steepen.data import Dataset, ValidationSet, tokenize_source
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources import hub as hugging_face
from steepen.data.sources.mixture import parse_mixture
from steepen.data.sources.readers import ReadOptions
from steepen.errors import SteepenError, UsageError

CONTEXT = 15


def words(kind: str, number: int) -> str:
    return " ".join(f"{kind}{(number * 7 + i) % 97}" for i in range(5 + number % 23))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Three files of different fields: 1,200 web, 500 code and 60 wiki documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for kind, count, name in (("web", 1200, "text"), ("code", 500, "content"), ("wiki", 60, "text")):
        lines = [json.dumps({name: words(kind, number)}) + "\n" for number in range(count)]
        (folder / f"{kind}.jsonl").write_text("".join(lines))
    return folder


def mixture(folder: Path, **wiki: Any) -> str:
    content = {
        "web": {"source": str(folder / "web.jsonl"), "weight": 6},
        "code": {"source": str(folder / "code.jsonl"), "weight": 3, "field": "content"},
        "wiki": {"source": str(folder / "wiki.jsonl"), "weight": 1, **wiki},
    }
    path = folder / "mix.yaml"
    path.write_text(json.dumps(content))
    return str(path)


def request(mix: str, **rest: Any) -> PrepareRequest:
    options: dict[str, Any] = {"tokenizer": "bpe:300", "val_tokens": 1500, **rest}
    return PrepareRequest(mix=mix, **options)


def documents(dataset: Dataset, split: str) -> list[str]:
    ids, tokenizer = dataset.tokens(split).read(0, len(dataset.tokens(split))), dataset.tokenizer()
    ends = dataset.document_ends(split).tolist()
    return [tokenizer.decode(ids[a + 1 : b]) for a, b in zip([0, *ends], ends, strict=False)]


def source_of(text: str) -> str:
    return text.split(" ", maxsplit=1)[0].rstrip("0123456789")


def test_any_beginning_of_the_tokens_has_the_given_shares(tmp_path: Path, sources: Path) -> None:
    dataset = prepare(request(mixture(sources)), tmp_path / "data")
    names = [source_of(text) for text in documents(dataset, "train")]
    ends = dataset.document_ends("train")
    lengths = np.diff(ends, prepend=0)
    longest = int(lengths.max())
    for weight, name in ((0.6, "web"), (0.3, "code"), (0.1, "wiki")):
        own = np.cumsum(lengths * np.array([each == name for each in names]))
        assert np.abs(own - weight * ends).max() <= 2 * longest
    recorded = {one.name: one.tokens["train"] for one in dataset.manifest.sources}
    total = {name: int(lengths[[each == name for each in names]].sum()) for name in recorded}
    assert recorded == total
    dataset.verify()


def test_mixture_ends_where_a_source_runs_out_and_says_so(tmp_path: Path, sources: Path) -> None:
    dataset = prepare(request(mixture(sources)), tmp_path / "data")
    assert dataset.manifest.notes["ran_out"] == "wiki"
    found = documents(dataset, "train") + documents(dataset, "val")
    left_out = dataset.manifest.notes["documents_dropped"]
    assert 60 - left_out <= sum(source_of(text) == "wiki" for text in found) <= 60
    assert sum(source_of(text) == "web" for text in found) < 1200
    twice = prepare(request(mixture(sources, repeat=2)), tmp_path / "twice")
    wiki = [text for text in documents(twice, "train") if source_of(text) == "wiki"]
    assert len(wiki) == 2 * len(set(wiki))
    assert not set(wiki) & set(documents(twice, "val"))
    enough = prepare(request(mixture(sources), max_tokens=5_000), tmp_path / "enough")
    assert enough.manifest.notes["ran_out"] is None
    assert 5_000 <= len(enough.tokens("train")) < 5_200


@pytest.mark.parametrize("interrupt_at", [2, 5, 9])
def test_interrupted_mixture_resumes_to_the_same_bytes(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, interrupt_at: int
) -> None:
    whole = prepare(request(mixture(sources)), tmp_path / "whole", threads=3)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 2_000)
    monkeypatch.setattr(tokenize_source, "JOURNAL_SECONDS", 0.0)
    seen = 0

    def interrupt(stage: str, *_: Any, tokens: int | None = None, **__: Any) -> None:
        nonlocal seen
        seen += stage == "tokenizing" and bool(tokens)
        if seen == interrupt_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(request(mixture(sources)), tmp_path / "cut", interrupt, threads=1)
    cut = prepare(request(mixture(sources)), tmp_path / "cut", threads=2)
    assert cut.identity == whole.identity
    for file in whole.directory.glob("*.bin"):
        assert (cut.directory / file.name).read_bytes() == file.read_bytes()


def test_weights_and_names_are_part_of_the_identity(tmp_path: Path, sources: Path) -> None:
    first = prepare(request(f"{sources}/web.jsonl=1,{sources}/wiki.jsonl=1"), tmp_path / "first")
    assert [one.name for one in first.manifest.sources] == ["web", "wiki"]
    other = prepare(request(f"{sources}/web.jsonl=3,{sources}/wiki.jsonl=1"), tmp_path / "other")
    assert first.identity != other.identity
    assert other.manifest.sources[0].weight == 0.75
    with pytest.raises(UsageError, match="other options"):
        prepare(request(f"{sources}/web.jsonl=2,{sources}/wiki.jsonl=1"), tmp_path / "other")


def test_text_that_two_sources_share_is_in_one_split_only(tmp_path: Path, sources: Path) -> None:
    again = sources / "again.jsonl"
    again.write_text((sources / "web.jsonl").read_text())
    dataset = prepare(request(f"{sources}/web.jsonl=0.5,{again}=0.5", val_tokens=4_000), tmp_path / "data")
    train, val = documents(dataset, "train"), documents(dataset, "val")
    assert val and not set(train) & set(val)


def test_validation_windows_have_one_source_each_in_the_mixtures_proportions(
    tmp_path: Path, sources: Path
) -> None:
    dataset = prepare(request(mixture(sources), val_tokens=3_000), tmp_path / "data")
    tokens = dataset.validation_tokens // (CONTEXT + 1) * CONTEXT
    validation = ValidationSet(dataset, CONTEXT, tokens)
    tokenizer = dataset.tokenizer()
    sizes: list[int] = []
    for name, (first, last) in validation.sections.items():
        rows = [pair[0] for pair in validation.batches(4, section=(first, last))]
        text = tokenizer.decode(np.concatenate(rows).reshape(-1)).replace("<|endoftext|>", " ")
        others = {"web", "code", "wiki"} - {name}
        assert name in text and not any(other in text for other in others)
        assert sum(map(len, rows)) == last - first
        split = [pair for rank in range(3) for pair in validation.batches(4, rank, 3, (first, last))]
        assert np.array_equal(np.concatenate([x for x, _ in split]), np.concatenate(rows))
        sizes.append(last - first)
    assert validation.windows == sum(sizes)
    for size, weight in zip(sizes, (0.6, 0.3, 0.1), strict=True):
        assert abs(size - weight * validation.windows) <= 2
    with pytest.raises(UsageError, match=r"of (web|code|wiki)|validation tokens"):
        ValidationSet(dataset, CONTEXT, 2 * tokens)


def test_altered_file_of_sources_is_noticed(tmp_path: Path, sources: Path) -> None:
    dataset = prepare(request(mixture(sources)), tmp_path / "data")
    file = dataset.directory / "sources_val.bin"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(SteepenError, match="was altered"):
        Dataset.open(dataset.directory).verify()


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ("web", "not a mixture"),
        ("web=x", "not a mixture"),
        ("a/web=1,b/web=1", "names of their own"),
        ("web=1", "takes 2 to 256"),
        ("web=1,code=-1", "a number above 0"),
        ("web=1,code=nan", "not a mixture"),
        ("missing.yaml", "cannot be read"),
    ],
)
def test_wrong_mixture_is_one_sentence(mix: str, says: str) -> None:
    with pytest.raises(SteepenError, match=says):
        parse_mixture(mix, ReadOptions())


def test_names_of_sources_without_a_file() -> None:
    text = "fineweb:sample-10BT=1,hf:owner/wiki:en@main=1,data/code/*.jsonl.gz=1,builtin:speeches=1"
    assert list(parse_mixture(text, ReadOptions())) == ["fineweb", "wiki", "code", "speeches"]


def test_mixture_of_a_hub_and_files_resumes_with_pinned_downloads(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub/owner/stories"
    for number in range(3):
        file = repository / f"data/train-{number}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"body": words("hub", 50 * number + i)}) + "\n" for i in range(50)]
        file.write_text("".join(lines))
    content = {
        "stories": {"source": "hf:owner/stories", "weight": 1, "field": "body"},
        "web": {"source": str(sources / "web.jsonl"), "weight": 1},
    }
    (tmp_path / "mix.yaml").write_text(json.dumps(content))
    monkeypatch.setattr(hugging_face, "FIRST_RETRY_SECONDS", 0.01)
    with HubServer(tmp_path / "hub", "owner/stories") as server:
        fetched = request(str(tmp_path / "mix.yaml"), hub=server.url, val_tokens=400)
        expected = prepare(fetched, tmp_path / "whole")
        server.break_after = len(server.fetched) + 2
        with pytest.raises(SteepenError, match="run the same command"):
            prepare(fetched, tmp_path / "data")
        assert (tmp_path / "data.partial/downloads/stories/listing.json").is_file()
        server.break_after = None
        dataset = prepare(fetched, tmp_path / "data")
    for file in expected.directory.glob("*.bin"):
        assert (dataset.directory / file.name).read_bytes() == file.read_bytes()
    assert dataset.manifest.source["sources"]["stories"]["revision"] == "a" * 40
    assert not (dataset.directory / "downloads").exists()
