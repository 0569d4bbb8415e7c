"""Custom blocks: which code changes their digest, and the errors of blocks that fail."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steepen.errors import UsageError
from steepen.model.arms import ARMS
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule
from steepen.runs.spec import code_digest

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=8, vocabulary=32)
FILES = {
    "custom_lab.py": """
import torch
import custom_lab_names
from custom_lab_parts import act
from steepen.model.block import TransformerBlock, linear

SLOPE = 2.0
UNUSED = 3.0

def scaled(x):
    return SLOPE * custom_lab_names.twice(act(x))

def other(x):
    return x

class Block(TransformerBlock):
    def forward_reference(self, x, rotary, mask=None):
        return x + self.residual * linear(scaled(linear(x, self.gate_up[:1])), self.down)

class Short(TransformerBlock):
    def forward_reference(self, x, rotary, mask=None):
        return x[:, :-1]

class Raises(TransformerBlock):
    def forward_reference(self, x, rotary, mask=None):
        return x + no_such_name
""",
    "custom_lab_parts.py": "def act(x):\n    return x.relu()\n\ndef unused(x):\n    return x\n",
    "custom_lab_names.py": "def twice(x):\n    return 2 * x\n",
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("custom_lab")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def digest(lab: Path, changes: tuple[str, str, str] | None = None) -> str | None:
    """The digest that a new process would compute, with a text replaced in one file."""
    for name, text in FILES.items():
        changed = text
        if changes is not None and name == changes[0]:
            assert changes[1] in text
            changed = text.replace(changes[1], changes[2]) + "\n# so that its size differs"
        (lab / name).write_text(changed)
    forget()
    return code_digest(replace(ARMS["vanilla"], block="custom_lab:Block"))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("custom_lab.py", "x + self.residual", "x - self.residual"),
        ("custom_lab.py", "SLOPE * custom", "-SLOPE * custom"),
        ("custom_lab.py", "SLOPE = 2.0", "SLOPE = 2.5"),
        ("custom_lab_parts.py", "x.relu()", "x.relu().square()"),
        ("custom_lab_names.py", "2 * x", "3 * x"),
    ],
)
def test_code_that_a_block_uses_changes_its_digest(lab: Path, file: str, old: str, new: str) -> None:
    before = digest(lab)
    assert before is not None and before == digest(lab)
    assert digest(lab, (file, old, new)) != before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("custom_lab.py", "UNUSED = 3.0", "UNUSED = 4.0"),
        ("custom_lab.py", "def other(x):\n    return x", "def other(x):\n    return 2 * x"),
        ("custom_lab_parts.py", "def unused(x):\n    return x", "def unused(x):\n    return 2 * x"),
    ],
)
def test_code_that_a_block_does_not_use_keeps_its_digest(lab: Path, file: str, old: str, new: str) -> None:
    assert digest(lab, (file, old, new)) == digest(lab)


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("Short", "custom_lab:Short' turns hidden states of shape (1, 8, 16) into (1, 7, 16)"),
        ("Raises", "custom_lab:Raises' failed: NameError: name 'no_such_name' is not defined"),
    ],
)
def test_failing_custom_block_is_named(block: str, said: str) -> None:
    arm = replace(ARMS["vanilla"], block=f"custom_lab:{block}")
    network = materialize(build_on_meta(arm.shape(2, SCALE), arm), embedding_std=0.1)
    with pytest.raises(UsageError, match=re.escape(said)):
        network(torch.zeros(1, 8, dtype=torch.long))
