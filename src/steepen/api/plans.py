"""`steepen.arms`, `steepen.plan` and `steepen.spec`: the arms, the cost of a run, and its specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.model.arm import Arm
    from steepen.recipe.passes_law import BestPasses, PassesLaw
    from steepen.recipe.planner import Plan


def arms(depth: int = 8) -> ArmsResult:
    """The table of arms, with their sizes at a nominal depth."""
    from steepen.model.arms import ARMS

    return ArmsResult(depth, tuple(ARMS.values()))


def best_passes(
    depth: int, tpp: Sequence[float], *, family: str = "both", laws: Sequence[PassesLaw] | None = None
) -> list[BestPasses]:
    """K*, its expansion and tokens per parameter at K* for a depth, at the compute of `tpp` with one pass.

    `family` is tied, untied or both; `laws` are the paper's unless given.
    """
    from steepen.recipe.passes_law import TIED_PASSES, UNTIED_PASSES

    if family not in ("tied", "untied", "both"):
        raise UsageError(f"family is {family!r}; choose tied, untied or both.")
    chosen = laws if laws is not None else (TIED_PASSES, UNTIED_PASSES)
    wanted = [law for law in chosen if family == "both" or law.tied == (family == "tied")]
    return [law.at(depth, value) for law in wanted for value in tpp]


@dataclass(frozen=True, eq=False, repr=False)
class ArmsResult(Result):
    """The arms at a depth; `found["untied-2"]` is one of them."""

    depth: int
    arms: tuple[Arm, ...]

    def __iter__(self) -> Any:
        """The arms, in the order of the table."""
        return iter(self.arms)

    def __len__(self) -> int:
        return len(self.arms)

    def __getitem__(self, name: str) -> Arm:
        """An arm by name; any that `--arm` accepts."""
        from steepen.model.arms import find_arm

        return find_arm(name)

    def headline(self) -> str:
        """How many arms there are."""
        return f"{len(self.arms)} arms at depth {self.depth}"

    def summary(self) -> str:
        """One line per arm: its name and what it is."""
        width = max(len(arm.name) for arm in self.arms)
        return "\n".join(f"{arm.name.ljust(width)}  {arm.about}" for arm in self.arms)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per arm that exists at the depth: passes, allocation, parameters."""
        from steepen.recipe.flops import compute_active_parameters, stored_parameters

        rows: list[dict[str, Any]] = []
        for arm in self.arms:
            try:
                shape = arm.shape(self.depth)
            except UsageError:  # a fixed allocation such as 2/C/3 needs a minimum depth
                continue
            last = arm.passes.final
            rows.append(
                {
                    "arm": arm.name,
                    "about": arm.about,
                    "tied": arm.tied,
                    "passes": last,
                    "grows": arm.passes.grows,
                    "allocation": str(shape.allocation),
                    "width": shape.width,
                    "executed_depth": shape.allocation.executed(last),
                    "parameters": stored_parameters(arm, shape, arm.passes.max_passes),
                    "compute_active_parameters": compute_active_parameters(arm, shape, last),
                }
            )
        return rows

    def plot(self, ax: Any = None) -> Any:
        """Draw stored against compute-active parameters; returns the Axes."""
        ax = new_axes(ax)
        rows = self.to_rows()
        ax.plot([row["parameters"] for row in rows], [row["compute_active_parameters"] for row in rows], "o")
        ax.set(xscale="log", yscale="log", xlabel="stored parameters", ylabel="compute-active parameters")
        return ax


