"""Any tokenizer: of tiktoken, a tokenizer.json, a folder, the Hub or SentencePiece; nothing is downloaded."""

from __future__ import annotations

import base64
import json
import struct
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from tiktoken import registry
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from hub_server import HubServer
from steepen.data import Dataset, Tokenizer, ValidationSet
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.sources import hub as hugging_face
from steepen.data.sources.tokenizers import load_tokenizer
from steepen.data.tokenizer import byte_level
from steepen.errors import SteepenError, UsageError
from steepen.inference.hf_tokenizer import from_hugging_face, hugging_face_tokenizer

HARD = "Zürich, 7\u00a0km —\t\r\n  日本語 12345 don't WE'LL  \n\n x=1;  end "


def load(name: str | Path, hub: str | None = None) -> Tokenizer:
    found = load_tokenizer(str(name), hub)
    assert found is not None
    return found


def byte_level_library(documents: list[str], end: str = "<eos>") -> Library:
    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=[end, "<pad>"], show_progress=False
    )
    made.train_from_iterator(documents, trainer)
    return made


@pytest.fixture
def folder(tmp_path: Path, documents: list[str]) -> Path:
    """A folder as transformers saves it, with a separator that is not the last id."""
    path = tmp_path / "owner" / "words"
    path.mkdir(parents=True)
    byte_level_library(documents).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    return path


def test_data_of_a_tokenizer_folder_has_its_ids_and_its_separator(
    tmp_path: Path, folder: Path, corpus: Path, documents: list[str]
) -> None:
    request = PrepareRequest((str(corpus),), tokenizer=str(folder), val_tokens=0)
    dataset = prepare(request, tmp_path / "data")
    library = Library.from_file(str(folder / "tokenizer.json"))
    expected = [[0, *library.encode(text).ids] for text in documents]
    assert dataset.tokens("train").read(0, len(dataset.tokens("train"))).tolist() == [*chain(*expected)]
    tokenizer = dataset.tokenizer()
    assert (tokenizer.end_text, tokenizer.end_of_text) == ("<eos>", 0)
    assert dataset.vocabulary == 500 and dataset.padded_vocabulary == 512
    assert tokenizer.decode(tokenizer.encode(HARD)) == HARD
    assert int(tokenizer.lengths[tokenizer.encode(HARD)].sum()) == len(HARD.encode())
    assert 0 not in tokenizer.encode("a<eos>b") and tokenizer.decode(tokenizer.encode("a<eos>b")) == "a<eos>b"
    assert tokenizer.encode("x\ud800y") == tokenizer.encode("x\ufffdy")
    dataset.verify()


def test_changed_tokenizer_is_another_preparation(
    tmp_path: Path, folder: Path, corpus: Path, documents: list[str]
) -> None:
    request = PrepareRequest((str(corpus),), tokenizer=str(folder))
    first = prepare(request, tmp_path / "data")
    assert prepare(request, tmp_path / "data").identity == first.identity
    byte_level_library(documents[:50]).save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match="other options"):
        prepare(request, tmp_path / "data")


def test_hub_and_its_layout_in_a_directory_give_the_folders_tokenizer(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = load(folder)
    assert load("hf:owner/words", str(tmp_path)).identity == own.identity
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hugging_face, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    with HubServer(tmp_path, "owner/words") as server:
        found = load("hf:owner/words@main", server.url)
        assert server.authorizations == {"hf_private"}
    assert found.identity == own.identity
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert kept and not any(b"hf_private" in file.read_bytes() for file in kept)
    # Without the server: a pinned commit is read from the client's cache, anything else is an error at once.
    assert load(f"hf:owner/words@{'a' * 40}", server.url).identity == own.identity
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)  # it would try for half a minute
    for name in ("hf:owner/words", "hf:owner/other"):
        with pytest.raises(SteepenError, match=r"cannot download tokenizer\.json of owner/"):
            load(name, server.url)


