"""The paper's figures and tables: printed number, title, LaTeX label, command for own runs, what makes it.

A figure is made of panels of studies, a table of their tables. They are found by the beginning of a panel's
group or title in the answer of a study: that of `PaperStudies`, from the authors' measurements, or of the
reader's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from steepen.errors import UsageError, nearest
from steepen.laws.fits.downstream import MIN_TAU, filter_tasks
from steepen.model.arms import find_arm
from steepen.recipe.flops import stored_parameters
from steepen.recipe.hyperparameters import paper_code, with_paper_code
from steepen.recipe.paper_tables import INITIAL
from steepen.reproduction.paper_studies import MAIN, SWEPT, PaperStudies
from steepen.reproduction.tables import table
from steepen.results.arms import family_panel
from steepen.studies.answer import Answer, Panel, Table
from steepen.studies.preset import load_preset
from steepen.studies.stages.chain_tuning import candidates, has_injection
from steepen.utils.formatting import format_flops, typographic_minus

Shown: TypeAlias = list[Panel | Table]


@dataclass(frozen=True)
class Part:
    """Panels or tables of a study's answer whose group or title begins with one of these words, in order.

    `make` makes them of the answer instead. Without a source they are made of the package alone.
    """

    source: str = ""  # STUDY or STUDY:PART
    words: tuple[str, ...] = ("",)
    count: int | None = None  # the first so many; None: all
    make: Callable[[Answer], Shown] | None = None

    @property
    def study(self) -> str:
        """The study's name in the registry."""
        return self.source.partition(":")[0]

    def show(self, answer: Answer) -> Shown:
        """What it shows of an answer: panels if there are any, else tables."""
        if self.make is not None:
            return self.make(answer)
        named = f"{self.source.partition(':')[2]}: " if self.study == "ablations" else ""
        own: Shown = [*answer.panels, *answer.tables]
        if named:  # of one part; its lead panel has the part's name alone as its group
            own = [one for one in own if f"{_group(one)}: ".startswith(named)]
        found = [
            one
            for word in self.words
            for one in own
            if _group(one).removeprefix(named).startswith(word) or one.title.startswith(word)
        ]
        return [one for one in found if isinstance(one, Panel) == isinstance(found[0], Panel)][: self.count]


def _group(one: Panel | Table) -> str:
    return one.group or one.title if isinstance(one, Panel) else one.title


@dataclass(frozen=True)
class Item:
    """A figure or table of the paper, made of its parts."""

    number: str  # "Figure 16a", "Table 9"
    label: str
    title: str
    command: str  # for one's own runs
    parts: tuple[Part, ...]
    note: str = ""  # how it differs from the printed one

    def show(self, studies: PaperStudies) -> Shown:
        """The item from the authors' measurements."""
        return [one for part in self.parts for one in part.show(studies.get(part.source))]

    def show_own(self, answers: Sequence[Answer]) -> Shown:
        """The item from the answers of one's own studies, as far as they are part of it."""
        if not self.parts[0].source:
            raise UsageError(f"{self.number} shows no runs: leave `data` out.")
        found = [one for part in self.parts for own in answers if own.study == part.study
                 for one in part.show(own)]  # fmt: skip
        if not found:
            given = ", ".join(own.study for own in answers)
            raise UsageError(
                f"{self.number} shows runs of `{self.command}`; `data` ({given}) has none of them."
            )
        return found


def common_setup(_: Answer) -> Shown:
    """The fixed protocol, from the preset."""
    preset = load_preset("paper")
    rows = (
        ("context length (tokens)", preset.context),
        ("vocabulary of GPT-2, padded", 50_304),
        ("global batch (tokens)", preset.batch_tokens),
        ("width per depth", preset.aspect),
        ("optimizer", "Muon for matrices, AdamW for embedding and head"),
    )
    return [Table("Fixed protocol", ("setting", "value"), rows)]


