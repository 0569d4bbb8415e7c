"""Primary and secondary verdicts of an answer."""

from __future__ import annotations

from steepen.studies.answer import Answer, StudyVerdict


def primary_verdicts(answer: Answer) -> list[StudyVerdict]:
    """The verdicts that answer the study's question."""
    return [judged for judged in answer.verdicts if judged.primary]


def secondary_verdicts(answer: Answer) -> list[StudyVerdict]:
    """Secondary verdicts, such as those per second."""
    return [judged for judged in answer.verdicts if not judged.primary]
