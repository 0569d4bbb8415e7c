"""Build every figure and table of the paper from its authors' measurements.

    python benchmarks/paper_figures.py TABLES OUT [--only loop-ladder,tpp-curves] [--draws 200]

TABLES holds the authors' CSV tables. Each study of the paper is driven at preset `paper` with the losses and
scores that the authors measured for the runs it asks for (`authors_replay.py`, `paper_studies.py`), so
figures come from the studies' own analysis and the report's own drawing. OUT gets `figures/` (a PNG for each
figure), `tables/` (CSV), `runs/` and `studies/` (for `steepen report`), and `conclusions.md`: the paper's
printed conclusions beside ours. The exit status is 1 if one is outside its tolerance or a figure could not be
built.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from authors_replay import Tables
from paper_conclusions import conclusions
from paper_studies import PaperStudies

from steepen.model.arms import ARMS
from steepen.report.figure import figure_files
from steepen.results.render import to_csv
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer, Panel, Table
from steepen.studies.driver.journal import Journal
from steepen.studies.ladders import ladder_runs
from steepen.utils.files import write_atomically
from steepen.utils.json_io import write_json

TITLES = {name: arm.title for name, arm in ARMS.items()}


@dataclass
class Built:
    """Answers of the studies, each made when it is first needed."""

    studies: PaperStudies
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def get(self, name: str) -> Answer:
        """The answer of a study, named as a method of `PaperStudies`, with its argument after a colon."""
        if name not in self.answers:
            begun = time.monotonic()
            method, _, argument = name.partition(":")
            if method == "corpora":  # reads the records of these
                for needed in ("ladder", "extrapolate"):
                    self.get(needed)
            self.answers[name] = getattr(self.studies, method)(*([argument] if argument else []))
            self.seconds[name] = time.monotonic() - begun
        return self.answers[name]

    def panels(self, name: str, *wanted: str) -> list[Panel]:
        """Panels whose group or title begins with one of these words; all without any."""
        own = self.get(name).panels
        if not wanted:
            return list(own)
        found = [
            panel
            for word in wanted
            for panel in own
            if panel.group.startswith(word) or panel.title.startswith(word)
        ]
        if not found:
            raise LookupError(
                f"{name} has no panel {wanted}; it has {sorted({p.group or p.title for p in own})}"
            )
        return found

    def table(self, name: str, title: str) -> list[Table]:
        """The tables whose title begins so."""
        found = [table for table in self.get(name).tables if table.title.startswith(title)]
        if not found:
            raise LookupError(f"{name} has no table {title!r}: {[t.title for t in self.get(name).tables]}")
        return found


@dataclass(frozen=True)
class PaperItem:
    """A figure or table of the paper: its label, the command that gives it, and how it is built here."""

    label: str
    about: str
    command: str
    where: str  # on the report's page: the figure's or table's title
    build: Callable[[Built], Sequence[Panel | Table]]


def ladder_figure(name: str) -> Callable[[Built], list[Panel]]:
    """Reducible loss and multipliers of some ladders."""
    return lambda b: [
        p for p in b.panels(name) if p.title.startswith(("Reducible loss", "Compute multiplier"))
    ]


ITEMS = (
    PaperItem(
        "fig:arch",
        "the family of architectures",
        "steepen arms --figure FILE",
        "the file",
        lambda b: [b.studies.family()],
    ),
    PaperItem(
        "fig:main-results",
        "ladders and multipliers; passes on repeated data",
        "steepen study ladder; steepen study data-constrained",
        "Loss against compute; Compute multiplier; Parameters or passes on repeated data",
        lambda b: [
            *b.panels("ladder", "Loss against compute", "Compute multiplier over"),
            *b.panels("data_constrained:grid", "weight decay 0.8")[:1],
            *b.panels("data_constrained:grid", "compute spent"),
        ],
    ),
    PaperItem(
        "fig:loop-ladder",
        "eight ladders, multipliers, exponent against constant",
        "steepen study ladder",
        "Loss against compute; Compute multiplier; Exponent against constant",
        lambda b: b.panels("ladder", "Loss against compute", "Compute multiplier over", "Exponent against"),
    ),
    PaperItem(
        "fig:dep-grow-extrap",
        "forecasts of loss, answer NLL and CORE, with the held-out run",
        "steepen study extrapolate --score core,nll; steepen downstream RUNS --hold-out RUN",
        "Forecasts beyond the ladders; Compute multiplier, projected",
        lambda b: [
            *b.panels("extrapolate", "Forecasts beyond"),
            *b.panels("extrapolate", "Compute multiplier over vanilla, projected"),
        ],
    ),
    PaperItem(
        "fig:data-constr-main",
        "four panels on repeated data",
        "steepen study data-constrained --part grid",
        "Parameters or passes on repeated data",
        lambda b: b.panels("data_constrained:grid", "Parameters or passes"),
    ),
    PaperItem(
        "fig:ladder-kl-eff-depth",
        "KL effective depth along ladders and on repeated data",
        "steepen study ladder --score kl-depth; steepen study data-constrained --part grid --score kl-depth",
        "KL effective depth along the ladders; KL effective depth of the best model at each budget",
        lambda b: [*b.panels("ladder", "KL effective depth"), b.studies.effective_depth_multi_epoch()],
    ),
    PaperItem(
        "tab:common-setup",
        "fixed protocol",
        "steepen plan --arm vanilla --depth 8",
        "printed; the preset `paper`",
        lambda b: [b.studies.common_setup()],
    ),
    PaperItem(
        "tab:model-sizes",
        "depths, splits and parameters",
        "steepen arms --depth N",
        "the table",
        lambda b: [b.studies.model_sizes()],
    ),
    PaperItem(
        "fig:base-tuning",
        "chains of sweeps",
        "steepen study chain-tuning --arms A,B",
        "The chain of sweeps",
        lambda b: b.panels("chain_tuning", "The chain of sweeps"),
    ),
    PaperItem(
        "tab:base-tuning-grid",
        "the grid of the chain",
        "steepen study chain-tuning --dry-run",
        "the runs; studies/stages/chain_tuning.py",
        lambda b: [b.studies.tuning_grid()],
    ),
    PaperItem(
        "tab:base-tuning-operators",
        "tuned losses of operator ablations",
        "steepen study chain-tuning --arms …",
        "Tuned hyperparameters (loss, minutes)",
        lambda b: b.table("chain_tuning", "Tuned hyper"),
    ),
    PaperItem(
        "tab:tuned-hyperparameters",
        "tuned hyperparameters by arm",
        "steepen study chain-tuning --arms …",
        "Tuned hyperparameters; Recipes of the ladders",
        lambda b: b.table("ladder", "Recipes of the ladders"),
    ),
    PaperItem(
        "tab:base-tuning-transfer",
        "Vanilla's recipe on other arms",
        "steepen study transfer --part probe",
        "Transfer probe from the vanilla recipe",
        lambda b: b.table("transfer_probe", "Transfer probe"),
    ),
    PaperItem(
        "fig:tpp-curves",
        "iso-compute sweeps",
        "steepen study tpp --arms vanilla,loop-2,untied-2",
        "loss against tokens per parameter; Loss at the optimum",
        lambda b: [
            *b.panels("tpp", "vanilla: loss", "loop-2: loss", "untied-2: loss"),
            *b.panels("tpp", "Loss at the optimum", "Optimal tokens"),
        ],
    ),
    PaperItem(
        "tab:arch-optimal-tpp",
        "compute-optimal TPP by arm",
        "steepen study tpp --arms …",
        "Compute-optimal TPP",
        lambda b: b.table("tpp", "Compute-optimal TPP"),
    ),
    PaperItem(
        "fig:opt-grow-fits",
        "growth fraction at three anchors",
        "steepen study growth-fraction --arms …",
        "loss against the fraction of tokens after growth",
        lambda b: b.panels("growth_fraction"),
    ),
    PaperItem(
        "fig:hyper1d",
        "every hyperparameter of Vanilla at five sizes",
        "steepen study lr-rule --part screen",
        "vanilla, screen: one hyperparameter at a time",
        lambda b: b.panels("screen", "vanilla, screen: one"),
    ),
    PaperItem(
        "fig:hp-slice",
        "four hyperparameters, constant and scaled recipes",
        "steepen study lr-rule --arms …",
        "ARM: one hyperparameter at a time, constant and scaled recipes",
        lambda b: [p for p in b.panels("lr_rule") if "one hyperparameter" in p.group],
    ),
    PaperItem(
        "tab:hp-drift",
        "drift and sensitivity",
        "steepen study lr-rule --arms …",
        "Hyperparameter drift and sensitivity",
        lambda b: b.table("lr_rule", "Hyperparameter drift"),
    ),
    PaperItem(
        "tab:full-ladder-recipes",
        "recipes of the ladders",
        "steepen study ladder",
        "Recipes of the ladders",
        lambda b: b.table("ladder", "Recipes of the ladders"),
    ),
    PaperItem(
        "fig:ladder-arch",
        "operator and allocation ablations",
        "steepen study ablations --part operator --part allocation",
        "operator; allocation",
        lambda b: [*ladder_figure("ablations:operator")(b), *ladder_figure("ablations:allocation")(b)],
    ),
    PaperItem(
        "fig:ladder-runtime",
        "ladders by training time",
        "steepen study ladder",
        "Loss against time; Time multiplier",
        lambda b: [p for p in b.panels("ladder") if "ime" in p.title][:2],
    ),
    PaperItem(
        "fig:ladder-constant",
        "ladders at constant learning rate",
        "steepen study ablations --part constant",
        "constant",
        ladder_figure("ablations:constant"),
    ),
    PaperItem(
        "fig:ladder-vanilla-scaling",
        "Vanilla with more hyperparameters scaled",
        "steepen study ablations --part hyperparameters",
        "hyperparameters",
        ladder_figure("vanilla_scaling"),
    ),
    PaperItem(
        "fig:ladder-inject-1-van-recipe",
        "Operator-1 with Vanilla's recipe",
        "steepen study transfer --part ladder --arms operator-1",
        "Reducible loss; Compute multiplier",
        ladder_figure("operator_recipe"),
    ),
    PaperItem(
        "fig:ladder-shape",
        "deeper shapes",
        "steepen study ablations --part shape",
        "shape",
        ladder_figure("ablations:shape"),
    ),
    PaperItem(
        "fig:ladder-rand",
        "random passes after growth",
        "steepen study ablations --part random",
        "random",
        ladder_figure("ablations:random"),
    ),
    PaperItem(
        "fig:ladder-width-only",
        "width only against width and depth",
        "steepen study ablations --part width-only --part width-and-depth",
        "width-only; width-and-depth",
        lambda b: [*ladder_figure("width_only:width")(b), *ladder_figure("width_only:coupled")(b)],
    ),
    PaperItem(
        "fig:ladder-optimizers",
        "Muon against Adam",
        "steepen study ablations --part optimizer",
        "optimizer, width only; optimizer, width and depth",
        lambda b: [*ladder_figure("optimizers:width")(b), *ladder_figure("optimizers:coupled")(b)],
    ),
    PaperItem(
        "fig:loop-exit",
        "loss at other numbers of passes than trained",
        "steepen eval RUNS --passes 1-12; steepen downstream RUNS",
        "Loss at other numbers of passes than trained",
        lambda b: [
            *b.panels("ladder", "Loss at other numbers"),
            *(
                p
                for p in b.panels("ablations:random", "random: Loss at other")
                if p.title.startswith("random")
            ),
        ],
    ),
    PaperItem(
        "fig:data-compare",
        "gains on two corpora",
        "steepen downstream RUNS_A RUNS_B --arms vanilla,untied-grow",
        "Scores along the ladders, CORPUS; Multipliers within each corpus",
        lambda b: [
            *b.panels("corpora", "Scores along the ladders"),
            *b.panels("corpora", "Multipliers within"),
        ],
    ),
    PaperItem(
        "fig:dataset-comparison",
        "one arm on two corpora",
        "steepen downstream RUNS_A RUNS_B --arms vanilla,untied-grow",
        "Corpora compared: untied-grow",
        lambda b: b.panels("corpora", "Corpora compared: untied-grow"),
    ),
    PaperItem(
        "tab:core-eval-type",
        "the filter of tasks",
        "steepen eval filter RUNS",
        "printed",
        lambda b: [b.studies.task_filter()],
    ),
    PaperItem(
        "fig:downstream-major",
        "scores along the ladders, with multipliers",
        "steepen downstream RUNS; steepen study ladder --score core,nll",
        "Scores along the ladders; Compute multipliers at equal scores",
        lambda b: b.panels("ladder", "Scores along", "Compute multipliers at"),
    ),
    PaperItem(
        "fig:core-vs-nll",
        "answer NLL against loss, and residuals",
        "steepen downstream RUNS",
        "Answer NLL against validation loss",
        lambda b: b.panels("ladder", "Answer NLL against"),
    ),
    PaperItem(
        "fig:matched-loss-task-bars",
        "task residuals by arm",
        "steepen downstream RUNS",
        "Task NLL about the reference's line",
        lambda b: b.panels("ladder", "Task NLL about"),
    ),
    PaperItem(
        "fig:sigmoids-linear-fits",
        "task sigmoids and the factor to CORE",
        "steepen downstream RUNS",
        "From task NLL to accuracy, and from 17 tasks to CORE",
        lambda b: b.panels("extrapolate", "From task"),
    ),
    PaperItem(
        "fig:data-constr-regimes",
        "passes under repetition",
        "steepen study data-constrained --part regimes",
        "Passes under repetition of the data",
        lambda b: b.studies.regime_columns(b.get("data_constrained:regimes"), b.get("data_constrained:grid")),
    ),
    PaperItem(
        "fig:data-constr-wd",
        "passes at six weight decays",
        "steepen study data-constrained --part grid",
        "Passes at each weight decay",
        lambda b: b.panels("data_constrained:grid", "Passes at each"),
    ),
    PaperItem(
        "fig:hyper-sensitivity",
        "weight decay by depth; hyperparameters by passes",
        "steepen study data-constrained --part grid; steepen study passes --part hyperparameters",
        "Weight decay at each stored depth; Hyperparameters at other numbers of passes, tokens fixed",
        lambda b: [
            *b.panels("data_constrained:grid", "Weight decay at each"),
            *b.panels("passes_hyperparameters", "Hyperparameters at other"),
        ],
    ),
    PaperItem(
        "fig:data-constr-arch",
        "controls on repeated data",
        "steepen study data-constrained --part controls",
        "Controls: sharing weights, and the operator",
        lambda b: b.panels("data_constrained:controls", "Controls")[:6],
    ),
    PaperItem(
        "fig:recurrence-design",
        "allocation, passes, growth target, growth fraction",
        "steepen study allocation; steepen study passes; steepen study growth-target --score kl-depth; "
        "steepen study growth-fraction; steepen study tpp",
        "the figures of those studies",
        lambda b: [
            *b.panels("allocation"),
            *b.panels("passes", "tied:"),
            *b.panels("growth_target"),
            *b.panels("growth_fraction", "loop-grow"),
            *b.panels("growth_tokens:loop-grow", "loop-grow: loss"),
        ],
    ),
    PaperItem(
        "fig:fresh-loop-optima",
        "passes in ladders of fixed tokens",
        "steepen study passes --part tokens",
        "Passes in ladders of fixed tokens",
        lambda b: b.panels("passes", "Passes in ladders"),
    ),
    PaperItem(
        "fig:tpl",
        "passes at fixed anchor and compute",
        "steepen study passes --part anchor",
        "passes at fixed anchor and compute; the best passes against tokens per parameter",
        lambda b: b.panels("anchor_passes"),
    ),
    PaperItem(
        "fig:opt-grow-tied",
        "growth timing, tied",
        "steepen study growth-timing --arms loop-grow",
        "loop-grow: when to grow; the best moment against tokens per parameter",
        lambda b: b.panels("growth_timing:loop-grow"),
    ),
    PaperItem(
        "fig:opt-grow-untied",
        "growth timing, untied",
        "steepen study growth-timing --arms untied-grow",
        "untied-grow: when to grow; the best moment against tokens per parameter",
        lambda b: b.panels("growth_timing:untied-grow"),
    ),
    PaperItem(
        "fig:opt-grow-deepvan",
        "growth timing, Deep Vanilla",
        "steepen study growth-fraction --arms deep-vanilla-grow",
        "deep-vanilla-grow: loss against the fraction",
        lambda b: b.panels("growth_fraction", "deep-vanilla-grow"),
    ),
    PaperItem(
        "fig:opt-grow-tokens",
        "tokens with growth; sensitivity of the prescription",
        "steepen study tpp --arms loop-2,loop-grow; steepen study ablations --part growth",
        "ARM: loss against 6·T²/C; growth: Compute multiplier",
        lambda b: [
            *b.panels("growth_tokens:loop-grow", "loop-grow: loss against 6"),
            *b.panels("growth_tokens:untied-grow", "untied-grow: loss against 6"),
            *[p for p in b.panels("growth_sensitivity") if p.title.startswith("Compute multiplier")],
        ],
    ),
)


def write_study(out: Path, name: str, answer: Answer) -> None:
    """The journal of a study, for `steepen report`."""
    title = name.replace(":", "-").replace("+", "-")
    Journal.open(out / "studies", title, {"replayed": True}, out / "runs").set_answer(answer)


def write_runs(out: Path, studies: PaperStudies) -> None:
    """The spec and record files of every replayed run."""
    store = RunStore(out / "runs")
    for record in studies.replay.records.values():
        run = store.run(record.spec)
        write_json(run.spec_file, record.spec.to_dict())
        write_json(run.record_file, record.to_dict())


def figure_map() -> str:
    """The table of figures and tables: what each shows, the command, and where it is on the page."""
    lines = ["| in the paper | shows | command | on the page | works |", "|---|---|---|---|---|"]
    for item in ITEMS:
        command = "; ".join(f"`{part.strip()}`" for part in item.command.split(";"))
        lines.append(f"| `{item.label}` | {item.about} | {command} | {item.where} | yes |")
    return "\n".join(lines)


def main() -> None:
    """Build all items, write them, and print what works."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", type=Path, help="the authors' CSV tables")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="labels without fig: or tab:, comma-separated")
    parser.add_argument(
        "--draws", type=int, default=200, help="bootstrap draws of verdicts (the studies: 2000)"
    )
    parser.add_argument("--map", action="store_true", help="only print the table of docs/paper-map.md")
    options = parser.parse_args()
    if options.map:
        print(figure_map())
        return
    ladder_runs.BOOTSTRAP_DRAWS = options.draws
    only = {word.strip() for word in options.only.split(",") if word.strip()}
    built = Built(PaperStudies(Tables(options.tables)))
    failed: list[str] = []
    for item in ITEMS:
        short = item.label.partition(":")[2]
        if only and short not in only:
            continue
        try:
            parts = list(item.build(built))
            panels = [part for part in parts if isinstance(part, Panel)]
            if panels:
                data = figure_files(panels, TITLES, ("png",))["png"]
                write_atomically(options.out / "figures" / f"{short}.png", data)
            for i, table in enumerate(part for part in parts if isinstance(part, Table)):
                file = options.out / "tables" / f"{short}{f'-{i}' if i else ''}.csv"
                write_atomically(file, to_csv(table).encode())
            count = f"{len(panels)} panels" if panels else f"{len(parts)} tables"
            print(f"{item.label:<34} works  {count:<10} {item.command}", flush=True)
        except Exception:  # every figure is tried; failures are listed at the end
            failed.append(item.label)
            print(f"{item.label:<34} FAILED\n{traceback.format_exc(limit=-3)}", flush=True)
    if only:
        sys.exit(bool(failed))
    write_runs(options.out, built.studies)
    for name, answer in built.answers.items():
        write_study(options.out, name, answer)
    text, missed = conclusions(built.get, options.tables)
    write_atomically(options.out / "conclusions.md", text.encode())
    print(text)
    print(
        f"{len(ITEMS) - len(failed)} of {len(ITEMS)} figures and tables; {missed} conclusions outside their "
        "tolerance"
    )
    sys.exit(bool(failed or missed))


if __name__ == "__main__":
    main()
