"""The numbers that the paper prints, computed from its authors' measurements with this package's fits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import AnalysisRequest, ComputeFit, ReferenceLaw
from steepen.laws.fits.downstream import Checkpoints, DownstreamFit, filter_tasks, fit_downstream, score_ratio
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, fit_isoflop, fit_power_law
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.verdict.multipliers import interpolated_multipliers
from steepen.reproduction.paper_studies import DECAY, PaperStudies
from steepen.reproduction.replay import tuning_sweeps
from steepen.reproduction.tables import Row, table
from steepen.studies.design.matched_compute import envelope_compute, slice_families
from steepen.studies.drift import AffineLaw, fit_affine, fit_growth_fraction
from steepen.studies.stages.chain_tuning import replay_chain
from steepen.utils.rows import Rows

FINEWEB, EDU, ABLATIONS = "fineweb_ladders", "fineweb_edu_ladders", "ablation_ladders"
SMALL, TOP = 8, 20  # Vanilla depths that cost about 1e18 and 1e20 FLOPs
LARGEST = 26  # depth of the run that the forecasts leave out


@dataclass(frozen=True)
class Claim:
    """A printed number; `recomputed` is what the authors' procedure gives for their tables, where known."""

    name: str
    arm: str
    item: str  # the figure or table that shows it, by its printed number
    printed: float
    tolerance: float
    compute: Callable[[PaperStudies], float]
    recomputed: float | None = None


def within_ladders(name: str) -> Rows[Row]:
    """A table without the largest run."""
    return Rows(row for row in table(name) if row["depth"] < LARGEST)


@functools.cache
def ladders(name: str, loss: str = "val_loss") -> dict[str, Ladder]:
    """The ladders of a table, without the largest run."""
    rows = within_ladders(name)
    arms = {arm: rows.where(arm=arm) for arm in dict.fromkeys(rows.column("arm"))}
    return {arm: make_ladder(arm, own.array("compute_flops"), own.array(loss)) for arm, own in arms.items()}


@functools.cache
def laws(name: str, reference_law: ReferenceLaw = "regression") -> ComputeFit:
    """The compute laws of every arm of a table by the paper's method."""
    return fit_compute(ladders(name), AnalysisRequest("vanilla", method="paper", reference_law=reference_law))


def multiplier(name: str, arm: str, depth: int) -> float:
    """The interpolated multiplier of an arm at the budget of Vanilla at a depth."""
    (vanilla,) = table(name).where(arm="vanilla", depth=depth)
    found = interpolated_multipliers(ladders(name)["vanilla"], ladders(name)[arm])
    return next(m.value for m in found if math.isclose(m.flops, vanilla["compute_flops"]))


def multiplier_over(arm: str, over: str, depth: int) -> float:
    """How many times the multiplier of one arm is another's."""
    return multiplier(FINEWEB, arm, depth) / multiplier(FINEWEB, over, depth)


def largest(name: str) -> float:
    """A measurement of the largest run."""
    return table(EDU).where(depth=LARGEST)[0][name]


def projected_multiplier(arm: str, flops: float) -> float:
    """Fitted laws at a Vanilla budget: the budget over the arm's compute for the same loss."""
    own = laws(EDU, "free-fit").arms
    return flops / float(own[arm].compute_for(own["vanilla"].predict(flops)))


def projected_at_own_budget(arm: str, flops: float) -> float:
    """Fitted laws at the arm's budget: Vanilla's compute for the arm's loss over that budget."""
    own = laws(EDU, "free-fit").arms
    return float(own["vanilla"].compute_for(own[arm].predict(flops))) / flops


def nll_forecast_error(arm: str) -> float:
    """Measured minus forecast answer NLL of the largest run, by the arm's own three-parameter law."""
    settings = AnalysisRequest(arm, method="paper", reference_law="free-fit")
    fit = fit_compute({arm: ladders(EDU, "answer_nll")[arm]}, settings)
    return largest("answer_nll") - float(fit.arms[arm].predict(largest("compute_flops")))


@functools.cache
def checkpoints(corpus: str, arm: str) -> Checkpoints:
    """Task scores of an arm's ladder."""
    scores, tasks = (
        Rows(sorted(within_ladders(name).where(corpus=corpus, arm=arm), key=lambda row: row["depth"]))
        for name in ("core_scores", "core_task_scores")
    )
    by_task = tasks.by("task")
    return Checkpoints(
        scores.array("compute_flops"),
        {task: rows.array("answer_nll") for task, rows in by_task.items()},
        {task: rows.array("centered_accuracy") for task, rows in by_task.items()},
        scores.array("core_accuracy"),
    )


