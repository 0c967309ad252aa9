"""The names of the low-noise metrics, which evaluations compute and reports show, and which metrics are shares."""

BITS_PER_BYTE, GOLD_PROBABILITY, MARGIN = "bits_per_byte", "gold_probability", "margin"

LOW_NOISE = {BITS_PER_BYTE: False, GOLD_PROBABILITY: True, MARGIN: True}
"""Every low-noise metric, and whether a higher value is better; `hfpatch.evaluation.low_noise` defines them."""

_SHARES = ("acc", "exact_match", "f1", "em", "mcc", GOLD_PROBABILITY)


def is_share(metric: str) -> bool:
    """Say whether a metric is a share, at most 1, whose differences are reported in points."""
    return metric.split(",")[0].split("_")[0] in _SHARES or metric in _SHARES
