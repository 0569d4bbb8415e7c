"""From a source to a prepared directory: one pass, bounded memory, and a journal to continue from.

Everything is written into DIR.partial, which takes the name DIR when it is whole. The journal says how far
the shards on disk can be trusted; a run that was killed goes back to that point and repeats the same bytes.
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
from steepen.data.make_shards import STAGING, Preparation
from steepen.data.manifest import MANIFEST, Manifest
from steepen.data.prepare_journal import State, read_journal
from steepen.data.prepare_options import PrepareRequest, Report, Reporter
from steepen.data.sources.resolve import Source, files, resolve
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import TEMPORARY_SUFFIX, sync_directory
from steepen.utils.lock import file_lock

LOCK = "lock"


def prepare(
    request: PrepareRequest,
    out: str | Path,
    report: Report | None = None,
    threads: int | None = None,
    restart: bool = False,
) -> Dataset:
    """Prepare a source into the directory `out`, or continue an unfinished preparation of the same request.

    `report` is called a few times a second. `restart` throws an unfinished preparation away first.
    """
    out = Path(out).absolute()
    work = partial_directory(out)
    reporter = Reporter(report)
    if restart and work.is_dir():
        with _only_one(work):
            _clear(work)
    source = resolve(request.source, request.reading, request.hub, work / STAGING, reporter.say)
    validation = files(request.val_source, request.reading) if request.val_source else None
    asked = _asked(request, source, validation)
    if (out / MANIFEST).is_file():
        return _existing(out, asked)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is no prepared data; choose another directory for --out.")
    work.mkdir(parents=True, exist_ok=True)
    with _only_one(work):
        if not (work / MANIFEST).is_file():
            preparation = Preparation(
                request,
                source,
                validation,
                asked=asked,
                state=_begun(work, asked),
                work=work,
                report=reporter,
                threads=threads or os.cpu_count() or 1,
            )
            try:
                preparation.run()
            except SteepenError:
                # Leave nothing where nothing would be lost: no document written, no download begun.
                if not preparation.state.documents["train"] and not (work / STAGING).exists():
                    shutil.rmtree(work)
                raise
        elif _found(work) != asked:
            raise _other_preparation(work)
    for leftover in (work / LOCK, *work.glob(f".*{TEMPORARY_SUFFIX}")):
        leftover.unlink(missing_ok=True)
    sync_directory(work)
    work.replace(out)
    sync_directory(out.parent)
    return Dataset.open(out)


def _asked(request: PrepareRequest, source: Source, validation: Source | None) -> dict[str, Any]:
    """Request and source as they look after a journey through JSON."""
    description = source.description
    if validation is not None:
        description = {**description, "validation": validation.description}
    return json.loads(json.dumps({"request": request.record(), "source": description}))


def _begun(work: Path, asked: dict[str, Any]) -> State:
    """How far the same preparation came before; refused where another came as far as a document."""
    found = read_journal(work)
    if found is None:
        return State()
    before, state = found
    if before == asked:
        return state
    if any(state.documents.values()):
        raise _other_preparation(work)
    _clear(work)  # it had not come as far as the first document
    return State()


def _clear(work: Path) -> None:
    """Empty the working directory, but for the lock that is held on it."""
    for entry in work.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _other_preparation(work: Path) -> UsageError:
    return UsageError(
        f"{work} holds an unfinished preparation of another source or with other options; "
        "use --restart to throw it away, or choose another directory for --out."
    )


def _existing(out: Path, asked: dict[str, Any]) -> Dataset:
    if _found(out) != asked:
        raise UsageError(
            f"{out} already holds prepared data of another source or with other options; "
            "choose another directory for --out, or remove it."
        )
    return Dataset.open(out)


def _found(directory: Path) -> dict[str, Any]:
    """What a finished directory was asked to be, comparable with `_asked`."""
    manifest = Manifest.read(directory)
    return {"request": manifest.request, "source": manifest.source}


@contextlib.contextmanager
def _only_one(work: Path) -> Generator[None]:
    """Hold the lock of the working directory; refuse where another process holds it."""
    with file_lock(work / LOCK) as holder:
        if holder is not None:
            raise SteepenError(f"another process is preparing {work} ({holder}); wait for it to finish.")
        yield
