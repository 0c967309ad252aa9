"""What the report says under its tables and figures; one text for Markdown and HTML."""

from hfpatch.reporting.figures import MOST_METHODS
from hfpatch.reporting.results import Results
from hfpatch.reporting.tables import FALLEN_MARK, HOLM_MARK

_FAMILIES = {"tasks": "the tasks of a method", "methods and tasks": "all methods and tasks of this table"}
_MAIN_TABLE = (
    "Each cell: the mean over seeds (the baseline with its standard error over documents), the paired difference to "
    "the baseline with its 95 % interval in the unit that the heading gives in brackets, and the verdict. "
    f"{HOLM_MARK} The difference stands at 5 % after Holm's correction over {{family}}. "
    "Within noise: the test cannot tell the two apart, which is not a proof that they are equal. Too few documents: "
    "nothing was tested. "
    f"{FALLEN_MARK} The test alone finds a difference, which does not stand after the correction."
)
DIFFERENCES = (
    "Paired differences to the baseline with 95 % intervals; to the right is better in every panel. The grey bar "
    "of a row spans the differences that its number of documents cannot show."
)
QUALITY = (
    "The mean over seeds against trainable parameters; bars are the standard deviation over seeds, the grey line is "
    "the baseline. A mark at a panel's edge lies outside it; its number is beside it."
)
TRAINING = (
    "The training loss, mean over seeds, as a running mean; and the same less that of one method. All "
    "methods see the same batches, so the noise of the batches cancels there. Where held-out text was measured on the "
    "way, its loss stands in a panel of its own."
)
_PAIRED = (
    "Every paired comparison: method less reference, in the told unit and in the metric's own. {families}Visible "
    "from: the true difference that had about four chances in five to be found with these documents and seeds, before "
    "correction; none where no difference would be."
)
LAYERS = (
    "Layer by layer, the mean over seeds. Norms are Frobenius norms of what training left in the saved patch; of "
    "several alike in a layer, such as heads, the mean is drawn."
)
SAMPLES = (
    "Gained: documents that most seeds of a method get right and the baseline wrong; lost: the other way round. Of a "
    "measure that is neither right nor wrong, the documents whose value changed most are listed. What is shown of a "
    "document is what the evaluation recorded."
)
FIGURES = {
    "differences": ("Differences to the baseline", DIFFERENCES),
    "quality": ("Quality against trainable parameters", QUALITY),
    "training": ("Training curves", TRAINING),
    "layers": ("Layer by layer", LAYERS),
}
SHORT = {"differences": "Differences", "quality": "Quality", "training": "Training", "layers": "Layers"}
"""What the figures are called where there is little room."""


def main_table(results: Results) -> str:
    """Return what stands under the main table; over what was corrected follows from the results."""
    return _MAIN_TABLE.format(family=_FAMILIES.get(results.correction, results.correction))


def paired(results: Results) -> str:
    """Return what stands under the table of all comparisons."""
    families = "Holm's correction goes over all comparisons with the baseline, and apart from them over all others. "
    return _PAIRED.format(families=families if results.correction == "methods and tasks" else "")


def no_warnings(results: Results) -> str:
    """Return what stands where a run has no warning: of a run that is not complete none was drawn up yet."""
    if results.complete:
        return "None."
    return "Not drawn up yet: whether parameters match, updates survive and the base is sound is told of complete runs."


def left_out(results: Results) -> str:
    """Return what a figure's caption adds where it does not show all methods."""
    others = sum(name != results.baseline for name in results.methods)
    if others <= MOST_METHODS:
        return ""
    return (
        f" Of {others} methods the {MOST_METHODS} are drawn whose differences to the baseline are the surest, "
        "whichever way they go; the tables and the data have all."
    )
