"""Texts that a run generates while it trains, in samples.jsonl: one line per prompt and sampled step.

Samples do not change what a run computes: they have their own random numbers, and training time does not
include them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import torch

from steepen.data import Dataset
from steepen.data.tokenizer import Tokenizer
from steepen.distributed.sharded_optimizer import DistributedOptimizer, ShardedOptimizer
from steepen.errors import UsageError
from steepen.inference.decoding import Sampling, continue_text, prompt_tokens
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.runs.store import read_lines
from steepen.utils.files import UNENCODABLE, open_without_links, write_atomically

SAMPLE_TOKENS = 64
SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=0)


class SampleWriter:
    """Generates and writes samples; opened at step n, it first drops those of later steps.

    `path` is None on ranks that do not write.
    """

    def __init__(
        self,
        path: Path | None,
        step: int,
        dataset: Dataset,
        prompts: Sequence[str],
        print_message: Callable[[str], None],
    ) -> None:
        self.tokenizer: Tokenizer = dataset.tokenizer()
        self.prompts, self.print_message = tuple(prompts), print_message
        self.file: TextIO | None = None
        if path is not None:
            kept = [line for line in read_lines(path)[0] if line["step"] <= step]
            write_atomically(path, "".join(map(_line, kept)))
            self.file = open(  # noqa: SIM115
                path, "a", encoding="utf-8", errors=UNENCODABLE, opener=open_without_links
            )

    def sample(
        self, step: int, network: Network, passes: int, optimizer: Optimizer | DistributedOptimizer
    ) -> None:
        """Generate a text for every prompt after a step, and write them.

        With FSDP2 every rank computes them, as each forward gathers weights from all; otherwise call this on
        rank 0 only.
        """
        device = network.embedding.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),  # custom blocks may draw
            torch.compiler.set_stance("force_eager"),  # lengths change with every token
            optimizer.whole_weights() if isinstance(optimizer, ShardedOptimizer) else nullcontext(),
        ):
            texts = continue_text(
                network,
                self.tokenizer,
                self.prompts,
                min(SAMPLE_TOKENS, network.shape.context - 1),
                SAMPLING,
                passes=passes,
                cache=not optimizer.collective_forward,
                cuda_graphs=False,
            )
        if self.file is None:
            return
        for prompt, text in zip(self.prompts, texts, strict=True):
            self.file.write(_line({"step": step, "prompt": prompt, "text": text}))
        self.file.flush()
        os.fsync(self.file.fileno())
        shown = " ".join((self.prompts[0] + texts[0]).split())
        self.print_message(f"step {step:,}: {shown[:70]}{'…' if len(shown) > 70 else ''}")

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def check_prompts(prompts: Sequence[str], dataset: Dataset, context: int) -> None:
    """Raise UsageError for a prompt that fills the context."""
    for prompt, tokens in zip(prompts, prompt_tokens(dataset.tokenizer(), prompts), strict=True):
        if len(tokens) >= context:
            raise UsageError(
                f"`sample_prompt` = {prompt[:40]!r} has {len(tokens):,} tokens and leaves no room in the "
                f"context of {context:,}: shorten it."
            )


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
