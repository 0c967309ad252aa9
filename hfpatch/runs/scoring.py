"""`evaluate`: one base, bare or with each of several patches, on lm-eval tasks."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hfpatch import evaluation  # its comparisons, which import scipy, are loaded where patches are compared
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import check_known_scores, unknown_base
from hfpatch.evaluation import evaluate as run_tasks
from hfpatch.evaluation.cache import computed_with
from hfpatch.evaluation.sample_log import FOLDER, SampleLog
from hfpatch.evaluation.selection import Selection, select
from hfpatch.nn.matmul import choose_library
from hfpatch.recipes.comparison import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.recipes.strict import flatten
from hfpatch.reporting.floor import floor_cautions
from hfpatch.results.folder import RESULTS
from hfpatch.results.schema import Comparison, EvaluatedVariant, EvaluationResults, TaskResult
from hfpatch.runs.folder import check_place
from hfpatch.runs.identity import describe_base
from hfpatch.runs.placing import load_placed, ranks_of
from hfpatch.runs.progress import Progress
from hfpatch.support.cpu import pinned_library
from hfpatch.support.files import read_json, sha256_file, write_json
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.bases import Base
from hfpatch.surgery.placement import Placement

BASE = "base"
IDENTITY = "evaluation.json"  # what the folder's evaluation is of, written before its first answer
ANSWERS = "answers"
RESERVED = (ANSWERS, FOLDER)
"""Folders of an evaluation that are not of a model or patch."""
_NOT_IDENTITY = ("allow_unknown_base", "batch_size", "token_budget")  # change no number, but for rounding
_PATCH_FILES = ("adapter_config.json", "patch.json")


def evaluate(
    model: ModelSettings,
    *,
    patches: Sequence[Path] = (),
    scales: Sequence[float] = (1.0,),
    allow_other_base: bool = False,
    baseline: bool = False,
    settings: EvaluationSettings,
    data_dir: Path | None = None,
    output: Path | None = None,
    log_samples: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> EvaluationResults:
    """Evaluate a base with each of several patches on the tasks of ``settings``; the base is loaded once.

    Args:
        model: the base.
        patches: folders that `save_patch` or PEFT wrote; without any, the bare base is evaluated.
        scales: what each patch's change is multiplied by, see :func:`hfpatch.scale_patch`; each is a variant.
        allow_other_base: take patches whose base had other weights.
        baseline: evaluate the bare base too, first, and compare every patch with it.
        settings: the tasks.
        data_dir: a folder that holds local copies of hub data sets.
        output: a folder for results.json, a folder of records for each variant, and the answers as they come, from
            which the same call continues after an interruption.
        log_samples: write lm-eval's own results and samples into ``output`` too.
        cache_dir: where answers are kept without an ``output``; None keeps none.
        progress: called at every task; None shows nothing.
        placement: where the weights go; None takes one device for each process.

    Raises:
        HfpatchError: if the model, a patch, a task or its data cannot be loaded, or ``output`` has another evaluation;
            or if patches are to be compared with a base whose scores are not the published ones, or by a metric that
            allows no comparison.
    """
    labels, placement = _labels(patches, scales, baseline=baseline), placement or Placement()
    ranks = ranks_of(placement)
    identity = _identity(model, settings, labels)
    ranks.on_first(partial(check_output, output, identity))
    clock, listener = Clock(), progress or Progress()
    chosen = select(settings, data_dir)  # mistakes show before the model
    base = load_placed(model, placement, ranks)
    for folder in patches if len(labels) > 1 else ():  # one that does not fit shows before anything is scored
        with _patched(base, Patch(folder), allow_other_base):
            pass
    if output is not None:
        identity["model"]["sha256"] = base.sha256
        ranks.on_first(partial(begin_output, output, identity))
    given: dict[str, Any] = {"settings": settings, "selection": chosen, "ranks": ranks}
    given |= {"answers_dir": cache_dir if output is None else output / ANSWERS, "answers_optional": output is None}
    described = describe_base(base, model)
    variants: dict[str, EvaluatedVariant] = {}
    warnings: list[str] = []
    library = ranks.same(choose_library(base.model))  # of all variants
    with ExitStack() as stack:
        records = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(pinned_library(library))
        for label, patch in labels.items():
            log = log_of(output, model, patch) if log_samples and output is not None else None
            given |= {"records_dir": records / label, "log": log}
            variants[label] = _score(base, label, patch, listener, allow_other_base, **given)
            listener.finished(label, "")
            if patch is None:
                scores, compared = variants[label].scores, "the patches" if len(labels) > 1 else ""
                check = partial(check_base, model, settings, scores, records / label, chosen.tasks, compared=compared)
                warnings = ranks.on_first(check)
        computed = computed_with(base.model)
        references = {label: [BASE] for label in variants if label != BASE} if BASE in variants else {}
        compared_by = ranks.on_first(partial(differences, records, variants, chosen.tasks, references, BASE))
    found = EvaluationResults(
        model=described,
        settings=settings.model_dump(mode="json"),
        variants=variants,
        **compared_by,
        warnings=warnings,
        provenance={**provenance(clock), "matmul": library, "computed_with": computed},
    )
    return ranks.on_first(partial(close_output, output, found))


@dataclass(frozen=True)
class Patch:
    """A saved patch, and what its change is multiplied by."""

    folder: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return str(self.folder) if self.scale == 1 else f"{self.folder} at {self.scale:g}"


def _labels(patches: Sequence[Path], scales: Sequence[float], *, baseline: bool) -> dict[str, Patch | None]:
    """Return what is evaluated, by label: the bare base, as None, where it is asked for or there is no patch.

    A patch is called after the last parts of its path, as many as make the name different from the others, and after
    its scale where that is not 1.

    Raises:
        HfpatchError: if a folder or a scale is named twice, or a scale is no finite number.
    """
    labels: dict[str, Patch | None] = {BASE: None} if baseline or not patches else {}
    parts = [patch.absolute().parts[1:] for patch in patches]
    for place, patch in enumerate(patches):
        if parts[place] in parts[:place]:
            raise HfpatchError(f"--patch {patch}: named twice")
    if not all(map(math.isfinite, scales)) or len(set(scales)) < len(scales) or not scales:
        raise HfpatchError(f"--scale {','.join(map(str, scales))}: give different finite numbers, such as 0.5,1")
    if tuple(scales) != (1.0,) and not patches:
        raise HfpatchError("--scale: there is no patch to scale; give --patch DIR")
    for label, folder in zip(short_names(parts), patches, strict=True):
        own = f"{label} (patch)" if label in (BASE, *RESERVED) else label
        labels |= {own if scale == 1 else f"{own} at {scale:g}": Patch(folder, scale) for scale in scales}
    return labels


def short_names(places: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a folder name for each of several different places: its last parts, as many as the others do not have."""
    names = []
    for own in places:
        others = [other for other in places if other != own]
        sizes = (n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others))
        names.append("-".join(own[-next(sizes, len(own)) :]))
    return names


