"""Atomic writes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from steepen.errors import SteepenError
from steepen.utils.files import (
    TEMPORARY_SUFFIX,
    file_lock,
    open_without_links,
    read_file,
    remove_leftovers,
    sha256_of_file,
    write_atomically,
)
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json


def test_written_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "file.json", {"a": 1})
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "new" / "file.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_atomically(file, "old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_the_next_write_deletes_what_a_killed_one_left_but_nothing_in_use(tmp_path: Path) -> None:
    left, used, other = (tmp_path / f".{name}{TEMPORARY_SUFFIX}" for name in ("f.x1", "f.x2", "g.x3"))
    for path in (left, used, other):
        path.write_text("part of a file")
    with used.open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write_atomically(tmp_path / "f", "new")
        assert sorted(tmp_path.iterdir()) == sorted([used, other, tmp_path / "f"])
        remove_leftovers(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([used, tmp_path / "f"])


def test_links_are_neither_followed_nor_deleted(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    (tmp_path / f".f.x{TEMPORARY_SUFFIX}").symlink_to(victim)
    with pytest.raises(SteepenError, match="symbolic link"), file_lock(tmp_path / "lock"):
        pass
    with pytest.raises(SteepenError, match="symbolic link"):
        open_without_links(tmp_path / "lock", os.O_WRONLY | os.O_TRUNC)
    write_atomically(tmp_path / "f", "new")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("how", [read_file, sha256_of_file, lambda path: open_without_links(path, os.O_RDWR)])
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(
    how: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "record.json")
    with pytest.raises(OSError, match="a pipe or a device"):
        how(tmp_path / "record.json")


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    with pytest.raises(OSError, match="larger than 1,024 MiB"):
        read_file(tmp_path / "sparse")


def test_names_of_files_that_are_not_utf8_survive_json(tmp_path: Path) -> None:
    value = {"path": os.fsdecode(b"data-\xff"), "\ud800": ["\udfff"]}
    write_json(tmp_path / "file.json", with_checksum(value))
    (tmp_path / "file.json").read_text(encoding="utf-8")
    assert without_checksum(read_json(tmp_path / "file.json")) == value