def plan(
    arm: str | Arm | type,
    depth: int | None = None,
    *,
    flops: float | None = None,
    tokens: float | None = None,
    rho: float | None = None,
    tpp: float | None = None,
    recipe: str | Path | Sequence[str | Path] = (),
    gpus: int = 1,
    gpu: str = "h100",
    mfu: float = 0.4,
    dollars_per_hour: float | None = None,
    micro_batch: int | None = None,
    batch_tokens: int | None = None,
    base_depth: int | None = None,
    **size: int,
) -> PlanResult:
    """Plan a run: size, tokens, FLOPs, hyperparameters, memory, time and cost.

    A depth alone gives the recipe's compute-optimal run; `flops` or `tokens` alone choose the depth; together
    they spend the budget at that depth. `size` has fields of `SizeRule`: aspect, head_dim, mlp_multiple,
    context, vocabulary.
    """
    from steepen.model.arms import find_arm
    from steepen.model.shape import SizeRule
    from steepen.recipe.hardware import find_accelerator
    from steepen.recipe.planner import Cluster, make_plan
    from steepen.recipe.recipe_choice import choose_recipes

    found = find_arm(arm)
    choice = choose_recipes(recipe_names(recipe), tpp)
    choice.require_file_for(found)
    given = {"batch_tokens": batch_tokens, "base_depth": base_depth}
    changes = {name: value for name, value in given.items() if value is not None}
    return PlanResult(
        make_plan(
            found,
            depth=depth,
            flops=flops,
            tokens=tokens,
            rho=rho,
            size_rule=SizeRule(**size),
            recipe=replace(choice.of(found), **changes),
            cluster=Cluster(gpus, find_accelerator(gpu), mfu, dollars_per_hour, micro_batch),
        )
    )


def recipe_names(recipe: str | Path | Sequence[str | Path]) -> list[str]:
    """Recipes by name or file, one or several."""
    return [str(recipe)] if isinstance(recipe, str | Path) else [str(one) for one in recipe]


@dataclass(frozen=True, eq=False, repr=False)
class PlanResult(Result):
    """A planned run; `plan` is the planner's own object."""

    plan: Plan

    def __getitem__(self, name: str) -> Any:
        """A value of the plan by name: `plan["flops"]`, `plan["learning_rate"]`."""
        facts = self.to_dict()
        facts |= {**facts["hyperparameters"], **facts["cluster"]}
        if name not in facts:
            raise UsageError(f"a plan has no {name!r}; it has {', '.join(sorted(facts))}.")
        return facts[name]

    def headline(self) -> str:
        """Arm, depth, tokens, FLOPs and time."""
        from steepen.utils.formatting import format_count, format_duration

        planned = self.plan.run
        return (
            f"{planned.arm.name} d{planned.shape.depth}: {format_count(planned.stored_parameters)} "
            f"parameters, {format_count(planned.tokens)} tokens, {planned.flops.total:.3g} FLOPs, about "
            f"{format_duration(self.plan.seconds)} on {self.plan.cluster.gpus} × {self.plan.cluster.gpu.name}"
        )

    def summary(self) -> str:
        """The plan's values, one per line, and its warnings."""
        rows = self.to_rows()
        width = max(len(row["quantity"]) for row in rows)
        lines = [f"{row['quantity'].ljust(width)}  {row['value']}" for row in rows]
        return "\n".join([self.headline(), *lines, *(f"note: {text}" for text in self.plan.warnings)])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as `steepen plan --json` prints it."""
        return self.plan.to_dict()

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per value of the plan."""
        facts = self.to_dict()
        names = ("arm", "depth", "width", "allocation", "executed_depth", "stored_parameters",
                 "compute_active_parameters", "tokens", "steps", "batch_tokens", "growth_step", "rho",
                 "flops")  # fmt: skip
        rows = {name: facts[name] for name in names} | facts["hyperparameters"]
        rows |= {name: facts["cluster"][name] for name in ("gpus", "gpu", "mfu", "gpu_hours", "dollars")}
        return [{"quantity": name, "value": value} for name, value in rows.items() if value is not None]

    def plot(self, ax: Any = None) -> Any:
        """Draw the executed depth over the tokens of the run; returns the Axes."""
        ax = new_axes(ax)
        seen, x, y = 0, list[int](), list[int]()
        for phase in self.to_dict()["phases"]:
            x += [seen, seen + phase["tokens"]]
            y += [phase["executed_depth"]] * 2
            seen += phase["tokens"]
        ax.plot(x, y)
        ax.set(xlabel="tokens", ylabel="executed depth", ylim=(0, None), title=self.headline())
        return ax
