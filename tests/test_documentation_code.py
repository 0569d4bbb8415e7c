"""The Python code of the README and of every page runs as written, block after block; so do cheap commands.

A block that starts with `# NAME.py` is saved as that file and imported. A block that cannot run here has the
comment `<!-- not run: WHY -->` on the line before it. Pages start in a directory with what their text has
made before: data, a few runs, a study.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steepen
from fork_server import fork_workers
from steepen.requests.app import main
from test_documentation import in_blocks

REPOSITORY = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
FILE = re.compile(r"^# (\w+)\.py\b[^\n]*\n")
PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]
    if BLOCK.search(path.read_text())
)
NOT_RUN = 1  # at most so many blocks in all
SIZE: dict[str, Any] = {
    "aspect": 16, "head_dim": 16, "mlp_multiple": 16, "context": 64, "batch_tokens": 1024, "tokens": 8192,
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands have made before: data, runs of two arms, an export, a study."""
    here = tmp_path_factory.mktemp("page")
    steepen.prepare("builtin", here / "data" / "small", tokenizer="bpe:1024", max_tokens=50_000)
    shutil.copytree(here / "data" / "small", here / "data" / "builtin")
    (here / "notes").mkdir()
    for i in range(40):
        (here / "notes" / f"{i}.txt").write_text(f"Note {i}: the loss falls as compute grows. " * 20)
    for arm in ("vanilla", "loop-2"):
        spec = steepen.spec(arm, 2, here / "data" / "small", **SIZE)
        run = steepen.train(spec, here / "data" / "small", runs=here / "runs", device="cpu")
    steepen.export(run.path, here / "exported" / "loop-2")
    table = re.search(
        r"^```\n(arm,flops,loss\n.*?)^```", (REPOSITORY / "docs/laws.md").read_text(), re.M | re.S
    )
    assert table is not None
    (here / "runs.csv").write_text(table[1])
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        steepen.study(
            "ladder", "tiny", arms=["vanilla", "loop-2"], rungs=[2, 3, 4, 5], tpp=0.02,
            epochs=10_000, data=here / "data" / "small", device="cpu", jobs=1, studies=here / "studies",
            runs=here / "study-runs",
        )  # fmt: skip
    return here


@pytest.fixture
def page_directory(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the prepared directory, as the working directory."""
    here = tmp_path / "page"
    shutil.copytree(prepared, here)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("MPLBACKEND", "agg")
    fork_workers(monkeypatch)
    before = set(sys.modules)
    yield here
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == here:
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_as_written(page: str, page_directory: Path) -> None:
    text = (REPOSITORY / page).read_text()
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        if block["why"] is not None:
            continue
        code, module = block["code"], FILE.match(block["code"])
        if module is not None:
            file = page_directory / f"{module[1]}.py"
            old = file.read_text() if file.is_file() and "continued" in module[0] else ""
            file.write_text(old + code)
            importlib.invalidate_caches()
            sys.modules.pop(module[1], None)
            names |= vars(importlib.import_module(module[1]))
        else:
            line = text[: block.start("code")].count("\n")
            exec(compile("\n" * line + code, str(REPOSITORY / page), "exec"), names)


def test_blocks_that_are_not_run_are_rare_and_say_why() -> None:
    left_out = [
        f"{page}: {block['why']}"
        for page in PAGES
        for block in BLOCK.finditer((REPOSITORY / page).read_text())
        if block["why"] is not None
    ]
    assert len(left_out) <= NOT_RUN, left_out


# Commands that need no data, no network and no earlier run.
CHEAP = re.compile(r"^(arms|plan|power --delta|paper|study \S+ .*--dry-run|fit paper:\S+( --method paper)?$)")


def cheap_commands() -> list[str]:
    found: set[str] = set()
    for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]:
        for line in in_blocks(path.read_text()):
            words = shlex.split(line, comments=True)[1:] if line.startswith("steepen ") else []
            command = shlex.join(words)
            own = any((":" in word and "paper" not in word) or word.endswith(".yaml") for word in words)
            if CHEAP.match(command) and not own and "…" not in command and "--data" not in command:
                found.add(command)
    return sorted(found)


def test_cheap_commands_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = cheap_commands()
    assert len(commands) > 8
    failed: list[str] = []
    for command in commands:
        fewer = ["--draws", "100"] if command.startswith("power ") else []
        if main([*shlex.split(command), *fewer]) != 0:
            failed.append(command)
    assert not failed
