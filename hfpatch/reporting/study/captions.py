"""What a study's report says under its tables and figures; one text for Markdown and HTML."""

from hfpatch.reporting.figures import MOST_METHODS
from hfpatch.reporting.tables import FALLEN_MARK, HOLM_MARK

MAIN = (
    "Parameters: non-embedding, and how many more than the baseline has. Validation loss: nats per token on the fixed "
    "evaluation blocks after the last step, mean ± standard deviation over seeds. Improvement: (L of the baseline − L) "
    "/ L of the baseline, paired by seed, in per cent, with its 95 % interval by Student's t over seeds; above zero is "
    f"better. {HOLM_MARK} The difference stands at 5 % after Holm's correction over all that was tested. Within "
    "noise: the seeds cannot tell the two apart, which is not a proof that they are equal. "
    f"{FALLEN_MARK} The test alone finds a difference, which does not stand after the correction. s/step: the "
    "median seconds of an optimiser step, and how many times the baseline's."
)
SWEEP = (
    "Every point of every variant; the best of each is the one of lowest mean loss. Improvements are against the "
    "baseline's best point. Points are chosen on the same evaluation text that the losses are told on, so the best of "
    "many is favoured."
)
NO_SWEEP = "One point a variant: nothing was swept."
VARIANTS = "Of architectures what differs; what all have in common stands under Protocol and provenance."
LAST = (
    "The mean over tokens and seeds at the last step that was measured: ‖f(x)‖/‖A(x)‖ and the cosine of f(x) and A(x), "
    "A the anchor (x itself where the anchor is the identity)."
)
DIFFERENCES = (
    "Improvement over the baseline at the end with 95 % intervals over seeds; to the right is better. The small marks "
    "are the single seeds. Colours tell the verdict after Holm's correction, which the intervals do not hold. To the "
    "right of the panel: how many more non-embedding parameters than the baseline."
)
LOSS = (
    "Validation loss by step, each variant at its best point: the line is the mean over seeds, the band reaches from "
    "the smallest to the largest seed. Right: the second half, larger. A cross marks the last measurement of a seed "
    "that diverged, where the line of its variant ends too. A line far above all others leaves the right panel."
)
IMPROVEMENT = (
    "Relative improvement over the baseline at the same step, each variant at its best point; the band is the 95 % "
    "interval over seeds, and above zero is better. What leaves a panel is cut."
)
DIAGNOSTICS = (
    "What f does on the evaluation text, a line a layer, from the first (light) to the last (dark), the mean over "
    "seeds: ‖f(x)‖/‖A(x)‖, and the cosine of f(x) and A(x); A is the anchor, x itself where it is the identity."
)
SPREAD = (
    "The standard deviation of the validation loss over seeds, each variant at its best point. Seeds that diverged are "
    "left out."
)
FIGURES = {
    "differences": ("Improvement at the end", DIFFERENCES),
    "loss": ("Validation loss", LOSS),
    "improvement": ("Improvement by step", IMPROVEMENT),
    "diagnostics": ("Size and direction of f", DIAGNOSTICS),
    "spread": ("Spread over seeds", SPREAD),
}


def left_out(others: int) -> str:
    """Return what a figure's caption adds where it does not show all variants."""
    if others <= MOST_METHODS:
        return ""
    return f" Of {others} variants the first {MOST_METHODS} are drawn; the tables and the data have all."
