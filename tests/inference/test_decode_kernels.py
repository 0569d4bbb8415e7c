"""The decode kernels generate the tokens of the reference; without a GPU on Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from steepen.execution import gpu_decode
from steepen.inference.decoding import Sampling, continue_tokens
from steepen.model.boundary import Norm
from steepen.model.config import Multipliers
from steepen.model.network import Network

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[5, 3, 9, 1, 7], [2]]
TOKENS = 40 if torch.cuda.is_available() else 3  # the interpreter takes seconds for each
GREEDY = Sampling(temperature=0)
ARMS = [
    "operator-1",
    "untied-grow",
    "vanilla+kv_heads=1+window=5",
    "loop-2+parallel=true+activation=relu2",
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use the decode kernels without a GPU too; the list counts the steps that they compute."""
    steps: list[str] = []
    compute = gpu_decode.DecodeStep.__call__

    def counted(self: gpu_decode.DecodeStep) -> None:
        steps.append("step")
        compute(self)

    monkeypatch.setattr(gpu_decode, "has_triton_kernels", lambda device: True)
    monkeypatch.setattr(gpu_decode.DecodeStep, "__call__", counted)
    return steps


def on_device(network: Network) -> Network:
    network.to(DEVICE).reset_rotary()
    return network


@pytest.mark.parametrize("arm", ARMS)
def test_tokens_of_the_kernels_are_those_of_the_reference(
    arm: str, make_network: Callable[..., Network], kernels: list[str]
) -> None:
    network = on_device(make_network(arm, depth=3, aspect=8, head_dim=12))
    for prompts, sampling in ((PROMPTS, Sampling(0.9, 0.8, seed=4)), (PROMPTS[:1], GREEDY)):
        found = continue_tokens(network, prompts, TOKENS, sampling)
        assert len(kernels) >= 2
        kernels.clear()
        assert found == continue_tokens(network, prompts, TOKENS, sampling, cuda_graphs=False)
        assert not kernels


def test_a_long_cache_is_attended_to_in_chunks(
    make_network: Callable[..., Network], kernels: list[str]
) -> None:
    network = on_device(make_network("vanilla+window=150", depth=1, aspect=16, context=512))
    prompts = [list(range(1, 48)) * 6, [7] * 130]
    for rows in (prompts, prompts[1:]):
        found = continue_tokens(network, rows, TOKENS, GREEDY)
        assert kernels
        assert found == continue_tokens(network, rows, TOKENS, GREEDY, cuda_graphs=False)


def test_slots_shared_by_passes_and_model_options(
    make_network: Callable[..., Network], kernels: list[str]
) -> None:
    network = on_device(make_network("loop-3", depth=3, aspect=8))
    network.options = replace(network.options, softcap=3.0, first_pass="boundary", residual_stream="bf16")
    network.multipliers = replace(Multipliers(), output=0.7, injection=0.4)
    sampling = Sampling(1.1, 0.9, seed=1)
    found, expected = (
        continue_tokens(network, PROMPTS, TOKENS, sampling, share_passes=True, cuda_graphs=graphs)
        for graphs in (True, False)
    )
    assert kernels and found == expected


def cumulative(h: torch.Tensor | None, e: torch.Tensor, alpha: float, norm: Norm) -> torch.Tensor:
    """A boundary operator of one's own, which reads the shape and returns another layout."""
    _batch, _time, width = e.shape
    mixed = norm(e if h is None else h) + alpha * e.cumsum(-1) / width
    return mixed.mT.contiguous().mT


def test_a_custom_boundary_gets_three_dimensions(
    make_network: Callable[..., Network], kernels: list[str]
) -> None:
    network = on_device(make_network("loop-2", depth=3, aspect=8))
    network.core_boundary = network.coda_boundary = cumulative
    for prompts in (PROMPTS, PROMPTS[:1]):
        found = continue_tokens(network, prompts, TOKENS, GREEDY)
        assert kernels
        assert found == continue_tokens(network, prompts, TOKENS, GREEDY, cuda_graphs=False)


def test_other_blocks_and_dtypes_are_left_to_the_reference(make_network: Callable[..., Network]) -> None:
    for arm in ("loop-2+experts=4", "untied-2+streams=3"):
        assert not gpu_decode.has_decode_kernels(make_network(arm))
    assert not gpu_decode.has_decode_kernels(make_network("vanilla", dtype=torch.float64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter multiplies no bf16")
@pytest.mark.parametrize("arm", ["loop-2", "vanilla+kv_heads=1+window=5"])
@torch.no_grad()
def test_tokens_in_bf16_have_the_highest_exact_logit_but_for_near_ties(
    arm: str, make_network: Callable[..., Network], kernels: list[str]
) -> None:
    """Rounding decides between near ties, so long texts differ in bf16: each token is judged by itself."""
    network = on_device(make_network(arm)).bfloat16()
    exact = on_device(make_network(arm).bfloat16().double())
    for prompts in (PROMPTS, PROMPTS[:1]):
        texts = [each.tokens for each in continue_tokens(network, prompts, TOKENS, GREEDY)]
        assert kernels
        for prompt, text in zip(prompts, texts, strict=True):
            logits = exact(torch.tensor([prompt + text[:-1]], device=DEVICE))[0, len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(text, device=DEVICE).unsqueeze(1)).squeeze(1)
            assert (logits.amax(1) - chosen).max() < 0.1 * logits.std()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads several steps at once on a GPU only")
def test_a_text_on_a_gpu_ends_with_its_end_token(make_network: Callable[..., Network]) -> None:
    network = on_device(make_network("vanilla"))
    whole = [each.tokens for each in continue_tokens(network, PROMPTS, TOKENS, GREEDY)]
    for place in (0, 1, 17):
        end = whole[0][place]
        found = continue_tokens(network, PROMPTS, TOKENS, GREEDY, end=end)
        for one, text in zip(found, whole, strict=True):
            cut = text[: text.index(end) + 1] if end in text else text
            assert one.tokens == cut and (one.stopped_by == "end of text") == (end in text)
