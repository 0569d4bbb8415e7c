"""On a GPU, the fused and the compiled path are as close to fp32 as the bf16 reference is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grown_networks import grow
from steepen.execution.select import apply_execution_mode, compile_blocks, compile_network
from steepen.model.arms import ARMS, find_arm
from steepen.model.config import ModelOptions, StreamPrecision
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.training.device import configure_backends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCALE = SizeRule(aspect=64, head_dim=64, mlp_multiple=64, context=256, vocabulary=1024, real_vocabulary=1000)


def build(name: str, stream: StreamPrecision = "bf16") -> Network:
    arm, options = find_arm(name), ModelOptions(residual_stream=stream)
    bare = build_on_meta(arm.shape(6, SCALE), arm, options=options)
    network = materialize(bare, "cuda", embedding_std=0.2, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in network.parameters():  # some weights are initialized to zero
        scale = 0.5 * parameter.shape[-1] ** -0.5
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return network


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    tokens = torch.randint(0, 1000, (4, 257), generator=generator, device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_and_gradients(network: Network, passes: int) -> tuple[float, dict[str, Tensor]]:
    network.zero_grad()
    loss = network(*batch(), passes=passes)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def assert_as_accurate(name: str, exact: Network, reference: Network, other: Network) -> None:
    """Check that `other` is as close to fp32 (`exact`) as the bf16 reference, for each number of passes."""
    arm = find_arm(name)
    with configure_backends(torch.device("cuda")):
        for passes in sorted({1, arm.passes.initial, arm.passes.max_passes}):
            for network in (exact, reference, other):
                if passes > network.passes:
                    grow(network, passes)
            if other.fused is None:
                compile_blocks(other)
            exact_loss, exact_gradients = loss_and_gradients(exact, passes)
            reference_loss, reference_gradients = loss_and_gradients(reference, passes)
            loss, gradients = loss_and_gradients(other, passes)
            assert loss == pytest.approx(exact_loss, abs=max(2 * abs(reference_loss - exact_loss), 2e-2))
            assert gradients.keys() == exact_gradients.keys()
            for key, exact_gradient in exact_gradients.items():
                norm = exact_gradient.norm() + 1e-12
                reference_error = (reference_gradients[key] - exact_gradient).norm() / norm
                error = (gradients[key] - exact_gradient).norm() / norm
                assert error <= max(1.5 * reference_error.item(), 5e-3), key


@pytest.mark.parametrize("stream", ["bf16", "fp32"])
@pytest.mark.parametrize("name", [*ARMS, "vanilla+kv_heads=2", "untied-grow+kv_heads=1"])
def test_fused_path_is_as_close_to_fp32_as_the_bf16_reference(name: str, stream: StreamPrecision) -> None:
    exact, reference, fused = build(name), build(name, stream), build(name, stream)
    reference.compute_dtype = torch.bfloat16
    apply_execution_mode(fused, "bf16", fused=True, compiled=False)
    assert_as_accurate(name, exact, reference, fused)


@pytest.mark.parametrize("stream", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["vanilla", "loop-grow", "untied-grow", "vanilla+window=64+parallel=true"])
def test_compiled_path_is_as_close_to_fp32_as_the_bf16_reference(name: str, stream: StreamPrecision) -> None:
    exact, reference, compiled = build(name), build(name, stream), build(name, stream)
    reference.compute_dtype = torch.bfloat16
    apply_execution_mode(compiled, "bf16", fused=False, compiled=True)
    assert_as_accurate(name, exact, reference, compiled)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["deep-vanilla-grow", "untied-grow"])
def test_fp32_residual_stream_is_closer_to_fp32_than_a_bf16_stream(name: str, precision: str) -> None:
    """Hidden states after the last block, at the largest number of passes; the stream's dtype too."""
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8 tensor cores")
    hidden: dict[str, Tensor] = {}
    for stream in ("exact", "bf16", "fp32"):
        network = build(name, "bf16" if stream == "exact" else stream)
        if stream != "exact":
            apply_execution_mode(network, precision, fused=True, compiled=False)
        grow(network, find_arm(name).passes.max_passes)
        with configure_backends(torch.device("cuda")):
            # With gradients: without them fp8 networks run in bf16.
            hidden[stream] = network.hidden_states(batch()[0], find_arm(name).passes.max_passes).detach()
    assert hidden["bf16"].dtype == torch.bfloat16 and hidden["fp32"].dtype == torch.float32
    norm = hidden["exact"].norm()
    error = {s: ((hidden[s].float() - hidden["exact"]).norm() / norm).item() for s in ("bf16", "fp32")}
    assert error["fp32"] < (0.9 if precision == "bf16" else 1.0) * error["bf16"], error


def test_growth_and_other_passes_trigger_no_recompilation() -> None:
    from torch._dynamo.utils import counters

    network = build("untied-grow")
    network.compute_dtype = torch.bfloat16
    compile_network(network)
    with configure_backends(torch.device("cuda")):
        loss_and_gradients(network, 2)
        loss_and_gradients(network, 2)
        counters.clear()
        grow(network, 4)
        compile_blocks(network)
        for passes in (4, 3, 1, 2, 4):
            loss_and_gradients(network, passes)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_gemm_of_experts_is_as_close_to_fp32_as_one_gemm_each(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token whose scores are nearly equal chooses another expert in bf16 than in fp32, in either form."""
    exact, each, grouped = (build("vanilla+experts=8") for _ in range(3))
    each.compute_dtype = grouped.compute_dtype = torch.bfloat16
    with configure_backends(torch.device("cuda")):
        with monkeypatch.context() as patch:
            patch.setattr("steepen.model.block_variant.has_grouped_gemm", lambda *_: False)
            exact_loss, exact_gradients = loss_and_gradients(exact, 1)
            each_loss, each_gradients = loss_and_gradients(each, 1)
        if compiled:
            compile_network(grouped)
        loss, gradients = loss_and_gradients(grouped, 1)
    assert loss == pytest.approx(exact_loss, abs=max(2 * abs(each_loss - exact_loss), 2e-2))
    for key, one in exact_gradients.items():
        norm = one.norm() + 1e-12
        error, expected = ((found[key] - one).norm() / norm for found in (gradients, each_gradients))
        assert error <= max(1.5 * expected.item(), 5e-3), key


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_blocks_give_the_same_gradients_in_less_memory(compiled: bool) -> None:
    found: list[tuple[float, dict[str, Tensor]]] = []
    held: list[int] = []  # bytes that the forward keeps for the backward
    for recompute in (False, True):
        network = build("untied-2")
        apply_execution_mode(network, "bf16", fused=not compiled, compiled=compiled)
        network.recompute = recompute
        with configure_backends(torch.device("cuda")):
            found.append(loss_and_gradients(network, 2))
            network.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = network(*batch(), passes=2)
            held.append(torch.cuda.memory_allocated() - before)
            loss.backward()
    assert found[0][0] == found[1][0]
    for key, one in found[0][1].items():
        if key != "embedding":  # the rows of its gradient are added by atomics, in any order
            assert torch.equal(one, found[1][1][key]), key
    assert held[1] < 0.6 * held[0], held
