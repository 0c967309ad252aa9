"""The names of the low-noise metrics, which evaluations compute and reports show."""

BITS_PER_BYTE, GOLD_PROBABILITY, MARGIN = "bits_per_byte", "gold_probability", "margin"

LOW_NOISE = {BITS_PER_BYTE: False, GOLD_PROBABILITY: True, MARGIN: True}
"""Every low-noise metric, and whether a higher value is better; `hfpatch.evaluation.low_noise` defines them."""
