"""What to prepare, and how a preparation tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from steepen.data.shards import dtype_for
from steepen.data.sources.readers import Reading
from steepen.data.tokenizer import parse_tokenizer
from steepen.errors import UsageError


@dataclass(frozen=True)
class PrepareRequest:
    """What to prepare; `val_source` takes validation from files of its own.

    Equal requests on equal sources give equal bytes, whatever the number of threads.
    """

    source: tuple[str, ...]
    val_source: tuple[str, ...] = ()
    tokenizer: str = "gpt2"
    val_tokens: int | None = None
    max_tokens: int | None = None
    reading: Reading = field(default_factory=Reading)
    dtype: str = "auto"
    shard_tokens: int = 100_000_000
    hub: str | None = None

    def __post_init__(self) -> None:
        size = parse_tokenizer(self.tokenizer)
        dtype_for(50_257 if size is None else size, self.dtype)
        for name, value, least in (
            ("val_tokens", self.val_tokens, 0),
            ("max_tokens", self.max_tokens, 1),
            ("shard_tokens", self.shard_tokens, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}; it must be {least} or more.")

    def record(self) -> dict[str, Any]:
        """The fields that decide the result, as the manifest keeps them beside the source's description."""
        return {
            name: value for name, value in asdict(self).items() if name not in {"source", "val_source", "hub"}
        }


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation is, for a progress bar; `total` is an estimate of the characters to come."""

    stage: str
    characters: int
    total: int
    tokens: int
    documents: int


Report = Callable[[PrepareProgress], None]


class Reporter:
    """Passes progress on, and lets a source say what it is doing in between."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._latest = PrepareProgress("", 0, 0, 0, 0)

    def __call__(self, progress: PrepareProgress) -> None:
        """Report how far things are."""
        self._latest = progress
        if self._report is not None:
            self._report(progress)

    def say(self, stage: str) -> None:
        """Report another stage at the same point."""
        self(replace(self._latest, stage=stage))
