"""File locks: exclusive and shared, visible to other openers of the file."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steepen
import steepen.utils.files as lock_module
from steepen.utils.files import file_lock, is_locked


def test_a_held_lock_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with file_lock(path) as holder:
        assert holder is None and is_locked(path)
        with file_lock(path) as other:
            assert other is not None and other.startswith(f"process {os.getpid()} on ")
    assert not is_locked(path)


def test_shared_locks_exclude_exclusive_ones_but_not_each_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path, shared=True) as first, file_lock(path, shared=True) as second:
        assert first is None and second is None and is_locked(path)
        with file_lock(path) as exclusive:
            assert exclusive is not None


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user or mounts: needs root")


PROBE_AS_NOBODY = """
import os, pathlib, sys
from steepen.utils.files import is_locked
try:
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
except OSError:
    print("cannot")
else:
    print(is_locked(pathlib.Path(sys.argv[1]), shared=sys.argv[2] == "True"))
"""


def as_nobody(path: Path, *, shared: bool) -> str:
    """What another user is told of a lock, in a program of its own: a fork of many threads may hang."""
    done = run([sys.executable, "-c", PROBE_AS_NOBODY, str(path), str(shared), str(NOBODY)])
    if done.stdout == "cannot\n":
        pytest.skip("this machine does not let root become another user")
    return done.stdout.strip() or done.stderr


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The output of a command that can import this steepen."""
    environment = {**os.environ, "PYTHONPATH": str(Path(steepen.__file__).parents[1])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("shared", [False, True])
def test_lock_of_a_file_that_may_only_be_read_is_seen(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *rest, **more)

    with file_lock(tmp_path / "lock", shared=shared):
        monkeypatch.setattr(os, "open", read_only)
        assert is_locked(tmp_path / "lock", shared=shared) is True
        monkeypatch.undo()
    monkeypatch.setattr(os, "open", read_only)
    assert is_locked(tmp_path / "lock", shared=shared) is False


def test_lock_that_cannot_be_opened_or_asked_for_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").touch()

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert is_locked(tmp_path / "lock") is None
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        assert is_locked(tmp_path / "lock") is None
    assert is_locked(tmp_path / "lock") is False and is_locked(tmp_path / "absent" / "lock") is False


def test_shared_lock_is_unknown_where_exclusive_locks_need_a_writable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS."""
    original = fcntl.flock

    def only_shared(file: Any, mode: int) -> None:
        if mode & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "Bad file descriptor")
        original(file, mode)

    with file_lock(tmp_path / "lock"):
        monkeypatch.setattr(fcntl, "flock", only_shared)
        assert is_locked(tmp_path / "lock") is True
        monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", only_shared)
    assert is_locked(tmp_path / "lock") is False
    assert is_locked(tmp_path / "lock", shared=True) is None


@pytest.mark.parametrize(
    ("mount", "known"),
    [
        ("ext4 /dev/sda rw", False),
        ("nfs4 server:/x rw,local_lock=none", False),
        ("nfs server:/x rw,nolock,local_lock=all", None),
        ("lustre a@tcp:/b rw,flock", False),
        ("lustre a@tcp:/b rw,localflock", None),
        ("fuse.sshfs user@host: rw", None),
        ("9p share rw", None),
    ],
)
def test_free_lock_of_another_machine_is_unknown_where_its_locks_do_not_show(
    mount: str, known: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text("process 7 on another-machine")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1 1 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {tmp_path} rw,relatime shared:1 - {mount}\n"
    )
    monkeypatch.setattr(lock_module, "_MOUNTS", mounts)
    monkeypatch.setattr(lock_module, "_devices", {})
    assert is_locked(tmp_path / "lock") is known
    (tmp_path / "lock").write_text(f"process 7 on {socket.gethostname()}")
    assert is_locked(tmp_path / "lock") is False


@needs_root
@pytest.mark.parametrize("shared", [False, True])
def test_lock_is_seen_by_another_user(shared: bool, open_folder: Path) -> None:
    path = open_folder / "lock"
    with file_lock(path, shared=shared):
        assert as_nobody(path, shared=shared) == "True"
        path.chmod(0o600)
        assert as_nobody(path, shared=shared) == "None"
        path.chmod(0o644)
    assert as_nobody(path, shared=shared) == "False"


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_lock_is_seen_through_a_read_only_mount(tmp_path: Path) -> None:
    (tmp_path / "view").mkdir()
    (tmp_path / "place").mkdir()
    script = f"mount --bind {tmp_path}/place {tmp_path}/view && mount -o remount,ro,bind {tmp_path}/view && "
    probe = "import sys, pathlib, steepen.utils.files as l; print(l.is_locked(pathlib.Path(sys.argv[1])))"
    script += f"! touch {tmp_path}/view/x 2>/dev/null && {sys.executable} -c '{probe}' {tmp_path}/view/lock"
    look = functools.partial(run, ["unshare", "--mount", "sh", "-c", script])
    with file_lock(tmp_path / "place" / "lock"):
        done = look()
        if "permission denied" in done.stderr.lower() or "not permitted" in done.stderr.lower():
            pytest.skip("this machine does not let root mount")
        assert done.stdout.strip() == "True", done.stderr
    assert look().stdout.strip() == "False"
