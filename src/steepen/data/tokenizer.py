"""Byte-level BPE tokenizers: GPT-2's published merges, or merges trained on the source."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from steepen.errors import SteepenError, UsageError, shorten
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json, read_json

if TYPE_CHECKING:
    import tiktoken

# GPT-2's pre-tokenization pattern, with possessive quantifiers so that runs of spaces do not backtrack.
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_IDENTITY = "ff5ebd3bd6c8c5941d3faacd7efb80574c7f4f0958341d3f9fb3b84ba74bdbac"  # of Tokenizer.gpt2()
FILE_FORMAT = "steepen-tokenizer-1"
RUN_FORMAT = "steepen-run-tokenizer-1"  # of the file in a run directory
BYTES = 256
GPT2_SIZE = 50_257
PAD_TO = 128


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A byte-level BPE tokenizer. `tokens[i]` is the byte string of id `i`; the last id is <|endoftext|>.

    Encoding never produces <|endoftext|>: a text that contains it is encoded as ordinary characters.
    """

    name: str
    tokens: tuple[bytes, ...]
    pattern: str = SPLIT_PATTERN

    def __post_init__(self) -> None:
        if len(set(self.tokens)) != len(self.tokens) or b"" in self.tokens:
            raise SteepenError(
                f"tokenizer {self.name} repeats a token or has an empty one; prepare it again."
            )
        missing = [byte for byte in range(BYTES) if bytes([byte]) not in self._ranks]
        if missing:
            raise SteepenError(f"tokenizer {self.name} has no token for byte {missing[0]}; prepare it again.")

    @property
    def size(self) -> int:
        """Number of ids, <|endoftext|> included (GPT-2: 50,257)."""
        return len(self.tokens) + 1

    @property
    def padded_size(self) -> int:
        """`size` rounded up to a multiple of 128, the vocabulary of the model (GPT-2: 50,304)."""
        return -(-self.size // PAD_TO) * PAD_TO

    @property
    def end_of_text(self) -> int:
        """The id of <|endoftext|>, appended to every document."""
        return len(self.tokens)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of every id; <|endoftext|> counts 0."""
        return np.array([*map(len, self.tokens), 0], dtype=np.int32)

    @cached_property
    def content(self) -> bytes:
        """The file that `save` writes; its SHA-256 is the tokenizer's identity."""
        return canonical_json(
            {
                "format": FILE_FORMAT,
                "name": self.name,
                "pattern": self.pattern,
                "end_of_text": {"text": END_OF_TEXT, "id": self.end_of_text},
                "tokens": [base64.b64encode(token).decode() for token in self.tokens],
            }
        )

    @cached_property
    def identity(self) -> str:
        """Hex SHA-256 of the saved file: name, splitting pattern and every token in order."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self.tokens)}

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding(
            self.name,
            pat_str=self.pattern,
            mergeable_ranks=self._ranks,
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.size,
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without <|endoftext|>."""
        return self._encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """`encode` as an array; releases the GIL, so threads encode in parallel."""
        if END_OF_TEXT not in text:  # which tiktoken before 0.11 would take for the end of a document
            with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair, which JSON can contain
                return self._encoding.encode_to_numpy(text, disallowed_special=())
        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self._encoding.decode([int(token) for token in ids])

    def decode_bytes(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """The exact bytes of ids, with <|endoftext|> spelled out."""
        return self._encoding.decode_bytes([int(token) for token in ids])

    def save(self, path: Path) -> None:
        """Write the tokenizer as one JSON file."""
        write_atomically(path, self.content)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a saved tokenizer."""
        try:
            stored = read_json(path)
        except FileNotFoundError:
            raise SteepenError(f"{path} is missing; prepare the data again.") from None
        except OSError as error:
            raise SteepenError(f"{path} cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise SteepenError(f"{path} is not a tokenizer file ({error}); prepare the data again.") from None
        return cls.from_content(stored, path)

    @classmethod
    def from_content(cls, stored: Any, path: Path) -> Tokenizer:
        """The tokenizer of a parsed `content`; `path` is the file that errors name."""
        try:
            stored = cast("dict[str, Any]", stored)
            if stored["format"] != FILE_FORMAT:
                raise SteepenError(f"{path} has tokenizer format {stored['format']!r}, not {FILE_FORMAT!r}.")
            tokens = tuple(base64.b64decode(token, validate=True) for token in stored["tokens"])
            return cls(name=str(stored["name"]), tokens=tokens, pattern=known_pattern(stored["pattern"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SteepenError(f"{path} is not a tokenizer file ({error}); prepare the data again.") from None

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """GPT-2's tokenizer, from the merge table shipped with the package."""
        packed = resources.files("steepen.data").joinpath("assets/gpt2.tiktoken.gz").read_bytes()
        table = gzip.decompress(packed)
        if hashlib.sha256(table).hexdigest() != GPT2_RANKS_SHA256:
            raise SteepenError("the GPT-2 merge table of this installation is damaged; reinstall steepen.")
        # One line a token, "base64 rank", in the order of the ranks.
        return cls(
            name="gpt2", tokens=tuple(base64.b64decode(line.split()[0]) for line in table.splitlines())
        )

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Tokenizer:
        """Train a byte-level BPE with `size` ids (256 bytes, merges, <|endoftext|>) on texts."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import models, pre_tokenizers, trainers

        check_trainable(size)
        trained = HuggingFaceTokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # the same as SPLIT_PATTERN
        trainer = trainers.BpeTrainer(
            vocab_size=size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(texts, trainer)
        byte_of = {letter: bytes([value]) for value, letter in enumerate(bytes_to_unicode())}
        by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
        merged = [b"".join(byte_of[letter] for letter in token) for token, _ in by_id if len(token) > 1]
        tokens = (*(bytes([byte]) for byte in range(BYTES)), *merged)
        if len(tokens) != size - 1:
            available = len(tokens) + 1
            remedy = (
                f"use bpe:{available} or fewer, or give more text"
                if merged
                else "give more text, or use gpt2"
            )
            raise UsageError(
                f"the source has text for a vocabulary of only {available:,} ids, not bpe:{size}; {remedy}."
            )
        return cls(name=f"bpe:{size}", tokens=tokens)


def known_pattern(pattern: object) -> str:
    """The splitting pattern of a file; raises ValueError for one that could take for ever to match."""
    if pattern != SPLIT_PATTERN:
        raise ValueError("it has an unknown splitting pattern")
    return SPLIT_PATTERN


MAX_BPE = 1_000_000


def check_trainable(size: int) -> None:
    """Raise if `size` is too small for a byte-level BPE, or absurdly large."""
    if size <= BYTES + 1:
        raise UsageError(
            f"tokenizer bpe:{size} is too small: 256 bytes and {END_OF_TEXT} need bpe:258 or more."
        )
    if size > MAX_BPE:
        raise UsageError(f"tokenizer bpe:{size} is too large: at most bpe:{MAX_BPE} can be trained.")


def parse_tokenizer(name: str) -> int | None:
    """The size in "bpe:SIZE", or None for "gpt2"; raises for anything else."""
    if name == "gpt2":
        return None
    kind, _, size = name.partition(":")
    digits = size.replace("_", "")
    if kind != "bpe" or not digits.isdecimal():
        raise UsageError(
            f"unknown tokenizer {shorten(name)!r}; accepted are gpt2 and bpe:SIZE, for example bpe:8192."
        )
    number = int(digits[:12])  # more digits are beyond any limit
    check_trainable(number)
    return number


def bytes_to_unicode() -> list[str]:
    """GPT-2's byte-level alphabet: the character of each byte; itself if printable, else from U+0100 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(BYTES)]


def write_run_tokenizer(tokenizer: Tokenizer, file: Path) -> None:
    """Write the tokenizer that a run directory keeps: GPT-2's by name, which ships here, else whole."""
    known = tokenizer.identity == GPT2_IDENTITY
    kept = {
        "format": RUN_FORMAT,
        "name": tokenizer.name,
        "size": tokenizer.size,
        "sha256": tokenizer.identity,
    }
    content = None if known else json.loads(tokenizer.content)
    write_atomically(file, canonical_json({**kept, "tokenizer": content}))


def run_tokenizer_identity(file: Path) -> str | None:
    """The hash of the tokenizer that a run's file describes; None for a run without the file."""
    return str(_read(file)["sha256"]) if file.is_file() else None


def load_run_tokenizer(file: Path) -> Tokenizer | None:
    """The tokenizer of a run, checked against its hash; None for a run without the file."""
    if not file.is_file():
        return None
    kept = _read(file)
    content = kept["tokenizer"]
    tokenizer = Tokenizer.gpt2() if content is None else Tokenizer.from_content(content, file)
    if tokenizer.identity != kept["sha256"]:
        raise SteepenError(f"{file} is corrupt: its tokenizer does not have the hash it states.")
    return tokenizer


def _read(file: Path) -> dict[str, Any]:
    try:
        kept = cast("dict[str, Any]", read_json(file))
        if kept["format"] != RUN_FORMAT:
            raise SteepenError(f"{file} has format {kept['format']!r}, not {RUN_FORMAT!r}.")
        return {"sha256": kept["sha256"], "tokenizer": kept["tokenizer"]}
    except (ValueError, KeyError, TypeError) as error:
        raise SteepenError(f"{file} is not the tokenizer of a run ({error}).") from None
