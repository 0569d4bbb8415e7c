"""fineweb:paper and fineweb-edu:paper, from a folder and a server laid out like the Hub."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hub_server import HubServer
from steepen.data import Dataset, Tokenizer
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources import hub
from steepen.errors import UsageError

REPOSITORIES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}


def write_files(root: Path, name: str, folder: str, files: list[list[str]]) -> None:
    """Files named as on the Hub, of which the first by name is not the first written."""
    for number in reversed(range(len(files))):
        path = root / REPOSITORIES[name] / folder / f"{number:03d}_00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": files[number]}), path)


def texts(first: int, count: int) -> list[str]:
    words = ["the", "law", "of", "loss", "and", "compute", "grows", "over", "depth", "café", "42"]
    return [
        f"{number}. {' '.join(random.Random(number).choices(words, k=100))}."
        for number in range(first, first + count)
    ]


def tokens_of(dataset: Dataset, split: str) -> list[int]:
    return dataset.tokens(split).read(0, len(dataset.tokens(split))).tolist()


def stream(documents: list[str]) -> list[int]:
    """The tokens of documents as the authors store them: 50256 before each."""
    gpt2 = Tokenizer.gpt2()
    return [token for text in documents for token in (50_256, *gpt2.encode(text))]


@pytest.fixture
def fineweb(tmp_path: Path) -> tuple[Path, list[str], list[str]]:
    """A folder laid out like the Hub, and the validation and training documents the paper takes from it."""
    root = tmp_path / "hub"
    validation = texts(0, 40)
    beginning = Tokenizer.gpt2().decode(np.array(Tokenizer.gpt2().encode(validation[3])[:70]))
    shares_70_tokens = beginning + " And then something else entirely."
    assert Tokenizer.gpt2().encode(shares_70_tokens)[:64] == Tokenizer.gpt2().encode(validation[3])[:64]
    shares_few_tokens = validation[4][:30] + " But soon something else entirely."
    train = [texts(100, 30), [*texts(200, 20), shares_70_tokens, shares_few_tokens, validation[5]]]
    write_files(root, "fineweb", "sample/10BT", [validation[:20], validation[20:], ["never read"]])
    write_files(root, "fineweb", "sample/100BT", train)
    kept = [text for file in train for text in file if text not in (shares_70_tokens, validation[5])]
    return root, validation, kept


def test_request_of_the_papers_fineweb_is_complete() -> None:
    request = PrepareRequest(("fineweb:paper",))
    assert request.val_source == ("fineweb:paper-validation",)
    assert (request.val_tokens, request.max_tokens) == (10_000_000, 30_000_000_000)
    assert (request.dedup_tokens, request.clip_validation, request.tokenizer) == (64, True, "gpt2")
    files = hub.hub_files("fineweb", "paper")
    assert (files.folder, files.revision) == ("sample/100BT", "9bb295ddab0e05d785b879661af7260fed5140fc")
    files = hub.hub_files("fineweb", "paper-validation")
    assert (files.folder, files.revision) == ("sample/10BT", "9bb295ddab0e05d785b879661af7260fed5140fc")


def test_request_of_the_papers_fineweb_edu_is_complete() -> None:
    request = PrepareRequest(("fineweb-edu:paper",))
    assert request.val_source == ("fineweb-edu:paper-validation",)
    assert (request.val_tokens, request.max_tokens) == (10_000_000, 40_000_000_000)
    assert (request.dedup_tokens, request.clip_validation) == (0, False)
    for config, first, last in (("paper", 1, None), ("paper-validation", 0, 1)):
        files = hub.hub_files("fineweb-edu", config)
        assert (files.folder, files.first, files.last) == ("sample/100BT", first, last)
        assert files.revision == "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"


def test_fineweb_validates_on_the_first_tokens_and_leaves_their_documents_out_of_training(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]]
) -> None:
    root, validation, train = fineweb
    wanted = len(stream(validation[:25])) - 5
    request = PrepareRequest(("fineweb:paper",), val_tokens=wanted, hub=str(root))
    dataset = prepare(request, tmp_path / "out")
    dataset.verify()
    assert tokens_of(dataset, "val") == stream(validation[:25])[:-5]
    assert tokens_of(dataset, "train") == stream(train)
    assert dataset.manifest.notes["documents_dropped"] == 2
    assert dataset.manifest.request["dedup_tokens"] == 64


def test_copy_of_the_clipped_last_validation_document_stays_in_the_training_data(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]]
) -> None:
    """Its 48 tokens have another hash than the 64 tokens with which the copy begins."""
    root, validation, train = fineweb
    before = len(stream(validation[:5]))
    for tokens, kept in ((before + 49, 1), (before + 66, 0)):
        request = PrepareRequest(("fineweb:paper",), val_tokens=tokens, hub=str(root))
        dataset = prepare(request, tmp_path / str(tokens))
        assert len(dataset.tokens("val")) == tokens
        # validation[5] is the last document of the training files.
        assert tokens_of(dataset, "train")[-20:] == stream([*train, *[validation[5]] * kept])[-20:]


def test_training_documents_with_the_same_beginning_stay_without_deduplication(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]]
) -> None:
    root, validation, train = fineweb
    plain = PrepareRequest(
        ("fineweb:sample-100BT",), ("fineweb:sample-10BT",), val_tokens=10_000, hub=str(root)
    )
    dataset = prepare(plain, tmp_path / "out")
    assert dataset.manifest.splits["train"].documents == len(train) + 1  # equal texts are dropped anyway
    assert dataset.manifest.splits["val"].documents == len(validation) + 1


def test_max_tokens_cuts_the_papers_stream(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]]
) -> None:
    root, _, train = fineweb
    request = PrepareRequest(("fineweb:paper",), max_tokens=2_000, hub=str(root))
    tokens = tokens_of(prepare(request, tmp_path / "out"), "train")
    assert 2_000 <= len(tokens) < 2_300
    assert tokens == stream(train)[: len(tokens)]


def test_fineweb_edu_validates_on_its_first_file_and_trains_on_the_others(tmp_path: Path) -> None:
    files = [texts(0, 20), texts(100, 20), texts(200, 20)]
    write_files(tmp_path / "hub", "fineweb-edu", "sample/100BT", files)
    dataset = prepare(PrepareRequest(("fineweb-edu:paper",), hub=str(tmp_path / "hub")), tmp_path / "out")
    assert tokens_of(dataset, "val") == stream(files[0])
    assert tokens_of(dataset, "train") == stream(files[1] + files[2])


def test_fineweb_edu_keeps_training_documents_that_validation_has_too(tmp_path: Path) -> None:
    files = [texts(0, 20), [*texts(100, 20), texts(3, 1)[0]]]
    write_files(tmp_path / "hub", "fineweb-edu", "sample/100BT", files)
    dataset = prepare(PrepareRequest(("fineweb-edu:paper",), hub=str(tmp_path / "hub")), tmp_path / "out")
    assert tokens_of(dataset, "train") == stream(files[1])
    assert dataset.manifest.notes["documents_dropped"] == 0


def test_server_is_asked_for_the_pinned_revision_and_the_files_that_are_needed(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 2_000)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUPS_PER_THREAD", 1)
    root, validation, _ = fineweb
    wanted = len(stream(validation[:5]))
    local = prepare(PrepareRequest(("fineweb:paper",), val_tokens=wanted, hub=str(root)), tmp_path / "local")
    with HubServer(root, REPOSITORIES["fineweb"]) as server:
        server.commits = {"main": "b" * 40, hub.FINEWEB_REVISION: hub.FINEWEB_REVISION}
        request = PrepareRequest(("fineweb:paper",), val_tokens=wanted, hub=server.url)
        fetched = prepare(request, tmp_path / "fetched", threads=1)
    assert fetched.identity == local.identity
    assert fetched.manifest.source["revision"] == hub.FINEWEB_REVISION
    assert fetched.manifest.source["validation"]["revision"] == hub.FINEWEB_REVISION
    assert server.fetched == [
        "sample/10BT/000_00000.parquet",
        "sample/100BT/000_00000.parquet",
        "sample/100BT/001_00000.parquet",
    ]


def test_any_config_can_be_read_at_a_revision(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]]
) -> None:
    with HubServer(fineweb[0], REPOSITORIES["fineweb"]) as server:
        server.commits = {"main": "b" * 40, "v1.4.0": "c" * 40}
        for config, commit in (("sample-10BT", "b" * 40), ("sample-10BT@v1.4.0", "c" * 40)):
            request = PrepareRequest((f"fineweb:{config}",), val_tokens=0, hub=server.url)
            found = prepare(request, tmp_path / config).manifest.source
            assert (found["revision"], found["name"]) == (commit, f"fineweb:{config}")


def test_interrupted_preparation_of_the_papers_data_ends_with_the_same_bytes(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.tokenize_source.JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 500)
    root, validation, _ = fineweb
    wanted = len(stream(validation[:25]))
    request = PrepareRequest(("fineweb:paper",), val_tokens=wanted, hub=str(root))
    whole = prepare(request, tmp_path / "whole")
    stops = 0

    class Interrupted(Exception):
        pass

    while not (tmp_path / "out").exists():
        reports = 0

        def report(*_: object, **__: object) -> None:
            nonlocal reports
            reports += 1
            if reports == 6:
                raise Interrupted

        try:
            prepare(request, tmp_path / "out", report, threads=1)
        except Interrupted:
            stops += 1
    assert stops > 5
    for file in whole.directory.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fineweb:paper@main", "has its own revision"),
        ("fineweb:sample-10BT@", "no revision after @"),
        ("fineweb:papers", "accepted are sample-10BT"),
    ],
)
def test_wrong_configs_are_rejected(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(PrepareRequest((name,), hub=str(tmp_path)), tmp_path / "out")


def test_deduplication_without_a_validation_source_is_rejected() -> None:
    with pytest.raises(UsageError, match="name one"):
        PrepareRequest(("corpus.txt",), dedup_tokens=64)


def test_papers_corpus_on_the_command_line(
    tmp_path: Path, fineweb: tuple[Path, list[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    from steepen.requests.app import main

    words = ["fineweb:paper", "--out", str(tmp_path / "out"), "--hub", str(fineweb[0]), "--max-tokens", "2K"]
    assert main(["data", "prepare", *words, "--json"]) == 0
    request = json.loads(capsys.readouterr().out)["request"]
    assert (request["val_tokens"], request["max_tokens"], request["dedup_tokens"]) == (10_000_000, 2_000, 64)
