"""Prepare a data source: tokenize it into shards in one pass, with bounded memory, resumable after a kill.

Everything is written into DIR.partial, which is renamed to DIR when it is complete. A journal records how far
the shards on disk are valid; an interrupted preparation continues from there and produces the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from steepen.data.dataset import Dataset, partial_directory
from steepen.data.manifest import MANIFEST, Manifest
from steepen.data.prepare_request import PrepareProgress, PrepareRequest, ProgressCallback, ProgressReporter
from steepen.data.sources.resolve import resolve_source
from steepen.data.sources.source import Source
from steepen.data.tokenize_source import STAGING, JournalState, TokenizationJob, read_journal
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import remove_leftovers, sync_directory
from steepen.utils.lock import file_lock

__all__ = ["PrepareProgress", "PrepareRequest", "prepare"]

LOCK = "lock"


def prepare(
    request: PrepareRequest,
    out: str | Path,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
    restart: bool = False,
) -> Dataset:
    """Prepare a source into the directory `out`, or resume an unfinished preparation of the same request.

    `progress` is called a few times a second. `restart` deletes an unfinished preparation first.
    """
    out = Path(out).absolute()
    partial = partial_directory(out)
    reporter = ProgressReporter(progress)
    if restart and partial.is_dir():
        with _lock(partial):
            _clear(partial)
    source = resolve_source(
        request.source, request.read_options, request.hub, partial / STAGING, reporter.stage
    )
    validation = None
    if request.val_source:
        staging = partial / STAGING / "validation"
        validation = resolve_source(
            request.val_source, request.read_options, request.hub, staging, reporter.stage
        )
    identity = _identity(request, source, validation)
    if (out / MANIFEST).is_file():
        return _open_existing(out, identity)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not prepared data; choose another directory for `out`.")
    partial.mkdir(parents=True, exist_ok=True)
    with _lock(partial):
        if (out / MANIFEST).is_file():  # another process has finished it since
            shutil.rmtree(partial, ignore_errors=True)
            return _open_existing(out, identity)
        remove_leftovers(partial)
        if not (partial / MANIFEST).is_file():
            job = TokenizationJob(
                request,
                source,
                validation,
                identity=identity,
                state=_resume_state(partial, identity),
                directory=partial,
                progress=reporter,
                threads=threads or os.cpu_count() or 1,
            )
            try:
                job.run()
            except SteepenError:
                # Remove the directory if no document was written and no download begun.
                if not job.state.documents["train"] and not (partial / STAGING).exists():
                    shutil.rmtree(partial)
                raise
        elif _stored_identity(partial) != identity:
            raise _other_preparation(partial)
        # Renamed while the lock is held: no other process may begin to prepare in between.
        (partial / LOCK).unlink(missing_ok=True)
        sync_directory(partial)
        partial.replace(out)
    sync_directory(out.parent)
    return Dataset.open(out)


def _identity(request: PrepareRequest, source: Source, validation: Source | None) -> dict[str, Any]:
    """Request and source description as JSON values, to compare with the stored ones."""
    description = source.description
    if validation is not None:
        description = {**description, "validation": validation.description}
    return json.loads(json.dumps({"request": request.options(), "source": description}))


def _resume_state(partial: Path, identity: dict[str, Any]) -> JournalState:
    """The state of an interrupted preparation of the same identity, or a new one.

    Raises if another preparation has already written documents.
    """
    journal = read_journal(partial)
    if journal is None:
        return JournalState()
    stored, state = journal
    if stored == identity:
        return state
    if any(state.documents.values()):
        raise _other_preparation(partial)
    _clear(partial)  # the other one had not written a document yet
    return JournalState()


def _clear(partial: Path) -> None:
    """Delete everything in the working directory except its lock, which is held."""
    for entry in partial.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _other_preparation(partial: Path) -> UsageError:
    return UsageError(
        f"{partial} holds an unfinished preparation of another source or with other options; "
        "use `restart` to delete it, or choose another directory for `out`."
    )


def _open_existing(out: Path, identity: dict[str, Any]) -> Dataset:
    if _stored_identity(out) != identity:
        raise UsageError(
            f"{out} already holds prepared data of another source or with other options; "
            "choose another directory for `out`, or remove it."
        )
    return Dataset.open(out)


def _stored_identity(directory: Path) -> dict[str, Any]:
    """The identity recorded in a finished directory, comparable with `_identity`."""
    manifest = Manifest.read(directory)
    return {"request": manifest.request, "source": manifest.source}


@contextlib.contextmanager
def _lock(partial: Path) -> Generator[None]:
    """Hold the lock of the working directory; raises if another process holds it."""
    with file_lock(partial / LOCK) as holder:
        if holder is not None:
            raise SteepenError(f"another process is preparing {partial} ({holder}); wait for it to finish.")
        yield
