"""Which documents are drawn, by the formula: what tests expect."""

import numpy as np


def drawn(places, count, *, use=0, seed=0, run=4):
    """Return which of ``places`` are held out (use 0), tuned on (1) or measured (2): one run in each stratum."""
    generator, chosen, low = np.random.default_rng([seed, use]), [], 0
    for first in range(0, count, run):
        size = min(run, count - first)
        high = len(places) * (first + size) // count
        start = low + int(generator.integers(high - low - size + 1))
        chosen, low = [*chosen, *list(places)[start : start + size]], high
    return chosen


def without(values, places):
    """Return the values that are not at these places."""
    return [value for index, value in enumerate(values) if index not in places]
