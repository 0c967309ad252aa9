"""`evaluate`: score models on lm-eval tasks and compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hfpatch import evaluation  # its comparisons, which import scipy, are loaded where variants are compared
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import check_known_scores
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.run import evaluate as run_tasks
from hfpatch.evaluation.selection import Selection, select
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.recipes.strict import flatten
from hfpatch.results.cautions import dependence_cautions, document_cautions, floor_cautions, tie_cautions
from hfpatch.results.evaluation import EvaluatedVariant, EvaluationResults
from hfpatch.results.folder import RESULTS
from hfpatch.results.parts import Comparison, TaskResult
from hfpatch.runs.folder import ABSENT, difference_in
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import EvaluationIdentity
from hfpatch.runs.variants import ANSWERS, BASE, Variant, Variants, model_variants, patch_variants
from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.placement import Placement

IDENTITY = "evaluation.json"  # identifies the folder's evaluation; written before its first answer
_NOT_IDENTITY = {"allow_unknown_base", "batch_size", "token_budget"}  # change no number, but for rounding


def evaluate(
    model: ModelSettings,
    *others: ModelSettings,
    patches: Sequence[str | Path] = (),
    scales: Sequence[float] = (1.0,),
    allow_other_base: bool = False,
    baseline: bool = False,
    settings: EvaluationSettings,
    data_dir: str | Path | None = None,
    output: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> EvaluationResults:
    """Evaluate a base with each of several patches on the tasks of ``settings``, or several whole models.

    The base of patches is loaded once. Of several models each has its own tokenizer, and is compared with all before
    it. Each is loaded twice: before anything is scored, so that one that cannot be loaded shows then, and to be scored.
    Only one is in memory at a time.

    Args:
        model: the base, or the first of several models.
        others: more models.
        patches: folders that `save_patch` or PEFT wrote; without any, the bare base is evaluated.
        scales: factors of each patch's change, see :func:`hfpatch.scale_patch`; each is a variant.
        allow_other_base: take patches whose base had other weights.
        baseline: evaluate the bare base too, first, and compare every patch with it.
        settings: the tasks.
        data_dir: a folder that holds local copies of hub data sets.
        output: a folder for results.json, a folder of records for each variant, and the answers as they come, from
            which the same call continues after an interruption.
        cache_dir: where answers are kept without an ``output``; None keeps none.
        progress: called at every task; None shows nothing.
        placement: where the weights go; None takes one device for each process.

    Raises:
        HfpatchError: if a model, a patch, a task or its data cannot be loaded, a model or patch is named twice, two
            models are the same, or ``output`` has another evaluation; or if something is to be compared with a base
            whose scores are not the published ones, or by a metric that allows no comparison.
    """
    data_dir, output, cache_dir = (None if path is None else Path(path) for path in (data_dir, output, cache_dir))
    # What can be refused before anything is loaded, then what can be before anything is scored
    clock, progress, placement = Clock(), progress or Progress(), placement or Placement()
    if others:
        if patches or baseline or tuple(scales) != (1.0,):
            raise HfpatchError(
                "patches and their scales go with one base; compare whole models with each other in another call"
            )
        compared = model_variants([model, *others])
    else:
        compared = patch_variants(model, [Path(patch) for patch in patches], scales, baseline=baseline)
    variants = Variants(compared, placement, progress, allow_other_base=allow_other_base)
    ranks = variants.ranks
    decides = settings.model_dump(mode="json", exclude={*_NOT_IDENTITY, "limit"}) | {"tasks": list(settings.tasks)}
    ranks.on_first(check_output, output, EvaluationIdentity(models=variants.identities, settings=decides))
    progress.preparing("reading the tasks")
    selection = select(settings, data_dir)
    variants.prepare(settings)
    identity = EvaluationIdentity(models=variants.identities, settings=decides, limits=selection.limits)
    ranks.on_first(check_output, output, identity)
    if output is not None and ranks.is_first:
        identity.write(output / IDENTITY)

    # One variant after the other; a bare model's scores are checked before the next one's
    warnings = variants.warnings(selection.tasks)
    with nullcontext(output) if output is not None else TemporaryDirectory() as folder:
        scored: dict[str, EvaluatedVariant] = {}
        for variant in variants.variants:
            answers = cache_dir if output is None else output / ANSWERS
            storage = Storage(Path(folder, variant.label), answers=answers, answers_optional=output is None)
            scored[variant.label] = _score(variants, variant, selection, storage)
            progress.finished(variant.label, "")
            if variant.patch is None:
                of_base = (variant.model, settings, scored[variant.label].scores, Path(folder, variant.label))
                warnings += ranks.on_first(check_base, *of_base, selection.tasks, compared=variants.compared)
        for label, evaluated in scored.items():
            cautions = [*document_cautions(evaluated.scores), *tie_cautions(evaluated.scores, label)]
            warnings += [caution for caution in cautions if caution not in warnings]
        tasks, uncommon = _common(scored)
        warnings += uncommon

        # Each variant against its references, by the primary and the low-noise metrics
        comparisons: list[Comparison] = []
        if references := {variant.label: variant.references for variant in variants.variants if variant.references}:
            comparisons = ranks.on_first(
                evaluation.compare,
                evaluation.Records(
                    {label: {0: Path(folder, label)} for label in scored},
                    baseline=BASE if BASE in scored else "",
                    aggregations=evaluation.all_aggregations(selection.tasks),
                ),
                tasks,
                references,
                without_low_noise=variants.cut_by_tokens(selection.tasks),
            )

    facts = dict(next(iter(variants.facts.values())))
    computed = {} if variants.of_models else {name: facts.pop(name) for name in ("matmul", "computed_with")}
    results = EvaluationResults(
        model=facts,
        settings=settings.model_dump(mode="json"),
        variants=scored,
        comparisons=comparisons,
        warnings=[*warnings, *dependence_cautions(comparisons, selection.tasks)],
        provenance={**provenance(clock), **computed},
    )
    if output is not None and ranks.is_first:
        write_json(output / RESULTS, results.to_json())
    return ranks.same(results)


def _common(scored: Mapping[str, EvaluatedVariant]) -> tuple[dict[str, TaskResult], list[str]]:
    """Return the first variant's result of each task of which all scored the same documents, and what the others are.

    Tokenizers differ in the documents that they leave nothing to score of.
    """
    common: dict[str, TaskResult] = {}
    warnings = []
    for task, score in next(iter(scored.values())).scores.items():
        if len({variant.scores[task].data_sha256 for variant in scored.values()}) == 1:
            common[task] = score
        else:
            counts = ", ".join(f"{label} {variant.scores[task].n:,}" for label, variant in scored.items())
            warnings.append(f"{task}: not compared, as the models cannot all score the same documents ({counts}).")
    return common, warnings


def _score(variants: Variants, variant: Variant, selection: Selection, storage: Storage) -> EvaluatedVariant:
    """Run the tasks; no model is left in a variable here when the next one is loaded."""
    progress = variants.progress
    with variants.opened(variant) as (base, added):
        scores = run_tasks(
            base.model,
            base.tokenizer,
            selection,
            storage=replace(storage, base_sha256=base.sha256),
            on_task=partial(progress.evaluating, variant.label),
            on_scored=partial(progress.scored, variant.label),
            ranks=variants.ranks,
        )
    return EvaluatedVariant(
        model=variants.facts[variant.label] if variants.of_models else None,
        patch=None if variant.patch is None else str(variant.patch),
        scale=None if variant.scale == 1 else variant.scale,
        added=added,
        scores=scores,
        groups=selection.group_results(scores) or None,
    )


def check_output(output: Path | None, identity: EvaluationIdentity) -> None:
    """Refuse a folder that has other files than those of this evaluation, or cannot be a folder.

    The evaluation there may have fewer documents of a task, but not more.
    """
    if output is None:
        return
    if output.is_file():
        raise HfpatchError(f"{output}: is a file, not a folder; choose another --output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / IDENTITY).is_file():
        raise HfpatchError(f"{output}: is not empty and holds no evaluation of hfpatch; choose another --output")
    stored = EvaluationIdentity.read(output / IDENTITY)
    for task, limit in identity.limits.items():
        scored = stored.limits.get(task, limit)
        if limit is not None and (scored is None or scored > limit):
            raise HfpatchError(
                f"{output}: holds {'all' if scored is None else f'{scored:,}'} documents of {task}, and --limit asks "
                f"for the first {limit:,}; leave it out, or choose another --output"
            )
    old, new = (flatten(one.model_copy(update={"limits": {}}).to_json()) for one in (stored, identity))
    for key in [*new, *(key for key in old if key not in new and not key.endswith(".sha256"))]:
        there, here = old.get(key, ABSENT), new.get(key, ABSENT)
        if there != here:
            raise HfpatchError(
                f"{output}: holds another evaluation ({difference_in(key, there, here)}); choose another --output"
            )


def check_base(
    model: ModelSettings,
    settings: EvaluationSettings,
    scores: dict[str, TaskResult],
    records: Path,
    tasks: Mapping[str, Any],
    *,
    compared: str,
) -> list[str]:
    """Return the cautions about the base's scores.

    Args:
        model: the base.
        settings: the tasks, and whether a base with other scores than the known ones is accepted.
        scores: the base's.
        records: the folder of its records.
        tasks: lm-eval's tasks.
        compared: the models compared with it, as messages call them; empty for none.

    Raises:
        HfpatchError: if something is to be compared with it and its scores are not known ones, unless the settings
            allow that, or a metric is one by which nothing can be compared.
    """
    surprises, unknown = check_known_scores(model, scores, plain=settings.plain)
    if not compared:
        return surprises
    if surprises and not settings.allow_unknown_base:
        raise HfpatchError(f"{' '.join(surprises)} --allow-unknown-base evaluates {compared} anyway")
    evaluation.check_comparable(records, scores, evaluation.all_aggregations(tasks))
    return [*surprises, *unknown, *floor_cautions(scores, model.name)]
