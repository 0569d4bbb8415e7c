"""A study's files as one gzipped tar: written and read in one pass, whatever its size.

The files come first (studies/NAME/, runs/HASH/, report/), then MANIFEST.json with the SHA-256 of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from steepen.errors import SteepenError, UsageError, show
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import JOURNAL, Journal, check_study_name
from steepen.utils.codec import from_builtins
from steepen.utils.files import atomic_file, open_regular, quietly, scratch_directory, sha256_of_file
from steepen.utils.formatting import printable
from steepen.utils.json_io import parse_json

MANIFEST = "MANIFEST.json"
VERSION = 1
MAX_UNPACKED, MAX_RATIO, MAX_FILES = 1 << 30, 100, 200_000  # bytes; bytes per byte of the pack; files
MAX_MANIFEST = 32 << 20  # bytes
MAX_HEADER = 1 << 16  # bytes of a tar header with a long name
RUN_FILES = ("spec.json", "record.json", "failure.json", "metrics.jsonl", "samples.jsonl", "tokenizer.json")
# The names that a pack may have: no hidden ones, and nothing that a run or a study does not hold.
_PART = r"[^/.\x00-\x1f][^/\x00-\x1f]*"
_NAME = re.compile(
    rf"studies/{_PART}/{_PART}\.(json|yaml|md)|report(/{_PART})+"
    rf"|runs/[0-9a-f]{{16}}/({'|'.join(map(re.escape, RUN_FILES))}"
    rf"|(scores|evaluation)(/{_PART})+\.json|checkpoints/\d{{8}}(/{_PART})+)"
)


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


def study_files(journal: Journal, runs: Iterable[Path], *, weights: bool) -> dict[str, Path]:
    """The files of a study and its runs by their names in a pack; `weights`: with each last checkpoint."""
    files: dict[str, Path] = {}

    def add(name: str, folder: Path, found: Iterable[Path]) -> None:
        for path in found:
            # A link in a folder from elsewhere may lead to a private file.
            if path.is_file() and not path.resolve().is_relative_to(folder.resolve()):
                raise UsageError(
                    f"{path} is a link that leads out of {folder}; replace it by the file to pack it."
                )
            if path.is_file():
                files[f"{name}/{path.relative_to(folder).as_posix()}"] = path

    own = [path for path in sorted(journal.folder.iterdir()) if path.suffix in (".yaml", ".json", ".md")]
    add(f"studies/{journal.entry.name}", journal.folder, own)
    for run in map(RunDirectory, runs):
        found = [run.path / name for name in RUN_FILES]
        for kind in ("scores", "evaluation"):
            found += sorted((run.path / kind).rglob("*.json"))
        if weights and run.saved_step() >= 0:
            found += sorted((run.checkpoints / f"{run.saved_step():08d}").rglob("*"))
        add(f"runs/{run.path.name}", run.path, found)
    return files


def write_archive(target: Path, study: str, files: Mapping[str, Path]) -> None:
    """Write files under their names in a pack; each is read once, in pieces."""
    digests: dict[str, str] = {}
    with atomic_file(target) as packed, tarfile.open(fileobj=packed, mode="w|gz") as tar:
        for name, path in files.items():
            with open(path, "rb", opener=open_regular) as file:
                content = _Hashed(file)
                entry = tarfile.TarInfo(name)
                entry.size = os.fstat(file.fileno()).st_size  # what is appended meanwhile is left out
                tar.addfile(entry, content)  # pyright: ignore[reportArgumentType]
                digests[name] = content.hash.hexdigest()
        manifest = json.dumps({"version": VERSION, "study": study, "files": digests}, indent=1).encode()
        if len(manifest) > MAX_MANIFEST or len(files) > MAX_FILES:
            raise SteepenError(f"the study {study} has {len(files):,} files; a pack holds {MAX_FILES:,}.")
        entry = tarfile.TarInfo(MANIFEST)
        entry.size = len(manifest)
        tar.addfile(entry, io.BytesIO(manifest))


def extract_archive(source: Path, target: Path) -> tuple[Manifest, int]:
    """Extract a pack below `target`, all of its files or none; returns its manifest and their bytes.

    Everything is checked in a hidden directory first: names, checksums, and that the runs are the study's. A
    file that is there already with the same content is kept; another content is rejected, except in report/.
    """
    with scratch_directory("unpacking", target) as scratch:
        new = scratch / "new"
        with _reading(source), tarfile.open(source, "r|gz", tarinfo=_Entry) as tar:
            manifest, digests, size = _extract(tar, source, new)
        _check(manifest, digests, source, new)
        places = {name: _place(name, manifest.study, target) for name in digests}
        moves = {
            new / name: place
            for name, place in places.items()
            if not _same(place, digests[name], replace=name.startswith("report/"))
        }
        journal = new / "studies" / manifest.study / JOURNAL
        _move(dict(sorted(moves.items(), key=lambda move: move[0] == journal)), scratch)  # the journal last
    return manifest, size


class _Hashed:
    """A file, to read, with the SHA-256 of what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.hash.update(data)
        return data


