"""The four stages of a recipe recover known optima of synthetic losses by the paper's procedure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from steepen.errors import SteepenError, UsageError
from steepen.model.arms import find_arm
from steepen.recipe.flops import FlopCount
from steepen.recipe.paper_tables import BASE, INITIAL
from steepen.recipe.recipe_choice import RecipeFile, read_recipe, write_recipe
from steepen.report.colours import ARM_TITLES
from steepen.report.figure import draw_figure
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.context import StudyContext, starting_arm
from steepen.studies.design.growth_target import growth_target
from steepen.studies.design.growth_timing import growth_timing
from steepen.studies.drift import fit_growth_fraction
from steepen.studies.preset import PRESETS_DIRECTORY, SWEEPS, load_preset
from steepen.studies.registry import STUDIES
from steepen.studies.stages.chain_tuning import candidates, chain_tuning, replay_chain
from steepen.studies.stages.fit_recipe import fit_recipe
from steepen.studies.stages.growth_fraction import _sentence as growth_sentence
from steepen.studies.stages.growth_fraction import growth_fraction
from steepen.studies.stages.lr_rule import lr_rule
from steepen.studies.stages.tpp import tpp
from steepen.studies.synthetic import Formula, growth_fraction_of, initial_parameters, tokens_per_parameter
from steepen.utils.codec import from_builtins

# Optima the table's grids can reach: powers of √2 from the initial value, which two rounds of 2 and √2 hit.
OPTIMUM = replace(
    INITIAL,
    learning_rate=0.04,
    embedding_lr_multiplier=0.02 * 2**4.5,
    head_lr_multiplier=0.02 * 2**2.5,
    residual_multiplier=0.25,
    output_multiplier=0.5,
    weight_decay=0.1 / math.sqrt(2),
    embedding_init_std=0.08 * 2**-2.5,
    init_scale=0.25 * 2**-2,
    warmup_steps=20,
    warmdown_fraction=0.6,
    beta2=0.98,
    adam_eps=1e-8,
    injection_weight=2**0.5,
)
DISCRETE = ("warmup_steps", "warmdown_fraction", "beta1", "beta2", "adam_eps")


def separable(spec: RunSpec) -> float:
    """A bowl in every numeric setting; a fixed price for every discrete one that is not at its best."""
    values = spec.hyperparameters.to_dict()
    loss = 3.3
    for name, best in OPTIMUM.to_dict().items():
        if name in DISCRETE:
            loss += 0.004 * (values[name] != best)
        elif name == "weight_decay" and values[name] == 0:
            loss += 0.05
        elif name != "injection_weight" or spec.arm.core_boundary != "identity":
            loss += 0.01 * math.log2(values[name] / best) ** 2
    return loss


@pytest.mark.parametrize("arm", ["vanilla", "operator-1"])
def test_chain_tuning_reaches_the_optimum_in_two_rounds(paper: StudyContext, arm: str) -> None:
    answer = Formula(separable).answer(chain_tuning(paper, arms=[arm]))
    tuned = answer.values[arm]["hyperparameters"]
    for name, best in OPTIMUM.to_dict().items():
        if name != "injection_weight" or arm != "vanilla":
            assert tuned[name] == pytest.approx(best, rel=1e-9), name
    assert answer.values[arm]["loss"] == pytest.approx(3.3, abs=1e-9)


def test_chain_tuning_of_some_sweeps_changes_only_those(paper: StudyContext) -> None:
    answer = Formula(separable).answer(
        chain_tuning(paper, arms=["vanilla"], parts=["output_multiplier", "head_lr_multiplier"])
    )
    tuned = answer.values["vanilla"]["hyperparameters"]
    changed = {name for name, value in tuned.items() if value != getattr(INITIAL, name)}
    assert changed == {"output_multiplier", "head_lr_multiplier"}
    assert set(STUDIES["chain-tuning"].parts) == set(SWEEPS)
    with pytest.raises(UsageError, match=r"names 'momentum', which chain-tuning lacks"):
        Formula(separable).answer(chain_tuning(paper, parts=["momentum"]))


def test_chain_tuning_uses_the_papers_grids(paper: StudyContext) -> None:
    def ratios(sweep: str, number: int) -> list[float]:
        found = [value / getattr(INITIAL, sweep) for _, value in candidates(INITIAL, sweep, number)]
        return sorted([*found, 1.0])

    octaves = lambda low, high: pytest.approx([2.0**k for k in range(low, high + 1)])  # noqa: E731
    assert ratios("learning_rate", 1) == octaves(-4, 3)
    assert ratios("init_scale", 1) == octaves(-3, 4)
    assert ratios("embedding_lr_multiplier", 1) == octaves(0, 7)
    assert ratios("weight_decay", 1) == pytest.approx([0.0, *(2.0**k for k in range(-5, 2))])
    assert ratios("learning_rate", 2) == pytest.approx([math.sqrt(2) ** k for k in range(-4, 4)])
    around = [value / 0.02 for _, value in candidates(INITIAL, "embedding_lr_multiplier", 1, 5, centred=True)]
    assert around == pytest.approx([0.25, 0.5, 2, 4])
    assert sorted(candidates(INITIAL, "schedule", 1)) == [
        ("warmdown_fraction", 0.2),
        ("warmdown_fraction", 0.6),
        ("warmdown_fraction", 0.8),
        ("warmdown_fraction", 1.0),
        ("warmup_steps", 0),
        ("warmup_steps", 5),
        ("warmup_steps", 10),
        ("warmup_steps", 20),
    ]
    # Eight runs a sweep, the baseline among them; discrete ones have theirs beside the baseline.
    driver = Formula(separable)
    driver.answer(chain_tuning(paper, arms=["operator-1"]))
    assert [len(batch) for batch in driver.batches[:10]] == [*[8] * 9, 9]
    assert {spec.tokens for spec in driver.specs} == {1900 * 524_288}
    assert {spec.shape.depth for spec in driver.specs} == {8}


def test_chain_figure_has_one_place_for_each_hyperparameter(paper: StudyContext) -> None:
    answer = Formula(separable).answer(chain_tuning(paper, arms=["vanilla", "operator-1"]))
    first, second = (panel for panel in answer.panels if panel.group == "The chain of sweeps")
    assert first.x.names[:3] == ("GLR", "ELRM", "HLRM") and second.x.names == first.x.names
    places = {s.arm: [first.x.names[int(x)] for x in s.x] for s in first.series if s.kind == "line"}
    assert "ALPHA" in places["operator-1"]
    assert [name for name in places["operator-1"] if name != "ALPHA"] == places["vanilla"]
    _, (drawn,) = draw_figure([first], ARM_TITLES)
    assert [label.get_text() for label in drawn.axes.get_xticklabels()] == list(first.x.names)
    # A part that the preset's own chain leaves out has its place too, and the parts not asked for have none.
    part = Formula(separable).answer(chain_tuning(shortened(paper), parts=["learning_rate"]))
    assert [panel.x.names for panel in part.panels if panel.group == "The chain of sweeps"] == [("GLR",)]
    # In the order in which they were made, which a preset chooses.
    turned = Formula(separable).answer(chain_tuning(shortened(paper, "init_scale", "learning_rate")))
    (names,) = [panel.x.names for panel in turned.panels if panel.group == "The chain of sweeps"]
    assert names[-1] == "GLR" and len(names) == 2


def shortened(context: StudyContext, *sweeps: str) -> StudyContext:
    """The preset with a chain of one round; by default it does not sweep the learning rate."""
    chain = replace(context.preset.grids.chain, sweeps=sweeps or ("init_scale",), rounds=1)
    return replace(context, preset=replace(context.preset, grids=replace(context.preset.grids, chain=chain)))


def test_arms_without_injection_skip_the_injection_sweep(paper: StudyContext) -> None:
    sweeps = {
        arm: [
            step["sweep"]
            for step in Formula(separable).answer(chain_tuning(paper, arms=[arm])).values[arm]["steps"]
        ]
        for arm in ("vanilla", "operator-1")
    }
    assert "injection_weight" in sweeps["operator-1"]
    assert "injection_weight" not in sweeps["vanilla"]
    assert len(sweeps["operator-1"]) == len(sweeps["vanilla"]) + 2
    # Asked for that sweep alone, there is none: the starting values are measured and stay.
    nothing = Formula(separable).answer(chain_tuning(paper, arms=["vanilla"], parts=["injection_weight"]))
    own = nothing.values["vanilla"]
    assert own["steps"] == [] and own["loss"] == own["initial_loss"]


def test_gain_below_1e_3_is_not_adopted(paper: StudyContext) -> None:
    def nearly_flat(spec: RunSpec) -> float:
        return (
            3.0
            + 0.0009 * (spec.hyperparameters.residual_multiplier != 0.25)
            + 0.0011 * (spec.hyperparameters.output_multiplier != 0.5)
        )

    tuned = Formula(nearly_flat).answer(chain_tuning(paper)).values["vanilla"]["hyperparameters"]
    assert tuned["residual_multiplier"] == INITIAL.residual_multiplier
    assert tuned["output_multiplier"] == 0.5


def test_discrete_settings_that_help_alone_are_applied_together(paper: StudyContext) -> None:
    driver = Formula(separable)
    answer = driver.answer(chain_tuning(paper))
    schedule = next(s for s in answer.values["vanilla"]["steps"] if s["sweep"] == "schedule")
    assert schedule["adopted"] == {"warmup_steps": 20, "warmdown_fraction": 0.6}
    assert schedule["combined"]
    # Nobody ran the pair within the sweep; the next sweep's baseline is the first to.
    after = driver.batches[[s["sweep"] for s in answer.values["vanilla"]["steps"]].index("schedule") + 1]
    assert (after[0].hyperparameters.warmup_steps, after[0].hyperparameters.warmdown_fraction) == (20, 0.6)
    assert not answer.warnings


def test_settings_that_are_worse_together_give_a_warning(paper: StudyContext) -> None:
    def clashing(spec: RunSpec) -> float:
        h = spec.hyperparameters
        return (
            3.0
            - 0.01 * (h.warmup_steps == 20)
            - 0.02 * (h.warmdown_fraction == 0.6)
            + 0.05 * (h.warmup_steps == 20 and h.warmdown_fraction == 0.6)
        )

    answer = Formula(clashing).answer(chain_tuning(paper))
    assert any("worse than the best of them alone" in warning for warning in answer.warnings)


def test_diverged_setting_is_rejected_and_diverged_start_is_an_error(paper: StudyContext) -> None:
    def fragile(spec: RunSpec) -> float:
        return math.nan if spec.hyperparameters.learning_rate > 0.1 else separable(spec)

    tuned = Formula(fragile).answer(chain_tuning(paper)).values["vanilla"]["hyperparameters"]
    assert tuned["learning_rate"] == pytest.approx(0.04)
    with pytest.raises(SteepenError, match="nothing to tune from"):
        Formula(lambda _: math.nan).answer(chain_tuning(paper))


@pytest.mark.parametrize(("best", "rounded"), [(5.33, 5), (6.39, 6), (7.6, 8)])
def test_tpp_recovers_the_optimum_and_rounds_it(paper: StudyContext, best: float, rounded: int) -> None:
    def bowl(spec: RunSpec) -> float:
        return 3.0 * math.exp(0.01 * math.log(tokens_per_parameter(spec) / best) ** 2)

    found = Formula(bowl).answer(tpp(paper, arms=["operator-1"])).values["operator-1"]
    assert found["mean"] == pytest.approx(best, rel=1e-6)
    assert found["tpp"] == rounded
    assert len(found["vertices"]) == 5


def test_tpp_detects_drift_with_scale_and_its_absence(paper: StudyContext) -> None:
    def drifting(spec: RunSpec, exponent: float) -> float:
        centre = 6.0 * (expected_flops(spec) / 4e18) ** exponent
        noise = 1e-5 * math.sin(spec.tokens)
        return 3.0 * math.exp(0.01 * math.log(tokens_per_parameter(spec) / centre) ** 2 + noise)

    still = Formula(lambda spec: drifting(spec, 0.0)).answer(tpp(paper))
    moving = Formula(lambda spec: drifting(spec, 0.15)).answer(tpp(paper))
    assert still.values["vanilla"]["p_scale_shift"] > 0.05
    assert "does not measurably drift" in still.findings[0]
    assert moving.values["vanilla"]["p_scale_shift"] < 0.01
    assert moving.values["vanilla"]["exponent"] == pytest.approx(0.15, abs=0.02)


def test_tpp_gives_every_size_the_same_compute(paper: StudyContext) -> None:
    driver = Formula(lambda spec: 3.0 + abs(math.log(tokens_per_parameter(spec) / 6)))
    driver.answer(tpp(paper))
    first = [expected_flops(spec, "matrix") for spec in driver.batches[0][:5]]
    assert max(first) / min(first) < 1.003
    assert [spec.shape.depth for spec in driver.batches[0][:5]] == [6, 7, 8, 9, 10]
    assert len(driver.specs) == 25


def test_growth_fraction_of_unbounded_optima_is_said_to_be_unsure() -> None:
    rho = np.tile([0.2, 0.4, 0.6, 0.8], 2)
    sharp = 3.0 + 0.5 * (rho - 0.4) ** 2
    noise = 0.02 * np.array([-1, 3, -3, 1, 1, -3, 3, -1])  # no parabola
    budget = np.repeat([1e18, 1e19], 4)
    sure = growth_sentence("arm", fit_growth_fraction(budget, rho, sharp + 1e-6 * noise))
    assert "missing it by 0.1 costs at most" in sure
    found = fit_growth_fraction(budget, rho, 3.0 + 0.01 * (rho - 0.5) ** 2 + 0.01 * noise)
    assert "no bounded interval" in growth_sentence("arm", found)


@pytest.mark.parametrize(("best", "adopted"), [(0.544, 0.5), (0.27, 0.3), (0.17, 0.2)])
def test_growth_fraction_recovers_rho_to_one_decimal(
    paper: StudyContext, best: float, adopted: float
) -> None:
    def bowl(spec: RunSpec) -> float:
        return 3.0 + 0.05 * (growth_fraction_of(spec) - best) ** 2

    driver = Formula(bowl)
    found = driver.answer(growth_fraction(paper, arms=["untied-grow"])).values["untied-grow"]
    assert found["mean"] == pytest.approx(best, abs=1e-3)
    assert found["rho"] == adopted
    by_depth = {spec.shape.depth: [] for spec in driver.specs}
    for spec in driver.specs:
        by_depth[spec.shape.depth].append(expected_flops(spec, "matrix"))
    assert sorted(by_depth) == [8, 9, 10]
    assert all(max(costs) / min(costs) < 1.003 for costs in by_depth.values())


def test_growth_fraction_rejects_an_arm_that_does_not_grow(paper: StudyContext) -> None:
    with pytest.raises(UsageError, match="does not grow"):
        next(growth_fraction(paper, arms=["loop-2"]))


def rate_surface(context: StudyContext, arm: str, beta: float, best: float = 0.04):
    base = context.stored_parameters(find_arm(arm), context.preset.base_depth)

    def loss(spec: RunSpec) -> float:
        size = initial_parameters(spec) / base
        h = spec.hyperparameters
        bowl = 0.01 * math.log(h.learning_rate / (best * size**beta)) ** 2
        return (
            3.0
            * size**-0.05
            * math.exp(bowl + 0.002 * math.log(h.output_multiplier / BASE[arm].output_multiplier) ** 2)
        )

    return loss


@pytest.mark.parametrize(("beta", "rule"), [(-0.78, -0.8), (-0.62, -0.6)])
def test_lr_rule_recovers_the_exponent_and_leaves_no_drift(
    paper: StudyContext, beta: float, rule: float
) -> None:
    answer = Formula(rate_surface(paper, "operator-1", beta)).answer(lr_rule(paper, arms=["operator-1"]))
    constant, scaled = answer.values["drift"]
    assert constant["hyperparameters"]["learning_rate"]["exponent"] == pytest.approx(beta, abs=1e-6)
    assert answer.values["rules"]["operator-1"]["learning_rate_exponent"] == rule
    # Around the rule only its rounding remains; a setting that has no drift shows none.
    assert scaled["hyperparameters"]["learning_rate"]["exponent"] == pytest.approx(beta - rule, abs=1e-6)
    assert constant["hyperparameters"]["output_multiplier"]["exponent"] == pytest.approx(0.0, abs=1e-6)
    table = next(t for t in answer.tables if t.title.startswith("Constant against scaled"))
    gains = {row[1]: row[-1] for row in table.rows}
    assert gains["d8"] == pytest.approx(0.0, abs=1e-12)
    assert gains["d10"] > gains["d9"] > 0


def test_lr_rule_with_too_few_finished_runs_warns_and_keeps_the_recipes_rule(paper: StudyContext) -> None:
    def fragile(spec: RunSpec) -> float:
        return math.nan if spec.hyperparameters.learning_rate > 0.03 else separable(spec)

    driver = Formula(fragile)
    answer = driver.answer(lr_rule(paper, parts=["screen", "drift"]))
    assert len(driver.batches) == 1
    assert answer.findings == (
        "vanilla: too few learning-rate optima lie inside their sweeps for a rule; the recipe's stays.",
        "vanilla, screened: too few runs finished for a single sweep.",
    )
    kept = paper.recipe(find_arm("vanilla")).learning_rate_exponent
    assert answer.values["rules"]["vanilla"]["learning_rate_exponent"] == kept


def test_lr_rule_compares_constant_and_scaled_where_both_finished(paper: StudyContext) -> None:
    surface = rate_surface(paper, "vanilla", -0.8, best=0.02)

    def fragile(spec: RunSpec) -> float:
        return (
            math.nan
            if spec.shape.depth == 10 and spec.hyperparameters.learning_rate > 0.035
            else surface(spec)
        )

    answer = Formula(fragile).answer(lr_rule(paper))
    assert re.search(r"at d9 the scaled rate changes the loss by -0\.\d+ against", answer.findings[0])
    json.dumps(answer.to_dict(), allow_nan=False)


def test_lr_rule_reuses_the_anchor_runs_for_constant_and_scaled(paper: StudyContext) -> None:
    driver = Formula(rate_surface(paper, "vanilla", -0.8))
    driver.answer(lr_rule(paper))
    first, second = driver.batches
    anchors = [{spec.hash for spec in batch if spec.shape.depth == 8} for batch in (first, second)]
    assert anchors[0] == anchors[1]
    assert len(first) == 3 * 4 * 5


def test_growing_arm_is_swept_around_its_inherited_rule(paper: StudyContext) -> None:
    driver = Formula(rate_surface(paper, "untied-2", -0.6))
    answer = driver.answer(lr_rule(paper, arms=["untied-grow"]))
    assert len(driver.batches) == 1
    assert answer.values["drift"][0]["hyperparameters"]["learning_rate"]["exponent"] == pytest.approx(
        0.0, abs=1e-6
    )


def test_growing_arms_rule_is_the_inherited_one_plus_the_drift_and_its_own_anchor(
    paper: StudyContext,
) -> None:
    # Fixed passes follow −0.6, growth −0.5, with a best rate at the base size of 0.036 instead of 0.04.
    answer = Formula(rate_surface(paper, "loop-2", -0.5, best=0.036)).answer(
        lr_rule(paper, arms=["loop-grow"])
    )
    rule = answer.values["rules"]["loop-grow"]
    assert rule["inherited_exponent"] == -0.6
    assert rule["learning_rate_exponent"] == -0.5
    assert rule["learning_rate_base"] == pytest.approx(0.036, rel=0.02)
    assert "plus the drift of the optimum around it, +0.10" in answer.findings[0]


def test_screen_part_sweeps_every_hyperparameter(paper: StudyContext) -> None:
    answer = Formula(separable).answer(lr_rule(paper, parts=["screen"]))
    assert set(answer.values["drift"][0]["hyperparameters"]) == {
        "learning_rate",
        "embedding_lr_multiplier",
        "head_lr_multiplier",
        "residual_multiplier",
        "output_multiplier",
        "weight_decay",
        "embedding_init_std",
        "init_scale",
    }


def test_screen_sweeps_schedule_and_adam_over_listed_values(paper: StudyContext) -> None:
    def surface(spec: RunSpec) -> float:
        h = spec.hyperparameters
        return 3.0 + 0.5 * (h.beta2 - 0.98) ** 2 + 0.05 * (h.warmdown_fraction - 0.6) ** 2

    formula = Formula(surface)
    answer = formula.answer(lr_rule(paper, parts=["screen"]))
    tried = {name: {getattr(s.hyperparameters, name) for s in formula.specs} for name in DISCRETE}
    assert tried["warmdown_fraction"] >= {0.2, 0.6, 0.8, 1.0} and tried["warmup_steps"] >= {0, 5, 10, 20}
    assert tried["beta2"] >= {0.90, 0.98, 0.99} and tried["adam_eps"] >= {1e-8, 1e-6}
    panel = next(panel for panel in answer.panels if panel.title == "warmdown fraction (WDR)")
    points = next(series for series in panel.series if series.kind == "points")
    assert set(points.x) >= {0.2, 0.6, 0.8, 1.0}
    best = min(zip(points.y, points.x, strict=True))
    assert best[1] == 0.6
    assert "warmdown_fraction" in answer.findings[0]


def whole_surface(context: StudyContext):
    """All four stages at once: every optimum is known."""
    base = context.stored_parameters(find_arm("untied-2"), 8)

    def loss(spec: RunSpec) -> float:
        size = initial_parameters(spec) / base
        h = spec.hyperparameters
        # Stage 1 sees the tuned values at the base size, stage 4 their drift.
        value = math.log(separable(spec)) - 0.01 * (math.log2(h.learning_rate / 0.04)) ** 2 / 3.3
        exponent = -0.53 if spec.schedule.grows else -0.63
        value += 0.01 * math.log(h.learning_rate / (0.04 * size**exponent)) ** 2
        value += (
            0.02 * math.log(tokens_per_parameter(spec) / 6.08) ** 2 if spec.tokens != 1900 * 524_288 else 0.0
        )
        value += 0.03 * (growth_fraction_of(spec) - 0.271) ** 2
        return math.exp(value)

    return loss


def test_fit_recipe_runs_four_stages_and_its_recipe_file_round_trips(paper: StudyContext, tmp_path) -> None:
    answer = Formula(whole_surface(paper)).answer(fit_recipe(paper, arms=["untied-grow"]))
    file = from_builtins(RecipeFile, answer.values["recipe"])
    assert list(answer.values["stages"]) == [
        "chain-tuning",
        "tpp",
        "growth-fraction",
        "lr-rule",
        "lr-rule of growth",
    ]
    assert file.arm == "untied-grow"
    recipe = file.recipe
    assert (recipe.tpp, recipe.rho, recipe.learning_rate_exponent) == (6, 0.3, -0.5)
    assert recipe.learning_rate_base == pytest.approx(0.04, rel=0.05)
    assert recipe.base.embedding_lr_multiplier == pytest.approx(OPTIMUM.embedding_lr_multiplier)
    write_recipe(tmp_path / "recipe.yaml", file)
    assert read_recipe(tmp_path / "recipe.yaml") == file
    ladder_bench = replace(paper, recipes={file.arm: read_recipe(tmp_path / "recipe.yaml").recipe})
    rung = ladder_bench.recipe(find_arm("untied-grow")).at(find_arm("untied-grow"), 8, paper.size_rule)
    assert rung.rho == 0.3
    assert rung.hyperparameters.embedding_lr_multiplier == recipe.base.embedding_lr_multiplier


def test_stage_without_an_interior_optimum_warns_and_adopts_the_best_measured(paper: StudyContext) -> None:
    surface = whole_surface(paper)
    monotone = Formula(lambda spec: surface(spec) + 0.1 * growth_fraction_of(spec))
    answer = monotone.answer(fit_recipe(paper, arms=["untied-grow"]))
    assert answer.values["recipe"]["recipe"]["rho"] == 0.1
    told = "no best growth fraction lies inside its sweep"
    assert any(told in warning for warning in answer.warnings)
    assert any(told in warning for warning in answer.values["recipe"]["fitted"]["warnings"])


def test_arm_without_growth_skips_stage_three(paper: StudyContext) -> None:
    answer = Formula(whole_surface(paper)).answer(fit_recipe(paper, arms=["untied-2"]))
    assert list(answer.values["stages"]) == ["chain-tuning", "tpp", "lr-rule"]
    assert answer.values["recipe"]["recipe"]["rho"] is None


AXES = ("blocks=1-all", "width=0.5-1", "context=0.25-1", "experts=1-8")


@pytest.mark.parametrize("axis", AXES)
def test_fit_recipe_of_growth_along_other_axes_reuses_what_the_fixed_arm_is_tuned_to(
    paper: StudyContext, axis: str
) -> None:
    arm = find_arm(f"vanilla+{axis}")
    fixed = "vanilla+experts=8" if "experts" in axis else "vanilla"
    formula = Formula(whole_surface(paper))
    answer = formula.answer(fit_recipe(paper, arms=[arm]))
    assert list(answer.values["stages"]) == [
        "chain-tuning",
        "tpp",
        "growth-fraction",
        "lr-rule",
        "lr-rule of growth",
    ]
    recipe = from_builtins(RecipeFile, answer.values["recipe"]).recipe
    assert (recipe.tpp, recipe.rho, recipe.learning_rate_exponent) == (6, 0.3, -0.5)
    assert recipe.base.embedding_lr_multiplier == pytest.approx(OPTIMUM.embedding_lr_multiplier)
    named = {spec.arm.name for spec in formula.specs if not spec.schedule.grows}
    assert named - {f"{arm.name}-start"} == {fixed}


def test_depths_at_which_an_arm_cannot_grow_are_left_out_with_a_warning(tiny: StudyContext) -> None:
    arm = find_arm("vanilla+width=0.5-1")  # an odd depth has an odd number of heads
    formula = Formula(whole_surface(tiny))
    answer = formula.answer(fit_recipe(tiny, arms=[arm]))
    assert {spec.shape.depth % 2 for spec in formula.specs if spec.schedule.grows} == {0}
    for words in ("d3 is left out: width 0.5 of 3 heads", "left out at d3, d5, where it cannot be made"):
        assert any(words in warning for warning in answer.warnings), words
    assert answer.values["recipe"]["recipe"]["measured"] == [4, 4]


def test_an_arm_whose_stages_have_their_starts_is_tuned_without_stage_three(tiny: StudyContext) -> None:
    answer = Formula(whole_surface(tiny)).answer(fit_recipe(tiny, arms=["vanilla+blocks=1-all@0.4"]))
    assert list(answer.values["stages"]) == ["chain-tuning", "tpp", "lr-rule", "lr-rule of growth"]
    assert answer.values["recipe"]["recipe"]["rho"] is None
    with pytest.raises(UsageError, match="leave out @"):
        Formula(whole_surface(tiny)).answer(growth_fraction(tiny, arms=["vanilla+blocks=1-all@0.4"]))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("study", [growth_timing, growth_target, growth_fraction])
def test_studies_of_growth_take_every_axis(tiny: StudyContext, study: Any, axis: str) -> None:
    formula = Formula(whole_surface(tiny))
    answer = formula.answer(study(tiny, arms=[f"vanilla+{axis}"]))
    assert answer.findings and any(spec.schedule.grows for spec in formula.specs)
    name = axis.partition("=")[0]
    assert {axes for spec in formula.specs if (axes := spec.schedule.axes)} == {(name,)}


def test_growing_arms_inherit_from_their_starting_arm() -> None:
    pairs = {"untied-grow": "untied-2", "loop-grow": "loop-2", "deep-vanilla-grow": "deep-vanilla"}
    pairs |= {"loop-2+width=0.5-1": "loop-2", "vanilla+experts=2-8+window=64": "vanilla+experts=8+window=64"}
    assert {name: starting_arm(find_arm(name)).name for name in pairs} == pairs


def test_recipe_file_with_a_wrong_field_is_rejected_by_name(tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("arm: vanilla\nrecipe: {learning_rate_exponent: -0.8, tpp: 5, base: {glrr: 0.04}}\n")
    with pytest.raises(UsageError, match="glrr"):
        read_recipe(path)


def test_invalid_preset_is_rejected_by_field(tmp_path) -> None:
    text = (PRESETS_DIRECTORY / "tiny.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("batch_tokens: 2048", "batch_tokens: 2000"))
    with pytest.raises(UsageError, match=r"batch_tokens.*multiple of the context"):
        load_preset(str(path))
    path.write_text(text.replace("rungs: [3,", "rungs: [9,"))
    with pytest.raises(UsageError, match="rungs"):
        load_preset(str(path))
    path.write_text(text + "colour: blue\n")
    with pytest.raises(UsageError, match="colour"):
        load_preset(str(path))
    with pytest.raises(UsageError, match="no preset 'tinny'"):
        load_preset("tinny")


def test_a_measured_chain_is_replayed_by_the_rule_of_adoption() -> None:
    sweeps = [
        (3.0, (("weight_decay", 1, 2.9995), ("weight_decay", 2, 2.996))),
        (None, (("warmup_steps", 1, 2.9955), ("warmdown_fraction", 1, 2.991))),
        (2.990, (("beta2", 1, 2.9885), ("beta1", 1, 2.9886), ("beta1", 2, 2.9880))),
    ]
    # 0.0005 better is not enough.
    assert replay_chain(sweeps[:2]) == (2.991, [{"weight_decay": 2}, {"warmdown_fraction": 1}])
    loss, steps = replay_chain(sweeps)
    assert steps[-1] == {"beta2": 1, "beta1": 2}
    assert math.isinf(loss)  # two at once: nothing has measured them together


@pytest.mark.parametrize("count", ["matrix", "total"])
def test_sweeps_hold_the_flops_that_the_preset_counts(paper: StudyContext, count: FlopCount) -> None:
    context = replace(paper, preset=replace(paper.preset, sweep_flops=count))
    driver = Formula(lambda spec: 3.0 + (growth_fraction_of(spec) - 0.3) ** 2)
    answer = driver.answer(growth_fraction(context, arms=["untied-grow"]))
    own = [spec for spec in driver.specs if spec.shape.depth == 8]
    spread = {
        name: max(costs) / min(costs)
        for name in get_args(FlopCount)
        if (costs := [expected_flops(spec, name) for spec in own])
    }
    other = "total" if count == "matrix" else "matrix"
    assert spread[count] < 1.001 < 1.005 < spread[other]
    assert any("attention" in sentence for sentence in answer.method)
