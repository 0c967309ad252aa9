"""Published scores of base models, to check a base before methods are compared with it.

A base far below its published score is broken (a wrong dtype, revision or tokenizer), and anything that repairs it
looks like a gain.

Both scores are of the same test set, so two correct evaluations of one checkpoint differ only where rounding changed an
answer. A published score p of N documents therefore bounds a score of the first n of them by

    rounding + 3 · sqrt(f / n + p(1 - p)(1/n - 1/N)),

with f the share of answers that may change, in either direction equally often; the second term is the error of a sample
drawn without replacement, 0 for n = N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.parts import TaskResult

_SIGMAS = 3.0  # a correct base is refused once in 370 times
_CHANGED = {"float32": 0.02, "float16": 0.02, "bfloat16": 0.05}
"""Assumed share of answers that the dtype and the kernels may change. All of LAMBADA may differ by 0.006 in fp32 and by
0.010 in bf16."""
_ROUNDING = 0.0005  # some scores are published to three digits
_SNAPSHOT = re.compile(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})")


@dataclass(frozen=True)
class KnownScore:
    """A published zero-shot accuracy (``value``) of a hub model, at any of its ``revisions``, on a whole test set."""

    model: str
    revisions: tuple[str, ...]
    task: str
    metric: str
    documents: int
    value: float
    source: str

    def tolerance(self, documents: int, dtype: str) -> float:
        """Return the largest difference of a correct evaluation on the first ``documents`` of the test set."""
        missing = max(0.0, 1 / documents - 1 / self.documents)
        variance = _CHANGED[dtype] / documents + self.value * (1 - self.value) * missing
        return _ROUNDING + _SIGMAS * math.sqrt(variance)


_LAST = ("step143000", "main")
_70M = partial(KnownScore, "EleutherAI/pythia-70m", (*_LAST, "a39f36b100fe8a5377810d56c3f4789b9c53ac42"))
_160M_EARLY = partial(KnownScore, "EleutherAI/pythia-160m", ("step123000",))
_160M = partial(KnownScore, "EleutherAI/pythia-160m", (*_LAST, "50f5173d932e8e61f858120bcb800b97af589f46"))
_410M = partial(KnownScore, "EleutherAI/pythia-410m", (*_LAST, "9879c9b5f8bea9051dcb0e68dff21493d67e9d4f"))
_1_4B = partial(KnownScore, "EleutherAI/pythia-1.4b-deduped", _LAST)
_GPT2 = partial(KnownScore, "openai-community/gpt2", ("main", "607a30d783dfa663caf39e06633721c8d4cfcd7e"))
_LAMBADA, _ARC_EASY = ("lambada_openai", "acc", 5153), ("arc_easy", "acc", 2376)
_HELLASWAG, _HELLASWAG_NORM = ("hellaswag", "acc", 10042), ("hellaswag", "acc_norm", 10042)
_PYTHIA = "EleutherAI/pythia, evals/pythia-v1/pythia-{0}/zero-shot/{0}_{1}.json"
_160M_SOURCE = "EleutherAI/pythia, issue 118, citing the evaluations of step143000"
_GPT2_LAMBADA = "EleutherAI/lm-evaluation-harness, issue 2159"
_GPT2_HELLASWAG = "karpathy/llm.c, dev/data/hellaswag.py, citing lm-eval"

KNOWN_SCORES = (
    _70M(*_LAMBADA, 0.18455, _PYTHIA.format("70m", "step143000")),
    _70M(*_ARC_EASY, 0.37374, _PYTHIA.format("70m", "step143000")),
    _160M_EARLY(*_LAMBADA, 0.33107, _PYTHIA.format("160m", "step123000")),
    _160M_EARLY(*_ARC_EASY, 0.43056, _PYTHIA.format("160m", "step123000")),
    _160M(*_LAMBADA, 0.328, _160M_SOURCE),
    _410M(*_LAMBADA, 0.51620, _PYTHIA.format("410m", "step143000")),
    _410M(*_ARC_EASY, 0.52104, _PYTHIA.format("410m", "step143000")),
    _1_4B(*_LAMBADA, 0.61867, _PYTHIA.format("1.4b-deduped", "step143000")),
    _GPT2(*_LAMBADA, 0.3256, _GPT2_LAMBADA),
    _GPT2(*_HELLASWAG, 0.2892, _GPT2_HELLASWAG),
    _GPT2(*_HELLASWAG_NORM, 0.3114, _GPT2_HELLASWAG),
)
_SHORT_NAMES = {"gpt2": "openai-community/gpt2"}


def check_known_scores(
    model: ModelSettings, results: Mapping[str, TaskResult], *, plain: bool = True
) -> tuple[list[str], list[str]]:
    """Compare a base's results with published scores.

    Args:
        model: the base: by its hub id, the folder of a hub snapshot, or a folder with the model's name.
        results: by task.
        plain: whether prompts are as published, with neither a chat template nor a system message.

    Returns:
        One sentence for each result that is outside the tolerance of a published score, and a sentence if there are
        tasks and none has a published score to compare with; held-out text is no task.
    """
    published = _published(model, results) if plain else []
    if not published and results.keys() - {HELD_OUT}:
        name = model.full_name + (f" (revision {model.revision})" if model.revision else "")
        return [], [f"hfpatch knows no published score of {name} on these tasks, so its scores could not be checked."]
    surprises = []
    for score in published:
        result = results[score.task]
        value, tolerance = result.metrics[score.metric], score.tolerance(result.n, model.dtype)
        if abs(value - score.value) > tolerance:
            surprises.append(
                f"{model.full_name} scores {value:.3f} on {score.task} ({score.metric}, {result.n} documents, "
                f"{model.dtype}), but {score.value:.3f} ± {tolerance:.3f} is known of {score.model} ({score.source}): "
                "check revision, dtype and tokenizer before comparing anything with it."
            )
    return surprises, []


def _published(base: ModelSettings, results: Mapping[str, TaskResult]) -> list[KnownScore]:
    """Return the published scores that these results can be compared with."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder, revision = Path(base.full_name), base.revision
    if snapshot := _SNAPSHOT.search(str(folder.absolute())):
        owner, name, revision = snapshot.groups()
        model, revisions = f"{owner}/{name}", {revision}
    else:
        model, revisions = _SHORT_NAMES.get(base.full_name, base.full_name), {revision or "main"}
        if folder.is_dir():
            name = re.split(r"--|__", folder.absolute().name.lower())[-1]
            models = {score.model for score in KNOWN_SCORES}
            model = next((full_name for full_name in models if full_name.lower().rpartition("/")[2] == name), model)
    if revision:  # the branches and tags of this commit according to the local hub cache
        references = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "refs"
        files = [path for path in references.rglob("*") if path.is_file()] if references.is_dir() else []
        revisions |= {path.relative_to(references).as_posix() for path in files if path.read_text().strip() == revision}
    return [
        score
        for score in KNOWN_SCORES
        if score.model.lower() == model.lower()
        and revisions & set(score.revisions)
        and score.task in results
        and not results[score.task].num_fewshot
        and score.metric in results[score.task].metrics
    ]
