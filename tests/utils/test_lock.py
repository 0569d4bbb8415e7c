"""File locks: exclusive and shared, visible to other openers of the file."""

from __future__ import annotations

import os
from pathlib import Path

from steepen.utils.lock import file_lock, is_locked


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
