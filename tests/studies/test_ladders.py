"""Ladder studies on synthetic laws: verdicts, forecasts of held-out rungs, transfer and ablations."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from steepen.errors import SteepenError, UsageError
from steepen.model.arms import find_arm
from steepen.recipe.paper_tables import BASE
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.answer import Answer
from steepen.studies.context import StudyContext
from steepen.studies.ladders.ablations import ablations
from steepen.studies.ladders.extrapolate import extrapolate
from steepen.studies.ladders.ladder import ladder
from steepen.studies.stages.transfer import transfer
from steepen.studies.synthetic import Formula, initial_parameters, tokens_per_parameter

C0 = 1e19
# γ, multiplier over vanilla at C0, floor: the truths behind the arms.
LAWS = {
    "vanilla": (0.1113, 1.0, 1.70),
    "deep-vanilla": (0.1113, 1.08, 1.70),
    "operator-1": (0.1180, 1.15, 1.70),
    "untied-grow": (0.1260, 1.40, 1.70),
    "loop-2": (0.1010, 1.02, 1.70),
    "untied-2": (0.1113, 1.25, 1.66),
}

VANILLA_ELRM = BASE["vanilla"].embedding_lr_multiplier


def law(spec: RunSpec, noise: float = 5e-5) -> float:
    gamma, multiplier, floor = LAWS[spec.arm.name]
    flops = expected_flops(spec)
    return floor + 1.25 * multiplier**-0.1113 * (flops / C0) ** -gamma + noise * standard_normal(spec)


def one_law(spec: RunSpec) -> float:
    """The same law for every arm, with noise: fits to exactly equal ladders take six times as long."""
    return 1.7 + 1.25 * (expected_flops(spec) / C0) ** -0.11 * (1 + 1e-3 * standard_normal(spec))


def standard_normal(spec: RunSpec) -> float:
    """A draw for each arm, depth and seed; not of the run's hash, which changes with every spec version."""
    key = f"{spec.arm.name} d{spec.shape.depth} seed {spec.seed}"
    return float(np.random.default_rng(zlib.crc32(key.encode())).standard_normal())


def test_ladder_verdicts_match_the_synthetic_laws(paper: StudyContext) -> None:
    answer = Formula(law).answer(ladder(paper, arms=list(LAWS), seeds=[0, 1, 2]))
    arms = answer.values["flops"]["arms"]
    assert {name: arm["verdict"] and arm["verdict"]["word"] for name, arm in arms.items()} == {
        "vanilla": None,
        "deep-vanilla": "better; constant",
        "operator-1": "better; grows: exponent",
        "untied-grow": "better; grows: exponent",
        "loop-2": "better; shrinks",
        "untied-2": "better; grows: irreducible loss",
    }
    gamma = answer.values["flops"]["arms"]["operator-1"]["gamma"]
    # untied-2 has a lower irreducible loss but shares that of the others in the joint fit, which shifts γ.
    assert gamma == pytest.approx(0.1180, abs=0.008)
    assert answer.tables[0].columns[:3] == ("arm", "in range", "multiplier")


def test_constants_are_quoted_at_the_references_tuned_compute_or_at_c0(tiny: StudyContext) -> None:
    answer = Formula(law).answer(ladder(tiny, arms=["vanilla", "operator-1"]))
    base = tiny.recipe(find_arm("vanilla")).base_depth
    (tuned,) = {row[5] for row in answer.tables[-1].rows if row[:2] == ("vanilla", base)}
    assert answer.values["flops"]["c0"] == pytest.approx(tuned, rel=1e-9)
    named = Formula(law).answer(ladder(tiny, arms=["vanilla", "operator-1"], c0=1e14, lr_regret=0.01))
    assert named.values["flops"]["c0"] == 1e14
    # Mistuning is also given as a factor in the learning rate, as with `fit --lr-regret`.
    tolerance = named.values["flops"]["arms"]["operator-1"]["verdict"]["tolerance"]
    factors = [(one["penalty_changing_answer"], one["lr_factor"]) for one in tolerance]
    known = [(penalty, factor) for penalty, factor in factors if penalty is not None]
    assert known and all(f == pytest.approx(2 ** (p / 0.01) ** 0.5) for p, f in known)


def test_noise_makes_a_small_difference_undecided(tiny: StudyContext) -> None:
    def noisy(spec: RunSpec) -> float:
        key = f"{spec.arm.name} d{spec.shape.depth} seed {spec.seed}"
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        return 2.0 + 2.0 * (expected_flops(spec) / 1e11) ** -0.2 + 0.03 * rng.standard_normal()

    answer = Formula(noisy).answer(ladder(tiny))
    arms = answer.values["flops"]["arms"]
    for name in ("operator-1", "untied-grow"):
        assert arms[name]["verdict"]["word"] == "not resolved; undecided"
    assert answer.values["what_would_change"]


def test_ladder_has_verdicts_per_second(paper: StudyContext) -> None:
    answer = Formula(law).answer(ladder(paper, arms=["vanilla", "operator-1"]))
    assert answer.values["seconds"]["arms"]["operator-1"]["verdict"]["growth"] == "grows"
    for by, unit, other in (("flops", "FLOPs", "seconds"), ("seconds", "seconds", "FLOPs")):
        detail = answer.values[by]["arms"]["operator-1"]["verdict"]
        words = " ".join([detail["sentence"], *detail["what_would_change"]])
        assert detail["unit"] == unit and f" {unit}" in words and other not in words
    assert [(judged.arm, judged.row.measure, judged.primary) for judged in answer.verdicts] == [
        ("operator-1", "per FLOP", True),
        ("operator-1", "per second", False),
    ]
    titles = [panel.title for panel in answer.panels]
    assert "Loss against time" in titles
    assert "Time multiplier over vanilla" in titles
    points = next(series for series in answer.panels[0].series if series.kind == "points")
    assert len(points.runs) == len(points.x) == 8


def test_fit_warnings_are_reported_per_flop_and_per_second(paper: StudyContext) -> None:
    def stumbling(spec: RunSpec) -> float:
        return law(spec) + 0.2 * (spec.shape.depth == 20)

    def below(spec: RunSpec) -> float:
        flops = expected_flops(spec) / 1e18
        return 3.0 + flops**-0.9 if spec.arm.name == "vanilla" else 2.0 + flops**-0.2

    for surface, expected in ((stumbling, "rises with compute"), (below, "paper's method is left out")):
        warnings = Formula(surface).answer(ladder(paper, arms=["vanilla", "operator-1"])).warnings
        assert any(expected in note and not note.startswith("per second: ") for note in warnings)
        assert any(expected in note and note.startswith("per second: ") for note in warnings)


def test_ladder_yields_longest_runs_first(tiny: StudyContext) -> None:
    costs = [expected_flops(spec) for spec in next(ladder(tiny))]
    assert costs == sorted(costs, reverse=True)


def test_non_finite_numbers_round_trip_through_json(paper: StudyContext) -> None:
    def flat(spec: RunSpec) -> float:
        return 3.0 + 1e-6 * math.sin(int(spec.hash[:6], 16))

    answer = Formula(flat).answer(ladder(paper, arms=["vanilla", "operator-1"], rungs=[6, 8, 10, 12]))
    text = json.dumps(answer.to_dict(), allow_nan=False)
    again = Answer.from_dict(json.loads(text))
    before, after = (repr([asdict(one) for one in each.verdicts]) for each in (answer, again))
    assert before == after  # by repr: NaN differs from itself
    assert repr(again.fits) == repr(answer.fits)
    assert "nan" in before or "inf" in before


def test_rungs_and_seeds_options_select_the_runs(paper: StudyContext) -> None:
    formula = Formula(law)
    formula.answer(ladder(paper, arms=["operator-1"], rungs=[6, 8, 10, 12], seeds=[3, 4]))
    assert {(s.arm.name, s.shape.depth, s.seed) for s in formula.specs} == {
        (arm, depth, seed)
        for arm in ("vanilla", "operator-1")  # the reference comes along
        for depth in (6, 8, 10, 12)
        for seed in (3, 4)
    }


def test_paper_preset_ladder_has_the_papers_rungs(paper: StudyContext) -> None:
    batch = next(ladder(paper))
    assert len(batch) == 2 * 8 + 6 * 7
    top = next(s for s in batch if s.arm.name == "vanilla" and s.shape.depth == 20)
    assert expected_flops(top) == pytest.approx(1.01e20, rel=0.01)


def test_runs_draw_from_what_the_preset_says(tiny: StudyContext, paper: StudyContext) -> None:
    assert {spec.data.pool for spec in next(ladder(tiny))} == {"sample"}
    assert {spec.data.pool for spec in next(ladder(paper))} == {"prefix"}


def test_tiny_preset_ladder_spans_enough_compute(tiny: StudyContext) -> None:
    batch = next(ladder(tiny))
    for arm in ("vanilla", "operator-1", "untied-grow"):
        costs = [expected_flops(spec) for spec in batch if spec.arm.name == arm]
        assert len(costs) >= 4
        assert math.log10(max(costs) / min(costs)) >= 1.4  # from d3: at d2 there is no prelude


def test_diverged_rung_stops_the_ladder_and_is_named(paper: StudyContext) -> None:
    with pytest.raises(SteepenError, match=r"d20.*diverged"):
        Formula(lambda spec: math.nan if spec.shape.depth == 20 else law(spec)).answer(
            ladder(paper, arms=["vanilla", "operator-1"])
        )


def test_ladder_with_too_few_rungs_is_rejected_before_it_runs(paper: StudyContext) -> None:
    with pytest.raises(UsageError, match="at least 4"):
        next(ladder(paper, rungs=[6, 8]))


def test_insufficient_data_is_rejected_with_a_remedy(tiny: StudyContext) -> None:
    poor = replace(tiny, data=replace(tiny.data, train_tokens=300_000))
    with pytest.raises(UsageError, match=r"`epochs` \d+"):
        next(ladder(poor))
    repeated = next(ladder(replace(poor, epochs=20)))
    assert {spec.data.epochs for spec in repeated} == {1, 20}


def test_ladder_trains_the_given_fitted_recipe(paper: StudyContext) -> None:
    arm = find_arm("operator-1")
    fitted = replace(paper.recipe(arm), tpp=12.0, base=replace(paper.recipe(arm).base, learning_rate=0.01))
    own = [s for s in next(ladder(paper.with_recipe(arm, fitted))) if s.arm.name == arm.name]
    assert next(s for s in own if s.shape.depth == 8).hyperparameters.learning_rate == pytest.approx(0.01)
    before = [s for s in next(ladder(paper)) if s.arm.name == arm.name]
    assert own[0].tokens == pytest.approx(2 * before[0].tokens, rel=1e-3)


def test_forecast_is_recorded_before_the_held_out_run_is_requested(paper: StudyContext) -> None:
    formula = Formula(lambda spec: law(spec, 0.0))
    answer = formula.answer(extrapolate(paper))
    assert [len(batch) for batch in formula.batches] == [8 + 7, 1]
    held = formula.batches[1][0]
    assert (held.arm.name, held.shape.depth) == ("untied-grow", 26)
    assert answer.values["hold_out"]["error"] == pytest.approx(0.0, abs=1e-4)
    assert answer.values["forecast_before_the_run"] == pytest.approx(
        answer.values["hold_out"]["forecast"], abs=1e-4
    )
    assert held.hash in answer.runs


