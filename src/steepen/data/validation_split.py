"""Assignment of documents to the validation split, by content hash, until it has enough tokens."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steepen.data.sources.source import HASH_BYTES
from steepen.errors import SteepenError
from steepen.utils.files import open_without_links

BYTES_PER_TOKEN = 4.0  # English under GPT-2's tokenizer; only used to size the fraction below
DEFAULT_VAL_TOKENS = 10_485_760
MAX_FRACTION = 0.5


def plan_split(size: int, val_tokens: int | None, max_tokens: int | None) -> tuple[int, float]:
    """Validation tokens to collect from a source of `size` bytes, and the fraction of documents eligible.

    The fraction is 1.5 to 3 times the one that would just suffice, so the validation set is complete after a
    third to two thirds of the source, and all later documents are for training. It is a power of two, so that
    it does not depend on a precise estimate of the size.
    """
    expected = max(1.0, size / BYTES_PER_TOKEN)
    if max_tokens is not None:
        expected = min(expected, max_tokens)
    target = min(DEFAULT_VAL_TOKENS, int(expected / 50)) if val_tokens is None else val_tokens
    if not target:
        return 0, 0.0
    return target, min(MAX_FRACTION, 2.0 ** math.ceil(math.log2(1.5 * target / expected)))


class ValidationSplit:
    """Assigns documents to splits; no text is ever in both, also where a source repeats it.

    A document whose hash is below the threshold goes to validation until `val_tokens` are reached. Later
    copies of a validation document are dropped; with `dedup_tokens`, also every training document that has
    the first tokens of one (0: nothing is dropped). The hashes to compare with are stored in a file.
    """

    def __init__(
        self,
        file: Path,
        val_tokens: int,
        fraction: float,
        documents: int = 0,
        dedup_tokens: int | None = None,
    ) -> None:
        self.val_tokens, self.dedup_tokens = val_tokens, dedup_tokens
        self.documents = documents  # validation documents so far
        entry = HASH_BYTES if dedup_tokens is None else hashlib.sha1().digest_size
        self.threshold = int(fraction * 2 ** (8 * HASH_BYTES))  # hashes below it are eligible
        self._chosen: set[bytes] = set()
        self._stream = open(file, "a+b", opener=open_without_links)  # noqa: SIM115
        if file.stat().st_size < documents * entry:
            raise SteepenError(f"{file} is shorter than the journal says; use `restart` to begin again.")
        self._stream.truncate(documents * entry)
        self._stream.seek(0)
        while digest := self._stream.read(entry):
            self._chosen.add(digest)

    def adjust_threshold(self, documents: Iterable[tuple[bytes, int]], max_bytes: int) -> bool:
        """Change the threshold if the hashes would leave one split without a document.

        `documents` are (hash, bytes of text) from the start of the source; no more of them are read than
        needed. Those that begin within `max_bytes` are certain to be reached. Returns False if there is
        only one document.
        """
        reached: dict[bytes, int] = {}
        later: set[bytes] = set()
        read, train, val = 0, False, False
        for digest, size in documents:
            eligible = self.is_eligible(digest)
            train, val = train or not eligible, val or (eligible and read < max_bytes)
            if read < max_bytes:
                reached[digest] = size
            else:
                later.add(digest)
            read += size + 1
            if train and (val or (read >= max_bytes and len(reached.keys() | later) > 1)):
                break
        found = reached.keys() | later
        if len(found) < 2:
            return not found  # an empty source is reported where it is read
        if not train:
            self.threshold = int.from_bytes(max(found), "big")
        elif not val:
            collected = 0.0
            for digest in sorted(reached)[: max(1, int(MAX_FRACTION * len(found)))]:
                self.threshold = int.from_bytes(digest, "big") + 1
                collected += reached[digest] / BYTES_PER_TOKEN
                if collected >= self.val_tokens:
                    break
        return True

    def assign(
        self,
        digest: bytes,
        ids: npt.NDArray[np.uint32],
        val_tokens: int,
        validation_only: bool = False,
    ) -> str | None:
        """The split of a document, given the validation tokens so far; None if it must be dropped.

        `digest` is the document's content hash, `ids` its tokens. `validation_only` marks a document of a
        separate validation source, where repeated ones are kept too.
        """
        key = digest
        if self.dedup_tokens is not None:
            key = hashlib.sha1(ids[: self.dedup_tokens].astype("<u4").tobytes()).digest()
        if not validation_only and self.dedup_tokens != 0 and key in self._chosen:
            return None
        if validation_only or (val_tokens < self.val_tokens and self.is_eligible(digest)):
            self._chosen.add(key)
            self._stream.write(key)
            self.documents += 1
            return "val"
        return "train"

    def is_eligible(self, digest: bytes) -> bool:
        """Whether a document is eligible for validation; no tokenizer is trained on these."""
        return int.from_bytes(digest, "big") < self.threshold

    def sync(self) -> None:
        """Flush the chosen hashes to the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
