"""Publish measured ladders: tables on a page and CSV files, from the records under results/NAME.

    python tools/publish_results.py results/h200-mini           # write them
    python tools/publish_results.py results/h200-mini --check   # exit 1 if one is not what the records say

results/NAME holds runs/HASH/record.json of every run, and studies/STUDY/study.json. For every ladder it
writes STUDY.csv, which `steepen fit` reads: the ladder's runs, and runs that differ from one of them in the
seed only. The page (results/NAME/README.md, or --page) has the tables between the lines
`<!-- results/NAME -->` and `<!-- end -->`. Names of machines are removed from records and journals.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.model.arms import find_arm
from steepen.requests.fit import fit
from steepen.results.fit import ComputeResult
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import Journal, read_journals
from steepen.utils.codec import to_builtins
from steepen.utils.files import write_atomically
from steepen.utils.json_io import with_checksum, write_json

LADDER = "ladder"


def records_of(folder: Path, journal: Journal) -> list[RunRecord]:
    """The committed records of the runs that a study's answer rests on; fails if one is missing."""
    found: list[RunRecord] = []
    for run in journal.entry.answer["runs"]:
        record = RunDirectory(folder / "runs" / run).record()
        if record is None:
            raise SystemExit(f"{folder}: the record of run {run} of study {journal.entry.name} is missing.")
        found.append(record)
    return found


def all_records(folder: Path) -> list[RunRecord]:
    """Every committed record."""
    found = [RunDirectory(path).record() for path in sorted((folder / "runs").iterdir())]
    return [record for record in found if record is not None]


def with_further_seeds(folder: Path, ladder: Sequence[RunRecord]) -> list[RunRecord]:
    """The ladder's runs, and all others that differ from one of them in the seed only."""
    known = {replace(record.spec, seed=0).hash for record in ladder}
    return [one for one in all_records(folder) if replace(one.spec, seed=0).hash in known]


def other_rates(folder: Path, ladder: Sequence[RunRecord], shown: set[frozenset[str]]) -> str:
    """The ladder's runs beside those that differ from them in the learning rate only, as a table; or "".

    Pairs in `shown` are left out; those of the table are added to it.
    """

    def without_rate(record: RunRecord) -> str:
        settings = replace(record.spec.hyperparameters, learning_rate=1.0)
        return replace(record.spec, hyperparameters=settings).hash

    known = {without_rate(record): record for record in ladder}
    lines: list[tuple[str, int, int, list[str]]] = []
    for other in all_records(folder):
        record = known.get(without_rate(other))
        if record is None or other.run == record.run or frozenset({record.run, other.run}) in shown:
            continue
        shown.add(frozenset({record.run, other.run}))
        cells = [
            text
            for one in (record, other)
            for text in (
                f"{one.spec.hyperparameters.learning_rate:.3g}",
                f"{one.validation_loss:.4f}",
            )
        ]
        change = f"{other.validation_loss - record.validation_loss:+.4f}"
        title, spec = find_arm(record.spec.arm.name).title, record.spec
        lines.append((title, spec.shape.depth, spec.seed, [*cells, change]))
    if not lines:
        return ""
    columns = ["arm", "depth", "seed", "rate", "loss", "other rate", "its loss", "difference"]
    return markdown(columns, [[title, str(d), str(seed), *cells] for title, d, seed, cells in sorted(lines)])


