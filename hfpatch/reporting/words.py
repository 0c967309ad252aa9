"""Words and marks that the reports of comparisons and of studies share."""

HOLM_MARK = "*"
"""Behind a verdict: the difference is significant after Holm's correction."""
FALLEN_MARK = "†"
"""Behind "within noise": the test alone finds a difference, which is not significant after the correction."""
MOST_METHODS = 24
"""How many methods a figure shows at most, beside the baseline."""
