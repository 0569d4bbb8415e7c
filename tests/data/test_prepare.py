"""Preparation: every document in exactly one split, and the same bytes after any interruption."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steepen.data import Dataset, Tokenizer, shard_writer
from steepen.data import prepare as prepare_module
from steepen.data.prepare import PrepareRequest, prepare
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import file_lock, is_locked

WriteJsonl = Callable[[Path, list[str]], Path]


def texts_of(dataset: Dataset, split: str) -> list[str]:
    """The documents of a split, decoded from its shards."""
    stream, tokenizer = dataset.tokens(split), dataset.tokenizer()
    ids = stream.read(0, len(stream))
    ends = dataset.document_ends(split).tolist()
    starts = [0, *ends][: len(ends)]
    assert all(ids[start] == tokenizer.end_of_text for start in starts)
    return [tokenizer.decode(ids[start + 1 : end]) for start, end in zip(starts, ends, strict=True)]


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_every_document_is_in_exactly_one_split_in_order(dataset: Dataset, documents: list[str]) -> None:
    train, val = texts_of(dataset, "train"), texts_of(dataset, "val")
    assert sorted(train + val) == sorted(documents)
    assert not set(train) & set(val)
    assert train == [text for text in documents if text in set(train)]
    assert val == [text for text in documents if text in set(val)]


def test_manifest_counts_match_the_shards(dataset: Dataset, documents: list[str]) -> None:
    manifest, gpt2 = dataset.manifest, Tokenizer.gpt2()
    assert sum(split.documents for split in manifest.splits.values()) == len(documents)
    tokens = sum(len(gpt2.encode(text)) + 1 for text in documents)
    assert sum(split.tokens for split in manifest.splits.values()) == tokens
    assert manifest.splits["val"].tokens >= 2_000
    assert manifest.tokenizer.sha256 == gpt2.identity
    assert [shard.tokens for shard in manifest.shards if shard.split == "train"][:-1] == [5_000] * (
        manifest.splits["train"].tokens // 5_000
    )


def test_document_that_the_source_repeats_is_never_in_both_splits(
    tmp_path: Path, documents: list[str], write_jsonl: WriteJsonl
) -> None:
    repeated = [text for _ in range(3) for text in documents]
    source = write_jsonl(tmp_path / "repeated.jsonl", repeated)
    dataset = prepare(PrepareRequest((str(source),), val_tokens=1_000), tmp_path / "out")
    train, val = texts_of(dataset, "train"), texts_of(dataset, "val")
    assert not set(train) & set(val)
    assert set(train) | set(val) == set(documents)
    assert len(val) == len(set(val))
    assert dataset.manifest.notes["documents_dropped"] == 2 * len(val)


@pytest.mark.parametrize("val_tokens", [None, 500])
def test_separate_validation_files_take_nothing_from_training(
    tmp_path: Path, documents: list[str], write_jsonl: WriteJsonl, val_tokens: int | None
) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", documents)
    apart = write_jsonl(
        tmp_path / "apart.jsonl", [*(f"Apart: {text}" for text in documents[:50]), documents[7]]
    )
    request = PrepareRequest((str(train),), val_source=(str(apart),), val_tokens=val_tokens)
    dataset = prepare(request, tmp_path / "out")
    val = texts_of(dataset, "val")
    if val_tokens is None:
        assert val == [*(f"Apart: {text}" for text in documents[:50]), documents[7]]
        assert texts_of(dataset, "train") == documents[:7] + documents[8:]
    else:
        assert 500 <= dataset.manifest.splits["val"].tokens < 900
        assert texts_of(dataset, "train") == documents


def test_identity_depends_on_content_not_location(
    tmp_path: Path, dataset: Dataset, documents: list[str], write_jsonl: WriteJsonl
) -> None:
    elsewhere = write_jsonl(tmp_path / "other_name.jsonl", documents)
    request = PrepareRequest((str(elsewhere),), val_tokens=2_000, shard_tokens=5_000)
    assert prepare(request, tmp_path / "same", threads=1).identity == dataset.identity
    changed = write_jsonl(tmp_path / "changed.jsonl", [*documents[:-1], documents[-1] + " More."])
    assert prepare(
        PrepareRequest((str(changed),), val_tokens=2_000, shard_tokens=5_000), tmp_path / "c"
    ).identity != (dataset.identity)


def test_threads_do_not_change_a_byte(tmp_path: Path, dataset: Dataset, corpus: Path) -> None:
    request = PrepareRequest((str(corpus),), val_tokens=2_000, shard_tokens=5_000)
    one = prepare(request, tmp_path / "one", threads=1)
    many = prepare(request, tmp_path / "many", threads=7)
    assert files_of(one.directory) == files_of(many.directory) == files_of(dataset.directory)


def test_max_tokens_stops_after_the_document_that_reaches_it(tmp_path: Path, corpus: Path) -> None:
    dataset = prepare(PrepareRequest((str(corpus),), max_tokens=3_000, val_tokens=500), tmp_path / "out")
    assert 3_000 <= dataset.manifest.splits["train"].tokens < 3_400
    assert dataset.manifest.splits["val"].tokens > 0


def test_without_validation_everything_is_for_training(tmp_path: Path, corpus: Path) -> None:
    dataset = prepare(PrepareRequest((str(corpus),), val_tokens=0), tmp_path / "out")
    assert dataset.manifest.splits["val"].tokens == 0
    assert len(dataset.tokens("val")) == 0
    dataset.verify()


def test_trained_tokenizer_is_saved_with_the_shards_and_part_of_their_identity(
    tmp_path: Path, corpus: Path, documents: list[str]
) -> None:
    dataset = prepare(PrepareRequest((str(corpus),), tokenizer="bpe:512"), tmp_path / "a")
    other = prepare(PrepareRequest((str(corpus),), tokenizer="bpe:384"), tmp_path / "b")
    assert dataset.vocabulary == dataset.tokenizer().size == 512
    assert (other.vocabulary, other.padded_vocabulary) == (384, 384)
    assert dataset.identity != other.identity
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "val")) == sorted(documents)


def test_running_again_on_finished_data_changes_nothing(tmp_path: Path, corpus: Path) -> None:
    request = PrepareRequest((str(corpus),))
    first = prepare(request, tmp_path / "out")
    before = {file: file.stat().st_mtime_ns for file in first.directory.iterdir()}
    assert prepare(request, tmp_path / "out").identity == first.identity
    assert before == {file: file.stat().st_mtime_ns for file in first.directory.iterdir()}
    with pytest.raises(UsageError, match="already holds prepared data"):
        prepare(PrepareRequest((str(corpus),), tokenizer="bpe:300"), tmp_path / "out")


def test_directory_with_other_files_is_not_touched(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not prepared data"):
        prepare(PrepareRequest((str(corpus),)), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]


class Interrupted(Exception):
    """Raised by a test in the middle of a preparation."""


def interrupt_after(calls: int) -> Callable[..., None]:
    left = [calls]

    def report(*_: Any, **__: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted

    return report


@pytest.fixture
def fine_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal entry after every group, and small groups."""
    monkeypatch.setattr("steepen.data.tokenize_source.JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 2_000)


@pytest.mark.usefixtures("fine_journal")
@pytest.mark.parametrize(("tokenizer", "max_tokens"), [("gpt2", None), ("gpt2", 15_000), ("bpe:512", None)])
def test_interrupted_preparation_ends_with_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer: str, max_tokens: int | None
) -> None:
    request = PrepareRequest(
        (str(corpus),), tokenizer=tokenizer, val_tokens=2_000, max_tokens=max_tokens, shard_tokens=1_000
    )
    whole = prepare(request, tmp_path / "whole")
    stops = 0
    while not (tmp_path / "out").exists():
        try:
            prepare(request, tmp_path / "out", interrupt_after(10))
        except Interrupted:
            stops += 1
            assert stops < 100
            with pytest.raises(UsageError, match="not finished"):
                Dataset.open(tmp_path / "out")
    assert stops >= 3
    assert files_of(tmp_path / "out") == files_of(whole.directory)
    assert not (tmp_path / "out.partial").exists()


