"""`evaluate_models`: several whole models on the same documents, compared pairwise; one is in memory at a time."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hfpatch.data.tokenizer import hash_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import HfpatchLM
from hfpatch.evaluation import evaluate as run_tasks
from hfpatch.evaluation.cache import computed_with
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.paper_tasks import counts_tokens
from hfpatch.evaluation.prompting import template_arguments
from hfpatch.evaluation.selection import Selection, select
from hfpatch.nn.matmul import choose_library
from hfpatch.recipes.comparison import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.schema import EvaluatedVariant, EvaluationResults
from hfpatch.runs.identity import describe_base
from hfpatch.runs.placing import load_placed, ranks_of
from hfpatch.runs.progress import Progress
from hfpatch.runs.scoring import (
    ANSWERS,
    RESERVED,
    begin_output,
    check_base,
    check_output,
    close_output,
    differences,
    identify_settings,
    log_of,
    short_names,
)
from hfpatch.sites import count_values
from hfpatch.support.files import hash_values
from hfpatch.support.provenance import Clock, provenance
from hfpatch.support.ranks import Ranks
from hfpatch.surgery.bases import Base
from hfpatch.surgery.placement import Placement


def evaluate_models(
    models: Sequence[ModelSettings],
    *,
    settings: EvaluationSettings,
    data_dir: Path | None = None,
    output: Path | None = None,
    log_samples: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> EvaluationResults:
    """Evaluate whole models, each with its own tokenizer, and compare every one with all before it.

    Each model is loaded twice: before anything is scored, so that one that cannot be loaded shows then, and to be
    scored. Only one is in memory at a time.

    Args:
        models: two or more, of which no two are the same.
        settings: the tasks.
        data_dir: a folder that holds local copies of hub data sets.
        output: as in `hfpatch.runs.evaluate`.
        log_samples: likewise.
        cache_dir: likewise.
        progress: called at every task; None shows nothing.
        placement: where the weights go; None takes one device for each process.

    Raises:
        HfpatchError: if a model is named twice, two are the same, a model, a task or its data cannot be loaded,
            ``output`` has another evaluation, a model's scores are not the published ones, or a metric allows no
            comparison.
    """
    named = _label(models)
    identity: dict[str, Any] = identify_settings(settings)
    identity["models"] = {label: model.identity for label, model in named.items()}
    placement = placement or Placement()
    ranks = ranks_of(placement)
    ranks.on_first(partial(check_output, output, identity))
    clock, listener, memory = Clock(), progress or Progress(), _Memory(placement, ranks)
    chosen = select(settings, data_dir)  # mistakes show before any model
    tasks = chosen.tasks
    described = {label: _describe(memory.load(model), model, settings) for label, model in reversed(named.items())}
    described = ranks.same({label: described[label] for label in named})
    _check_different(described)
    if output is not None:
        for label, values in described.items():
            identity["models"][label]["sha256"] = values["sha256"]
        ranks.on_first(partial(begin_output, output, identity))
    variants: dict[str, EvaluatedVariant] = {}
    warnings = [*_across_tokenizers(described, tasks), *_across_lengths(described, tasks)]
    given: dict[str, Any] = {"settings": settings, "selection": chosen, "ranks": ranks}
    given |= {"answers_dir": cache_dir if output is None else output / ANSWERS, "answers_optional": output is None}
    with ExitStack() as stack:
        records = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for label, model in named.items():
            name = f"{model.full_name}@{model.revision}" if model.revision else None
            log = log_of(output, model, name=name) if log_samples and output is not None else None
            variant = _score(memory.load(model), label, listener, records_dir=records / label, log=log, **given)
            variants[label] = variant.model_copy(update={"model": described[label]})
            listener.finished(label, "")
            scores, compared = variant.scores, "the other models"
            check = partial(check_base, model, settings, scores, records / label, tasks, compared=compared)
            warnings += ranks.on_first(check)
        labels = list(variants)
        earlier = {label: labels[:place] for place, label in enumerate(labels) if place}
        cut = _cut_by_tokens(described, tasks)
        compare = partial(differences, records, variants, tasks, earlier, "", without_low_noise=cut)
        compared_by = ranks.on_first(compare)  # "" above: all pairs alike
    found = EvaluationResults(
        model=next(iter(described.values())),
        settings=settings.model_dump(mode="json"),
        variants=variants,
        **compared_by,
        warnings=warnings,
        provenance=provenance(clock),
    )
    return ranks.on_first(partial(close_output, output, found))


class _Memory:
    """Holds the model that was loaded last, and no other; callers keep none of them."""

    def __init__(self, placement: Placement, ranks: Ranks) -> None:
        self._placement, self._ranks = placement, ranks
        self._settings: ModelSettings | None = None
        self._base: Base | None = None

    def load(self, settings: ModelSettings) -> Base:
        """Return a model, on the device where it is scored."""
        if self._base is None or self._settings != settings:
            self._base = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._base = load_placed(settings, self._placement, self._ranks)
            self._settings = settings
        return self._base


def _label(models: Sequence[ModelSettings]) -> dict[str, ModelSettings]:
    """Return the models by the name that the results give them: the last parts of the id or folder, and the revision.

    Raises:
        HfpatchError: if one is named twice.
    """
    parts = []
    for model in models:
        path = Path(model.full_name)
        *place, last = path.absolute().parts[1:] if path.exists() else model.full_name.split("/")
        ending = f"@{model.revision.replace('/', '-')}" if model.revision else ""
        parts.append((*place, f"{last}{ending}"))
        if parts[-1] in parts[:-1]:
            raise HfpatchError(f"--model {model.name}: named twice; a model is compared with others")
    names = (f"{name} (model)" if name in RESERVED else name for name in short_names(parts))
    return dict(zip(names, models, strict=True))


def _describe(base: Base, model: ModelSettings, settings: EvaluationSettings) -> dict[str, Any]:
    """Return what results and checks say of a model, after checking that it can be scored."""
    chat = bool(settings.apply_chat_template)  # else its template writes no prompt
    try:
        with quiet():
            template_arguments(base.tokenizer, settings.apply_chat_template)
            scorer = HfpatchLM(base.model, tokenizer=base.tokenizer, max_length=settings.max_length)
    except HfpatchError as error:
        raise HfpatchError(f"--model {model.name}: {error}") from error
    return {
        **(known := describe_base(base, model)),
        "parameters": sum(map(count_values, base.model.parameters())),
        "max_length": scorer.max_length,
        "tokenizer_sha256": (tokenizer := hash_tokenizer(base.tokenizer)),
        "identity_sha256": hash_values(
            [base.sha256, {**known["identity"], **({} if chat else {"tokenizer": tokenizer})}]
        ),
        "matmul": choose_library(base.model),
        "computed_with": computed_with(base.model),
    }


def _check_different(described: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse two names of one model: of weights, configuration, code and tokenizer, with the chat template if used."""
    first: dict[str, str] = {}
    for label, values in described.items():
        other = first.setdefault(values["identity_sha256"], label)
        if other != label:
            raise HfpatchError(
                f"--model {values['name']}: {label} is the same model as {other} (weights, configuration, code "
                "and tokenizer); leave one of them out"
            )


