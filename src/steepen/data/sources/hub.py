"""FineWeb and FineWeb-Edu from the Hugging Face Hub: one Parquet file at a time, resumable.

The first listing pins a commit of the repository, so that a preparation that runs for days, or is resumed
next week, reads the files it began with. Each file is downloaded, read and deleted before the next.
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

from steepen.data.sources.readers import ReadOptions, estimate_text_bytes, read_documents
from steepen.data.sources.source import Part, Source
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json

REPOSITORIES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
DEFAULT_CONFIG = "sample-10BT"
SAMPLES = ("sample-10BT", "sample-100BT", "sample-350BT")
LISTING_FILE = "listing.json"
ATTEMPTS = 6
FIRST_RETRY_SECONDS = 1.0  # before the second attempt; doubled after every failure
TEXT_BYTES_PER_PARQUET_BYTE = 1.6  # of these datasets, for the progress bar

# Local faults, which a retry does not repair.
LOCAL_ERRNOS = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}

T = TypeVar("T")


@dataclass(frozen=True)
class HubListing:
    """The (path, bytes) of every Parquet file of one config at one commit, in order."""

    repository: str
    folder: str
    revision: str | None
    files: tuple[tuple[str, int], ...]


def hub_source(
    name: str,
    config: str,
    options: ReadOptions,
    *,
    endpoint: str | None,
    staging: Path,
    log: Callable[[str], None],
) -> Source:
    """A config of FineWeb or FineWeb-Edu.

    `endpoint` is another Hub's URL, or a directory laid out as OWNER/NAME/FOLDER; None is huggingface.co.
    """
    config = config or DEFAULT_CONFIG
    folder = repository_folder(name, config)
    if endpoint is not None and "://" not in endpoint:
        listing, parts, size = _local_mirror(Path(endpoint), REPOSITORIES[name], folder, options)
    else:
        repository = REPOSITORIES[name]
        listing = _pinned_listing(staging, repository, folder) or _list_files(endpoint, repository, folder)
        download = _Downloader(listing, endpoint, staging, log)
        parts = [Part(path, partial(download.documents, path, options)) for path, _ in listing.files]
        size = int(TEXT_BYTES_PER_PARQUET_BYTE * sum(size for _, size in listing.files))
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


def repository_folder(name: str, config: str) -> str:
    """The folder of the repository that holds a config."""
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


def _local_mirror(
    root: Path, repository: str, folder: str, options: ReadOptions
) -> tuple[HubListing, list[Part], int]:
    top = root / repository
    files = sorted((top / folder).rglob("*.parquet"), key=lambda file: file.as_posix())
    if not files:
        raise UsageError(
            f"no Parquet file under {top / folder}; --hub takes a directory laid out like the Hub."
        )
    listed = tuple((file.relative_to(top).as_posix(), file.stat().st_size) for file in files)
    parts = [Part(file.name, partial(read_documents, file, options)) for file in files]
    size = sum(estimate_text_bytes(file, options) for file in files)
    return HubListing(repository, folder, None, listed), parts, size


def _pinned_listing(staging: Path, repository: str, folder: str) -> HubListing | None:
    """The listing that an unfinished preparation began with."""
    path = staging / LISTING_FILE
    if not path.is_file():
        return None
    stored = cast("dict[str, Any]", json.loads(path.read_bytes()))
    files = tuple((str(name), int(size)) for name, size in stored.pop("files"))
    listing = HubListing(files=files, **stored)
    return listing if (listing.repository, listing.folder) == (repository, folder) else None


def _list_files(endpoint: str | None, repository: str, folder: str) -> HubListing:
    def request() -> HubListing:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api = HfApi(endpoint=endpoint)
        revision = api.repo_info(repository, repo_type="dataset").sha
        tree = api.list_repo_tree(repository, folder, recursive=True, revision=revision, repo_type="dataset")
        files = [(item.path, item.size) for item in tree if isinstance(item, RepoFile)]
        return HubListing(
            repository,
            folder,
            revision,
            tuple(sorted(file for file in files if file[0].endswith(".parquet"))),
        )

    listing = _with_retries(f"list {repository}/{folder}", request)
    if not listing.files:
        raise SteepenError(f"the Hub lists no Parquet file in {repository}/{folder}.")
    return listing


class _Downloader:
    """Downloads the files of a listing into the staging folder, one at a time."""

    def __init__(
        self, listing: HubListing, endpoint: str | None, staging: Path, log: Callable[[str], None]
    ) -> None:
        self.listing, self.endpoint, self.staging, self.log = listing, endpoint, staging, log

    def documents(self, path: str, options: ReadOptions, start: int) -> Iterator[str | None]:
        self.staging.mkdir(parents=True, exist_ok=True)
        write_atomically(self.staging / LISTING_FILE, canonical_json(asdict(self.listing)))
        size = dict(self.listing.files)[path]
        self.log(f"downloading {Path(path).name} ({size / 1e9:.1f} GB)")
        file = _with_retries(f"download {path}", partial(self._download, path))
        if file.stat().st_size != size:
            file.unlink()
            raise SteepenError(
                f"{path} was downloaded with another size than the Hub lists; run the same command again."
            )
        yield from read_documents(file, options, start)
        file.unlink()  # after the last document: an interrupted reader finds the file again

    def _download(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        downloaded = hf_hub_download(
            self.listing.repository,
            path,
            repo_type="dataset",
            revision=self.listing.revision,
            endpoint=self.endpoint,
            local_dir=self.staging,
        )
        return Path(downloaded)


def _with_retries(action: str, function: Callable[[], T]) -> T:
    """Call `function`, retrying with exponential backoff: a long download should survive a short outage."""
    wait = FIRST_RETRY_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except ImportError:
            raise SteepenError("the Hub needs huggingface_hub; `pip install huggingface_hub`.") from None
        except Exception as error:  # the library's and its HTTP client's errors have no common base
            if isinstance(error, OSError) and error.errno is not None and error.errno in LOCAL_ERRNOS:
                raise
            if attempt == ATTEMPTS:
                reason = f"{type(error).__name__}: {error}".strip().split("\n")[0].rstrip(".")
                raise SteepenError(
                    f"cannot {action} from the Hub ({reason}); check the network and run the same command "
                    "again, it resumes where it stopped."
                ) from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError
