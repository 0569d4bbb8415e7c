"""GPT-2's ids are the published ones; a trained tokenizer is lossless and deterministic."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepen.data import Tokenizer
from steepen.data.sources.tokenizers import parse_tokenizer
from steepen.data.tokenizer import SPLIT_PATTERN
from steepen.errors import SteepenError, UsageError

GPT2 = Tokenizer.gpt2()

# Published ids, from the documentation of GPT-2's tokenizer in several libraries.
PUBLISHED = {
    "Hello world": [15496, 995],
    " Hello world": [18435, 995],
    "Hello, my dog is cute": [15496, 11, 616, 3290, 318, 13779],
    "tiktoken is great!": [83, 1134, 30001, 318, 1049, 0],
    "": [],
}


@pytest.mark.parametrize("text", PUBLISHED)
def test_gpt2_ids_are_the_published_ones(text: str) -> None:
    assert GPT2.encode(text) == PUBLISHED[text]


def test_gpt2_has_the_published_sizes() -> None:
    assert (GPT2.size, GPT2.end_of_text) == (50_257, 50_256)


def test_split_pattern_equals_tiktokens() -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    assert public.r50k_pat_str == SPLIT_PATTERN


def test_token_counts_match_the_reference_corpus(reference_data: Callable[[str], Path]) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(reference_data("corpus/val.parquet"), columns=["text", "gpt2_tokens"]).slice(0, 300)
    counts = [len(GPT2.encode_array(text)) for text in table["text"].to_pylist()]
    assert counts == table["gpt2_tokens"].to_pylist()


@given(st.text(max_size=200))
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = GPT2.encode(text)
    assert GPT2.decode(ids) == text
    assert GPT2.encode_array(text).tolist() == ids
    assert int(GPT2.lengths[ids].sum()) == len(text.encode())


def test_literal_end_of_text_is_encoded_as_ordinary_text() -> None:
    ids = GPT2.encode("a<|endoftext|>b")
    assert GPT2.end_of_text not in ids
    assert GPT2.encode_array("a<|endoftext|>b").tolist() == ids
    assert GPT2.decode(ids) == "a<|endoftext|>b"


def test_half_a_surrogate_pair_is_read_as_a_replacement_character() -> None:
    assert GPT2.encode_array("x\ud800y").tolist() == GPT2.encode("x\ufffdy")


def test_end_of_text_has_zero_bytes() -> None:
    assert GPT2.lengths.shape == (50_257,)
    assert GPT2.lengths[50_256] == 0
    assert GPT2.lengths[GPT2.encode("naïve 日本")].sum() == len("naïve 日本".encode())


def test_trained_tokenizer_has_the_requested_size_and_is_lossless(documents: list[str]) -> None:
    trained = Tokenizer.train(documents, 400)
    assert trained.size == 400
    assert trained.end_of_text == 399
    unseen = "Zürich, 7\u00a0km — \t\r\n  日本語 \x00 end"
    assert trained.decode(trained.encode(unseen)) == unseen
    everything = "\n".join(documents)
    assert len(trained.encode(everything)) < 0.6 * len(everything.encode())
    assert max(trained.encode(everything)) < trained.end_of_text


def test_trained_merges_encode_as_the_training_library_does(documents: list[str]) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # its own GPT-2 splitting
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=599, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(documents, trainer)
    ours = Tokenizer.train(documents, 600)
    for text in documents:
        theirs = [library.decode([token]) for token in library.encode(text).ids]
        assert [ours.decode([token]) for token in ours.encode(text)] == theirs


def test_training_a_tokenizer_is_deterministic(
    documents: list[str], corpus: Path, environment: dict[str, str]
) -> None:
    code = (
        "import json, sys; from steepen.data import Tokenizer; "
        f"texts = [json.loads(line)['text'] for line in open({str(corpus)!r})]; "
        "print(Tokenizer.train(texts, 500).identity)"
    )
    command = [sys.executable, "-c", code]
    elsewhere = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert elsewhere.stdout.strip() == Tokenizer.train(documents, 500).identity


def test_saved_tokenizer_loads_unchanged(tmp_path: Path) -> None:
    GPT2.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.identity == GPT2.identity
    assert np.array_equal(loaded.lengths, GPT2.lengths)


def test_damaged_file_is_rejected_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(GPT2.content[:-100])
    with pytest.raises(SteepenError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


@pytest.mark.parametrize("name", ["gpt3", "bpe", "bpe:", "bpe:x", "bpe:-5", "bpe:257", "llama"])
def test_impossible_tokenizer_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="bpe"):
        parse_tokenizer(name)


def test_too_little_text_for_the_vocabulary_names_the_possible_size() -> None:
    with pytest.raises(UsageError, match=r"vocabulary of only 2\d\d ids, not bpe:8192"):
        Tokenizer.train(["hello hello"], 8192)


def test_empty_text_error_does_not_suggest_an_invalid_size() -> None:
    with pytest.raises(UsageError, match=r"give more text, or use gpt2"):
        Tokenizer.train([], 8192)
