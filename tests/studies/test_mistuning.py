"""Planted errors of a ladder are found from its metrics, with few false alarms, and shown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import steepen
from run_fixtures import Spec
from steepen.results.study import Status, answer_blocks
from steepen.results.text import WIDTH, Paragraph
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer
from steepen.studies.driver.journal import Journal
from steepen.studies.driver.study_status import study_status, with_mistuned
from steepen.studies.mistuning import RunTrace, find_mistuned, mistuned_runs, read_trace
from steepen.studies.tuned_ladder import LEVEL, OWN, RUNG, SHARED, off_the_curve

ROOT2 = math.sqrt(2)
OF_ARM = np.where(np.isfinite(OWN), OWN, 0.0)


def ladder(
    rng: np.random.Generator,
    multiples: Sequence[float],
    name: str = "arm",
    bend: float = 0.0,
    streams: bool = True,
    shared: np.ndarray | None = None,
) -> list[RunTrace]:
    """Traces with the effects of a wrong rate that tiny ladders had (docs/log.md), noise and trends.

    `shared` are the slopes and bends that ladders of a preset have in common.
    """
    found: list[RunTrace] = []
    slopes, bends = (0.0 if shared is None else shared) + rng.normal(
        0.0, np.where(np.isfinite(OWN), OWN, 0.0)
    )
    middle = (len(multiples) - 1) / 2
    for i, multiple in enumerate(multiples):
        wrong = math.log2(multiple)
        high, low = max(0.0, wrong), min(0.0, wrong)
        loss = 1.5 - 0.06 * i + bend * i**2 + 0.035 * low**2 + 0.008 * high**2
        stream = 1.0 + 0.35 * high + 0.4 * low if streams else math.nan
        numbers = np.array([loss, 0.25 - 0.04 * wrong, 0.5 - 0.2 * i + 0.5 * high**2, stream])
        numbers += slopes * math.log(2.5) * (i - middle) + bends * (i / middle - 1) ** 2
        a, b, c, d = (numbers + np.array(RUNG) * rng.standard_normal(4)).tolist()
        place = (f"{name}{i}", name, name, i + 2, 0, 1e10 * 2.5**i, 1000, multiple, f"{name} {i}")
        found.append(RunTrace(*place, a, b, c, d, 0, None))
    return found


def share(
    multiples: Sequence[float], depth: int | None, factor: float | None, beside: bool, streams: bool = True
) -> float:
    """How often an error of a ladder is found at a depth (None: anywhere), with the right check."""
    rng, hits, draws = np.random.default_rng(0), 0, 50
    for _ in range(draws):
        kind: dict[str, Any] = {"streams": streams, "shared": rng.normal(0.0, SHARED)}
        other = ladder(rng, [1.0] * len(multiples), "other", **kind) if beside else []
        own = ladder(rng, multiples, **kind) + other
        found = [one for one in find_mistuned(own) if one.ladder == "arm"]
        sides = (None, factor)  # where the loss alone tells, both sides are to be tried
        hits += any(depth in (None, one.depth) and (factor is None or one.factor in sides) for one in found)
    return hits / draws


@pytest.mark.parametrize("beside", [False, True])
def test_one_rung_at_twice_or_half_its_rate_is_found(beside: bool) -> None:
    assert share([1.0] * 7, None, None, beside) <= 0.05
    for place in range(7):
        for multiple, factor in ((0.5, ROOT2), (2.0, math.sqrt(0.5))):
            multiples = [multiple if i == place else 1.0 for i in range(7)]
            assert share(multiples, place + 2, factor, beside) >= 0.8, (place, multiple)


@pytest.mark.parametrize("beside", [False, True])
def test_a_rate_that_drifts_is_found(beside: bool) -> None:
    up = [2 ** (i / 3 - 1) for i in range(7)]
    # A rung may be named instead: then it is one whose rate is off.
    for multiples in (up, up[::-1]):
        assert share(multiples, None, None, beside) >= 0.8


@pytest.mark.parametrize("beside", [False, True])
def test_runs_whose_residual_stream_was_not_written_are_judged_by_the_rest(beside: bool) -> None:
    assert share([1.0] * 7, None, None, beside, streams=False) <= 0.05
    for multiple, factor in ((0.5, ROOT2), (2.0, math.sqrt(0.5))):
        multiples = [1.0, 1.0, 1.0, multiple, 1.0, 1.0, 1.0]
        assert share(multiples, 5, factor, beside, streams=False) >= 0.8


@pytest.mark.parametrize("rungs", [4, 8])
def test_the_limit_is_that_of_the_ladders_own_rungs(rungs: int) -> None:
    """False alarms are as many in short ladders as in long ones, of long runs and of short ones."""
    rng, draws = np.random.default_rng(2), 800
    x = np.linspace(0.0, (rungs - 1) * math.log(2.5), rungs)
    along = x - x.mean()
    trend = np.hypot(SHARED, OF_ARM)
    for steps in (5000, 200):
        short = np.sqrt(
            (1 + np.array([400, 400, 1000, 2000]) / steps) / (1 + np.array([400, 400, 1000, 2000]) / 5000)
        )
        alarms = 0
        for _ in range(draws):
            slopes, bends = rng.normal(0.0, trend)
            numbers = np.outer(along, slopes) + np.outer((along / along.max()) ** 2, bends)
            numbers += np.array(RUNG) * rng.standard_normal((rungs, 4))
            alarms += bool(off_the_curve(x, short * numbers, np.full(rungs, steps)))
        assert 0.4 * LEVEL < alarms / draws < 1.4 * LEVEL, steps


def test_depths_of_one_compute_in_another_ladder_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """They have a mean, and the others are judged beside them."""
    rng = np.random.default_rng(6)
    own, other = (ladder(rng, [1.0] * 6, name) for name in ("own", "other"))
    other[1:1] = [replace(other[0], depth=20, setting="other 20")]
    assert find_mistuned([*own, *other]) == () and not list(recwarn)


def test_another_ladder_tells_what_bends_all(rungs: int = 7) -> None:
    """A drift is found more often beside a ladder that has its trends, and the trend of all is no alarm."""
    rng, alone, beside, draws = np.random.default_rng(7), 0, 0, 150
    up = [2 ** (2 * i / (rungs - 1) - 1) for i in range(rungs)]
    for _ in range(draws):
        shared = rng.normal(0.0, SHARED)
        own, other = ladder(rng, up, shared=shared), ladder(rng, [1.0] * rungs, "other", shared=shared)
        alone += bool(find_mistuned(own))
        beside += any(one.ladder == "arm" for one in find_mistuned([*own, *other]))
    assert beside > alone >= 0.8 * draws


def test_sizes_at_one_compute_are_no_ladder() -> None:
    """Their losses have a minimum, and their other numbers follow the size: no errors of the rate."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        own = ladder(rng, [1.0] * 6)
        at_once = [
            replace(one, flops=1e12 * (1 + 0.01 * rng.random()), loss=1.2 + 0.01 * (i - 2.5) ** 2)
            for i, one in enumerate(own)
        ]
        assert find_mistuned(at_once) == ()
        assert find_mistuned(replace(one, flops=1e12) for one in own) == ()