def _cut_by_tokens(described: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, Any]) -> list[str]:
    """Return the tasks that count or cut by tokens, where the models' tokenizers differ."""
    if len({values["tokenizer_sha256"] for values in described.values()}) == 1:
        return []
    return [name for name, task in tasks.items() if counts_tokens(task)]


def _across_tokenizers(described: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, Any]) -> Iterator[str]:
    if per_token := _cut_by_tokens(described, tasks):
        yield (
            f"{', '.join(per_token)}: scored per token, and the models have different tokenizers, so these scores do "
            "not compare; accuracies, bits per byte and perplexities per word or byte do."
        )


def _across_lengths(described: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, Any]) -> Iterator[str]:
    rolling = [name for name, task in tasks.items() if task.OUTPUT_TYPE == "loglikelihood_rolling"]
    lengths = {label: values["max_length"] for label, values in described.items()}
    if rolling and len(set(lengths.values())) > 1:
        shown = ", ".join(f"{label} {length:,}" for label, length in lengths.items())
        yield (
            f"{', '.join(rolling)}: the models read windows of different lengths (tokens: {shown}), and a longer one "
            f"gives a lower perplexity; --max-length {min(lengths.values())} gives all the same."
        )


def _score(base: Base, label: str, listener: Progress, *, selection: Selection, **given: Any) -> EvaluatedVariant:
    """Run the tasks as ``given`` says."""
    scores = run_tasks(
        base.model,
        base.tokenizer,
        base_sha256=base.sha256,
        selection=selection,
        on_task=partial(listener.evaluating, label),
        on_scored=partial(listener.scored, label),
        **given,
    )
    return EvaluatedVariant(scores=scores, groups=selection.group_results(scores) or None)
