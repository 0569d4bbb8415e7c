"""Write finished studies whose losses come from known laws, to look at a report without training.

    python benchmarks/report_simulated.py FOLDER
    steepen report ladder --studies FOLDER/studies --out FOLDER/report

Every study is the package's own, at preset `paper`, with the loss of each run that it asks for given by a
formula: arms with known exponents and constants, sweeps with known optima. The runs of the ladders have
records, loss curves and texts, as training would have written them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.recipe.flops import stored_parameters
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.journal import Journal
from steepen.studies.ladders import ladder_runs
from steepen.studies.preset import load_preset
from steepen.studies.registry import find_study
from steepen.studies.synthetic import Formula, fabricate_record, tokens_per_parameter
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json, write_json

IRREDUCIBLE, C0, NOISE = 1.69, 8e18, 1e-3
# By arm: exponent γ and constant −log A at C0.
LAWS = {
    "vanilla": (0.1100, -0.260),
    "deep-vanilla": (0.1101, -0.251),
    "operator-1": (0.1131, -0.240),
    "loop-2": (0.1128, -0.242),
    "untied-2": (0.1129, -0.232),
    "loop-grow": (0.1149, -0.235),
    "untied-grow": (0.1160, -0.219),
    "deep-vanilla-grow": (0.1124, -0.237),
}
TAPE = "These losses were drawn from laws with known exponents and optima; nothing was trained."


def context() -> StudyContext:
    """Preset `paper` on data that never ends."""
    plenty = 10**13
    return StudyContext(load_preset("paper"), DatasetInfo("simulated", 50_304, plenty, plenty, 50_257))


def noise(spec: RunSpec) -> float:
    """A normal deviate that the run's hash decides."""
    return NOISE * random.Random(spec.hash).gauss(0.0, 1.0)


def law(spec: RunSpec) -> float:
    """Loss on the compute-optimal law of the run's arm."""
    gamma, height = LAWS[spec.arm.name]
    return IRREDUCIBLE + math.exp(-height) * (expected_flops(spec) / C0) ** -gamma + noise(spec)


def tokens_valley(spec: RunSpec) -> float:
    """Loss with an optimum at six tokens per parameter, outside the sweeps of the largest budget."""
    best = 6.0 if expected_flops(spec, "matrix") < 6e18 else 60.0
    return law(spec) + 0.03 * math.log(tokens_per_parameter(spec) / best) ** 2


def overfitting(spec: RunSpec) -> float:
    """Loss on repeated data: stored parameters overfit, less with weight decay; passes only cost compute."""
    size = stored_parameters(spec.arm, spec.shape, 1) / 2e8
    decay = 0.03 * math.log(spec.hyperparameters.weight_decay / (0.4 * size**0.5)) ** 2
    repeated = 0.05 * (spec.data.epochs - 1) / 9 * size**0.8
    return 3.0 + 0.6 / (size * spec.schedule.final**0.4) ** 0.25 + repeated + decay + noise(spec)


def missed(spec: RunSpec) -> float:
    """A ladder's law, which the held-out run beats by 0.03."""
    return law(spec) - 0.03 * (spec.shape.depth > 20)


STUDIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ladder": ("ladder", law, {"arms": ("vanilla", "operator-1", "untied-grow")}),
    "family": ("ladder", law, {"arms": tuple(LAWS)}),
    "tpp": ("tpp", tokens_valley, {"arms": ("vanilla", "untied-2")}),
    "data-constrained": ("data-constrained", overfitting, {"parts": ("grid",)}),
    "extrapolate": ("extrapolate", missed, {}),
}


def simulate(name: str, store: RunStore | None = None, **changed: Any) -> Answer:
    """The answer of a simulated study, labelled as such; with a store, its runs are written there."""
    study, loss, options = STUDIES[name]
    formula = Formula(loss)
    answer = formula.answer(find_study(study).start(context(), {**options, **changed}))
    if store is not None:
        for spec in {spec.hash: spec for spec in formula.specs}.values():
            save(store, fabricate_record(spec, loss(spec)))
    return replace(
        answer,
        question=f"Simulated laws: {answer.question}",
        findings=(TAPE, *answer.findings),
        runs=answer.runs if store is not None else (),
        panels=tuple(
            replace(panel, caption=f"Simulated. {panel.caption}".strip()) for panel in answer.panels
        ),
    )


def save(store: RunStore, record: RunRecord) -> None:
    """Write spec, record, loss curve and texts of a finished run."""
    run = store.run(record.spec)
    write_json(run.spec_file, record.spec.to_dict())
    write_json(run.record_file, record.to_dict())
    steps = [round(record.spec.steps * (i / 20) ** 2) for i in range(1, 21)]
    lines = [
        {"step": step, "loss": record.validation_loss + 3.0 * (step / 20) ** -0.7, "tokens": step * 524_288}
        for step in sorted({max(1, step) for step in steps})
    ]
    write_atomically(run.metrics_file, b"".join(canonical_json(line) + b"\n" for line in lines))
    text = {"step": steps[-1], "prompt": "Scaling", "text": " is simulated here: no network wrote this."}
    write_atomically(run.path / "samples.jsonl", canonical_json(text) + b"\n")


def write_study(folder: Path, name: str, answer: Answer) -> Path:
    """Write the journal of a finished study."""
    journal = Journal.open(folder / "studies", name, {"simulated": True}, folder / "runs")
    journal.set_answer(answer)
    return journal.folder


def main(folder: Path, draws: int = ladder_runs.DRAWS, names: Sequence[str] = tuple(STUDIES)) -> None:
    """Write every simulated study; runs only of the ladders."""
    folder = folder.absolute()
    before, ladder_runs.DRAWS = ladder_runs.DRAWS, draws
    store = RunStore(folder / "runs")
    try:
        for name in names:
            answer = simulate(name, store if STUDIES[name][0] == "ladder" else None)
            print(write_study(folder, name, answer))
    finally:
        ladder_runs.DRAWS = before


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/report_simulated.py FOLDER")
    main(Path(sys.argv[1]))
