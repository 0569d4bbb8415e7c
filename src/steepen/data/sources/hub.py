"""Data sets of the Hugging Face Hub, one file at a time, resumable: hf:OWNER/NAME, FineWeb, FineWeb-Edu.

The first listing pins a commit of the repository, so that a preparation that runs for days, or is resumed
next week, reads the files it began with. Each file is downloaded, read and deleted before the next.
A private data set is read with the user's own token (`hf auth login`, HF_TOKEN), which is written nowhere.
`paper` and `paper-validation` are the files and commits that the paper's authors used.
"""

from __future__ import annotations

import errno
import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from steepen.data.sources.hub_card import select_files
from steepen.data.sources.readers import ReadOptions, estimate_text_bytes, read_documents
from steepen.data.sources.source import Part, Source
from steepen.errors import SteepenError, UsageError, shorten
from steepen.utils.codec import from_builtins
from steepen.utils.files import read_text, write_atomically
from steepen.utils.json_io import canonical_json, read_json

FINEWEB, FINEWEB_EDU = "HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu"
REPOSITORIES = {"fineweb": FINEWEB, "fineweb-edu": FINEWEB_EDU, "hf": ""}
DEFAULT_CONFIG = "sample-10BT"
SAMPLES = ("sample-10BT", "sample-100BT", "sample-350BT")
LISTING_FILE = "listing.json"
PAPER, PAPER_VALIDATION = "paper", "paper-validation"
CARD = "README.md"
ATTEMPTS = 6
OFFLINE_ATTEMPTS = 2  # to list files where no server answers: nothing is lost yet, so it is said at once
FIRST_RETRY_SECONDS = 1.0  # before the second attempt; doubled after every failure
TEXT_BYTES_PER_PARQUET_BYTE = 1.6  # of these datasets, for the progress bar

# Local faults, which a retry does not repair.
LOCAL_ERRNOS = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}

T = TypeVar("T")


@dataclass(frozen=True)
class HubFiles:
    """The files [first:last] of one folder of a repository, in the order of their names.

    Those of `split` are chosen by the card or the names of the files; without it, all Parquet files.
    """

    repository: str
    folder: str
    split: str | None = None
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
        train=HubFiles(FINEWEB, "sample/100BT", revision=FINEWEB_REVISION),
        validation=HubFiles(FINEWEB, "sample/10BT", revision=FINEWEB_REVISION),
        train_tokens=30_000_000_000,
        dedup_tokens=64,
        clip_validation=True,
    ),
    "fineweb-edu": PaperCorpus(
        train=HubFiles(FINEWEB_EDU, "sample/100BT", revision=FINEWEB_EDU_REVISION, first=1),
        validation=HubFiles(FINEWEB_EDU, "sample/100BT", revision=FINEWEB_EDU_REVISION, last=1),
        train_tokens=40_000_000_000,
    ),
}


def paper_corpus(source: object) -> PaperCorpus | None:
    """The paper's corpus that a source such as fineweb:paper names, or None."""
    name, _, config = source.partition(":") if isinstance(source, str) else ("", "", "")
    return PAPER_CORPORA.get(name) if config == PAPER else None


@dataclass(frozen=True)
class HubListing:
    """The (path, bytes) of every file of one config at one commit, in order."""

    repository: str
    folder: str
    revision: str | None
    files: tuple[tuple[str, int], ...]
    split: str | None = None

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
    """A config of FineWeb or FineWeb-Edu, or any data set (`name` hf, `config` OWNER/NAME and the rest).

    `endpoint` is another Hub's URL, or a directory laid out as OWNER/NAME/FOLDER; None is huggingface.co.
    """
    config = config or ("" if name == "hf" else DEFAULT_CONFIG)
    files = any_hub_files(config) if name == "hf" else hub_files(name, config)
    if endpoint is not None and "://" not in endpoint:
        listing, parts, size = _local_mirror(Path(endpoint), files, options)
    else:
        listing = _pinned_listing(staging, files) or _list_files(endpoint, files)
        download = partial(download_documents, listing, endpoint, staging, log)
        parts = [Part(path, partial(download, path, options)) for path, _ in listing.files]
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