def rows_of(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One row per run, in the order of the ladder."""
    rows = [
        {
            "arm": record.spec.arm.name,
            "depth": record.spec.shape.depth,
            "seed": record.spec.seed,
            "parameters": record.parameters.stored,
            "tokens": record.tokens,
            "flops": record.flops,
            "loss": record.validation_loss,
            "learning_rate": record.spec.hyperparameters.learning_rate,
            "seconds": round(record.seconds_training, 1),
            "run": record.run,
        }
        for record in records
    ]
    return sorted(rows, key=lambda row: (row["arm"], row["depth"], row["seed"]))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def loss_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean loss by arm and depth, with the number of seeds where there are several."""
    depths = sorted({row["depth"] for row in rows})
    lines: list[list[str]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells: list[str] = []
        for depth in depths:
            losses = [row["loss"] for row in rows if (row["arm"], row["depth"]) == (arm, depth)]
            several = f" ({len(losses)} seeds)" if len(losses) > 1 else ""
            cells.append(f"{statistics.fmean(losses):.4f}{several}" if losses else "–")
        lines.append([find_arm(arm).title, *cells])
    return markdown(["arm", *(f"d{depth}" for depth in depths)], lines)


def verdict_table(rows: Sequence[dict[str, Any]], reference: str) -> str:
    """Laws and verdicts of `steepen fit` on these rows."""
    found = fit(list(rows), reference=reference)
    assert isinstance(found, ComputeResult)
    lines: list[list[str]] = []
    for row in found.to_rows():
        gain = slope = "–"
        if row["delta_gamma"] is not None:
            low, high = row["multiplier_low"], row["multiplier_high"]
            gain = f"{row['multiplier']:.3f} ({low:.3f} to {high:.3f})"
            low, high = row["delta_gamma_low"], row["delta_gamma_high"]
            slope = f"{row['delta_gamma']:+.4f} ({low:+.4f} to {high:+.4f})"
        law = f"{row['gamma']:.4f} ({row['gamma_low']:.4f} to {row['gamma_high']:.4f})"
        lines.append([find_arm(row["arm"]).title, row["better"], gain, row["growth"] or "–", slope, law])
    return markdown(["arm", "in range", "mean multiplier (95%)", "gain", "Δγ (95%)", "γ (90%)"], lines)


def study_tables(answer: Mapping[str, Any]) -> list[str]:
    """Findings and first table of a study that is no ladder."""
    table = answer["tables"][0]
    rows = [[_cell(value) for value in row] for row in table["rows"]]
    return [*(f"- {finding}" for finding in answer["findings"]), "", markdown(table["columns"], rows)]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tables(folder: Path) -> str:
    """The text between the marks of the page."""
    parts: list[str] = []
    shown: set[frozenset[str]] = set()
    for journal in finished(folder):
        name, answer = journal.entry.name, journal.entry.answer
        records = records_of(folder, journal)
        parts += [f"### `{name}`: {len(records)} runs", ""]
        if answer["study"] == LADDER:
            records = with_further_seeds(folder, records)
            rows = rows_of(records)
            parts += [loss_table(rows), "", verdict_table(rows, rows_reference(answer, rows)), ""]
            others = other_rates(folder, records, shown)
            if others:
                parts += ["The same runs with another learning rate:", "", others, ""]
        else:
            parts += [*study_tables(answer), ""]
    return "\n".join(parts).strip() + "\n"


def rows_reference(answer: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The arm that a ladder's verdicts compare with."""
    judged = {verdict["arm"] for verdict in answer["verdicts"]}
    (reference,) = {row["arm"] for row in rows} - judged
    return reference


def finished(folder: Path) -> list[Journal]:
    """Journals with an answer, in the order in which they began."""
    found, unreadable = read_journals(folder / "studies")
    if unreadable:
        raise SystemExit(f"{folder}: {'; '.join(unreadable.values())}")
    return sorted((one for one in found if one.entry.answer is not None), key=lambda one: one.entry.began)


def ladder_csv(folder: Path, journal: Journal) -> str:
    """The table of a ladder for `steepen fit`."""
    text = io.StringIO()
    rows = rows_of(with_further_seeds(folder, records_of(folder, journal)))
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def remove_machine_names(folder: Path) -> None:
    """Write journals and records again without host names and paths of the machine that made them."""
    for journal in read_journals(folder / "studies")[0]:
        entry = replace(journal.entry, host="", runs_directory="runs")
        write_json(journal.file, with_checksum(to_builtins(entry)))
    for file in (folder / "runs").glob("*/record.json"):
        record = RunDirectory(file.parent).record()
        if record is not None and "host" in record.hardware:
            kept = {name: value for name, value in record.hardware.items() if name != "host"}
            write_json(file, replace(record, hardware=kept).to_dict())


def wanted_files(folder: Path, page: Path) -> dict[Path, str]:
    """Every file that is made from the records, with its content."""
    files = {
        folder / f"{journal.entry.name}.csv": ladder_csv(folder, journal)
        for journal in finished(folder)
        if journal.entry.answer["study"] == LADDER
    }
    before, start, rest = page.read_text(encoding="utf-8").partition(f"<!-- results/{folder.name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (start and end):
        raise SystemExit(f"{page} has no lines <!-- results/{folder.name} --> and <!-- end -->.")
    return {**files, page: f"{before}{start}\n{tables(folder)}\n{end}{after}"}


def main() -> None:
    """Write the files, or compare them with the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, default=None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    options = parser.parse_args()
    folder = options.folder.resolve()
    page = options.page or folder / "README.md"
    if not options.check:
        remove_machine_names(folder)
    wanted = wanted_files(folder, page)
    different = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if not options.check:
        for path in different:
            write_atomically(path, wanted[path])
    for path in different:
        print(f"{path}: {'differs from the records' if options.check else 'written'}.")
    sys.exit(options.check and bool(different))


if __name__ == "__main__":
    main()
