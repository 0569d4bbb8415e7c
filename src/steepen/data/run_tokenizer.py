"""The tokenizer that a run directory keeps: GPT-2's by name, which ships with the package, else whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from steepen.data.dataset import Dataset
from steepen.data.manifest import TOKENIZER
from steepen.data.tokenizer import Tokenizer
from steepen.errors import SteepenError
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json, read_json

FORMAT = "steepen-run-tokenizer-1"
GPT2_IDENTITY = "ff5ebd3bd6c8c5941d3faacd7efb80574c7f4f0958341d3f9fb3b84ba74bdbac"  # of Tokenizer.gpt2()


def save_run_tokenizer(dataset: Dataset, file: Path) -> None:
    """Write name, size and hash of a data set's tokenizer to a file, with its tokens unless it is GPT-2's."""
    record = dataset.manifest.tokenizer
    content = None
    if record.sha256 != GPT2_IDENTITY:
        dataset.tokenizer()  # raises if the file is missing or is not the data's
        content = read_json(dataset.directory / TOKENIZER)
    kept = {"format": FORMAT, "name": record.name, "size": record.size, "sha256": record.sha256}
    write_atomically(file, canonical_json({**kept, "tokenizer": content}))


def write_run_tokenizer(tokenizer: Tokenizer, file: Path) -> None:
    """Write a tokenizer as the tokenizer of a run."""
    known = tokenizer.identity == GPT2_IDENTITY
    kept = {"format": FORMAT, "name": tokenizer.name, "size": tokenizer.size, "sha256": tokenizer.identity}
    content = None if known else json.loads(tokenizer.content)
    write_atomically(file, canonical_json({**kept, "tokenizer": content}))


def run_tokenizer_identity(file: Path) -> str | None:
    """The hash of the tokenizer that a run's file describes; None for a run without the file."""
    return str(_read(file)["sha256"]) if file.is_file() else None


def load_run_tokenizer(file: Path) -> Tokenizer | None:
    """The tokenizer of a run, checked against its hash; None for a run without the file."""
    if not file.is_file():
        return None
    kept = _read(file)
    content = kept["tokenizer"]
    tokenizer = Tokenizer.gpt2() if content is None else Tokenizer.from_content(content, file)
    if tokenizer.identity != kept["sha256"]:
        raise SteepenError(f"{file} is corrupt: its tokenizer does not have the hash it states.")
    return tokenizer


def _read(file: Path) -> dict[str, Any]:
    try:
        kept = cast("dict[str, Any]", read_json(file))
        if kept["format"] != FORMAT:
            raise SteepenError(f"{file} has format {kept['format']!r}, not {FORMAT!r}.")
        return {"sha256": kept["sha256"], "tokenizer": kept["tokenizer"]}
    except (ValueError, KeyError, TypeError) as error:
        raise SteepenError(f"{file} is not the tokenizer of a run ({error}).") from None
