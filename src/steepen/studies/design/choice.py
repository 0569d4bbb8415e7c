"""Choose the best of several settings measured in blocks (budgets, sizes), with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from steepen.laws.distributions import ROUNDING_ERROR, t_p_value

Option = TypeVar("Option", bound=Hashable)
Block = TypeVar("Block", bound=Hashable)
LEVEL = 0.05  # probability of any wrong rejection of a tie


@dataclass(frozen=True)
class Choice(Generic[Option]):
    """The option with the lowest mean loss, and those that the runs cannot tell from it.

    `behind` is each other option's loss above the best one's, `errors` the standard errors of these
    differences and `p_values` their p values, adjusted for the number of options; None without a degree of
    freedom.
    """

    best: Option
    ties: tuple[Option, ...]  # without the best itself
    behind: dict[Option, float]
    errors: dict[Option, float] | None
    p_values: dict[Option, float] | None
    degrees_of_freedom: int

    @property
    def decided(self) -> bool:
        """Whether one option is better than all others."""
        return not self.ties


def choose(losses: Mapping[tuple[Option, Block], float], resolution: float) -> Choice[Option]:
    """Compare options by their losses at (option, block), where every block adds a loss of its own.

    The scatter about option + block gives the error of a difference. An option ties with the best if its
    difference is not significant; without a degree of freedom, if it is below `resolution`, the difference
    that single runs are trusted to show.
    """
    finite = {key: loss for key, loss in losses.items() if math.isfinite(loss)}
    options = list(dict.fromkeys(option for option, _ in finite))
    blocks = list(dict.fromkeys(block for _, block in finite))
    design = np.zeros((len(finite), len(options) + len(blocks)))
    for row, (option, block) in enumerate(finite):
        design[row, options.index(option)] = 1.0
        design[row, len(options) + blocks.index(block)] = 1.0
    y = np.array(list(finite.values()))
    inverse = np.asarray(np.linalg.pinv(design.T @ design), np.float64)
    effect = inverse @ design.T @ y
    free = len(y) - int(np.linalg.matrix_rank(design))
    residual = y - design @ effect
    best = min(options, key=lambda option: float(effect[options.index(option)]))
    place = options.index(best)
    behind, errors, p_values = dict[Option, float](), dict[Option, float](), dict[Option, float]()
    variance = max(float(residual @ residual) / max(free, 1), (ROUNDING_ERROR * float(y.mean())) ** 2)
    for i, option in enumerate(options):
        if option == best:
            continue
        contrast = np.zeros(design.shape[1])
        contrast[i], contrast[place] = 1.0, -1.0
        behind[option] = float(contrast @ effect)
        errors[option] = math.sqrt(max(float(contrast @ inverse @ contrast) * variance, 1e-300))
        if free > 0:
            p = t_p_value(behind[option], errors[option], free)
            p_values[option] = min(1.0, p * (len(options) - 1))
    ties = tuple(
        option
        for option, difference in behind.items()
        if (p_values[option] >= LEVEL if free > 0 else difference < resolution)
    )
    return Choice(best, ties, behind, errors if free else None, p_values if free else None, free)
