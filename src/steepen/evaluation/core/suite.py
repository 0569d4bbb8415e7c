"""The task labels of CORE (22) and of the paper's subset (17), and published scores to compare with."""

from __future__ import annotations

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

# The same table's Filter column: tasks that fail the filter on the paper's eight Vanilla checkpoints.
FILTERED_OUT = (
    "commonsense_qa",
    "boolq",
    "bigbench_language_identification",
    "bigbench_cs_algorithms",
    "bigbench_repeat_copy_logic",
)
CORE17 = tuple(label for label in CORE22 if label not in FILTERED_OUT)

# Categories of the 17 tasks, as the paper's figure of task residuals groups them.
CATEGORIES = {
    "commonsense_reasoning": ("copa", "piqa", "openbook_qa"),
    "language_understanding": ("hellaswag_zeroshot", "hellaswag", "lambada_openai", "winograd", "winogrande"),
    "reading_comprehension": ("squad", "coqa"),
    "symbolic_problem_solving": ("bigbench_dyck_languages", "agi_eval_lsat_ar", "bigbench_operators"),
    "world_knowledge": ("jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge"),
}
