"""Scores that the paper's authors publish for their checkpoints, to compare a run with.

Read from a folder of CSV tables: core_scores, core_task_scores, effective_depth and passes_at_test_time, one
row per published checkpoint (and task, or number of passes). They are not shipped with the package. A
published checkpoint that was imported brings its validation loss in its record.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import SteepenError, UsageError
from steepen.utils.files import open_regular

if TYPE_CHECKING:
    from steepen.model.arm import Arm
    from steepen.model.shape import Shape
    from steepen.runs.record import RunRecord

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
    require_tables(folder)
    try:
        return _find(folder, arm, shape, corpus)
    except (ValueError, TypeError, LookupError) as error:  # a column is missing, or a cell is no number
        raise SteepenError(f"`published` = {folder} has a damaged table ({error}).") from error


def require_tables(folder: Path) -> None:
    """Raise UsageError for a folder without the published tables."""
    if not (folder / CORE_TABLE).is_file():
        raise UsageError(f"`published` = {folder} has no {CORE_TABLE}; give a folder of published tables.")


def _find(folder: Path, arm: Arm, shape: Shape, corpus: str | None) -> tuple[dict[str, Any] | None, str]:
    from steepen.model.arms import find_arm

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
    from steepen.model.arms import find_arm

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