def _score(
    base: Base,
    label: str,
    patch: Patch | None,
    listener: Progress,
    allow_other_base: bool,
    *,
    selection: Selection,
    **given: Any,
) -> EvaluatedVariant:
    """Load a patch, run the tasks as ``given`` says, and remove the patch."""
    with _patched(base, patch, allow_other_base) as added:
        scores = run_tasks(
            base.model,
            base.tokenizer,
            base_sha256=base.sha256,
            selection=selection,
            on_task=partial(listener.evaluating, label),
            on_scored=partial(listener.scored, label),
            **given,
        )
    groups = selection.group_results(scores) or None
    scale = None if patch is None or patch.scale == 1 else patch.scale
    folder = None if patch is None else str(patch.folder)
    return EvaluatedVariant(patch=folder, scale=scale, added=added, scores=scores, groups=groups)


def log_of(output: Path, model: ModelSettings, patch: Patch | None = None, name: str | None = None) -> SampleLog:
    """Return lm-eval's log of a variant, named as lm-eval names a model: after its adapter if there is one.

    Args:
        output: the folder of the evaluation.
        model: the base.
        patch: what it is patched with.
        name: another name, where several models would have the same.
    """
    arguments = {"pretrained": model.full_name, "dtype": model.dtype, "revision": model.revision, "patch": patch}
    known = {key: str(value) for key, value in arguments.items() if value is not None}
    return SampleLog(output, name or (model.full_name if patch is None else str(patch)), known)


@contextmanager
def _patched(base: Base, patch: Patch | None, allow_other_base: bool) -> Iterator[int]:
    """Load a patch, yield how many parameters it adds, and remove it; what only patches need is imported for them."""
    if patch is None:
        yield 0
        return
    from hfpatch.surgery.folder import load_patch
    from hfpatch.surgery.patch import patch_summary, unpatch

    load_patch(base.model, patch.folder, allow_other_base=allow_other_base, scale=patch.scale)
    try:
        yield patch_summary(base.model).added
    finally:
        unpatch(base.model)


