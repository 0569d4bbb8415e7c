"""Publish measured ladders: a table of runs, the journals of their studies, and a page made from the table.

    python tools/publish_results.py results/narrow --add RUNS STUDIES   # add finished runs and their studies
    python tools/publish_results.py results/narrow                      # write the page's tables
    python tools/publish_results.py results/narrow --check              # exit 1 where they are not runs.csv's

runs.csv has a row for every run: its study, its settings and its loss. The page (README.md of the folder) has
the tables between the lines `<!-- results/NAME -->` and `<!-- end -->`: losses, laws and verdicts of the
ladder and of growth along other axes, and every sweep. Names of machines and their paths are left out.
`--shared N`: the runs that are added trained N at a time on one GPU, where their records do not say so.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen import fit
from steepen.evaluation.kl_depth import effective_depth
from steepen.results.fit import ComputeResult
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import read_journals
from steepen.utils.codec import to_builtins
from steepen.utils.files import write_atomically
from steepen.utils.formatting import counted
from steepen.utils.json_io import with_checksum, write_json

LADDER = "ladder"  # studies whose names begin so are judged together
AXES = "growth-axes"  # and these beside the ladder's arms that they are measured against
AXES_REFERENCES = ("vanilla", "untied-grow")
KL_NATS = (2, 1)  # the paper's threshold, and one that these runs, whose divergence peaks at 2 to 5, can show
CLAIMS = (  # of the paper's section 4.2: what is compared with what, and the word for its gain
    ("the boundary operator raises the exponent", "operator-1", "vanilla", "grows"),
    ("growth raises the exponent: untied", "untied-grow", "untied-2", "grows"),
    ("growth raises the exponent: tied", "loop-grow", "loop-2", "grows"),
    ("growth does not need the operator", "deep-vanilla-grow", "deep-vanilla", "grows"),
    ("untying is a constant factor", "untied-2", "loop-2", "constant"),
    ("untying is a constant factor: grown", "untied-grow", "loop-grow", "constant"),
    ("depth without the operator is a constant factor", "deep-vanilla", "vanilla", "constant"),
    ("all together", "untied-grow", "vanilla", "grows"),
)
Row = Mapping[str, Any]


def row_of(record: RunRecord, study: str, shared: int) -> dict[str, Any]:
    """A run as a row of runs.csv."""
    spec, deep = record.spec, record.evaluation.get("kl_depth")
    within = {nats: "" if deep is None else effective_depth(deep["curve"], nats)[0] for nats in KL_NATS}
    return {
        "study": study, "arm": spec.arm.name, "depth": spec.shape.depth, "seed": spec.seed,
        "parameters": record.parameters.initial_stored, "tokens": record.tokens, "flops": record.flops,
        "loss": record.validation_loss, **spec.hyperparameters.to_dict(),
        "embedding_precision": spec.optimizer.embedding_precision, "data": spec.data.identity[:8],
        "seconds": round(record.seconds_training, 1),
        "runs_per_gpu": record.hardware.get("runs_per_gpu", shared), "run": record.run,
        **{f"kl_depth_{nats}": depth for nats, depth in within.items()},
    }  # fmt: skip


def add(folder: Path, runs: Path, studies: Path, shared: int) -> None:
    """Add the finished runs of studies to runs.csv, each once, and the journals without host names."""
    rows = {row["run"]: row for row in read_rows(folder / "runs.csv")}
    # A run that several studies asked for is listed once, as the ladder's if that is one of them.
    journals = sorted(read_journals(studies)[0], key=lambda one: not one.entry.name.startswith(LADDER))
    for journal in journals:
        entry = journal.entry
        for run in (asked.run for asked in entry.runs):
            record = RunDirectory(runs / run).record()
            if record is not None and run not in rows:
                rows[run] = row_of(record, entry.name, shared)
        (folder / "studies").mkdir(exist_ok=True)
        kept = replace(entry, host="", runs_directory="runs")
        write_json(folder / "studies" / f"{entry.name}.json", with_checksum(to_builtins(kept)))
    write_atomically(folder / "runs.csv", as_csv(list(rows.values())))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if there is no file."""
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))) if path.exists() else []


