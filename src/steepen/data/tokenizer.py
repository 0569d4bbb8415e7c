"""Tokenizers: byte-level BPE (GPT-2's, tiktoken's, or trained on the source), and those of `tokenizers`.

Of every tokenizer is known which bytes each id stands for, and the separator: the id that begins every
document and occurs nowhere else. `data/sources/tokenizers.py` finds a tokenizer by its name.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from steepen.errors import SteepenError, UsageError, first_line
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json, read_json

if TYPE_CHECKING:
    import tiktoken

Ids = npt.NDArray[np.uint32]

# GPT-2's pre-tokenization pattern, with possessive quantifiers so that runs of spaces do not backtrack.
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_IDENTITY = "ff5ebd3bd6c8c5941d3faacd7efb80574c7f4f0958341d3f9fb3b84ba74bdbac"  # of Tokenizer.gpt2()
FILE_FORMAT = "steepen-tokenizer-1"
JSON_FORMAT = "steepen-tokenizer-2"  # of a JsonTokenizer
RUN_FORMAT = "steepen-run-tokenizer-1"  # of the file in a run directory
BYTES = 256
GPT2_SIZE = 50_257
MAX_BPE = 1_000_000
MAX_IDS = 4_000_000
MAX_PATTERN = 2_000  # characters
MAX_GROWTH = 1_000  # of a text by replacements of its characters


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A byte-level BPE tokenizer. `tokens[i]` is the byte string of id `i`.

    The separator is the last id, unless `end_id` says which; then some ids may be no token (b""). Encoding
    never produces it: a text that contains `end_text` is encoded as ordinary characters.
    """

    name: str
    tokens: tuple[bytes, ...]
    pattern: str = SPLIT_PATTERN
    end_id: int | None = None
    end_text: str = END_OF_TEXT

    def __post_init__(self) -> None:
        real = [token for token in self.tokens if token]
        if len(set(real)) != len(real) or (self.end_id is None and len(real) < len(self.tokens)):
            raise SteepenError(
                f"tokenizer {self.name} repeats a token or has an empty one; prepare it again."
            )
        missing = [byte for byte in range(BYTES) if bytes([byte]) not in self._ranks]
        if missing:
            raise SteepenError(f"tokenizer {self.name} has no token for byte {missing[0]}; prepare it again.")

    @property
    def size(self) -> int:
        """Number of ids, the separator included (GPT-2: 50,257)."""
        return max(len(self.tokens), self.end_of_text + 1)

    @property
    def end_of_text(self) -> int:
        """The id of the separator, which begins every document."""
        return len(self.tokens) if self.end_id is None else self.end_id

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of every id; the separator counts 0."""
        lengths = np.array([*map(len, self._bytes)], dtype=np.int32)
        lengths[self.end_of_text] = 0
        return lengths

    @cached_property
    def content(self) -> bytes:
        """The file that `save` writes; its SHA-256 is the tokenizer's identity."""
        return canonical_json(
            {
                "format": FILE_FORMAT,
                "name": self.name,
                "pattern": self.pattern,
                "end_of_text": {"text": self.end_text, "id": self.end_of_text},
                "tokens": [base64.b64encode(token).decode() for token in self.tokens],
            }
        )

    @cached_property
    def identity(self) -> str:
        """Hex SHA-256 of the saved file: name, splitting pattern and every token in order."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self.tokens) if token}

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding(
            self.name,
            pat_str=self.pattern,
            mergeable_ranks=self._ranks,
            special_tokens={self.end_text: self.end_of_text},
            explicit_n_vocab=self.size if self.end_id is None else None,
        )

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of every id, the separator spelled out."""
        found = [*self.tokens, *[b""] * (self.size - len(self.tokens))]
        found[self.end_of_text] = self.end_text.encode()
        return found

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the separator."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> Ids:
        """`encode` as an array; releases the GIL, so threads encode in parallel."""
        return self.encode_arrays([text])[0]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """`encode_array` of several texts."""
        with self._encoding_errors():
            return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        if self.end_text not in text:  # which tiktoken before 0.11 would take for the end of a document
            with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair, which JSON can contain
                return self._encoding.encode_to_numpy(text, disallowed_special=())
        return np.array(self._encoding.encode_ordinary(text), dtype=np.uint32)

    @contextlib.contextmanager
    def _encoding_errors(self) -> Generator[None]:
        """Say which tokenizer it is that cannot encode a text."""
        try:
            with errors_of_library():
                yield
        except ValueError as error:
            raise SteepenError(f"the tokenizer {self.name!r} cannot encode a text ({error}).") from None

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """The exact bytes of ids, with the separator spelled out."""
        return b"".join([self._bytes[token] for token in ids])

    def save(self, path: Path) -> None:
        """Write the tokenizer as one JSON file."""
        write_atomically(path, self.content)

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Read a saved tokenizer."""
        try:
            stored = read_json(path)
        except FileNotFoundError:
            raise SteepenError(f"{path} is missing; prepare the data again.") from None
        except OSError as error:
            raise SteepenError(f"{path} cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise SteepenError(f"{path} is not a tokenizer file ({error}); prepare the data again.") from None
        return Tokenizer.from_content(stored, path)

    @staticmethod
    def from_content(stored: Any, path: Path) -> Tokenizer:
        """The tokenizer of a parsed `content`; `path` is the file that errors name."""
        try:
            stored = cast("dict[str, Any]", stored)
            name, end = str(stored["name"]), stored["end_of_text"]
            if stored["format"] == JSON_FORMAT:
                return JsonTokenizer.from_definition(name, stored["definition"], str(end["text"]))
            if stored["format"] != FILE_FORMAT:
                raise SteepenError(f"{path} has tokenizer format {stored['format']!r}, not {FILE_FORMAT!r}.")
            tokens = tuple(base64.b64decode(token, validate=True) for token in stored["tokens"])
            return byte_level(name, tokens, stored["pattern"], end["id"], str(end["text"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SteepenError(f"{path} is not a tokenizer file ({error}); prepare the data again.") from None

    @staticmethod
    def gpt2() -> Tokenizer:
        """GPT-2's tokenizer, from the merge table shipped with the package."""
        packed = resources.files("steepen.data").joinpath("assets/gpt2.tiktoken.gz").read_bytes()
        table = gzip.decompress(packed)
        if hashlib.sha256(table).hexdigest() != GPT2_RANKS_SHA256:
            raise SteepenError("the GPT-2 merge table of this installation is damaged; reinstall steepen.")
        # One line a token, "base64 rank", in the order of the ranks.
        return Tokenizer(
            name="gpt2", tokens=tuple(base64.b64decode(line.split()[0]) for line in table.splitlines())
        )

    @staticmethod
    def train(texts: Iterable[str], size: int) -> Tokenizer:
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
        letters = unicode_to_bytes()
        by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
        merged = [bytes(letters[letter] for letter in token) for token, _ in by_id if len(token) > 1]
        tokens = (*(bytes([byte]) for byte in range(BYTES)), *merged)
        if len(tokens) != size - 1:
            available = len(tokens) + 1
            fewer = f"use bpe:{available} or fewer, or give more text"
            raise UsageError(
                f"the source has text for a vocabulary of only {available:,} ids, not bpe:{size}; "
                f"{fewer if merged else 'give more text, or use gpt2'}."
            )
        return Tokenizer(name=f"bpe:{size}", tokens=tokens)