def test_preparation_killed_at_random_ends_with_the_same_bytes(
    tmp_path: Path, documents: list[str], write_jsonl: WriteJsonl, environment: dict[str, str]
) -> None:
    source = write_jsonl(tmp_path / "long.jsonl", [f"{n} {text}" for n in range(20) for text in documents])
    request = PrepareRequest((str(source),), val_tokens=7_000, shard_tokens=50_000)
    whole = prepare(request, tmp_path / "whole")
    code = (
        "from steepen.data import tokenize_source; from steepen.data.prepare import PrepareRequest, prepare; "
        "tokenize_source.JOURNAL_SECONDS = 0.01; "
        f"request = PrepareRequest(({str(source)!r},), val_tokens=7_000, shard_tokens=50_000); "
        f"prepare(request, {str(tmp_path / 'out')!r}, threads=1)"
    )
    journal = tmp_path / "out.partial" / "journal.json"

    def journalled() -> bytes:
        try:
            return journal.read_bytes()
        except FileNotFoundError:  # not begun, or finished and renamed
            return b""

    choose = random.Random(time.time_ns())
    killed = 0
    while not (tmp_path / "out").exists():
        began = journalled()
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        if killed < 2:  # past start-up, which is not what is tested: once this process has journalled
            while process.poll() is None and journalled() in {began, b""}:
                time.sleep(0.002)
            time.sleep(choose.uniform(0, 0.03))
            process.kill()
        killed += process.wait() == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL)
    assert killed, "it was never killed in the middle"
    assert files_of(tmp_path / "out") == files_of(whole.directory)


