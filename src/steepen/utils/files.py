"""Files: atomic writes, no writing through links, bounded reads, SHA-256, fsync of a directory; and locks.

Locks between processes are flock's: the kernel releases the lock of a process that is killed. On network file
systems flock works across machines where the mount supports it (NFS 4 does; Lustre needs the mount option
`flock`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, TextIO, TypeVar

from steepen.errors import SteepenError

T = TypeVar("T")
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
MAX_BYTES = 1 << 30  # of a file that is read whole into memory
TEMPORARY_SUFFIX = ".tmp"  # of the file that a process killed inside `write_atomically` leaves behind

# How text of half surrogate pairs, as of a path that is not UTF-8, is written: \udcff, which JSON reads back.
UNENCODABLE = "backslashreplace"


def disk_full(message: str) -> str:
    """What an error's message means, of Python or of safetensors, if the disk is full; else ""."""
    return next(
        (s for n, s in _FULL.items() if f"[Errno {n}]" in message or f"(os error {n})" in message), ""
    )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` (text as UTF-8), as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write(content.encode("utf-8", UNENCODABLE) if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Generator[IO[bytes]]:
    """A new file, open to write, that replaces `path` at the end of the block unless an error ends it.

    The content is on disk (fsync) before it gets its name. Parent directories are created. What earlier
    writes of this file left behind, in processes that were killed, is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    handle, temporary = _locked_temporary_file(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a write knows no name
            error.filename = str(path)
        raise


def _locked_temporary_file(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, open and locked: the lock tells `remove_leftovers` that it is in use."""
    while True:
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        # With permissions as the umask says, unlike mkstemp: other users may share the directory.
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks; no lock is found there either
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if name.exists():
            return handle, name
        os.close(handle)  # deleted before it was locked


def follow_umask(path: Path) -> None:
    """Give a file that a library has made private the permissions of any new file beside it."""
    handle, other = _locked_temporary_file(path)
    path.chmod(stat.S_IMODE(os.fstat(handle).st_mode))
    other.unlink()
    os.close(handle)


def remove_leftovers(directory: Path, name: str = "") -> None:
    """Delete temporary files of processes that were killed while they wrote, of one file or of all.

    The kernel has released the locks of a killed process; a file whose lock is held is being written.
    """
    try:
        with os.scandir(directory) as entries:
            found = [e.path for e in entries if e.name.startswith(f".{name}") and _is_temporary(e.name, name)]
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):  # it was renamed meanwhile, or is a link: left alone
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(path).unlink()
            finally:
                os.close(handle)


def _is_temporary(entry: str, name: str) -> bool:
    """Whether a directory's entry is a temporary file, of the file `name` or, with "", of any."""
    middle = entry.removesuffix(TEMPORARY_SUFFIX)
    return middle != entry and (not name or middle.rpartition(".")[0] == f".{name}")


@contextlib.contextmanager
def new_directory(path: Path) -> Generator[Path]:
    """A directory `path.partial` to fill; it is renamed to `path` unless an error ends the block."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left behind
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def scratch_directory(name: str, parent: Path | None = None) -> Generator[Path]:
    """A new private directory `.NAME-…`, deleted in the end; in `parent`, or where temporary files go.

    SIGTERM and SIGHUP end the program only after it is deleted. What a killed program left behind is
    deleted by the next that makes a directory of this name there.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f".{name}-*"):
        with contextlib.suppress(OSError), _locked_directory(left):
            shutil.rmtree(left, ignore_errors=True)
    with exit_on_signals(), contextlib.ExitStack() as after:
        for folder in reversed(missing):  # if nothing was put there
            after.callback(quietly, folder.rmdir)
        while True:
            path = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
            try:
                with contextlib.ExitStack() as lock:
                    with contextlib.suppress(OSError):  # no locks here: nobody else deletes it either
                        lock.enter_context(_locked_directory(path))
                    if path.exists():  # else another process took it for a leftover
                        yield path
                        return
            finally:
                shutil.rmtree(path, ignore_errors=True)


def quietly(action: Callable[..., Any], *arguments: Any) -> None:
    """Call a function, whether or not the system lets it succeed."""
    with contextlib.suppress(OSError):
        action(*arguments)


@contextlib.contextmanager
def _locked_directory(path: Path) -> Generator[None]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def exit_on_signals() -> Generator[None]:
    """Turn SIGTERM and SIGHUP, where they would end the program at once, into SystemExit: it cleans up."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def open_without_links(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """`os.open` that refuses a symbolic link in the place of the file: it may lead to another user's file.

    Usable as the `opener` of `open`.
    """
    try:
        return open_regular(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SteepenError(
                f"{path} is a symbolic link; remove it: steepen writes no file through one."
            ) from error
        raise


def open_regular(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """`os.open` that raises OSError for a pipe or a device in the place of a file, and never waits for one.

    Usable as the `opener` of `open`.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return handle
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a file; raises OSError also for a pipe, a device or more than `limit` bytes.

    For files that are found in a directory, which others may have filled.
    """
    with open(path, "rb", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"It is larger than {limit >> 20:,} MiB", str(path))
        return file.read()


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; raises OSError as `read_file` does, and UnicodeDecodeError."""
    return read_file(path).decode("utf-8")


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file, as `sha256sum` prints it."""
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_version(file: Path | int) -> tuple[int, ...] | None:
    """What changes when a file (or an open one) is written or replaced; None if there is no file."""
    try:
        found = os.stat(file)  # noqa: PTH116  (also of a descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class ReadOnce(Generic[T]):
    """Reads files with a function, and again only once they have changed."""

    def __init__(self, read: Callable[[Path], T]) -> None:
        self._read = read
        self._found: dict[Path, tuple[tuple[int, ...] | None, T]] = {}

    def __call__(self, path: Path) -> T:
        """What the file at a path holds now."""
        version = file_version(path)
        if version is None or self._found.get(path, (None,))[0] != version:
            self._found[path] = (version, self._read(path))
        return self._found[path][1]


def sync(path: Path) -> None:
    """fsync a file, or a directory: renames inside it then survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


GPU_LOCKS_VARIABLE = "STEEPEN_GPU_LOCKS"  # environment: lock files of the runs on one GPU, without suffix
RUNS_PER_GPU_VARIABLE = "STEEPEN_RUNS_PER_GPU"  # environment: how many runs may train on it at the same time
_MOUNTS = Path("/proc/self/mountinfo")
_ATTEMPTS = 5  # without `wait`: retry, because `is_locked` of another process holds the lock briefly


@contextlib.contextmanager
def file_lock(
    path: Path, *, shared: bool = False, wait: bool = False, poll_seconds: float = 1.0
) -> Generator[str | None]:
    """Hold a lock on the file `path`. Yields None while it is held, or, without `wait`, the current holder.

    Shared locks exclude exclusive ones, but not each other.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    attempts = 0
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8", errors="replace", opener=open_without_links) as file:
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                attempts += 1
                if wait or attempts < _ATTEMPTS:
                    time.sleep(poll_seconds if wait else 0.02)
                    continue
                file.seek(0)
                yield file.read().strip() or "another process"
                return
            if not _is_current(file, path):  # its holder has deleted or moved the file
                continue
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield None
            return


def _is_current(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def is_locked(path: Path, *, shared: bool = False) -> bool | None:
    """Whether some process, on this machine or another, holds a lock on `path`; None if it cannot be told.

    `shared`: its holders have shared locks. A file that may only be read is enough, except for shared locks
    on NFS.
    """
    try:
        handle = _open_to_read(path)
    except (FileNotFoundError, NotADirectoryError, SteepenError):
        return False
    except OSError:
        return None
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks at all or, on NFS, no exclusive ones of a file that is not open to write
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return None
            if shared:
                return None
        host = file.read(1000).rpartition(" on ")[2].strip()
        elsewhere = host not in ("", socket.gethostname())
        return None if elsewhere and not _shows_locks_of_others(file.fileno(), path) else False


def _open_to_read(path: Path) -> int:
    try:
        return open_without_links(path, os.O_RDWR)  # NFS wants this for an exclusive lock
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return open_without_links(path, os.O_RDONLY)


def _shows_locks_of_others(handle: int, path: Path) -> bool:
    """Whether locks that other machines hold show here, if other machines have this file at all."""
    device = os.fstat(handle).st_dev
    if device not in _devices:
        _devices[device] = _mount(path.resolve())
    kind, options = _devices[device]
    if kind in ("nfs", "nfs4"):
        return not {"nolock", "local_lock=flock", "local_lock=all"} & options
    if kind == "lustre":
        return "flock" in options
    return kind not in ("9p", "virtiofs", "vboxsf", "cifs", "smb3", "beegfs", "afs") and "fuse" not in kind


_devices: dict[int, tuple[str, set[str]]] = {}


def _mount(path: Path) -> tuple[str, set[str]]:
    """Type and options of the file system of a path; ("", {}) where the system does not say."""
    found = (0, "", set[str]())
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(before.split()[4].replace("\\040", " "))
            if point in (path, *path.parents) and len(point.parts) >= found[0]:
                kind, _, options = after.split()
                found = (len(point.parts), kind, {*before.split()[5].split(","), *options.split(",")})
    return found[1:]
