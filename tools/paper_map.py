"""Recompute the paper's printed numbers from its authors' measurements, and write the table of the docs.

    python tools/paper_map.py DIRECTORY            # print the table
    python tools/paper_map.py DIRECTORY --write    # replace it in docs/paper-map.md

DIRECTORY holds the authors' tables as CSV (known_answers.csv and the tables that its column `file` names).
`ANSWERS` has one function for each name in known_answers.csv, made of the package's own fits.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import ComputeFit, FitSettings, ReferenceLaw
from steepen.laws.fits.downstream import (
    Checkpoints,
    DownstreamFit,
    filter_tasks,
    fit_downstream,
    score_ratio,
)
from steepen.laws.fits.drift import AffineLaw, fit_affine, fit_growth_fraction
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, fit_isoflop, fit_power_law
from steepen.laws.fits.matched_compute import envelope_compute, slice_families
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.verdict.multipliers import interpolated_multipliers
from steepen.recipe.hyperparameters import full_name
from steepen.recipe.planner import plan_ladders
from steepen.recipe.recipe_choice import RecipeChoice
from steepen.studies.grids import SWEEPS
from steepen.studies.stages.chain_tuning import replay_chain

PAGE = Path(__file__).resolve().parents[1] / "docs" / "paper-map.md"
BEGIN, END = "<!-- known answers: begin -->", "<!-- known answers: end -->"
LADDERS_BEGIN, LADDERS_END = "<!-- ladders: begin -->", "<!-- ladders: end -->"
LARGEST = 26  # depth of the run that the forecasts leave out
DECAY = 0.8  # weight decay of the data-constrained grid where it is fixed

Row = dict[str, str]


@dataclass(frozen=True)
class KnownAnswer:
    """One row of known_answers.csv; `recomputed` is the authors' value from their own tables."""

    name: str
    arm: str
    printed: float
    recomputed: float
    tolerance: float
    file: str
    section: str

    @property
    def key(self) -> str:
        """Name and arm, unique among the answers."""
        return f"{self.name}:{self.arm}" if self.arm else self.name


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV table, by column name."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_answers(directory: Path) -> list[KnownAnswer]:
    """The known answers, in the order of their table."""
    return [
        KnownAnswer(
            row["name"], row["arm"], float(row["printed"]), float(row["recomputed"]),
            float(row["tolerance"]), row["file"], row["paper_section"],
        )
        for row in read_rows(directory / "known_answers.csv")
    ]  # fmt: skip


def column(rows: Iterable[Row], name: str) -> np.ndarray:
    """A column as numbers."""
    return np.array([float(row[name]) for row in rows])


