"""The paper's studies on its authors' measurements: each function drives one study to its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from authors_replay import (
    Finder,
    Measured,
    Replay,
    Row,
    Tables,
    by_key,
    by_tokens,
    first_of,
    ladder_runs,
    long_name,
    our_name,
    passes_and_depth,
    rho_of,
    setting_of,
)

from steepen.evaluation.scored_runs import scored_run
from steepen.laws.fits.downstream import MIN_TAU, filter_tasks
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.flops import stored_parameters
from steepen.recipe.paper_tables import INITIAL
from steepen.results.arms import family_panel
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.answer import Answer, Panel, Table
from steepen.studies.context import DatasetInfo, StudyContext, starting_arm
from steepen.studies.data_constrained import depth_comparison
from steepen.studies.ladders.ladder import compare_ladders
from steepen.studies.ladders.ladder_runs import LadderSpec
from steepen.studies.preset import ArmRungs, load_preset
from steepen.studies.registry import find_study
from steepen.studies.scores.downstream import analyse_downstream
from steepen.studies.stages.chain_tuning import (
    Chain,
    SweepResult,
    candidates,
    chain_answer,
    replay_chain,
    settings_to_adopt,
)
from steepen.studies.synthetic import initial_parameters
from steepen.utils.rows import Rows

PLENTY = 10**13
MAIN = (
    "vanilla", "deep-vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow",
    "deep-vanilla-grow",
)  # fmt: skip
SWEPT = ("vanilla", "deep-vanilla", "operator-1", "loop-2", "untied-2")
GROWN = {"loop-2": "loop-grow", "untied-2": "untied-grow", "deep-vanilla": "deep-vanilla-grow"}
LARGEST = 26
TUNED = (
    *SWEPT, "loop-2-no-coda-injection", "untied-2-no-coda-injection", "untied-2-norm-only",
    "untied-2-inject-only",
)  # fmt: skip


@dataclass
class PaperStudies:
    """The authors' tables, the preset `paper` on each corpus, and the replayed records."""

    tables: Tables
    replay: Replay = field(default_factory=Replay)

    def context(self, corpus: str = "fineweb", **grids: Any) -> StudyContext:
        """Preset `paper` on a corpus, with some grids replaced by the authors'."""
        preset = load_preset("paper")
        changed = {name: replace(getattr(preset.grids, name), **values) for name, values in grids.items()}
        preset = replace(preset, grids=replace(preset.grids, **changed))
        return StudyContext(preset, DatasetInfo(corpus, 50_304, PLENTY, PLENTY, 50_257))

    def drive(self, name: str, find: Finder, context: StudyContext | None = None, **options: Any) -> Answer:
        """A study of the registry, with these options."""
        return self.replay.answer(find_study(name).start(context or self.context(), options), find)

    # Ladders

    def ladder(self) -> Answer:
        """The eight FineWeb ladders, by FLOPs and by recorded time."""
        return self.drive("ladder", ladder_runs(self.tables, "fineweb_ladders"), arms=MAIN)

    def ladder_edu(self) -> Answer:
        """Vanilla and Untied Grow on FineWeb-Edu."""
        find = ladder_runs(self.tables, "fineweb_edu_ladders", "fineweb-edu")
        return self.drive("ladder", find, self.context("fineweb-edu"), arms=("vanilla", "untied-grow"))

    def extrapolate(self) -> Answer:
        """The held-out d26 run of Untied Grow on FineWeb-Edu."""
        find = ladder_runs(self.tables, "fineweb_edu_ladders", "fineweb-edu")
        return self.drive("extrapolate", find, self.context("fineweb-edu"))

    def ablations(self, part: str) -> Answer:
        """One part of the ablations whose ladders differ by arm."""
        table = {"random": "random_recurrence_ladders", "constant": "constant_ladders"}.get(part)
        context = self.context()
        if table is None:
            find = first_of(
                *(ladder_runs(self.tables, t) for t in ("ablation_ladders", "width_optimizer_ladders"))
            )
        else:
            find = ladder_runs(self.tables, table)
        preset = replace(context.preset, arm_rungs=(*self._own_depths(table), *context.preset.arm_rungs))
        return self.drive("ablations", find, replace(context, preset=preset), parts=(part,))

    def _own_depths(self, table: str | None) -> tuple[ArmRungs, ...]:
        """The depths at which each arm of the ablations was measured."""
        found: dict[str, set[int]] = {}
        for name in (table,) if table else ("ablation_ladders", "width_optimizer_ladders"):
            for row in self.tables.rows(name):
                if (arm := our_name(row["arm"])) is not None:
                    found.setdefault(arm, set()).add(int(row["depth"]))
        return tuple(ArmRungs(arm, tuple(sorted(depths))) for arm, depths in found.items())

    def ladders_of_series(
        self, question: str, table: str, series: dict[str, tuple[str, str]], reference: str
    ) -> Answer:
        """Ladders that differ by recipe or optimizer: `series` maps theirs to (our arm, variant)."""
        context = self.context()
        specs: list[LadderSpec] = []
        rows: dict[tuple[str, int], Row] = {}
        for i, (theirs, (arm, variant)) in enumerate(series.items()):
            own = [row for row in self.tables.rows(table) if row["arm"] == theirs]
            recipe = context.recipe(find_arm(arm))
            # Every ladder gets specs of its own; what was run is in the table, not in the plan.
            recipe = replace(recipe, base=replace(recipe.base, warmup_steps=recipe.base.warmup_steps + i))
            depths = tuple(int(row["depth"]) for row in own)
            optimizer = OptimizerConfig.named("adamw") if "adam" in theirs else None
            specs.append(LadderSpec(find_arm(arm), recipe, depths, optimizer, variant))
            for row in own:
                depth = int(row["depth"])
                rung = recipe.at(find_arm(arm), depth, context.size_rule)
                rows[context.spec(rung, optimizer=optimizer).hash, depth] = row

        def find(spec: RunSpec) -> Measured | None:
            row = rows[spec.hash, spec.shape.depth]
            return Measured(float(row["val_loss"]), float(row["compute_flops"]))

        study = compare_ladders(
            context,
            specs,
            reference,
            study="ablations",
            section="Appendix B",
            question=question,
            by_time=False,
        )
        return self.replay.answer(study, find)

    def corpora(self) -> Answer:
        """Scores of the replayed ladders of Vanilla and Untied-Grow, the arms with one on both corpora."""
        names = ("fineweb", "fineweb-edu")
        held = [
            r.run
            for r in self.replay.records.values()
            if r.spec.shape.depth == LARGEST and r.spec.arm.name == "untied-grow"
        ]
        runs = [
            scored_run(record)
            for record in self.replay.records.values()
            if record.spec.data.identity in names
            and record.spec.arm.name in ("vanilla", "untied-grow")
            and "core" in record.evaluation
        ]
        return analyse_downstream(
            runs, held_out=[run for run in held if any(one.run == run for one in runs)],
            corpora={name[:8]: name for name in names},
        ).answer()  # fmt: skip

    # The four stages

    def chain_tuning(self) -> Answer:
        """Chains at the base size, from the published losses of every sweep."""
        context = self.context()
        chains: list[Chain] = []
        for arm in TUNED:
            theirs = {
                name: row["arm"] for row in self.tables.rows("base_tuning") if (name := our_name(row["arm"]))
            }
            if arm in theirs:
                chains.append(self._chain(context, arm, theirs[arm]))
        return chain_answer(context, chains)

    def _chain(self, context: StudyContext, arm: str, theirs: str) -> Chain:
        sweeps: dict[tuple[int, str], list[Row]] = {}
        for row in self.tables.of("base_tuning", arm=theirs):
            sweeps.setdefault((int(row["round"]), long_name(row["sweep"])), []).append(row)
        order = context.preset.grids.chain.sweeps
        chain = Chain(find_arm(arm), context.recipe(find_arm(arm)).base)
        measured: list[tuple[float | None, tuple[tuple[str, float, float], ...]]] = []
        best = math.inf
        for number, sweep in sorted(sweeps, key=lambda key: (key[0], order.index(key[1]))):
            rows = sweeps[number, sweep]
            again = [float(row["val_loss"]) for row in rows if row["incumbent"] == "true"]
            tries = tuple(
                (long_name(row["knob"]), float(row["position"]), float(row["val_loss"]))
                for row in rows
                if row["incumbent"] == "false"
            )
            measured.append((again[0] if again else None, tries))
            baseline = again[0] if again else best
            better = settings_to_adopt(baseline, tries, context.preset.grids.chain.threshold)
            best = (
                min(best, baseline, *(loss for loss, _ in better.values())) if better else min(best, baseline)
            )
            adopted = {name: value for name, (_, value) in better.items()}
            # The values tried are not published, only their order: no panel of the sweep itself.
            values = {"arm": arm, "round": number, "sweep": sweep, "baseline": baseline}
            step = SweepResult({**values, "adopted": adopted, "best": best}, Rows())
            chain.steps = Rows((*chain.steps, step))
        confirmed = self.tables.of("base_tuning_confirmations", arm=theirs, recipe="own")
        chain.loss = float(confirmed[0]["val_loss"]) if confirmed else replay_chain(measured)[0]
        return chain

    def transfer_probe(self) -> Answer:
        """Vanilla's recipe on other arms at the base size."""
        context = self.context()
        confirmed = {
            (r["recipe"], our_name(r["arm"])): float(r["val_loss"])
            for r in self.tables.rows("base_tuning_confirmations")
        }
        vanilla = context.recipe(find_arm("vanilla")).base

        def find(spec: RunSpec) -> Measured | None:
            transferred = spec.hyperparameters.embedding_lr_multiplier == vanilla.embedding_lr_multiplier
            loss = confirmed.get(
                ("vanilla" if transferred and spec.arm.name != "vanilla" else "own", spec.arm.name)
            )
            return None if loss is None else Measured(loss)

        arms = [arm for arm in SWEPT[1:] if ("vanilla", arm) in confirmed and ("own", arm) in confirmed]
        return self.drive("transfer", find, parts=("probe",), arms=arms)

    def tpp(self, arms: Sequence[str] = SWEPT) -> Answer:
        """Iso-compute sweeps of tokens per parameter."""
        rows = self.tables.rows("tpp_sweeps")
        # Deep Vanilla's depth counts executed blocks there; stored parameters and tokens name a run.
        find = by_key(
            rows,
            lambda row: (row["arm"], int(row["params_stored"]), int(row["tokens"])),
            lambda spec: (spec.arm.name, initial_parameters(spec), spec.tokens),
        )
        return self.drive("tpp", find, arms=arms)

    def growth_fraction(self) -> Answer:
        """ρ at three anchors for the three growing arms."""
        context = self.context(
            growth_fraction={"rho": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)}
        )
        for arm in ("loop-grow", "untied-grow", "deep-vanilla-grow"):
            context = context.with_recipe(find_arm(arm), context.recipe(find_arm(arm)).with_tpp(6.0))
        own = [row for row in self.tables.rows("growth_timing") if float(row["budget"]) == int(row["depth"])]
        own += self.tables.rows("growth_timing_deep_vanilla")
        find = by_key(
            own,
            lambda row: (row["arm"], int(row["depth"]), round(float(row["rho"]), 2)),
            lambda spec: (GROWN.get(spec.arm.name, spec.arm.name), spec.shape.depth, rho_of(spec)),
        )
        return self.drive(
            "growth-fraction", find, context, arms=("deep-vanilla-grow", "loop-grow", "untied-grow")
        )

    def lr_rule(self) -> Answer:
        """Slices of four hyperparameters at d8, d9 and d10 for six arms."""
        context = self.context()
        betas = {
            row["arm"]: -float(row["adopted_beta"])
            for row in self.tables.rows("hyperparameter_slice_exponents")
        }
        rows = {
            (r["arm"], r["recipe"], r["knob"], int(r["depth"]), round(2 ** float(r["log2_multiplier"]), 6)): r
            for r in self.tables.rows("hyperparameter_slices")
        }
        # Growing arms are swept around the rule of the arm they start as, which the authors had rounded so.
        for arm in ("loop-2", "untied-2"):
            recipe = context.recipe(find_arm(arm))
            context = context.with_recipe(find_arm(arm), replace(recipe, learning_rate_exponent=betas[arm]))

        def find(spec: RunSpec) -> Measured | None:
            arm, depth = spec.arm, spec.shape.depth
            start = context.recipe(starting_arm(arm))
            for kind in ("constant", "scaled"):
                exponent = betas[arm.name] if kind == "scaled" else 0.0
                if depth == context.preset.base_depth:
                    kind = "scaled"  # the anchor is shared  # noqa: PLW2901
                recipe = replace(start, learning_rate_exponent=exponent)
                base = recipe.hyperparameters(arm, depth, context.size_rule)
                changed = setting_of(spec.hyperparameters, base)
                if changed is None:
                    continue
                name, multiple = changed
                row = rows.get((arm.name, kind, name or "learning_rate", depth, round(multiple, 6)))
                if row is not None:
                    return Measured(float(row["val_loss"]))
            return None

        return self.drive("lr-rule", find, context, arms=tuple(betas))

    def screen(self) -> Answer:
        """Every hyperparameter of Vanilla at d8 to d12."""
        context = self.context(lr_rule={"screen_depths": (8, 9, 10, 11, 12)})
        rows = self.tables.rows("hyperparameter_screen")
        recipe = replace(context.recipe(find_arm("vanilla")), learning_rate_exponent=0.0)
        found: dict[tuple[str, int, float], Row] = {}
        for row in rows:
            if row["knob"] == "base":
                found["", int(row["depth"]), 1.0] = row
                continue
            knob = long_name(row["knob"])
            value = float(row[row["knob"]])
            found[
                knob,
                int(row["depth"]),
                float(f"{value / getattr(recipe.base, knob):.4g}") if getattr(recipe.base, knob) else value,
            ] = row

        def find(spec: RunSpec) -> Measured | None:
            changed = setting_of(spec.hyperparameters, recipe.base)
            if changed is None:
                return None
            row = found.get((changed[0], spec.shape.depth, float(f"{changed[1]:.4g}")))
            return None if row is None else Measured(float(row["val_loss"]))

        return self.drive("lr-rule", find, context, arms=("vanilla",), parts=("screen",))

    # Design of the family

    def allocation(self) -> Answer:
        """Core sizes at five depths on 1 B tokens."""
        find = by_key(
            self.tables.rows("block_allocation"),
            lambda row: (int(row["depth"]), int(row["core_blocks"])),
            lambda spec: (spec.shape.depth, spec.shape.allocation.core),
        )
        return self.drive("allocation", find, self.context(allocation={"depths": (6, 7, 8, 9, 10)}))

    def passes(self) -> Answer:
        """Fixed-token ladders by passes."""
        rows = self.tables.rows("fresh_recurrence")
        find = by_key(
            rows,
            lambda row: (
                row["family"] if row["loops"] != "1" else "tied",
                int(row["loops"]),
                int(row["depth"]),
            ),
            lambda spec: (_family(spec), *passes_and_depth(spec)),
        )
        context = self.context(passes={"depths": (4, 6, 8, 10, 12, 14, 16, 18)})
        return self.drive("passes", find, context, parts=("tokens",))

    def anchor_passes(self) -> Answer:
        """Passes at fixed anchor and compute."""
        context = self.context()
        rows = self.tables.rows("fixed_anchor_passes")
        one = find_arm("operator-1")
        budgets = {r["budget"]: float(r["matrix_flops"]) for r in self.tables.rows("fixed_anchor_budgets")}
        tpp = sorted(
            {
                round(
                    budgets[row["budget"]]
                    / (
                        context.flops_per_token(one, int(row["anchor"]))
                        * context.stored_parameters(one, int(row["anchor"]))
                    ),
                    6,
                )
                for row in rows
            }
        )
        find = by_tokens(
            rows,
            lambda row: (
                row["family"] if row["loops"] != "1" else "tied",
                int(row["loops"]),
                int(row["anchor"]),
            ),
            lambda row: float(row["tpp"]) * float(row["params_stored"]),
            lambda spec: (_family(spec), *passes_and_depth(spec)),
        )
        return self.drive("passes", find, self.context(passes={"anchor_tpp": tuple(tpp)}), parts=("anchor",))

    def growth_target(self) -> Answer:
        """Targets of growth from two passes at d8, with KL effective depths."""
        context = self.context(growth_target={"fractions": (0.25, 0.5, 0.75, 1.0)})
        depths = {
            (float(r["mean_passes"]), int(r["target_passes"])): float(r["kl_effective_depth"])
            for r in self.tables.rows("growth_target_lens")
        }
        losses = {
            (float(r["mean_passes"]), int(r["target_passes"])): float(r["val_loss"])
            for r in self.tables.rows("growth_targets")
        }

        def find(spec: RunSpec) -> Measured | None:
            first, last = spec.schedule.initial, spec.schedule.final
            rho = rho_of(spec)
            mean = round(2 * (first + rho * (last - first))) / 2
            loss = losses.get((mean, last))
            if loss is None or (not spec.schedule.grows and mean != last):
                return None
            deep = depths.get((mean, last))
            return Measured(loss, evaluation={} if deep is None else {"kl_depth": {"depth": deep}})

        return self.drive("growth-target", find, context)

    def growth_timing(self, arm: str) -> Answer:
        """ρ at anchor depths and budgets."""
        rows = self.tables.of("growth_timing", arm=arm)
        start = {(int(r["depth"]), float(r["budget"])): r for r in rows if float(r["rho"]) == 0}
        tpp = {key: int(r["tokens"]) / int(r["params_stored"]) for key, r in start.items()}
        grid = {
            "tpp": tuple(sorted({round(value, 3) for value in tpp.values()})),
            "rho": tuple(sorted({round(float(r["rho"]), 2) for r in rows})),
        }
        find = by_tokens(
            rows,
            lambda row: (int(row["depth"]), round(float(row["rho"]), 2)),
            lambda row: float(row["tokens"]),
            lambda spec: (spec.shape.depth, rho_of(spec)),
        )
        return self.drive("growth-timing", find, self.context(growth_timing=grid), arms=(arm,))

    def growth_tokens(self, arm: str) -> Answer:
        """Iso-compute sweeps with growth in place, beside those of the arm it starts as."""
        start = starting_arm(find_arm(arm)).name
        budgets = {r["budget"]: float(r["matrix_flops"]) for r in self.tables.rows("fixed_anchor_budgets")}
        rows = {(int(r["depth"]), r["budget"]): r for r in self.tables.of("token_allocation", arm=arm)}
        fixed = by_key(
            self.tables.of("tpp_sweeps", arm=start),
            lambda row: (int(row["params_stored"]), int(row["tokens"])),
            lambda spec: (initial_parameters(spec), spec.tokens),
        )

        def find(spec: RunSpec) -> Measured | None:
            if spec.arm.name == start:
                return fixed(spec)
            cost = expected_flops(spec, "matrix")
            budget = min(budgets, key=lambda name: abs(math.log(budgets[name] / cost)))
            row = rows.get((spec.shape.depth, budget))
            return None if row is None else Measured(float(row["val_loss"]))

        context = self.context(tpp={"offsets": (-4, -3, -2, -1, 0, 1, 2)})
        return self.drive("tpp", find, context, arms=(start, arm))

    def growth_sensitivity(self) -> Answer:
        """Tokens per parameter × ρ of Untied Grow."""
        rows: dict[tuple[str, str, int], Row] = {}
        for row in self.tables.rows("growth_prescription_ablation"):
            tpp, _, rho = row["prescription"].partition("_")
            rows[tpp, rho, int(row["depth"])] = row
        context = self.context()
        recipe = context.recipe(find_arm("untied-grow"))

        def find(spec: RunSpec) -> Measured | None:
            cost = expected_flops(spec, "matrix")
            stored = stored_parameters(spec.arm, spec.shape, 2)
            tpp = cost / (stored * context.flops_per_token(spec.arm, spec.shape.depth))
            own = recipe.with_tpp(round(tpp)).growth_fraction(spec.arm, spec.shape)
            rho = "rho0p30" if own is None or abs(rho_of(spec) - own) > 0.006 else "fitrho"
            row = rows.get((f"tpp{round(tpp)}", rho, spec.shape.depth))
            if row is None and rho == "fitrho":  # the fitted ρ is 0.30 here: the same run
                row = rows.get((f"tpp{round(tpp)}", "rho0p30", spec.shape.depth))
            return None if row is None else Measured(float(row["val_loss"]))

        return self.drive("ablations", find, context, parts=("growth",), rungs=(6, 8, 10, 12, 14, 16))

    def passes_hyperparameters(self) -> Answer:
        """Five hyperparameters at two, four and eight passes with the tokens fixed."""
        context = self.context()
        rows = {
            (r["family"], long_name(r["knob"]), int(r["loops"]), float(r["multiplier"])): r
            for r in self.tables.rows("recurrence_hyperparameters")
        }
        names = {"tied": "loop-2", "untied": "untied-2"}

        def find(spec: RunSpec) -> Measured | None:
            family = "tied" if spec.arm.tied else "untied"
            changed = setting_of(spec.hyperparameters, context.recipe(find_arm(names[family])).base)
            if changed is None:
                return None
            name, multiple = changed
            row = rows.get((family, name or "learning_rate", spec.schedule.final, round(multiple, 4)))
            return None if row is None else Measured(float(row["val_loss"]))

        return self.drive("passes", find, context, parts=("hyperparameters",))

    # Ladders that differ by recipe or optimizer

    def vanilla_scaling(self) -> Answer:
        """Vanilla with more hyperparameters scaled, and with none."""
        series = {
            "vanilla": ("vanilla", ""),
            "vanilla-scaled-om": ("vanilla", "output multiplier scaled"),
            "vanilla-scaled-wd": ("vanilla", "weight decay scaled"),
            "vanilla-warmdown-1": ("vanilla", "warm-down 1"),
            "vanilla-mup-om": ("vanilla", "muP output"),
            "vanilla-constant-mup-om": ("vanilla", "constant, muP output"),
            "vanilla-constant": ("vanilla", "constant"),
        }
        question = "Does scaling more than the learning rate change Vanilla's law?"
        return self.ladders_of_series(question, "ablation_ladders", series, "vanilla")

    def operator_recipe(self) -> Answer:
        """Operator-1 with its own recipe and with Vanilla's."""
        series = {
            "vanilla": ("vanilla", ""),
            "operator-1": ("operator-1", ""),
            "operator-1-vanilla-recipe": ("operator-1", "vanilla recipe"),
        }
        return self.ladders_of_series(
            "What does Vanilla's recipe cost Operator-1?", "ablation_ladders", series, "vanilla"
        )

    def optimizers(self, regime: str) -> Answer:
        """AdamW against Muon: width and depth, or width only."""
        arm, theirs = {
            "coupled": ("vanilla", "vanilla"),
            "width": ("width-only-deep-vanilla", "deep-vanilla-width-only"),
        }[regime]
        series = {theirs: (arm, ""), f"{theirs}-adam": (arm, "adamw")}
        return self.ladders_of_series(
            "Does Muon's gain persist with scale?", "width_optimizer_ladders", series, arm
        )

    def width_only(self, regime: str) -> Answer:
        """Untied-2 against Deep Vanilla: width only, or width and depth."""
        names = {
            "width": {
                "deep-vanilla-width-only": ("width-only-deep-vanilla", ""),
                "untied-2-width-only": ("width-only-untied-2", ""),
            },
            "coupled": {"deep-vanilla": ("deep-vanilla", ""), "untied-2": ("untied-2", "")},
        }[regime]
        reference = next(iter(names.values()))[0]
        return self.ladders_of_series(
            "Does the operator's gain need depth?", "width_optimizer_ladders", names, reference
        )

    def effective_depth_multi_epoch(self) -> Panel:
        """The authors' interpolated effective depths on repeated data."""
        rows = self.tables.rows("effective_depth_multi_epoch")
        by_series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            by_series.setdefault(row["series"], []).append(
                (float(row["compute_flops"]), float(row["effective_depth"]))
            )
        sizes = sorted(by_series["operator-1-tuned-weight-decay"])
        loops = sorted(by_series["scale-loop-count"])
        x = [row[0] for row in sizes]
        return depth_comparison(x, [row[1] for row in sizes], [row[1] for row in loops], 0.8)

    # Tables that need no run

    def family(self) -> Panel:
        """The architectures."""
        return family_panel([find_arm(name) for name in MAIN])

    def common_setup(self) -> Table:
        """The fixed protocol, from the preset."""
        preset = load_preset("paper")
        rows = (
            ("context length (tokens)", preset.context),
            ("vocabulary, padded", 50_304),
            ("global batch (tokens)", preset.batch_tokens),
            ("width per depth", preset.aspect),
            ("optimizer", "Muon for matrices, AdamW for embedding and head"),
        )
        return Table("Fixed protocol", ("setting", "value"), rows)

    def model_sizes(self) -> Table:
        """Depths, splits, executed depths and stored parameters."""
        rows: list[tuple[Any, ...]] = []
        for depth in (6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26):
            shapes = {
                name: find_arm(name).shape(depth)
                for name in ("vanilla", "loop-grow", "untied-2", "untied-grow")
            }
            split = shapes["loop-grow"].allocation
            executed = [split.prelude + k * split.core + split.coda for k in (2, 4)]
            counts = [
                stored_parameters(find_arm(name), shape, find_arm(name).passes.final)
                for name, shape in shapes.items()
            ]
            rows.append(
                (f"d{depth}", f"{split.prelude}/{split.core}/{split.coda}", *executed, 128 * depth, *counts)
            )
        columns = (
            "depth",
            "prelude/core/coda",
            "executed, K = 2",
            "executed, K = 4",
            "width",
            *("vanilla", "loop-grow", "untied-2", "untied-grow"),
        )
        return Table("Model sizes", columns, tuple(rows))

    def tuning_grid(self) -> Table:
        """What the first round of the chain tries, from the paper's initial values."""
        rows = []
        for sweep in self.context().preset.grids.chain.sweeps:
            tried = candidates(INITIAL, sweep, 1)
            rows.append(
                (
                    sweep,
                    ", ".join(
                        f"{name}={value:.4g}" if name != sweep else f"{value:.4g}" for name, value in tried
                    ),
                )
            )
        return Table("Tuning grid, first round", ("sweep", "tried besides the current value"), tuple(rows))

    def task_filter(self) -> Table:
        """CORE tasks by type, with the filter's criteria on Vanilla's checkpoints."""
        runs = self.tables.of("core_scores", corpus="fineweb", arm="vanilla")
        runs = sorted(runs, key=lambda row: int(row["depth"]))
        training = np.array([float(row["compute_flops"]) for row in runs])
        rows: list[tuple[Any, ...]] = []
        for task in self.tables.rows("core_tasks"):
            own = {
                int(row["depth"]): float(row["centered_accuracy"])
                for row in self.tables.of(
                    "core_task_scores", corpus="fineweb", arm="vanilla", task=task["task"]
                )
            }
            values = np.array([own[int(row["depth"])] for row in runs])
            found = filter_tasks(training, {task["task"]: values}, {task["task"]: 0.0})[task["task"]]
            kept = found.tau >= MIN_TAU
            rows.append(
                (task["task"], task["evaluation_type"], found.tau, kept, task["in_17_task_filter"] == "true")
            )
        columns = ("task", "type", "Kendall τ_b", "τ_b ≥ 0.50", "kept by the paper")
        return Table("CORE tasks and their filter", columns, tuple(rows))

    def regime_columns(self, regimes: Answer, grid: Answer) -> list[Panel]:
        """The regimes at one weight decay, and the last with the decay chosen at one pass."""
        group = "Passes under repetition of the data"
        own = [panel for panel in regimes.panels if panel.group == group]
        tuned = [panel for panel in grid.panels if panel.group == group]
        rows = len(tuned)
        width = len(own) // rows
        found = [p for i in range(rows) for p in (*own[i * width : (i + 1) * width], tuned[i])]
        return [replace(panel, columns=width + 1) for panel in found]

    # Repeated data

    def data_constrained(self, part: str) -> Answer:
        """The grid, the regimes or the controls on repeated data."""
        grid = {
            "depths": (4, 6, 8, 10, 12, 14, 16, 18),
            "decays": (0.05, 0.2, 0.4, 0.8, 1.2, 1.6),
            "control_passes": (1, 2, 3, 4, 6, 8, 12),
        }
        context = self.context(data_constrained=grid)
        if part == "grid":
            find = by_key(
                self.tables.rows("data_constrained_grid"),
                lambda row: (int(row["loops"]), int(row["depth"]), float(row["weight_decay"])),
                lambda spec: (*passes_and_depth(spec), spec.hyperparameters.weight_decay),
            )
        elif part == "regimes":
            regimes = {"fresh": 1, "replay250m4": 4, "replay100m10": 10}
            find = by_key(
                self.tables.rows("regimes"),
                lambda row: (regimes[row["regime"]], int(row["loops"]), int(row["depth"])),
                lambda spec: (spec.data.epochs, *passes_and_depth(spec)),
            )
        else:
            names = {
                "untied": "untied",
                "loop-no-operator": "tied-vanilla",
                "untied-no-operator": "untied-vanilla",
            }
            find = by_key(
                self.tables.rows("data_constrained_architectures"),
                lambda row: (names[row["arm"]], int(row["loops"]), int(row["depth"])),
                lambda spec: (_control(spec), *passes_and_depth(spec)),
            )
            tied = by_key(
                self.tables.of("data_constrained_grid", weight_decay=0.8),
                lambda row: ("tied", int(row["loops"]), int(row["depth"])),
                lambda spec: (_control(spec), *passes_and_depth(spec)),
            )
            find = first_of(find, tied)
        return self.drive("data-constrained", find, context, parts=(part,))


def _family(spec: RunSpec) -> str:
    return "tied" if spec.arm.tied or spec.schedule.final == 1 else "untied"


def _control(spec: RunSpec) -> str:
    if "inject" in spec.arm.core_boundary:
        return "untied" if not spec.arm.tied or spec.schedule.final == 1 else "tied"
    # One pass of the tied and of the untied control is the same network.
    return "tied-vanilla" if spec.arm.tied else "untied-vanilla"
