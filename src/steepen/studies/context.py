"""`StudyContext`: a preset on prepared data, which turns planned runs into run specs.

`open_data` is the data of a study: what was given, or the preset's own, which is prepared once.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from steepen.errors import UsageError, require_positive
from steepen.laws.fits.compute_law import MethodChoice
from steepen.model.arm import Arm
from steepen.model.arms import ARMS, find_arm, without_growth
from steepen.model.shape import SizeRule
from steepen.model.stages import StageSchedule
from steepen.optim.config import OptimizerConfig
from steepen.recipe.flops import flops_per_token, recipe_parameters
from steepen.recipe.recipe import PlannedRun, Recipe
from steepen.recipe.recipe_choice import RecipeChoice
from steepen.runs.spec import UNKNOWN_DATA, DataConfig, Pool, RunSpec, whole_validation_tokens
from steepen.studies.driver.journal import preparing_data
from steepen.studies.preset import Preset

Arms: TypeAlias = Sequence[str | Arm]  # names, or custom arms


@dataclass(frozen=True)
class DatasetInfo:
    """Identity, vocabulary and size of prepared data."""

    identity: str
    vocabulary: int  # padded
    train_tokens: int
    validation_tokens: int
    real_vocabulary: int | None = None  # without padding; None: see `SizeRule`


@dataclass(frozen=True)
class StudyContext:
    """A preset on data, with recipes that were fitted here instead of the paper's."""

    preset: Preset
    data: DatasetInfo
    recipes: Mapping[str, Recipe] = field(default_factory=dict[str, Recipe])  # by the arm's name
    epochs: int = 1  # how often the data may be repeated by runs that need more than there is
    choice: RecipeChoice = field(default_factory=RecipeChoice)  # a named set for all other arms, and TPP
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # of every run
    law_method: MethodChoice = "both"  # of the fits of ladders; the first of both is the joint one
    draws: int | None = None  # of the intervals of interpolated multipliers; None: DRAWS

    def __post_init__(self) -> None:
        require_positive(self, ("epochs",))

    @property
    def size_rule(self) -> SizeRule:
        """Width, heads and vocabulary by depth."""
        return self.preset.size_rule(self.data.vocabulary, self.data.real_vocabulary)

    @property
    def seed(self) -> int:
        """The seed of sweeps: the first of the preset's."""
        return self.preset.seeds[0]

    def recipe(self, arm: Arm) -> Recipe:
        """The recipe fitted or given for an arm, else that of the chosen name, else the preset's."""
        self.choice.asked.add(arm.name)
        if arm.name in self.recipes:
            return self.recipes[arm.name]
        if arm.name in self.choice.files:
            return self.choice.of(arm)
        if self.choice.name is not None:
            return self.preset.at_own_scale(self.choice.of(arm))
        return self.choice.at_tpp(self.preset.recipe(arm))

    def constant_recipe(self, arm: Arm) -> Recipe:
        """The arm's recipe with one learning rate for all sizes, as sweeps use it."""
        return replace(self.recipe(arm), learning_rate_exponent=0.0)

    def with_recipe(self, arm: Arm, recipe: Recipe) -> StudyContext:
        """The context with another recipe for one arm."""
        return replace(self, recipes={**self.recipes, arm.name: recipe})

    def with_optimizer(self, name: str | None) -> StudyContext:
        """The context with another optimizer for every run, by name or `module:factory`."""
        return self if name is None else replace(self, optimizer=OptimizerConfig.find(name))

    def possible_depths(self, arm: Arm, depths: Sequence[int]) -> tuple[list[int], list[str]]:
        """Those of the depths at which an arm exists, and a warning of each other; raises if there is none.

        Half the width, for example, needs an even number of heads.
        """
        found: list[int] = []
        warnings: list[str] = []
        for depth in depths:
            try:
                arm.networks(arm.shape(depth, self.size_rule), arm.passes)
                found.append(depth)
            except UsageError as error:
                warnings.append(f"{arm.name} d{depth} is left out: {error}")
        if not found:
            raise UsageError(f"no depth of the sweep is possible: {'; '.join(warnings)}")
        return found, warnings

    def stored_parameters(self, arm: Arm, depth: int, passes: int | None = None) -> int:
        """Parameters at the start (or at `passes`), as tokens per parameter count them."""
        shape = arm.shape(depth, self.size_rule)
        return recipe_parameters(arm, shape, arm.passes.initial if passes is None else passes)

    def flops_per_token(self, arm: Arm, depth: int, passes: int | None = None) -> float:
        """FLOPs per token at the start (or at `passes`), as sweeps count them."""
        shape = arm.shape(depth, self.size_rule)
        cost = flops_per_token(arm, shape, arm.passes.initial if passes is None else passes)
        return cost.counted(self.preset.sweep_flops)

    def run_at_flops(
        self, recipe: Recipe, arm: Arm, depth: int, flops: float, rho: float | None = None
    ) -> PlannedRun:
        """The run at a depth that spends these FLOPs, as sweeps count them."""
        return recipe.at_budget(
            arm, depth, self.size_rule, flops=flops, rho=rho, count=self.preset.sweep_flops
        )

    def sweep_flops(self, planned: PlannedRun) -> float:
        """FLOPs of a planned run as sweeps count them: with attention, or of the matrices only."""
        return planned.flops.counted(self.preset.sweep_flops)

    @property
    def sweep_flops_method(self) -> str:
        """The sentence that says what the FLOPs of a sweep count."""
        if self.preset.sweep_flops == "total":
            return "FLOPs count matrices and causal attention, without the input embedding."
        return (
            "FLOPs count matrices only, without attention and the input embedding, as in the paper's sweeps."
        )

    def flops_at_tpp(self, arm: Arm, depth: int, tpp: float) -> float:
        """FLOPs of `tpp` tokens per stored parameter at a depth, without growth."""
        return tpp * self.stored_parameters(arm, depth) * self.flops_per_token(arm, depth)

    def spec(
        self,
        planned: PlannedRun,
        *,
        seed: int | None = None,
        optimizer: OptimizerConfig | None = None,
        pool_tokens: int | None = None,
        epochs: int | None = None,
        branch: bool = False,
    ) -> RunSpec:
        """The spec of a planned run; raises UsageError if the data has too few tokens.

        A `branch`, where the preset has them, sees all data and decays late: its first steps, which are then
        those of other token counts too, are trained once.
        """
        pool = self.preset.pool
        if branch and self.preset.branches is not None:
            pool = "sample"
            late = replace(planned.hyperparameters, warmdown_fraction=self.preset.branches)
            planned = replace(planned, hyperparameters=late)
        optimizer = optimizer or self.optimizer
        if self.preset.embedding_precision != OptimizerConfig.embedding_precision:
            optimizer = replace(optimizer, embedding_precision=self.preset.embedding_precision)
        return RunSpec.from_plan(
            planned,
            self._data_of(planned, pool_tokens, epochs, pool),
            seed=self.seed if seed is None else seed,
            optimizer=optimizer,
            lr_schedule=self.preset.lr_schedule,
            options=self.preset.options,
            precision=self.preset.precision,
            validation_tokens=self.validation_tokens,
        )

    def _data_of(
        self, planned: PlannedRun, pool_tokens: int | None, epochs: int | None, pool: Pool
    ) -> DataConfig:
        """What a run sees of the data, once if that suffices; raises UsageError if there is too little."""
        if pool_tokens is not None and pool_tokens > self.data.train_tokens:
            raise UsageError(
                f"a pool of {pool_tokens:,} tokens is more than the {self.data.train_tokens:,} there are; "
                "prepare more data, or choose a smaller preset."
            )
        times = self.epochs if epochs is None else epochs
        data = DataConfig(self.data.identity, pool_tokens=pool_tokens, epochs=times, pool=pool)
        sizes = (self.data.train_tokens, self.preset.context, planned.batch_tokens)
        steps = data.steps_per_epoch(*sizes)
        if planned.steps > data.max_steps(*sizes):
            repeat = f", or repeat it with `epochs` {-(-planned.steps // steps)}" if steps else ""
            raise UsageError(
                f"{planned.arm.name} at depth {planned.shape.depth} needs {planned.tokens:,} tokens and the "
                f"data has {steps * planned.batch_tokens:,}; prepare more (`steepen data prepare`), leave "
                f"out the largest rungs (`rungs`){repeat}."
            )
        # Then the hash of such a run does not depend on `self.epochs`.
        return replace(data, epochs=1) if planned.steps <= steps and epochs is None else data

    @property
    def validation_tokens(self) -> int:
        """The preset's, or all that the data has if that is less, in whole sequences."""
        return whole_validation_tokens(
            self.preset.validation_tokens,
            self.data.validation_tokens,
            self.preset.context,
            self.preset.batch_tokens,
        )

    def base_run(self, arm: Arm, recipe: Recipe) -> PlannedRun:
        """A run of the base size on the base tokens, with one learning rate for all sizes."""
        constant, depth = replace(recipe, learning_rate_exponent=0.0), self.preset.base_depth
        return constant.at_budget(arm, depth, self.size_rule, tokens=self.preset.fixed_tokens)


