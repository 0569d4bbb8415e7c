"""Number of runs and total FLOPs of every study at every preset, with losses from a formula, not training.

python benchmarks/studies_cost.py
"""

from __future__ import annotations

import math

from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.studies.registry import STUDIES
from steepen.studies.synthetic import Formula, growth_fraction_of, tokens_per_parameter

VOCABULARY = {"tiny": 512, "mini": 4096, "paper": 50_304}


def bowl(spec: RunSpec) -> float:
    """Loss with an optimum inside every sweep, so that no adaptive study stops early."""
    h = spec.hyperparameters
    distances = (
        math.log(h.learning_rate / 0.05), math.log(tokens_per_parameter(spec) / 6),
        2 * (growth_fraction_of(spec) - 0.3), math.log(spec.schedule.final / 2),
    )  # fmt: skip
    noise = 1e-4 * math.sin(int(spec.hash[:6], 16))
    return 2 + 2 * expected_flops(spec) ** -0.02 + 0.01 * sum(x * x for x in distances) + noise


def main() -> None:
    print(f"{'study':18}" + "".join(f"{name:>24}" for name in VOCABULARY))
    for name, study in STUDIES.items():
        cells: list[str] = []
        for preset, vocabulary in VOCABULARY.items():
            context = StudyContext(load_preset(preset), DatasetInfo("f" * 64, vocabulary, 10**13, 10**10))
            formula = Formula(bowl)
            formula.answer(study.start(context, {}))
            flops = {spec.hash: expected_flops(spec) for spec in formula.specs}
            cells.append(f"{len(flops)} runs, {sum(flops.values()):.1e}")
        print(f"{name:18}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
