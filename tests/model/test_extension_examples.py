"""The extension examples of docs/architectures.md and examples/ run as they are printed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grown_networks import grow
from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.block import Block, TransformerBlock
from steepen.model.block_variant import VariantBlock
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import BASE
from steepen.runs.spec import DataConfig, RunSpec, code_digest, override

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=8, vocabulary=32)
TOKENS = torch.arange(16).view(2, 8)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    blocks = python_blocks("architectures.md")
    source = [block for block in blocks if block.startswith("# mylab.py")]
    assert len(source) == 2, "arm and boundary, block"
    source += [(DOCS.parent / "examples" / name).read_text() for name in ("one_head.py", "lion.py")]
    (tmp_path / "mylab.py").write_text("\n".join(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("mylab")
    del sys.modules["mylab"]


def test_network_example_runs() -> None:
    (example,) = [block for block in python_blocks("architectures.md") if not block.startswith("# mylab.py")]
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["logits"].shape == (1, 64, 50_257) and len(names["network"].cores) == 4


@pytest.mark.parametrize("name", ["MIXED", "SQUARED", "ONE_HEAD"])
def test_custom_arm_is_found_by_name_and_as_an_object(mylab: Any, name: str) -> None:
    arm: Arm = getattr(mylab, name)
    assert find_arm(f"mylab:{name}") == find_arm(arm) == arm
    assert all(isinstance(value, str) for value in (arm.block, arm.core_boundary, arm.coda_boundary))
    network = materialize(build_on_meta(arm.shape(3, SCALE), arm), embedding_std=0.1)
    network(TOKENS, TOKENS).backward()
    assert code_digest(arm) is not None


def test_built_in_and_custom_blocks_have_the_members_of_the_block_api(mylab: Any) -> None:
    built_in: type[Block] = TransformerBlock  # checked by the type checker
    members = {"constant_init", "attention_flops", "__call__", "__init__"}
    assert members <= {name for name in vars(Block) | Block.__annotations__ if name in members}
    for block in (built_in, VariantBlock, mylab.OneHead, mylab.SquaredRelu):
        assert all(hasattr(block, name) for name in members)


def test_class_or_function_works_like_its_name(mylab: Any) -> None:
    assert mylab.SQUARED.block == "mylab:SquaredRelu"
    assert Arm("a", block=mylab.SquaredRelu) == Arm("a", block="mylab:SquaredRelu")
    assert mylab.MIXED.core_boundary == "mylab:mixed"
    assert OptimizerConfig(mylab.lion) == OptimizerConfig(kind="mylab:lion")
    with pytest.raises(UsageError, match="cannot be imported by name"):
        Arm("a", core_boundary=lambda h, e, alpha, norm: e)


def test_custom_optimizer_steps_the_block_matrices(mylab: Any) -> None:
    arm = find_arm("untied-grow")
    hyper = replace(BASE["untied-2"], learning_rate=0.01, weight_decay=0.1)
    network = materialize(build_on_meta(arm.shape(3, SCALE), arm), embedding_std=0.1)
    optimizer = Optimizer(network.named_parameters(), hyper, OptimizerConfig(mylab.lion))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    network(TOKENS, TOKENS).backward()
    optimizer.step(0.5)
    for name, parameter in optimizer.matrices.items():
        # Lion moves every weight by lr, after decaying it by lr·wd; the schedule's factor is in lr.
        assert parameter.grad is not None
        expected = before[name] * (1 - 0.005 * 0.1) - 0.005 * parameter.grad.sign()
        assert torch.allclose(parameter, expected, atol=1e-7), name
    assert {"embedding", "head"}.isdisjoint(optimizer.matrices)


def test_custom_optimizer_state_is_saved_restored_and_grown(mylab: Any) -> None:
    arm = find_arm("untied-grow")
    config = OptimizerConfig(mylab.lion, growth_state="copy")
    network, copy = (
        materialize(build_on_meta(arm.shape(3, SCALE), arm), embedding_std=0.1) for _ in range(2)
    )
    optimizer = Optimizer(network.named_parameters(), BASE["untied-2"], config)
    network(TOKENS, TOKENS).backward()
    optimizer.step(1.0)
    state = optimizer.state()
    assert set(state) == {name for name, _ in network.named_parameters()}
    other = Optimizer(copy.named_parameters(), BASE["untied-2"], config)
    copy.load_state_dict(network.state_dict())
    other.load_state({n: {k: v.clone() for k, v in s.items()} for n, s in state.items()})
    for each, stepped in ((network, optimizer), (copy, other)):
        stepped.zero_grad()
        each(TOKENS, TOKENS).backward()
        stepped.step(0.5)
        sources = grow(each, 4)
        stepped.grow(each.named_parameters(), sources)
        grown = stepped.state()
        assert all(torch.equal(grown[new]["exp_avg"], grown[old]["exp_avg"]) for new, old in sources.items())
        stepped.zero_grad()
        each(TOKENS, TOKENS).backward()
        stepped.step(0.5)
    ours = dict(copy.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in network.named_parameters())


def test_custom_optimizer_is_part_of_the_run_hash(mylab: Any) -> None:
    from steepen.recipe.paper_tables import recipe_of

    arm = find_arm("vanilla")
    spec = RunSpec.from_plan(recipe_of(arm).at(arm, 8), DataConfig("x"))
    custom = override(spec, ["optimizer.kind=mylab:lion"])
    assert spec.code is None and custom.code == code_digest(arm, OptimizerConfig(mylab.lion))
    assert custom.hash != spec.hash
    assert RunSpec.from_dict(custom.to_dict()) == custom


def not_an_optimizer(*given: object) -> str:
    return "optimizer"


def half(named_parameters: list[Any], *rest: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named_parameters[::2], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "said"),
    [(not_an_optimizer, "not a torch.optim.Optimizer"), (half, "must hold each of the")],
)
def test_invalid_custom_optimizer_is_rejected(factory: Any, said: str) -> None:
    arm = find_arm("vanilla")
    network = build_on_meta(arm.shape(3, SCALE), arm)
    with pytest.raises(UsageError, match=said):
        Optimizer(network.named_parameters(), BASE["vanilla"], OptimizerConfig(factory))