@functools.cache
def core_forecast() -> DownstreamFit:
    """The forecast of CORE on FineWeb-Edu."""
    tasks = table("core_tasks").where(in_17_task_filter=True).column("task")
    return fit_downstream({arm: checkpoints("fineweb-edu", arm) for arm in ("vanilla", "untied-grow")}, tasks)


def core_compute_ratio(arm: str, score: float) -> float:
    """Vanilla's compute over the arm's at which CORE is forecast to reach a score."""
    return core_forecast().compute_for("vanilla", score) / core_forecast().compute_for(arm, score)


def core_ratio_of_corpora(arm: str) -> float:
    """The ratio of the full score to the mean of the 17 tasks, of the arm on both corpora."""
    rows = within_ladders("core_scores").where(arm=arm)
    return score_ratio(rows.array("core17_accuracy"), rows.array("core_accuracy"))


def kendall_tau(arm: str, task: str) -> float:
    """τ_b of a task's accuracy with compute on FineWeb."""
    runs = checkpoints("fineweb", arm)
    return filter_tasks(runs.flops, {task: runs.centered[task]}, {task: 0.0})[task].tau


@functools.cache
def optimal_tpp(arm: str) -> IsoflopFit:
    """Optimal tokens per parameter of an arm at every budget."""
    sweeps = table("tpp_sweeps").where(arm=arm).by("budget")
    budget = [own.array("matrix_flops").mean() for own in sweeps.values() for _ in own]
    rows = Rows(row for own in sweeps.values() for row in own)
    return fit_isoflop(np.array(budget), rows.array("tpp"), rows.array("val_loss"))


def vertex_loss(arm: str, budget: int) -> float:
    """The loss at the optimal tokens per parameter of a budget named by a depth."""
    return optimal_tpp(arm).vertices[list(table("tpp_sweeps").where(arm=arm).by("budget")).index(budget)].loss


def mean_token_allocation(arm: str) -> float:
    """The mean optimum of 6·T²/C over budgets."""
    rows = table("token_allocation").where(arm=arm)
    return fit_isoflop(*(rows.array(n) for n in ("budget", "six_t_squared_over_c", "val_loss"))).mean


@functools.cache
def growth_optima(arm: str) -> dict[tuple[float, int], Vertex]:
    """The optimal growth fraction at every (budget, depth), where it is inside the sweep."""
    if arm == "deep-vanilla-grow":
        sweeps = {(d, d): own for d, own in table("growth_timing_deep_vanilla").by("depth").items()}
    else:
        sweeps = table("growth_timing").where(arm=arm).by("budget", "depth")
    vertices = {
        key: fit_growth_fraction(np.ones(len(own)), own.array("rho"), own.array("val_loss")).vertices[0]
        for key, own in sweeps.items()
    }
    return {key: vertex for key, vertex in vertices.items() if vertex.interior}


def mean_optimal_rho(arm: str) -> float:
    """The mean optimal growth fraction over anchors at their own budget."""
    return float(np.mean([v.x for (budget, depth), v in growth_optima(arm).items() if budget == depth]))


@functools.cache
def growth_law(arm: str) -> AffineLaw:
    """Tokens per initial parameter at the optimal growth fraction against those without growth."""
    without: list[float] = []
    best: list[float] = []
    for (budget, depth), vertex in growth_optima(arm).items():
        rows = table("growth_timing").where(arm=arm, budget=budget, depth=depth)
        rows = Rows(sorted(rows, key=lambda row: row["rho"]))
        tpp = rows.array("tokens") / rows[0]["params_stored"]
        without.append(tpp[0])
        best.append(float(np.interp(vertex.x, rows.array("rho"), tpp)))
    return fit_affine(np.array(without), np.array(best))


@functools.cache
def passes_laws(family: str) -> tuple[PowerLawFit, PowerLawFit]:
    """Expansion and tokens per parameter at the best number of passes, against TPP at one pass."""
    found: list[tuple[float, float, float]] = []
    for own in table("fixed_anchor_passes").where(family=family).by("anchor", "budget").values():
        rows = Rows(sorted(own, key=lambda row: row["loops"]))
        passes, active, tpp = (rows.array(name) for name in ("loops", "params_compute", "tpp"))
        if len(rows) < 3 or not (vertex := find_vertex(passes, rows.array("val_loss"))).bracketed:
            continue
        # The expansion is linear in K; tokens per parameter are interpolated log–log, as the authors did.
        log_tpp = np.interp(math.log(vertex.x), np.log(passes), np.log(tpp))
        found.append((tpp[0], float(np.interp(vertex.x, passes, active / active[0])), math.exp(log_tpp)))
    x, expansion, best = np.array(found).T
    return fit_power_law(x, expansion), fit_power_law(x, best)


