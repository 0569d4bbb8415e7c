"""Assignment of documents to the validation split, by content hash, until it has enough tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from steepen.data.shard_writer import EntryWriter
from steepen.data.sources.source import HASH_BYTES

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
    """Assigns documents to splits; no text is ever in both, also where sources repeat it.

    Documents whose hash is below the threshold are eligible for validation until it has enough tokens. Later
    copies of a validation document are dropped; with `dedup_tokens`, also every training document that has
    the first tokens of one (0: nothing is dropped). The hashes to compare with are stored in a file, of which
    `documents` are valid.
    """

    def __init__(
        self, file: Path, fraction: float, documents: int = 0, dedup_tokens: int | None = None
    ) -> None:
        self.dedup_tokens = dedup_tokens
        self.threshold = int(fraction * 2 ** (8 * HASH_BYTES))  # hashes below it are eligible
        entry = HASH_BYTES if dedup_tokens is None else hashlib.sha1().digest_size
        self.file = EntryWriter(file, entry, documents)
        self._chosen = set(self.file.entries())

    def adjust_threshold(
        self, documents: Iterable[tuple[bytes, int]], max_bytes: int, val_tokens: int
    ) -> bool:
        """Change the threshold if the hashes would leave one split of a source without a document.

        `documents` are (hash, bytes of text) from the start of the source; no more of them are read than
        needed. Those that begin within `max_bytes` are certain to be reached. Returns False if there is
        only one document.
        """
        reached: dict[bytes, int] = {}  # bytes of the documents that are certain to be read
        later: set[bytes] = set()
        read, train, val = 0, False, False
        for digest, size in documents:
            if read < max_bytes:
                reached[digest] = size
                val = val or self.is_eligible(digest)
            else:
                later.add(digest)
            train = train or not self.is_eligible(digest)
            read += size + 1
            if train and (val or (read >= max_bytes and len(reached.keys() | later) > 1)):
                break
        found = reached.keys() | later
        if len(found) < 2:
            return not found  # an empty source is reported where it is read
        if not train:  # the highest hash trains
            self.threshold = int.from_bytes(max(found), "big")
        elif not val:  # the lowest hashes validate, as many as are needed
            collected = 0.0
            for digest in sorted(reached)[: max(1, int(MAX_FRACTION * len(found)))]:
                self.threshold = int.from_bytes(digest, "big") + 1
                collected += reached[digest] / BYTES_PER_TOKEN
                if collected >= val_tokens:
                    break
        return True

    def assign(
        self,
        digest: bytes,
        ids: npt.NDArray[np.uint32],
        eligible: Literal["train", "val"] | None,
        validation_only: bool = False,
    ) -> Literal["train", "val"] | None:
        """The split of a document; None if it must be dropped. `eligible` is that of one that is eligible.

        `digest` is the document's content hash, `ids` its tokens. `validation_only` marks a document of a
        separate validation source, where repeated ones are kept too.
        """
        key = digest
        if self.dedup_tokens is not None:
            key = hashlib.sha1(ids[: self.dedup_tokens].astype("<u4").tobytes()).digest()
        if not validation_only and self.dedup_tokens != 0 and key in self._chosen:
            return None
        split = "val" if validation_only else eligible if self.is_eligible(digest) else "train"
        if split == "val":
            self._chosen.add(key)
            self.file.append(key)
        return split

    def is_eligible(self, digest: bytes) -> bool:
        """Whether a document is eligible for validation; no tokenizer is trained on these."""
        return int.from_bytes(digest, "big") < self.threshold
