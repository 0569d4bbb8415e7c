"""Score a causal language model of transformers: CORE, answer NLL, and validation text in bits per byte.

The model and its tokenizer are given the interface that the scorer of our own networks uses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steepen.data import Dataset
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.core.run_suite import evaluate_core
from steepen.evaluation.core.scorer import Row, Scorer, make_batches
from steepen.evaluation.score_options import ScoreOptions
from steepen.model.network import TokenLayout
from steepen.training.device import find_device
from steepen.utils.progress import stage_progress

MAX_CONTEXT = 2048  # of a prompt or window; longer contexts are not used, so that scores are comparable
PROBE_TOLERANCE = 1e-4  # relative to the largest logit


class Sizes(NamedTuple):
    """What the scorer asks about a network's shape."""

    context: int
    vocabulary: int


class HuggingFaceModel:
    """A causal model of transformers with the methods of `Network` that scoring uses."""

    passes = 1

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config = model.config
        longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.shape = Sizes(min(longest or MAX_CONTEXT, MAX_CONTEXT), int(config.vocab_size))
        self.separate_head = self._head_is_separate()

    def hidden_states(
        self, tokens: Tensor, passes: int | None = None, layout: TokenLayout | None = None
    ) -> Tensor:
        """Hidden states before the head; where the logits are more than the head's output, the logits.

        Rows are padded on the right, which causal attention does not see.
        """
        assert layout is None
        if self.separate_head:
            return self.model.base_model(tokens, use_cache=False).last_hidden_state
        return self.model(tokens, use_cache=False).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in fp32 or wider."""
        found = self.model.get_output_embeddings()(hidden) if self.separate_head else hidden
        return found.to(torch.promote_types(found.dtype, torch.float32))

    @torch.no_grad()
    def _head_is_separate(self) -> bool:
        """Whether the logits are the output embedding of the base model's last hidden states.

        Logits at a few answer tokens then need no logits of all other tokens. Some models scale or cap them.
        """
        head = self.model.get_output_embeddings()
        if head is None or self.model.base_model is self.model:
            return False
        tokens = torch.arange(8, device=self.embedding.device).remainder(self.shape.vocabulary)[None]
        expected = self.model(tokens, use_cache=False).logits.float()
        hidden = self.model.base_model(tokens, use_cache=False).last_hidden_state
        if hidden.dtype != self.embedding.dtype:  # as of exports with weights in bf16 and a stream in fp32
            return False
        found = head(hidden).float()
        return bool((found - expected).abs().max() <= PROBE_TOLERANCE * expected.abs().max())


class HuggingFaceTokenizer:
    """A tokenizer of transformers with the methods of `Tokenizer` that scoring uses."""

    pattern = ""  # unknown: prompts are encoded whole

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        start = tokenizer.bos_token_id
        start = tokenizer.eos_token_id if start is None else start
        if start is None:
            raise SteepenError(f"the tokenizer of {name} has neither a begin nor an end token for a text.")
        self.end_of_text = int(start)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        # Not verbose: texts longer than the context are cut into windows.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """`encode` as an array."""
        return np.array(self.encode(text), dtype=np.uint32)

    @cached_property
    def identity(self) -> str:
        """Hex SHA-256 of the vocabulary."""
        words = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(words).encode()).hexdigest()


def load_hugging_face(
    name: str, *, device: str = "auto", precision: str = "auto", trust_remote_code: bool = False
) -> tuple[HuggingFaceModel, HuggingFaceTokenizer]:
    """Load a model and its tokenizer: a folder, or a name on the Hugging Face Hub."""
    try:
        from transformers import (  # pyright: ignore[reportMissingImports]
            AutoModelForCausalLM,
            AutoTokenizer,
            logging,
        )
    except ImportError as error:
        raise SteepenError("`hf` needs transformers: pip install 'steepen[hf]'.") from error
    place = find_device(device)
    bf16 = precision == "bf16" or (precision == "auto" and place.type == "cuda")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UsageError(f"the folder {name} has no config.json: it is not a model of transformers.")
    logging.set_verbosity_error()  # its warnings say what the errors below say
    logging.disable_progress_bar()
    loaded: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        loaded = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.bfloat16 if bf16 else torch.float32,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # files of any kind, and with trust_remote_code any code
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "trust_remote_code" in str(error) and not trust_remote_code:
            reason = "it comes with its own modeling code; add `trust_remote_code` to run that code."
        raise SteepenError(f"the model {name} cannot be loaded: {reason}") from error
    model, found = loaded
    for weight in sorted(found["missing_keys"]):  # transformers makes them at random
        raise SteepenError(f"the model {name} cannot be loaded: its files lack {weight}.")
    return HuggingFaceModel(model.to(place)), HuggingFaceTokenizer(tokenizer, name)


def evaluate_hugging_face(
    name: str,
    data: str | Path | Dataset | None,
    options: ScoreOptions,
    *,
    device: str = "auto",
    precision: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Score a model of transformers on the validation text of prepared data, and on CORE if requested."""
    if options.kl_depth or options.passes:
        raise UsageError("`hf` measures validation text and CORE: leave out `kl_depth` and `passes`.")
    if data is None and options.core is None:
        raise UsageError("`hf` needs `data` (validation text), `core` (a CORE bundle), or both.")
    dataset = Dataset.open(data) if isinstance(data, str | Path) else data
    model, tokenizer = load_hugging_face(
        name, device=device, precision=precision, trust_remote_code=trust_remote_code
    )
    scores: dict[str, Any] = {
        "model": name,
        "precision": "bf16" if model.embedding.dtype == torch.bfloat16 else "fp32",
        "context": model.shape.context,
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
    }
    with stage_progress(quiet) as progress:
        if dataset is not None:
            scores["validation"] = score_text(
                model,
                tokenizer,
                validation_texts(dataset, options.validation_tokens),
                partial(progress, "validation"),
            )
        if options.bundle is not None:
            core = evaluate_core(
                model,
                tokenizer,
                options.bundle,
                options.core_options,
                progress=progress,
            ).to_dict()
            scores["core"] = core | {"bundle": options.bundle.identity, "examples": options.core_examples}
    return scores


