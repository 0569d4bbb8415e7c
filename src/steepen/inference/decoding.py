"""Continue token sequences with a network in memory: choose each next token, and turn tokens into text.

The flow: `continue_text` encodes prompts and decodes what `continue_tokens` adds to them; each step is
computed with a KV cache (`Decoder`) where the blocks take one, else from the whole text, and a `Chooser`
picks its token.
"""

from __future__ import annotations

import codecs
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steepen.data.tokenizer import Tokenizer
from steepen.errors import UsageError
from steepen.execution.cuda_graphs import CudaGraphCache
from steepen.execution.gpu_decode import DecodeStep, has_decode_kernels
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
        # Stable: of equal ones the lowest id comes first, on every device.
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = ordered.cumsum(-1)
        # Keep a token if the tokens before it have less than top_p together.
        kept = torch.where(mass - ordered < self.sampling.top_p, mass, 0).amax(-1, keepdim=True)
        place = torch.searchsorted(mass, uniform.unsqueeze(1) * kept, right=True)
        # Only rounding leads beyond the last id.
        return ids.gather(-1, place.clamp(max=ids.shape[-1] - 1)).squeeze(-1)


OnToken = Callable[[int, int], None]  # (row, token id), called in order
SPAN_MULTIPLE = 256  # a new token attends to a multiple of this many cached keys
READ_EVERY = 8  # steps whose tokens are read from a GPU at once


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
    room = min(max_tokens, network.shape.context - max(map(len, prompts)))
    choose = Chooser(sampling, len(prompts), room, network.embedding.device, vocabulary)
    if cache and supports_cache(network):
        steps = _cached_steps(
            network, prompts, room, choose, passes, share_passes=share_passes, cuda_graphs=cuda_graphs
        )
    else:
        steps = _uncached_steps(network, prompts, room, choose, passes)
    device = network.embedding.device
    # Kernels and graphs are launched on the current GPU, which may be another than the network's.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
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
    decoder = Decoder(network, cache, choose, passes, first, time, count, cuda_graphs=cuda_graphs)
    yield from decoder.tokens_by_step()


class Decoder:
    """Computes the tokens after the first, one per row and step, from `first` (rows) on.

    On a GPU a step, the choice of the token included, is a CUDA graph whose inputs stay on the device; the
    host reads READ_EVERY tokens at a time, while the next ones are computed. `prompt` is the number of tokens
    of a row before `first`, padding included, and `count` that of all new ones.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        choose: Chooser,
        passes: int,
        first: Tensor,
        prompt: int,
        count: int,
        *,
        cuda_graphs: bool = True,
    ) -> None:
        self.network, self.cache, self.choose, self.passes = network, cache, choose, passes
        self.prompt, self.count = prompt, count
        self.tokens = first.clone()
        self.found = torch.empty(len(first), count, dtype=torch.long, device=first.device)
        self.found[:, 0] = first
        self.step = torch.ones(1, dtype=torch.long, device=first.device)
        self.graphs = CudaGraphCache() if first.is_cuda and cuda_graphs else None
        self.warm: int | None = None  # the span of which a step has run, after which it can be captured
        self.kernels: DecodeStep | None = None
        # Without graphs, where few tokens are wanted, the kernels cost more to compile than they save.
        if cuda_graphs and count > 1 and has_decode_kernels(network):
            self.kernels = DecodeStep(
                network, passes, [tuple(cache.storage[number]) for number in cache.slot_numbers], self.tokens,
                self.found, cache.index.repeat(len(first)), cache.padding, choose.uniforms, choose.sampling,
                prompt=prompt, vocabulary=choose.vocabulary,
            )  # fmt: skip

    def tokens_by_step(self) -> Iterator[list[int]]:
        """Token ids of all rows, step by step."""
        every = READ_EVERY if self.found.is_cuda else 1
        unread: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        for first in range(0, self.count, every):
            last = min(first + every, self.count)
            for step in range(max(first, 1), last):
                self._run(self.prompt + step)
            unread.append(self._read(first, last))
            if len(unread) == 2 or every == 1:
                yield from _rows_of(*unread.popleft())
        for part in unread:
            yield from _rows_of(*part)

    def _read(self, first: int, last: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to copy the tokens of some steps to the host; (steps, rows), and an event after it."""
        found = self.found[:, first:last].T.contiguous()
        if not found.is_cuda:
            return found, None
        copied = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return copied, event

    def _run(self, filled: int) -> None:
        """Compute the next tokens; `filled` is the number of tokens per row, padding included."""
        if self.kernels is None:
            # Attend to a multiple of some keys instead of all the cache has room for: one graph for each. The
            # kernels attend to as many as there are.
            self.cache.span = min(-(-filled // SPAN_MULTIPLE) * SPAN_MULTIPLE, self.cache.length)
        if self.graphs is None:
            self._compute()
            return
        key = self.cache.span
        graph = self.graphs.get(key)
        if graph is not None:
            graph.graph.replay()
        elif self.warm == key:
            try:
                self.graphs.capture(key, self._compute)
            except (RuntimeError, UsageError):  # some blocks read results on the host; a custom one says so
                self.graphs = None
            self._run(filled)
        else:  # the first step runs outside of a graph, on a stream of its own as capture requires
            self.warm = key
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(stream)

    def _compute(self) -> tuple[Tensor, ...]:
        """Replace `tokens` by those that follow, and return them; index and step count on."""
        if self.kernels is not None:
            self.kernels()
        else:
            self._reference_step()
        return (self.tokens,)

    def _reference_step(self) -> None:
        hidden = self.network.hidden_states(
            self.tokens.unsqueeze(1), self.passes, layout=self.cache.layout(1), cache=self.cache.slots
        )
        uniform = self.choose.uniforms.index_select(1, self.step).squeeze(1)
        self.tokens.copy_(self.choose(self.network.logits(hidden[:, -1]), uniform))
        self.found.index_copy_(1, self.step, self.tokens.unsqueeze(1))
        self.cache.advance(1)
        self.step += 1


def _rows_of(tokens: Tensor, event: torch.cuda.Event | None) -> list[list[int]]:
    if event is not None:
        event.synchronize()
    return tokens.tolist()