def starting_arm(arm: Arm) -> Arm:
    """The fixed-pass counterpart of a growing arm: untied-2 for untied-grow, which inherits its recipe."""
    if not arm.passes.grows:
        return arm
    start, candidates = StageSchedule.fixed(arm.passes.initial), [*ARMS.values()]
    with contextlib.suppress(UsageError):  # a custom arm, which is not found by its name
        candidates.append(find_arm(without_growth(arm.name)))
    for known in candidates:
        words = {"name": known.name, "title": known.title, "about": known.about, "recipe": known.recipe}
        if replace(arm, passes=start, **words) == known:
            return known
    return replace(
        arm, passes=start, name=f"{arm.name}-fixed", title=f"{arm.title}, fixed", recipe=arm.recipe
    )


def find_arms(names: Arms) -> list[Arm]:
    """Arms by name, each once."""
    found = [find_arm(name) for name in names]
    repeated = {arm.name for arm in found if sum(other.name == arm.name for other in found) > 1}
    if repeated:
        raise UsageError(f"`arms` names {', '.join(sorted(repeated))} twice; once is enough.")
    return found


def find_growing_arms(names: Arms, study: str) -> list[Arm]:
    """Arms by name, each of which must grow."""
    found = find_arms(names)
    for arm in found:
        if not arm.passes.grows:
            raise UsageError(f"{study} needs a growing arm, e.g. untied-grow; {arm.name} does not grow.")
    return found


