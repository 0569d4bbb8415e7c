"""Every arm computes what the paper's authors' network computes, in fp64: loss and gradients, also grown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grown_networks import grow
from steepen.errors import UsageError
from steepen.execution.cpu_fused import install_fused_cpu
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.arms import ARMS
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.init import build_on_meta, materialize
from steepen.model.loss import mean_loss
from steepen.model.network import Network
from steepen.model.shape import Shape, SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.flops import flops_per_token, stored_parameters
from steepen.recipe.paper_tables import recipe_of

from . import authors_network
from .authors_network import Operator

REAL, PADDED = 37, 40
SCALE = SizeRule(8, 8, 8, context=12, vocabulary=PADDED, real_vocabulary=REAL)
RESIDUAL, OUTPUT, ALPHA = 0.25, 0.5, 0.707106781187
ABLATIONS = {
    "norm-only": Operator(ALPHA, inject=False),
    "inject-only": Operator(ALPHA, norm=False),
    "no-coda-injection": Operator(ALPHA, inject_before_coda=False),
}
PATHS: dict[str, Callable[[Network], None]] = {
    "reference": lambda network: None,
    "cpu-fused": install_fused_cpu,
    "gpu-fused": lambda network: install_fused_gpu(network, partial(FusedLinear, dtype=torch.float64)),
}


def operator_of(name: str) -> Operator | None:
    """The operator by an arm's name: stacks without a repeated core, and those called vanilla, have none."""
    if "vanilla" in name:
        return None
    if "-nci-" in name:
        return ABLATIONS["no-coda-injection"]
    return next((found for key, found in ABLATIONS.items() if name.endswith(key)), Operator(ALPHA))


def build(name: str, path: str = "reference", options: ModelOptions | None = None, **changes: Any) -> Network:
    arm = replace(ARMS[name], **changes)
    bare = build_on_meta(arm.shape(6, SCALE), arm, Multipliers(RESIDUAL, OUTPUT, ALPHA), options)
    network = materialize(bare, dtype=torch.float64, embedding_std=0.3, seed=1)
    generator = torch.Generator().manual_seed(0)
    for key, parameter in network.named_parameters():  # away from zeros, except for the head's padding
        noise = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(noise)
        if key == "head":
            parameter.data[REAL:] = 0
    PATHS[path](network)
    network.refresh()
    return network


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, REAL, (2, 13), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def authors_logits(network: Network, passes: int, tokens: Tensor, operator: Operator | None) -> Tensor:
    half = network.shape.head_dim // 2
    # Their RoPE turns the other way, which the second half of each query and key, negated, undoes.
    sign = torch.tensor([1.0] * half + [-1.0] * half).repeat(network.shape.heads)[:, None]

    def weights(blocks: nn.Module) -> list[authors_network.Block]:
        found: list[authors_network.Block] = []
        for block in blocks.children():
            (q, k, v), (gate, up) = block.get_parameter("qkv"), block.get_parameter("gate_up")
            out, down = block.get_parameter("out"), block.get_parameter("down")
            found.append(authors_network.Block(sign * q, sign * k, v, out, gate, up, down))
        return found

    tied = len(network.cores) == 1
    return authors_network.logits(
        tokens,
        network.embedding,
        weights(network.prelude),
        [weights(network.cores[0 if tied else index]) for index in range(passes)],
        weights(network.coda),
        network.head,
        heads=network.shape.heads,
        residual=RESIDUAL,
        output=OUTPUT,
        operator=operator,
        real_vocabulary=REAL,
        norm_prelude=network.arm.norm_prelude,
        backprop_passes=network.arm.backprop_passes,
    )


def assert_equals_authors(network: Network, passes: int, operator: Operator | None) -> None:
    tokens, targets = batch()
    network.zero_grad()
    expected = authors_logits(network, passes, tokens, operator)
    expected_loss = authors_network.loss(expected, targets)
    expected_loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters()}
    network.zero_grad()  # sets the gradients to None
    found = network(tokens, passes=passes)
    assert found.shape == (2, 12, REAL)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    loss = network(tokens, targets, passes=passes)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-13)
    loss.backward()
    for name, parameter in network.named_parameters():
        want = gradients[name]
        assert (parameter.grad is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(parameter.grad, want, rtol=1e-9, atol=1e-12, msg=name)
    assert network.head.grad is not None and not network.head.grad[REAL:].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ARMS)