def validation_texts(dataset: Dataset, tokens: int | None = None) -> list[str]:
    """The documents of the validation split, up to about `tokens` of the data's own tokens."""
    tokenizer, stream = dataset.tokenizer(), dataset.tokens("val")
    count = min(len(stream), tokens or 1_048_576)
    ids = stream.read(0, count)
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    parts = np.split(ids, ends)
    texts = [tokenizer.decode(part[part != tokenizer.end_of_text]) for part in parts]
    return [text for text in texts if text]


def score_text(
    model: HuggingFaceModel,
    tokenizer: HuggingFaceTokenizer,
    texts: list[str],
    progress: Callable[[float, float], None] | None = None,
) -> dict[str, Any]:
    """Loss in nats per token and bits per byte of texts, each after the tokenizer's begin token.

    All texts are one sequence, cut into windows that share one token, so that every token is predicted once.
    """
    ids = np.concatenate(
        [np.array([tokenizer.end_of_text, *tokenizer.encode(text)], np.int32) for text in texts]
    )
    length = model.shape.context
    rows = list(_windows(ids, length, tokenizer.end_of_text))
    scorer = Scorer(model)

    def report(done: int) -> None:
        if progress:
            progress(done, len(ids))

    budget = 16_384 if scorer.device.type == "cuda" else max(length, 2048)
    found = scorer.score(make_batches(rows, budget, 1), 2, report)
    total_bytes = sum(len(text.encode()) for text in texts)
    predicted = int(found.tokens.sum())
    return {
        "loss": float(found.loss.sum()) / predicted,
        "bits_per_byte": float(found.loss[0]) / (math.log(2) * total_bytes),
        "tokens": predicted,
        "bytes": total_bytes,
    }


def _windows(ids: npt.NDArray[np.int32], length: int, end_of_text: int) -> Iterator[Row]:
    """Windows of text (span 0) and of the tokens between texts (span 1), which are no text."""
    for first in range(0, len(ids) - 1, length):
        window = ids[first : first + length + 1]
        positions = np.arange(len(window) - 1, dtype=np.int32)
        yield Row(window[:-1], positions, window[1:], (window[1:] == end_of_text).astype(np.int32))
