"""The documentation matches the code: its commands parse, its links and file names exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from steepen.requests.app import main, root_command

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
EAGER = {"--help", "--version", "--install-completion", "--show-completion"}
EVERYWHERE = {"--debug", "--trust-code"}  # of every command, taken before it is parsed
OUTPUT = re.compile(r"steepen [\w.]+ +[\d,.]+ ")  # what a benchmark printed
PLACEHOLDER = re.compile(r"^[A-Z]+$")
SYNOPSIS = re.compile(r"…|\[|\.\.\.| NAME\b")
# Pages that only the site has.
GENERATED = {"reference.md", "commands.md", "paper-numbers.md", "changelog.md", "contributing.md"}
NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]


def in_blocks(text: str) -> list[str]:
    """The lines of the code blocks of a page that begin with `steepen`."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^    .*\n)+", without_blocks(text), re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if not OUTPUT.match(line)]


def inline(text: str) -> list[str]:
    """The inline code of a page that begins with `steepen`."""
    return [" ".join(code.split()) for code in re.findall(r"`(steepen\s[^`]+)`", without_blocks(text))]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(lines: list[str]) -> list[list[str]]:
    """The words of each command, without comments; leaves out synopses and options that print and exit."""
    found = [
        shlex.split(line, comments=True)[1:]
        for line in lines
        if line.startswith("steepen ") and not SYNOPSIS.search(line)
    ]
    return [
        [PLACEHOLDER.sub("3", word) for word in words if word not in EVERYWHERE]
        for words in found
        if not EAGER & set(words)
    ]


def parse(words: list[str]) -> None:
    """Parse a command line to its end without running the command; raises where an option is unknown."""
    command: Any = root_command()
    name = "steepen"
    while True:
        context = command.make_context(name, list(words))
        if not hasattr(command, "commands"):
            return
        if command.invoke_without_command and not [*context._protected_args, *context.args]:
            return  # `steepen runs` by itself
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_a_page_parses(page: Path) -> None:
    text = page.read_text()
    wrong = [error for words in commands(in_blocks(text)) if (error := failure(words))]
    wrong += [error for words in commands(inline(text)) if (error := failure(words, complete=False))]
    assert not wrong


def failure(words: list[str], *, complete: bool = True) -> str | None:
    """Why a command line does not parse. Inline code may leave required options out (`complete=False`)."""
    try:
        parse(words)
    except Exception as error:  # typer's own errors, which name the option
        left_out = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
        left_out = left_out or "requires an argument" in str(error)
        if "could not be loaded" in str(error):  # a module that the page writes
            return None
        if complete or not left_out:
            return f"steepen {shlex.join(words)}: {getattr(error, 'message', '') or error}"
    return None


def test_the_dry_run_of_the_tutorial_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs" / "tutorial.md").read_text()
    (words,) = (words for words in commands(inline(text)) if "--dry-run" in words)
    assert main(words) == 0


def test_a_wrong_option_in_a_command_is_found() -> None:
    assert commands(in_blocks("```\n$ steepen plan --arm x  # why\n```\n")) == [["plan", "--arm", "x"]]
    assert commands(inline("use `steepen plan\n--arm x`")) == [["plan", "--arm", "x"]]
    assert "no-such-option" in str(failure(["plan", "--no-such-option"], complete=False))
    assert "no-such-command" in str(failure(["no-such-command"]))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_repository_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    links = [link for link in links if not (page.parent.name == "docs" and link in GENERATED)]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    paths = re.findall(r"\b(?:src/steepen|tests|benchmarks)/[\w./]*\.(?:py|yaml|md)\b", text)
    missing += [path for path in paths if not (REPOSITORY / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_tests_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", page.read_text()))
    defined = {
        name
        for file in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert named <= defined | {"test_time_passes"}  # a key of `eval --json`


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_imports_in_python_examples_exist(page: Path) -> None:
    missing: list[str] = []
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("steepen"):
                module = importlib.import_module(node.module or "")
                missing += [f"{node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
    assert not missing
