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
    main: bool  # the answer's findings state it; others (per second beside per FLOP) come after
    part: str  # the name of the values it was found under


def verdicts_of(answer: Answer) -> list[Judged]:
    """Every verdict, those of the findings first, else in the order of the values; once per sentence."""
    found: dict[tuple[str, str, str], Judged] = {}
    for part, values in answer.values.items():
        for value in _walk(values):
            texts = [value.get(key) for key in ("arm", "word", "sentence")]
            if all(isinstance(text, str) and text for text in texts):
                arm, word, sentence = (str(text) for text in texts)
                more = value.get("what_would_change")
                lines = tuple(map(str, more)) if isinstance(more, list | tuple) else ()
                reference = str(value.get("reference") or "")
                stated = sentence in answer.findings
                judged = Judged(arm, reference, word, sentence, lines, stated, part)
                found.setdefault((arm, sentence, "" if stated else part), judged)
    stated = {(judged.arm, judged.sentence) for judged in found.values() if judged.main}
    kept = [j for j in found.values() if j.main or (j.arm, j.sentence) not in stated]
    return sorted(kept, key=lambda judged: not judged.main)


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
