"""Publish measured ladders: a table of runs, the journals of their studies, and a page made from the table.

    python tools/publish_results.py results/narrow --add RUNS STUDIES   # add finished runs and their studies
    python tools/publish_results.py results/narrow                      # write the page's tables
    python tools/publish_results.py results/narrow --check              # exit 1 where they are not runs.csv's

runs.csv has a row for every run (its study, settings and loss), journals.json the journal of every study. The
page (README.md of the folder) has the tables between the lines `<!-- results/NAME -->` and `<!-- end -->`:
losses, laws and verdicts of the ladder, the paper's claims, growth along other axes, and every sweep. Names
of machines and their paths are left out. Where runs of a ladder are added with other settings than an arm
had, the arm's older runs become those of a former ladder.
`--shared N`: the runs that are added trained N at a time on one GPU, where their records do not say so.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from paper_claims import LADDER, VARIANTS, compared, fit_table, judge_claims, tokens_per_parameter

from steepen import fit
from steepen.evaluation.kl_depth import effective_depth
from steepen.laws.registered_forecasts import read_ledger
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.results.fit import ComputeResult
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import read_journals
from steepen.studies.synthetic import growth_fraction_of
from steepen.utils.codec import to_builtins
from steepen.utils.files import write_atomically
from steepen.utils.formatting import counted
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json

AXES = "growth-axes"  # studies that are judged beside the ladder's arms that they are measured against
AXES_REFERENCES = ("vanilla", "untied-grow")
VERDICTS = ("agrees", "differs", "undecided", "not run")
KL_NATS = (2, 1)  # the paper's threshold, and one that these runs, whose divergence peaks at 2 to 5, can show
SAME_LENGTH = 1.1  # times the tokens per parameter: growing arms vary by less from depth to depth
SETTINGS = [one.name for one in fields(Hyperparameters)]
Row = Mapping[str, Any]


def row_of(record: RunRecord, study: str, shared: int) -> dict[str, Any]:
    """A run as a row of runs.csv."""
    spec, deep = record.spec, record.evaluation.get("kl_depth")
    within = {nats: "" if deep is None else effective_depth(deep["curve"], nats)[0] for nats in KL_NATS}
    variant = f" ({VARIANTS[study]})" if study in VARIANTS else ""
    return {
        "study": study, "arm": spec.arm.name + variant, "depth": spec.shape.depth, "seed": spec.seed,
        "parameters": record.parameters.initial_stored, "tokens": record.tokens, "flops": record.flops,
        "loss": record.validation_loss, **spec.hyperparameters.to_dict(),
        "rho": round(growth_fraction_of(spec), 6) or "", "epochs": spec.data.epochs,
        "embedding_precision": spec.optimizer.embedding_precision, "data": spec.data.identity[:8],
        "seconds": round(record.seconds_training, 1),
        "runs_per_gpu": record.hardware.get("runs_per_gpu", shared), "run": record.run,
        **{f"kl_depth_{nats}": depth for nats, depth in within.items()},
    }  # fmt: skip


def add(folder: Path, runs: Path, studies: Path, shared: int) -> None:
    """Add the finished runs of studies to runs.csv, each once, and the journals without host names."""
    rows = {row["run"]: dict(row) for row in read_rows(folder / "runs.csv")}
    # A run that several studies asked for is listed once, as the ladder's if that is one of them.
    journals = sorted(read_journals(studies)[0], key=lambda one: not one.entry.name.startswith(LADDER))
    new: dict[str, dict[str, Any]] = {}
    ladder: dict[str, str] = {}  # the study of every run that a ladder asks for now
    for entry in (journal.entry for journal in journals):
        for run in (asked.run for asked in entry.runs):
            record = RunDirectory(runs / run).record()
            if record is not None and run not in rows and run not in new:
                new[run] = row_of(record, entry.name, shared)
            if entry.name.startswith(LADDER):
                ladder.setdefault(run, entry.name)
    renamed = supersede(list(rows.values()), list(new.values()))
    for run in rows.keys() & ladder.keys():  # of a sweep, or of a ladder that has other recipes now
        if not rows[run]["study"].startswith(LADDER):
            rows[run]["study"] = ladder[run]
    write_atomically(folder / "runs.csv", as_csv([*rows.values(), *new.values()]))
    file = folder / "journals.json"
    kept: dict[str, Any] = without_checksum(read_json(file)) if file.exists() else {}
    for name, former in renamed.items():
        if name in kept:
            kept[former] = kept.pop(name) | {"name": former}
    for journal in journals:
        kept[journal.entry.name] = to_builtins(replace(journal.entry, host="", runs_directory="runs"))
    write_json(file, with_checksum(dict(sorted(kept.items()))))


def supersede(rows: Sequence[dict[str, Any]], new: Sequence[Row]) -> dict[str, str]:
    """Rename the ladder's runs of arms that have other settings now; returns the studies' former names.

    An arm is compared at the depths that both have. All its older runs are renamed: rungs of two recipes
    are no ladder.
    """
    renamed: dict[str, str] = {}
    settings = {
        (row["arm"], int(row["depth"])): _settings(row) for row in new if row["study"].startswith(LADDER)
    }
    older = [row for row in rows if row["study"].startswith(LADDER)]
    changed = {
        row["arm"] for row in older
        if settings.get((row["arm"], int(row["depth"])), found := _settings(row)) != found
    }  # fmt: skip
    for arm in changed:
        number = 2
        while any(row["arm"] == arm and row["study"].startswith(f"former-ladder-{number}") for row in rows):
            number += 1
        for row in older:
            if row["arm"] == arm:
                name = row["study"]
                renamed[name] = row["study"] = f"former-ladder-{number}{name.removeprefix(LADDER)}"
    return renamed


def _settings(row: Row) -> tuple[float, ...]:
    return tuple(round(float(row[name]), 12) for name in SETTINGS)


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


def verdict_table(rows: Sequence[Row], reference: str = "vanilla", arms: Sequence[str] = ()) -> str:
    """Laws and verdicts of `steepen fit` on these rows; of these arms alone, where some are named."""
    # The draws are of multipliers that are not shown.
    found = fit(fit_table(rows), reference=reference, method="joint", draws=100)
    assert isinstance(found, ComputeResult)
    lines: list[list[str]] = []
    for row in found.to_rows():
        gain = slope = "–"
        if row["delta_gamma"] is not None:
            gain = f"{row['multiplier']:.3f} ({row['multiplier_low']:.3f} to {row['multiplier_high']:.3f})"
            slope = f"×{row['growth_per_decade']:.3f} (p = {row['p_growth']:.2g})"
        law = f"{row['gamma']:.4f} ({row['gamma_low']:.4f} to {row['gamma_high']:.4f})"
        if not arms or row["arm"] in arms:
            lines.append([row["arm"], row["better"] or "–", gain, row["growth"] or "–", slope, law])
    return markdown(["arm", "in range", "mean multiplier (95%)", "gain", "a decade", "γ (90%)"], lines)


def claim_table(folder: Path, rows: Sequence[Row]) -> str:
    """The paper's claims by its authors' runs and by these, and the forecasts that were registered."""
    judged = judge_claims(rows, read_ledger(folder / "forecasts.jsonl"))
    header = ["claim of the paper", "figure", "its authors' runs", "these runs", ""]
    counts = ", ".join(f"{sum(one.verdict == word for one in judged)} {word}" for word in VERDICTS)
    return f"{counts}.\n\n{markdown(header, [one.cells for one in judged])}"


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
    lengths: dict[str, list[float]] = {}  # by arm
    for row in rows:
        lengths.setdefault(row["arm"], []).append(tokens_per_parameter(row))
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["depth"]), []).append(row)
    lines: list[list[str]] = []
    for (arm, depth), own in groups.items():
        varied = [name for name in own[0] if name not in ignored and len({row[name] for row in own}) > 1]
        usual: dict[str, str] = {}  # what more runs have than any other
        for name in varied:
            (value, count), (_, next_count) = Counter(row[name] for row in own).most_common(2)
            if count > next_count:
                usual[name] = value
        cells: list[str] = []
        for row in sorted(own, key=lambda row: float(row["loss"])):
            rates_only = varied == ["learning_rate"]
            said = [
                f"{name} {_short(row[name])}" for name in varied if rates_only or row[name] != usual.get(name)
            ]
            if max(lengths[arm]) > SAME_LENGTH * min(lengths[arm]):
                said.append(f"{tokens_per_parameter(row):.2g} tokens per parameter")
            cells.append(f"{float(row['loss']):.4f} ({', '.join(said) or 'the recipe'})")
        lines.append([arm, depth, "; ".join(cells)])
    return markdown(["arm", "depth", "loss, and what differs"], lines)


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def named_ladder(study: str) -> re.Match[str] | None:
    """The name of the ladder, or of a former one, that a study's begins with."""
    return re.match(rf"{LADDER}|former-{LADDER}(-\d+)?", study)


