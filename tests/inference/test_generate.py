"""Generation: cached equals uncached, a padded batch equals single prompts, and errors are one sentence."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import steepen
from steepen.data import Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.load import load
from steepen.execution.cuda_graphs import CudaGraphCache
from steepen.inference import decoding
from steepen.inference.decoding import Chooser, Sampling, continue_text, continue_tokens
from steepen.inference.kv_cache import KVCache, supports_cache
from steepen.model.arms import ARMS
from steepen.model.network import Network
from steepen.requests.app import main

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 3, 9, 1, 7], [2], [8, 8, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
# Options of the block.
BLOCKS = [
    "vanilla+kv_heads=1+window=5",
    "loop-2+experts=4+shared_experts=1",
    "untied-2+streams=3",
    "vanilla+parallel=true+activation=relu2",
    "vanilla+parallel=true+activation=relu2",
]


def cached_logits(
    network: Network, tokens: torch.Tensor, passes: int, prompt: int, share_passes: bool = False
) -> torch.Tensor:
    """Logits of all positions: the first `prompt` tokens at once, then token by token."""
    cache = KVCache(network, passes, [0] * len(tokens), tokens.shape[1], share_passes=share_passes)
    parts: list[torch.Tensor] = []
    for chunk in (tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)):
        time = chunk.shape[1]
        hidden = network.hidden_states(chunk, passes, layout=cache.layout(time), cache=cache.slots)
        cache.advance(time)
        parts.append(network.logits(hidden))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("arm", [*sorted(ARMS), *BLOCKS])
@torch.no_grad()
def test_cached_logits_equal_uncached_logits(arm: str, make_network: Callable[..., Network]) -> None:
    network = make_network(arm, dtype=torch.float64)
    passes = network.passes
    assert len(KVCache(network, passes, [0], 4).slots) == network.shape.allocation.executed(passes)
    tokens = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = network(tokens, passes=passes)
    for prompt in (1, 5):
        found = cached_logits(network, tokens, passes, prompt)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_slots_shared_by_passes_hold_less_and_change_the_logits(make_network: Callable[..., Network]) -> None:
    network = make_network("loop-3", dtype=torch.float64)
    own, shared = (KVCache(network, 3, [0], 16, share_passes=share) for share in (False, True))
    split = network.shape.allocation
    assert own.bytes * split.blocks == shared.bytes * split.executed(3)
    tokens = torch.arange(12).unsqueeze(0)
    difference = (cached_logits(network, tokens, 3, 5, share_passes=True) - network(tokens, passes=3)).abs()
    # The prompt is computed alike, the new tokens are not.
    assert difference[:, :5].max() < 1e-12 and difference[:, 5:].amax(-1).min() > 1e-6


def test_memory_of_a_call_is_free_at_its_end(
    make_network: Callable[..., Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cycle of references would keep cached keys and CUDA graphs until Python looks for cycles."""
    network, kept = make_network("loop-2"), list[weakref.ref[Any]]()

    def noted(kind: Callable[..., Any], *given: Any, **named: Any) -> Any:
        made = kind(*given, **named)
        kept.append(weakref.ref(made))
        return made

    for kind in (KVCache, decoding.Decoder):
        monkeypatch.setattr(decoding, kind.__name__, partial(noted, kind))
    gc.disable()
    try:
        continue_tokens(network, PROMPTS, 4, GREEDY)
        assert len(kept) == 2 and not any(one() for one in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("arm", ["untied-grow", "random-loop-grow", *BLOCKS])
def test_greedy_tokens_are_the_same_with_and_without_cache_and_in_a_padded_batch(
    arm: str, make_network: Callable[..., Network]
) -> None:
    network = make_network(arm, dtype=torch.float64)
    batch = [each.tokens for each in continue_tokens(network, PROMPTS, 24, GREEDY)]
    assert batch == [each.tokens for each in continue_tokens(network, PROMPTS, 24, GREEDY, cache=False)]
    for prompt, tokens in zip(PROMPTS, batch, strict=True):
        assert continue_tokens(network, [prompt], 24, GREEDY)[0].tokens == tokens
    assert len({tuple(tokens) for tokens in batch}) == len(PROMPTS)  # the prompts matter


@torch.no_grad()
def test_cached_logits_at_other_passes_than_trained(make_network: Callable[..., Network]) -> None:
    network = make_network("loop-2", dtype=torch.float64)
    tokens = torch.arange(12).unsqueeze(0)
    found = [cached_logits(network, tokens, passes, 5) for passes in (1, 2, 5)]
    for passes, logits in zip((1, 2, 5), found, strict=True):
        torch.testing.assert_close(logits, network(tokens, passes=passes), rtol=0, atol=1e-12)
    assert (found[0] - found[1]).abs().max() > 1e-3 < (found[1] - found[2]).abs().max()


def test_a_text_ends_with_the_end_token_the_limit_or_the_context(
    make_network: Callable[..., Network],
) -> None:
    network = make_network("vanilla")
    one = continue_tokens(network, PROMPTS[:1], 10, GREEDY)[0]
    assert one.stopped_by == "max tokens" and len(one.tokens) == 10
    end = one.tokens[4]
    stopped = continue_tokens(network, PROMPTS[:1], 10, GREEDY, end=end)[0]
    assert stopped.stopped_by == "end of text"
    assert stopped.tokens == one.tokens[: one.tokens.index(end) + 1]
    full = continue_tokens(network, PROMPTS[:1], 10_000, GREEDY)[0]
    room = network.shape.context - len(PROMPTS[0])
    assert full.stopped_by == "context" and len(full.tokens) == room
    # Random numbers are drawn for the tokens that have room only, and are the same for any limit.
    sampled, limited = (
        continue_tokens(network, PROMPTS[:1], most, Sampling(2.0, 1.0))[0] for most in (10**15, room)
    )
    assert sampled.tokens == limited.tokens and sampled.stopped_by == "context"


def test_sampling_follows_the_probabilities_of_the_kept_tokens() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    for temperature, top_p, expected in (
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
        (1.0, 0.7, [0.625, 0.375, 0, 0]),
        (1.0, 0.4, [1, 0, 0, 0]),
        (0.5, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ):
        choose = Chooser(Sampling(temperature, top_p, seed=3), 4000, 1, torch.device("cpu"))
        drawn = choose(logits, choose.uniforms[:, 0]).bincount(minlength=4) / 4000
        torch.testing.assert_close(drawn, torch.tensor(expected, dtype=drawn.dtype), atol=0.03, rtol=0)
    limited = Chooser(Sampling(temperature=0), 2, 1, torch.device("cpu"), vocabulary=2)
    assert limited(torch.tensor([[0.0, 1.0, 9.0]] * 2), limited.uniforms[:, 0]).tolist() == [1, 1]


def test_a_seed_decides_each_row_by_itself(make_network: Callable[..., Network]) -> None:
    network = make_network("loop-2", dtype=torch.float64)

    def texts(seed: int, prompts: list[list[int]]) -> list[list[int]]:
        return [each.tokens for each in continue_tokens(network, prompts, 12, Sampling(1.0, 0.9, seed))]

    assert texts(1, PROMPTS) == texts(1, PROMPTS) != texts(2, PROMPTS)
    assert texts(1, PROMPTS)[:2] == texts(1, PROMPTS[:2])


def test_bytes_of_an_unfinished_character_wait_for_the_rest(
    make_network: Callable[..., Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer("bytes", tuple(bytes([byte]) for byte in range(256)))
    first, second = "é".encode()
    seen: list[str] = []

    def tokens(*_: object, on_token: Callable[[int, int], None], **__: object) -> None:
        for token in (ord("a"), first, second, first):
            on_token(0, token)
            seen.append("next")

    monkeypatch.setattr("steepen.inference.decoding.continue_tokens", tokens)
    (text,) = continue_text(make_network(), tokenizer, ["x"], 4, on_text=lambda _, piece: seen.append(piece))
    assert seen == ["a", "next", "next", "é", "next", "next", "�"] and text == "aé�"


def test_custom_blocks_without_a_cache_argument_are_computed_without_one(
    make_network: Callable[..., Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uncached_block.py").write_text(
        "from steepen.model.block import TransformerBlock\n"
        "class PlainBlock(TransformerBlock):\n"
        "    def forward(self, x, rotary):\n"
        "        return self.forward_reference(x, rotary)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with_cache = make_network("loop-2", dtype=torch.float64)
    arm = replace(with_cache.arm, block="uncached_block:PlainBlock")
    network = make_network(arm, dtype=torch.float64)
    network.load_state_dict(with_cache.state_dict())
    assert supports_cache(with_cache) and not supports_cache(network)
    first, second = (continue_tokens(each, PROMPTS, 8, GREEDY) for each in (with_cache, network))
    assert first == second


def test_text_from_python_and_the_command_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces: list[str] = []
    text = steepen.generate(trained, "the cat", max_tokens=12, device="cpu")
    run = load(trained, device="cpu")
    continue_text(
        run.network, run.tokenizer, ["the cat"], 12, passes=run.passes,
        on_text=lambda row, piece: pieces.append(piece),
    )  # fmt: skip
    assert len(text) == 1 and text[0] == "".join(pieces)
    words = ["generate", str(trained), "--device", "cpu", "--max-tokens", "12"]
    assert main([*words, "--prompt", "the cat"]) == 0
    assert capsys.readouterr().out == f"the cat{text[0]}\n"
    words[1:2] = [trained.name[:6], "--runs", str(trained.parent)]
    assert main([*words, "--prompt", "the cat", "--prompt", "a dog sat", "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert [each["prompt"] for each in texts] == ["the cat", "a dog sat"] and texts[0]["text"] == text[0]
    loaded = steepen.generate(load(trained, device="cpu"), ["the"], temperature=0)
    assert list(steepen.generate(trained, "the", temperature=0, device="cpu")) == list(loaded)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"passes": 9}, "this untied network has 4 cores"),
        ({"passes": 0}, "`passes` = 0 is not valid"),
        ({"max_tokens": 0}, "`max_tokens` = 0"),
        ({"temperature": -1}, "`temperature` = -1"),
        ({"top_p": 0}, "`top_p` = 0"),
        ({"seed": -1}, "`seed` = -1"),
        ({"prompt": "the cat sat " * 100}, "leaves no room in the network's context of 32"),
    ],
)
def test_a_bad_request_is_rejected_in_one_sentence(trained: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        steepen.generate(trained, **{"prompt": "the", "device": "cpu", **options})


def test_a_run_without_a_tokenizer_is_rejected(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(SteepenError, match=r"has no tokenizer\.json"):
        steepen.generate(copy, "the", device="cpu")


def test_a_network_without_a_core_runs_one_pass(make_network: Callable[..., Network]) -> None:
    with pytest.raises(UsageError, match="vanilla has no core to repeat"):
        continue_tokens(make_network("vanilla"), PROMPTS, 3, passes=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0.9, seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("arm", "tokens"), [("loop-2", 400), ("loop-2+experts=4", 20)])
def test_tokens_of_cuda_graphs_equal_uncached_tokens(
    arm: str, tokens: int, sampling: Sampling, make_network: Callable[..., Network]
) -> None:
    network = make_network(arm, dtype=torch.float64, context=600).cuda()
    network.reset_rotary()
    found = [each.tokens for each in continue_tokens(network, PROMPTS, tokens, sampling)]  # 400: two graphs
    assert found == [each.tokens for each in continue_tokens(network, PROMPTS, tokens, sampling, cache=False)]


@pytest.mark.parametrize("error", [RuntimeError("stream is capturing"), UsageError("the block failed")])
def test_steps_that_cannot_be_captured_run_without_graphs(
    error: Exception, make_network: Callable[..., Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts without a grouped GEMM read their loads on the host, which a CUDA graph cannot."""

    class Refusing(CudaGraphCache):
        def capture(self, key: object, function: object, *inputs: torch.Tensor) -> None:
            raise error

    class Capturing(decoding.Decoder):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.graphs, self.warm = Refusing(), self.cache.length

    network = make_network("loop-2")
    expected = continue_tokens(network, PROMPTS, 4, GREEDY)
    monkeypatch.setattr(decoding, "Decoder", Capturing)
    assert continue_tokens(network, PROMPTS, 4, GREEDY) == expected


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": math.nan}, {"seed": -1}],
)
def test_sampling_that_cannot_be_done_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"`{next(iter(wrong))}` = .* is not valid"):
        Sampling(**wrong)
