"""FineWeb and FineWeb-Edu from the Hugging Face hub by name: one Parquet file at a time, resumable.

The first listing pins a commit of the repository, so that a preparation that goes on for days, or is
continued next week, reads the files it began with. A file is downloaded, read, and deleted, then the next.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from steepen.data.sources.readers import Reading, read_documents, text_bytes
from steepen.data.sources.resolve import Part, Source
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json

REPOSITORIES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
DEFAULT_CONFIG = "sample-10BT"
SAMPLES = ("sample-10BT", "sample-100BT", "sample-350BT")
PIN = "listing.json"
ATTEMPTS = 6
FIRST_WAIT = 1.0  # seconds before the second attempt; doubled every time
TEXT_PER_BYTE = 1.6  # bytes of text in a byte of these files, for the progress bar

# Faults of this machine, which waiting does not mend.
LOCAL_FAULTS = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Listing:
    """The files of one config at one commit, in order."""

    repository: str
    folder: str
    revision: str | None
    files: tuple[tuple[str, int], ...]


def source(name: str, config: str, reading: Reading, *, hub: str | None, staging: Path, say: Say) -> Source:
    """A config of FineWeb or FineWeb-Edu; `hub` is another hub's URL, or a directory OWNER/NAME/FOLDER."""
    config = config or DEFAULT_CONFIG
    folder = folder_of(name, config)
    if hub is not None and "://" not in hub:
        listing, parts, size = _local(Path(hub), REPOSITORIES[name], folder, reading)
    else:
        listing = _pinned(staging, REPOSITORIES[name], folder) or _list(hub, REPOSITORIES[name], folder)
        fetch = _Fetch(listing, hub, staging, say)
        parts = [Part(path, partial(fetch.documents, path, reading)) for path, _ in listing.files]
        size = int(TEXT_PER_BYTE * sum(size for _, size in listing.files))
    description: dict[str, Any] = {
        "kind": "hub",
        "name": f"{name}:{config}",
        "repository": listing.repository,
        "revision": listing.revision,
        "files": len(listing.files),
        "bytes": sum(size for _, size in listing.files),
        "listing_sha256": hashlib.sha256(canonical_json(listing.files)).hexdigest(),
    }
    return Source(description, size, parts)


def folder_of(name: str, config: str) -> str:
    """The folder of the repository that a config names."""
    if config in SAMPLES:
        return config.replace("-", "/", 1)
    if config == "default":
        return "data"
    if config.startswith("CC-MAIN-"):
        return f"data/{config}"
    raise UsageError(
        f"unknown config {config!r} of {name}; accepted are {', '.join(SAMPLES)}, default (all of it), "
        "and one crawl such as CC-MAIN-2024-10."
    )


def _local(root: Path, repository: str, folder: str, reading: Reading) -> tuple[Listing, list[Part], int]:
    top = root / repository
    files = sorted((top / folder).rglob("*.parquet"), key=lambda file: file.as_posix())
    if not files:
        raise UsageError(
            f"no Parquet file under {top / folder}; --hub takes a directory laid out like the hub."
        )
    listed = tuple((file.relative_to(top).as_posix(), file.stat().st_size) for file in files)
    parts = [Part(file.name, partial(read_documents, file, reading)) for file in files]
    return Listing(repository, folder, None, listed), parts, sum(text_bytes(file, reading) for file in files)


def _pinned(staging: Path, repository: str, folder: str) -> Listing | None:
    """The listing an unfinished preparation began with."""
    path = staging / PIN
    if not path.is_file():
        return None
    stored = cast("dict[str, Any]", json.loads(path.read_bytes()))
    files = tuple((str(name), int(size)) for name, size in stored.pop("files"))
    listing = Listing(files=files, **stored)
    return listing if (listing.repository, listing.folder) == (repository, folder) else None


def _list(hub: str | None, repository: str, folder: str) -> Listing:
    def ask() -> Listing:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api = HfApi(endpoint=hub)
        revision = api.repo_info(repository, repo_type="dataset").sha
        tree = api.list_repo_tree(repository, folder, recursive=True, revision=revision, repo_type="dataset")
        files = [(item.path, item.size) for item in tree if isinstance(item, RepoFile)]
        return Listing(
            repository,
            folder,
            revision,
            tuple(sorted(file for file in files if file[0].endswith(".parquet"))),
        )

    listing = _patiently(f"list {repository}/{folder}", ask)
    if not listing.files:
        raise SteepenError(f"the hub lists no Parquet file in {repository}/{folder}.")
    return listing


class _Fetch:
    """Downloads the files of a listing into a staging folder, one at a time."""

    def __init__(self, listing: Listing, hub: str | None, staging: Path, say: Say) -> None:
        self.listing, self.hub, self.staging, self.say = listing, hub, staging, say

    def documents(self, path: str, reading: Reading, start: int) -> Iterator[str | None]:
        self.staging.mkdir(parents=True, exist_ok=True)
        write_atomically(self.staging / PIN, canonical_json(asdict(self.listing)))
        size = dict(self.listing.files)[path]
        self.say(f"downloading {Path(path).name} ({size / 1e9:.1f} GB)")
        file = _patiently(f"download {path}", partial(self._download, path))
        if file.stat().st_size != size:
            file.unlink()
            raise SteepenError(
                f"{path} came with another size than the hub lists; run the same command again."
            )
        yield from read_documents(file, reading, start)
        file.unlink()  # only now: a reader that stops midway finds the file again

    def _download(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        fetched = hf_hub_download(
            self.listing.repository,
            path,
            repo_type="dataset",
            revision=self.listing.revision,
            endpoint=self.hub,
            local_dir=self.staging,
        )
        return Path(fetched)


def _patiently(what: str, action: Callable[[], T]) -> T:
    """Try again for a while before giving up; a long download outlives a short outage."""
    wait = FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except ImportError:
            raise SteepenError("the hub needs huggingface_hub; `pip install huggingface_hub`.") from None
        except Exception as error:  # the library's and its HTTP client's errors have no common base
            if isinstance(error, OSError) and error.errno is not None and error.errno in LOCAL_FAULTS:
                raise
            if attempt == ATTEMPTS:
                reason = f"{type(error).__name__}: {error}".strip().split("\n")[0].rstrip(".")
                raise SteepenError(
                    f"cannot {what} from the hub ({reason}); check the network and run the same command "
                    "again, it continues where it stopped."
                ) from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError
