"""The recipes and the planner give the paper's budgets and warn where a rule is extrapolated."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steepen.errors import UsageError
from steepen.model.arms import ARMS, find_arm
from steepen.model.config import ModelOptions
from steepen.model.shape import SizeRule
from steepen.model.stages import StageSchedule
from steepen.recipe.accelerators import find_accelerator
from steepen.recipe.flops import compute_active_parameters, flops_per_token, stored_parameters
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.memory import largest_micro_batch, training_memory
from steepen.recipe.paper_tables import BASE, INITIAL, PAPER, TIED_GROWTH, UNTIED_GROWTH, recipe_of
from steepen.recipe.planner import Cluster, make_plan
from steepen.recipe.recipe import ScalingRule
from steepen.requests.app import main

KEYS = {
    "arm", "depth", "width", "heads", "allocation", "stored_parameters", "initial_stored_parameters",
    "compute_active_parameters", "executed_depth", "flops_per_token", "tokens", "steps", "growth_step", "rho",
    "flops", "hyperparameters",
}  # fmt: skip


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arm", "depth", "flops"),
    [("untied-grow", 26, "1.225e+21"), ("vanilla", 6, "3.25e+17"), ("vanilla", 20, "1.01e+20")],
)
def test_flops_match_the_papers_budgets(
    arm: str, depth: int, flops: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_json(capsys, "--arm", arm, "--depth", str(depth))
    digits = len(flops.split("e", maxsplit=1)[0]) - 2
    assert f"{plan['flops']:.{digits}e}" == flops
    assert set(plan) >= KEYS


def test_untied_grow_d26_is_set_by_its_reference_budget() -> None:
    rung = PAPER["untied-grow"].at(ARMS["untied-grow"], 26)
    assert rung.initial_stored_parameters == 5_016_387_584
    per_token = flops_per_token(rung.arm, rung.shape, 2)
    # The paper's 1.2250e21 is the budget without growth; growth keeps its matrix FLOPs, not its attention.
    assert 8 * 5_016_387_584 * per_token.total == pytest.approx(1.2250e21, rel=5e-5)
    # Whole steps and a whole growth step move the budget by less than a step's worth.
    assert rung.flops.matrix == pytest.approx(8 * 5_016_387_584 * per_token.matrix, rel=2 / rung.steps)


@pytest.mark.parametrize(
    ("arm", "rho"), [("loop-grow", 0.18), ("untied-grow", 0.29), ("deep-vanilla-grow", 0.5)]
)
def test_growth_fractions_at_d8(arm: str, rho: float) -> None:
    rung = PAPER[arm].at(ARMS[arm], 8)
    assert rung.rho == rho
    assert rung.growth_step == math.floor((1 - rho) * rung.steps)


def test_growth_law_inverts_the_affine_law_of_tokens() -> None:
    for law, name in ((TIED_GROWTH, "loop-grow"), (UNTIED_GROWTH, "untied-grow")):
        arm = ARMS[name]
        shape = arm.shape(9)
        for tpp in (4.5, 7.0, 12.0):
            rho = law.rho(arm, shape, tpp)
            two, four = (compute_active_parameters(arm, shape, passes) for passes in (2, 4))
            grown_tpp = tpp * two / ((1 - rho) * two + rho * four)  # Equation "growth-tpp-expansion"
            assert grown_tpp == pytest.approx(law.a * tpp + law.b, rel=1e-12)


@pytest.mark.parametrize("passes", [2, 4, 7])
@pytest.mark.parametrize("family", ["loop", "untied"])
def test_tokens_per_parameter_at_equal_compute_follow_the_papers_identity(family: str, passes: int) -> None:
    """TPP_K = TPP_1 / (E_K·S_K), with E_K = N_c(K)/N_c(1) and S_K = N_s(K)/N_s(1).

    Equation "recurrence-tpp-identity" leaves attention out; at a context of 1 its cost is negligible.
    """
    recipe = replace(PAPER["vanilla"], batch_tokens=1024)
    one, many = (
        recipe.at_budget(find_arm(f"{family}-{k}"), 6, SizeRule(context=1), flops=3e17) for k in (1, passes)
    )
    one_active, many_active = (
        compute_active_parameters(rung.arm, rung.shape, k) for rung, k in ((one, 1), (many, passes))
    )
    stored = many.stored_parameters / one.stored_parameters
    assert stored == 1 if family == "loop" else stored > 1
    tpp = [rung.tokens / rung.stored_parameters for rung in (one, many)]
    assert tpp[1] == pytest.approx(tpp[0] / (many_active / one_active * stored), rel=1e-3)


def test_growth_law_outside_its_range_is_rejected() -> None:
    with pytest.raises(UsageError, match="rho"):
        replace(TIED_GROWTH, measured_tpp=None).rho(ARMS["loop-grow"], ARMS["loop-grow"].shape(8), 1.0)


def test_learning_rate_rule_is_anchored_at_d8() -> None:
    for name, recipe in PAPER.items():
        arm = ARMS[name]
        anchor = 0.036 if name == "deep-vanilla-grow" else 0.04
        assert recipe.learning_rate(arm, 8) == pytest.approx(anchor)
        sizes = [stored_parameters(arm, arm.shape(d), arm.passes.initial) for d in (8, 18)]
        assert recipe.learning_rate(arm, 18) == pytest.approx(
            anchor * (sizes[1] / sizes[0]) ** recipe.learning_rate_exponent
        )
    assert {name: r.learning_rate_exponent for name, r in PAPER.items()} == {
        "vanilla": -0.8, "deep-vanilla": -0.7, "operator-1": -0.6, "loop-2": -0.6, "untied-2": -0.6,
        "deep-vanilla-grow": -0.8, "untied-grow": -0.6, "loop-grow": -0.5,
    }  # fmt: skip
    assert {name: r.tpp for name, r in PAPER.items()} == {
        "vanilla": 5, "deep-vanilla": 6, "operator-1": 6, "loop-2": 6, "untied-2": 6,
        "deep-vanilla-grow": 6, "untied-grow": 8, "loop-grow": 7,
    }  # fmt: skip


def test_base_table_has_14_columns_and_growth_arms_inherit_it() -> None:
    assert len(fields(Hyperparameters)) == 14
    assert PAPER["untied-grow"].base is BASE["untied-2"]
    assert PAPER["loop-grow"].base is BASE["loop-2"]
    assert PAPER["deep-vanilla-grow"].base is BASE["deep-vanilla"]
    assert BASE["operator-1"].embedding_lr == pytest.approx(0.04 * 0.905, rel=1e-3)
    assert (INITIAL.learning_rate, INITIAL.warmdown_fraction, INITIAL.warmup_steps) == (0.04, 0.4, 40)


@settings(max_examples=25)
@given(st.sampled_from(sorted(PAPER)), st.floats(16.5, 22.5))
def test_flops_budget_is_spent_exactly_at_the_nearest_depth(name: str, exponent: float) -> None:
    flops = 10.0**exponent
    plan = make_plan(ARMS[name], flops=flops)
    rung = plan.run
    assert rung.flops.total == pytest.approx(flops, rel=max(2e-3, 2 / rung.steps))
    recipe = recipe_of(ARMS[name])

    def distance(depth: int) -> float:
        try:
            own = recipe.at(ARMS[name], depth).flops.total
        except UsageError:  # so small a network is nearly all embedding, where the growth law ends
            return float("inf")
        return max(own / flops, flops / own)

    here = rung.shape.depth
    assert all(distance(here) <= distance(d) * 1.0001 for d in (here - 1, here + 1) if d >= 1)


def test_depth_and_tokens_together_spend_the_tokens_at_that_depth(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "--arm", "loop-2", "--depth", "8", "--tokens", "1e9")
    assert plan["depth"] == 8 and plan["tokens"] == round(1e9 / 524_288) * 524_288
    plan = plan_json(capsys, "--arm", "loop-2", "--tokens", "1.2e9")
    assert plan["depth"] == 8


def test_run_of_any_size_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--aspect", "32", "--head-dim", "32", "--mlp-multiple", "32", "--context", "256"]
    budget = ["--tokens", "2e6", "--batch-tokens", "8192"]
    plan = plan_json(capsys, "--arm", "loop-2", "--depth", "4", *budget, *small)
    assert (plan["width"], plan["heads"], plan["steps"]) == (128, 4, round(2e6 / 8192))
    assert any("single step" in w for w in make_plan(ARMS["vanilla"], flops=1.0).warnings)
    first, *_ = make_plan(ARMS["vanilla"], depth=8, tokens=1e4).warnings
    assert first.startswith("10,000 tokens are less than one step of 524,288 (batch_tokens)")


def test_growth_fraction_of_one_equals_the_grown_network() -> None:
    rung = make_plan(ARMS["untied-grow"], depth=8, rho=1.0).run
    assert rung.initial_stored_parameters == rung.stored_parameters
    assert rung.growth_step is None


def test_time_cost_and_memory_estimates_follow_the_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arm", "untied-grow", "--depth", "26", "--gpus", "16", "--gpu", "h100", "--mfu", "0.4"]
    plan = plan_json(capsys, *words, "--dollars-per-hour", "2")
    cluster = plan["cluster"]
    assert cluster["hours"] == pytest.approx(plan["flops"] / (16 * 989.4e12 * 0.4) / 3600)
    assert cluster["dollars"] == pytest.approx(2 * 16 * cluster["hours"])
    hours = min(one["hours"] for one in cluster["communication_per_step"].values())
    assert main(["plan", *words, "--dollars-per-hour", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"without communication, at most ${2 * 16 * hours:,.2f} with communication" in printed
    memory = cluster["memory_gib_per_gpu"]
    parameters = plan["stored_parameters"]
    # ZeRO-1: fp32 gradients on every GPU, a sixteenth of fp32 weights and Muon's momentum.
    least = (4 + 8 / 16) * parameters / 2**30
    assert least < memory["shard optimizer"]["state"] < 1.05 * least
    assert memory["shard full"]["state"] < memory["shard optimizer"]["state"] / 3
    assert memory["shard full"]["compute_weights"] < memory["shard optimizer"]["compute_weights"] / 3


def test_stages_of_experts_are_planned_as_runs_of_their_networks() -> None:
    cluster = Cluster(micro_batch=4)
    found, dense, experts = (
        make_plan(find_arm(arm), depth=8, cluster=cluster)
        for arm in ("vanilla+experts=1-8@0.5", "vanilla", "vanilla+experts=8")
    )
    alone = [one.to_dict() for one in (dense, experts)]
    phases, memory = found.to_dict()["phases"], found.to_dict()["cluster"]["memory_gib_by_stage"]["one GPU"]
    assert [phase["flops_per_token"] for phase in phases] == [
        one["phases"][0]["flops_per_token"] for one in alone
    ]
    assert memory == [one["cluster"]["memory_gib_by_stage"]["one GPU"][0] for one in alone]
    assert memory[0] < memory[1] and "experts" not in phases[0] and phases[1]["experts"] == 8
    # Tokens per parameter and the learning rate are by the arm at its end, by experts that a token uses.
    assert found.run.recipe_parameters == experts.run.recipe_parameters < experts.run.stored_parameters
    assert found.run.hyperparameters == experts.run.hyperparameters
    assert found.run.initial_stored_parameters == dense.run.stored_parameters


def test_memory_estimate_is_near_the_measured_memory() -> None:
    """Peaks of forward and backward beyond weights and their bf16 copies, in GiB, with an fp32 stream and
    micro-batches of 65,536 tokens, measured on one H200.
    """
    for arm, depth, peak in (
        ("vanilla", 8, 16.54),
        ("operator-1", 8, 16.79),
        ("loop-2", 8, 22.40),
        ("untied-2", 8, 22.54),
        ("vanilla", 12, 35.47),
    ):
        rung = PAPER[arm].at(ARMS[arm], depth)
        memory = training_memory(rung, 1, 32)
        estimate = memory.activations + memory.logits + 4 * rung.stored_parameters  # gradients
        assert estimate / 2**30 == pytest.approx(peak, rel=0.05), (arm, depth)


@pytest.mark.parametrize(("depth", "peak"), [(3, 2.97), (2, 1.86)])
def test_memory_estimate_of_small_networks_is_near_the_measured_memory(depth: int, peak: float) -> None:
    """Measured peaks of whole steps on one GPU with a bf16 stream, 64×1024 tokens, in GiB."""
    rung = PAPER["vanilla"].at(ARMS["vanilla"], depth, SizeRule(context=1024, vocabulary=8192))
    estimate = training_memory(rung, 1, 64, options=ModelOptions(residual_stream="bf16")).total / 2**30
    assert estimate == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("arm", "operators"), [("vanilla", 0), ("operator-1", 1), ("loop-2", 2)])
def test_fp32_residual_stream_adds_its_part_to_the_memory_estimate(arm: str, operators: int) -> None:
    """Counted on fake tensors in tests/execution/test_gpu_fused_memory.py: 4 widths, and 1 per operator."""
    rung = PAPER[arm].at(ARMS[arm], 8)
    narrow, wide = (
        training_memory(rung, 1, 32, options=ModelOptions(residual_stream=stream))
        for stream in ("bf16", "fp32")
    )
    assert wide.total - narrow.total == 2 * 32 * 2048 * 1024 * (4 + operators)


@pytest.mark.parametrize(("depth", "peak"), [(8, 30.63), (12, 56.3)])
def test_memory_estimate_without_the_fused_kernels_is_near_that_of_torch_compile(
    depth: int, peak: float
) -> None:
    """Measured on one H200 with 32×2048 tokens: the compiled reference of benchmarks/throughput.py."""
    rung = PAPER["vanilla"].at(ARMS["vanilla"], depth)
    bf16 = ModelOptions(residual_stream="bf16")
    alone = training_memory(rung, 1, 32, options=bf16)
    full = training_memory(rung, 8, 32, shard="full", options=bf16)
    estimate = alone.state + alone.compute_weights + full.activations + full.logits
    assert estimate / 2**30 == pytest.approx(peak, rel=0.1)


def test_largest_micro_batch_fits_and_one_more_would_not() -> None:
    gpu = find_accelerator("h100")
    rung = PAPER["vanilla"].at(ARMS["vanilla"], 12)
    assert largest_micro_batch(rung, 32, gpu) == 8  # all sequences of a GPU
    most = largest_micro_batch(rung, 4, gpu, shard="full")
    room = 0.9 * gpu.memory_gib * 2**30
    assert training_memory(rung, 4, most, shard="full").total <= room
    assert training_memory(rung, 4, most + 1, shard="full").total > room


def test_efficiency_counts_the_measured_work_of_a_rank_and_a_model_of_the_transfer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--arm", "vanilla", "--depth", "20", "--gpus", "16"]
    found = {gpu: plan_json(capsys, *words, "--gpu", gpu) for gpu in ("h200", "b200")}
    for gpu, plan in found.items():
        step = 3600 * plan["cluster"]["hours"] / plan["steps"]
        for one in plan["cluster"]["communication_per_step"].values():
            parts = step + one["rank_seconds"] + one["exposed_seconds"]
            assert one["efficiency"] == pytest.approx(step / parts), gpu
    seconds = [
        plan["cluster"]["communication_per_step"]["shard optimizer"]["rank_seconds"]
        for plan in found.values()
    ]
    # Muon of the measured step of this size takes 8.7 ms; a GPU of twice the peak is taken to need half.
    assert 0.0087 < seconds[0] < 0.02
    assert seconds[1] == pytest.approx(seconds[0] * 989.4 / 2250)


def test_the_d26_run_on_16_gpus_has_micro_batches_of_4_then_2_as_the_authors_ran_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["plan", "--arm", "untied-grow", "--depth", "26", "--gpus", "16"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if "memory, shard optimizer" in row)
    assert "fits (" in line and "micro-batch 4, then 2, largest that fits: 5, then 2" in line
    plan = plan_json(capsys, "--arm", "untied-grow", "--depth", "26", "--gpus", "16")
    assert plan["cluster"]["micro_batch"]["shard optimizer"] == [4, 2]
    fixed = plan_json(capsys, "--arm", "untied-2", "--depth", "18", "--gpus", "8")
    assert len(fixed["cluster"]["micro_batch"]["shard optimizer"]) == 1


def test_plan_names_the_largest_micro_batch_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    words = ["plan", "--arm", "untied-grow", "--depth", "25", "--gpus", "16", "--micro-batch"]
    for micro_batch, said in (
        ("2", "fits ("),
        ("3", "fits, with less than 10% to spare ("),
        ("4", "NOT fit"),
    ):
        assert main([*words, micro_batch]) == 0
        line = next(row for row in capsys.readouterr().out.splitlines() if "memory, shard optimizer" in row)
        assert said in line and "largest that fits: 6, then 2" in line


def test_plan_recomputes_blocks_where_not_even_one_sequence_fits() -> None:
    """A longer context does so; recomputing costs a second forward of the blocks."""
    gpu, arm, plans = find_accelerator("h100"), ARMS["vanilla"], {}
    for context in (2048, 131_072):
        plan = make_plan(arm, depth=20, size_rule=SizeRule(context=context), cluster=Cluster(gpu=gpu))
        plans[context] = (plan, plan.to_dict()["cluster"])
    plan, short = plans[2048]
    assert not short["recompute"]["one GPU"] and short["hours"] == plan.seconds / 3600
    plan, long = plans[131_072]
    assert largest_micro_batch(plan.run, 1, gpu) == 0 < long["largest_micro_batch"]["one GPU"][0]
    flops = plan.run.flops
    blocks = (flops.matmul + flops.attention) / flops.total
    assert long["recompute"]["one GPU"]
    assert long["hours"] == pytest.approx(plan.seconds / 3600 * (1 + blocks / 3))
    assert long["memory_gib_per_gpu"]["one GPU"]["total"] < 0.9 * gpu.memory_gib


def test_plan_prices_only_what_can_be_executed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpus in ("3", "512"):
        assert main(["plan", "--arm", "vanilla", "--depth", "8", "--gpus", gpus]) == 2
        said = capsys.readouterr().err
        assert f"--gpus {gpus} is not possible: a batch of 256 sequences cannot be divided evenly." in said
    for tokens in ("1", "3000"):
        assert main(["plan", "--arm", "vanilla", "--depth", "8", "--batch-tokens", tokens]) == 2
        assert "is not a multiple of the context 2,048" in capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["plan", "--arm", "vanilla", "--depth", "8", "--gpus", "64", "--micro-batch", "99"]) == 0
    assert "micro-batch 4, largest that fits: 4" in capsys.readouterr().out


def test_extrapolated_rules_are_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert any(
        "outside d6-d26" in w for w in plan_json(capsys, "--arm", "untied-grow", "--depth", "30")["warnings"]
    )
    assert plan_json(capsys, "--arm", "vanilla", "--depth", "10")["warnings"] == []
    assert any("25%" in w for w in make_plan(ARMS["vanilla"], depth=8, tokens=1e10).warnings)
    assert any("loop-2's" in w for w in make_plan(ARMS["loop-2-norm-only"], depth=8).warnings)


def test_own_recipe_is_not_called_the_papers() -> None:
    papers = recipe_of(ARMS["vanilla"])
    own = replace(papers, base=replace(papers.base, learning_rate=0.07), measured=(2, 4))
    warnings = make_plan(ARMS["vanilla"], depth=6, recipe=own, size_rule=SizeRule(context=1024)).warnings
    assert warnings == ("depth 6 is outside d2-d4, where this recipe was measured.",)


@pytest.mark.parametrize(
    "words",
    [
        ["--arm", "vanila", "--depth", "8"],
        ["--arm", "vanilla"],
        ["--arm", "vanilla", "--depth", "0"],
        ["--arm", "vanilla", "--depth", "eight"],
        ["--arm", "vanilla", "--flops", "-1"],
        ["--arm", "vanilla", "--flops", "1e19", "--tokens", "1e9"],
        ["--arm", "vanilla", "--depth", "8", "--rho", "0.3"],
        ["--arm", "untied-grow", "--depth", "8", "--rho", "1.3"],
        ["--arm", "loop-2-2-c-3", "--depth", "4"],
        ["--arm", "vanilla", "--depth", "8", "--gpu", "h1000"],
        ["--arm", "vanilla", "--depth", "8", "--gpus", "0"],
        ["--arm", "vanilla", "--depth", "8", "--mfu", "40"],
        ["--arm", "vanilla", "--flops", "1e40"],
        ["--arm", "vanilla", "--depth", "8", "--tokens", "1e300"],
        ["--arm", "vanilla", "--depth", str(10**30)],
        ["--arm", "vanilla", "--depth", "8", "--dollars-per-hour", "nan"],
        ["--arm", ":x", "--depth", "8"],
    ],
)
def test_wrong_request_exits_2_with_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.strip()
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("columns", [80, 130])
def test_arm_descriptions_fit_every_terminal_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["arms"]) == 0
    shown = capsys.readouterr().out
    assert "a standard transformer" in shown and "2/3/3" in shown and "…" not in shown
    assert ("154.3M" in shown) == (columns == 130)


def test_arms_and_plan_print_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["arms", "--depth", "8"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ARMS) and "244.3M → 321.4M" in text
    assert main(["plan", "--arm", "untied-grow", "--depth", "8"]) == 0
    assert "2/3/3" in capsys.readouterr().out
    assert main(["arms", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["arms"]) == len(ARMS)


def test_arm_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_lab.py").write_text(
        "from steepen.model.arm import Arm, StageSchedule\n"
        "ARM = Arm('mine', coda_boundary='norm', tied=False, passes=StageSchedule.staged((0, 1), (0.5, 3)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plan = plan_json(capsys, "--arm", "my_lab:ARM", "--depth", "8")
    assert plan["arm"] == "mine" and plan["executed_depth"] == 2 + 3 * 3 + 3


def test_staged_arm_at_its_recipes_budget_has_no_warning() -> None:
    arm = replace(find_arm("loop-grow"), passes=StageSchedule.staged((0, 2), (0.3, 4), (0.6, 8)))
    assert make_plan(arm, depth=10).warnings == ()
    fewer = make_plan(arm, depth=10, tokens=0.5 * make_plan(arm, depth=10).run.tokens)
    assert any("over 25%" in warning for warning in fewer.warnings)


@pytest.mark.parametrize("name", ["loop-grow", "untied-grow"])
def test_growth_fraction_of_a_budget_follows_its_own_tokens_per_parameter(name: str) -> None:
    arm = find_arm(name)
    recipe = recipe_of(arm)
    assert recipe.growth_law is not None
    usual = make_plan(arm, depth=9).run
    twice = make_plan(arm, depth=9, flops=2 * usual.flops.total).run
    matrix = flops_per_token(arm, twice.shape, arm.passes.initial).total
    tpp = twice.flops.total / matrix / twice.initial_stored_parameters
    assert twice.rho == pytest.approx(recipe.growth_law.rho(arm, twice.shape, tpp), rel=1e-3)
    assert twice.rho is not None and usual.rho is not None and twice.rho != pytest.approx(usual.rho, rel=0.02)


def test_any_hyperparameter_can_scale_with_size() -> None:
    arm = find_arm("vanilla")
    rules = (
        ScalingRule("WD", -0.5),
        ScalingRule("output_multiplier", -1.0, "width"),
        ScalingRule("warmdown_fraction", 3.0),
    )
    recipe = replace(recipe_of(arm), scaling=rules)
    plain, at_base, large = (
        recipe_of(arm).base,
        recipe.hyperparameters(arm, 8),
        recipe.hyperparameters(arm, 16),
    )
    assert at_base == recipe_of(arm).hyperparameters(arm, 8)
    ratio = make_plan(arm, depth=16).run.stored_parameters / make_plan(arm, depth=8).run.stored_parameters
    assert large.weight_decay == pytest.approx(plain.weight_decay * ratio**-0.5)
    assert large.output_multiplier == pytest.approx(plain.output_multiplier / 2)
    assert large.warmdown_fraction == 1.0
    assert large.learning_rate == recipe_of(arm).hyperparameters(arm, 16).learning_rate
    with pytest.raises(UsageError, match="hyperparameter"):
        ScalingRule("beta1", 0.5)


def test_schedule_with_fixed_growth_times_needs_no_growth_law() -> None:
    arm = replace(ARMS["untied-2"], passes=StageSchedule.staged((0, 2), (0.5, 4), (0.8, 6)))
    rung = recipe_of(arm).at(arm, 8)
    assert rung.starts == (0, math.floor(0.5 * rung.steps), math.floor(0.8 * rung.steps))
    assert rung.stored_parameters == stored_parameters(arm, rung.shape, 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0),
        ("warmdown_fraction", 1.5),
        ("beta2", 1.0),
        ("warmup_steps", 2.5),
        ("weight_decay", -1),
        ("adam_eps", float("nan")),
    ],
)
def test_bad_hyperparameter_is_named(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        replace(INITIAL, **{name: value})