@pytest.mark.usefixtures("fine_journal")
def test_different_request_does_not_resume_an_unfinished_one(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(Interrupted):
        prepare(PrepareRequest((str(corpus),)), tmp_path / "out", interrupt_after(5))
    other = PrepareRequest((str(corpus),), val_tokens=3_000)
    with pytest.raises(UsageError, match="`restart`"):
        prepare(other, tmp_path / "out")
    prepare(other, tmp_path / "fresh")
    assert files_of(prepare(other, tmp_path / "out", restart=True).directory) == files_of(tmp_path / "fresh")


@pytest.mark.usefixtures("fine_journal")
@pytest.mark.parametrize(
    "damaged",
    [
        "train_00000.bin",
        "train_00001.bin",
        "documents_train.bin",
        "documents_val.bin",
        "validation_documents.bin",
        "journal.json",
    ],
)
def test_damaged_unfinished_preparation_is_not_resumed(tmp_path: Path, corpus: Path, damaged: str) -> None:
    request = PrepareRequest((str(corpus),), shard_tokens=3_000, val_tokens=1_000)
    with pytest.raises(Interrupted):
        prepare(request, tmp_path / "out", interrupt_after(30))
    path = tmp_path / "out.partial" / damaged
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SteepenError, match=damaged):
        prepare(request, tmp_path / "out")
    prepare(request, tmp_path / "out", restart=True).verify()


@pytest.mark.usefixtures("fine_journal")
def test_kill_between_manifest_and_rename_needs_only_the_rename(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = PrepareRequest((str(corpus),))
    whole = prepare(request, tmp_path / "whole")

    def killed(*_: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "sync", killed)
        with pytest.raises(Interrupted):
            prepare(request, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out.partial" / ".manifest.json.123.tmp").write_text("from an earlier kill")
    assert files_of(prepare(request, tmp_path / "out").directory) == files_of(whole.directory)


def test_second_preparation_of_one_directory_waits_for_the_first(tmp_path: Path, corpus: Path) -> None:
    request = PrepareRequest((str(corpus),))
    stages: list[str] = []
    second: list[Future[Dataset]] = []
    with ThreadPoolExecutor(1) as pool:

        def see(stage: str, *_: Any, **__: Any) -> None:
            stages.append(stage)

        def intrude(*_: Any, tokens: int | None = None, **__: Any) -> None:
            if not second and tokens == 0 and (tmp_path / "out.partial/journal.json").exists():
                second.append(pool.submit(prepare, request, tmp_path / "out", see))
                while not any(stage.startswith("waiting for process") for stage in stages):
                    assert not second[0].done()

        first = prepare(request, tmp_path / "out", intrude, threads=1)
        assert second[0].result().identity == first.identity
    assert not any(stage == "tokenizing" for stage in stages)
    assert not (tmp_path / "out.partial").exists()


def test_full_disk_is_reported_and_leaves_no_finished_directory(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steepen.requests.app import main

    def full(path: Path, mode: str, **more: Any) -> Any:
        return open("/dev/full" if "w" in mode else path, mode, **more)  # noqa: PTH123

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "open", full, raising=False)
        assert main(["data", "prepare", str(corpus), "--out", str(tmp_path / "out"), "--json"]) == 1
    assert not (tmp_path / "out").exists()
    prepare(PrepareRequest((str(corpus),)), tmp_path / "out").verify()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, documents: list[str], write_jsonl: WriteJsonl, environment: dict[str, str]
) -> None:
    code = (
        "import re, sys; from steepen.data.prepare import PrepareRequest, prepare; "
        "prepare(PrepareRequest((sys.argv[1],)), sys.argv[2], threads=1); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )

    def peak_kilobytes(copies: int) -> int:
        texts = [f"{n} {text}" for n in range(copies) for text in documents]
        source = write_jsonl(tmp_path / f"{copies}.jsonl", texts)
        command = [sys.executable, "-c", code, str(source), str(tmp_path / f"out{copies}")]
        run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return int(run.stdout)

    small, large = peak_kilobytes(50), peak_kilobytes(200)
    grown = os.path.getsize(tmp_path / "200.jsonl") - os.path.getsize(tmp_path / "50.jsonl")  # noqa: PTH202
    assert grown > 15_000_000
    assert (large - small) * 1024 < 0.3 * grown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_tokens": -1}, "val_tokens is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"source": ()}, "no source given"),
        ({"tokenizer": "gpt5"}, "unknown tokenizer 'gpt5'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"dtype": "uint16", "tokenizer": "bpe:100000"}, "100,000 ids does not fit uint16; use uint32"),
    ],
)
def test_invalid_request_is_rejected_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PrepareRequest(**{"source": ("nowhere",), **options})


def test_uint32_ids_work_like_uint16(tmp_path: Path, corpus: Path, dataset: Dataset) -> None:
    request = PrepareRequest((str(corpus),), val_tokens=2_000, shard_tokens=5_000, dtype="uint32")
    wide = prepare(request, tmp_path / "out")
    wide.verify()
    n = len(dataset.tokens("train"))
    assert wide.manifest.dtype == "uint32"
    assert np.array_equal(wide.tokens("train").read(0, n), dataset.tokens("train").read(0, n))


def test_copied_directory_is_the_same_data(tmp_path: Path, dataset: Dataset) -> None:
    copy = Path(shutil.copytree(dataset.directory, tmp_path / "copy"))
    assert Dataset.open(copy).identity == dataset.identity
    Dataset.open(copy).verify()


def one_text(seed: int, paragraphs: int) -> str:
    """Plain text without separators."""
    choose = random.Random(seed)
    words = ["law", "loss", "compute", "token", "scale", "grows", "falls", "depth", "width"]
    return "\n\n".join(" ".join(choose.choices(words, k=40)) for _ in range(paragraphs))


@pytest.mark.parametrize("max_tokens", [None, 6_000])
@pytest.mark.parametrize("seed", range(6))
def test_few_large_documents_get_a_validation_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, max_tokens: int | None
) -> None:
    monkeypatch.setattr("steepen.data.sources.readers.MAX_TEXT_CHARACTERS", 4096)
    (tmp_path / "big.txt").write_text(one_text(seed, 340))
    request = PrepareRequest((str(tmp_path / "big.txt"),), tokenizer="bpe:300", max_tokens=max_tokens)
    dataset = prepare(request, tmp_path / "out")
    splits, requested = dataset.manifest.splits, dataset.manifest.notes["validation_tokens_requested"]
    assert splits["val"].tokens >= requested > 0
    assert splits["train"].tokens > splits["val"].tokens
    assert not set(texts_of(dataset, "train")) & set(texts_of(dataset, "val"))