def any_hub_files(text: str) -> HubFiles:
    """The files that OWNER/NAME[:CONFIG[:SPLIT]][@REVISION] names."""
    path, at, revision = text.partition("@")
    repository, config, split, *rest = [*path.split(":"), "", ""]
    valid = re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and not any(rest) and bool(at) == bool(revision)
    if not valid or ".." in text:
        raise UsageError(
            f"hf:{shorten(text)} is not a data set of the Hub; write hf:OWNER/NAME, :CONFIG and :SPLIT after "
            "it if it has several, and @REVISION for a commit, a tag or a branch."
        )
    return HubFiles(repository, config, split or "train", revision or None)


def hub_files(name: str, config: str) -> HubFiles:
    """The files of FineWeb or FineWeb-Edu that CONFIG[@REVISION] names."""
    repository = REPOSITORIES[name]
    config, at, revision = config.partition("@")
    if at and not revision:
        raise UsageError(f"no revision after @ in {name}:{config}@; name a commit, a tag or a branch.")
    if config in (PAPER, PAPER_VALIDATION):
        if revision:
            raise UsageError(f"{name}:{config} has its own revision; leave out @{revision}.")
        corpus = PAPER_CORPORA[name]
        return corpus.train if config == PAPER else corpus.validation
    folder = {"default": "data"} | {sample: sample.replace("-", "/", 1) for sample in SAMPLES}
    if config in folder or config.startswith("CC-MAIN-"):
        return HubFiles(repository, folder.get(config, f"data/{config}"), revision=revision or None)
    raise UsageError(
        f"unknown config {config!r} of {name}; accepted are {', '.join(SAMPLES)}, paper, default (all of "
        "it), and one crawl such as CC-MAIN-2024-10."
    )


def _choose(paths: Iterable[str], card: Callable[[], str], files: HubFiles) -> list[str]:
    """Those of a repository's paths that are wanted, in order."""
    if files.split is None:
        inside = (path for path in paths if path.startswith(f"{files.folder}/"))
        found = sorted(path for path in inside if path.endswith(".parquet"))
    else:
        found = select_files(paths, card(), files.repository, files.folder, files.split)
    return found[files.first : files.last]


def _local_mirror(root: Path, files: HubFiles, options: ReadOptions) -> tuple[HubListing, list[Part], int]:
    top = root / files.repository
    present = [file.relative_to(top).as_posix() for file in top.rglob("*") if file.is_file()]
    card = partial(read_text, top / CARD) if CARD in present else lambda: ""
    chosen = [top / path for path in _choose(present, card, files)]
    if not chosen:
        raise UsageError(
            f"no Parquet file{_which(files)} under {top / files.folder}; `hub` takes a directory laid out "
            "like the Hub."
        )
    listed = tuple((file.relative_to(top).as_posix(), file.stat().st_size) for file in chosen)
    parts = [Part(file.name, partial(read_documents, file, options), file) for file in chosen]
    size = sum(estimate_text_bytes(file, options) for file in chosen)
    return HubListing(files.repository, files.folder, None, listed, files.split), parts, size


def _which(files: HubFiles) -> str:
    return f" after the first {files.first}" if files.first else ""


def _pinned_listing(staging: Path, files: HubFiles) -> HubListing | None:
    """The listing that an unfinished preparation began with."""
    path = staging / LISTING_FILE
    if not path.is_file():
        return None
    try:
        listing = from_builtins(HubListing, read_json(path), "the listing")
    except (ValueError, UsageError) as error:
        raise SteepenError(f"{path} is damaged ({error}); use `restart` to begin again.") from None
    wanted = (files.repository, files.folder, files.split)
    return listing if (listing.repository, listing.folder, listing.split) == wanted else None