def model_sizes(_: Answer) -> Shown:
    """Depths, splits, executed depths and stored parameters."""
    names = ("vanilla", "loop-grow", "untied-2", "untied-grow")
    rows: list[tuple[Any, ...]] = []
    for depth in range(6, 27, 2):
        split = find_arm("loop-grow").shape(depth).allocation
        executed = (f"{split.prelude + k * split.core + split.coda}" for k in (2, 4))
        counts = (stored_parameters(arm, arm.shape(depth), arm.passes.final) for arm in map(find_arm, names))
        sizes = (f"{n / 1e9:.1f} B" if n >= 9.95e8 else f"{n / 1e7:.0f}0 M" for n in counts)
        blocks = f"{split.prelude}/{split.core}/{split.coda}"
        rows.append((f"d{depth}", blocks, " → ".join(executed), 128 * depth, *sizes))
    columns = ("depth", "P/C/D", "executed", "width", *names)
    return [Table("Stored parameters", columns, tuple(rows))]


def tuning_grid(_: Answer) -> Shown:
    """What the first round of the chain tries, from the paper's initial values."""
    rows = tuple(
        (
            sweep,
            ", ".join(
                f"{value:.4g}" if name == sweep else f"{name}={value:.4g}"
                for name, value in candidates(INITIAL, sweep, 1)
            ),
        )
        for sweep in load_preset("paper").grids.chain.sweeps
    )
    return [Table("First round", ("sweep", "tried besides the current value"), rows)]


def operator_ablations(answer: Answer) -> Shown:
    """The tuned losses of a chain tuning by boundary operators; arms with one pass are left out."""
    arms = [arm for arm in map(find_arm, answer.values) if arm.passes.final > 1]
    rows = tuple(
        (arm.name, arm.core_boundary, arm.coda_boundary, answer.values[arm.name]["loss"]) for arm in arms
    )
    return [Table("Tuned losses", ("arm", "between passes", "before the coda", "tuned loss"), rows)]


def base_hyperparameters(answer: Answer) -> Shown:
    """The tuned hyperparameters of a chain tuning, a column for each arm of the paper's table."""
    arms = [name for name in answer.values if name in SWEPT]
    rows = tuple(
        (
            with_paper_code(name),
            *("–" if name == "injection_weight" and not has_injection(find_arm(arm))
              else f"{answer.values[arm]['hyperparameters'][name]:.3g}" for arm in arms),
        )
        for name in answer.values[arms[0]]["hyperparameters"]
    )  # fmt: skip
    return [Table("Base values", ("hyperparameter", *arms), rows)]


def optimal_tpp(answer: Answer) -> Shown:
    """Optimal tokens per parameter, the test of their drift, and losses at the optima of three budgets."""
    rows = tuple(
        (
            arm,
            fit["mean"],
            round(fit["rounded"]),
            fit["p_scale_shift"],
            *(v["loss"] for v in fit["vertices"][::2]),
        )
        for arm, fit in answer.values.items()
    )
    budgets = (
        f"L* {format_flops(vertex['budget'])}"
        for vertex in next(iter(answer.values.values()))["vertices"][::2]
    )
    columns = ("arm", "TPP*", "rounded", "p", *budgets)
    caption = "TPP*: mean of the optima; p: of no drift with compute; L*: loss at the optimum of a budget."
    return [Table("Compute-optimal tokens per parameter", columns, rows, caption)]


def drift(answer: Answer) -> Shown:
    """Drift exponents, and what a wrong value costs, a column for each hyperparameter."""
    (long,) = (table for table in answer.tables if table.title.startswith("Hyperparameter drift"))
    found: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for arm, recipe, name, beta, error, _, _, regret, spread, _ in long.rows:
        code = paper_code(name.partition(" ")[0]) or name
        slope = typographic_minus(f"{beta:+.2f}" + (f"±{error:.2f}" if error is not None else ""))
        found.setdefault((arm, typographic_minus(recipe)), {})[code] = slope, f"{regret:.1f}/{spread:.1f}"
    codes = list(next(iter(found.values())))
    titles = ("Drift β of the optimum ± standard error", "Regret/range of the loss (×10⁻³)")
    return [
        Table(title, ("arm", "recipe", *codes),
              tuple((*key, *(own[code][i] for code in codes)) for key, own in found.items()))
        for i, title in enumerate(titles)
    ]  # fmt: skip


def ladder_recipes(answer: Answer) -> Shown:
    """The learning-rate rule, tokens per parameter and rungs of every ladder."""
    (long,) = (table for table in answer.tables if table.title == "Recipes of the ladders")
    chosen = [0, 1, 2, 3, 5]
    rows = tuple(tuple(row[i] for i in chosen) for row in long.rows)
    columns = ("arm", "β", "TPP", "ρ", "depths")
    caption = "β: exponent of the learning rate; TPP: tokens per parameter, of a growing arm t_ref."
    return [Table("Recipes of the ladders", columns, rows, caption)]


def task_filter(_: Answer) -> Shown:
    """CORE tasks by type, with the filter's criterion on Vanilla's checkpoints."""
    vanilla = {"corpus": "fineweb", "arm": "vanilla"}
    kinds = {"multiple_choice": "MC", "schema": "SE", "language_modeling": "LM"}
    flops = {row["depth"]: row["compute_flops"] for row in table("core_scores").where(**vanilla)}
    scores = table("core_task_scores").where(**vanilla).by("task")
    rows: list[tuple[Any, ...]] = []
    for task in table("core_tasks"):
        name, own = task["task"], scores[task["task"]]
        training = np.array([flops[depth] for depth in own.column("depth")])
        tau = filter_tasks(training, {name: own.array("centered_accuracy")}, {name: 0.0})[name].tau
        rows.append((name, kinds[task["evaluation_type"]], tau, tau >= MIN_TAU, task["in_17_task_filter"]))
    columns = ("task", "type", "Kendall τ_b", f"≥ {MIN_TAU:.2f}", "kept")
    return [Table("CORE tasks and their filter", columns, tuple(rows), "kept: by the paper's filter.")]


def part(source: str, *words: str, count: int | None = None) -> Part:
    """The panels or tables that begin with these words; all without any."""
    return Part(source, words or ("",), count)


def _ladder(source: str) -> tuple[Part, ...]:
    """Reducible loss and multipliers of some ladders."""
    return (part(source, "Reducible loss", "Compute multiplier over"),)


