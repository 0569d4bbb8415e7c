"""Tokenize many documents on several threads, in order, with a bounded number of them in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steepen.data.sources.source import document_hash
from steepen.data.tokenizer import Tokenizer

GROUP_CHARACTERS = 1 << 18  # given to a thread at a time
GROUPS_PER_THREAD = 8  # in flight: enough work to keep threads busy while the main thread writes


@dataclass(frozen=True)
class SourceDocument:
    """One document of a source (a line, a row or a text); `text` is None if it is empty."""

    part: int
    number: int
    text: str | None


@dataclass(frozen=True)
class TokenizedDocument:
    """The token ids of a document, its content hash and its length; `ids` is None if it is empty."""

    part: int
    number: int
    ids: npt.NDArray[np.uint32] | None
    hash: bytes
    characters: int


def tokenize_in_order(
    tokenizer: Tokenizer, documents: Iterable[SourceDocument], threads: int
) -> Generator[list[TokenizedDocument]]:
    """Tokenize documents on `threads` threads; yields groups in the order of the documents."""

    def tokenize(group: list[SourceDocument]) -> list[TokenizedDocument]:
        arrays = iter(tokenizer.encode_arrays([document.text for document in group if document.text]))
        return [
            TokenizedDocument(each.part, each.number, next(arrays), document_hash(each.text), len(each.text))
            if each.text
            else TokenizedDocument(each.part, each.number, None, b"", 0)
            for each in group
        ]

    pool = ThreadPoolExecutor(threads, thread_name_prefix="steepen-tokenize")
    pending: deque[Future[list[TokenizedDocument]]] = deque()
    try:
        for group in _groups(documents):
            pending.append(pool.submit(tokenize, group))
            if len(pending) > GROUPS_PER_THREAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _groups(documents: Iterable[SourceDocument]) -> Iterator[list[SourceDocument]]:
    group: list[SourceDocument] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += 64 + len(document.text or "")  # so that empty documents fill a group too
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