class _Entry(tarfile.TarInfo):
    """A tar header that may not ask for much memory or time."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:  # the hook that tarfile has for this
        # Attributes of all files add up, and the list of parts of a sparse file has any length.
        if self.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE):
            raise tarfile.ReadError("it has global attributes or a sparse file")
        if self.size > MAX_HEADER and not self.isreg():
            raise tarfile.ReadError("a header is too long")
        return super()._proc_member(tar)  # pyright: ignore

    def _refuse(self, *_: object) -> None:
        raise tarfile.ReadError("it has a sparse file")

    # The attributes of a file may make it sparse.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


@contextlib.contextmanager
def _reading(source: Path) -> Generator[None]:
    """Report a damaged archive, and not a full disk, in one sentence."""
    try:
        yield
    except (tarfile.TarError, zlib.error, EOFError, ValueError, RecursionError) as error:
        raise SteepenError(f"{source} is not a readable pack ({error}).") from None


def _extract(tar: tarfile.TarFile, source: Path, new: Path) -> tuple[Manifest, dict[str, str], int]:
    """Extract every file below `new`; returns the manifest, the SHA-256 of each file, and their bytes."""
    limit, size, headers = max(MAX_UNPACKED, MAX_RATIO * source.stat().st_size), 0, 0
    manifest: Manifest | None = None
    digests: dict[str, str] = {}
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]  (it would keep every header)
        headers += 1
        if tar.offset > limit or headers > MAX_FILES:  # where the next header begins
            raise SteepenError(
                f"{source} would unpack to more than {limit / 2**30:,.0f} GiB or {MAX_FILES:,} files: it is "
                "not a pack of a study."
            )
        file = tar.extractfile(member) if member.isreg() else None
        if file is None:
            continue
        if member.name == MANIFEST:
            if member.size > MAX_MANIFEST:
                raise ValueError(f"its manifest has more than {MAX_MANIFEST >> 20} MiB")
            manifest = from_builtins(Manifest, parse_json(file.read()), MANIFEST)
            continue
        if (
            not _NAME.fullmatch(member.name)
            or printable(member.name) != member.name
            or member.name in digests
        ):
            raise SteepenError(f"{source} has a file {show(member.name)}, which does not belong to a study.")
        path = new / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _Hashed(file)
        with path.open("xb") as copy:
            shutil.copyfileobj(content, copy)  # pyright: ignore[reportArgumentType]
            copy.flush()
            os.fsync(copy.fileno())
        digests[member.name] = content.hash.hexdigest()
        size += member.size
    if manifest is None:
        raise ValueError(f"it has no {MANIFEST}")
    return manifest, digests, size


def _check(manifest: Manifest, digests: Mapping[str, str], source: Path, new: Path) -> None:
    """Compare what was extracted with the manifest, and with the study's own journal."""
    if manifest.version != VERSION:
        raise UsageError(f"this is a pack of version {manifest.version}; this steepen reads {VERSION}.")
    for name, digest in manifest.files.items():
        if name not in digests:
            raise SteepenError(f"{source} is not a readable pack (it has no {name}).")
        if digests[name] != digest:
            raise SteepenError(f"{source} is damaged: {name} does not have the checksum it was packed with.")
    journal = Journal.read(new / "studies" / manifest.study)
    own = {("studies", manifest.study), *(("runs", asked.run) for asked in journal.entry.runs)}
    for name in digests:
        parts = name.split("/")
        foreign = parts[0] != "report" and (parts[0], parts[1]) not in own
        if foreign or name not in manifest.files or journal.entry.name != manifest.study:
            raise SteepenError(
                f"{source} has a file {show(name)}, which does not belong to the study {manifest.study}."
            )


def _place(name: str, study: str, target: Path) -> Path:
    """Where a file of a pack goes; the report into a directory of its own."""
    report = name.removeprefix("report/")
    return target / name if report == name else target / "report" / study / report


def _same(place: Path, digest: str, *, replace: bool) -> bool:
    """Whether a file is there already; raises if one with another content is, unless that may be replaced."""
    if not (place.exists() or place.is_symlink()):
        return False
    if place.is_file() and sha256_of_file(place) == digest:
        return True
    if replace and place.is_file():
        return False
    raise UsageError(f"{place} is already there with another content; unpack elsewhere with `out`.")


def _move(moves: Mapping[Path, Path], scratch: Path) -> None:
    """Move files to their places; after an error or a signal, undo what was done."""
    with contextlib.ExitStack() as undo:
        for number, (file, place) in enumerate(moves.items()):
            for folder in reversed([one for one in place.parents if not one.exists()]):
                folder.mkdir(exist_ok=True)
                undo.callback(quietly, folder.rmdir)
            if place.exists():
                old = scratch / f"old-{number}"
                shutil.copy2(place, old)
                undo.callback(quietly, shutil.move, old, place)
            else:
                undo.callback(quietly, place.unlink)
            shutil.move(file, place)  # also where runs/ is a link to another disk
        undo.pop_all()
