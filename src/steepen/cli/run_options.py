"""The directory of runs, and one run of it, as `steepen runs`, `generate` and `export` take them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.runs.store import RunStore

Runs = Annotated[Path, typer.Option("--runs", help="Directory of all runs.")]
Studies = Annotated[Path, typer.Option("--studies", help="Directory of studies.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def open_store(directory: Path) -> RunStore:
    """The store of a directory of runs; UsageError if there is none."""
    from steepen.runs.store import RunStore

    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}; name the directory of your runs with --runs.")
    return RunStore(directory)


def runs_directory(context: typer.Context, given: Path | None) -> Path:
    """--runs after the subcommand, or before it."""
    parent = context.parent.params.get("runs") if context.parent is not None else None
    return given or Path(parent or "runs")  # typer before 0.27 keeps the text of the parent's option


def find_run(name: str, directory: Path) -> Any:
    """The `Run` that a hash, the beginning of one, or a run's directory names."""
    from steepen.api.runs import open_runs

    path = Path(name)
    if (path / "spec.json").is_file() or (path / "record.json").is_file():
        directory, name = path.absolute().parent, path.absolute().name
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}; name the directory of your runs with --runs.")
    return open_runs(directory)[name]


def run_path(name: Path, directory: Path) -> Path:
    """The path itself if there is something, else the run whose hash begins so; to read a checkpoint from."""
    if name.exists() or len(name.parts) != 1 or not directory.is_dir():
        return name
    return Path(find_run(str(name), directory).path)
