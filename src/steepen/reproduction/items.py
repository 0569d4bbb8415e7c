"""The paper's figures and tables: printed number, title, LaTeX label, command for own runs, what makes it.

A figure is made of panels of studies, a table of their tables (assets/items.yaml). They are found by the
beginning of a panel's group or title in the answer of a study: that of `PaperStudies`, from the authors'
measurements, or of the reader's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from steepen.utils.codec import from_builtins
from steepen.utils.files import read_text
from steepen.utils.formatting import format_flops, typographic_minus
from steepen.utils.yaml_io import load_yaml

FILE = Path(__file__).parent / "assets" / "items.yaml"
Shown: TypeAlias = list[Panel | Table]


@dataclass(frozen=True)
class Part:
    """Panels or tables of a study's answer whose group or title begins with one of these words, in order.

    `make` in `MAKERS` makes them of the answer instead. Without a source they are made of the package alone.
    """

    source: str = ""  # STUDY or STUDY:PART
    words: tuple[str, ...] = ("",)
    count: int | None = None  # the first so many; None: all
    make: str = ""

    @property
    def study(self) -> str:
        """The study's name in the registry."""
        return self.source.partition(":")[0]

    def show(self, answer: Answer) -> Shown:
        """What it shows of an answer: panels if there are any, else tables."""
        if self.make:
            return MAKERS[self.make](answer)
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
    rows: list[tuple[str, str]] = []
    for sweep in load_preset("paper").grids.chain.sweeps:
        tried = candidates(INITIAL, sweep, 1)
        words = (f"{value:.4g}" if name == sweep else f"{name}={value:.4g}" for name, value in tried)
        rows.append((sweep, ", ".join(words)))
    return [Table("First round", ("sweep", "tried besides the current value"), tuple(rows))]


def operator_ablations(answer: Answer) -> Shown:
    """The tuned losses of a chain tuning by boundary operators; arms with one pass are left out."""
    rows = tuple(
        (arm.name, arm.core_boundary, arm.coda_boundary, answer.values[arm.name]["loss"])
        for arm in map(find_arm, answer.values)
        if arm.passes.final > 1
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
    some = {arm: fit["vertices"][::2] for arm, fit in answer.values.items()}
    rows = tuple(
        (arm, fit["mean"], round(fit["rounded"]), fit["p_scale_shift"], *(v["loss"] for v in some[arm]))
        for arm, fit in answer.values.items()
    )
    budgets = (f"L* {format_flops(vertex['budget'])}" for vertex in next(iter(some.values())))
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
    rows = tuple(tuple(row[i] for i in (0, 1, 2, 3, 5)) for row in long.rows)
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


def family(_: Answer) -> Shown:
    """The blocks of the main arms."""
    return [family_panel(list(map(find_arm, MAIN)))]


MAKERS: dict[str, Callable[[Answer], Shown]] = {
    make.__name__: make
    for make in (
        family, common_setup, model_sizes, tuning_grid, operator_ablations, base_hyperparameters, optimal_tpp,
        drift, ladder_recipes, task_filter,
    )
}  # fmt: skip
ITEMS = from_builtins(tuple[Item, ...], load_yaml(read_text(FILE)), FILE.name)


def find_item(kind: str, number: str) -> Item:
    """The item of a printed number or LaTeX label; raises UsageError for a figure that has subfigures."""
    wanted = f"{kind.capitalize()} {number.strip().lower()}"
    found = next((item for item in ITEMS if item.number == wanted or item.label == number), None)
    if found is not None:
        return found
    own = (item.number.partition(" ") for item in ITEMS)
    numbers = [one for word, _, one in own if word == kind.capitalize()]
    if parts := [one for one in numbers if one[:-1] == number.strip()]:
        raise UsageError(f"{wanted} has subfigures: give one of {', '.join(parts)}.")
    raise UsageError(f"the paper has no {kind} {number!r}; the nearest are {nearest(number, numbers)}.")