def test_a_drift_is_told_with_the_check_of_the_top_rung() -> None:
    rng = np.random.default_rng(4)
    up = [2 ** (i / 3 - 1) for i in range(7)]
    found = [find_mistuned(ladder(rng, rates)) for rates in [up, up[::-1]] * 10]
    drifts = [one[0] for one in found if one and one[0].kind == "drift"]
    assert len(drifts) >= 5
    assert all(one.depth == 8 and "drifts along its ladder" in one.reason for one in drifts)
    assert {one.factor for one in drifts} == {ROOT2, math.sqrt(0.5)}


def test_a_bend_that_all_ladders_have_is_no_error() -> None:
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(50):
        found = find_mistuned([
            *ladder(rng, [1.0] * 7, "a", bend=0.003), *ladder(rng, [1.0] * 7, "b", bend=0.003)
        ])  # fmt: skip
        alarms += len({one.ladder for one in found})
    assert alarms <= 5  # of 100 ladders


def write_run(
    store: RunStore, trainer: ModuleType, spec: RunSpec, losses: Sequence[float], rates: Sequence[float]
) -> None:
    run = store.run(spec)
    run.path.mkdir(parents=True)
    run.spec_file.write_text(json.dumps(spec.to_dict()))
    lines = [
        {"step": i + 1, "loss": loss, "lr": rate, "gradient_norm": 0.1}
        for i, (loss, rate) in enumerate(zip(losses, rates, strict=True))
    ]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.record_file.write_text(json.dumps(trainer.record_of(spec, losses[-1]).to_dict()))


def curve(steps: int) -> np.ndarray:
    noise = 0.02 * np.random.default_rng(3).standard_normal(steps)
    return 3 + 2 * np.exp(-np.arange(steps) / (0.2 * steps)) + noise


def rate(steps: int, last: float = 0.0) -> list[float]:
    return np.interp(np.arange(steps), [0, 0.6 * steps, steps - 1], [1, 1, last]).tolist()