def loops_at(rounded: float) -> tuple[Vertex, float]:
    """The best number of passes at a budget, and its gain over one pass.

    The paper rounds its budgets; their digits are in the table of effective depths at the same budgets.
    """
    budgets = table("effective_depth_multi_epoch").column("compute_flops")
    budget = min(budgets, key=lambda exact: abs(exact - rounded))
    families = {
        float(loops): make_ladder(str(loops), own.array("matrix_flops"), own.array("val_loss"))
        for loops, own in table("data_constrained_grid").where(weight_decay=DECAY).by("loops").items()
    }
    (cut,) = slice_families(families, np.array([budget]))
    assert cut.best is not None
    return cut.best, cut.losses[1.0] - cut.best.loss


def best_model_size() -> Row:
    """The best run with one pass, over all sizes and weight decays."""
    return min(table("data_constrained_grid").where(loops=1), key=lambda row: row["val_loss"])


def loops_over_model_size() -> float:
    """Compute of the best model with one pass over that of the frontier of all passes at the same loss."""
    best, runs = best_model_size(), table("data_constrained_grid").where(weight_decay=DECAY)
    needed = envelope_compute(runs.array("matrix_flops"), runs.array("val_loss"), best["val_loss"])
    return best["matrix_flops"] / needed


def confirmation(recipe: str, arm: str) -> float | None:
    """The loss of an arm's confirmation run with its own recipe or Vanilla's."""
    found = table("base_tuning_confirmations").where(arm=arm, recipe=recipe).column("val_loss")
    return found[0] if found else None


def transfer_regret(arm: str) -> float:
    """What Vanilla's recipe costs an arm, in 1e-3 of loss."""
    own, vanilla = (confirmation(recipe, arm) for recipe in ("own", "vanilla"))
    assert own is not None and vanilla is not None
    return 1e3 * (vanilla - own)


def tuned_loss(arm: str) -> float:
    """The confirmation run where there is one, else the loss at the end of the replayed chain."""
    confirmed = confirmation("own", arm)
    if confirmed is not None:
        return confirmed
    return replay_chain((one.incumbent, one.tries) for one in tuning_sweeps(arm))[0]


def passes_gap(arm: str) -> list[float]:
    """L(8 passes) − L(4 passes) at test time, at every size."""
    own = table("passes_at_test_time").where(arm=arm)
    at = {k: {row["depth"]: row["val_loss"] for row in own.where(eval_passes=k)} for k in (4, 8)}
    return [at[8][depth] - at[4][depth] for depth in at[8]]


