"""Tokenize many documents on several threads, in order, with a bounded number of them in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steepen.data.sources.source import document_hash
from steepen.data.tokenizer import Tokenizer

GROUP_CHARACTERS = 1 << 18  # given to a thread at a time
GROUPS_PER_THREAD = 8  # in flight: enough work to keep threads busy while the main thread writes


@dataclass(frozen=True)
class Unit:
    """One document of a source (a line, a row or a text); `text` is None if it is empty."""

    part: int
    number: int
    text: str | None


@dataclass(frozen=True)
class TokenizedUnit:
    """The token ids of a unit, its content hash and its length; `ids` is None if it is empty."""

    part: int
    number: int
    ids: npt.NDArray[np.uint32] | None
    hash: bytes
    characters: int


def tokenize_in_order(
    tokenizer: Tokenizer, units: Iterable[Unit], threads: int
) -> Iterator[list[TokenizedUnit]]:
    """Tokenize units on `threads` threads; yields groups in the order of the units."""

    def tokenize(group: list[Unit]) -> list[TokenizedUnit]:
        return [_tokenize(tokenizer, unit) for unit in group]

    pool = ThreadPoolExecutor(threads, thread_name_prefix="steepen-tokenize")
    pending: deque[Future[list[TokenizedUnit]]] = deque()
    try:
        for group in _groups(units):
            pending.append(pool.submit(tokenize, group))
            if len(pending) > GROUPS_PER_THREAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _groups(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    group: list[Unit] = []
    characters = 0
    for unit in units:
        group.append(unit)
        characters += 64 + len(unit.text or "")  # so that empty units fill a group too
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _tokenize(tokenizer: Tokenizer, unit: Unit) -> TokenizedUnit:
    if unit.text is None or unit.text == "":
        return TokenizedUnit(unit.part, unit.number, None, b"", 0)
    ids = tokenizer.encode_array(unit.text)
    return TokenizedUnit(unit.part, unit.number, ids, document_hash(unit.text), len(unit.text))
