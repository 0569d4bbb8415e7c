"""Print what the paper's authors publish of a run's network: published_scores.py RUN --tables FOLDER

The run's own scores are those that `steepen eval` has saved in its record. Published ones are read from a
folder of CSV tables: core_scores, core_task_scores, effective_depth and passes_at_test_time, one row per
published checkpoint (and task, or number of passes). They match where arm, depth, corpus and network do. A
published checkpoint that `tools/import_authors_checkpoint.py` imported brings its validation loss in its
record, and needs no tables.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steepen.data import Dataset
from steepen.errors import SteepenError, UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.shape import Shape
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory
from steepen.utils.files import open_regular

CORE_TABLE, TASK_TABLE = "core_scores.csv", "core_task_scores.csv"
DEPTH_TABLE, PASSES_TABLE = "effective_depth.csv", "passes_at_test_time.csv"
CORPORA = {"HuggingFaceFW/fineweb": "fineweb", "HuggingFaceFW/fineweb-edu": "fineweb-edu"}
# An imported checkpoint's data has no identity: this, and the name of the authors' folder of data.
PUBLISHED_DATA = "published:"
# The published networks: width 128 per unit of depth, GPT-2's vocabulary padded, context 2,048.
WIDTH_PER_DEPTH, VOCABULARY, CONTEXT = 128, 50_304, 2_048
MEASURED_CORPUS = "fineweb"  # of the tables of KL depth and test-time passes


def find_corpus(identity: str, source: Mapping[str, Any]) -> str | None:
    """The paper's corpus that a run was trained on, or None.

    `identity` is that of the run's data, `source` the source in the manifest of the data at hand.
    """
    if identity.startswith(PUBLISHED_DATA):
        name = identity.removeprefix(PUBLISHED_DATA).replace("_", "-")
        return next((corpus for corpus in ("fineweb-edu", "fineweb") if corpus in name), None)
    return CORPORA.get(str(source.get("repository")))


def imported_scores(record: RunRecord, corpus: str | None) -> dict[str, Any]:
    """What the record of an imported checkpoint states, in the form of `find_published`."""
    spec = record.spec
    return {
        "corpus": corpus or "an unknown corpus",
        "arm": spec.arm.name,
        "depth": spec.shape.depth,
        "flops": record.flops,
        "validation_loss": record.validation_loss,
    }


def find_published(
    folder: Path, arm: Arm, shape: Shape, corpus: str | None
) -> tuple[dict[str, Any] | None, str]:
    """The published scores of an arm, depth and corpus, and why there are none (or "")."""
    if not (folder / CORE_TABLE).is_file():
        raise UsageError(f"{folder} has no {CORE_TABLE}; give a folder of published tables.")
    try:
        return _find(folder, arm, shape, corpus)
    except (ValueError, TypeError, LookupError) as error:  # a column is missing, or a cell is no number
        raise SteepenError(f"{folder} has a damaged table ({error}).") from error


def _find(folder: Path, arm: Arm, shape: Shape, corpus: str | None) -> tuple[dict[str, Any] | None, str]:
    if corpus is None:
        return None, "the data was not prepared from fineweb or fineweb-edu"
    depth = str(shape.depth)
    found = [
        row for row in _read(folder / CORE_TABLE) if row["corpus"] == corpus and _matches(row, arm, depth)
    ]
    tables = (DEPTH_TABLE, PASSES_TABLE) if corpus == MEASURED_CORPUS else ()
    if not found and not any(_matches(row, arm, depth) for table in tables for row in _read(folder / table)):
        return None, f"there is no published {arm.name} d{shape.depth} on {corpus}"
    published_shape = (WIDTH_PER_DEPTH * shape.depth, VOCABULARY, CONTEXT)
    if (shape.width, shape.vocabulary, shape.context) != published_shape or find_arm(arm.name) != arm:
        return None, f"the run's network is not the published {arm.name} d{shape.depth}"
    return _scores(folder, found[0] if found else {}, corpus, arm, depth), ""


def _matches(row: Mapping[str, str], arm: Arm, depth: str) -> bool:
    """Whether a row of a table is of this arm and depth."""
    if row["depth"] != depth:
        return False
    try:
        return find_arm(row["arm"]).name == arm.name  # the tables use the paper's names too
    except UsageError:
        return False


def _scores(folder: Path, row: Mapping[str, str], corpus: str, arm: Arm, depth: str) -> dict[str, Any]:
    tasks = {
        task["task"]: {"nll": _number(task["answer_nll"]), "centered": _number(task["centered_accuracy"])}
        for task in _read(folder / TASK_TABLE)
        if task["corpus"] == corpus and _matches(task, arm, depth)
    }
    scores: dict[str, Any] = {
        "corpus": corpus,
        "arm": arm.name,
        "depth": int(depth),
        "flops": _number(row.get("compute_flops", "")),
        "validation_loss": _number(row.get("val_loss", "")),
        "core22": _number(row.get("core_accuracy", "")),
        "core22_seed_sd": _number(row.get("core_accuracy_std", "")),
        "core17": _number(row.get("core17_accuracy", "")),
        "core17_seed_sd": _number(row.get("core17_accuracy_std", "")),
        "nll22": _number(row.get("answer_nll", "")),
        "tasks": tasks,
        "kl_depth": None,
        "test_time_passes": None,
    }
    if corpus != MEASURED_CORPUS:
        return scores
    for one in _read(folder / DEPTH_TABLE):
        if _matches(one, arm, depth):
            scores["kl_depth"] = _number(one["effective_depth"])
    curve = [one for one in _read(folder / PASSES_TABLE) if _matches(one, arm, depth)]
    if curve:
        losses = {int(one["eval_passes"]): float(one["val_loss"]) for one in curve}
        trained = int(curve[0]["trained_passes"])
        differences = {passes: loss - losses[trained] for passes, loss in losses.items()}
        scores["test_time_passes"] = {"trained": trained, "losses": losses, "differences": differences}
    return scores


def _number(text: str) -> float | None:
    """The number in a cell; None for an empty one, which was not published."""
    return float(text) if text else None


def _read(file: Path) -> list[dict[str, str]]:
    """The rows of a table; [] if the folder does not have it."""
    if not file.is_file():
        return []
    try:
        with open(file, encoding="utf-8", newline="", opener=open_regular) as lines:
            return list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SteepenError(f"{file} cannot be read ({error}).") from error


def compare(record: RunRecord, tables: Path | None, data: Path | None) -> tuple[dict[str, Any] | None, str]:
    """Published scores of a run's network, and why there are none: of the tables, or of an imported run."""
    spec = record.spec
    source = {} if data is None else Dataset.open(data).manifest.source
    corpus, found, reason = find_corpus(spec.data.identity, source), None, "give `--tables`"
    if tables is not None:
        found, reason = find_published(tables, spec.arm, spec.shape, corpus)
    if found is None and spec.data.identity.startswith(PUBLISHED_DATA):
        return imported_scores(record, corpus), ""
    return found, reason


