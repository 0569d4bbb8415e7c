"""One rung off the law of the others: a test by leaving it out.

A bad run at an end of a ladder bends the fitted law towards itself, so its residual is small and Huber
weights do not find it. Leaving the rung out does: the sum of squares falls by more than noise explains.
"""

from __future__ import annotations

import numpy as np

from steepen.laws.distributions import ROUNDING_ERROR, f_p_value
from steepen.laws.fits.solver import Array
from steepen.laws.hypotheses.nested_models import DecisionRule, NestedFits, hypothesis_p_value

OUTLIER_LEVEL = 0.01  # of the test, Bonferroni-corrected over the points of both ladders
MIN_SPARE = 4  # degrees of freedom of the free model without the rung
MIN_RUNGS_LEFT = 5
MIN_DEVIATION = 1e-4  # of the loss: smaller ones are left in


def outlier_p_value(fits: NestedFits, without: NestedFits, rule: DecisionRule) -> Array:
    """p-value of the largest residual being noise, where `without` leaves out one point of each data set.

    The F-test of a law with a separate value for the point: the exponent hypothesis where it is tenable
    without the point, else the free model. It is multiplied by the number of points (Bonferroni). `fits` may
    be of one data set, and `without` of each of its points.
    """
    points = len(fits.pair.x)
    one_e = hypothesis_p_value(without, "exponent", "free", rule) >= rule.level
    p: list[Array] = []
    for hypothesis in ("exponent", "free"):
        freedom = without.degrees_of_freedom(hypothesis)
        rounding = (ROUNDING_ERROR * (1.0 if rule.log else without.scale)) ** 2 * np.maximum(freedom, 1.0)
        rest = np.maximum(without.rss(hypothesis), rounding)
        statistic = (fits.rss(hypothesis) - rest) / rest * np.maximum(freedom, 1e-9)
        p.append(f_p_value(statistic, 1.0, np.maximum(freedom, 1.0)))
    enough = without.degrees_of_freedom("free") >= MIN_SPARE
    return np.where(enough, np.minimum(1.0, points * np.where(one_e, *p)), 1.0)