def group(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of some columns, in the order of the table."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return dict(found)


def numeric(rows: Iterable[Row], **values: float) -> list[Row]:
    """Rows whose columns equal these numbers."""
    return [row for row in rows if all(float(row[name]) == value for name, value in values.items())]


class Authors:
    """The authors' tables, and the fits to them that several answers share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @functools.cache  # noqa: B019 (one object for one directory)
    def rows(self, table: str) -> list[Row]:
        """The rows of a table."""
        return read_rows(self.directory / f"{table}.csv")

    def arm_rows(self, table: str, arm: str) -> list[Row]:
        """The rows of one arm."""
        return [row for row in self.rows(table) if row["arm"] == arm]

    @functools.cache  # noqa: B019
    def ladders(self, table: str, loss: str = "val_loss") -> dict[str, Ladder]:
        """The ladders of a table, without the largest run."""
        rows = [row for row in self.rows(table) if int(row["depth"]) < LARGEST]
        return {
            arm: make_ladder(arm, column(own, "compute_flops"), column(own, loss))
            for (arm,), own in group(rows, "arm").items()
        }

    @functools.cache  # noqa: B019
    def law(self, table: str, reference_law: ReferenceLaw = "regression") -> ComputeFit:
        """The compute laws of every arm of a table by the paper's method."""
        settings = FitSettings("vanilla", method="paper", reference_law=reference_law)
        return fit_compute(self.ladders(table), settings)

    def multiplier(self, table: str, arm: str, depth: int) -> float:
        """The interpolated multiplier of an arm at the budget of Vanilla at a depth."""
        ladders = self.ladders(table)
        (budget,) = column(numeric(self.arm_rows(table, "vanilla"), depth=depth), "compute_flops")
        found = interpolated_multipliers(ladders["vanilla"], ladders[arm])
        return next(m.value for m in found if math.isclose(m.flops, budget))

    def largest(self, name: str) -> float:
        """A measurement of the largest run."""
        (row,) = numeric(self.rows("fineweb_edu_ladders"), depth=LARGEST)
        return float(row[name])

    @functools.cache  # noqa: B019
    def checkpoints(self, corpus: str, arm: str) -> Checkpoints:
        """Task scores of an arm's ladder."""

        def own(table: str) -> list[Row]:
            rows = [row for row in self.arm_rows(table, arm) if row["corpus"] == corpus]
            return sorted((r for r in rows if int(r["depth"]) < LARGEST), key=lambda row: int(row["depth"]))

        tasks = {task: rows for (task,), rows in group(own("core_task_scores"), "task").items()}
        scores = own("core_scores")
        return Checkpoints(
            column(scores, "compute_flops"),
            {task: column(rows, "answer_nll") for task, rows in tasks.items()},
            {task: column(rows, "centered_accuracy") for task, rows in tasks.items()},
            column(scores, "core_accuracy"),
        )

    @functools.cache  # noqa: B019
    def downstream(self) -> DownstreamFit:
        """The forecast of CORE on FineWeb-Edu."""
        tasks = [row["task"] for row in self.rows("core_tasks") if row["in_17_task_filter"] == "true"]
        series = {arm: self.checkpoints("fineweb-edu", arm) for arm in ("vanilla", "untied-grow")}
        return fit_downstream(series, tasks)

    def core_ratio(self, keep: Callable[[Row], bool]) -> float:
        """The ratio of the full score to the mean of the 17 tasks over some runs."""
        rows = [row for row in self.rows("core_scores") if int(row["depth"]) < LARGEST and keep(row)]
        return score_ratio(column(rows, "core17_accuracy"), column(rows, "core_accuracy"))

    @functools.cache  # noqa: B019
    def tpp(self, arm: str) -> IsoflopFit:
        """Optimal tokens per parameter of an arm at every budget."""
        rows = self.arm_rows("tpp_sweeps", arm)
        level = {key: column(own, "matrix_flops").mean() for (key,), own in group(rows, "budget").items()}
        budget = np.array([level[row["budget"]] for row in rows])
        return fit_isoflop(budget, column(rows, "tpp"), column(rows, "val_loss"))

    @functools.cache  # noqa: B019
    def growth_optima(self, arm: str) -> dict[tuple[float, int], Vertex]:
        """The optimal growth fraction at every (budget, depth), where it is inside the sweep."""
        if arm == "deep-vanilla-grow":
            sweeps = {
                (float(depth), int(depth)): rows
                for (depth,), rows in group(self.rows("growth_timing_deep_vanilla"), "depth").items()
            }
        else:
            sweeps = {
                (float(budget), int(depth)): rows
                for (budget, depth), rows in group(
                    self.arm_rows("growth_timing", arm), "budget", "depth"
                ).items()
            }
        found: dict[tuple[float, int], Vertex] = {}
        for key, rows in sweeps.items():
            fit = fit_growth_fraction(np.ones(len(rows)), column(rows, "rho"), column(rows, "val_loss"))
            if fit.vertices[0].interior:
                found[key] = fit.vertices[0]
        return found

    @functools.cache  # noqa: B019
    def growth_law(self, arm: str) -> AffineLaw:
        """Tokens per initial parameter at the optimal growth fraction against those without growth."""
        without: list[float] = []
        best: list[float] = []
        for (budget, depth), vertex in self.growth_optima(arm).items():
            rows = numeric(self.arm_rows("growth_timing", arm), budget=budget, depth=depth)
            rows.sort(key=lambda row: float(row["rho"]))
            tpp = column(rows, "tokens") / float(rows[0]["params_stored"])
            without.append(tpp[0])
            best.append(float(np.interp(vertex.x, column(rows, "rho"), tpp)))
        return fit_affine(np.array(without), np.array(best))

    @functools.cache  # noqa: B019
    def passes_laws(self, family: str) -> tuple[PowerLawFit, PowerLawFit]:
        """Expansion and tokens per parameter at the best number of passes, against TPP at one pass."""
        tpp: list[float] = []
        expansion: list[float] = []
        tpp_best: list[float] = []
        own = [row for row in self.rows("fixed_anchor_passes") if row["family"] == family]
        for rows in group(own, "anchor", "budget").values():
            if len(rows) < 3:
                continue
            rows.sort(key=lambda row: int(row["loops"]))
            passes, active = column(rows, "loops"), column(rows, "params_compute")
            vertex = find_vertex(passes, column(rows, "val_loss"))
            if not vertex.bracketed:
                continue
            tpp.append(float(rows[0]["tpp"]))
            expansion.append(float(np.interp(vertex.x, passes, active / active[0])))
            log_tpp = np.interp(math.log(vertex.x), np.log(passes), np.log(column(rows, "tpp")))
            tpp_best.append(math.exp(float(log_tpp)))
        x = np.array(tpp)
        return fit_power_law(x, np.array(expansion)), fit_power_law(x, np.array(tpp_best))

    def fixed_decay(self) -> list[Row]:
        """The data-constrained grid at one weight decay."""
        return numeric(self.rows("data_constrained_grid"), weight_decay=DECAY)

    def loops_at(self, budget: float) -> tuple[Vertex, float]:
        """The best number of passes at a budget, and its gain over one pass.

        The paper rounds its budgets; their digits are in the table of effective depths at the same budgets.
        """
        budgets = {float(row["compute_flops"]) for row in self.rows("effective_depth_multi_epoch")}
        budget = min(budgets, key=lambda exact: abs(exact - budget))
        families = {
            float(loops): make_ladder(loops, column(rows, "matrix_flops"), column(rows, "val_loss"))
            for (loops,), rows in group(self.fixed_decay(), "loops").items()
        }
        (cut,) = slice_families(families, np.array([budget]))
        assert cut.best is not None
        return cut.best, cut.losses[1.0] - cut.best.loss

    def best_model_size(self) -> Row:
        """The best run with one pass, over all sizes and weight decays."""
        one = numeric(self.rows("data_constrained_grid"), loops=1)
        return min(one, key=lambda row: float(row["val_loss"]))

    def confirmation(self, recipe: str, arm: str) -> float | None:
        """The loss of an arm's confirmation run with its own recipe or Vanilla's."""
        rows = [row for row in self.arm_rows("base_tuning_confirmations", arm) if row["recipe"] == recipe]
        return float(rows[0]["val_loss"]) if rows else None

    def tuned_loss(self, arm: str) -> float:
        """The confirmation run where there is one, else the loss at the end of the replayed chain."""
        confirmed = self.confirmation("own", arm)
        if confirmed is not None:
            return confirmed
        sweeps: list[tuple[int, int, float | None, tuple[tuple[str, float, float], ...]]] = []
        for (number, sweep), rows in group(self.arm_rows("base_tuning", arm), "round", "sweep").items():
            incumbent = [float(row["val_loss"]) for row in rows if row["incumbent"] == "true"]
            tries = tuple(
                (row["knob"], float(row["position"]), float(row["val_loss"]))
                for row in rows
                if row["incumbent"] == "false"
            )
            name = full_name("injection_weight" if sweep == "alpha" else sweep)
            sweeps.append((int(number), SWEEPS.index(name), incumbent[0] if incumbent else None, tries))
        return replay_chain(sweep[2:] for sweep in sorted(sweeps, key=lambda sweep: sweep[:2]))[0]

    def passes_gap(self, arm: str) -> list[float]:
        """L(8 passes) − L(4 passes) at test time, at every size."""
        found: list[float] = []
        for rows in group(self.arm_rows("passes_at_test_time", arm), "depth").values():
            loss = {int(row["eval_passes"]): float(row["val_loss"]) for row in rows}
            found.append(loss[8] - loss[4])
        return found


def ratio_of_multipliers(authors: Authors, arm: str, over: str, depth: int) -> float:
    """How many times the multiplier of one arm is another's."""
    table = "fineweb_ladders"
    return authors.multiplier(table, arm, depth) / authors.multiplier(table, over, depth)


def projected_multiplier(authors: Authors, arm: str, flops: float) -> float:
    """Fitted laws at a Vanilla budget: the budget over the arm's compute for the same loss."""
    laws = authors.law("fineweb_edu_ladders", "free-fit").arms
    return flops / float(laws[arm].compute_for(laws["vanilla"].predict(flops)))


def projected_multiplier_at_own_budget(authors: Authors, arm: str, flops: float) -> float:
    """Fitted laws at the arm's budget: Vanilla's compute for the arm's loss over that budget."""
    laws = authors.law("fineweb_edu_ladders", "free-fit").arms
    return float(laws["vanilla"].compute_for(laws[arm].predict(flops))) / flops


def nll_forecast_error(authors: Authors, arm: str) -> float:
    """Measured minus forecast answer NLL of the largest run, by the arm's own three-parameter law."""
    ladder = {arm: authors.ladders("fineweb_edu_ladders", "answer_nll")[arm]}
    fit = fit_compute(ladder, FitSettings(arm, method="paper", reference_law="free-fit"))
    return authors.largest("answer_nll") - float(fit.arms[arm].predict(authors.largest("compute_flops")))


def mean_optimal_rho(authors: Authors, arm: str) -> float:
    """The mean optimal growth fraction over anchors at their own budget."""
    return float(
        np.mean([v.x for (budget, depth), v in authors.growth_optima(arm).items() if budget == depth])
    )


def mean_token_allocation(authors: Authors, arm: str) -> float:
    """The mean optimum of 6·T²/C over budgets."""
    rows = authors.arm_rows("token_allocation", arm)
    x = column(rows, "six_t_squared_over_c")
    return fit_isoflop(column(rows, "budget"), x, column(rows, "val_loss")).mean


def loops_over_model_size(authors: Authors) -> float:
    """Compute of the best model with one pass over that of the frontier of all passes at the same loss."""
    best, runs = authors.best_model_size(), authors.fixed_decay()
    needed = envelope_compute(column(runs, "matrix_flops"), column(runs, "val_loss"), float(best["val_loss"]))
    return float(best["matrix_flops"]) / needed


def transfer_regret(authors: Authors, arm: str) -> float:
    """What Vanilla's recipe costs an arm, in 1e-3 of loss."""
    own, vanilla = (authors.confirmation(recipe, arm) for recipe in ("own", "vanilla"))
    assert own is not None and vanilla is not None
    return 1e3 * (vanilla - own)


def kendall_tau(authors: Authors, arm: str, task: str) -> float:
    """τ_b of a task's accuracy with compute on FineWeb."""
    runs = authors.checkpoints("fineweb", arm)
    return filter_tasks(runs.flops, {task: runs.centered[task]}, {task: 0.0})[task].tau


def core_compute_ratio(authors: Authors, arm: str, score: float) -> float:
    """Vanilla's compute over the arm's at which CORE is forecast to reach a score."""
    fit = authors.downstream()
    return fit.compute_for("vanilla", score) / fit.compute_for(arm, score)


def core_forecast(authors: Authors, arm: str) -> float:
    """The forecast CORE of the largest run."""
    return float(authors.downstream().predict(arm, authors.largest("compute_flops"))[0])


def vertex_loss(authors: Authors, arm: str, budget: int) -> float:
    """The loss at the optimal tokens per parameter of a budget named by a depth."""
    budgets = sorted({int(row["budget"]) for row in authors.arm_rows("tpp_sweeps", arm)})
    return authors.tpp(arm).vertices[budgets.index(budget)].loss


def shift_p_value(authors: Authors, arm: str) -> float:
    """p of no drift of the optimal tokens per parameter with compute."""
    law = authors.tpp(arm).law
    assert law is not None
    return law.p_value


FINEWEB, EDU, ABLATIONS = "fineweb_ladders", "fineweb_edu_ladders", "ablation_ladders"
SMALL, TOP = 8, 20  # Vanilla depths that cost about 1e18 and 1e20 FLOPs
DROPPED_TASKS = (
    "commonsense_qa",
    "boolq",
    "bigbench_language_identification",
    "bigbench_cs_algorithms",
    "bigbench_repeat_copy_logic",
)

# How every answer is computed: (tables and shared fits, arm) → value.
ANSWERS: dict[str, Callable[[Authors, str], float]] = {
    "exponent": lambda t, arm: t.law(FINEWEB).arms[arm].gamma.value,
    "multiplier_1e18": lambda t, arm: t.multiplier(FINEWEB, arm, SMALL),
    "multiplier_1e20": lambda t, arm: t.multiplier(FINEWEB, arm, TOP),
    "multiplier_flat": lambda t, arm: t.multiplier(FINEWEB, arm, TOP),
    "growth_over_untied_1e18": lambda t, arm: ratio_of_multipliers(t, arm, "untied-2", SMALL),
    "growth_over_untied_1e20": lambda t, arm: ratio_of_multipliers(t, arm, "untied-2", TOP),
    "untied_over_tied_1e18": lambda t, arm: ratio_of_multipliers(t, arm, "loop-2", SMALL),
    "untied_over_tied_1e20": lambda t, arm: ratio_of_multipliers(t, arm, "loop-2", TOP),
    "untied_over_tied_grow_1e18": lambda t, arm: ratio_of_multipliers(t, arm, "loop-grow", SMALL),
    "untied_over_tied_grow_1e20": lambda t, arm: ratio_of_multipliers(t, arm, "loop-grow", TOP),
    "multiplier_1e20_ablation": lambda t, arm: t.multiplier(ABLATIONS, arm, TOP),
    "loss_k8_minus_k4_min": lambda t, arm: min(t.passes_gap(arm)),
    "loss_k8_minus_k4_max": lambda t, arm: max(t.passes_gap(arm)),
    "exponent_edu": lambda t, arm: t.law(EDU).arms[arm].gamma.value,
    "d26_loss_forecast_minus_measured": lambda t, arm: (
        float(t.law(EDU).arms[arm].predict(t.largest("compute_flops"))) - t.largest("val_loss")
    ),
    "projected_multiplier_1e20": lambda t, arm: projected_multiplier(t, arm, 1e20),
    "projected_multiplier_d26": lambda t, arm: projected_multiplier_at_own_budget(
        t, arm, t.largest("compute_flops")
    ),
    "projected_multiplier_1e25": lambda t, arm: projected_multiplier(t, arm, 1e25),
    "d26_nll_forecast_error": nll_forecast_error,
    "d26_core_accuracy": lambda t, _: t.largest("core_accuracy"),
    "d26_core_accuracy_std": lambda t, _: t.largest("core_accuracy_std"),
    "core_forecast_d26": core_forecast,
    "core_ratio_full_to_17": lambda t, _: t.downstream().r,
    "core_ratio_full_to_17_corpus": lambda t, _: t.core_ratio(lambda row: row["arm"] == "untied-grow"),
    "core_compute_ratio_at_0.329": lambda t, arm: core_compute_ratio(t, arm, 0.329),
    "core_compute_ratio_at_0.427": lambda t, arm: core_compute_ratio(t, arm, 0.427),
    **{
        f"kendall_tau_{task}": functools.partial(kendall_tau, task=task)
        for task in DROPPED_TASKS
    },
    "mean_optimal_tpp": lambda t, arm: t.tpp(arm).mean,
    "tpp_shift_p": shift_p_value,
    "vertex_loss_d8": lambda t, arm: vertex_loss(t, arm, 8),
    "vertex_loss_d10": lambda t, arm: vertex_loss(t, arm, 10),
    "vertex_loss_d12": lambda t, arm: vertex_loss(t, arm, 12),
    "affine_a": lambda t, arm: t.growth_law(arm).a,
    "affine_b": lambda t, arm: t.growth_law(arm).b,
    "mean_optimal_rho": mean_optimal_rho,
    "optimal_rho_d8": lambda t, arm: t.growth_optima(arm)[8.0, 8].x,
    "optimal_rho_d9": lambda t, arm: t.growth_optima(arm)[9.0, 9].x,
    "optimal_rho_d10": lambda t, arm: t.growth_optima(arm)[10.0, 10].x,
    "mean_optimal_6t2_over_c": mean_token_allocation,
    "fixed_anchor_expansion_factor": lambda t, family: t.passes_laws(family)[0].coefficient,
    "fixed_anchor_expansion_exponent": lambda t, family: t.passes_laws(family)[0].exponent,
    "fixed_anchor_tpp_factor": lambda t, family: t.passes_laws(family)[1].coefficient,
    "fixed_anchor_tpp_exponent": lambda t, family: t.passes_laws(family)[1].exponent,
    "optimal_loops_at_8.46e+17": lambda t, _: t.loops_at(8.46e17)[0].x,
    "gap_to_one_loop_at_8.46e+17": lambda t, _: t.loops_at(8.46e17)[1],
    "optimal_loops_at_6.7e+18": lambda t, _: t.loops_at(6.7e18)[0].x,
    "gap_to_one_loop_at_6.7e+18": lambda t, _: t.loops_at(6.7e18)[1],
    "best_tuned_model_size_loss": lambda t, _: float(t.best_model_size()["val_loss"]),
    "loops_over_model_size": lambda t, _: loops_over_model_size(t),
    "transfer_regret_1e-3": transfer_regret,
    "tuned_loss": lambda t, arm: t.tuned_loss(arm),
}  # fmt: skip


def compute(authors: Authors, answer: KnownAnswer) -> float:
    """Our value of a known answer."""
    return ANSWERS[answer.name](authors, answer.arm)


def table(directory: Path) -> str:
    """The known answers as a Markdown table: printed, the authors' value, and ours."""
    authors = Authors(directory)
    lines = [
        "| answer | arm | section of the paper | printed | authors' tables | ours | tolerance |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for answer in read_answers(directory):
        ours = compute(authors, answer)
        lines.append(
            f"| `{answer.name}` | {answer.arm or '–'} | {answer.section} | {answer.printed:g} "
            f"| {answer.recomputed:.6g} | {ours:.6g} | {answer.tolerance:g} |"
        )
    return "\n".join(lines)


def ladder_table(directory: Path) -> str:
    """The published ladders as a Markdown table: our plan of each run, and what was published for it."""
    lines_published = {(row["arm"], row["depth"]): row for row in read_rows(directory / "ladder_recipes.csv")}
    flops = {
        (row["arm"], row["depth"]): row["compute_flops"]
        for table_name in ("fineweb_ladders", "fineweb_edu_ladders")
        for row in read_rows(directory / f"{table_name}.csv")
    }
    lines = [
        "| arm | depth | steps | growth step | learning rate | FLOPs | published, and equal |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for rung in plan_ladders(RecipeChoice()):
        key = (rung.arm.name, str(rung.shape.depth))
        rate = rung.hyperparameters.learning_rate
        found = ["FLOPs"] if rung.flops.total == float(flops[key]) else ["FLOPs DIFFER"]
        if key in lines_published:
            row = lines_published[key]
            growth = int(row["crossover_step"]) if row["crossover_step"] else None
            theirs = (int(row["steps"]), growth, float(row["learning_rate"]))
            equal = theirs == (rung.steps, rung.growth_step, rate)
            found.insert(0, "command line" if equal else "command line DIFFERS")
        growth_step = "–" if rung.growth_step is None else str(rung.growth_step)
        lines.append(
            f"| {key[0]} | {key[1]} | {rung.steps} | {growth_step} | {rate} | {rung.flops.total} "
            f"| {', '.join(found)} |"
        )
    return "\n".join(lines)


def replace_between(text: str, begin: str, end: str, content: str) -> str:
    """The text with what stands between two markers replaced."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Print the tables, or write them into the docs page."""
    parser = argparse.ArgumentParser(description="Recompute the paper's printed numbers.")
    parser.add_argument("directory", type=Path, help="the authors' tables (known_answers.csv and others)")
    parser.add_argument("--write", action="store_true", help=f"replace the tables in {PAGE.name}")
    options = parser.parse_args()
    text, ladders = table(options.directory), ladder_table(options.directory)
    if not options.write:
        print(text, ladders, sep="\n\n")
        return
    page = replace_between(PAGE.read_text(encoding="utf-8"), BEGIN, END, text)
    PAGE.write_text(replace_between(page, LADDERS_BEGIN, LADDERS_END, ladders), encoding="utf-8")


if __name__ == "__main__":
    main()
