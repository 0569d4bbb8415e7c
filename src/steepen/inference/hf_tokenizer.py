"""A run's tokenizer in the format of the `tokenizers` library, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from steepen.data.tokenizer import (
    END_OF_TEXT,
    MAX_IDS,
    SPLIT_PATTERN,
    JsonTokenizer,
    Tokenizer,
    byte_level,
    bytes_to_unicode,
    unicode_to_bytes,
)
from steepen.errors import SteepenError
from steepen.utils.json_io import read_json

TOKENIZER_FILE = "tokenizer.json"


def hugging_face_tokenizer(tokenizer: Tokenizer) -> Any:
    """A `tokenizers.Tokenizer` with the same ids, which puts the separator before every text."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    end = tokenizer.end_text
    if isinstance(tokenizer, JsonTokenizer):
        made: Any = HuggingFaceTokenizer.from_str(json.dumps(tokenizer.definition))
    else:
        letters = bytes_to_unicode()
        names = ["".join(letters[byte] for byte in token) for token in tokenizer.tokens]
        vocabulary = {name: number for number, name in enumerate(names) if name}
        merges = _merges(tokenizer, names)
        if tokenizer.end_id is not None:  # not the last id: it must be in the vocabulary to have its own
            vocabulary[end] = tokenizer.end_id
        made = HuggingFaceTokenizer(models.BPE(vocabulary, merges))
        if tokenizer.pattern == SPLIT_PATTERN:
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            # The library's engine reads {1,3}+ and $ otherwise; possessive quantifiers only make it faster.
            pattern = re.sub(r"([+*?}])\+", r"\1", tokenizer.pattern).replace("$", r"\z")
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            letters_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = pre_tokenizers.Sequence([split, letters_only])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single=f"{end} $A",
        pair=f"{end} $A {end} $B",
        special_tokens=[(end, tokenizer.end_of_text)],
    )
    return made


def _merges(tokenizer: Tokenizer, names: list[str]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, by the id of the token they make.

    Ids are ranks: the pair that makes the lowest id is merged first, whichever pair it is.
    """
    ids = {token: number for number, token in enumerate(tokenizer.tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokenizer.tokens:
        pairs = [
            (ids[token[:cut]], ids[token[cut:]])
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        merges += [(names[left], names[right]) for left, right in sorted(pairs)]
    return merges


def from_hugging_face(file: Path, description: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `hugging_face_tokenizer` wrote; `description` has its name, pattern and hash."""
    byte_of = unicode_to_bytes()
    try:
        definition = cast("dict[str, Any]", read_json(file))
        name, pattern, end = str(description["name"]), description["pattern"], description.get("end_of_text")
        if pattern == "":
            tokenizer: Tokenizer = JsonTokenizer.from_definition(name, definition, str(end))
        else:
            vocabulary = cast("dict[str, int]", definition["model"]["vocab"])
            end_id = len(vocabulary) if end is None else vocabulary.pop(str(end))
            tokens = [b""] * (1 + min(max(vocabulary.values()), MAX_IDS))
            for letters, number in vocabulary.items():
                tokens[number] = bytes(byte_of[letter] for letter in letters)
            tokenizer = byte_level(
                name, tuple(tokens), pattern, end_id, END_OF_TEXT if end is None else str(end)
            )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SteepenError(f"the tokenizer {file} cannot be read ({error}).") from error
    if tokenizer.identity != description["sha256"]:
        raise SteepenError(f"{file} is not the tokenizer the model was exported with.")
    return tokenizer
