"""A small corpus of made-up documents and a prepared directory of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import steepen
from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare

WORDS = """
the of and a to in is was that for it with as his on be at by had not are but from or have an they which
one you were her all she there would their we him been has when who will more no if out so said what up
its about into than them can only other new some could time these two may then do first any my now such
like our over man me even most made after also did many before must through years where much your way
""".split()  # noqa: SIM905


def sentences(seed: int, count: int) -> str:
    """Made-up prose with paragraphs, digits, accents and emoji."""
    choose = random.Random(seed)
    spice = ["naïve", "42", "“so”", "don't", "café", "日本語", "🙂", "x=1"]
    lines: list[str] = []
    for _ in range(count):
        words: list[str] = choose.choices(WORDS, k=choose.randint(4, 14))
        if choose.random() < 0.3:
            words.insert(1, choose.choice(spice))
        lines.append(" ".join(words).capitalize() + choose.choice([".", ".\n\n", "?", ".\n"]))
    return " ".join(lines).strip()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Environment in which a new interpreter imports this source tree."""
    return {**os.environ, "PYTHONPATH": str(Path(steepen.__file__).parents[1])}


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """400 documents of a few hundred characters."""
    return [sentences(seed, 3 + seed % 9) for seed in range(400)]


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, list[str]], Path]:
    """Writes documents as JSON lines."""
    import json

    def write(path: Path, texts: list[str]) -> Path:
        path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
        return path

    return write


@pytest.fixture(scope="session")
def corpus(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[str],
    write_jsonl: Callable[[Path, list[str]], Path],
) -> Path:
    """The documents as one JSON-lines file."""
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "documents.jsonl", documents)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Dataset:
    """The corpus prepared with GPT-2's tokenizer in shards of 5,000 tokens."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    return prepare(PrepareRequest((str(corpus),), val_tokens=2_000, shard_tokens=5_000), out)
