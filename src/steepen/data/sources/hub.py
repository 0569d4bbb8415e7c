"""FineWeb and FineWeb-Edu from the Hugging Face Hub: one Parquet file at a time, resumable.

The first listing pins a commit of the repository, so that a preparation that runs for days, or is resumed
next week, reads the files it began with. Each file is downloaded, read and deleted before the next.
`paper` and `paper-validation` are the files and commits that the paper's authors used.
"""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

from steepen.data.sources.readers import ReadOptions, estimate_text_bytes, read_documents
from steepen.data.sources.source import Part, Source
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import write_atomically
from steepen.utils.json_io import canonical_json, read_json

REPOSITORIES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
DEFAULT_CONFIG = "sample-10BT"
SAMPLES = ("sample-10BT", "sample-100BT", "sample-350BT")
LISTING_FILE = "listing.json"
PAPER, PAPER_VALIDATION = "paper", "paper-validation"
ATTEMPTS = 6
FIRST_RETRY_SECONDS = 1.0  # before the second attempt; doubled after every failure
TEXT_BYTES_PER_PARQUET_BYTE = 1.6  # of these datasets, for the progress bar

# Local faults, which a retry does not repair.
LOCAL_ERRNOS = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}

T = TypeVar("T")


@dataclass(frozen=True)
class HubFiles:
    """The Parquet files [first:last] of one folder of a repository, in the order of their names."""

    folder: str
    revision: str | None = None  # None: the newest commit
    first: int = 0
    last: int | None = None


@dataclass(frozen=True)
class PaperCorpus:
    """The data that the paper's authors trained and validated on."""

    train: HubFiles
    validation: HubFiles
    train_tokens: int
    validation_tokens: int = 10_000_000
    dedup_tokens: int = 0  # of a document's beginning, compared with those of the validation documents
    clip_validation: bool = False  # cut the last validation document at `validation_tokens`


FINEWEB_REVISION = "9bb295ddab0e05d785b879661af7260fed5140fc"
FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
PAPER_CORPORA = {
    "fineweb": PaperCorpus(
        train=HubFiles("sample/100BT", FINEWEB_REVISION),
        validation=HubFiles("sample/10BT", FINEWEB_REVISION),
        train_tokens=30_000_000_000,
        dedup_tokens=64,
        clip_validation=True,
    ),
    "fineweb-edu": PaperCorpus(
        train=HubFiles("sample/100BT", FINEWEB_EDU_REVISION, first=1),
        validation=HubFiles("sample/100BT", FINEWEB_EDU_REVISION, last=1),
        train_tokens=40_000_000_000,
    ),
}


def paper_corpus(source: object) -> PaperCorpus | None:
    """The paper's corpus that a source such as fineweb:paper names, or None."""
    name, _, config = source.partition(":") if isinstance(source, str) else ("", "", "")
    return PAPER_CORPORA.get(name) if config == PAPER else None


@dataclass(frozen=True)
class HubListing:
    """The (path, bytes) of every Parquet file of one config at one commit, in order."""

    repository: str
    folder: str
    revision: str | None
    files: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for path, _ in self.files:  # downloads go there
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise SteepenError(f"the Hub lists {path!r}, which is not inside the repository.")


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
    files, repository = hub_files(name, config), REPOSITORIES[name]
    if endpoint is not None and "://" not in endpoint:
        listing, parts, size = _local_mirror(Path(endpoint), repository, files, options)
    else:
        listing = _pinned_listing(staging, repository, files) or _list_files(endpoint, repository, files)
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


def hub_files(name: str, config: str) -> HubFiles:
    """The files of the repository that CONFIG[@REVISION] names."""
    config, at, revision = config.partition("@")
    if at and not revision:
        raise UsageError(f"no revision after @ in {name}:{config}@; name a commit, a tag or a branch.")
    if config in (PAPER, PAPER_VALIDATION):
        if revision:
            raise UsageError(f"{name}:{config} has its own revision; leave out @{revision}.")
        corpus = PAPER_CORPORA[name]
        return corpus.train if config == PAPER else corpus.validation
    if config in SAMPLES:
        return HubFiles(config.replace("-", "/", 1), revision or None)
    if config == "default":
        return HubFiles("data", revision or None)
    if config.startswith("CC-MAIN-"):
        return HubFiles(f"data/{config}", revision or None)
    raise UsageError(
        f"unknown config {config!r} of {name}; accepted are {', '.join(SAMPLES)}, paper, default (all of "
        "it), and one crawl such as CC-MAIN-2024-10."
    )


def _local_mirror(
    root: Path, repository: str, files: HubFiles, options: ReadOptions
) -> tuple[HubListing, list[Part], int]:
    top = root / repository
    found = sorted((top / files.folder).rglob("*.parquet"), key=lambda file: file.as_posix())
    chosen = found[files.first : files.last]
    if not chosen:
        raise UsageError(
            f"no Parquet file{_which(files)} under {top / files.folder}; `hub` takes a directory laid out "
            "like the Hub."
        )
    listed = tuple((file.relative_to(top).as_posix(), file.stat().st_size) for file in chosen)
    parts = [Part(file.name, partial(read_documents, file, options), file) for file in chosen]
    size = sum(estimate_text_bytes(file, options) for file in chosen)
    return HubListing(repository, files.folder, None, listed), parts, size


def _which(files: HubFiles) -> str:
    return f" after the first {files.first}" if files.first else ""


def _pinned_listing(staging: Path, repository: str, files: HubFiles) -> HubListing | None:
    """The listing that an unfinished preparation began with."""
    path = staging / LISTING_FILE
    if not path.is_file():
        return None
    try:
        stored = cast("dict[str, Any]", read_json(path))
        listed = tuple((str(name), int(size)) for name, size in stored.pop("files"))
        listing = HubListing(files=listed, **stored)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SteepenError(f"{path} is damaged ({error}); use `restart` to begin again.") from None
    same = (listing.repository, listing.folder) == (repository, files.folder)
    return listing if same else None


def _list_files(endpoint: str | None, repository: str, files: HubFiles) -> HubListing:
    def request() -> HubListing:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api = HfApi(endpoint=endpoint)
        revision = api.repo_info(repository, repo_type="dataset", revision=files.revision).sha
        tree = api.list_repo_tree(
            repository, files.folder, recursive=True, revision=revision, repo_type="dataset"
        )
        found = [(item.path, item.size) for item in tree if isinstance(item, RepoFile)]
        parquet = sorted(file for file in found if file[0].endswith(".parquet"))
        return HubListing(repository, files.folder, revision, tuple(parquet[files.first : files.last]))

    listing = _with_retries(f"list {repository}/{files.folder}", request)
    if not listing.files:
        raise SteepenError(f"the Hub lists no Parquet file{_which(files)} in {repository}/{files.folder}.")
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
