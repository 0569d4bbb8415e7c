"""File sources: text, JSON lines and Parquet, compressed or not; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources.readers import MAX_TEXT_CHARACTERS, ReadOptions, detect_format, read_documents
from steepen.errors import SteepenError, UsageError

WriteJsonl = Callable[[Path, list[str]], Path]


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


def packed(path: Path, content: bytes) -> Path:
    """Write content uncompressed, gzipped or as zstd, according to the file name."""
    pack = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


def lines_of(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def identity(tmp_path: Path, *source: Path | str) -> str:
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    request = PrepareRequest(tuple(map(str, source)), val_tokens=0)
    return prepare(request, out, threads=1).identity


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> str:
    """The identity every form of the corpus must have."""
    return identity(tmp_path_factory.mktemp("whole"), corpus)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_json_lines_read_the_same_with_any_compression(
    tmp_path: Path, documents: list[str], whole: str, ending: str
) -> None:
    path = packed(tmp_path / f"d.jsonl{ending}", lines_of(documents))
    assert identity(tmp_path, path) == whole


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_text_reads_the_same_with_any_compression(
    tmp_path: Path, documents: list[str], whole: str, ending: str
) -> None:
    path = packed(tmp_path / f"d.txt{ending}", "\n<|endoftext|>\n".join(documents).encode())
    assert identity(tmp_path, path) == whole


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_parquet_reads_the_same_with_any_codec(
    tmp_path: Path, documents: list[str], whole: str, compression: str
) -> None:
    table = pa.table({"id": list(range(len(documents))), "text": documents})
    pq.write_table(table, tmp_path / "d.parquet", compression=compression, row_group_size=70)
    assert identity(tmp_path, tmp_path / "d.parquet") == whole


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_multi_member_archives_are_read_to_the_end(tmp_path: Path, documents: list[str], ending: str) -> None:
    pack = gzip.compress if ending == ".gz" else zstd
    path = tmp_path / f"d.jsonl{ending}"
    path.write_bytes(pack(lines_of(documents[:100])) + pack(lines_of(documents[100:])))
    assert list(read_documents(path, ReadOptions())) == documents


def test_many_files_are_read_in_the_order_of_their_names(
    tmp_path: Path, documents: list[str], whole: str, write_jsonl: WriteJsonl
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in reversed(range(4)):
        write_jsonl(folder / f"part_{number}.jsonl", documents[100 * number : 100 * (number + 1)])
    (folder / "notes.log").write_text("not data")
    assert identity(tmp_path, f"{folder}/part_*.jsonl") == whole
    assert identity(tmp_path, folder) == whole
    assert identity(tmp_path, *sorted(folder.glob("*.jsonl"), reverse=True)) == whole


def test_text_can_be_in_another_field_or_a_binary_column(tmp_path: Path, documents: list[str]) -> None:
    lines = packed(tmp_path / "d.jsonl", lines_of(documents, "content"))
    assert list(read_documents(lines, ReadOptions(field="content"))) == documents
    pq.write_table(pa.table({"content": [text.encode() for text in documents]}), tmp_path / "d.parquet")
    assert list(read_documents(tmp_path / "d.parquet", ReadOptions(field="content"))) == documents


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl.gz", "d.parquet"])
def test_reading_can_begin_at_any_unit(tmp_path: Path, documents: list[str], name: str) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": documents}), path, row_group_size=33)
    else:
        content = "<|endoftext|>".join(documents).encode() if name == "d.txt" else lines_of(documents)
        packed(path, content)
    for start in (0, 1, 32, 33, 34, 399, 400):
        assert [text for text in read_documents(path, ReadOptions(), start) if text] == documents[start:]


def test_long_text_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path, documents: list[str]) -> None:
    text = "\n\n".join(documents * 12)
    assert len(text) > 2 * MAX_TEXT_CHARACTERS
    (tmp_path / "book.txt").write_text(text)
    parts = [part or "" for part in read_documents(tmp_path / "book.txt", ReadOptions())]
    assert all(len(part) <= MAX_TEXT_CHARACTERS for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(part[-1] in ".?" for part in parts)


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", " "])
def test_documents_do_not_depend_on_the_block_size(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    monkeypatch.setattr("steepen.data.sources.readers.MAX_TEXT_CHARACTERS", 300)
    path = packed(tmp_path / "d.txt", "<|endoftext|>".join(documents[:40]).encode())
    whole = list(read_documents(path, ReadOptions(separator=separator)))
    for block in (1, 13, 301, 1000):
        monkeypatch.setattr("steepen.data.sources.readers.BLOCK_BYTES", block)
        assert list(read_documents(path, ReadOptions(separator=separator))) == whole
    assert max(len(text or "") for text in whole) <= 300


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a\\ud800b and \\ud83d\\ude42"}\n')
    assert list(read_documents(tmp_path / "d.jsonl", ReadOptions())) == ["a\ufffdb and 🙂"]


def test_missing_file_midway_does_not_lose_finished_work(
    tmp_path: Path, documents: list[str], write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.tokenize_source.GROUP_CHARACTERS", 2_000)
    monkeypatch.setattr("steepen.data.tokenize_source.GROUPS_PER_THREAD", 1)
    monkeypatch.setattr("steepen.data.tokenize_source.JOURNAL_SECONDS", 0.0)
    first = write_jsonl(tmp_path / "a.jsonl", documents[:300])
    second = write_jsonl(tmp_path / "b.jsonl", documents[300:])
    request = PrepareRequest((f"{tmp_path}/*.jsonl",), val_tokens=0)
    hidden = tmp_path / "hidden"

    def hide(*_: object, **__: object) -> None:
        if second.exists():
            second.rename(hidden)

    with pytest.raises(UsageError, match=r"cannot read .*b\.jsonl"):
        prepare(request, tmp_path / "out", hide, threads=1)
    hidden.rename(second)
    assert (tmp_path / "out.partial" / "train_00000.bin").stat().st_size > 10_000
    continued = prepare(request, tmp_path / "out")
    assert continued.identity == prepare(request, tmp_path / "again").identity
    assert first.exists()


def test_multibyte_character_across_blocks_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.data.sources.readers.BLOCK_BYTES", 7)
    text = "naïve 日本語 🙂 " * 20
    (tmp_path / "d.txt").write_text(text)
    assert list(read_documents(tmp_path / "d.txt", ReadOptions())) == [text.strip()]


def test_empty_units_are_skipped_and_counted(tmp_path: Path, documents: list[str]) -> None:
    path = tmp_path / "d.jsonl"
    rows = [{"text": None}, {"text": "  \n"}, *({"text": text} for text in documents)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    dataset = prepare(PrepareRequest((str(path),)), tmp_path / "out")
    assert sum(split.documents for split in dataset.manifest.splits.values()) == len(documents)
    assert dataset.manifest.notes["empty_units"] >= 2


def fails(tmp_path: Path, source: str, message: str, **options: object) -> None:
    """Preparing must fail with one sentence, and leave no directory that looks finished."""
    with pytest.raises(SteepenError, match=message) as caught:
        prepare(PrepareRequest((source,), **options), tmp_path / "out")  # pyright: ignore[reportArgumentType]
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", ")"))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists(), "nothing was done, so nothing should be left"


def test_missing_source_is_rejected(tmp_path: Path) -> None:
    fails(tmp_path, str(tmp_path / "nothing*.txt"), "nothing matches source")
    (tmp_path / "empty").mkdir()
    fails(tmp_path, str(tmp_path / "empty"), "has no .txt")
    assert not (tmp_path / "out.partial").exists()


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    fails(tmp_path, str(tmp_path / "gone.jsonl"), r"cannot read .*gone\.jsonl \(No such file")


@pytest.mark.parametrize("content", ["", "\n\n  \n", "<|endoftext|>"])
def test_empty_source_is_rejected_and_leaves_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.txt").write_text(content)
    fails(tmp_path, str(tmp_path / "empty.txt"), "no text to train on")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl", "d.parquet"])
def test_invalid_utf8_is_named_or_replaced_on_request(tmp_path: Path, name: str) -> None:
    path, bad = tmp_path / name, b"caf\xe9 and more"
    if name == "d.parquet":
        column = pa.array([b"fine", bad], pa.binary()).view(pa.string())
        pq.write_table(pa.table({"text": column}), path)
    else:
        path.write_bytes(b'{"text": "fine"}\n{"text": "' + bad + b'"}\n' if name == "d.jsonl" else bad)
    fails(tmp_path, str(path), rf"{name}.* is not valid UTF-8; .*`replace_invalid`")
    replaced = [text for text in read_documents(path, ReadOptions(replace_invalid=True)) if text]
    assert replaced[-1] == "caf\ufffd and more"


def test_missing_field_error_lists_the_fields(tmp_path: Path, documents: list[str]) -> None:
    lines = packed(tmp_path / "d.jsonl", lines_of(documents, "body"))
    fails(tmp_path, str(lines), r"line 1 has no field 'text'; its fields are body")
    pq.write_table(pa.table({"body": documents}), tmp_path / "d.parquet")
    fails(tmp_path, str(tmp_path / "d.parquet"), r"d\.parquet has no field 'text'; its fields are body")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "line 2 has int, not text, in field 'text'"),
        ('{"text": "open', "line 2 is not JSON"),
        ('["text"]', "line 2 is not a JSON object"),
        ("[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    fails(tmp_path, str(tmp_path / "d.jsonl"), message)


def test_column_of_numbers_is_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "d.parquet")
    fails(tmp_path, str(tmp_path / "d.parquet"), "has int64, not text, in field 'text'")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_truncated_file_is_named(tmp_path: Path, documents: list[str], ending: str) -> None:
    path = packed(tmp_path / f"d.jsonl{ending}", lines_of(documents))
    path.write_bytes(path.read_bytes()[:-200])
    fails(tmp_path, str(path), rf"d\.jsonl\{ending}")


def test_invalid_parquet_file_is_named(tmp_path: Path, documents: list[str]) -> None:
    path = tmp_path / "d.parquet"
    path.write_text("not parquet at all")
    fails(tmp_path, str(path), r"cannot read .*d\.parquet as Parquet")
    pq.write_table(pa.table({"text": documents}), path)
    path.write_bytes(path.read_bytes()[:-50])
    fails(tmp_path, str(path), r"cannot read .*d\.parquet as Parquet")


def test_named_source_cannot_be_mixed_with_files(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(UsageError, match="cannot be mixed"):
        prepare(PrepareRequest(("builtin", str(corpus))), tmp_path / "out")


def test_counts_match_the_reference_corpus(tmp_path: Path, reference_data: Callable[[str], Path]) -> None:
    source = reference_data("corpus/val.parquet")
    dataset = prepare(PrepareRequest((str(source),), val_tokens=100_000), tmp_path / "out")
    counts = pq.read_table(source, columns=["gpt2_tokens"])["gpt2_tokens"].to_pylist()
    assert sum(split.documents for split in dataset.manifest.splits.values()) == len(counts)
    assert sum(split.tokens for split in dataset.manifest.splits.values()) == sum(counts) + len(counts)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"text": "one"}\n{"text": "two"}\n', "jsonl"),
        ('{\n  "text": "one"\n}\n', "text"),
        ("[1, 2]\n", "text"),
        ("", "text"),
        ("[" * 100_000, "text"),
    ],
)
def test_json_lines_are_detected_in_json_files(text: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    file.write_text(text)
    assert detect_format(file) == kind
    packed = tmp_path / "part.json.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert detect_format(packed) == kind