def _list_files(endpoint: str | None, files: HubFiles) -> HubListing:
    repository = files.repository

    def request() -> HubListing:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api = HfApi(endpoint=endpoint)
        revision = api.repo_info(repository, repo_type="dataset", revision=files.revision).sha
        # The whole tree where the card decides; a folder of FineWeb's many otherwise.
        folder = files.folder if files.split is None else None
        tree = api.list_repo_tree(repository, folder, recursive=True, revision=revision, repo_type="dataset")
        sizes = {item.path: item.size for item in tree if isinstance(item, RepoFile)}

        def card() -> str:
            if CARD not in sizes:
                return ""
            with tempfile.TemporaryDirectory() as downloads:
                return read_text(_fetch(repository, CARD, revision, endpoint, Path(downloads)))

        chosen = _choose(sizes, card, files)
        listed = tuple((path, sizes[path]) for path in chosen)
        return HubListing(repository, files.folder, revision, listed, files.split)

    where = f"{repository}/{files.folder}".rstrip("/")
    listing = _with_retries(f"list {where}", request, OFFLINE_ATTEMPTS)
    if not listing.files:
        raise SteepenError(f"the Hub lists no Parquet file{_which(files)} in {where}.")
    return listing


def model_file(repository: str, path: str, *, revision: str | None, endpoint: str | None) -> Path | None:
    """A file of a model's repository, in the client's own cache; None if the repository has no such file.

    `endpoint` is another Hub's URL, or a directory laid out as OWNER/NAME.
    """
    if endpoint is not None and "://" not in endpoint:
        file = Path(endpoint) / repository / path
        return file if file.is_file() else None

    def request() -> Path | None:
        from huggingface_hub import HfApi, hf_hub_download

        # Asked first, since without a connection it fails at once; a download is tried for half a minute.
        info = HfApi(endpoint=endpoint).model_info(repository, revision=revision)
        if path not in {file.rfilename for file in info.siblings or ()}:
            return None
        return Path(hf_hub_download(repository, path, revision=info.sha, endpoint=endpoint))

    try:
        return _with_retries(f"download {path} of {repository}", request, OFFLINE_ATTEMPTS)
    except SteepenError:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(repository, path, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        raise


def download_documents(
    listing: HubListing,
    endpoint: str | None,
    staging: Path,
    log: Callable[[str], None],
    path: str,
    options: ReadOptions,
    start: int,
) -> Iterator[str | None]:
    """The documents of a listed file, which is in the staging folder while they are read."""
    staging.mkdir(parents=True, exist_ok=True)
    write_atomically(staging / LISTING_FILE, canonical_json(asdict(listing)))
    size = dict(listing.files)[path]
    log(f"downloading {Path(path).name} ({size / 1e9:.1f} GB)")
    place = staging / "files"  # a file of the repository may be named listing.json
    fetch = partial(_fetch, listing.repository, path, listing.revision, endpoint, place)
    file = _with_retries(f"download {path}", fetch)
    if file.stat().st_size != size:
        file.unlink()
        raise SteepenError(
            f"{path} was downloaded with another size than the Hub lists; run the same command again."
        )
    yield from read_documents(file, options, start)
    file.unlink()  # after the last document: an interrupted reader finds the file again


def _fetch(repository: str, path: str, revision: str | None, endpoint: str | None, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    place: dict[str, Any] = {"revision": revision, "endpoint": endpoint, "local_dir": folder}
    return Path(hf_hub_download(repository, path, repo_type="dataset", **place))


def _no_server_answers(error: BaseException | None) -> bool:
    """Whether a connection failed, and not a request that a server answered."""
    while error is not None:
        if isinstance(error, OSError) and getattr(error, "response", None) is None:
            return True
        error = error.__cause__ or error.__context__
    return False


def _with_retries(action: str, function: Callable[[], T], offline_attempts: int = ATTEMPTS) -> T:
    """Call `function`, retrying with exponential backoff: a long download should survive a short outage."""
    wait = FIRST_RETRY_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except ImportError:
            raise SteepenError("the Hub needs huggingface_hub; `pip install huggingface_hub`.") from None
        except UsageError:
            raise
        except Exception as error:  # the library's and its HTTP client's errors have no common base
            if isinstance(error, OSError) and error.errno is not None and error.errno in LOCAL_ERRNOS:
                raise
            if attempt >= (offline_attempts if _no_server_answers(error) else ATTEMPTS):
                reason = f"{type(error).__name__}: {error}".strip().split("\n")[0].rstrip(".")
                raise SteepenError(
                    f"cannot {action} from the Hub ({reason}); check the network and run the same command "
                    "again, it resumes where it stopped."
                ) from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError
