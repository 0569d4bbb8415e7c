"""The Python code of the documentation runs as written, block after block, in an empty directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A page is added here when all its blocks run.
PAGES = ["docs/python.md"]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    text = (REPOSITORY / page).read_text()
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(REPOSITORY / page), "exec"), names)
