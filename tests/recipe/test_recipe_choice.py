"""`--recipe NAME|FILE` and `--tpp` mean the same to plan, train and study."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steepen.errors import UsageError
from steepen.model.arms import ARMS
from steepen.model.config import ModelOptions
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import BASE, LADDER_DEPTHS, PAPER, recipe_of
from steepen.recipe.planner import plan_ladders
from steepen.recipe.recipe import GrowthLaw
from steepen.recipe.recipe_choice import NAMED, RecipeChoice, RecipeFile, choose_recipes, write_recipe
from steepen.requests.app import main
from steepen.requests.plan import LaddersResult
from steepen.runs.spec import DataConfig, RunSpec, override
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset

FACTS = DatasetInfo("d" * 64, 50_304, 10**12, 20_000_000)


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_plan_prints_every_published_command_line_exactly(
    reference_data: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = reference_data("refdata/authors")
    with (folder / "ladder_recipes.csv").open(newline="") as file:
        published = list(csv.DictReader(file))
    flops: dict[tuple[str, str], str] = {}
    for table in ("fineweb_ladders", "fineweb_edu_ladders"):
        with (folder / f"{table}.csv").open(newline="") as file:
            flops |= {(row["arm"], row["depth"]): row["compute_flops"] for row in csv.DictReader(file)}
    lines = {tuple(line.split()[:2]): line.split() for line in out(capsys, "--recipe", "paper").splitlines()}
    planned = {
        (row["arm"], str(row["depth"])): row
        for row in json.loads(out(capsys, "--recipe", "paper", "--json"))["runs"]
    }
    assert len(published) == 52 and len(planned) == 59
    for row in published:
        key = (row["arm"], row["depth"])
        rate = float(row["learning_rate"])
        # The table has nine digits of Deep Vanilla's head multiplier, of the others twelve.
        head = (
            BASE["deep-vanilla"].head_lr_multiplier
            if key[0] == "deep-vanilla"
            else float(row["head_lr_multiplier"])
        )
        rates = [rate, rate * float(row["embedding_lr_multiplier"]), rate * head]
        growth = [row["crossover_step"]] if row["crossover_step"] else []
        assert lines[key][2:] == [row["steps"], *growth, *map(str, rates), str(float(flops[key]))]
        found = planned[key]
        assert [found["learning_rate"], found["embedding_lr"], found["head_lr"]] == rates
        assert (found["steps"], found["tokens"]) == (int(row["steps"]), int(row["tokens"]))
        assert found["growth_step"] == (int(row["crossover_step"]) if growth else None)
        assert found["flops"] == float(flops[key])


def test_ladders_fit_a_terminal_of_80_columns_and_a_pipe_has_every_digit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = out(capsys, "--recipe", "paper")
    assert max(map(len, short.splitlines())) == 80 and " 0.06169 " in short and " 3.253e17 \n" in short
    assert "or use --json" in short.splitlines()[-1]
    for columns in ("200", None):
        monkeypatch.delenv("COLUMNS") if columns is None else monkeypatch.setenv("COLUMNS", columns)
        long = out(capsys, "--recipe", "paper")
        assert "0.061689730348159694" in long and "--json" not in long


def test_ladder_rows_equal_the_plans_of_single_runs() -> None:
    rungs = plan_ladders(RecipeChoice())
    assert len(rungs) == sum(map(len, LADDER_DEPTHS.values())) == 59
    for rung in rungs[::7]:
        own = recipe_of(rung.arm).at(rung.arm, rung.shape.depth)
        assert LaddersResult((), (rung,)).to_rows() == LaddersResult((), (own,)).to_rows()


def test_named_recipes_change_what_they_say() -> None:
    grow = ARMS["untied-grow"]
    paper, fixed, affine, constant = (
        choose_recipes([name]).of(grow).at(grow, 18)
        for name in ("paper", "paper-fixed-rho", "paper-affine-rho", "paper-constant-lr")
    )
    assert paper.rho == 0.25
    assert fixed.rho == 0.3
    # Six tokens per parameter without growth: fewer with it.
    assert fixed.flops.matrix == pytest.approx(
        6 * fixed.initial_stored_parameters * fixed.stage_flops[0].matrix, rel=1 / fixed.steps
    )
    law = PAPER["untied-grow"].growth_law
    assert law is not None and affine.rho == law.rho(grow, affine.shape, 8.0)
    assert constant.hyperparameters.learning_rate == 0.04
    assert choose_recipes(["paper-fixed-rho"]).of(ARMS["loop-2"]) == PAPER["loop-2"]
    assert set(NAMED) == {"paper", "paper-fixed-rho", "paper-affine-rho", "paper-constant-lr"}


@pytest.fixture
def law_file(tmp_path: Path) -> Path:
    """A file as growth-timing writes it: another growth law for untied-grow."""
    recipe = replace(
        PAPER["untied-grow"], listed_rho=(), growth_law=GrowthLaw(0.8, 0.1, (2.0, 20.0)), tpp=7.0
    )
    write_recipe(tmp_path / "law.yaml", RecipeFile("untied-grow", recipe, "paper"))
    return tmp_path / "law.yaml"


def test_plan_train_and_study_read_the_same_file(
    law_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeDataset:
        identity, vocabulary, padded_vocabulary = "d" * 64, 50_257, 50_304
        validation_tokens = 20_000_000

        def tokens(self, split: str) -> range:
            return range(10**12 if split == "train" else 20_000_000)

    monkeypatch.setattr("steepen.data.Dataset.open", lambda folder: FakeDataset())
    arm = ARMS["untied-grow"]
    for more in ([], ["--tpp", "9"]):
        words = ["--arm", "untied-grow", "--depth", "8", "--recipe", str(law_file), *more]
        plan = json.loads(out(capsys, *words, "--json"))
        choice = choose_recipes([str(law_file)], float(more[1]) if more else None)
        context = StudyContext(load_preset("paper"), FACTS, choice=choice)
        rung = context.recipe(arm).at(arm, 8, context.size_rule)
        assert (plan["steps"], plan["rho"], plan["growth_step"]) == (rung.steps, rung.rho, rung.growth_step)
        assert rung.rho == GrowthLaw(0.8, 0.1).rho(arm, rung.shape, 9.0 if more else 7.0)
        saved = tmp_path / "spec.json"
        assert main(["train", *words, "--data", str(tmp_path), "--write-spec", str(saved)]) == 0
        capsys.readouterr()
        spec = json.loads(saved.read_text())
        assert (spec["steps"], spec["schedule"]["stages"][1]["start"]) == (
            rung.steps, rung.schedule.stages[1].start
        )  # fmt: skip


def test_whole_ladders_of_a_file_are_of_its_arm(law_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(out(capsys, "--recipe", str(law_file), "--json"))["runs"]
    assert {row["arm"] for row in rows} == {"untied-grow"}
    assert [row["depth"] for row in rows] == list(range(6, 27))  # where the recipe was measured


def test_named_recipe_replaces_a_presets_changes_but_not_its_scale() -> None:
    preset = load_preset("tiny")
    arm = ARMS["vanilla"]
    own = StudyContext(preset, FACTS).recipe(arm)
    named = StudyContext(preset, FACTS, choice=choose_recipes(["paper"])).recipe(arm)
    assert own.base.learning_rate != 0.04 == named.base.learning_rate
    assert (named.batch_tokens, named.base_depth) == (preset.batch_tokens, preset.base_depth)
    at_tpp = StudyContext(preset, FACTS, choice=choose_recipes([], 3.0)).recipe(arm)
    assert at_tpp == replace(own, tpp=3.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "papr"], "paper-fixed-rho"),
        (["--recipe", "missing.yaml"], "could not be read"),
        (["--recipe", "paper", "--recipe", "paper-fixed-rho"], "one name"),
        (["--recipe", "paper", "--depth", "8"], "--arm"),
        (["--arm", "vanilla", "--depth", "8", "--tpp", "0"], "--tpp"),
        ([], "--arm"),
    ],
)
def test_wrong_choice_is_rejected_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split()) and "Traceback" not in error


def test_file_for_another_arm_is_rejected(law_file: Path) -> None:
    choice = choose_recipes([str(law_file)])
    with pytest.raises(UsageError, match="for untied-grow, not for vanilla"):
        choice.require_file_for(ARMS["vanilla"])
    # With a named set beside it, the set covers the other arms.
    both = choose_recipes(["paper", str(law_file)])
    both.require_file_for(ARMS["vanilla"])
    assert both.of(ARMS["vanilla"]) == PAPER["vanilla"]
    with pytest.raises(UsageError, match="two recipe files"):
        choose_recipes([str(law_file), str(law_file)])


def test_the_papers_recipe_stores_embedding_and_rope_table_as_the_authors_do() -> None:
    """`train` and a study of preset `paper` make the same spec; other presets keep fp32."""
    for name in ("vanilla", "untied-grow"):
        arm = ARMS[name]
        data = DataConfig(FACTS.identity)
        plain = RunSpec.from_plan(
            recipe_of(arm).at(arm, 8), data, precision="bf16", validation_tokens=9_961_472
        )
        trained = override(plain, choose_recipes(["paper"]).settings(arm))
        assert (trained.optimizer.embedding_precision, trained.options.rope_table) == ("bf16", "bf16")
        assert trained == override(plain, RecipeChoice().settings(arm))
        context = StudyContext(load_preset("paper"), FACTS)
        assert context.spec(context.recipe(arm).at(arm, 8, context.size_rule)).hash == trained.hash
        adam = OptimizerConfig.named("adamw")
        other = context.spec(context.recipe(arm).at(arm, 8, context.size_rule), optimizer=adam)
        assert other.optimizer == replace(adam, embedding_precision="bf16")
    assert RecipeChoice(files={"vanilla": PAPER["vanilla"]}).settings(ARMS["vanilla"]) == ()
    for preset in ("mini", "tiny"):
        context = StudyContext(load_preset(preset), replace(FACTS, vocabulary=8192))
        spec = context.spec(context.recipe(ARMS["vanilla"]).at(ARMS["vanilla"], 3, context.size_rule))
        assert (spec.optimizer, spec.options) == (OptimizerConfig(), ModelOptions())