def test_lone_tokenizer_json_needs_a_usual_separator(tmp_path: Path, documents: list[str]) -> None:
    byte_level_library(documents, "</s>").save(str(tmp_path / "good.json"))
    assert load(tmp_path / "good.json").end_text == "</s>"
    byte_level_library(documents, "<stop>").save(str(tmp_path / "bad.json"))
    with pytest.raises(UsageError, match="which token ends a text"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"type": "WordPiece"}, "WordPiece|cannot read"),
        ({"end_of_word_suffix": "</w>"}, "marks words"),
        (None, "is not a tokenizer"),
    ],
)
def test_unusable_tokenizer_is_one_sentence(
    tmp_path: Path, folder: Path, change: dict[str, Any] | None, says: str
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content = [] if change is None else {**content, "model": {**content["model"], **change}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=says):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load(folder)


# tiktoken


@pytest.fixture
def cl100k(tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """tiktoken's own cl100k_base with another file of ranks: its pattern, and special tokens after a gap."""
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext import openai_public

    trained = Tokenizer.train(documents, 600)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(trained.tokens)]
    (tmp_path / "ranks").write_text("".join(lines))
    monkeypatch.setattr(
        openai_public, "load_tiktoken_bpe", lambda *_, **__: load_tiktoken_bpe(str(tmp_path / "ranks"))
    )
    made = openai_public.cl100k_base()
    special = {"<|endoftext|>": 601, "<|fim_prefix|>": 602, "<|endofprompt|>": 620}
    monkeypatch.setattr(registry, "ENCODINGS", {})
    monkeypatch.setattr(
        registry, "ENCODING_CONSTRUCTORS", {"cl100k_base": lambda: {**made, "special_tokens": special}}
    )
    return tiktoken.get_encoding("cl100k_base")


def test_tiktoken_encoding_by_name_has_its_ids_here_and_exported(
    tmp_path: Path, cl100k: tiktoken.Encoding, corpus: Path, documents: list[str]
) -> None:
    dataset = prepare(PrepareRequest((str(corpus),), tokenizer="cl100k_base"), tmp_path / "data")
    tokenizer = Dataset.open(dataset.directory).tokenizer()
    assert (tokenizer.end_of_text, tokenizer.size) == (601, 602)
    exported = hugging_face_tokenizer(tokenizer)
    for text in (HARD, "a<|endoftext|>b", *documents[:50]):
        ids = cl100k.encode_ordinary(text)
        assert tokenizer.encode(text) == tokenizer.encode_array(text).tolist() == ids
        assert tokenizer.decode(ids) == text
        if "<|" not in text:
            assert exported.encode(text).ids == [601, *ids]
    (tmp_path / "tokenizer.json").write_text(exported.to_str())
    described = {"name": tokenizer.name, "pattern": tokenizer.pattern, "sha256": tokenizer.identity}
    again = from_hugging_face(tmp_path / "tokenizer.json", {**described, "end_of_text": "<|endoftext|>"})
    assert again.identity == tokenizer.identity
    ValidationSet(dataset, 15)


def test_tiktoken_without_a_connection_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_connection(*_: object, **__: object) -> bytes:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(registry, "ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file_cached", no_connection)
    with pytest.raises(SteepenError, match=r"cannot load o200k_base \(ConnectionError: no route to host\)"):
        load("o200k_base")


# SentencePiece


def message(fields: list[tuple[int, int | float | bytes]]) -> bytes:
    """A protocol buffer of these fields."""

    def varint(value: int) -> bytes:
        head = bytearray()
        while value > 127:
            head.append(value & 127 | 128)
            value >>= 7
        return bytes([*head, value])

    out = b""
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            out += varint(number << 3) + varint(value)
    return out


WORDS = ["▁the", "▁th", "▁t", "he", "▁a", "at", "▁▁", "cat", "in", "▁in"]


def sentencepiece(kind: int, scores: dict[str, float], strip: int = 0) -> bytes:
    """A model of these pieces after <unk>, <s>, </s> and, for BPE, the bytes."""
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    special += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)] if kind == 2 else []
    pieces = [*special, *((piece, score, 1) for piece, score in scores.items())]
    encoded = [(1, message([(1, p.encode()), (2, s), (3, t)])) for p, s, t in pieces]
    return message([*encoded, (2, message([(3, kind), (35, int(kind == 2))])), (3, message([(4, strip)]))])


