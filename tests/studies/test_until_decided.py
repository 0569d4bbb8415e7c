"""`study ladder --until decided`: batches, budgets, the journal, and resuming to the same answer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.launch.base import Outcome
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.context import StudyContext
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.studies.ladders.ladder import ladder
from steepen.studies.synthetic import Formula, fabricate_record
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import with_checksum, write_json

ARMS = ["vanilla", "deep-vanilla"]


def loss(growth: float, noise: float = 2e-3) -> Callable[[RunSpec], float]:
    def found(spec: RunSpec) -> float:
        key = f"{spec.arm.name} d{spec.shape.depth} seed {spec.seed}"
        draw = float(np.random.default_rng(zlib.crc32(key.encode())).standard_normal())
        gamma = 0.1113 + growth * (spec.arm.name != "vanilla")
        return 1.8 + 1.3 * (expected_flops(spec) / 1e19) ** -gamma + noise * draw

    return found


def test_it_stops_early_and_says_so(paper: StudyContext) -> None:
    driven = Formula(loss(0.03))
    answer = driven.answer(ladder(paper, arms=ARMS, until="decided"))
    fixed = Formula(loss(0.03))
    fixed.answer(ladder(paper, arms=ARMS))
    assert sum(map(expected_flops, driven.specs)) < 0.5 * sum(map(expected_flops, fixed.specs))
    assert "deep-vanilla, grows: grows" in answer.findings[0]
    assert answer.verdicts[0].verdict.growth == "grows"
    assert answer.verdicts[0].verdict.levels[0] < 0.05, "the words of the verdict account for the looks"
    assert any(table.title == "Looks" for table in answer.tables)
    assert len({spec.hash for spec in driven.specs}) == len(driven.specs), "no run is asked for twice"


def test_what_hangs_on_e_is_asked_at_a_level_that_accounts_for_the_looks(paper: StudyContext) -> None:
    """The runs alone, at the level of one test, would say *worse*."""
    options: dict[str, Any] = {"until": "decided", "effect": 1.02, "budget": "2e20"}
    answer = Formula(loss(0.004, 8e-3)).answer(ladder(paper, arms=ARMS, **options))
    assert answer.verdicts[0].verdict.better == "not resolved"
    words = [one["answers"]["deep-vanilla"] for one in answer.values["flops"]["e_sweep"]]
    assert words == ["not resolved; undecided"] * len(words) and words


def test_a_fixed_ladder_stays_the_default(paper: StudyContext) -> None:
    driven = Formula(loss(0.01))
    answer = driven.answer(ladder(paper, arms=ARMS))
    assert len(driven.batches) == 1 and "looks" not in answer.values
    with pytest.raises(UsageError, match="until"):
        ladder_batch(paper, effect=1.2)


def ladder_batch(context: StudyContext, **options: Any) -> Any:
    return next(ladder(context, arms=ARMS, **options))


@pytest.mark.parametrize("budget", ["1.5e20", "4h"])
def test_the_budget_is_kept(paper: StudyContext, budget: str) -> None:
    driven = Formula(loss(0.001))
    answer = driven.answer(ladder(paper, arms=ARMS, until="decided", effect=1.02, budget=budget))
    assert answer.values["looks"], "a look even where the budget buys nothing more"
    start = sum(map(expected_flops, driven.batches[0]))
    if budget.endswith("e20"):
        assert sum(map(expected_flops, driven.specs)) <= max(1.5e20, start)
    else:  # 1e10 FLOPs a second: the start alone takes longer
        assert len(driven.batches) == 1


def test_a_ladder_that_costs_less_than_its_first_batch_is_rejected_before_any_run(
    paper: StudyContext,
) -> None:
    short: dict[str, Any] = {"rungs": (6, 8, 10, 12), "seeds": (0,), "until": "decided"}
    with pytest.raises(UsageError, match="FLOPs, the whole ladder"):
        ladder_batch(paper, **short)
    assert ladder_batch(paper, **short, budget="1e22")
    with pytest.raises(UsageError, match="FLOPs, the `budget` 1e18"):
        ladder_batch(paper, **short, budget="1e18")


class Formulas:
    """A launcher whose runs have losses by a formula; stops after a number of runs."""

    slots = 1

    def __init__(self, store: RunStore, loss: Callable[[RunSpec], float], most: int = 10**6) -> None:
        self.store, self.loss, self.left = store, loss, most

    def launch(self, specs: Iterable[RunSpec]) -> Iterable[Outcome]:
        for spec in specs:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            record = fabricate_record(spec, self.loss(spec))
            run = self.store.run(spec)
            run.path.mkdir(parents=True, exist_ok=True)
            write_json(run.record_file, with_checksum(to_builtins(record)))
            yield Outcome(spec, record=record)


def journal_of(folder: Path, context: StudyContext, stops: list[int]) -> dict[str, Any]:
    """The journal of a study that is stopped after some runs, again and again, without its times."""
    store = RunStore(folder / "runs")
    options = {"until": "decided", "effect": 1.03}
    for most in [*stops, 10**6]:
        journal = Journal.open(folder, "study", options, folder / "runs")
        study = ladder(context, arms=ARMS, until="decided", effect=1.03)
        try:
            drive(study, store, Formulas(store, loss(0.002), most), journal=journal)  # pyright: ignore[reportArgumentType]
        except BaseException as error:
            assert most < 10**6, error
    found = json.loads((folder / "study" / "study.json").read_text())
    for name in ("began", "changed", "runs_directory", "checksum"):
        found.pop(name, None)
    return found


def test_a_killed_study_goes_on_to_the_same_journal(paper: StudyContext, tmp_path: Path) -> None:
    whole = journal_of(tmp_path / "a", paper, [])
    pieces = journal_of(tmp_path / "b", paper, [5, 9, 7])
    assert whole["notes"][0]["plan"]["effect"] == 1.03, "the plan is written before the first run"
    assert len(whole["notes"]) == whole["batches"] >= 2, "every look stands before the batch that it chose"
    assert [note["look"]["number"] for note in whole["notes"][1:]] == list(range(1, whole["batches"]))
    assert pieces == whole