@pytest.mark.usefixtures("fine_journal")
def test_resumed_preparation_of_few_large_documents_splits_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.sources.readers.MAX_TEXT_CHARACTERS", 4096)
    for seed in range(4):
        source, out = tmp_path / f"{seed}.txt", tmp_path / f"{seed}"
        source.write_text(one_text(seed, 340))
        whole = prepare(PrepareRequest((str(source),)), tmp_path / f"whole{seed}")
        while not out.exists():
            with contextlib.suppress(Interrupted):
                prepare(PrepareRequest((str(source),)), out, interrupt_after(5))
        assert files_of(out) == files_of(whole.directory)


@pytest.mark.parametrize("seed", range(6))
def test_validation_never_takes_the_last_document(tmp_path: Path, write_jsonl: WriteJsonl, seed: int) -> None:
    source = write_jsonl(tmp_path / "two.jsonl", [one_text(seed, 20), one_text(seed + 100, 20)])
    dataset = prepare(PrepareRequest((str(source),), tokenizer="bpe:270", val_tokens=10**6), tmp_path / "out")
    assert [split.documents for split in dataset.manifest.splits.values()] == [1, 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [[], ["--val-tokens", "20000"], ["--tokenizer", "bpe:300"]])
def test_source_of_one_document_is_rejected_with_remedies_that_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], seed: int
) -> None:
    from steepen.requests.app import main

    source = tmp_path / "one.txt"
    source.write_text(one_text(seed, 100))
    command = ["data", "prepare", str(source), "--json", *options]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is one document" in said and "bpe:257" not in said
    assert all(option in said for option in ("--separator", "--val-source", "--val-tokens 0"))
    assert [file.name for file in tmp_path.iterdir()] == ["one.txt"]
    (tmp_path / "other.txt").write_text(one_text(seed + 100, 5))
    remedies = (
        ["--separator", "\\n\\n"],
        ["--val-source", str(tmp_path / "other.txt")],
        ["--val-tokens", "0"],
    )
    for number, remedy in enumerate(remedies):
        assert main([*command, *remedy, "--out", str(tmp_path / f"{number}")]) == 0


def test_validation_files_without_text_are_rejected(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match="`val_source` has no text"):
        prepare(PrepareRequest((str(corpus),), (str(tmp_path / "empty.txt"),)), tmp_path / "out")


@pytest.mark.parametrize("place", ["resolve_source", "_lock"])
def test_second_process_that_is_delayed_uses_what_the_first_prepared(
    place: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, out = PrepareRequest((str(corpus),), val_tokens=1_000), tmp_path / "out"
    original = getattr(prepare_module, place)

    def delayed(*words: Any, **options: Any) -> Any:
        monkeypatch.setattr(prepare_module, place, original)
        prepare(request, out)  # the other process, meanwhile
        (tmp_path / "changed").write_text(str((out / "manifest.json").stat().st_mtime_ns))
        return original(*words, **options)

    monkeypatch.setattr(prepare_module, place, delayed)
    found = prepare(request, out)
    assert found.directory == out and not (tmp_path / "out.partial").exists()
    assert (tmp_path / "changed").read_text() == str((out / "manifest.json").stat().st_mtime_ns)


def test_lock_file_that_its_holder_moved_away_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    path, stale = tmp_path / "lock", tmp_path / "stale"
    original, opened = Path.open, []

    def open_and_move(self: Path, *words: Any, **options: Any) -> Any:
        file = original(self, *words, **options)
        if not opened:  # the holder moves the file between opening and locking
            opened.append(self.rename(stale))
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_and_move)
        with file_lock(path) as holder:
            assert holder is None and is_locked(path) and not is_locked(stale)
