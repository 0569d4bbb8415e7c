"""The root command: fast help in groups, shell completion, one version, errors in one sentence."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import steepen
from steepen.requests.app import main, no_lost_interrupt

REPOSITORY = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "scipy", "matplotlib", "pyarrow", "tokenizers", "numpy"}


def run_python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter on this checkout, in a terminal 80 columns wide."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "80", **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["fit", "--help"]])
def test_help_imports_no_heavy_library(words: list[str]) -> None:
    code = (
        f"import sys; from steepen.requests.app import main; code = main({words!r}); "
        f"heavy = {HEAVY!r} & set(sys.modules); sys.exit(f'imported {{heavy}}' if heavy else code)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_help_groups_every_command_and_gives_each_one_line_at_80_columns() -> None:
    done = run_python("-m", "steepen", "--help")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    panels = [line.split()[1] for line in lines if line.startswith("╭─")]
    assert panels == ["Options", "Plan", "Run", "Inspect", "Analyse", "Models"]
    listed = [line.split()[1] for line in "\n".join(lines).split("╭─ Plan")[1].splitlines() if "│" in line]
    assert listed == [  # a summary that wraps would add the first word of its second line
        *("arms", "plan", "best-passes", "power"),
        *("train", "study", "data"),
        *("status", "serve", "pack", "unpack", "runs"),
        *("fit", "next", "keep", "ledger", "paper", "forecast", "downstream", "report", "eval"),
        *("generate", "export", "import"),
    ]


def test_help_leaves_80_columns_to_the_text_of_options() -> None:
    help_text = run_python("-m", "steepen", "fit", "--help").stdout
    options = help_text.split("─ Options ─")[1]
    assert not [wide for wide in ("<bool>", "<list[", " range>", "<=x") if wide in options]
    assert "--budget             <float>  Compute in FLOPs to predict at" in options
    too_large = run_python("-m", "steepen", "fit", "x.csv", "--level", "3")
    assert too_large.returncode == 2
    assert "--level 3 is not valid: it must be a number from 1e-06 to 0.5" in too_large.stderr


@pytest.mark.parametrize(
    "words", [["eval"], ["eval", "filter"], ["report"], ["forecast"], ["downstream"], ["data", "prepare"]]
)
def test_help_cuts_no_option_and_shows_no_python_types_at_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"--[\w-]*…|list\[|\.\.\.\]\.\.\.|\.\.\.\}\.\.\.", text), text


def test_the_package_starts_the_command_line() -> None:
    done = run_python("-m", "steepen", "--version")
    assert done.stdout == f"steepen {steepen.__version__}\n", done.stderr


def test_bash_completion_offers_the_commands_that_match() -> None:
    script = run_python("-m", "steepen", _STEEPEN_COMPLETE="source_bash").stdout
    assert "complete -o default -F _steepen_completion steepen" in script
    offered = run_python(
        "-m", "steepen", _STEEPEN_COMPLETE="complete_bash", COMP_WORDS="steepen st", COMP_CWORD="1"
    )
    assert set(offered.stdout.split()) == {"study", "status"}


def test_completion_imports_no_heavy_library() -> None:
    code = (
        "import sys, atexit; from steepen.requests.app import main; "
        f"atexit.register(lambda: print(*{HEAVY!r} & set(sys.modules), file=sys.stderr)); sys.exit(main([]))"
    )
    offered = run_python(
        "-c", code, _STEEPEN_COMPLETE="complete_bash", COMP_WORDS="steepen train --ar", COMP_CWORD="2"
    )
    assert offered.stdout.split() == ["--arm"]
    assert offered.stderr.strip() == ""


def test_unknown_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err


def test_the_version_comes_from_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert steepen.__version__ == project["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"steepen {project['version']}\n"


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = steepen.no_such_name


def test_a_file_in_the_working_directory_can_be_named_and_shadows_no_module(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "custom_arms.py").write_text(
        "from steepen.model.arms import find_arm\nARM = find_arm('vanilla')\n"
    )
    done = run_python("-P", "-m", "steepen", "plan", "--arm", "custom_arms:ARM", "--depth", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def with_address_space(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "steepen", *words], capture_output=True, text=True, check=False, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip


def test_too_small_an_address_space_is_one_sentence_and_no_hang() -> None:
    for limit in (200 << 20, 250 << 20, 1500 << 20):  # OpenBLAS and torch hang with these
        done = with_address_space(limit, "fit", "paper:fineweb")
        assert done.returncode == 1 and "`ulimit -v`" in " ".join(done.stderr.split()), done.stderr
    assert with_address_space(200 << 20, "fit", "--help").returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch.so: failed to map segment from shared object"),
        ImportError("libcudart.so.12: cannot open shared object file: Cannot allocate memory"),
        RuntimeError("could not create a primitive"),
        MemoryError(),
    ],
)
def test_a_library_without_memory_is_out_of_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("steepen.requests.power.Power.run", fail)
    assert main(["power", "--delta-gamma", "0.1", "--noise", "0.01"]) == 1
    assert capsys.readouterr().err.startswith("steepen: out of memory")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO), "runs/a"), "steepen: Input/output error (runs/a).\n"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a"),
            "steepen: the disk is full (runs/a); free",
        ),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "steepen: the disk quota is used up; free some"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "steepen: the disk is full; free"),
    ],
)
def test_a_broken_disk_is_not_a_full_one(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("steepen.requests.power.Power.run", fail)
    assert main(["power", "--delta-gamma", "0.1", "--noise", "0.01"]) == 1
    assert capsys.readouterr().err.startswith(says)


def test_a_missing_library_is_not_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("no module named x")

    monkeypatch.setattr("steepen.requests.power.Power.run", fail)
    assert main(["power", "--delta-gamma", "0.1", "--noise", "0.01"]) == 70
    assert "internal error: ImportError" in capsys.readouterr().err


def test_an_interrupt_that_a_finalizer_swallows_comes_again() -> None:
    class Finalized:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), no_lost_interrupt():
        Finalized()
        time.sleep(10)