@dataclass(frozen=True, eq=False)
class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: `definition` is what its tokenizer.json holds.

    BPE and Unigram models, byte-level or with ▁ for a space (SentencePiece). Its post-processor, truncation
    and padding are left out: text is encoded as it is.
    """

    definition: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Not every byte needs a token, and two ids may stand for the same bytes."""

    @staticmethod
    def from_definition(name: str, definition: Any, end_text: str) -> JsonTokenizer:
        """The tokenizer of a tokenizer.json; raises ValueError for another file."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        with errors_of_library():
            plain = {**definition, "post_processor": None, "truncation": None, "padding": None}
            _check_normalizers([plain.get("normalizer"), plain.get("pre_tokenizer"), plain.get("decoder")])
            with errors_of_library("tokenizers cannot read it: "):
                engine = HuggingFaceTokenizer.from_str(json.dumps(plain))
            plain = json.loads(engine.to_str())  # in the words of the installed version
            end_id = engine.token_to_id(end_text)
            if end_id is None:
                raise ValueError(f"it has no token {end_text!r}")
            return JsonTokenizer(
                name, _token_bytes(plain), pattern="", end_id=end_id, end_text=end_text, definition=plain
            )

    @cached_property
    def content(self) -> bytes:
        """The file that `save` writes."""
        return canonical_json({"format": JSON_FORMAT, "name": self.name, **self._essence})

    @cached_property
    def identity(self) -> str:
        """Hex SHA-256 of the definition and the separator; the name is not part of it."""
        return hashlib.sha256(canonical_json(self._essence)).hexdigest()

    @property
    def _essence(self) -> dict[str, Any]:
        end = {"text": self.end_text, "id": self.end_of_text}
        return {"end_of_text": end, "definition": self.definition}

    @cached_property
    def _engine(self) -> Any:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        engine = HuggingFaceTokenizer.from_str(json.dumps(self.definition))
        engine.encode_special_tokens = True  # special tokens in a text are ordinary characters
        return engine

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """`encode_array` of several texts, on the library's own threads."""
        # Half a surrogate pair, which JSON can contain, is read as U+FFFD.
        valid = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        with self._encoding_errors():
            encoded = self._engine.encode_batch_fast(valid, add_special_tokens=False)
        arrays = [np.array(each.ids, dtype=np.uint32) for each in encoded]
        # A Unigram model has its separator among its pieces, and could find it in a text.
        return [ids[ids != self.end_of_text] for ids in arrays]