Compute = Callable[[str], float]  # of an arm, or of a family of arms
# The names of known_answers.csv: the figure or table that shows the number, and how it is computed.
KNOWN: dict[str, tuple[str, Compute]] = {
    "exponent": ("Figure 3", lambda arm: laws(FINEWEB).arms[arm].gamma.value),
    "multiplier_1e18": ("Figure 3", lambda arm: multiplier(FINEWEB, arm, SMALL)),
    "multiplier_1e20": ("Figure 3", lambda arm: multiplier(FINEWEB, arm, TOP)),
    "multiplier_flat": ("Figure 3", lambda arm: multiplier(FINEWEB, arm, TOP)),
    "growth_over_untied_1e18": ("Figure 3", lambda arm: multiplier_over(arm, "untied-2", SMALL)),
    "growth_over_untied_1e20": ("Figure 3", lambda arm: multiplier_over(arm, "untied-2", TOP)),
    "untied_over_tied_1e18": ("Figure 3", lambda arm: multiplier_over(arm, "loop-2", SMALL)),
    "untied_over_tied_1e20": ("Figure 3", lambda arm: multiplier_over(arm, "loop-2", TOP)),
    "untied_over_tied_grow_1e18": ("Figure 3", lambda arm: multiplier_over(arm, "loop-grow", SMALL)),
    "untied_over_tied_grow_1e20": ("Figure 3", lambda arm: multiplier_over(arm, "loop-grow", TOP)),
    "multiplier_1e20_ablation": ("Figure 15a", lambda arm: multiplier(ABLATIONS, arm, TOP)),
    "loss_k8_minus_k4_min": ("Figure 17", lambda arm: min(passes_gap(arm))),
    "loss_k8_minus_k4_max": ("Figure 17", lambda arm: max(passes_gap(arm))),
    "exponent_edu": ("Figure 18a", lambda arm: laws(EDU).arms[arm].gamma.value),
    "d26_loss_forecast_minus_measured": (
        "Figure 4",
        lambda arm: float(laws(EDU).arms[arm].predict(largest("compute_flops"))) - largest("val_loss"),
    ),
    "projected_multiplier_1e20": ("Figure 4", lambda arm: projected_multiplier(arm, 1e20)),
    "projected_multiplier_d26": (
        "Figure 4", lambda arm: projected_at_own_budget(arm, largest("compute_flops"))
    ),
    "projected_multiplier_1e25": ("Figure 4", lambda arm: projected_multiplier(arm, 1e25)),
    "d26_nll_forecast_error": ("Figure 4", nll_forecast_error),
    "d26_core_accuracy": ("Figure 4", lambda _: largest("core_accuracy")),
    "d26_core_accuracy_std": ("Figure 4", lambda _: largest("core_accuracy_std")),
    "core_forecast_d26": (
        "Figure 4", lambda arm: float(core_forecast().predict(arm, largest("compute_flops"))[0])
    ),
    "core_ratio_full_to_17": ("Figure 20", lambda _: core_forecast().r),
    "core_ratio_full_to_17_corpus": ("Figure 18b", lambda _: core_ratio_of_corpora("untied-grow")),
    "core_compute_ratio_at_0.329": ("Figure 4", lambda arm: core_compute_ratio(arm, 0.329)),
    "core_compute_ratio_at_0.427": ("Figure 4", lambda arm: core_compute_ratio(arm, 0.427)),
    **{
        f"kendall_tau_{task}": ("Table 10", functools.partial(kendall_tau, task=task))
        for task in (
            "commonsense_qa", "boolq", "bigbench_language_identification", "bigbench_cs_algorithms",
            "bigbench_repeat_copy_logic",
        )
    },
    "mean_optimal_tpp": ("Table 7", lambda arm: optimal_tpp(arm).mean),
    "tpp_shift_p": ("Table 7", lambda arm: optimal_tpp(arm).to_dict()["p_scale_shift"]),
    "vertex_loss_d8": ("Table 7", lambda arm: vertex_loss(arm, 8)),
    "vertex_loss_d10": ("Table 7", lambda arm: vertex_loss(arm, 10)),
    "vertex_loss_d12": ("Table 7", lambda arm: vertex_loss(arm, 12)),
    "affine_a": ("Figure 10", lambda arm: growth_law(arm).a),
    "affine_b": ("Figure 10", lambda arm: growth_law(arm).b),
    "mean_optimal_rho": ("Figure 13", mean_optimal_rho),
    "optimal_rho_d8": ("Figure 13", lambda arm: growth_optima(arm)[8, 8].x),
    "optimal_rho_d9": ("Figure 13", lambda arm: growth_optima(arm)[9, 9].x),
    "optimal_rho_d10": ("Figure 13", lambda arm: growth_optima(arm)[10, 10].x),
    "mean_optimal_6t2_over_c": ("Figure 10d", mean_token_allocation),
    "fixed_anchor_expansion_factor": ("Figure 9", lambda family: passes_laws(family)[0].coefficient),
    "fixed_anchor_expansion_exponent": ("Figure 9", lambda family: passes_laws(family)[0].exponent),
    "fixed_anchor_tpp_factor": ("Figure 9", lambda family: passes_laws(family)[1].coefficient),
    "fixed_anchor_tpp_exponent": ("Figure 9", lambda family: passes_laws(family)[1].exponent),
    "optimal_loops_at_8.46e+17": ("Figure 5", lambda _: loops_at(8.46e17)[0].x),
    "gap_to_one_loop_at_8.46e+17": ("Figure 5", lambda _: loops_at(8.46e17)[1]),
    "optimal_loops_at_6.7e+18": ("Figure 5", lambda _: loops_at(6.7e18)[0].x),
    "gap_to_one_loop_at_6.7e+18": ("Figure 5", lambda _: loops_at(6.7e18)[1]),
    "best_tuned_model_size_loss": ("Figure 5", lambda _: best_model_size()["val_loss"]),
    "loops_over_model_size": ("Figure 5", lambda _: loops_over_model_size()),
    "transfer_regret_1e-3": ("Table 6", transfer_regret),
    "tuned_loss": ("Table 4", tuned_loss),
}  # fmt: skip


