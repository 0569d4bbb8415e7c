"""The spec of one run from an arm, a depth and options: what `steepen train` and `steepen.spec` call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.planner import make_plan
from steepen.recipe.recipe_choice import choose_recipes
from steepen.runs.spec import DataConfig, RunSpec, override
from steepen.studies.context import whole_validation_tokens
from steepen.studies.preset import load_preset

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.model.arm import Arm


def make_spec(
    dataset: Dataset,
    arm: str | Arm | type,
    depth: int,
    *,
    scale: dict[str, int],
    recipe: list[str],
    tpp: float | None,
    recipe_changes: dict[str, int | None],
    budget: dict[str, float | None],
    data: dict[str, Any],
    rest: dict[str, Any],
    validation_tokens: int | None,
    settings: list[str],
) -> tuple[RunSpec, tuple[str, ...]]:
    """The spec of a run on prepared data, and the planner's warnings.

    `scale` has fields of `SizeRule`, `recipe_changes` of `Recipe`, `budget` tokens, flops and rho,
    `data` fields of `DataConfig`, `rest` of `RunSpec`; `settings` are texts as `--set` takes them.
    """
    found = find_arm(arm)
    size = SizeRule(vocabulary=dataset.padded_vocabulary, real_vocabulary=dataset.vocabulary, **scale)
    choice = choose_recipes(recipe, tpp)
    choice.require_file_for(found)
    changes = {name: value for name, value in recipe_changes.items() if value is not None}
    changed = replace(choice.of(found), **changes)
    given: dict[str, Any] = {name: value for name, value in data.items() if value is not None}
    run_data = DataConfig(dataset.identity, **given)
    length_given = tpp is not None or budget["tokens"] is not None or budget["flops"] is not None
    if data["pool_tokens"] and data["epochs"] and not length_given:
        # Both say how long the run is: so many epochs of whole batches.
        steps = run_data.max_steps(data["pool_tokens"], size.context, changed.batch_tokens)
        budget = {**budget, "tokens": float(max(1, steps) * changed.batch_tokens)}
    plan = make_plan(
        found,
        depth=depth,
        size_rule=size,
        recipe=changed,
        tokens=budget["tokens"],
        flops=budget["flops"],
        rho=budget["rho"],
    )
    if validation_tokens is None:
        wanted = load_preset("paper").validation_tokens
        available = len(dataset.tokens("val"))
        validation_tokens = whole_validation_tokens(wanted, available, size.context, changed.batch_tokens)
    run = RunSpec.from_plan(plan.run, run_data, validation_tokens=validation_tokens, **rest)
    return override(run, [*choice.settings(found), *settings]), plan.warnings


def choose_precision(name: str, device: str) -> str:
    """Resolve "auto" to bf16 on a GPU and fp32 on a CPU."""
    if name != "auto":
        return name
    if device == "auto":
        from steepen.training.device import find_device

        device = find_device("auto").type
    return "bf16" if device.startswith("cuda") else "fp32"
