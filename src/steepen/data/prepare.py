"""Prepare a data source: tokenize it into shards in one pass, with bounded memory, resumable after a kill.

Everything is written into DIR.partial, which is renamed to DIR when it is complete. A journal records how far
the shards on disk are valid; an interrupted preparation continues from there and produces the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steepen.data.dataset import MANIFEST, Dataset, Manifest, partial_directory
from steepen.data.prepare_request import PrepareRequest, ProgressReporter
from steepen.data.sources.readers import ReadOptions
from steepen.data.sources.resolve import resolve_source
from steepen.data.sources.source import Source, SourceFunction
from steepen.data.sources.tokenizers import load_tokenizer
from steepen.data.tokenize_source import STAGING, JournalState, TokenizationJob, read_journal
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import file_lock, remove_leftovers, sync
from steepen.utils.progress import StageProgressCallback

__all__ = ["PrepareRequest", "prepare"]

LOCK = "lock"


def prepare(
    request: PrepareRequest,
    out: str | Path,
    progress: StageProgressCallback | None = None,
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
        with _lock(partial, reporter):
            _clear(partial)
    sources, validation, description = _resolve(request, partial, reporter.stage)
    tokenizer = load_tokenizer(request.tokenizer, request.hub)
    options = request.options()
    if tokenizer is not None and tokenizer.name != "gpt2":  # a file or repository may change under its name
        options["tokenizer_sha256"] = tokenizer.identity
    # As JSON values, to compare with the stored ones.
    identity = json.loads(json.dumps({"request": options, "source": description}))
    if (out / MANIFEST).is_file():
        return _open_existing(out, identity)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not prepared data; choose another directory for `out`.")
    partial.mkdir(parents=True, exist_ok=True)
    with _lock(partial, reporter):
        if (out / MANIFEST).is_file():  # another process has finished it since
            shutil.rmtree(partial, ignore_errors=True)
            return _open_existing(out, identity)
        remove_leftovers(partial)
        if not (partial / MANIFEST).is_file():
            state = _resume_state(partial, identity)
            _run(
                TokenizationJob(
                    request, sources, validation, identity=identity, state=state, directory=partial,
                    progress=reporter, threads=threads or os.cpu_count() or 1, tokenizer=tokenizer,
                )
            )  # fmt: skip
        elif _stored_identity(partial) != identity:  # complete, but killed before it was renamed
            raise _other_preparation(partial)
        # Renamed while the lock is held: no other process may begin to prepare in between. The names of the
        # files are on disk before the directory has its own, which says that it is complete.
        (partial / LOCK).unlink(missing_ok=True)
        sync(partial)
        partial.replace(out)
    sync(out.parent)
    return Dataset.open(out)


def _run(job: TokenizationJob) -> None:
    """Run a job; if it fails before a document is written or a download begun, nothing is left behind."""
    try:
        job.run()
    except SteepenError:
        if not job.state.documents("train") and not (job.directory / STAGING).exists():
            shutil.rmtree(job.directory)
        raise


def _resolve(
    request: PrepareRequest, partial: Path, log: Callable[[str], None]
) -> tuple[list[tuple[str, float, Source]], Source | None, dict[str, Any]]:
    """The sources with names and weights, that of validation if it is another, and their description."""

    def resolve(names: tuple[str | SourceFunction, ...], options: ReadOptions, *folder: str) -> Source:
        staging = partial.joinpath(STAGING, *folder)
        return resolve_source(names, options, request.hub, staging, log)

    mixture = request.mixture()
    if mixture:
        mixed = {
            name: resolve((one.source,), one.read_options, name).repeated(one.repeat)
            for name, one in mixture.items()
        }
        sources = [(name, mixture[name].weight, source) for name, source in mixed.items()]
        description: dict[str, Any] = {
            "kind": "mixture",
            "name": ",".join(f"{name}={one.weight:.4g}" for name, one in mixture.items()),
            "sources": {
                name: {"weight": one.weight, "repeat": one.repeat, **mixed[name].description}
                | {"read_options": asdict(one.read_options)}
                for name, one in mixture.items()
            },
        }
    else:
        source = resolve(request.source, request.read_options)
        description = source.description
        sources = [(str(description["name"]), 1.0, source)]
    validation = None
    if request.val_source:
        validation = resolve(request.val_source, request.read_options, "validation")
        description = {**description, "validation": validation.description}
    return sources, validation, description


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
    if state.documents("train") or state.documents("val"):
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
    """The identity recorded in a finished directory, comparable with that of a preparation."""
    manifest = Manifest.read(directory)
    return {"request": manifest.request, "source": manifest.source}


@contextlib.contextmanager
def _lock(partial: Path, reporter: ProgressReporter) -> Generator[None]:
    """Hold the lock of the working directory; waits for another process that prepares the same data."""
    with file_lock(partial / LOCK) as holder:
        if holder is None:
            yield
            return
    reporter.stage(f"waiting for {holder}, which prepares the same data")
    with file_lock(partial / LOCK, wait=True, poll_seconds=0.5):
        yield
