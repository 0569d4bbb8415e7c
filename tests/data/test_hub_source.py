"""Hub sources, against a small local server with the API of the Hugging Face Hub."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clean_place import no_hang
from hub_server import HubServer
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources import hub as hugging_face
from steepen.data.sources.hub_card import select_files
from steepen.data.sources.readers import ReadOptions
from steepen.errors import SteepenError, UsageError

REPOSITORY = "HuggingFaceFW/fineweb-edu"
COMMIT = "a" * 40


@pytest.fixture
def tree(tmp_path: Path, documents: list[str]) -> Path:
    """A directory laid out like the hub: OWNER/NAME/sample/10BT/*.parquet and one crawl."""
    root = tmp_path / "hub"
    for number in range(4):
        path = root / REPOSITORY / f"sample/10BT/{number:03d}_00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = documents[100 * number : 100 * (number + 1)]
        table = pa.table({"text": texts, "url": ["https://example.org"] * 100, "token_count": [7] * 100})
        pq.write_table(table, path, row_group_size=40)
    crawl = root / REPOSITORY / "data/CC-MAIN-2024-10/train-00000.parquet"
    crawl.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": documents[:50]}), crawl)
    return root


@pytest.fixture
def hub(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hugging_face, "FIRST_RETRY_SECONDS", 0.01)
    with HubServer(tree, REPOSITORY) as server:
        yield server


def request(hub: str, name: str = "fineweb-edu:sample-10BT", **options: Any) -> PrepareRequest:
    return PrepareRequest((name,), hub=hub, **options)


def test_directory_of_the_same_layout_reads_like_its_files(tmp_path: Path, tree: Path) -> None:
    named = prepare(request(str(tree), val_tokens=0), tmp_path / "named")
    files = PrepareRequest((f"{tree}/{REPOSITORY}/sample/10BT/*.parquet",), val_tokens=0)
    assert named.identity == prepare(files, tmp_path / "files").identity
    assert named.manifest.source["name"] == "fineweb-edu:sample-10BT"


def test_hub_gives_what_the_directory_gives(tmp_path: Path, tree: Path, hub: HubServer) -> None:
    fetched = prepare(request(hub.url, val_tokens=0), tmp_path / "fetched")
    assert fetched.identity == prepare(request(str(tree), val_tokens=0), tmp_path / "local").identity
    assert fetched.manifest.source["revision"] == COMMIT
    assert [Path(name).name for name in hub.fetched] == [f"00{n}_00000.parquet" for n in range(4)]
    names = {file.name for file in fetched.directory.iterdir()}
    assert names == {
        "manifest.json",
        "tokenizer.json",
        "train_00000.bin",
        "documents_train.bin",
        "documents_val.bin",
        "blocks_train.bin",
        "blocks_val.bin",
    }, "downloads are not kept"


def test_only_the_files_that_are_needed_are_downloaded(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 2_000)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUPS_PER_THREAD", 1)
    # With many threads, read-ahead may request the next file before the token count is reached.
    prepare(request(hub.url, max_tokens=3_000, val_tokens=0), tmp_path / "out", threads=1)
    assert len(hub.fetched) == 1


def test_crawl_can_be_named(tmp_path: Path, hub: HubServer) -> None:
    dataset = prepare(request(hub.url, "fineweb-edu:CC-MAIN-2024-10", val_tokens=0), tmp_path / "out")
    assert dataset.manifest.splits["train"].documents == 50


def test_short_outage_is_retried(tmp_path: Path, hub: HubServer) -> None:
    hub.failures = 2
    assert prepare(request(hub.url), tmp_path / "out").manifest.splits["train"].documents > 0


def test_preparation_resumes_at_the_pinned_commit_after_an_outage(
    tmp_path: Path, tree: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.tokenize_source.JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 2_000)
    hub.break_after = 2
    with pytest.raises(
        SteepenError, match=r"cannot download sample/10BT/002_00000\.parquet .*same command again"
    ):
        prepare(request(hub.url, val_tokens=500), tmp_path / "out", threads=1)
    assert not (tmp_path / "out").exists()
    hub.break_after, hub.commits["main"] = None, "b" * 40  # meanwhile the repository has moved on
    hub.fetched.clear()
    continued = prepare(request(hub.url, val_tokens=500), tmp_path / "out")
    assert [Path(name).name for name in hub.fetched][-2:] == ["002_00000.parquet", "003_00000.parquet"]
    assert len(hub.fetched) <= 3
    shutil.rmtree(tmp_path / "out")
    hub.commits["main"] = COMMIT
    assert continued.identity == prepare(request(hub.url, val_tokens=500), tmp_path / "out").identity


def test_tokenizer_can_be_trained_on_the_hub(tmp_path: Path, hub: HubServer) -> None:
    assert prepare(request(hub.url, tokenizer="bpe:400"), tmp_path / "out").vocabulary == 400


@pytest.mark.parametrize("name", ["fineweb:10BT", "fineweb-edu:sample-1BT", "fineweb:data"])
def test_unknown_config_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="accepted are sample-10BT"):
        prepare(request(str(tmp_path), name), tmp_path / "out")


def test_directory_without_the_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Parquet file under"):
        prepare(request(str(tmp_path)), tmp_path / "out")


def test_unreachable_hub_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "FIRST_RETRY_SECONDS", 0.0)
    with pytest.raises(SteepenError, match="check the network") as caught:
        prepare(request("http://127.0.0.1:9"), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.partial").exists()


OTHER = "lab/stories"
CARD = """---
license: mit
configs:
- config_name: long
  default: true
  data_files:
  - split: train
    path: long/*.jsonl
  - {split: validation, path: [held/long.jsonl.gz]}
- {config_name: short, data_files: "short/**"}
---
# Stories
"""


@pytest.fixture
def stories(tmp_path: Path, documents: list[str]) -> Path:
    """A data set with a card, JSON lines in several folders, and files that are no data."""
    top = tmp_path / "hub" / OTHER
    parts = {"long/a.jsonl": (0, 60), "long/b.jsonl": (60, 90), "short/c.jsonl": (90, 110)}
    for path, (first, last) in parts.items():
        lines = [json.dumps({"story": text}) for text in documents[first:last]]
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text("\n".join(lines))
    (top / "held").mkdir()
    held = "\n".join(json.dumps({"story": text}) for text in documents[200:230])
    (top / "held/long.jsonl.gz").write_bytes(gzip.compress(held.encode()))
    (top / "long/notes.py").write_text("not data")
    (top / "README.md").write_text(CARD)
    return tmp_path / "hub"


FIELD: dict[str, Any] = {"read_options": ReadOptions(field="story")}


def test_any_data_set_is_read_by_its_card(tmp_path: Path, stories: Path) -> None:
    """The default config from the Hub's API, and the same files from a directory; the token is nowhere."""
    names = {"": ("long/*.jsonl", 90), ":long": ("long/*.jsonl", 90), ":short:train": ("short/*.jsonl", 20)}
    token = "hf_" + "secret" * 5
    with HubServer(stories, OTHER) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        for number, (suffix, (files, count)) in enumerate(names.items()):
            name = f"hf:{OTHER}{suffix}"
            fetched = prepare(request(server.url, name, val_tokens=0, **FIELD), tmp_path / f"fetched{number}")
            assert fetched.manifest.source["revision"] == COMMIT
            assert fetched.manifest.splits["train"].documents == count
            plain = PrepareRequest((f"{stories}/{OTHER}/{files}",), val_tokens=0, **FIELD)
            assert fetched.identity == prepare(plain, tmp_path / f"files{number}").identity
            local = prepare(request(str(stories), name, val_tokens=0, **FIELD), tmp_path / f"local{number}")
            assert local.identity == fetched.identity
        assert token in server.authorizations
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(token.encode() in file.read_bytes() for file in written)


def test_split_of_a_data_set_can_be_the_validation_source(tmp_path: Path, stories: Path) -> None:
    held = (f"hf:{OTHER}:long:validation",)
    asked = PrepareRequest((f"hf:{OTHER}",), held, hub=str(stories), **FIELD)
    splits = prepare(asked, tmp_path / "out").manifest.splits
    assert (splits["train"].documents, splits["val"].documents) == (90, 30)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:stories", "write hf:OWNER/NAME"),
        (f"hf:{OTHER}:lon", "has no config 'lon'; the nearest are long"),
        (f"hf:{OTHER}:long:test", "no split 'test'; it has train, validation"),
        (f"hf:{OTHER}@", "write hf:OWNER/NAME"),
        ("hf:../etc:passwd", "write hf:OWNER/NAME"),
    ],
)
def test_wrong_name_of_a_data_set_is_one_sentence(
    name: str, sentence: str, tmp_path: Path, stories: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        prepare(request(str(stories), name, **FIELD), tmp_path / "out")


def test_files_without_a_card_are_split_by_their_names() -> None:
    paths = ["en/train-0.parquet", "en/val/0.jsonl.zst", "en/c4.json.gz", "de/test_1.parquet", "x.py"]
    assert select_files(paths, "", "a/b", "", "train") == ["en/c4.json.gz", "en/train-0.parquet"]
    assert select_files(paths, "", "a/b", "en", "validation") == ["en/val/0.jsonl.zst"]
    assert select_files(paths, "# no front matter", "a/b", "de", "test") == ["de/test_1.parquet"]
    with pytest.raises(UsageError, match="no folder 'fr'"):
        select_files(paths, "", "a/b", "fr", "train")


@pytest.mark.parametrize("files", ["3", "null", "true", "{train: a.txt}", "[1, [2]]", "[{split: train}]"])
def test_card_with_odd_files_is_one_sentence(files: str) -> None:
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n"
    with pytest.raises(UsageError, match="has no"):
        select_files(["a.txt"], card, "a/b", "", "train")


def test_card_of_empty_lines_is_read_at_once() -> None:
    with no_hang(60):
        assert select_files(["a.txt"], "---" + "\n" * 1_000_000 + "x", "a/b", "", "train") == ["a.txt"]


def test_file_named_as_the_listing_does_not_replace_it(tmp_path: Path, tree: Path, hub: HubServer) -> None:
    file = tree / REPOSITORY / "listing.json"
    file.write_text('{"text": "one"}\n')
    listing = hugging_face.HubListing(REPOSITORY, "", COMMIT, (("listing.json", file.stat().st_size),))
    documents = hugging_face.download_documents(
        listing, hub.url, tmp_path / "staging", print, "listing.json", ReadOptions(), 0
    )
    assert list(documents) == ["one"]
    assert json.loads((tmp_path / "staging/listing.json").read_text())["repository"] == REPOSITORY
