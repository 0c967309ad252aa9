"""The results of an evaluation of a base and a patch, by hand."""

from hfpatch.results import Comparison, EvaluationResults, TaskResult
from hfpatch.results.evaluation import EvaluatedVariant
from hfpatch.results.identity import OF_TASK

HOSTILE = "<script>alert(1)</script>"
GROUPS = {"column": "passage", "groups": 300}


def score(acc, **more):
    metrics = {"acc": acc, "perplexity": 2_500_000.5}
    given = {"n": 1234, "primary": "acc", "higher_is_better": True, "num_fewshot": 2, "version": "1.0"}
    given |= dict.fromkeys(OF_TASK, "d" * 64)
    return TaskResult(task="cloze", metrics=metrics, stderr={"acc": 0.0123}, **given, **more)


def comparison(method, **more):
    given = {"reference": "base", "task": "cloze", "metric": "acc", "n": 1234, "seeds": 1, "test": "McNemar exact"}
    return Comparison(method=method, **{**given, **more})


def evaluation():
    """A base, a patch with grouped documents, and comparisons with and without an interval."""
    return EvaluationResults(
        model={"name": "small/llama", "revision": None, "sha256": "ab" * 32, "dtype": "float32", "model_type": "llama"},
        settings={"tasks": ["cloze"], "limit": 1234, "include_path": None},
        variants={
            "base": EvaluatedVariant(scores={"cloze": score(0.5, reused=8)}),
            "one": EvaluatedVariant(patch=f"{HOSTILE}/one", added=1200, scores={"cloze": score(0.25, clusters=GROUPS)}),
        },
        comparisons=[
            comparison("one", difference=-0.25, low=-0.3, high=-0.2, p=4e-5),
            comparison("two", difference=0.1, clusters=GROUPS, test="none (too few groups)"),
            comparison("one", difference=-0.5, low=-0.6, high=-0.4, p=0.002, metric="margin"),
        ],
        warnings=["The base is odd."],
        provenance={"commit": "c" * 40, "wall_s": 61.0},
    )  # fmt: skip
