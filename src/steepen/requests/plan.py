"""`plan`: what a run, or every run of a recipe's ladders, would be and cost."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from steepen.errors import UsageError
from steepen.requests.request import Request, function
from steepen.requests.spec import SIZE, ArmField, DepthField, RunSize, Width
from steepen.results.plan import LaddersResult, PlanResult
from steepen.utils.codec import HelpPanel, Range

if TYPE_CHECKING:
    # Without an arm it is a LaddersResult, which the editor need not offer.
    Planned = PlanResult
else:
    Planned = PlanResult | LaddersResult

CLUSTER = HelpPanel("Memory, time and cost")  # panel of --help


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
    vocabulary: Width = SIZE("Vocabulary size, padded.", 50_304)
    gpus: int = CLUSTER("GPUs the run would use.", 1, Range(1, 10**6))
    gpu: str = CLUSTER("GPU model: a100, h100, h200, b200 and others.", "h100")
    mfu: float = CLUSTER("Model FLOPs utilization to assume.", 0.4, Range(1e-6, 1))
    micro_batch: int | None = CLUSTER(
        "Sequences per GPU and micro-batch. Default: what fits, in each stage of growth.",
        limits=Range(1, 10**6),
    )
    dollars_per_hour: float | None = CLUSTER("Price of one GPU hour.", limits=Range(0, 1e6))

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