def find_one_arm(names: Arms, study: str) -> Arm:
    """The arm of a study that works on one at a time."""
    found = find_arms(names)
    if len(found) != 1:
        raise UsageError(f"{study} works on one arm at a time; give a single one with `arms`.")
    return found[0]


def open_data(
    preset: Preset, folder: Path | None, runs: Path, dry_run: bool, study: tuple[Path, str]
) -> tuple[Path, DatasetInfo]:
    """The given data, or the preset's own, which is prepared beside the runs if missing.

    `study` is the directory of studies and the name of the one that needs the data: `steepen status` knows
    of it while the data is prepared.
    """
    from steepen.data import Dataset

    if folder is None:
        own = preset.source or "data"
        folder = (
            runs.absolute().parent / "data" / re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{own}-{preset.tokenizer}")
        )
        if not (folder / "manifest.json").is_file():
            if dry_run:
                return folder, assumed_data(preset)
            if preset.source is None:
                sources = preset.suggested_data or ("SOURCE",)
                raise UsageError(
                    f"the preset {preset.name} needs `data`: a folder made by `steepen data prepare`, e.g. "
                    f"`steepen data prepare {sources[0]} --tokenizer {preset.tokenizer} --out data/corpus`"
                    f"{''.join(f', or {other}' for other in sources[1:])}."
                )
            with preparing_data(*study):  # of two studies, the second waits until the first has prepared it
                _prepare(preset, folder)
    dataset = Dataset.open(folder)
    return folder, DatasetInfo(
        identity=dataset.identity,
        vocabulary=dataset.padded_vocabulary,
        train_tokens=len(dataset.tokens("train")),
        validation_tokens=dataset.validation_tokens,
        real_vocabulary=dataset.vocabulary,
    )


def assumed_data(preset: Preset) -> DatasetInfo:
    """Data for a dry run: the vocabulary follows from the tokenizer, the tokens suffice for anything."""
    from steepen.data.sources.tokenizers import load_tokenizer, parse_tokenizer
    from steepen.data.tokenizer import GPT2_SIZE

    real = parse_tokenizer(preset.tokenizer) or GPT2_SIZE
    if preset.tokenizer != "gpt2" and (loaded := load_tokenizer(preset.tokenizer)) is not None:
        real = loaded.size
    return DatasetInfo(UNKNOWN_DATA, -(-real // 128) * 128, 10**15, 10**9, real)


def _prepare(preset: Preset, folder: Path) -> None:
    from steepen.data.prepare import prepare
    from steepen.data.prepare_request import PrepareRequest
    from steepen.utils.progress import stage_progress

    print(f"Preparing {preset.source} with {preset.tokenizer} in {folder}.", file=sys.stderr)
    request = PrepareRequest(
        source=(preset.source or "",), tokenizer=preset.tokenizer, max_tokens=preset.max_tokens
    )
    with stage_progress(quiet=False) as show:
        prepare(request, folder, show)


def tokenizer_note(preset: Preset, folder: Path, facts: DatasetInfo) -> str | None:
    """What another tokenizer than the preset's changes: the cost of the reference's ladder, and the loss."""
    if not (folder / "manifest.json").is_file():  # a dry run without data
        return None
    from steepen.data import Dataset

    own = Dataset.open(folder).manifest.tokenizer
    expected = assumed_data(preset)
    if facts.vocabulary == expected.vocabulary:
        return None
    arm = find_arm(preset.reference)

    def cost(info: DatasetInfo) -> float:
        context = StudyContext(preset, info)
        recipe = context.recipe(arm)
        return sum(recipe.at(arm, depth, context.size_rule).flops.total for depth in preset.depths(arm))

    ratio = cost(facts) / cost(expected)
    return (
        f"the tokenizer of {folder} is {own.name} ({own.size:,} tokens), that of the preset {preset.name} is "
        f"{preset.tokenizer}: the ladder of {arm.name} takes {ratio:.2g} times the preset's FLOPs, and "
        "losses do not compare with the preset's own; `steepen data prepare SOURCE --tokenizer "
        f"{preset.tokenizer}` prepares data for it."
    )