def test_every_arm_equals_the_authors_network_before_and_after_growth(name: str, path: str) -> None:
    network, operator = build(name, path), operator_of(name)
    assert_equals_authors(network, network.passes, operator)
    final = ARMS[name].passes.max_passes
    if final > network.passes:
        grow(network, final)
        with torch.no_grad():  # new cores are copies; make them differ
            for index, parameter in enumerate(network.parameters()):
                parameter.mul_(1 + index / 100)
        network.refresh()
        assert_equals_authors(network, final, operator)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["operator-1", "loop-2", "untied-2"])
def test_norm_after_the_prelude_equals_the_authors_option(name: str, path: str) -> None:
    network = build(name, path, norm_prelude=True)
    assert_equals_authors(network, network.passes, operator_of(name))
    plain = build(name, path)
    assert (network(*batch()) - plain(*batch())).abs() > 1e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("last", [1, 2, 3, 5])
def test_truncated_backpropagation_equals_the_authors_option(last: int, path: str) -> None:
    """Gradients flow through the last passes only; the loss, and that of a shorter loop, stay as they are."""
    network, plain = build("loop-2", path, backprop_passes=last), build("loop-2", path)
    assert_equals_authors(network, 4, operator_of("loop-2"))
    torch.testing.assert_close(network(*batch(), passes=4), plain(*batch(), passes=4), rtol=0, atol=0)
    gradients: list[Tensor] = []
    for each in (network, plain):
        each.zero_grad()
        each(*batch(), passes=4).backward()
        found = each.cores[0].get_submodule("0").get_parameter("qkv").grad
        assert found is not None
        gradients.append(found)
    assert torch.equal(*gradients) == (last >= 4)


def test_a_skipped_pass_costs_its_forward() -> None:
    whole, arm = ARMS["loop-2"], replace(ARMS["loop-2"], backprop_passes=1)
    shape = arm.shape(8)
    for passes in (1, 2, 4):
        full, found = flops_per_token(whole, shape, passes), flops_per_token(arm, shape, passes)
        once = flops_per_token(whole, shape, 2).total - flops_per_token(whole, shape, 1).total
        assert full.total - found.total == pytest.approx(2 / 3 * (passes - 1) * once)
    with pytest.raises(UsageError, match="untied"):
        replace(ARMS["untied-2"], backprop_passes=1)
    with pytest.raises(UsageError, match="backprop_passes"):
        replace(ARMS["loop-2"], backprop_passes=0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("path", PATHS)
def test_padding_has_no_logit_and_no_gradient_with_a_softcap_too(path: str, softcap: float | None) -> None:
    network = build("operator-1", path, ModelOptions(softcap=softcap))
    tokens, targets = batch()
    loss = network(tokens, targets)
    logits = network(tokens)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert network.head.grad is not None
    assert not network.head.grad[REAL:].any() and network.head.grad[:REAL].any()
    with torch.no_grad():
        torch.testing.assert_close(network(tokens, targets), loss.detach())  # validation


def test_padded_softmax_option_gives_every_row_of_the_head_a_logit() -> None:
    for path in PATHS:
        network = build("vanilla", path, ModelOptions(padded_softmax=True))
        tokens, targets = batch()
        assert network(tokens).shape[-1] == PADDED
        network(tokens, targets).backward()
        assert network.head.grad is not None and network.head.grad[REAL:].all()


def test_padded_rows_of_the_head_stay_zero_through_training_and_the_first_loss_is_that_of_real_ids() -> None:
    arm = ARMS["operator-1"]
    bare = build_on_meta(arm.shape(3, SCALE), arm, Multipliers(RESIDUAL, OUTPUT, ALPHA))
    network = materialize(bare, embedding_std=0.3)
    optimizer = Optimizer(network.named_parameters(), recipe_of(arm).base, OptimizerConfig(), network.refresh)
    first = network(*batch())
    assert first.item() == pytest.approx(math.log(REAL), rel=1e-6)
    for step in range(5):
        optimizer.zero_grad()
        network(*batch()).backward()
        optimizer.step(1.0, step)
    assert not network.head[REAL:].any() and network.head[:REAL].any()


def test_padding_counts_as_parameters_and_flops() -> None:
    arm = ARMS["vanilla"]
    padded, unpadded = (
        arm.shape(6, SizeRule(vocabulary=50_304, real_vocabulary=n)) for n in (50_257, 50_304)
    )
    assert (padded.token_ids, unpadded.token_ids) == (50_257, 50_304)
    assert arm.shape(6, SizeRule()) == padded  # GPT-2's padding is known
    assert stored_parameters(arm, padded, 1) == stored_parameters(arm, unpadded, 1)
    assert flops_per_token(arm, padded, 1) == flops_per_token(arm, unpadded, 1)
    assert Shape.at(1, padded.allocation, SizeRule(vocabulary=512)).token_ids == 512


@pytest.mark.parametrize("name", ["loop-2", "untied-2-norm-only", "untied-2-inject-only"])
def test_first_pass_option_applies_the_boundary_before_the_first_pass(name: str) -> None:
    """As the paper writes it, h₀ = 0: α·e where the operator injects, Norm(e) where it only normalizes."""
    network, other = build(name), build(name, options=ModelOptions(first_pass="boundary"))
    tokens, _ = batch()
    inputs: list[Tensor] = []
    for each in (network, other):
        hook = each.cores[0][0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))  # type: ignore[index]
        each(tokens, passes=1)
        hook.remove()
    e, first = inputs
    torch.testing.assert_close(first, network.norm(e) if name.endswith("norm-only") else ALPHA * e)
    with torch.no_grad():
        assert not torch.allclose(network(tokens), other(tokens), rtol=1e-3)


