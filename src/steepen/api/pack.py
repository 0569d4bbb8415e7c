"""One file of a study, to share or to move it: `steepen pack` and `steepen unpack`.

A pack is a gzipped tar: MANIFEST.json with the SHA-256 of every file, then studies/NAME/, runs/HASH/ (spec,
record, metrics, tokenizer; with weights also the last checkpoint) and, where there is an answer, report/.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from steepen.errors import SteepenError, UsageError, show
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import JOURNAL, Journal, check_study_name, find_study_folder
from steepen.utils.codec import from_builtins
from steepen.utils.files import sha256_of_file, write_atomically
from steepen.utils.json_io import parse_json

if TYPE_CHECKING:
    from steepen.report.write import ShowSteps

MANIFEST = "MANIFEST.json"
VERSION = 1
MAX_UNPACKED, MAX_RATIO, MAX_FILES = 1 << 30, 100, 1_000_000  # bytes; bytes per byte of the pack; files
RUN_FILES = ("spec.json", "record.json", "failure.json", "metrics.jsonl", "samples.jsonl", "tokenizer.json")


@dataclass(frozen=True)
class Packed:
    """What a pack holds, and where it is."""

    path: Path
    study: str
    runs: int
    files: int
    bytes: int  # of the file itself, or of the files unpacked from it


@dataclass(frozen=True)
class Manifest:
    """What MANIFEST.json holds."""

    version: int
    study: str
    files: dict[str, str]  # SHA-256 by name

    def __post_init__(self) -> None:
        check_study_name(self.study)
        if f"studies/{self.study}/{JOURNAL}" not in self.files:
            raise UsageError(f"this pack has no study {self.study}.")


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
    with _reading(source):
        tar = tarfile.open(source, "r:gz")  # noqa: SIM115
    with tar, _reading(source):
        members = _members(tar, source)
        manifest = _manifest(tar, members)
        places = {name: _place(name, manifest.study, target, source) for name in manifest.files}
        size = 0
        for name, digest in manifest.files.items():
            size += _check(tar, members, name, digest, source)
        new = _new_places(manifest.files, places)
        for name in new:
            write_atomically(places[name], _open(tar, members, name).read())
    runs = {PurePosixPath(name).parts[1] for name in manifest.files if name.startswith("runs/")}
    return Packed(target / "studies" / manifest.study, manifest.study, len(runs), len(places), size)


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


def _write(path: Path, study: str, files: dict[str, Path]) -> None:
    contents = {name: file.read_bytes() for name, file in files.items()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    manifest = json.dumps({"version": VERSION, "study": study, "files": digests}, indent=1).encode()
    with tarfile.open(path, "w:gz") as tar:
        for name, data in {MANIFEST: manifest, **contents}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


@contextlib.contextmanager
def _reading(source: Path) -> Generator[None]:
    """Report a damaged archive, and not a full disk, in one sentence."""
    try:
        yield
    except (tarfile.TarError, zlib.error, EOFError, ValueError, gzip.BadGzipFile) as error:
        raise SteepenError(f"{source} is not a readable pack ({error}).") from None


def _members(tar: tarfile.TarFile, source: Path) -> dict[str, tarfile.TarInfo]:
    """The files of an archive by name; raises if it would unpack to absurdly much."""
    limit, total = max(MAX_UNPACKED, MAX_RATIO * source.stat().st_size), 0
    found: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        total += member.size
        if total > limit or len(found) > MAX_FILES:
            raise SteepenError(
                f"{source} would unpack to more than {limit / 2**30:,.0f} GiB or {MAX_FILES:,} files: it is "
                "not a pack of a study."
            )
        if member.isreg():
            found[member.name] = member
    return found


def _manifest(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> Manifest:
    value: Any = parse_json(_open(tar, members, MANIFEST).read())
    found = from_builtins(Manifest, value, MANIFEST)
    if found.version != VERSION:
        raise UsageError(f"this is a pack of version {found.version}; this steepen reads {VERSION}.")
    return found


def _open(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> IO[bytes]:
    file = tar.extractfile(members[name]) if name in members else None
    if file is None:
        raise ValueError(f"it has no {name}")
    return file


def _check(
    tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str, digest: str, source: Path
) -> int:
    """Compare a file of a pack with its checksum; returns its bytes."""
    if hashlib.file_digest(_open(tar, members, name), "sha256").hexdigest() != digest:  # pyright: ignore[reportArgumentType]
        raise SteepenError(f"{source} is damaged: {name} does not have the checksum it was packed with.")
    return members[name].size


def _new_places(digests: dict[str, str], places: dict[str, Path]) -> list[str]:
    """The files that are not there yet; raises if one is there with another content, except in report/."""
    new: list[str] = []
    for name, place in places.items():
        if place.exists() and sha256_of_file(place) == digests[name]:
            continue
        if place.exists() and not name.startswith("report/"):
            raise UsageError(f"{place} is already there with another content; unpack elsewhere with --out.")
        new.append(name)
    return new


def _place(name: str, study: str, target: Path, source: Path) -> Path:
    """Where a file of a pack goes; a name that would leave the target is rejected."""
    parts = PurePosixPath(name).parts
    inside = len(parts) > 2 if parts[:1] != ("report",) else len(parts) > 1
    good = parts[:1] in (("studies",), ("runs",), ("report",)) and not {".."} & {*parts}
    if not (inside and good) or "\0" in name:
        raise SteepenError(f"{source} has a file {show(name)}, which does not belong to a study.")
    if parts[0] == "report":
        parts = ("report", study, *parts[1:])
    return target.joinpath(*parts)
