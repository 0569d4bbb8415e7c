"""`plan`: what a run, or every run of a recipe's ladders, would be and cost."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from steepen.errors import UsageError
from steepen.requests.request import Option, Request, function
from steepen.requests.spec import SIZE, ArmField, DepthField, RunSize, Width
from steepen.results.plan import LaddersResult, PlanResult
from steepen.utils.codec import Range

if TYPE_CHECKING:
    # Without an arm it is a LaddersResult, which the editor need not offer.
    Planned = PlanResult
else:
    Planned = PlanResult | LaddersResult

CLUSTER = "Memory, time and cost"  # panel of --help


@dataclass(frozen=True)
class Plan(RunSize, Request[Planned]):
    """Plan a run: size, tokens, FLOPs, hyperparameters, memory, time and cost.

    `depth` alone gives the recipe's compute-optimal run; `flops` or `tokens` alone chooses the depth;
    together they spend the budget at that depth. `recipe` without `arm` plans its whole ladders.
    """

    examples = (
        "steepen plan --arm untied-grow --depth 26 --gpus 16",
        "steepen plan --arm vanilla --flops 1e19 --json",
        "steepen plan --recipe paper",
    )
    figure = tables = True

    arm: ArmField = None
    depth: DepthField = None
    _: KW_ONLY
    vocabulary: Annotated[Width, Option("Vocabulary size, padded.", SIZE)] = 50_304
    gpus: Annotated[int, Range(1, 10**6), Option("GPUs the run would use.", CLUSTER)] = 1
    gpu: Annotated[str, Option("GPU model: a100, h100, h200, b200 and others.", CLUSTER)] = "h100"
    mfu: Annotated[float, Range(1e-6, 1), Option("Model FLOPs utilization to assume.", CLUSTER)] = 0.4
    micro_batch: Annotated[
        int | None,
        Range(1, 10**6),
        Option("Sequences per GPU and micro-batch. Default: what fits, in each stage of growth.", CLUSTER),
    ] = None
    dollars_per_hour: Annotated[float | None, Range(0, 1e6), Option("Price of one GPU hour.", CLUSTER)] = None

    def check(self) -> None:
        """Reject a size of no arm."""
        sizes = (self.depth, self.flops, self.tokens, self.rho)
        if self.arm is None and (not self.recipe or any(value is not None for value in sizes)):
            raise UsageError("give `arm`, or `recipe` alone for the whole ladders of a recipe.")

    def run(self) -> Planned:
        """Plan the run, or the ladders."""
        from steepen.model.arms import find_arm
        from steepen.recipe.memory import find_accelerator
        from steepen.recipe.planner import Cluster, make_plan, plan_ladders

        size = self.size_rule(vocabulary=self.vocabulary)
        if self.arm is None:
            names = [str(one) for one in self.recipe]
            runs = plan_ladders(self.recipe_choice(), size, **self.recipe_changes())
            return LaddersResult(tuple(names), tuple(runs))  # pyright: ignore[reportReturnType]
        arm = find_arm(self.arm)
        gpu = find_accelerator(self.gpu)
        plan = make_plan(
            arm, depth=self.depth, flops=self.flops, tokens=self.tokens, rho=self.rho, size_rule=size,
            recipe=self.recipe_of(arm),
            cluster=Cluster(self.gpus, gpu, self.mfu, self.dollars_per_hour, self.micro_batch),
        )  # fmt: skip
        return PlanResult(plan)


plan = function(Plan)
