"""What `generate` returns: the text that continues each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from steepen.results.result import Result
from steepen.results.text import Block, Lines
from steepen.utils.formatting import counted


@dataclass(frozen=True)
class TextRow:
    """A prompt and the text that continues it."""

    prompt: str
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class GeneratedTexts(Result):
    """Generated texts without their prompts: `found[0]`, `len(found)`, `for text in found`."""

    run: str
    passes: int | None  # None: as many as the run is evaluated at
    seed: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> str:
        return self.texts[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    @property
    def rows(self) -> list[TextRow]:
        """One row per prompt."""
        return [TextRow(*pair) for pair in zip(self.prompts, self.texts, strict=True)]

    def headline(self) -> str:
        """How many texts there are, and of which run."""
        return f"{counted(len(self.texts), 'text')} of {self.run}"

    def to_dict(self) -> dict[str, Any]:
        """Run, passes, seed, and prompts with their texts."""
        texts = [asdict(row) for row in self.rows]
        return {"run": self.run, "passes": self.passes, "seed": self.seed, "texts": texts}

    def blocks(self, width: int) -> Iterable[Block]:
        """Every prompt with its text."""
        return [Lines(f"{row.prompt}{row.text}\n") for row in self.rows]
