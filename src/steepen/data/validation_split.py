"""Which documents are for validation: chosen by content hash until enough tokens are gathered."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from steepen.data.parallel_tokenize import DIGEST
from steepen.errors import SteepenError

BYTES_PER_TOKEN = 4.0  # of English under GPT-2; only sizes the share below
DEFAULT_VALIDATION = 10_485_760
LARGEST_SHARE = 0.5


def plan(size: int, val_tokens: int | None, max_tokens: int | None) -> tuple[int, float]:
    """How many validation tokens to gather from a source of `size` bytes, and the share of documents to take.

    The share is a power of two, so that it does not hang on how exactly the size could be guessed, and 1.5 to
    3 times what would be just enough: the set is whole after a third to two thirds of the source, and from
    then on everything is for training.
    """
    expected = max(1.0, size / BYTES_PER_TOKEN)
    if max_tokens is not None:
        expected = min(expected, max_tokens)
    wanted = min(DEFAULT_VALIDATION, int(expected / 50)) if val_tokens is None else val_tokens
    if not wanted:
        return 0, 0.0
    return wanted, min(LARGEST_SHARE, 2.0 ** math.ceil(math.log2(1.5 * wanted / expected)))


class ValidationSplit:
    """Assigns documents. No text is ever in both splits, also where a source repeats it:
    a document of the share goes to validation while that is open, and its later copies are dropped."""

    def __init__(self, journal: Path, wanted: int, share: float, chosen: int = 0) -> None:
        self.wanted = wanted
        self.threshold = int(share * 2 ** (8 * DIGEST))  # hashes below it are of the share
        self._chosen: set[bytes] = set()
        self._stream = journal.open("a+b")
        if journal.stat().st_size < chosen * DIGEST:
            raise SteepenError(f"{journal} is shorter than the journal says; use --restart to begin again.")
        self._stream.truncate(chosen * DIGEST)
        self._stream.seek(0)
        while digest := self._stream.read(DIGEST):
            self._chosen.add(digest)

    @property
    def chosen(self) -> int:
        """Number of validation documents so far."""
        return len(self._chosen)

    def settle(self, documents: Iterable[tuple[bytes, int]], most: int) -> bool:
        """Move the share so that each split gets a document, where the hashes would leave one without.

        `documents` are hashes and bytes of text, from the source's start; no more of them are read than it
        takes. Those that begin within `most` bytes are sure to be reached. False where there is only one.
        """
        sure: dict[bytes, int] = {}
        after: set[bytes] = set()
        read, train, val = 0, False, False
        for digest, size in documents:
            chosen = self.may_validate(digest)
            train, val = train or not chosen, val or (chosen and read < most)
            if read < most:
                sure[digest] = size
            else:
                after.add(digest)
            read += size + 1
            if train and (val or (read >= most and len(sure.keys() | after) > 1)):
                break
        found = sure.keys() | after
        if len(found) < 2:
            return not found  # of nothing at all others will speak
        if not train:
            self.threshold = int.from_bytes(max(found), "big")
        elif not val:
            gathered = 0.0
            for digest in sorted(sure)[: max(1, int(LARGEST_SHARE * len(found)))]:
                self.threshold = int.from_bytes(digest, "big") + 1
                gathered += sure[digest] / BYTES_PER_TOKEN
                if gathered >= self.wanted:
                    break
        return True

    def of(self, digest: bytes, val_tokens: int, for_validation: bool = False) -> str | None:
        """The split of a document, given the validation tokens so far; None where it must be dropped.

        `for_validation` says that the document comes from a source of validation text alone.
        """
        if digest in self._chosen or (for_validation and val_tokens >= self.wanted):
            return None
        if for_validation or (val_tokens < self.wanted and self.may_validate(digest)):
            self._chosen.add(digest)
            self._stream.write(digest)
            return "val"
        return "train"

    def may_validate(self, digest: bytes) -> bool:
        """Whether a document could be chosen; a tokenizer trained on the source leaves these out."""
        return int.from_bytes(digest, "big") < self.threshold

    def sync(self) -> None:
        """Bring the chosen documents to the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()