@pytest.mark.parametrize(("bound", "factor"), [("width", 1 / math.sqrt(3)), ("fan_in", 1.0)])
def test_init_scale_bounds_the_uniform_initialization_by_the_width(bound: str, factor: float) -> None:
    arm, scale = ARMS["vanilla"], 0.353553390593
    options = ModelOptions(init_bound=bound)  # type: ignore[arg-type]
    shape = arm.shape(2, SizeRule(context=8, vocabulary=128))
    network = materialize(build_on_meta(shape, arm, options=options), embedding_std=0.02, init_scale=scale)
    for key, parameter in network.named_parameters():
        if key.endswith(("qkv", "gate_up")):
            deviation = scale * factor / math.sqrt(shape.width)
            assert parameter.std().item() == pytest.approx(deviation, rel=0.02)
            assert parameter.abs().max().item() <= math.sqrt(3) * deviation * 1.0001
        elif key == "embedding":
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)
        else:
            assert not parameter.any(), key


def test_rope_table_can_be_rounded_to_bf16() -> None:
    exact, rounded = build("vanilla"), build("vanilla", options=ModelOptions(rope_table="bf16"))
    assert torch.equal(rounded.rotary, exact.rotary.bfloat16().double())
    assert not torch.equal(rounded.rotary, exact.rotary)


def test_norm_epsilon_is_the_machine_epsilon_of_fp32() -> None:
    assert ModelOptions().norm_eps == pytest.approx(torch.finfo(torch.float32).eps, rel=1e-7)


def test_mlp_width_is_the_authors() -> None:
    for width in range(64, 4097, 64):
        assert SizeRule().mlp_width(width) == 256 * -(-(8 * width // 3) // 256)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("path", PATHS)
def test_the_loss_of_one_token_is_told_apart_whatever_the_number_of_its_targets(
    path: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.model.loss.CHUNK", 4)  # several chunks, the last one padded
    network = build("untied-2", path, ModelOptions(softcap=softcap))
    tokens, targets = batch()
    with torch.no_grad():
        for apart in (int(targets[0, 0]), next(n for n in range(REAL) if n not in targets)):
            for some in (targets, torch.full_like(targets, apart)):
                each = nn.functional.cross_entropy(
                    network(tokens).flatten(0, 1), some.flatten(), reduction="none"
                )
                mean, own = network(tokens, some, apart=apart).tolist()
                assert own == pytest.approx(float(each[some.flatten() == apart].sum()), abs=1e-12)
                assert mean == pytest.approx(float(each.mean()))
                found = mean_loss(network, [(tokens, some)] * 2, apart=apart)
                assert found == pytest.approx((mean, own / some.numel()))
