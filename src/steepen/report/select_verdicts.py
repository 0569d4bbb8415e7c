"""Primary and secondary verdicts of an answer, and its findings besides them."""

from __future__ import annotations

from steepen.studies.answer import Answer, StudyVerdict


def primary_verdicts(answer: Answer) -> list[StudyVerdict]:
    """The verdicts that answer the study's question."""
    return [judged for judged in answer.verdicts if judged.primary]


def secondary_verdicts(answer: Answer) -> list[StudyVerdict]:
    """Secondary verdicts, such as those per second."""
    return [judged for judged in answer.verdicts if not judged.primary]


def other_findings(answer: Answer) -> list[str]:
    """Findings that do not repeat a primary verdict."""
    verdicts = {judged.finding for judged in primary_verdicts(answer)}
    return [finding for finding in answer.findings if finding not in verdicts]
