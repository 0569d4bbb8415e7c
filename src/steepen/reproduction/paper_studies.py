"""The paper's studies on its authors' measurements: what `steepen study NAME --part PART` would answer."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from steepen.evaluation.scored_runs import scored_run
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.flops import stored_parameters
from steepen.reproduction.replay import (
    LADDERS,
    Finder,
    Measured,
    Replay,
    by_key,
    by_tokens,
    ladder_runs,
    of_loss,
    our_knob,
    our_name,
    passes_and_depth,
    rho_of,
    setting_of,
    tuning_sweeps,
)
from steepen.reproduction.tables import Row, table
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.answer import Answer, Draft
from steepen.studies.context import DatasetInfo, StudyContext, starting_arm
from steepen.studies.data_constrained import REGIMES, depth_comparison
from steepen.studies.ladders.ablations import named_part
from steepen.studies.ladders.ladder import compare_ladders
from steepen.studies.ladders.ladder_runs import LadderSpec
from steepen.studies.preset import ArmRungs, load_preset
from steepen.studies.registry import find_study
from steepen.studies.scores.downstream import analyse_downstream
from steepen.studies.stages.chain_tuning import (
    Chain,
    SweepResult,
    chain_answer,
    replay_chain,
    settings_to_adopt,
)
from steepen.studies.synthetic import initial_parameters
from steepen.utils.rows import Rows

PLENTY = 10**13  # tokens of data: the authors had enough
SWEPT = ("vanilla", "deep-vanilla", "operator-1", "loop-2", "untied-2")
MAIN = (*SWEPT, "loop-grow", "untied-grow", "deep-vanilla-grow")
GROWN = {"loop-2": "loop-grow", "untied-2": "untied-grow", "deep-vanilla": "deep-vanilla-grow"}
TUNED = (
    *SWEPT, "loop-2-no-coda-injection", "untied-2-no-coda-injection", "untied-2-norm-only",
    "untied-2-inject-only",
)  # fmt: skip
DECAY = 0.8  # weight decay of the data-constrained grid where it is fixed
# Ladders that differ by recipe or optimizer: our arm and variant of each.
VARIANTS = {
    "vanilla-scaled-om": ("vanilla", "output multiplier scaled"),
    "vanilla-scaled-wd": ("vanilla", "weight decay scaled"),
    "vanilla-warmdown-1": ("vanilla", "warm-down 1"),
    "vanilla-mup-om": ("vanilla", "muP output"),
    "vanilla-constant-mup-om": ("vanilla", "constant, muP output"),
    "vanilla-constant": ("vanilla", "constant"),
    "vanilla-adam": ("vanilla", "adamw"),
    "operator-1-vanilla-recipe": ("operator-1", "vanilla recipe"),
    "deep-vanilla-width-only-adam": ("width-only-deep-vanilla", "adamw"),
}
WIDTHS = "width_optimizer_ladders"
SERIES = {  # by part, their table and the ladders of it
    "hyperparameters": (
        "ablation_ladders",
        ("vanilla", "vanilla-scaled-om", "vanilla-scaled-wd", "vanilla-warmdown-1", "vanilla-mup-om",
         "vanilla-constant-mup-om", "vanilla-constant"),
    ),
    "ladder": ("ablation_ladders", ("vanilla", "operator-1", "operator-1-vanilla-recipe")),
    "width-only": (WIDTHS, ("deep-vanilla-width-only", "untied-2-width-only")),
    "width-and-depth": (WIDTHS, ("deep-vanilla", "untied-2")),
    "optimizer, width only": (WIDTHS, ("deep-vanilla-width-only", "deep-vanilla-width-only-adam")),
    "optimizer, width and depth": (WIDTHS, ("vanilla", "vanilla-adam")),
}  # fmt: skip


class PaperStudies:
    """Answers of the studies by name and part, each made when it is first needed.

    Laws are fitted by the paper's method, so figures have its irreducible loss and exponents. `draws` are
    those of interpolated multipliers, fewer than a study's: the paper prints no such interval.
    """

    def __init__(self, draws: int = 200) -> None:
        self.draws, self.replay = draws, Replay()

    @functools.cache  # noqa: B019 (one object for one process)
    def get(self, source: str) -> Answer:
        """The answer of `STUDY` or `STUDY:PART`; an empty one where there is no study."""
        if not source:
            return Answer("", "", "", (), {})
        study, _, part = source.partition(":")
        return getattr(self, study.replace("-", "_"))(*([part] if part else []))

    def context(self, corpus: str = "fineweb", **grids: Any) -> StudyContext:
        """Preset `paper` on a corpus, with some grids replaced by the authors'."""
        preset = load_preset("paper")
        changed = {name: replace(getattr(preset.grids, name), **values) for name, values in grids.items()}
        preset = replace(preset, grids=replace(preset.grids, **changed))
        data = DatasetInfo(corpus, 50_304, PLENTY, PLENTY, 50_257)
        return StudyContext(preset, data, law_method="paper", draws=self.draws)

    def drive(self, name: str, find: Finder, context: StudyContext | None = None, **options: Any) -> Answer:
        """A study of the registry, with these options."""
        return self.replay.answer(find_study(name).start(context or self.context(), options), find)

    # Ladders

    def ladder(self) -> Answer:
        """The eight FineWeb ladders, by FLOPs and by recorded time."""
        return self.drive("ladder", ladder_runs("fineweb_ladders"), arms=MAIN)

    def extrapolate(self) -> Answer:
        """The ladders on FineWeb-Edu, and the held-out d26 run of Untied Grow."""
        return self.drive("extrapolate", ladder_runs("fineweb_edu_ladders"), self.context("fineweb-edu"))

    def downstream(self) -> Answer:
        """Scores of Vanilla and Untied Grow, the arms with a ladder on both corpora."""
        for source in ("ladder", "extrapolate"):  # make the records
            self.get(source)
        corpora = tuple(LADDERS.values())
        runs = [
            scored_run(record)
            for record in self.replay.records.values()
            if record.spec.data.identity in corpora
            and record.spec.arm.name in ("vanilla", "untied-grow")
            and "core" in record.evaluation
        ]
        held = [run.run for run in runs if run.record is not None and run.record.spec.shape.depth > 20]
        return analyse_downstream(runs, held_out=held, corpora={name[:8]: name for name in corpora}).answer()

    def ablations(self, part: str) -> Answer:
        """One part of the ablations."""
        if part in SERIES:
            return named_part(self._series(part), part).answer("ablations", "", "Appendix B")
        if part == "growth":
            return self._growth_sensitivity()
        tables = {"random": ("random_recurrence_ladders",), "constant": ("constant_ladders",)}.get(
            part, ("ablation_ladders", "width_optimizer_ladders")
        )
        depths: dict[str, set[int]] = {}  # at which each arm was measured
        for row in (row for name in tables for row in table(name)):
            if (arm := our_name(row["arm"])) is not None:
                depths.setdefault(arm, set()).add(row["depth"])
        context = self.context()
        rungs = tuple(ArmRungs(arm, tuple(sorted(own))) for arm, own in depths.items())
        preset = replace(context.preset, arm_rungs=(*rungs, *context.preset.arm_rungs))
        return self.drive("ablations", ladder_runs(*tables), replace(context, preset=preset), parts=(part,))

    def _series(self, part: str) -> Draft:
        """Ladders that differ by recipe or optimizer."""
        name, series = SERIES[part]
        context = self.context()
        specs: list[LadderSpec] = []
        found: dict[str, Row] = {}
        for i, theirs in enumerate(series):
            arm, variant = VARIANTS.get(theirs) or (our_name(theirs) or theirs, "")
            own = table(name).where(arm=theirs)
            recipe = context.recipe(find_arm(arm))
            # Every ladder gets specs of its own; what was run is in the table, not in the plan.
            recipe = replace(recipe, base=replace(recipe.base, warmup_steps=recipe.base.warmup_steps + i))
            optimizer = OptimizerConfig.named("adamw") if "adam" in theirs else None
            specs.append(LadderSpec(find_arm(arm), recipe, tuple(own.column("depth")), optimizer, variant))
            for row in own:
                rung = recipe.at(find_arm(arm), row["depth"], context.size_rule)
                found[context.spec(rung, optimizer=optimizer).hash] = row
        return self.replay.answer(
            compare_ladders(context, specs, specs[0].label, whole=False),
            lambda spec: Measured(found[spec.hash]["val_loss"], found[spec.hash]["compute_flops"]),
        )

    def _growth_sensitivity(self) -> Answer:
        """Tokens per parameter × ρ of Untied Grow."""
        rows = table("growth_prescription_ablation")
        losses = {(row["prescription"], row["depth"]): row["val_loss"] for row in rows}
        context = self.context()
        recipe = context.recipe(find_arm("untied-grow"))

        def find(spec: RunSpec) -> Measured | None:
            depth = spec.shape.depth
            stored = stored_parameters(spec.arm, spec.shape, 2)
            tpp = round(expected_flops(spec, "matrix") / (stored * context.flops_per_token(spec.arm, depth)))
            own = recipe.with_tpp(tpp).growth_fraction(spec.arm, spec.shape)
            fitted = own is not None and abs(rho_of(spec) - own) <= 0.006
            # Where the fitted ρ is 0.30, the two prescriptions are one run.
            words = ("fitrho", "rho0p30") if fitted else ("rho0p30",)
            found = (losses.get((f"tpp{tpp}_{word}", depth)) for word in words)
            return of_loss(next((loss for loss in found if loss is not None), None))

        return self.drive("ablations", find, context, parts=("growth",), rungs=(6, 8, 10, 12, 14, 16))

    def transfer(self, part: str) -> Answer:
        """Vanilla's recipe on other arms: at the base size, or along Operator-1's ladder."""
        if part == "ladder":
            return self._series(part).answer("transfer", "", "Appendix B")
        vanilla = self.context().recipe(find_arm("vanilla")).base
        rows = table("base_tuning_confirmations")
        confirmed = {(row["recipe"], our_name(row["arm"])): row["val_loss"] for row in rows}

        def find(spec: RunSpec) -> Measured | None:
            # Of Vanilla's two runs the one that the paper compares the others with.
            same = spec.hyperparameters.embedding_lr_multiplier == vanilla.embedding_lr_multiplier
            return of_loss(confirmed.get(("vanilla" if same else "own", spec.arm.name)))

        arms = [arm for arm in SWEPT[1:] if {("vanilla", arm), ("own", arm)} <= set(confirmed)]
        return self.drive("transfer", find, parts=("probe",), arms=arms)

    # The four stages

    def chain_tuning(self) -> Answer:
        """Chains at the base size, from the published losses of every sweep."""
        theirs = {our_name(arm): arm for arm in table("base_tuning").by("arm")}
        context = self.context()
        chains = [self._chain(context, arm, theirs[arm]) for arm in TUNED if arm in theirs]
        return chain_answer(context, chains)

    def _chain(self, context: StudyContext, arm: str, theirs: str) -> Chain:
        chain = Chain(find_arm(arm), context.recipe(find_arm(arm)).base)
        sweeps, best = tuning_sweeps(theirs), math.inf
        for one in sweeps:
            baseline = best if one.incumbent is None else one.incumbent
            better = settings_to_adopt(baseline, one.tries, context.preset.grids.chain.threshold)
            best = min(best, baseline, *(loss for loss, _ in better.values()))
            values = {"arm": arm, "round": one.number, "sweep": one.name, "baseline": baseline, "best": best}
            adopted = {name: value for name, (_, value) in better.items()}
            # The values tried are not published: no panel of the sweep itself.
            chain.steps = Rows((*chain.steps, SweepResult({**values, "adopted": adopted}, Rows())))
        confirmed = table("base_tuning_confirmations").where(arm=theirs, recipe="own").column("val_loss")
        chain.loss = (
            confirmed[0] if confirmed else replay_chain((one.incumbent, one.tries) for one in sweeps)[0]
        )
        return chain

    def tpp(self, arm: str = "") -> Answer:
        """Iso-compute sweeps of tokens per parameter; of a growing arm beside the arm it starts as."""
        # Deep Vanilla's depth counts executed blocks there; stored parameters and tokens name a run.
        fixed = by_key(
            table("tpp_sweeps"),
            lambda row: (row["arm"], row["params_stored"], row["tokens"]),
            lambda spec: (spec.arm.name, initial_parameters(spec), spec.tokens),
        )
        if not arm:
            return self.drive("tpp", fixed, arms=SWEPT)
        budgets = {row["budget"]: row["matrix_flops"] for row in table("fixed_anchor_budgets")}

        def grown(spec: RunSpec) -> tuple[int, int]:
            cost = expected_flops(spec, "matrix")
            return spec.shape.depth, min(budgets, key=lambda name: abs(math.log(budgets[name] / cost)))

        rows = table("token_allocation").where(arm=arm)
        find = by_key(rows, lambda row: (row["depth"], row["budget"]), grown)
        start = starting_arm(find_arm(arm)).name
        context = self.context(tpp={"offsets": (-4, -3, -2, -1, 0, 1, 2)})
        return self.drive(
            "tpp", lambda spec: (fixed if spec.arm.name == start else find)(spec), context, arms=(start, arm)
        )

    def growth_fraction(self) -> Answer:
        """ρ at three anchors for the three growing arms."""
        arms = ("deep-vanilla-grow", "loop-grow", "untied-grow")
        rho = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)
        context = self.context(growth_fraction={"rho": rho})
        for arm in map(find_arm, arms):
            context = context.with_recipe(arm, context.recipe(arm).with_tpp(6.0))
        own = [row for row in table("growth_timing") if row["budget"] == row["depth"]]
        find = by_key(
            [*own, *table("growth_timing_deep_vanilla")],
            lambda row: (row["arm"], row["depth"], round(row["rho"], 2)),
            lambda spec: (GROWN.get(spec.arm.name, spec.arm.name), spec.shape.depth, rho_of(spec)),
        )
        return self.drive("growth-fraction", find, context, arms=arms)

    def lr_rule(self, part: str) -> Answer:
        """Slices of four hyperparameters at d8, d9 and d10, or every hyperparameter of Vanilla to d12."""
        return self._screen() if part == "screen" else self._drift()

    def _drift(self) -> Answer:
        betas = {row["arm"]: -row["adopted_beta"] for row in table("hyperparameter_slice_exponents")}
        keys = ("arm", "recipe", "knob", "depth", "log2_multiplier")
        losses = {tuple(row[key] for key in keys): row["val_loss"] for row in table("hyperparameter_slices")}
        context = self.context()
        # Growing arms are swept around the rule of the arm they start as, which the authors had rounded so.
        for arm in map(find_arm, ("loop-2", "untied-2")):
            recipe = replace(context.recipe(arm), learning_rate_exponent=betas[arm.name])
            context = context.with_recipe(arm, recipe)

        def find(spec: RunSpec) -> Measured | None:
            arm, depth = spec.arm, spec.shape.depth
            start = context.recipe(starting_arm(arm))
            anchor = depth == context.preset.base_depth  # shared by both recipes
            for recipe, exponent in (("constant", 0.0), ("scaled", betas[arm.name])):
                base = replace(start, learning_rate_exponent=exponent)
                around = base.hyperparameters(arm, depth, context.size_rule)
                if (changed := setting_of(spec.hyperparameters, around)) is not None:
                    knob, multiple = changed[0] or "learning_rate", round(math.log2(changed[1]), 4)
                    loss = losses.get((arm.name, "scaled" if anchor else recipe, knob, depth, multiple))
                    if loss is not None:
                        return Measured(loss)
            return None

        return self.drive("lr-rule", find, context, arms=tuple(betas))

    def _screen(self) -> Answer:
        context = self.context(lr_rule={"screen_depths": (8, 9, 10, 11, 12)})
        base = context.recipe(find_arm("vanilla")).base
        losses: dict[tuple[str, int, float], float] = {}
        for row in table("hyperparameter_screen"):
            knob = "" if row["knob"] == "base" else our_knob(row["knob"])
            centre = getattr(base, knob) if knob else 1.0
            value = row[row["knob"]] / (centre or 1.0) if knob else 1.0
            losses[knob, row["depth"], float(f"{value:.4g}")] = row["val_loss"]

        def find(spec: RunSpec) -> Measured | None:
            changed = setting_of(spec.hyperparameters, base)
            return of_loss(changed and losses.get((changed[0], spec.shape.depth, float(f"{changed[1]:.4g}"))))

        return self.drive("lr-rule", find, context, arms=("vanilla",), parts=("screen",))

    # Design of the family

    def allocation(self) -> Answer:
        """Core sizes at five depths on 1 B tokens."""
        find = by_key(
            table("block_allocation"),
            lambda row: (row["depth"], row["core_blocks"]),
            lambda spec: (spec.shape.depth, spec.shape.allocation.core),
        )
        return self.drive("allocation", find, self.context(allocation={"depths": (6, 7, 8, 9, 10)}))

    def passes(self, part: str) -> Answer:
        """Passes in ladders of fixed tokens, at a fixed anchor, or with other hyperparameters."""
        return {"tokens": self._fresh_passes, "anchor": self._anchor_passes,
                "hyperparameters": self._passes_hyperparameters}[part]()  # fmt: skip

    def _fresh_passes(self) -> Answer:
        find = by_key(
            table("fresh_recurrence"),
            lambda row: (_family(row), row["loops"], row["depth"]),
            lambda spec: (_family_of(spec), *passes_and_depth(spec)),
        )
        context = self.context(passes={"depths": (4, 6, 8, 10, 12, 14, 16, 18)})
        return self.drive("passes", find, context, parts=("tokens",))

    def _anchor_passes(self) -> Answer:
        context, one, rows = self.context(), find_arm("operator-1"), table("fixed_anchor_passes")
        budgets = {row["budget"]: row["matrix_flops"] for row in table("fixed_anchor_budgets")}
        tpp = {round(budgets[r["budget"]] / context.flops_at_tpp(one, r["anchor"], 1.0), 6) for r in rows}
        find = by_tokens(
            rows,
            lambda row: (_family(row), row["loops"], row["anchor"]),
            lambda row: row["tpp"] * row["params_stored"],
            lambda spec: (_family_of(spec), *passes_and_depth(spec)),
        )
        context = self.context(passes={"anchor_tpp": tuple(sorted(tpp))})
        return self.drive("passes", find, context, parts=("anchor",))

    def _passes_hyperparameters(self) -> Answer:
        context = self.context()
        losses = {
            (row["family"], our_knob(row["knob"]), row["loops"], float(row["multiplier"])): row["val_loss"]
            for row in table("recurrence_hyperparameters")
        }

        def find(spec: RunSpec) -> Measured | None:
            family, arm = ("tied", "loop-2") if spec.arm.tied else ("untied", "untied-2")
            changed = setting_of(spec.hyperparameters, context.recipe(find_arm(arm)).base)
            if changed is None:
                return None
            key = (family, changed[0] or "learning_rate", spec.schedule.final, round(changed[1], 4))
            return of_loss(losses.get(key))

        return self.drive("passes", find, context, parts=("hyperparameters",))

    def growth_target(self) -> Answer:
        """Targets of growth from two passes at d8, with KL effective depths."""
        context = self.context(growth_target={"fractions": (0.25, 0.5, 0.75, 1.0)})
        depths = {
            (row["mean_passes"], row["target_passes"]): float(row["kl_effective_depth"])
            for row in table("growth_target_lens")
        }
        rows = table("growth_targets")
        losses = {(row["mean_passes"], row["target_passes"]): row["val_loss"] for row in rows}

        def find(spec: RunSpec) -> Measured | None:
            first, last = spec.schedule.initial, spec.schedule.final
            mean = round(2 * (first + rho_of(spec) * (last - first))) / 2
            if (mean, last) not in losses or (not spec.schedule.grows and mean != last):
                return None
            deep = depths.get((mean, last))
            evaluation = {} if deep is None else {"kl_depth": {"depth": deep}}
            return Measured(losses[mean, last], evaluation=evaluation)

        return self.drive("growth-target", find, context)

    def growth_timing(self, arm: str) -> Answer:
        """ρ at anchor depths and budgets."""
        rows = table("growth_timing").where(arm=arm)
        tpp = {round(row["tokens"] / row["params_stored"], 3) for row in rows.where(rho=0)}
        rho = {round(row["rho"], 2) for row in rows}
        find = by_tokens(
            rows,
            lambda row: (row["depth"], round(row["rho"], 2)),
            lambda row: row["tokens"],
            lambda spec: (spec.shape.depth, rho_of(spec)),
        )
        grid = {"tpp": tuple(sorted(tpp)), "rho": tuple(sorted(rho))}
        return self.drive("growth-timing", find, self.context(growth_timing=grid), arms=(arm,))

    # Repeated data

    def data_constrained(self, part: str) -> Answer:
        """The grid, the regimes or the controls on repeated data."""
        grid = {"depths": (4, 6, 8, 10, 12, 14, 16, 18), "decays": (0.05, 0.2, 0.4, 0.8, 1.2, 1.6),
                "control_passes": (1, 2, 3, 4, 6, 8, 12)}  # fmt: skip
        context = self.context(data_constrained=grid)
        answer = self.drive("data-constrained", _repeated(part), context, parts=(part,))
        if part == "grid":  # the effective depths of single runs are not published, only these curves
            sizes, loops = (
                table("effective_depth_multi_epoch").where(series=name)
                for name in ("operator-1-tuned-weight-decay", "scale-loop-count")
            )
            depths = sizes.column("effective_depth"), loops.column("effective_depth")
            panel = depth_comparison(sizes.column("compute_flops"), *depths, DECAY)
            return replace(answer, panels=(*answer.panels, panel))
        if part == "regimes":  # a last column, from the grid: the decay chosen at one pass
            own, tuned = (
                [panel for panel in one.panels if panel.group == REGIMES]
                for one in (answer, self.get("data-constrained:grid"))
            )
            width = len(own) // len(tuned)
            panels = [
                replace(panel, columns=width + 1)
                for i, last in enumerate(tuned)
                for panel in (*own[i * width : (i + 1) * width], last)
            ]
            return replace(answer, panels=tuple(panels))
        return answer


