"""Choose the next token: greedy, or sampled with a temperature from the smallest set of mass top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steepen.errors import UsageError
from steepen.model.init import name_seed


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy decoding."""

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
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