def _top_depth(arm: str) -> Callable[[PaperStudies], float]:
    def found(studies: PaperStudies) -> float:
        panels = (p for p in studies.get("ladder").panels if p.title.startswith("KL effective"))
        return next(s for p in panels for s in p.series if s.arm == arm).y[-1]

    return found


def _corpus_ratio(studies: PaperStudies) -> list[float]:
    """Compute on FineWeb over FineWeb-Edu at which Untied Grow is forecast to reach the GPT-3 scores."""
    crossings = studies.get("downstream").values["corpora of untied-grow"]["crossings"]
    fineweb, edu = (f"untied-grow (corpus {name})" for name in ("fineweb", "fineweb-edu"))
    return [own[fineweb] / own[edu] for own in crossings.values()]


def _largest_change(source: str, *variants: str) -> Callable[[PaperStudies], float]:
    """The largest |multiplier − 1| of some variants of a ladder."""

    def found(studies: PaperStudies) -> float:
        values = studies.get(source).values
        arms: dict[str, Any] = values.get("growth", values)["flops"]["arms"]
        return max(
            abs(m["value"] - 1)
            for name, arm in arms.items()
            if any(variant in name for variant in variants)
            for m in arm["multipliers"]
            if m["method"] == "interpolated"
        )

    return found


def _value(source: str, *path: str) -> Callable[[PaperStudies], float]:
    """A number in the values of a study's answer."""

    def found(studies: PaperStudies) -> float:
        value: Any = studies.get(source).values
        for key in path:
            value = value[key]
        return value

    return found


CONTROL = "control untied with the operator"
# Conclusions that the studies state, besides the known answers.
STUDIED = (
    *(Claim("kl_effective_depth_at_the_top", arm, "Figure 6", depth, 0, _top_depth(arm))
      for arm, depth in (("deep-vanilla", 20), ("untied-2", 24), ("untied-grow", 36))),
    Claim("corpus_ratio_min", "untied-grow", "Figure 18b", 1.5, 0.05, lambda s: min(_corpus_ratio(s))),
    Claim("corpus_ratio_max", "untied-grow", "Figure 18b", 1.6, 0.05, lambda s: max(_corpus_ratio(s))),
    *(Claim("learning_rate_exponent", arm, "Figure 14b", beta, 0.001,
            _value("lr-rule:drift", "rules", arm, "learning_rate_exponent"))
      for arm, beta in (("vanilla", -0.8), ("operator-1", -0.6), ("loop-2", -0.6), ("untied-2", -0.7),
                        ("loop-grow", -0.5), ("untied-grow", -0.6))),
    Claim("retuned_decay_lowers_frontier_by", "", "Figure 5", 0.02, 0.002,
          _value("data-constrained:grid", "decay", "retuning_lowers_frontier_by")),
    Claim("small_budgets_where_untied_is_better", "", "Figure 24", 2, 0, lambda s: sum(
        gap < 0
        for _, gap in s.get("data-constrained:controls").values[CONTROL]["above_tied_with_operator"])),
    Claim("largest_best_passes_on_fresh_data", "", "Figure 21", 2, 0.3, lambda s: max(
        one["best"]
        for one in s.get("data-constrained:regimes").values["regime 1"]["slices"] if one["best"])),
    Claim("best_growth_target", "loop-grow", "Figure 7", 4, 0, _value("growth-target", "target")),
    Claim("largest_change_by_scaling_om_or_wd", "vanilla", "Figure 16a", 0.03, 0.01,
          _largest_change("ablations:hyperparameters", "output multiplier scaled", "weight decay scaled")),
    Claim("largest_change_by_tpp_6", "untied-grow", "Figure 10d", 0.05, 0.01,
          _largest_change("ablations:growth", "TPP 6")),
)  # fmt: skip


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Every number: those of known_answers.csv in its order, then those that the studies state."""
    known: list[Claim] = []
    for row in table("known_answers"):
        item, compute = KNOWN[row["name"]]
        arm = row["arm"] or ""
        if item == "Figure 10":  # the growth law has a subfigure for each arm
            item = "Figure 10a" if arm == "loop-grow" else "Figure 10b"
        known.append(
            Claim(
                row["name"], arm, item, float(row["printed"]), float(row["tolerance"]),
                lambda _, arm=arm, compute=compute: float(compute(arm)), float(row["recomputed"]),
            )
        )  # fmt: skip
    return (*known, *STUDIED)
