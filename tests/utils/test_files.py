"""Atomic writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steepen.utils.files import write_atomically
from steepen.utils.json_io import write_json


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