def ladder_of(axes: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The ladder, or a former one, whose Vanilla has the rates of arms that grow along other axes."""
    rates = {(row["depth"], row["learning_rate"]) for row in axes}  # some have those of their first size
    depths = {row["depth"] for row in axes}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if named := named_ladder(row["study"]):
            groups.setdefault(named[0], []).append(row)
    for own in groups.values():
        base = [row for row in own if row["arm"] == "vanilla" and row["depth"] in depths]
        if base and all((row["depth"], row["learning_rate"]) in rates for row in base):
            return own
    return groups.get(LADDER, [])


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
        parts += ["### The paper's claims", claim_table(folder, rows)]
        if any(row["kl_depth_2"] for row in ladder):
            parts += ["### KL effective depth", kl_table(ladder)]
    fp8 = [row for row in rows if row["study"] == "fp8"]
    if fp8:
        arms = sorted({row["arm"] for row in fp8})
        parts += ["### fp8 beside bf16", loss_table([*(r for r in ladder if r["arm"] == "vanilla"), *fp8])]
        parts.append(verdict_table(compared(rows, *arms), arms=arms))
    axes = [row for row in rows if row["study"].startswith(AXES)]
    if axes:
        beside = [*axes, *(row for row in ladder_of(axes, rows) if row["arm"] in AXES_REFERENCES)]
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
