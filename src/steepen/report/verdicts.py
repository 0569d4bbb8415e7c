"""The verdicts inside an answer's values, wherever the study put them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from steepen.studies.answer import Answer


@dataclass(frozen=True)
class Judged:
    """One arm's verdict as a reader first sees it."""

    arm: str
    reference: str
    word: str
    sentence: str
    would_decide: tuple[str, ...]


def verdicts_of(answer: Answer) -> list[Judged]:
    """Every verdict, in the order of the values, once per arm and sentence."""
    found: dict[tuple[str, str], Judged] = {}
    for value in _walk(answer.values):
        texts = [value.get(key) for key in ("arm", "word", "sentence")]
        if all(isinstance(text, str) and text for text in texts):
            arm, word, sentence = (str(text) for text in texts)
            more = value.get("would_decide")
            lines = tuple(map(str, more)) if isinstance(more, list | tuple) else ()
            judged = Judged(arm, str(value.get("reference") or ""), word, sentence, lines)
            found.setdefault((arm, sentence), judged)
    return list(found.values())


def other_findings(answer: Answer, verdicts: list[Judged]) -> list[str]:
    """Findings that do not merely repeat a verdict's sentence."""
    said = {judged.sentence for judged in verdicts}
    return [finding for finding in answer.findings if finding not in said]


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)