def as_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV, by study, arm, depth and seed."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    order = ("study", "arm")
    numbers = ("depth", "seed", "learning_rate")
    writer.writerows(sorted(rows, key=lambda r: (*(r[n] for n in order), *(float(r[n]) for n in numbers))))
    return text.getvalue()


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def loss_table(rows: Sequence[Row]) -> str:
    """Mean loss by arm and depth, with spread and number of seeds where there are several."""
    depths = sorted({int(row["depth"]) for row in rows})
    lines: list[list[str]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells: list[str] = []
        for depth in depths:
            found = [float(row["loss"]) for row in rows if (row["arm"], int(row["depth"])) == (arm, depth)]
            spread = f" ± {statistics.stdev(found):.4f} ({len(found)})" if len(found) > 1 else ""
            cells.append(f"{statistics.fmean(found):.4f}{spread}" if found else "–")
        lines.append([arm, *cells])
    return markdown(["arm", *(f"d{depth}" for depth in depths)], lines)


def ladder_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The columns that `steepen fit` needs."""
    kept = ("arm", "depth", "seed", "tokens", "flops", "loss")
    return [{name: row[name] if name == "arm" else float(row[name]) for name in kept} for row in rows]


def verdict_table(rows: Sequence[Row], reference: str = "vanilla") -> str:
    """Laws and verdicts of `steepen fit` on these rows."""
    found = fit(ladder_table(rows), reference=reference)
    assert isinstance(found, ComputeResult)
    lines: list[list[str]] = []
    for row in found.to_rows():
        gain = slope = "–"
        if row["delta_gamma"] is not None:
            gain = f"{row['multiplier']:.3f} ({row['multiplier_low']:.3f} to {row['multiplier_high']:.3f})"
            slope = f"×{row['growth_per_decade']:.3f} (p = {row['p_growth']:.2g})"
        law = f"{row['gamma']:.4f} ({row['gamma_low']:.4f} to {row['gamma_high']:.4f})"
        lines.append([row["arm"], row["better"] or "–", gain, row["growth"] or "–", slope, law])
    return markdown(["arm", "in range", "mean multiplier (95%)", "gain", "a decade", "γ (90%)"], lines)


def claim_table(rows: Sequence[Row]) -> str:
    """The paper's claims by its authors' runs and by these: each arm against the one that it extends."""
    here = {reference: judge(ladder_table(rows), reference) for reference in {claim[2] for claim in CLAIMS}}
    lines: list[list[str]] = []
    for claim, arm, reference, word in CLAIMS:
        cells, agreement = [], "not measured"
        for found in (judge_authors(reference), here[reference]):
            row = found.get(arm)
            cells.append(_gain(row) if row else "–")
            if found is here[reference] and row:
                growth = row["growth"]
                agreement = (
                    "agrees" if growth == word else "undecided" if growth == "undecided" else "differs"
                )
        lines.append([f"{claim}: {arm} over {reference}", word, *cells, agreement])
    return markdown(["claim of the paper", "gain", "its authors' runs", "these runs", ""], lines)


@functools.cache
def judge_authors(reference: str) -> dict[str, dict[str, Any]]:
    """The authors' runs against one of their arms."""
    return judge("paper:fineweb", reference)


def judge(table: Any, reference: str) -> dict[str, dict[str, Any]]:
    """The rows of `steepen fit` by arm; none where the reference is absent."""
    if not isinstance(table, str) and all(row["arm"] != reference for row in table):
        return {}
    found = fit(table, reference=reference, draws=100)  # words need no intervals of laws
    return {row["arm"]: row for row in found.to_rows() if row["growth"] is not None}


def _gain(row: Mapping[str, Any]) -> str:
    each = row["growth_per_decade"]
    return f"{row['growth']}: {row['multiplier']:.2f}×, ×{each:.3f} a decade (p = {row['p_growth']:.2g})"


def kl_table(rows: Sequence[Row]) -> str:
    """KL effective depth of the runs that it was measured for, at both thresholds, by arm and depth."""
    measured = [row for row in rows if row["kl_depth_2"]]
    depths = sorted({row["depth"] for row in measured}, key=int)
    lines: list[list[str]] = []
    for arm in dict.fromkeys(row["arm"] for row in measured):
        own = {row["depth"]: row for row in measured if row["arm"] == arm}
        found = {(nats, depth): own[depth][f"kl_depth_{nats}"] for nats in KL_NATS for depth in own}
        lines.append([arm, *(found.get((nats, depth), "–") for nats in KL_NATS for depth in depths)])
    lines.sort(key=lambda line: int(line[-1]) if line[-1] != "–" else 0)
    header = (f"d{depth}, within {counted(nats, 'nat')}" for nats in KL_NATS for depth in depths)
    return markdown(["arm", *header], lines)


def sweep_table(rows: Sequence[Row]) -> str:
    """Losses of a sweep by arm and depth, the lowest first, each with the settings that are not the usual."""
    ignored = {"study", "parameters", "tokens", "flops", "loss", "data", "seconds", "runs_per_gpu", "run"}
    ignored |= {f"kl_depth_{nats}" for nats in KL_NATS}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["depth"]), []).append(row)
    lines: list[list[str]] = []
    for (arm, depth), own in groups.items():
        varied = [name for name in own[0] if name not in ignored and len({row[name] for row in own}) > 1]
        usual = {name: statistics.mode(row[name] for row in own) for name in varied}
        cells: list[str] = []
        for row in sorted(own, key=lambda row: float(row["loss"])):
            rates_only = varied == ["learning_rate"]
            said = [
                f"{name} {_short(row[name])}" for name in varied if rates_only or row[name] != usual[name]
            ]
            cells.append(f"{float(row['loss']):.4f} ({', '.join(said) or 'the recipe'})")
        lines.append([arm, depth, "; ".join(cells)])
    return markdown(["arm", "depth", "loss, and what differs"], lines)


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def tables(folder: Path) -> str:
    """The text between the marks of the page."""
    rows = read_rows(folder / "runs.csv")
    ladder = [row for row in rows if row["study"].startswith(LADDER)]
    hours = sum(float(row["seconds"]) / float(row["runs_per_gpu"]) for row in rows) / 3600
    parts = [
        f"{len(rows)} runs, {sum(float(row['flops']) for row in rows):.2g} FLOPs, {hours:.2f} GPU-hours of "
        "training."
    ]
    if ladder:
        parts += [f"### The ladder: {len(ladder)} runs", loss_table(ladder), verdict_table(ladder)]
        parts += ["### The paper's claims", claim_table(ladder)]
        if any(row["kl_depth_2"] for row in ladder):
            parts += ["### KL effective depth", kl_table(ladder)]
    axes = [row for row in rows if row["study"].startswith(AXES)]
    if axes:
        beside = [*axes, *(row for row in ladder if row["arm"] in AXES_REFERENCES)]
        parts += [f"### Growth along other axes: {len(axes)} runs", loss_table(axes)]
        for reference in AXES_REFERENCES:
            parts += [f"Against {reference}:", verdict_table(beside, reference)]
    for name in dict.fromkeys(row["study"] for row in rows):
        own = [row for row in rows if row["study"] == name]
        if not name.startswith((LADDER, AXES)):
            parts += [f"### `{name}`: {len(own)} runs", sweep_table(own)]
    return "\n\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Add runs, write the tables, or compare them with runs.csv; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--add", nargs=2, type=Path, metavar=("RUNS", "STUDIES"))
    parser.add_argument("--shared", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page differs")
    options = parser.parse_args(words)
    folder: Path = options.folder.resolve()
    if options.add is not None:
        runs, studies = options.add
        add(folder, runs, studies, options.shared)
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(f"<!-- results/{folder.name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (start and end):
        raise SystemExit(f"{page} has no lines <!-- results/{folder.name} --> and <!-- end -->.")
    wanted = f"{before}{start}\n{tables(folder)}\n{end}{after}"
    if wanted != text:
        print(f"{page.name}: {'differs from runs.csv' if options.check else 'written'}.")
        if options.check:
            return 1
        write_atomically(page, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
