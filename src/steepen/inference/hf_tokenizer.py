"""A run's tokenizer in the format of the `tokenizers` library, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from steepen.data.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer, bytes_to_unicode, known_pattern
from steepen.errors import SteepenError
from steepen.utils.json_io import read_json

TOKENIZER_FILE = "tokenizer.json"


def hugging_face_tokenizer(tokenizer: Tokenizer) -> Any:
    """A `tokenizers.Tokenizer` with the same ids, which puts <|endoftext|> before every text."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in token) for token in tokenizer.tokens]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = HuggingFaceTokenizer(models.BPE(vocabulary, _merges(tokenizer, names)))
    if tokenizer.pattern == SPLIT_PATTERN:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, tokenizer.end_of_text)],
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
    byte_of = {letter: byte for byte, letter in enumerate(bytes_to_unicode())}
    try:
        vocabulary = cast("dict[str, int]", read_json(file)["model"]["vocab"])
        ordered = sorted(vocabulary, key=vocabulary.__getitem__)
        tokens = tuple(bytes(byte_of[letter] for letter in name) for name in ordered)
        tokenizer = Tokenizer(str(description["name"]), tokens, known_pattern(description["pattern"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SteepenError(f"the tokenizer {file} cannot be read ({error}).") from error
    if tokenizer.identity != description["sha256"]:
        raise SteepenError(f"{file} is not the tokenizer the model was exported with.")
    return tokenizer
