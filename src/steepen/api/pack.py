"""One file of a study, to share or to move it: `steepen pack` and `steepen unpack`.

A pack is a gzipped tar: MANIFEST.json with the SHA-256 of every file, then studies/NAME/, runs/HASH/ (spec,
record, metrics, tokenizer; with weights also the last checkpoint) and, where there is an answer, report/.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from steepen.errors import SteepenError, UsageError
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import JOURNAL, Journal, find_study_folder
from steepen.utils.files import write_atomically

if TYPE_CHECKING:
    from steepen.report.write import ShowSteps

MANIFEST = "MANIFEST.json"
VERSION = 1
RUN_FILES = ("spec.json", "record.json", "failure.json", "metrics.jsonl", "samples.jsonl", "tokenizer.json")


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
    with tempfile.TemporaryDirectory(prefix="steepen-pack-") as scratch:
        files = dict(_study_files(folder, name))
        for run in held:
            files |= dict(_run_files(RunDirectory(directory / run), weights))
        if journal.entry.answer is not None:
            from steepen.report.write import make_report

            make_report(folder, Path(scratch) / "report", formats="svg", runs=directory, show=show)
            files |= {
                f"report/{path.relative_to(Path(scratch) / 'report').as_posix()}": path
                for path in sorted((Path(scratch) / "report").rglob("*"))
                if path.is_file()
            }
        packed = Path(scratch) / "pack.tar.gz"
        _write(packed, name, files)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, packed.read_bytes())
    return Packed(target, name, len(held), len(files), target.stat().st_size)


def unpack(path: str | Path, out: str | Path = ".") -> Packed:
    """Unpack a study below `out` (studies/NAME, runs/HASH, report/NAME), after checking every file's SHA-256.

    A file that is already there with the same content is kept; another content is rejected.
    """
    source, target = Path(path), Path(out)
    if not source.is_file():
        raise UsageError(f"there is no file {source}; give one that `steepen pack` wrote.")
    try:
        with tarfile.open(source, "r:gz") as tar:
            manifest = _manifest(tar, source)
            contents = {
                name: _checked(tar, name, digest, source) for name, digest in manifest["files"].items()
            }
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError) as error:
        raise SteepenError(f"{source} is not a readable pack ({error}).") from None
    study = str(manifest["study"])
    places = {_place(name, study, target, source): data for name, data in contents.items()}
    for place, data in places.items():
        if (
            place.exists()
            and place.read_bytes() != data
            and "report" not in place.relative_to(target).parts[:1]
        ):
            raise UsageError(f"{place} is already there with another content; unpack elsewhere with --out.")
    for place, data in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, data)
    runs = {PurePosixPath(name).parts[1] for name in contents if name.startswith("runs/")}
    size = sum(map(len, contents.values()))
    return Packed(target / "studies" / study, study, len(runs), len(contents), size)


def _study_files(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.name == JOURNAL or path.suffix in (".yaml", ".json", ".md")):
            yield f"studies/{name}/{path.name}", path


def _run_files(run: RunDirectory, weights: bool) -> Iterator[tuple[str, Path]]:
    for name in RUN_FILES:
        if (run.path / name).is_file():
            yield f"runs/{run.path.name}/{name}", run.path / name
    for folder in (run.path / "scores", run.path / "evaluation"):
        for path in sorted(folder.rglob("*.json")):
            yield f"runs/{run.path.name}/{path.relative_to(run.path).as_posix()}", path
    if weights and run.saved_step() >= 0:
        final = max(path for path in run.checkpoints.iterdir() if path.name.isdigit())
        for path in sorted(final.rglob("*")):
            if path.is_file():
                yield f"runs/{run.path.name}/{path.relative_to(run.path).as_posix()}", path


def _write(path: Path, study: str, files: dict[str, Path]) -> None:
    contents = {name: file.read_bytes() for name, file in files.items()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    manifest = json.dumps({"version": VERSION, "study": study, "files": digests}, indent=1).encode()
    with tarfile.open(path, "w:gz") as tar:
        for name, data in {MANIFEST: manifest, **contents}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def _manifest(tar: tarfile.TarFile, source: Path) -> dict[str, Any]:
    file = tar.extractfile(MANIFEST)
    value = json.loads(b"" if file is None else file.read())
    if value["version"] != VERSION:
        raise UsageError(f"{source} is a pack of version {value['version']}; this steepen reads {VERSION}.")
    return value


def _checked(tar: tarfile.TarFile, name: str, digest: str, source: Path) -> bytes:
    file = tar.extractfile(name)
    data = b"" if file is None else file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise SteepenError(f"{source} is damaged: {name} does not have the checksum it was packed with.")
    return data


def _place(name: str, study: str, target: Path, source: Path) -> Path:
    """Where a file of a pack goes; a name that would leave the target is rejected."""
    parts = PurePosixPath(name).parts
    outside = not parts or parts[0] not in ("studies", "runs", "report") or ".." in parts
    if outside or "/" in study or study.startswith("."):
        raise SteepenError(f"{source} has a file {name!r}, which does not belong to a study.")
    if parts[0] == "report":
        parts = ("report", study, *parts[1:])
    return target.joinpath(*parts)
