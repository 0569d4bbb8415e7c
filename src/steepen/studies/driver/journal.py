"""A study's journal, studies/NAME/study.json: its options, the runs it requested, and its answer.

The journal is for people, `steepen status` and `steepen report`; resuming a study does not need it, as
finished runs come from the store.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from steepen.errors import SteepenError, UsageError, nearest, require, show
from steepen.runs.spec import RunSpec, expected_flops
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.files import file_lock, is_locked, remove_leftovers
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json

JOURNAL = "study.json"
LOCK = "lock"
WRITE_LOCK = ".write-lock"  # while the journal is read and written again
JOURNAL_VERSION = 1
JournalStatus = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class RequestedRun:
    """A run that a study requested, with the columns of a table."""

    run: str
    arm: str
    depth: int
    seed: int
    tokens: int
    flops: float

    def __post_init__(self) -> None:
        # A journal from elsewhere must not name a directory outside the store.
        require(_is_plain(self.run), "RequestedRun", "run", self.run, "the name of a run's directory")

    @staticmethod
    def of(spec: RunSpec) -> RequestedRun:
        """The row of a spec."""
        return RequestedRun(
            spec.hash, spec.arm.name, spec.shape.depth, spec.seed, spec.tokens, expected_flops(spec)
        )


class Batch(list[RunSpec]):
    """Specs that a study yields with a note for its journal: its plan, or why these runs follow."""

    def __init__(self, specs: Sequence[RunSpec], note: dict[str, Any]) -> None:
        super().__init__(specs)
        self.note = note


@dataclass(frozen=True)
class JournalEntry:
    """What study.json holds."""

    name: str
    options: dict[str, Any]
    runs_directory: str
    runs: tuple[RequestedRun, ...] = ()
    batches: int = 0
    status: JournalStatus = "running"  # as written last; `Journal.live_status` knows of a killed driver
    message: str = ""
    answer: Any = None
    notes: tuple[dict[str, Any], ...] = ()  # of its batches, in order
    began: str = ""
    changed: str = ""
    host: str = field(default_factory=socket.gethostname)
    version: int = JOURNAL_VERSION

    def __post_init__(self) -> None:
        check_study_name(self.name)


class Journal:
    """The journal of one study. Several processes may drive a study: they request the same runs."""

    def __init__(self, folder: Path, entry: JournalEntry) -> None:
        self.folder, self.entry = folder, entry
        self._requested: dict[str, RequestedRun] = {}  # by this process

    @property
    def file(self) -> Path:
        """study.json."""
        return self.folder / JOURNAL

    @staticmethod
    def open(studies: Path, name: str, options: dict[str, Any], runs_directory: Path) -> Journal:
        """The journal of a study that is about to be driven.

        It keeps its runs and its answer until it has new ones. Rejects a name that is taken by a study with
        other options.
        """
        check_study_name(name)
        given: dict[str, Any] = json.loads(json.dumps(to_builtins(options)))
        folder = studies / name
        entry = JournalEntry(name, given, "", began=_now())
        if (folder / JOURNAL).exists():
            entry = Journal.read(folder).entry
            before = entry.options
            was = [
                f"{key} was {before.get(key)!r}"
                for key in sorted({*before, *given})
                if before.get(key) != given.get(key)
            ]
            if was:
                raise UsageError(
                    f"the study {name} in {studies} was begun with other options ({', '.join(was)}); "
                    "give this one another name, or remove that folder (its runs stay)."
                )
        entry = replace(
            entry, runs_directory=str(runs_directory.absolute()), batches=0, notes=(), status="running",
            message="", host=socket.gethostname(),
        )  # fmt: skip
        return Journal(folder, entry)

    @staticmethod
    def read(folder: Path) -> Journal:
        """The journal in a study's folder."""
        file = folder / JOURNAL
        try:
            value = without_checksum(read_json(file))
            return Journal(folder, from_builtins(JournalEntry, value, "study"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"{folder} holds no study (there is no {file.name} in it).") from error
        except (OSError, ValueError, SteepenError) as error:
            raise SteepenError(f"the journal {file} can't be read: {error}") from error

    @contextlib.contextmanager
    def driving(self) -> Generator[None]:
        """Hold the study's lock while driving it, and write how it ended."""
        # The lock is shared, as several processes may drive a study: each finds the others' runs busy or in
        # the store. It is held before "running" is written, or `live_status` would call the study killed.
        with file_lock(self.folder / LOCK, shared=True, wait=True, poll_seconds=0.1):
            remove_leftovers(self.folder)
            self._write()
            try:
                yield
            except BaseException as error:
                interrupted = not isinstance(error, Exception)
                self._write(
                    status="stopped" if interrupted or getattr(error, "resumable", False) else "failed",
                    message="stopped by the user." if interrupted else str(error),
                )
                raise

    def add_batch(self, specs: Sequence[RunSpec]) -> None:
        """Add a requested batch."""
        self._requested |= {asked.run: asked for asked in map(RequestedRun.of, specs)}
        # Runs of an earlier drive stay listed until the answer says which it took: other results, such as a
        # retried run's, may have led the study elsewhere.
        known = {asked.run: asked for asked in self.entry.runs}
        notes = (*self.entry.notes, specs.note) if isinstance(specs, Batch) else self.entry.notes
        self._write(
            runs=tuple((self._requested | known).values()), batches=self.entry.batches + 1, notes=notes
        )

    def set_answer(self, value: Any) -> None:
        """Write the answer, and the runs that it took."""
        answer = value.to_dict() if hasattr(value, "to_dict") else to_builtins(value)
        self._write(status="finished", answer=answer, message="", runs=tuple(self._requested.values()))

    @property
    def live_status(self) -> str:
        """running, finished, failed, stopped, killed (running, but no process holds the lock) or unknown."""
        if self.entry.status != "running":
            return self.entry.status
        driven = is_locked(self.folder / LOCK, shared=True)  # None: it cannot be told here
        return {True: "running", False: "killed", None: "unknown"}[driven]

    def runs_directory(self, given: Path | None = None) -> Path:
        """Where the study's runs are: as given, where the journal says, or beside the study if it has moved.

        A study that was copied with its runs has them in `runs` inside its own directory, beside it, or
        beside the directory of studies.
        """
        if given is not None:
            return given
        recorded = Path(self.entry.runs_directory)
        here = self.folder.absolute()
        for place in (recorded, here / "runs", here.parent / "runs", here.parent.parent / "runs"):
            if any((place / asked.run).is_dir() for asked in self.entry.runs):
                return place
        return recorded

    def _write(self, **changes: Any) -> None:
        with file_lock(self.folder / WRITE_LOCK, wait=True, poll_seconds=0.01):
            if "answer" not in changes and self.file.exists():
                # Another process that drives the study may have written the answer since.
                with contextlib.suppress(SteepenError):
                    changes["answer"] = Journal.read(self.folder).entry.answer
            self.entry = replace(self.entry, changed=_now(), **changes)
            write_json(self.file, with_checksum(to_builtins(self.entry)))


@contextlib.contextmanager
def preparing_data(studies: Path, name: str) -> Generator[None]:
    """Hold the lock of a study that has no journal yet, while its data is prepared: see `find_preparing`."""
    check_study_name(name)
    with file_lock(studies / name / LOCK, shared=True, wait=True, poll_seconds=0.1):
        yield


def find_preparing(study: str, studies: Path) -> str | None:
    """The name of a study whose data is being prepared, from its name or an unambiguous prefix of it."""
    names = list_preparing(studies)
    matches = [name for name in names if name == study] or [name for name in names if name.startswith(study)]
    return matches[0] if len(matches) == 1 else None


def list_preparing(studies: Path) -> list[str]:
    """The names of studies whose data is being prepared: a process holds the lock, and no journal exists."""
    return sorted(
        lock.parent.name
        for lock in studies.glob(f"*/{LOCK}")
        if not (lock.parent / JOURNAL).exists() and is_locked(lock, shared=True)
    )


def check_study_name(name: str) -> None:
    """Raise UsageError unless a study can have this name."""
    if not _is_plain(name):
        raise UsageError(f"a study can't be named {show(name)}: use letters, digits, - and _.")


def _is_plain(name: str) -> bool:
    """Whether a text can name one entry of a directory, and no hidden one."""
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")


def find_study_folder(study: str, studies: Path) -> Path:
    """A study's folder: by path, by its name in `studies`, or by an unambiguous prefix of it."""
    path = Path(study)
    for folder in (studies / study, path, path.parent if path.name == JOURNAL else path):
        if (folder / JOURNAL).is_file():
            return folder
    known = sorted(file.parent.name for file in studies.glob(f"*/{JOURNAL}"))
    matches = [name for name in known if name.startswith(study)]
    if len(matches) == 1:
        return studies / matches[0]
    if matches:
        raise UsageError(
            f"{study!r} matches {len(matches)} studies in {studies}: {', '.join(matches)}; "
            "give more of the name."
        )
    if (preparing := find_preparing(study, studies)) is not None:
        raise UsageError(f"the data of the study {preparing} is still being prepared: it has no runs yet.")
    if path.is_dir():
        raise UsageError(f"the folder {study} holds no study (there is no {JOURNAL} in it).")
    has = f"the nearest in {studies} are {nearest(study, known)}" if known else f"{studies} has no studies"
    raise UsageError(
        f"there is no study {study!r}: {has}; give a study's folder, or its name with `studies`."
    )


def read_journals(
    folder: Path, read: Callable[[Path], Journal] = lambda file: Journal.read(file.parent)
) -> tuple[list[Journal], dict[str, str]]:
    """The journals of a folder's studies, and the reason for each that cannot be read, by name."""
    found: list[Journal] = []
    unreadable: dict[str, str] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            found.append(read(path / JOURNAL))
        except UsageError:  # not a study
            continue
        except SteepenError as error:
            unreadable[path.name] = str(error)
    return found, unreadable


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
