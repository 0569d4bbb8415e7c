"""A small CORE bundle with every task type."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "red", "blue", "mat", "house", "tree"]
WORDS += ["and", "then", "because", "so", "it", "was", "old", "new"]
CONFIG = """\
icl_tasks:
-
  label: choose
  dataset_uri: one/choose.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
-
  label: choose_shots
  dataset_uri: one/choose.jsonl
  num_fewshot: [3]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
-
  label: ending
  dataset_uri: two/ending.jsonl
  num_fewshot: [2]
  icl_task_type: schema
-
  label: complete
  dataset_uri: two/complete.jsonl
  num_fewshot: [2]
  icl_task_type: language_modeling
"""


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def write_bundle(root: Path) -> Path:
    rng = random.Random(7)
    choose = [
        {
            "query": words(rng, 3, 12) + rng.choice(["", " ", "\n"]),
            "choices": [words(rng, 1, 6) for _ in range(rng.randint(2, 5))],
        }
        for _ in range(14)
    ]
    for item in choose:
        item["gold"] = rng.randrange(len(item["choices"]))
    # The traps of the real bundle: a choice that begins another, equal choices, a leading blank.
    choose[0] |= {"choices": ["the mat", "the mat was old"], "gold": 1}
    choose[1] |= {"choices": ["so it", "so it"], "gold": 1}
    choose[2] |= {"choices": [" red", "  blue", "mat"], "gold": 2}
    ending = [
        {
            "context_options": [f"{stem} {end}" for end in ("cat", "old dog")],
            "continuation": words(rng, 2, 5),
            "gold": rng.randrange(2),
        }
        for stem in (words(rng, 3, 8) for _ in range(9))
    ]
    complete = [
        {"context": words(rng, 4, 10) + rng.choice(["", "  ", "\n"]), "continuation": words(rng, 1, 3)}
        for _ in range(11)
    ]
    complete[0]["continuation"] += " "  # ends in a blank: prompts with it cannot be cut there
    for name, items in {"one/choose": choose, "two/ending": ending, "two/complete": complete}.items():
        file = root / "eval_data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    (root / "core.yaml").write_text(CONFIG)
    rows = ["choose,30", "choose_shots,30", "ending,50", "complete,0", "mmlu,"]
    (root / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n" + "\n".join(rows) + "\n")
    return root
