"""The built-in corpus, shipped with the package: 249 presidential addresses and 2,325 documentation texts.

Its documents never change, so that results on it can be compared between installations. Origin and licences
of the texts are in assets/builtin_corpus.LICENSE.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any

from steepen.data.sources.source import Part, Source, document_hash
from steepen.data.tokenizer import Tokenizer
from steepen.errors import SteepenError, UsageError

PARTS = ("speeches", "documentation")
# SHA-256 of the document hashes in order: the identity of the whole corpus and of each part.
SHA256 = {
    "": "131829fdd2c3ed1b2e964529412095025d62df1f0858edc16877e0b7c1b92e68",
    "speeches": "6302c6d9b3bd8767894ac1dfbdcbad28d88a201d34c983b6b39320b92685304b",
    "documentation": "6ff38f761bbb348a63ab9c21071de0e7522a8581b8c43694436dbf0d53dc2cb0",
}

# The tokenizer of preset `tiny`, shipped because its training is a good part of a first run: vocabulary size
# and SHA-256 of the hashes of the documents that it was trained on.
TOKENIZER_SIZE = 512
TOKENIZER_TEXTS = "962bc6e1d085169ceed664c33f6401528f66355d63ada9379b8c0d388719223f"


def builtin_source(part: str = "") -> Source:
    """Return the whole corpus, or one of its PARTS."""
    if part and part not in PARTS:
        raise UsageError(f"unknown part {part!r} of the built-in corpus; accepted are {', '.join(PARTS)}.")
    texts = {name: read_part(name) for name in ((part,) if part else PARTS)}
    # Ordered by content hash: any section of the corpus, and so the validation split, mixes both parts.
    documents = sorted((text for group in texts.values() for text in group), key=document_hash)
    digest = documents_digest(documents)
    if digest != SHA256[part]:
        raise SteepenError("the built-in corpus of this installation is damaged; reinstall steepen.")
    sizes = {name: sum(len(text.encode()) for text in group) for name, group in texts.items()}
    description: dict[str, Any] = {
        "kind": "builtin",
        "name": f"builtin:{part}" if part else "builtin",
        "documents": {name: len(group) for name, group in texts.items()},
        "bytes": sizes,
        "sha256": digest,
    }
    part_of = Part("builtin", lambda start: islice(documents, start, None))
    return Source(description, sum(sizes.values()), [part_of])


@cache
def read_part(name: str) -> tuple[str, ...]:
    """The documents of one part, in the order of the asset (speeches: oldest first)."""
    asset = resources.files("steepen.data").joinpath(f"assets/builtin_{name}.jsonl.xz")
    try:
        lines = lzma.decompress(asset.read_bytes()).splitlines()
        return tuple(json.loads(line)["text"] for line in lines)
    except (OSError, lzma.LZMAError, ValueError, KeyError):
        raise SteepenError(
            "the built-in corpus of this installation is damaged; reinstall steepen."
        ) from None


def shipped_tokenizer(texts: Sequence[str], size: int) -> Tokenizer | None:
    """The tokenizer that training on these texts would give, if it is the one shipped with the package."""
    if size != TOKENIZER_SIZE or documents_digest(texts) != TOKENIZER_TEXTS:
        return None
    asset = resources.files("steepen.data").joinpath(f"assets/builtin_bpe{size}.json")
    with resources.as_file(asset) as path:
        return Tokenizer.load(path)


def documents_digest(texts: Iterable[str]) -> str:
    """SHA-256 of the document hashes, in order."""
    return hashlib.sha256(b"".join(map(document_hash, texts))).hexdigest()
