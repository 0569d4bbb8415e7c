"""What CORE is and how it is scored: the labels of its tasks (22, and the paper's subset of 17), and the
convention of the paper's authors or nanochat's.

Both shuffle a task's examples with one seed, draw the demonstrations of example i from a generator seeded
s + i, crop long prompts to their last tokens and choose answers alike. They differ in the seeds s, in blanks
at the ends of a prompt, and in which tokens the answer NLL covers.
"""

from __future__ import annotations

from dataclasses import dataclass

from steepen.errors import UsageError

# Table "DCLM CORE tasks and evaluation types", by the labels of the bundle's core.yaml.
CORE22 = (
    "hellaswag_zeroshot",
    "jeopardy",
    "bigbench_qa_wikidata",
    "arc_easy",
    "arc_challenge",
    "copa",
    "commonsense_qa",
    "piqa",
    "openbook_qa",
    "lambada_openai",
    "hellaswag",
    "winograd",
    "winogrande",
    "bigbench_dyck_languages",
    "agi_eval_lsat_ar",
    "bigbench_cs_algorithms",
    "bigbench_operators",
    "bigbench_repeat_copy_logic",
    "squad",
    "coqa",
    "boolq",
    "bigbench_language_identification",
)

# The 17 tasks that pass the filter on the paper's eight Vanilla checkpoints (the same table's Filter column),
# by category, as the paper's figure of task residuals groups them.
CATEGORIES = {
    "commonsense_reasoning": ("copa", "piqa", "openbook_qa"),
    "language_understanding": ("hellaswag_zeroshot", "hellaswag", "lambada_openai", "winograd", "winogrande"),
    "reading_comprehension": ("squad", "coqa"),
    "symbolic_problem_solving": ("bigbench_dyck_languages", "agi_eval_lsat_ar", "bigbench_operators"),
    "world_knowledge": ("jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge"),
}
CORE17 = tuple(label for label in CORE22 if any(label in tasks for tasks in CATEGORIES.values()))
FILTERED_OUT = frozenset(CORE22) - frozenset(CORE17)


@dataclass(frozen=True)
class Convention:
    """The parts of the protocol that differ."""

    name: str
    seeds: tuple[int, ...]  # s, one evaluation each
    strip_prompts: bool  # prompts of multiple choice and schema lose blanks at both ends
    # Answer NLL of multiple choice and schema: over the whole right answer, or over the tokens that decide
    # between the candidates (after the common prefix of the choices, the common suffix of the contexts).
    whole_answer: bool


AUTHORS = Convention("authors", (0, 1, 2), strip_prompts=True, whole_answer=True)
NANOCHAT = Convention("nanochat", (1234,), strip_prompts=False, whole_answer=False)
CONVENTIONS = {convention.name: convention for convention in (AUTHORS, NANOCHAT)}


def find_convention(name: str) -> Convention:
    """A convention by its name."""
    if name not in CONVENTIONS:
        raise UsageError(f"`convention` = {name!r} is not valid: use {' or '.join(CONVENTIONS)}.")
    return CONVENTIONS[name]
