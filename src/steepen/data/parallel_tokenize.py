"""Many documents to ids on several threads, in order, with only a few groups in memory at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from steepen.data.tokenizer import Tokenizer

GROUP = 1 << 18  # characters a thread is given at a time
AHEAD = 8  # groups in flight per thread: enough work to outlast a slow write by the thread that writes
DIGEST = 16  # bytes of a document's hash


@dataclass(frozen=True)
class Unit:
    """One unit of a source and where it stands; `text` is None where the source has nothing there."""

    part: int
    number: int
    text: str | None


@dataclass(frozen=True)
class Encoded:
    """A unit's ids, its content hash, and how much text it was."""

    part: int
    number: int
    ids: npt.NDArray[np.uint32] | None
    digest: bytes
    characters: int


def digest_of(text: str) -> bytes:
    """The content hash that decides a document's split; equal texts have equal hashes."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


def encode_in_order(tokenizer: Tokenizer, units: Iterable[Unit], threads: int) -> Iterator[list[Encoded]]:
    """Encode units on `threads` threads; groups come out in the order of the units."""

    def encode(group: list[Unit]) -> list[Encoded]:
        return [_encode(tokenizer, unit) for unit in group]

    pool = ThreadPoolExecutor(threads, thread_name_prefix="steepen-encode")
    waiting: deque[Future[list[Encoded]]] = deque()
    try:
        for group in _groups(units):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _groups(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    group: list[Unit] = []
    characters = 0
    for unit in units:
        group.append(unit)
        characters += 64 + len(unit.text or "")  # empty units must fill a group too
        if characters >= GROUP:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _encode(tokenizer: Tokenizer, unit: Unit) -> Encoded:
    if unit.text is None or unit.text == "":
        return Encoded(unit.part, unit.number, None, b"", 0)
    ids = tokenizer.encode_array(unit.text)
    return Encoded(unit.part, unit.number, ids, digest_of(unit.text), len(unit.text))