def test_sentencepiece_bpe_merges_the_best_pair_first(tmp_path: Path) -> None:
    scores = {word: -float(rank) for rank, word in enumerate([*WORDS, *"▁theacin"])}
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(2, scores))
    tokenizer = load(tmp_path)
    assert tokenizer.identity == load(tmp_path / "tokenizer.model").identity
    assert (tokenizer.end_text, tokenizer.end_of_text, tokenizer.size) == ("</s>", 2, 259 + len(scores))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]

    def merged(text: str) -> list[str]:
        """SentencePiece's algorithm: join the neighbours whose piece has the highest score, while any has."""
        pieces = [*("▁" + text.replace(" ", "▁"))]
        while joined := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
            _, i = min(joined)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        return [
            name for p in pieces for name in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])
        ]

    for text in ("the cat in a hat", "that  he", "in the é", "  a"):
        ids = tokenizer.encode(text)
        assert [names[i] for i in ids] == merged(text)
        assert tokenizer.decode(ids) == f" {text}"
        assert int(tokenizer.lengths[ids].sum()) == len(text.encode()) + 1


def test_sentencepiece_unigram_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    scores = {word: -2.0 - 0.3 * rank for rank, word in enumerate(WORDS)}
    scores |= {letter: -4.0 - 0.1 * rank for rank, letter in enumerate("▁theacin")}
    (tmp_path / "uni.model").write_bytes(sentencepiece(1, scores, strip=1))
    tokenizer = load(tmp_path / "uni.model")
    names = ["<unk>", "<s>", "</s>", *scores]

    @cache
    def best(text: str) -> tuple[float, tuple[str, ...]]:
        if not text:
            return 0.0, ()
        heads = [text[:n] for n in range(1, len(text) + 1) if text[:n] in scores]
        return max((scores[h] + best(text[len(h) :])[0], (h, *best(text[len(h) :])[1])) for h in heads)

    for text in ("the cat in a hat", "that he", "tinthe"):
        assert [names[i] for i in tokenizer.encode(text)] == list(best("▁" + text.replace(" ", "▁"))[1])
    assert tokenizer.encode(" the   cat ") == tokenizer.encode("the cat")
    assert 2 not in tokenizer.encode("the</s>cat")


def test_what_is_no_sentencepiece_model_is_one_sentence(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = sentencepiece(2, {"a": 0.0})
    for content in (b"", b"text", whole[:-7], rng.bytes(300), whole[1:]):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(SteepenError, match="not a SentencePiece model"):
            load(tmp_path / "bad.model")


def replacements(count: int, content: str) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"Regex": "."}, "content": content}
    return {"type": "Sequence", "normalizers": [step] * count}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"normalizer": replacements(12, "abcd")}, "replaces a character by up to 16,777,216"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fwAAAAA="}}, "map of char"),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["</s>", 0.0]]}}, "encode a text"),
        ({"decoder": 5}, "tokenizers cannot read it"),
    ],
)  # fmt: skip
def test_tokenizer_made_to_harm_is_one_sentence(
    tmp_path: Path, documents: list[str], change: dict[str, Any], says: str
) -> None:
    byte_level_library(documents, "</s>").save(str(tmp_path / "t.json"))
    content = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps({**content, "pre_tokenizer": None, **change}))
    with pytest.raises(SteepenError, match=says):
        load(tmp_path / "t.json").encode("xyz")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (1, message([(1, b"ab" * 250_000), (2, 0.0)])),  # each of its splits would be looked up
        (1, message([(1, b"q"), (2, 5)])),  # a score that is no float
        (1, 5),
        (2, message([(3, 1), (40, 10**6)])),  # the unknown piece
        (3, message([(2, b"\xfc\xff\xff\x7f" + bytes(60))])),  # a map that says it has 2 GB
    ],
)
def test_sentencepiece_model_made_to_harm_is_one_sentence(tmp_path: Path, field: int, value: Any) -> None:
    (tmp_path / "bad.model").write_bytes(sentencepiece(2, {"a": 0.0}) + message([(field, value)]))
    with pytest.raises(SteepenError, match="not a SentencePiece model"):
        load(tmp_path / "bad.model")


def test_pattern_that_matches_nothing_is_one_sentence() -> None:
    with pytest.raises(SteepenError, match="cannot encode a text"):
        byte_level("x", tuple(bytes([i]) for i in range(256)), "x*", 256, "<|endoftext|>")


def test_normalizer_of_a_tokenizer_is_kept(tmp_path: Path, folder: Path) -> None:
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.normalizer = normalizers.Lowercase()  # pyright: ignore
    library.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    tokenizer.save(tmp_path / "kept.json")
    assert Tokenizer.load(tmp_path / "kept.json").encode("ABC the") == library.encode("abc the").ids