def _repeated(part: str) -> Finder:
    """The runs of a part of the data-constrained study."""
    if part == "grid":
        return by_key(
            table("data_constrained_grid"),
            lambda row: (row["loops"], row["depth"], row["weight_decay"]),
            lambda spec: (*passes_and_depth(spec), spec.hyperparameters.weight_decay),
        )
    if part == "regimes":
        epochs = {"fresh": 1, "replay250m4": 4, "replay100m10": 10}
        return by_key(
            table("regimes"),
            lambda row: (epochs[row["regime"]], row["loops"], row["depth"]),
            lambda spec: (spec.data.epochs, *passes_and_depth(spec)),
        )
    names = {"tied": "tied", "untied": "untied", "loop-no-operator": "tied-vanilla",
             "untied-no-operator": "untied-vanilla"}  # fmt: skip
    tied = Rows({**row, "arm": "tied"} for row in table("data_constrained_grid").where(weight_decay=DECAY))
    return by_key(
        (*table("data_constrained_architectures"), *tied),
        lambda row: (names[row["arm"]], row["loops"], row["depth"]),
        lambda spec: (_control(spec), *passes_and_depth(spec)),
    )


def _family(row: Row) -> str:
    """Tied or untied; with one pass the two are one network."""
    return row["family"] if row["loops"] != 1 else "tied"


def _family_of(spec: RunSpec) -> str:
    return "tied" if spec.arm.tied or spec.schedule.final == 1 else "untied"


def _control(spec: RunSpec) -> str:
    if "inject" in spec.arm.core_boundary:
        return "untied" if not spec.arm.tied or spec.schedule.final == 1 else "tied"
    # One pass of the tied and of the untied control is the same network.
    return "tied-vanilla" if spec.arm.tied else "untied-vanilla"