def lines(scores: Mapping[str, Any], published: Mapping[str, Any]) -> Iterator[str]:
    """The published scores, each beside the run's own where it was evaluated."""
    if published.get("validation_loss") is not None:
        yield (
            f"published {published['arm']} d{published['depth']} on {published['corpus']} "
            f"({published['flops']:.3e} FLOPs): validation loss {published['validation_loss']:.4f}"
            f"{_own(scores.get('validation', {}).get('loss'))}"
        )
    if published.get("kl_depth") is not None:
        own = (scores.get("kl_depth") or {}).get("depth")
        beside = "" if own is None else f" (own {own})"
        yield f"published: KL effective depth {published['kl_depth']:g}{beside}"
    if known := published.get("test_time_passes"):
        parts = ", ".join(f"{passes}: {value:+.4f}" for passes, value in known["differences"].items())
        yield f"published, minus loss at {known['trained']}: {parts}"
    core = scores.get("core") or {}
    for title, name in (("CORE22", "core22"), ("CORE17", "core17"), ("answer NLL", "nll22")):
        if published.get(name) is not None:
            yield f"published: {title} {published[name]:.4f}{_own(core.get(name))} (convention: authors)"
    for label, task in published.get("tasks", {}).items():
        own = (core.get("tasks") or {}).get(label, {})
        shown = (("centred accuracy", "centered"), ("answer NLL", "nll"))
        yield f"{label}: " + ", ".join(
            f"{title} {'–' if task[name] is None else f'{task[name]:.4f}'}{_own(own.get(name))}"
            for title, name in shown
        )


def _own(value: float | None) -> str:
    return "" if value is None else f" (own {value:.4f})"


def main(words: list[str]) -> int:
    """Print the comparison, or its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tables", type=Path, help="folder of published tables")
    parser.add_argument("--data", type=Path, help="prepared data of the run, which says its corpus")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    try:
        record = RunDirectory(given.run).record()
        if record is None:
            raise UsageError(f"{given.run} is not a finished run.")
        published, reason = compare(record, given.tables, given.data)
    except SteepenError as error:
        print(error, file=sys.stderr)
        return 2
    if published is None:
        print(f"no published scores to compare with: {reason}.", file=sys.stderr)
        return 1
    print(json.dumps(published) if given.json else "\n".join(lines(record.evaluation, published)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
