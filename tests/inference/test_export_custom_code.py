"""Custom blocks and boundaries travel with an export as source, and compute there what they compute here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from steepen.errors import UsageError
from steepen.evaluation.load import LoadedRun, load
from steepen.inference.custom_code import source_files
from steepen.inference.export import export
from steepen.inference.import_model import import_model

SCRIPT = Path(__file__).with_name("load_exported.py")
TOKENS = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(2))
FILES = {
    "travel_lab/__init__.py": "",
    "travel_lab/arms.py": """
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import travel_parts
from torch import nn

from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock, linear

from .names import scaled as rescaled

if TYPE_CHECKING:
    from steepen.model.shape import Shape

SLOPE = 2.0  # used


class SquaredRelu(TransformerBlock):
    def __init__(self, shape: Shape, multipliers, options):
        super().__init__(shape, multipliers, options)
        del self.gate_up
        self.up = nn.Parameter(torch.empty(shape.mlp_width + shape.allocation.prelude, shape.width))
        self.down = nn.Parameter(torch.empty(shape.width, len(self.up)))

    def mlp(self, x):
        # A comment that travels.
        return SLOPE * linear(rescaled(travel_parts.act(linear(x, self.up))), self.down)


class Plain(nn.Module):
    constant_init = {"mix": 0.0}

    def __init__(self, shape, multipliers, options):
        super().__init__()
        self.mix = nn.Linear(shape.width, shape.width, bias=False)

    def attention_flops(self, shape, context):
        return 0

    def forward(self, x, rotary):
        past = x.cumsum(1) / torch.arange(1, 1 + x.shape[1], device=x.device)[:, None]
        return x + self.mix(past).tanh() * rotary[0].mean()


def mixed(h, e, alpha, norm):
    return 0.7 * norm(h) + 0.3 * alpha * e


SQUARED = dataclasses.replace(find_arm("loop-2"), name="squared", block=SquaredRelu, core_boundary=mixed)
PLAIN = dataclasses.replace(find_arm("vanilla"), name="plain", block=Plain)
""",
    "travel_lab/names.py": "def scaled(x):\n    return 0.5 * x\n\ndef other():\n    return nothing\n",
    "travel_parts.py": "import steepen.training\n\nPOWER = 2\n\ndef act(x):\n    return x.relu() ** POWER\n",
}
CASES = {"travel_lab.arms:SQUARED": True, "travel_lab.arms:PLAIN": False}  # arm → whether it has a cache


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package of custom code that can be imported."""
    folder = tmp_path_factory.mktemp("lab")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("travel_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def exported(
    lab: Path, random_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[LoadedRun, Path]]:
    folder, found = tmp_path_factory.mktemp("exported"), {}
    for case in CASES:
        run = random_run(case)
        with pytest.raises(UsageError, match=r"custom code \(travel_lab\.arms:.*`include_code`"):
            export(run, folder / "refused")
        found[case] = load(run, device="cpu"), export(run, folder / case[-7:].strip(":"), include_code=True)
    return found


@pytest.fixture(scope="module")
def computed(
    exported: dict[str, tuple[LoadedRun, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    """What transformers computes in a process that can import neither steepen nor the custom code."""
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'steepen[hf]')")
    folder = tmp_path_factory.mktemp("computed")
    requests: list[dict[str, Any]] = [
        {"name": case, "folder": str(exported[case][1]), "tokens": TOKENS.tolist(), "cache": cached}
        for case, cached in CASES.items()
    ]
    (folder / "requests.json").write_text(json.dumps(requests))
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, str(SCRIPT), str(folder / "requests.json"), str(folder / "out.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_equal_without_steepen_and_the_module(
    case: str, exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor]
) -> None:
    run, _ = exported[case]
    expected = run.network(TOKENS, passes=run.passes)
    torch.testing.assert_close(computed[f"{case}/float32"], expected, rtol=0, atol=1e-5)
    network = load(run.checkpoint, device="cpu").network.double()
    network.reset_rotary()
    exact = network(TOKENS, passes=run.passes)
    torch.testing.assert_close(computed[f"{case}/float64"], exact, rtol=0, atol=1e-12)
    if CASES[case]:
        torch.testing.assert_close(computed[f"{case}/cached"], exact, rtol=0, atol=1e-12)
        return
    texts = TOKENS
    for _ in range(8):
        texts = torch.cat([texts, network(texts, passes=run.passes)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(computed[f"{case}/greedy"], texts)


def test_only_what_the_block_needs_travels(exported: dict[str, tuple[LoadedRun, Path]]) -> None:
    _, folder = exported["travel_lab.arms:SQUARED"]
    files = {file.stem: file.read_text() for file in folder.glob("*.py")}
    assert set(files) == {
        "modeling_steepen", "steepen_model_block", "travel_lab_arms", "travel_lab_names", "travel_parts"
    }  # fmt: skip
    assert "# A comment that travels." in files["travel_lab_arms"]
    card = (folder / "README.md").read_text()
    assert "`travel_lab.arms:SquaredRelu`, `travel_lab.arms:mixed`, copied into this folder" in card
    assert not any("find_arm" in text or "steepen.training" in text for text in files.values())
    assert "nothing" not in files["travel_lab_names"]


@pytest.mark.parametrize("case", CASES)
def test_an_export_with_custom_code_is_imported_as_the_same_run(
    case: str, exported: dict[str, tuple[LoadedRun, Path]], tmp_path: Path
) -> None:
    run, folder = exported[case]
    again = load(import_model(folder, tmp_path).path, device="cpu")
    assert again.spec == run.spec
    assert torch.equal(again.network(TOKENS), run.network(TOKENS))


def test_code_that_needs_more_of_steepen_is_rejected(lab: Path) -> None:
    (lab / "travel_more.py").write_text(
        "from steepen.model.block import TransformerBlock\nfrom steepen.model.shape import Shape\n\n"
        "class Block(TransformerBlock):\n    def mlp(self, x):\n        return x * isinstance(x, Shape)\n"
    )
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=r"uses Shape of steepen\.model\.shape, which an export does not"):
        source_files(["travel_more:Block"])


@pytest.mark.parametrize(
    "statements",
    ["TABLE = {}\nTABLE[1] = 2", "TABLE = {}\nfor i in range(3):\n    TABLE[i] = i", "TABLE = 1\nTABLE = 2",
     "TABLE = []\nTABLE.append(1)", "TABLE = 1\nTABLE += 1"],
)  # fmt: skip
def test_constant_that_is_changed_on_import_is_rejected(statements: str, lab: Path) -> None:
    (lab / "travel_changed.py").write_text(
        f"from steepen.model.block import TransformerBlock\n{statements}\n\n"
        "class Block(TransformerBlock):\n    def mlp(self, x):\n        return x * TABLE\n"
    )
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match="changes or uses TABLE when the module is imported"):
        source_files(["travel_changed:Block"])
