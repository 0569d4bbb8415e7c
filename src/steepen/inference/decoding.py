"""Continue token sequences with a network in memory: choose each next token, and turn tokens into text.

The flow: `continue_text` encodes prompts and decodes what `continue_tokens` adds to them; each step is
computed with a KV cache (`Decoder`) where the blocks take one, else from the whole text, and a `Chooser`
picks its token.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steepen.data.tokenizer import Tokenizer
from steepen.errors import UsageError
from steepen.execution.cuda_graphs import CudaGraphCache
from steepen.inference.kv_cache import KVCache, supports_cache
from steepen.model.init import name_seed
from steepen.model.network import Network


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy decoding."""

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        # `generate` has checked these already; `continue_tokens` is also called by itself (docs/export.md).
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"`temperature` = {self.temperature} is not valid: give 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"`top_p` = {self.top_p} is not valid: give a probability in (0, 1].")
        if self.seed < 0:
            raise UsageError(f"`seed` = {self.seed} is not valid: give a whole number from 0.")

    @property
    def greedy(self) -> bool:
        """Whether the token with the highest logit is always chosen."""
        return self.temperature == 0


class Chooser:
    """Chooses the tokens of a batch. The random numbers of all steps are drawn beforehand.

    `uniforms` are numbers in [0, 1), fp32 (rows, tokens), one for each draw. Each row has its own generator,
    so a text does not depend on the other texts of its batch.
    """

    def __init__(
        self, sampling: Sampling, rows: int, tokens: int, device: torch.device, vocabulary: int | None = None
    ) -> None:
        self.sampling, self.vocabulary = sampling, vocabulary
        drawn = torch.zeros(rows, tokens)
        if not sampling.greedy:
            for row in range(rows):
                generator = torch.Generator().manual_seed(name_seed(sampling.seed, f"generate/{row}"))
                drawn[row] = torch.rand(tokens, generator=generator)
        self.uniforms = drawn.to(device)

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Token ids (rows) from logits (rows, vocabulary) and one random number per row."""
        logits = logits[:, : self.vocabulary]
        if self.sampling.greedy:
            return logits.argmax(-1)
        probabilities = (logits.float() / self.sampling.temperature).softmax(-1)
        ordered, ids = probabilities.sort(-1, descending=True)
        mass = ordered.cumsum(-1)
        # Keep a token if the tokens before it have less than top_p together.
        kept = torch.where(mass - ordered < self.sampling.top_p, mass, 0).amax(-1, keepdim=True)
        place = torch.searchsorted(mass, uniform.unsqueeze(1) * kept, right=True)
        # Only rounding leads beyond the last id.
        return ids.gather(-1, place.clamp(max=ids.shape[-1] - 1)).squeeze(-1)


OnToken = Callable[[int, int], None]  # (row, token id), called in order
SPAN_MULTIPLE = 256  # a new token attends to a multiple of this many cached keys


@dataclass(frozen=True)
class Continuation:
    """The tokens that continue one prompt."""

    tokens: list[int]
    stopped_by: str  # end of text, max tokens or context


def continue_text(
    network: Network,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    passes: int | None = None,
    cache: bool = True,
    cuda_graphs: bool = True,
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Continue prompts in one batch; returns the new text of each, without the prompt.

    `on_text(row, text)` receives pieces of text while they are generated.
    """
    rows = prompt_tokens(tokenizer, prompts)
    # Bytes of an unfinished UTF-8 character wait for the rest.
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in rows]
    texts, end = [""] * len(rows), tokenizer.end_of_text

    def add(row: int, token: int | None) -> None:
        own = b"" if token is None or token == end else tokenizer.decode_bytes([token])
        text = decoders[row].decode(own, final=token is None)
        texts[row] += text
        if text and on_text is not None:
            on_text(row, text)

    continue_tokens(
        network, rows, max_tokens, sampling, passes=passes, end=end, vocabulary=tokenizer.size,
        cache=cache, cuda_graphs=cuda_graphs, on_token=add,
    )  # fmt: skip
    for row in range(len(rows)):
        add(row, None)
    return texts


