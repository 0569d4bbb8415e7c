"""How far a preparation can be trusted: a position in the source, and the lengths on disk at that moment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from steepen.errors import SteepenError
from steepen.utils.files import write_atomically

JOURNAL = "journal.json"


@dataclass
class State:
    """The next unit to read, what was written before it, and counts for the manifest."""

    part: int = 0
    unit: int = 0
    characters: int = 0
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    empty: int = 0
    dropped: int = 0
    chosen: int = 0
    threshold: int | None = None  # of the split, once it is settled
    finished: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    open_tokens: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})


def read_journal(work: Path) -> tuple[dict[str, Any], State] | None:
    """What was asked for and how far it came, or None where nothing was begun."""
    path = work / JOURNAL
    try:
        stored = cast("dict[str, Any]", json.loads(path.read_bytes()))
        return stored["asked"], State(**stored["state"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise SteepenError(f"{path} is damaged ({error}); use --restart to begin again.") from None


def write_journal(work: Path, asked: dict[str, Any], state: State) -> None:
    """Record a state; everything it speaks of must be on the disk already."""
    content = {"asked": asked, "state": asdict(state)}
    write_atomically(work / JOURNAL, json.dumps(content, indent=1).encode())