def test_spikes_and_unfinished_decays_are_told_with_their_check(
    spec: Spec, store: RunStore, trainer: ModuleType, tmp_path: Path
) -> None:
    good, spiked, early, one_batch = (spec(seed, steps=200) for seed in range(4))
    bumped, single = curve(200), curve(200)
    bumped[100:110] *= 1.3
    single[100] *= 1.3
    write_run(store, trainer, good, curve(200).tolist(), rate(200))
    write_run(store, trainer, spiked, bumped.tolist(), rate(200))
    write_run(store, trainer, early, curve(200).tolist(), rate(200, 0.5))
    write_run(store, trainer, one_batch, single.tolist(), rate(200))
    every = [good, spiked, early, one_batch]
    found = mistuned_runs(store.root, store.records())
    assert {one.run: one.kind for one in found} == {spiked.hash: "spike", early.hash: "decay"}
    # A study that requested them says so in its status, with the run that would tell.
    journal = Journal.open(tmp_path / "studies", "sweep", {}, store.root)
    journal.add_batch(every)
    status = with_mistuned(study_status(Journal.read(tmp_path / "studies" / "sweep")))
    assert status.mistuned == found
    words = [one for one in Status((status,), alone=True).blocks(WIDTH) if isinstance(one, Paragraph)]
    assert any("vanilla d2 has a spike" in one.text and "÷ √2" in one.text for one in words)
    assert "mistuned? " in "".join(one.lead + one.text for one in words)
    # Its answer too, where the arm has no verdict: a reference's rungs decide those of all others.
    answer = Answer("sweep", "Which rate?", "", (), {})
    beside = [one.text for one in answer_blocks(answer, WIDTH, found) if isinstance(one, Paragraph)]
    assert any("mistuned? the loss of vanilla d2 has a spike" in text for text in beside)
    assert status.to_dict()["mistuned"][0]["kind"] == found[0].kind


def test_a_rate_that_is_to_stay_has_no_unfinished_decay(
    spec: Spec, store: RunStore, trainer: ModuleType
) -> None:
    base = spec(steps=60)
    constant = replace(base, hyperparameters=replace(base.hyperparameters, warmdown_fraction=0.0))
    for one in (base, constant):
        write_run(store, trainer, one, curve(60).tolist(), rate(60, 1.0))
    (found,) = mistuned_runs(store.root, store.records())
    assert (found.kind, found.run) == ("decay", base.hash)


@pytest.mark.parametrize(("growth", "noise", "advice"), [(0.05, 1e-3, "settled"), (0.01, 0.02, "go on")])
def test_next_lists_the_run_that_would_check_a_mistuned_rung(
    growth: float, noise: float, advice: str, spec: Spec, store: RunStore, trainer: ModuleType, tmp_path: Path
) -> None:
    """Of a study, by name or its beginning, of its runs and their directory; open or settled."""
    steps, every, bad = 100, list[RunSpec](), None
    rng = np.random.default_rng(5)
    for arm in ("vanilla", "deep-vanilla"):
        for depth in (2, 4, 6, 8, 10):
            one = spec(arm=arm, depth=depth, steps=steps)
            flops = trainer.record_of(one).flops / 1e9
            losses = curve(steps)
            if (arm, depth) == ("deep-vanilla", 6):
                losses[50:60] *= 1.3
                bad = one
            law = 1.8 + 1.2 * flops ** -(0.15 + growth * (arm != "vanilla")) + noise * rng.standard_normal()
            write_run(store, trainer, one, (losses * law / losses[-1]).tolist(), rate(steps))
            every.append(one)
    assert bad is not None
    Journal.open(tmp_path / "studies", "pair", {}, store.root).add_batch(every)
    runs = steepen.open_runs(store.root)
    for table in ("pair", "pai", runs, store.root):
        found = steepen.next_runs(table, reference="vanilla", studies=tmp_path / "studies")
        assert found.advice == advice
        first, *rest = found.found.ranked
        assert (first.what, first.arm, first.depth) == ("sweep", "deep-vanilla", 6)
        assert first.rates == (math.sqrt(0.5),) and "spike" in first.reason
        assert first.flops == first.cost == trainer.record_of(bad).flops
        assert all(one.what == "run" for one in rest) and bool(rest) == (advice == "go on")
        assert "at its rate ÷ √2" in " ".join(str(found).split())
    unseen = steepen.next_runs(runs.to_rows(), reference="vanilla")
    assert all(one.what == "run" for one in unseen.found.ranked), "rows alone have no metrics"


def test_the_best_rate_at_the_edge_of_its_sweep(spec: Spec, store: RunStore, trainer: ModuleType) -> None:
    base = spec(steps=60)
    specs: list[RunSpec] = []
    for i, multiple in enumerate((0.5, 1.0, 2.0)):
        hyper = replace(base.hyperparameters, learning_rate=multiple * base.hyperparameters.learning_rate)
        specs.append(replace(base, hyperparameters=hyper))
        write_run(store, trainer, specs[-1], (curve(60) - 0.1 * i).tolist(), rate(60))
    (found,) = mistuned_runs(store.root, store.records())
    assert (found.kind, found.run, found.factor) == ("edge", specs[2].hash, ROOT2)
    assert "edge of its sweep" in found.sentence and "× √2" in found.check
    assert mistuned_runs(store.root, store.records()[:2]) == ()


def test_a_run_without_metrics_has_no_trace(spec: Spec, store: RunStore, trainer: ModuleType) -> None:
    one = spec(steps=60)
    write_run(store, trainer, one, curve(60).tolist(), rate(60))
    record = store.record(one)
    assert record is not None and read_trace(store.run(one), record) is not None
    store.run(one).metrics_file.unlink()
    assert read_trace(store.run(one), record) is None