def test_held_out_rung_on_repeated_data_gives_a_warning(tiny: StudyContext) -> None:
    longest = max(spec.tokens for spec in next(extrapolate(tiny)))
    enough = replace(tiny.data, train_tokens=longest // tiny.preset.context * (tiny.preset.context + 1))
    formula = Formula(one_law)
    answer = formula.answer(extrapolate(replace(tiny, data=enough, epochs=3)))
    assert [{spec.data.epochs for spec in batch} for batch in formula.batches] == [{1}, {3}]
    assert any("repeat their data up to 3 times" in warning for warning in answer.warnings)
    fresh = formula.answer(extrapolate(tiny))
    assert not any("repeat their data" in warning for warning in fresh.warnings)


def test_held_out_rung_with_insufficient_data_is_rejected_before_the_ladder_runs(tiny: StudyContext) -> None:
    longest = max(spec.tokens for spec in next(extrapolate(tiny)))
    enough = replace(tiny.data, train_tokens=longest // tiny.preset.context * (tiny.preset.context + 1))
    with pytest.raises(UsageError, match=r"depth 7 needs .*`epochs` \d"):
        next(extrapolate(replace(tiny, data=enough)))


def test_extrapolated_arm_skips_depths_it_cannot_have(tiny: StudyContext) -> None:
    formula = Formula(one_law)
    answer = formula.answer(extrapolate(tiny, arms=["vanilla", "operator-1-1-c-2"]))
    own = {spec.shape.depth for spec in formula.batches[0] if spec.arm.name == "operator-1-1-c-2"}
    assert own == {4, 5, 6}
    assert any("operator-1-1-c-2 does not exist at d3" in warning for warning in answer.warnings)
    for arms in (["loop-2-2-c-3"], ["operator-1", "loop-2-2-c-3"]):
        with pytest.raises(UsageError, match="loop-2-2-c-3 is left out"):
            next(extrapolate(tiny, arms=arms))


def test_forecast_misses_when_the_law_breaks_beyond_the_ladder(paper: StudyContext) -> None:
    def broken(spec: RunSpec) -> float:
        return law(spec, 1e-4) - 0.03 * (spec.shape.depth == 26)

    held = Formula(broken).answer(extrapolate(paper)).values["hold_out"]
    assert held["error"] == pytest.approx(-0.03, abs=0.01)
    assert held["compute_factor"] > 1
    with pytest.raises(UsageError, match="inside the ladder"):
        next(extrapolate(paper, hold_out=12))


def test_transferred_recipe_keeps_the_arms_tokens_and_lr_rule(paper: StudyContext) -> None:
    formula = Formula(
        lambda spec: (
            law(spec)
            + 0.0078
            * (spec.hyperparameters.embedding_lr_multiplier == VANILLA_ELRM)
            * (spec.arm.name != "vanilla")
        )
    )
    answer = formula.answer(transfer(paper, arms=["operator-1"]))
    assert answer.values["probe"]["operator-1"]["regret"] == pytest.approx(0.0078, abs=5e-4)
    assert answer.values["probe"]["vanilla"]["regret"] == pytest.approx(0.0, abs=5e-4)
    transferred = [
        s
        for s in formula.batches[0][4:]
        if s.arm.name == "operator-1" and s.hyperparameters.embedding_lr_multiplier == VANILLA_ELRM
    ]
    own = [
        s
        for s in formula.batches[0][4:]
        if s.arm.name == "operator-1" and s.hyperparameters.embedding_lr_multiplier != VANILLA_ELRM
    ]
    assert len(transferred) == len(own) == 8
    assert [s.steps for s in transferred] == [s.steps for s in own]
    assert "operator-1 (vanilla recipe)" in answer.values["flops"]["arms"]
    assert answer.findings[0].startswith("operator-1 with vanilla's recipe loses 0.007")
    assert not any("tune it first" in warning for warning in answer.warnings)


@pytest.mark.parametrize(
    ("source", "arm", "alpha"),
    [("vanilla", "loop-2", 1.0), ("loop-2", "untied-2", BASE["loop-2"].injection_weight)],
)
def test_transferred_recipe_has_the_default_injection_unless_the_source_injects(
    paper: StudyContext, source: str, arm: str, alpha: float
) -> None:
    batch = next(transfer(paper, arms=[arm], source=source, parts=["probe"]))
    own, transferred = (spec.hyperparameters for spec in batch if spec.arm.name == arm)
    assert own.injection_weight == paper.recipe(find_arm(arm)).base.injection_weight != alpha
    assert transferred == replace(paper.recipe(find_arm(source)).base, injection_weight=alpha)
    mine, again = (spec for spec in batch if spec.arm.name == source)
    assert mine.hash == again.hash


def test_better_transferred_recipe_is_reported_as_a_gain_with_a_warning(paper: StudyContext) -> None:
    answer = Formula(
        lambda spec: 3.0 - 0.03 * (spec.hyperparameters.embedding_lr_multiplier == VANILLA_ELRM)
    ).answer(transfer(paper, arms=["operator-1"], parts=["probe"]))
    assert answer.findings == ("operator-1 with vanilla's recipe gains 0.0300 nats at the base size.",)
    (warning,) = answer.warnings
    assert "tune it first" in warning
    assert "fit-recipe --arms operator-1" in warning


def test_other_optimizer_is_tuned_before_its_ladder_is_compared(tiny: StudyContext) -> None:
    base = tiny.stored_parameters(find_arm("deep-vanilla"), tiny.preset.base_depth)

    def surface(spec: RunSpec) -> float:
        """AdamW has its optimum at 0.002·N^−0.4 and 9 tokens per parameter; rates of 0.02 diverge."""
        loss = 1.7 + 1.25 * (expected_flops(spec) / 1e11) ** -0.11
        if spec.optimizer.kind != "adamw":
            return loss
        rate, size = spec.hyperparameters.learning_rate, initial_parameters(spec) / base
        if rate > 0.018:
            return math.nan
        bowl = 0.01 * math.log(rate / (0.0021 * size**-0.4)) ** 2
        swept = spec.tokens != tiny.preset.fixed_tokens
        return loss * math.exp(bowl + swept * 0.02 * math.log(tokens_per_parameter(spec) / 9.0) ** 2)

    formula = Formula(surface)
    answer = formula.answer(ablations(tiny, parts=["optimizer"]))
    part = answer.values["optimizer, width and depth"]
    recipe = part["tuned"]["adamw"]["recipe"]
    assert recipe["base"]["learning_rate"] == pytest.approx(0.0021, rel=0.2)
    assert recipe["learning_rate_exponent"] == -0.4
    assert recipe["tpp"] == pytest.approx(9, abs=1)
    ladder_runs = [spec for spec in formula.batches[-1] if spec.optimizer.kind == "adamw"]
    rates = {spec.hyperparameters.learning_rate for spec in ladder_runs}
    assert len(rates) > 2 and max(rates) < 0.018
    assert set(part["flops"]["arms"]) == {"deep-vanilla", "deep-vanilla (adamw)"}
    assert any(table.title.endswith("Recipes of the optimizers") for table in answer.tables)


def test_scaled_hyperparameters_have_ladders_of_their_own(paper: StudyContext) -> None:
    formula = Formula(one_law)
    answer = formula.answer(ablations(paper, parts=["hyperparameters"], rungs=[6, 8, 10, 12]))
    judged = answer.values["hyperparameters"]["flops"]
    assert judged["reference"] == "vanilla"
    assert len(judged["arms"]) == 7 and "vanilla (muP output)" in judged["arms"]
    at_12 = {spec.hyperparameters.output_multiplier for spec in formula.specs if spec.shape.depth == 12}
    base = BASE["vanilla"].output_multiplier
    assert min(at_12) == pytest.approx(base * 8 / 12) and len(at_12) == 3
    # At the base size every scaled recipe is the same run.
    at_8 = {spec.hash for spec in formula.specs if spec.shape.depth == 8}
    assert len(at_8) == 2  # and one with a longer warm-down


def test_each_ablation_part_has_its_own_reference(paper: StudyContext) -> None:
    formula = Formula(one_law)
    answer = formula.answer(ablations(paper))
    references = {name: value["flops"]["reference"] for name, value in answer.values.items()}
    assert references["operator"] == "vanilla"
    assert references["width-only"] == "width-only-deep-vanilla"
    assert references["random"] == "loop-grow"
    assert references["optimizer, width and depth"] == "deep-vanilla"
    assert references["optimizer, width only"] == "width-only-deep-vanilla"
    assert {spec.optimizer.kind for spec in formula.specs} == {"muon", "adamw"}
    alone = Formula(one_law)
    alone.answer(ablations(paper, parts=["constant"]))
    constant = {s.hyperparameters.learning_rate for s in alone.specs if s.arm.name == "vanilla"}
    assert constant == {0.04}


def test_arm_skips_depths_it_cannot_have(tiny: StudyContext) -> None:
    formula = Formula(one_law)
    answer = formula.answer(ablations(tiny, parts=["allocation"]))
    assert any("loop-2-nci-2-c-3" in warning for warning in answer.warnings)
    assert "loop-2-nci-2-c-3" not in {spec.arm.name for spec in formula.specs}
    assert {s.shape.depth for s in formula.specs if s.arm.name == "operator-1-1-c-2"} == {4, 5, 6}


def test_arm_below_the_references_irreducible_loss_gets_a_verdict(tiny: StudyContext) -> None:
    def below(spec: RunSpec) -> float:
        flops = expected_flops(spec) / 1e11
        return 3.0 + flops**-0.9 if spec.arm.name == "vanilla" else 2.0 + flops**-0.2

    answer = Formula(below).answer(ladder(tiny, arms=["vanilla", "operator-1"]))
    assert "operator-1" in answer.values["flops"]["arms"]
    assert any("paper's method is left out" in warning for warning in answer.warnings)


def test_irreducible_loss_hypothesis_is_tabulated_beside_the_exponent_hypothesis(paper: StudyContext) -> None:
    answer = Formula(law).answer(ladder(paper, arms=["vanilla", "operator-1", "untied-2"], seeds=[0, 1]))
    table = next(
        table for table in answer.tables if table.title == "Exponent and irreducible-loss hypotheses"
    )
    for row in table.rows:
        detail = answer.values["flops"]["arms"][row[0]]["verdict"]
        told = []
        for name, other in (("exponent", "delta_e"), ("irreducible", "delta_gamma_free")):
            p, shown = detail[other]["p_value"], [one[name] for one in detail["predictions"][:2]]
            rejected = p < detail["levels"][2]
            # With an E for each arm, those of the exponent are by the arm's own E and γ.
            assert (None in shown) == (name == "irreducible" if detail["own_e"] else rejected)
            told += [*shown, p]
        assert list(row[1:7]) == [None if value is None else pytest.approx(value) for value in told]
        assert None in row[1:7], "the ladders are exact, so a hypothesis is rejected and left out"
    assert [row[0] for row in table.rows] == ["operator-1", "untied-2"]
    assert "not measured" in table.caption
    assert "multiplier at the top" in answer.tables[0].columns


def test_intervals_of_the_exponent_count_the_irreducible_loss_as_unknown(paper: StudyContext) -> None:
    answer = Formula(law).answer(ladder(paper, arms=["vanilla", "operator-1"]))
    plane = next(panel for panel in answer.panels if panel.title == "Exponent against constant")
    (bars,) = (s for s in plane.series if s.arm == "operator-1")
    found = answer.values["flops"]["arms"]["operator-1"]["intervals"]["gamma"]
    assert [*(bars.low or ()), *(bars.high or ())] == pytest.approx(found["unconditional"])
    assert found["unconditional"][0] < found["conditional"][0] < found["conditional"][1]


def test_question_is_grammatical_for_one_and_several_arms(tiny: StudyContext) -> None:
    surface = Formula(one_law)
    one = surface.answer(ladder(tiny, arms=["vanilla", "operator-1"]))
    assert one.question.startswith("Does operator-1 scale better than vanilla")
    assert surface.answer(ladder(tiny)).question.startswith("Do operator-1, untied-grow scale")


@pytest.mark.parametrize(
    ("facts", "gap", "shared"),
    [({"device": "cpu"}, 100, True), ({"device": "cuda"}, 5, True), ({"device": "cuda"}, 20, False)],
)
def test_runs_sharing_a_machine_give_a_warning_about_seconds(
    tiny: StudyContext, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], gap: int, shared: bool
) -> None:
    from steepen.studies import synthetic

    plain, count = synthetic.fabricate_record, iter(range(1000))

    def timed(spec: RunSpec, loss: float) -> RunRecord:
        when = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=gap * next(count))
        return replace(
            plain(spec, loss),
            hardware={**facts, "host": "one"},
            seconds_total=15.0,
            finished=when.isoformat(),
        )

    monkeypatch.setattr(synthetic, "fabricate_record", timed)
    surface = Formula(one_law)
    warnings = surface.answer(ladder(tiny, arms=["vanilla", "operator-1"])).warnings
    assert any("shared their machine" in warning for warning in warnings) == shared


def test_operator_1_and_vanilla_have_equal_flops_in_the_tiny_ladder(tiny: StudyContext) -> None:
    batch = next(ladder(tiny, arms=["vanilla", "operator-1"]))
    cost = {
        arm: sum(expected_flops(s) for s in batch if s.arm.name == arm) for arm in ("vanilla", "operator-1")
    }
    assert cost["operator-1"] == pytest.approx(cost["vanilla"], rel=0.05)


def test_depths_of_equal_time_leave_the_verdict_per_flop(
    tiny: StudyContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny runs take about as long at one depth as at the next, which must not end the study."""
    from steepen.studies import synthetic

    plain = synthetic.fabricate_record
    monkeypatch.setattr(
        synthetic, "fabricate_record", lambda spec, loss: replace(plain(spec, loss), seconds_training=0.05)
    )
    answer = Formula(one_law).answer(ladder(tiny, arms=["vanilla", "operator-1"]))
    assert any("no verdict per second: two depths of vanilla" in warning for warning in answer.warnings)
    assert [judged.row.measure for judged in answer.verdicts] == [
        "per FLOP"
    ] and "seconds" not in answer.values