def prompt_tokens(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of each prompt, as the beginning of a document."""
    return [[tokenizer.end_of_text, *tokenizer.encode(text)] for text in prompts]


@torch.no_grad()
def continue_tokens(
    network: Network,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    passes: int | None = None,
    end: int | None = None,
    vocabulary: int | None = None,
    cache: bool = True,
    share_passes: bool = False,
    cuda_graphs: bool = True,
    on_token: OnToken | None = None,
) -> list[Continuation]:
    """Continue token sequences by up to `max_tokens` each, as far as the context goes.

    Prompts of different lengths are one batch, padded on the left. A sequence ends with the token `end`; only
    the first `vocabulary` ids are chosen (default: all that have a logit). Without `cache` the whole text is
    computed for every new token, as for custom blocks that take none. Without `cuda_graphs` a GPU runs every
    step kernel by kernel, which saves the capture where few tokens are generated.
    """
    sampling = sampling or Sampling()
    passes = network.passes if passes is None else passes
    check_request(network, prompts, max_tokens, passes)
    if not prompts:
        return []
    found: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    choose = Chooser(sampling, len(prompts), max_tokens, network.embedding.device, vocabulary)
    room = min(max_tokens, network.shape.context - max(map(len, prompts)))
    if cache and supports_cache(network):
        steps = _cached_steps(
            network, prompts, room, choose, passes, share_passes=share_passes, cuda_graphs=cuda_graphs
        )
    else:
        steps = _uncached_steps(network, prompts, room, choose, passes)
    for tokens in steps:
        for row, token in enumerate(tokens):
            if not ended[row]:
                found[row].append(token)
                ended[row] = token == end
                if on_token is not None:
                    on_token(row, token)
        if all(ended):
            break
    limit = "max tokens" if room == max_tokens else "context"
    return [
        Continuation(tokens, "end of text" if done else limit)
        for tokens, done in zip(found, ended, strict=True)
    ]


def check_request(network: Network, prompts: Sequence[Sequence[int]], max_tokens: int, passes: int) -> None:
    """Raise for a request that the network cannot serve."""
    if max_tokens < 1:
        raise UsageError(f"`max_tokens` = {max_tokens} is not valid: give at least 1.")
    check_passes(network, passes)
    for prompt in prompts:
        if not prompt:
            raise UsageError("a prompt has no tokens: give at least one.")
        if len(prompt) >= network.shape.context:
            raise UsageError(
                f"a prompt of {len(prompt):,} tokens leaves no room in the network's context of "
                f"{network.shape.context:,}: shorten it."
            )


def check_passes(network: Network, passes: int) -> None:
    """Raise for a number of core passes that the network cannot run."""
    if passes < 1:
        raise UsageError(f"`passes` = {passes} is not valid: the core is applied at least once.")
    stored = len(network.cores)
    if network.shape.allocation.core == 0 and passes != 1:
        raise UsageError(f"`passes` = {passes} is not valid: {network.arm.name} has no core to repeat.")
    if not network.arm.tied and passes > stored:
        raise UsageError(f"`passes` = {passes} is not valid: this untied network has {stored} cores.")


def _uncached_steps(
    network: Network, prompts: Sequence[Sequence[int]], count: int, choose: Chooser, passes: int
) -> Iterator[list[int]]:
    """The next token of every row, `count` times; each row is computed by itself, from its start."""
    device = network.embedding.device
    rows = [list(prompt) for prompt in prompts]
    for step in range(count):
        chosen: list[int] = []
        for row, tokens in enumerate(rows):
            # The network's own forward, whose hooks gather the weights under FSDP2.
            logits = network(torch.tensor([tokens], device=device), passes=passes)
            chosen.append(int(choose(logits[:, -1], choose.uniforms[row : row + 1, step])))
            tokens.append(chosen[-1])
        yield chosen


def _cached_steps(
    network: Network,
    prompts: Sequence[Sequence[int]],
    count: int,
    choose: Chooser,
    passes: int,
    *,
    share_passes: bool,
    cuda_graphs: bool,
) -> Iterator[list[int]]:
    """The next token of every row, `count` times, with cached keys and values."""
    device = network.embedding.device
    time = max(map(len, prompts))
    padding = [time - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * (time - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    length = min(-(-(time + count) // SPAN_MULTIPLE) * SPAN_MULTIPLE, network.shape.context)
    cache = KVCache(network, passes, padding, length, share_passes=share_passes)
    hidden = network.hidden_states(tokens, passes, layout=cache.layout(time), cache=cache.slots)
    cache.advance(time)
    first = choose(network.logits(hidden[:, -1]), choose.uniforms[:, 0])
    yield first.tolist()
    decoder = Decoder(network, cache, choose, passes, first, cuda_graphs=cuda_graphs)
    for step in range(1, count):
        yield decoder.next_tokens(time + step).tolist()


class Decoder:
    """Computes one new token per row and call. On a GPU the whole step, sampling included, is a CUDA graph.

    All inputs stay on the device: the tokens, their index in the cache, the random numbers and the step.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        choose: Chooser,
        passes: int,
        tokens: Tensor,
        *,
        cuda_graphs: bool = True,
    ) -> None:
        self.network, self.cache, self.choose, self.passes = network, cache, choose, passes
        self.tokens = tokens.clone()
        self.step = torch.ones(1, dtype=torch.long, device=tokens.device)
        self.graphs = CudaGraphCache() if tokens.is_cuda and cuda_graphs else None

    def next_tokens(self, filled: int) -> Tensor:
        """Token ids (rows) that follow; `filled` is the number of tokens per row, padding included."""
        # Attend to a multiple of some keys instead of all the cache has room for: one graph for each.
        self.cache.span = min(-(-filled // SPAN_MULTIPLE) * SPAN_MULTIPLE, self.cache.length)
        if self.graphs is None:
            self._decode()
            return self.tokens
        graph = self.graphs.get(self.cache.span)
        if graph is None:
            self._warm_up()
            self.graphs.capture(self.cache.span, self._decode)
            graph = self.graphs.get(self.cache.span)
        assert graph is not None
        graph.graph.replay()
        return self.tokens

    def _decode(self) -> tuple[Tensor, ...]:
        """Compute the next tokens from `tokens` and replace these; index and step count on."""
        hidden = self.network.hidden_states(
            self.tokens.unsqueeze(1), self.passes, layout=self.cache.layout(1), cache=self.cache.slots
        )
        uniform = self.choose.uniforms.index_select(1, self.step).squeeze(1)
        self.tokens.copy_(self.choose(self.network.logits(hidden[:, -1]), uniform))
        self.cache.advance(1)
        self.step += 1
        return (self.tokens,)

    def _warm_up(self) -> None:
        """Run a step outside a graph, on a stream of its own as capture requires, and undo its counting."""
        state = self.tokens.clone(), self.cache.index.clone(), self.step.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip((self.tokens, self.cache.index, self.step), state, strict=True):
            tensor.copy_(before)