GRID, CONTROLS = "data-constrained:grid", "data-constrained:controls"
ITEMS = (
    Item("Figure 1", "fig:arch",
         "Model growth, looping, and untied looping are members of one prelude–core–coda family.",
         "steepen arms --figure FILE", (Part(make=lambda _: [family_panel(list(map(find_arm, MAIN)))]),)),
    Item("Figure 2", "fig:main-results",
         "In single-epoch compute-optimal training, model growth and the boundary operator improve the "
         "scaling exponent, and in multi-epoch training the optimal loop count grows with compute.",
         "steepen study ladder; steepen study data-constrained --part grid",
         (part("ladder", "Loss against compute", "Compute multiplier over"),
          part(GRID, "weight decay 0.8", count=1), part(GRID, "compute spent"))),
    Item("Figure 3", "fig:loop-ladder",
         "Model growth and the boundary operator improve the scaling exponent, while untying improves only "
         "the constant.",
         "steepen study ladder",
         (part("ladder", "Loss against compute", "Compute multiplier over", "Exponent against"),)),
    Item("Figure 4", "fig:dep-grow-extrap",
         "The scaling law fitted on 10¹⁸–10²⁰ FLOPs predicts an Untied-Grow run at 8× the fitted compute, "
         "and the compute-efficiency advantage over Vanilla widens with scale.",
         "steepen study extrapolate --score core,nll",
         (part("extrapolate", "Forecasts beyond", "Compute multiplier over vanilla, projected"),)),
    Item("Figure 5", "fig:data-constr-main",
         "In multi-epoch training, the optimal loop count grows with compute, scaling the loop count beats "
         "scaling model size even against tuned weight decay, and looping leaves the optimal weight decay "
         "nearly unchanged.",
         "steepen study data-constrained --part grid", (part(GRID, "Parameters or passes"),)),
    Item("Figure 6", "fig:ladder-kl-eff-depth",
         "Growth and looping raise KL effective depth along the compute-optimal single-epoch ladders, and in "
         "multi-epoch training, scaling the loop count raises KL effective depth faster than scaling depth.",
         "steepen study ladder --score kl-depth; steepen study data-constrained --part grid --score kl-depth",
         (part("ladder", "KL effective depth"), part(GRID, "KL effective depth")),
         "On repeated data only the authors' interpolated curves are published."),
    Item("Table 1", "tab:common-setup", "Fixed architecture and training protocol.",
         "steepen plan --arm vanilla --depth 8", (Part(make=common_setup),)),
    Item("Table 2", "tab:model-sizes", "Model depths, layer splits, executed depths, and stored parameters.",
         "steepen arms --depth N", (Part(make=model_sizes),)),
    Item("Figure 7", "fig:recurrence-design", "Allocation, recurrence, and growth sweeps.",
         "steepen study allocation; steepen study passes --part tokens; steepen study growth-target --score "
         "kl-depth; steepen study growth-fraction --arms loop-grow; steepen study tpp --arms "
         "loop-2,loop-grow",
         (part("allocation"), part("passes:tokens", "tied:"), part("growth-target"),
          part("growth-fraction", "loop-grow"), part("tpp:loop-grow", "loop-grow: loss"))),
    Item("Figure 8", "fig:fresh-loop-optima", "Recurrence choice in fixed-token ladders.",
         "steepen study passes --part tokens", (part("passes:tokens", "Passes in ladders"),)),
    Item("Figure 9", "fig:tpl", "Recurrence choice at fixed anchor size and compute.",
         "steepen study passes --part anchor",
         (part("passes:anchor", "tied: passes at", "tied: the best", "untied: passes at",
                 "untied: the best"),)),
    Item("Figure 10a", "fig:opt-grow-tied", "Tied growth: Loop-Grow",
         "steepen study growth-timing --arms loop-grow", (part("growth-timing:loop-grow", "loop-grow"),)),
    Item("Figure 10b", "fig:opt-grow-untied", "Untied growth: Untied-Grow",
         "steepen study growth-timing --arms untied-grow",
         (part("growth-timing:untied-grow", "untied-grow"),)),
    Item("Figure 10c", "fig:opt-grow-deepvan", "Deep Vanilla Grow",
         "steepen study growth-fraction --arms deep-vanilla-grow",
         (part("growth-fraction", "deep-vanilla-grow"),)),
    Item("Figure 10d", "fig:opt-grow-tokens", "Token allocation and growth prescription",
         "steepen study tpp --arms loop-2,loop-grow; steepen study tpp --arms untied-2,untied-grow; steepen "
         "study ablations --part growth",
         (part("tpp:loop-grow", "loop-grow: loss against 6"),
          part("tpp:untied-grow", "untied-grow: loss against 6"),
          part("ablations:growth", "Compute multiplier over"))),
    Item("Figure 11", "fig:base-tuning", "Chain tuning at d8 on 1B tokens.",
         "steepen study chain-tuning --arms A,B", (part("chain-tuning", "The chain of sweeps"),),
         "The values tried are not published, only their losses."),
    Item("Table 3", "tab:base-tuning-grid", "Tuning Grid for Chain Tuning.",
         "steepen study chain-tuning --dry-run", (Part(make=tuning_grid),)),
    Item("Table 4", "tab:base-tuning-operators", "Boundary-operator ablations at the base size.",
         "steepen study chain-tuning --arms A,B", (Part("chain-tuning", make=operator_ablations),),
         "Runtimes are not published."),
    Item("Table 5", "tab:tuned-hyperparameters", "Base-tuned hyperparameters by architecture.",
         "steepen study chain-tuning --arms A,B", (Part("chain-tuning", make=base_hyperparameters),)),
    Item("Table 6", "tab:base-tuning-transfer", "Transfer probe from the Vanilla recipe.",
         "steepen study transfer --part probe", (part("transfer:probe", "Transfer probe"),),
         "Deep Vanilla's transfer run is not published; Vanilla's −0.3 is a second run of its recipe."),
    Item("Figure 12", "fig:tpp-curves", "Iso-compute TPP fits and fitted scaling laws.",
         "steepen study tpp --arms vanilla,loop-2,untied-2",
         (part("tpp", "vanilla: loss", "loop-2: loss", "untied-2: loss", "Loss at the optimum",
                 "Optimal tokens"),)),
    Item("Table 7", "tab:arch-optimal-tpp", "Compute-optimal TPP by architecture.",
         "steepen study tpp --arms A,B", (Part("tpp", make=optimal_tpp),)),
    Item("Figure 13", "fig:opt-grow-fits", "Choosing a fixed growth fraction.",
         "steepen study growth-fraction --arms A,B",
         (part("growth-fraction", "deep-vanilla-grow", "loop-grow", "untied-grow"),)),
    Item("Figure 14a", "fig:hyper1d", "Vanilla hyperparameter sensitivity across scale",
         "steepen study lr-rule --part screen", (part("lr-rule:screen", "vanilla, screen: one"),)),
    Item("Figure 14b", "fig:hp-slice", "Architecture-specific sweeps under constant and scaled recipes",
         "steepen study lr-rule --arms A,B",
         (part("lr-rule:drift", *(f"{arm}: one hyperparameter" for arm in (
             "vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow"))),)),
    Item("Table 8", "tab:hp-drift", "Fitted hyperparameter drift and sensitivity.",
         "steepen study lr-rule --arms A,B", (Part("lr-rule:drift", make=drift),),
         "An optimum outside its sweep has no part in β here (RM of Vanilla); regret and range of Vanilla's "
         "and Loop-2's constant recipes are printed of larger sizes, which are not published."),
    Item("Table 9", "tab:full-ladder-recipes", "Recipes used for the reported ladders.",
         "steepen study ladder", (Part("ladder", make=ladder_recipes),)),
    Item("Figure 15a", "fig:ladder-arch", "Architecture ablations",
         "steepen study ablations --part operator --part allocation",
         (*_ladder("ablations:operator"), *_ladder("ablations:allocation"))),
    Item("Figure 15b", "fig:ladder-runtime", "Major variants by runtime", "steepen study ladder",
         (part("ladder", "Loss against time", "Time multiplier"),)),
    Item("Figure 15c", "fig:ladder-constant", "Constant recipes", "steepen study ablations --part constant",
         _ladder("ablations:constant")),
    Item("Figure 16a", "fig:ladder-vanilla-scaling", "Vanilla hyperparameter scaling",
         "steepen study ablations --part hyperparameters", _ladder("ablations:hyperparameters")),
    Item("Figure 16b", "fig:ladder-inject-1-van-recipe", "Operator-1 recipe ablations",
         "steepen study transfer --part ladder --arms operator-1", _ladder("transfer:ladder")),
    Item("Figure 16c", "fig:ladder-shape", "Depth-to-width ratio",
         "steepen study ablations --part shape", _ladder("ablations:shape")),
    Item("Figure 16d", "fig:ladder-rand", "Random recurrence",
         "steepen study ablations --part random", _ladder("ablations:random")),
    Item("Figure 16e", "fig:ladder-width-only", "Width-only versus width/depth scaling",
         "steepen study ablations --part width-only --part width-and-depth",
         (*_ladder("ablations:width-only"), *_ladder("ablations:width-and-depth"))),
    Item("Figure 16f", "fig:ladder-optimizers", "Muon versus Adam",
         "steepen study ablations --part optimizer",
         (*_ladder("ablations:optimizer, width only"), *_ladder("ablations:optimizer, width and depth"))),
    Item("Figure 17", "fig:loop-exit", "Sensitivity to evaluation recurrence.",
         "steepen study ladder --score passes; steepen study ablations --part random --score passes",
         (part("ladder", "Loss at other numbers"), part("ablations:random", "random-loop-grow"))),
    Item("Figure 18a", "fig:data-compare", "Architecture gains on FineWeb and FineWeb-Edu",
         "steepen downstream RUNS_A RUNS_B --arms vanilla,untied-grow",
         (part("downstream", "Scores along the ladders", "Multipliers within"),)),
    Item("Figure 18b", "fig:dataset-comparison", "Corpus comparison",
         "steepen downstream RUNS_A RUNS_B --arms vanilla,untied-grow",
         (part("downstream", "Corpora compared: untied-grow"),)),
    Item("Table 10", "tab:core-eval-type", "DCLM CORE tasks and evaluation types.",
         "steepen eval filter RUNS", (Part(make=task_filter),),
         "The other criterion needs raw accuracies, which are not published."),
    Item("Figure 19a", "fig:downstream-major", "Downstream scaling ladders",
         "steepen study ladder --score core,nll",
         (part("ladder", "Scores along", "Compute multipliers at"),)),
    Item("Figure 19b", "fig:core-vs-nll", "CORE NLL fits",
         "steepen study ladder --score core,nll", (part("ladder", "Answer NLL against"),)),
    Item("Figure 19c", "fig:matched-loss-task-bars", "Mean task residuals by architecture",
         "steepen study ladder --score core,nll", (part("ladder", "Task NLL about"),)),
    Item("Figure 20", "fig:sigmoids-linear-fits",
         "FineWeb-Edu calibration for the architecture comparison.",
         "steepen study extrapolate --score core,nll", (part("extrapolate", "From task"),)),
    Item("Figure 21", "fig:data-constr-regimes", "Recurrence across data-repetition regimes.",
         "steepen study data-constrained --part regimes",
         (part("data-constrained:regimes", "Passes under repetition"),)),
    Item("Figure 22", "fig:data-constr-wd", "Weight decay moderates the preference for recurrence.",
         "steepen study data-constrained --part grid", (part(GRID, "Passes at each"),)),
    Item("Figure 23", "fig:hyper-sensitivity",
         "Hyperparameter sensitivity to stored depth and recurrence.",
         "steepen study data-constrained --part grid; steepen study passes --part hyperparameters",
         (part(GRID, "Weight decay at each"), part("passes:hyperparameters", "Hyperparameters at other"))),
    Item("Figure 24", "fig:data-constr-arch", "Architecture controls under data repetition.",
         "steepen study data-constrained --part controls", (part(CONTROLS, "Controls", count=6),)),
)  # fmt: skip


def find_item(kind: str, number: str) -> Item:
    """The item of a printed number or LaTeX label; raises UsageError for a figure that has subfigures."""
    wanted = f"{kind.capitalize()} {number.strip().lower()}"
    found = next((item for item in ITEMS if item.number == wanted or item.label == number), None)
    if found is None:
        numbers = [
            item.number.partition(" ")[2] for item in ITEMS if item.number.startswith(kind.capitalize())
        ]
        parts = [own for own in numbers if own[:-1] == number.strip()]
        if parts:
            raise UsageError(f"{wanted} has subfigures: give one of {', '.join(parts)}.")
        raise UsageError(f"the paper has no {kind} {number!r}; the nearest are {nearest(number, numbers)}.")
    return found