def _identity(model: ModelSettings, settings: EvaluationSettings, labels: Mapping[str, Patch | None]) -> dict[str, Any]:
    """Return what makes two evaluations the same one, as far as it is known before the base is loaded."""
    return {
        "model": model.identity,
        **identify_settings(settings),
        "variants": {label: None if patch is None else _hash_patch(patch.folder) for label, patch in labels.items()},
    }


def identify_settings(settings: EvaluationSettings) -> dict[str, Any]:
    """Return the settings that decide the scores."""
    return {"settings": settings.model_dump(mode="json", exclude=set(_NOT_IDENTITY))}


def _hash_patch(patch: Path) -> str:
    """Return a hash of what of a patch decides its scores, whatever its cards say."""
    files = (path for path in sorted(patch.rglob("*")) if path.suffix == ".safetensors" or path.name in _PATCH_FILES)
    listing = "".join(f"{path.relative_to(patch).as_posix()} {sha256_file(path)}\n" for path in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def check_output(output: Path | None, identity: Mapping[str, Any]) -> None:
    """Refuse a folder that has other files than those of this evaluation, or cannot be a folder."""
    if output is None:
        return
    check_place(output, "--output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / IDENTITY).is_file():
        raise HfpatchError(f"{output}: is not empty and holds no evaluation of hfpatch; choose another --output")
    old, new = flatten(read_json(output / IDENTITY)), flatten(identity)
    for key in [*new, *(key for key in old if key not in new and not key.endswith(".sha256"))]:
        there, here = old.get(key, "absent"), new.get(key, "absent")
        if there != here:
            raise HfpatchError(
                f"{output}: holds another evaluation ({key} is {there!r} there, {here!r} here); choose another --output"
            )


def begin_output(output: Path, identity: Mapping[str, Any]) -> None:
    """Check a folder and note in it what is evaluated there."""
    check_output(output, identity)
    write_json(output / IDENTITY, identity)


def close_output(output: Path | None, found: EvaluationResults) -> EvaluationResults:
    """Write the results into their folder, if there is one, and return them."""
    if output is not None:
        write_json(output / RESULTS, found.to_json())
    return found


def check_base(
    model: ModelSettings,
    settings: EvaluationSettings,
    scores: dict[str, TaskResult],
    records: Path,
    tasks: Mapping[str, Any],
    *,
    compared: str,
) -> list[str]:
    """Return what is odd about the base's scores.

    Args:
        model: the base.
        settings: the tasks, and whether a base with other scores than the known ones is accepted.
        scores: the base's.
        records: the folder of its records.
        tasks: lm-eval's tasks.
        compared: what is to be compared with it, in words; empty for nothing.

    Raises:
        HfpatchError: if something is to be compared with it and its scores are not known ones, unless the settings
            allow that, or a metric is one by which nothing can be compared.
    """
    surprises = check_known_scores(model.full_name, model.revision, model.dtype, scores, plain=settings.plain)
    if not compared:
        return surprises
    if surprises and not settings.allow_unknown_base:
        raise HfpatchError(f"{' '.join(surprises)} --allow-unknown-base evaluates {compared} anyway")
    evaluation.check_comparable(records, scores, evaluation.all_aggregations(tasks))
    unknown = unknown_base(model.full_name, model.revision, model.dtype, scores, plain=settings.plain)
    return [*surprises, *([unknown] if unknown else []), *floor_cautions(scores, model.name)]


def differences(
    records: Path,
    variants: Mapping[str, EvaluatedVariant],
    tasks: Mapping[str, Any],
    references: Mapping[str, Sequence[str]],
    baseline: str,
    *,
    without_low_noise: Sequence[str] = (),
) -> dict[str, list[Comparison]]:
    """Return the differences between variants by the primary metrics and by the low-noise ones.

    Args:
        records: the folder that has a folder of records for each label.
        variants: what was evaluated, by label.
        tasks: lm-eval's tasks.
        references: for each label the labels to compare it with; none gives no differences.
        baseline: the reference that has no seeds.
        without_low_noise: tasks of which variants score different bytes.
    """
    if not references:
        return {}
    scores = next(iter(variants.values())).scores
    runs = {label: {0: records / label} for label in variants}
    compared = evaluation.compare(
        runs,
        tasks=scores,
        references=references,
        baseline=baseline,
        aggregations=evaluation.all_aggregations(tasks),
        without_low_noise=without_low_noise,
    )
    return {"comparisons": compared}