@contextlib.contextmanager
def errors_of_library(before: str = "") -> Generator[None]:
    """Raise ValueError for whatever a tokenizer library raises: plain exceptions, and panics of Rust."""
    try:
        yield
    except (SteepenError, ValueError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ValueError(f"{before}{first_line(error)}") from None


def _check_normalizers(definition: Any) -> None:
    """Raise ValueError for replacements that fill the memory, and for maps of characters that are none."""
    nodes = list(_objects(definition))
    texts = [str(node.get("content", "")) for node in nodes if node.get("type") == "Replace"]
    if (growth := math.prod(max(1, len(text)) for text in texts)) > MAX_GROWTH:
        raise ValueError(f"it replaces a character by up to {growth:,}")
    for node in nodes:
        if node.get("precompiled_charsmap"):
            check_charsmap(base64.b64decode(node["precompiled_charsmap"]))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, itself included."""
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value)
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(child)


def check_charsmap(content: bytes) -> None:
    """Raise ValueError unless a map of SentencePiece is as large as it says: the library believes it."""
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or size % 4 or size > len(content) - 4:
        raise ValueError("its map of characters is cut off, or is none")


def byte_level(name: str, tokens: tuple[bytes, ...], pattern: object, end_id: object, end: str) -> Tokenizer:
    """A byte-level BPE as a file describes it; raises an error for a pattern that cannot be used."""
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN or not isinstance(end_id, int):
        raise ValueError("it has no usable splitting pattern, or its separator is no number")
    if not 0 <= end_id <= len(tokens) + BYTES:
        raise ValueError(f"its separator has the id {end_id}")
    found = Tokenizer(name, tokens, pattern, None if end_id == len(tokens) else end_id, end)
    if pattern != SPLIT_PATTERN:
        found.encode("")  # compiles the pattern
    return found


def _token_bytes(definition: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The bytes that each id of a tokenizer.json stands for; b"" for special tokens."""
    model = definition["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise ValueError(f"its model is {model['type']}; accepted are BPE and Unigram, which give texts back")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError("its tokens have a prefix or suffix that marks words; accepted are byte-level and ▁")
    vocabulary = model["vocab"]
    ids = vocabulary if model["type"] == "BPE" else {piece: i for i, (piece, _) in enumerate(vocabulary)}
    parts = json.dumps([definition["decoder"], definition["pre_tokenizer"]])
    letters = unicode_to_bytes() if '"ByteLevel"' in parts else {}
    added = {token["id"]: token for token in definition["added_tokens"]}
    largest = max([*ids.values(), *added])
    if largest > MAX_IDS:
        raise ValueError(f"it has the id {largest:,}, and at most {MAX_IDS:,} are accepted")
    tokens = [b""] * (1 + largest)
    for piece, number in ids.items():
        tokens[number] = _piece_bytes(piece, letters, bool(model.get("byte_fallback")))
    for number, token in added.items():
        tokens[number] = b"" if token["special"] else token["content"].encode()
    return tuple(tokens)


def _piece_bytes(piece: str, letters: Mapping[str, int], fallback: bool) -> bytes:
    """What a piece of a vocabulary spells: letters of bytes, a byte as <0x0A>, or text with ▁ for space."""
    if letters and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    if fallback and re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def check_trainable(size: int) -> None:
    """Raise if `size` is too small for a byte-level BPE, or absurdly large."""
    if size <= BYTES + 1:
        raise UsageError(
            f"tokenizer bpe:{size} is too small: 256 bytes and {END_OF_TEXT} need bpe:258 or more."
        )
    if size > MAX_BPE:
        raise UsageError(f"tokenizer bpe:{size} is too large: at most bpe:{MAX_BPE} can be trained.")


def bytes_to_unicode() -> list[str]:
    """GPT-2's byte-level alphabet: the character of each byte; itself if printable, else from U+0100 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(BYTES)]


def unicode_to_bytes() -> dict[str, int]:
    """The byte of each character of GPT-2's byte-level alphabet."""
    return {letter: byte for byte, letter in enumerate(bytes_to_unicode())}


def write_run_tokenizer(tokenizer: Tokenizer, file: Path) -> None:
    """Write the tokenizer that a run directory keeps: GPT-2's by name, which ships here, else whole."""
    kept = {"format": RUN_FORMAT, "name": tokenizer.name, "size": tokenizer.size}
    content = None if tokenizer.identity == GPT2_IDENTITY else json.loads(tokenizer.content)
    write_atomically(file, canonical_json({**kept, "sha256": tokenizer.identity, "tokenizer": content}))


def run_tokenizer_identity(file: Path) -> str:
    """The hash of the tokenizer that a run's file describes."""
    return str(_read(file)["sha256"])


def load_run_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a run, checked against its hash."""
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
    except FileNotFoundError:
        raise SteepenError(
            f"{file.parent} has no {file.name}: copy one from a run on the same data."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SteepenError(f"{file} is not the tokenizer of a run ({error}).") from None
