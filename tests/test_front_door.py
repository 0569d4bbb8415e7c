"""The front door answers fast, and says what went wrong in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steepen.cli.app import main


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys, steepen.cli.app; "
        "heavy = {'torch', 'scipy', 'matplotlib', 'pyarrow', 'tokenizers', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("steepen 0.")


def test_a_file_beside_the_user_hides_no_module_and_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "mine_here.py").write_text(
        "from steepen.model.arms import find_arm\nARM = find_arm('vanilla')\n"
    )
    words = [sys.executable, "-P", "-m", "steepen.cli", "plan", "--arm", "mine_here:ARM", "--depth", "8"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
