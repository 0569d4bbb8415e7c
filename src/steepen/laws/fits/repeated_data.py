"""The data-constrained law of Muennighoff et al. (2023): loss from parameters, tokens seen and unique
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.solver import Array


@dataclass(frozen=True)
class RepeatedLaw:
    """E + A/N'^α + B/D'^β, where repeats of data and parameters beyond what the unique data deserve count
    for less.

    Defaults are the published fit. Amplitudes are stored as natural logarithms, as published.
    """

    log_a: float = 6.255414
    log_b: float = 7.3049974
    log_e: float = 0.6254804
    alpha: float = 0.3526596
    beta: float = 0.3526596
    data_halving: float = 15.387756
    parameter_halving: float = 5.309743

    def deserved_parameters(self, unique_tokens: float | Array) -> Array:
        """The compute-optimal number of parameters for that many unique tokens."""
        ratio = math.log(self.alpha) + self.log_a - math.log(self.beta) - self.log_b
        g = math.exp(ratio / (self.alpha + self.beta))
        return (np.asarray(unique_tokens, float) * g) ** (self.beta / self.alpha) * g

    def effective_tokens(self, tokens: float | Array, unique_tokens: float | Array) -> Array:
        """D': unique tokens plus repeats that fade with R_D* repetitions."""
        u = np.asarray(unique_tokens, float)
        repeats = np.maximum(np.asarray(tokens, float) / u - 1.0, 0.0)
        return u + u * self.data_halving * (1.0 - np.exp(-repeats / self.data_halving))

    def effective_parameters(self, parameters: float | Array, unique_tokens: float | Array) -> Array:
        """N': deserved parameters plus an excess that fades with R_N*."""
        n = np.asarray(parameters, float)
        deserved = np.minimum(n, self.deserved_parameters(unique_tokens))
        excess = np.maximum(n / deserved - 1.0, 0.0)
        return deserved + deserved * self.parameter_halving * (1.0 - np.exp(-excess / self.parameter_halving))

    def loss(
        self, parameters: float | Array, tokens: float | Array, unique_tokens: float | Array | None = None
    ) -> Array:
        """The law's loss; without `unique_tokens` every token is fresh. Fresh tokens are at most the tokens
        seen.
        """
        tokens = np.asarray(tokens, float)
        unique = tokens if unique_tokens is None else np.minimum(np.asarray(unique_tokens, float), tokens)
        for name, value in (("parameters", parameters), ("tokens", tokens), ("unique_tokens", unique)):
            if not np.all(np.asarray(value, float) > 0):
                raise UsageError(f"{name} must be greater than zero.")
        n, d = self.effective_parameters(parameters, unique), self.effective_tokens(tokens, unique)
        return np.asarray(
            math.exp(self.log_e) + math.exp(self.log_a) / n**self.alpha + math.exp(self.log_b) / d**self.beta
        )
