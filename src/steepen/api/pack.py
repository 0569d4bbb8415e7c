"""One file of a study, to share or to move it: `steepen pack` and `steepen unpack`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steepen.errors import UsageError
from steepen.runs.store import RunDirectory
from steepen.studies.driver.archive import RUN_FILES, extract_archive, write_archive
from steepen.studies.driver.journal import JOURNAL, Journal, find_study_folder
from steepen.utils.files import scratch_directory

if TYPE_CHECKING:
    from steepen.report.write import ShowSteps


@dataclass(frozen=True)
class Packed:
    """What a pack holds, and where it is."""

    path: Path
    study: str
    runs: int
    files: int
    bytes: int  # of the file itself, or of the files unpacked from it


def pack(
    study: str | Path,
    out: str | Path | None = None,
    *,
    studies: str | Path = "studies",
    runs: str | Path | None = None,
    weights: bool = False,
    show: ShowSteps | None = None,
) -> Packed:
    """Write a study with its runs, answer and report to one file, NAME.steepen.tar.gz by default.

    `weights` adds the last checkpoint of every run, optimizer state included; `show` is as in `make_report`.
    """
    folder = find_study_folder(str(study), Path(studies))
    journal = Journal.read(folder)
    name = journal.entry.name
    target = Path(f"{name}.steepen.tar.gz") if out is None else Path(out)
    directory = journal.runs_directory(None if runs is None else Path(runs))
    held = [asked.run for asked in journal.entry.runs if (directory / asked.run).is_dir()]
    if journal.entry.runs and not held:
        raise UsageError(f"the runs of the study {name} are not in {directory}; say where with --runs.")
    with scratch_directory("packing", target.parent) as scratch:
        files = dict(_study_files(folder, name))
        for run in held:
            files |= dict(_run_files(RunDirectory(directory / run), weights))
        if journal.entry.answer is not None:
            from steepen.report.write import make_report

            report = scratch / "report"
            make_report(folder, report, formats="svg", runs=directory, show=show)
            found = [path for path in sorted(report.rglob("*")) if path.is_file()]
            files |= {path.relative_to(scratch).as_posix(): path for path in found}
        write_archive(target, name, files)
    return Packed(target, name, len(held), len(files), target.stat().st_size)


def unpack(path: str | Path, out: str | Path = ".") -> Packed:
    """Unpack a study below `out` (studies/NAME, runs/HASH, report/NAME), after checking every file's SHA-256.

    A file that is already there with the same content is kept; another content is rejected. All files are
    written, or none.
    """
    source, target = Path(path), Path(out)
    if not source.is_file():
        raise UsageError(f"there is no file {source}; give one that `steepen pack` wrote.")
    manifest, size = extract_archive(source, target)
    runs = {name.split("/")[1] for name in manifest.files if name.startswith("runs/")}
    folder = target / "studies" / manifest.study
    return Packed(folder, manifest.study, len(runs), len(manifest.files), size)


def _study_files(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.name == JOURNAL or path.suffix in (".yaml", ".json", ".md")):
            yield f"studies/{name}/{path.name}", _own(path, folder)


def _run_files(run: RunDirectory, weights: bool) -> Iterator[tuple[str, Path]]:
    found = [run.path / name for name in RUN_FILES]
    for folder in (run.path / "scores", run.path / "evaluation"):
        found += sorted(folder.rglob("*.json"))
    if weights and run.saved_step() >= 0:
        found += sorted((run.checkpoints / f"{run.saved_step():08d}").rglob("*"))
    for path in found:
        if path.is_file():
            yield f"runs/{run.path.name}/{path.relative_to(run.path).as_posix()}", _own(path, run.path)


def _own(path: Path, folder: Path) -> Path:
    """The path, if it lies in the folder: a link in a folder from elsewhere may lead to a private file."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{path} is a link that leads out of {folder}; replace it by the file to pack it.")
    return path
