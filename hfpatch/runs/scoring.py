"""`evaluate`: one base, bare or with each of several patches, on lm-eval tasks."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import TaskResult, check_known_scores, load_tasks, unknown_base
from hfpatch.evaluation import evaluate as run_tasks
from hfpatch.nn.matmul import choose_library, pinned_library
from hfpatch.recipes.comparison import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.runs.folder import flatten
from hfpatch.runs.progress import Progress
from hfpatch.support.files import read_json, sha256_file, write_json
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.bases import Base, load_base

if TYPE_CHECKING:
    from hfpatch.evaluation import Comparison

BASE = "base"
RESULTS = "results.json"
IDENTITY = "evaluation.json"  # what the folder's evaluation is of, written before its first answer
ANSWERS = "answers"
_NOT_IDENTITY = ("allow_unknown_base", "batch_size", "token_budget")  # change no number, but for rounding
_PATCH_FILES = ("adapter_config.json", "patch.json")


@dataclass(frozen=True)
class Variant:
    """The base, or the base with a patch.

    Attributes:
        patch: the patch's folder; None is the bare base.
        added: parameters that the patch added.
        scores: the result of each task.
    """

    patch: Path | None
    added: int
    scores: dict[str, TaskResult]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        model: the base: name, revision, hash, dtype.
        settings: the tasks and how they were run.
        variants: what was evaluated, by label; the bare base is ``base``.
        comparisons: each patch compared with the base, where the base was evaluated too.
        warnings: what must be known before the scores are believed.
        provenance: where the numbers come from.
    """

    model: dict[str, Any]
    settings: EvaluationSettings
    variants: dict[str, Variant]
    comparisons: list[Comparison]
    warnings: list[str]
    provenance: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as what JSON can hold."""
        variants = {
            label: {**asdict(variant), "patch": str(variant.patch) if variant.patch else None}
            for label, variant in self.variants.items()
        }
        return {
            "model": self.model,
            "settings": self.settings.model_dump(mode="json"),
            "variants": variants,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "warnings": self.warnings,
            "provenance": self.provenance,
        }


def evaluate(
    model: ModelSettings,
    *,
    patches: Sequence[Path] = (),
    allow_other_base: bool = False,
    baseline: bool = False,
    settings: EvaluationSettings,
    data_dir: Path | None = None,
    output: Path | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a base with each of several patches on the tasks of ``settings``; the base is loaded once.

    Args:
        model: the base.
        patches: folders that `save_patch` or PEFT wrote; without any, the bare base is evaluated.
        allow_other_base: take patches whose base had other weights.
        baseline: evaluate the bare base too, first, and hold every patch against it.
        settings: the tasks.
        data_dir: a folder that holds local copies of hub data sets.
        output: a folder for results.json, a folder of records for each variant, and the answers as they come, from
            which the same call goes on after an interruption.
        cache_dir: where answers are kept without an ``output``; None keeps none.
        progress: called at every task; None shows nothing.

    Raises:
        HfpatchError: if the model, a patch, a task or its data cannot be had; or if the base scores outside what is
            known of it, there are patches to compare with it and the settings do not allow that.
    """
    identity = _identity(model, settings, labels_of(patches, baseline=baseline))
    _check_output(output, identity)
    clock, listener = Clock(), progress or Progress()
    tasks = load_tasks(settings.tasks, data_dir=data_dir, **settings.task_options)  # mistakes show before the model
    base = load_base(model.name, revision=model.revision, dtype=model.dtype)
    base.model.to(PartialState().device)
    labels = labels_of(patches, baseline=baseline)
    if len(labels) > 1:
        _try_patches(base, patches, allow_other_base)
    if output is not None:
        identity["model"]["sha256"] = base.sha256
        _check_output(output, identity)
        write_json(output / IDENTITY, identity)
    answers_dir = output / ANSWERS if output is not None else cache_dir
    given: dict[str, Any] = {"settings": settings, "data_dir": data_dir}
    given |= {"answers_dir": answers_dir, "answers_optional": output is None}
    variants: dict[str, Variant] = {}
    library = choose_library(base.model)  # of all variants
    with _records_folder(output) as folder, pinned_library(library):
        for label, patch in labels.items():
            variants[label] = _score(
                base, label, patch, listener, allow_other_base, records_dir=folder / label, **given
            )
            listener.finished(label, "")
            warnings = _known_scores(model, variants, settings, more=label != [*labels][-1])
            if label == BASE and len(labels) > 1:
                _check_comparable(folder, variants[BASE].scores, tasks)
        found = Evaluation(
            model=_describe(model, base),
            settings=settings,
            variants=variants,
            comparisons=_compare(folder, variants, tasks),
            warnings=warnings,
            provenance={**provenance(clock), "matmul": library},
        )
    if output is not None:
        write_json(output / RESULTS, found.to_json())
    return found


def labels_of(patches: Sequence[Path], *, baseline: bool) -> dict[str, Path | None]:
    """Return what is evaluated, by label: the bare base, as None, where it is asked for or there is no patch."""
    bare: dict[str, Path | None] = {BASE: None} if baseline or not patches else {}
    return bare | dict(zip(label_patches(patches), patches, strict=True))


def label_patches(patches: Sequence[Path]) -> list[str]:
    """Return a short name for each patch folder: as many of its last parts as tell it from the others.

    Raises:
        HfpatchError: if a folder is named twice.
    """
    parts = [patch.absolute().parts[1:] for patch in patches]
    for index, patch in enumerate(parts):
        if patch in parts[:index]:
            raise HfpatchError(f"--patch {patches[index]}: named twice")
    labels = []
    for patch in parts:
        others = [other for other in parts if other != patch]
        size = next(n for n in range(1, len(patch) + 1) if all(other[-n:] != patch[-n:] for other in others))
        labels.append("-".join(patch[-size:]))
    return [f"{label} (patch)" if label in (BASE, ANSWERS) else label for label in labels]


def _try_patches(base: Base, patches: Sequence[Path], allow_other_base: bool) -> None:
    """Put every patch in and take it out again, so that one that does not fit shows before anything is scored."""
    for patch in patches:
        with _patched(base, patch, allow_other_base):
            pass


def _score(
    base: Base, label: str, patch: Path | None, listener: Progress, allow_other_base: bool, **given: Any
) -> Variant:
    """Put a patch in, run the tasks as `given` says, and take it out again."""
    with _patched(base, patch, allow_other_base):
        scores = run_tasks(
            base.model,
            base.tokenizer,
            base_sha256=base.sha256,
            on_task=partial(listener.evaluating, label),
            on_scored=partial(listener.scored, label),
            **given,
        )
        return Variant(patch, _added(base, patch), scores)


@contextmanager
def _patched(base: Base, patch: Path | None, allow_other_base: bool) -> Iterator[None]:
    if patch is None:
        yield
        return
    from hfpatch.surgery.folder import load_patch
    from hfpatch.surgery.patch import unpatch

    load_patch(base.model, patch, allow_other_base=allow_other_base)
    try:
        yield
    finally:
        unpatch(base.model)


def _added(base: Base, patch: Path | None) -> int:
    """Return the parameters that the patch added; what only patches need, such as PEFT, is imported for them alone."""
    if patch is None:
        return 0
    from hfpatch.surgery.patch import patch_summary

    return patch_summary(base.model).added


@contextmanager
def _records_folder(output: Path | None) -> Iterator[Path]:
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _identity(model: ModelSettings, settings: EvaluationSettings, labels: Mapping[str, Path | None]) -> dict[str, Any]:
    """Return what makes two evaluations the same one, as far as it is known before the base is loaded."""
    return {
        "model": model.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json", exclude=set(_NOT_IDENTITY)),
        "variants": {label: None if patch is None else _hash_patch(patch) for label, patch in labels.items()},
    }


def _hash_patch(patch: Path) -> str:
    """Return a hash of what of a patch decides its scores, whatever its cards say."""
    files = (path for path in sorted(patch.rglob("*")) if path.suffix == ".safetensors" or path.name in _PATCH_FILES)
    listing = "".join(f"{path.relative_to(patch).as_posix()} {sha256_file(path)}\n" for path in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _check_output(output: Path | None, identity: Mapping[str, Any]) -> None:
    """Refuse a folder that holds something else than this evaluation, or cannot be one."""
    if output is None:
        return
    for place in (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise HfpatchError(f"{place}: is a file, not a folder; choose another --output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / IDENTITY).is_file():
        raise HfpatchError(f"{output}: is not empty and holds no evaluation of hfpatch; choose another --output")
    old, new = flatten(read_json(output / IDENTITY)), flatten(identity)
    for key in [*new, *(key for key in old if key not in new and key != "model.sha256")]:
        there, here = old.get(key, "absent"), new.get(key, "absent")
        if there != here:
            raise HfpatchError(
                f"{output}: holds another evaluation ({key} is {there!r} there, {here!r} here); choose another --output"
            )


def _known_scores(
    model: ModelSettings, variants: Mapping[str, Variant], settings: EvaluationSettings, *, more: bool
) -> list[str]:
    """Return what is odd about the base's scores; refuse to go on to its patches unless the settings allow it."""
    if BASE not in variants:
        return []
    surprises = check_known_scores(model.name, model.revision, model.dtype, variants[BASE].scores)
    if surprises and more and not settings.allow_unknown_base:
        raise HfpatchError(f"{' '.join(surprises)} --allow-unknown-base goes on all the same")
    unknown = unknown_base(model.name, model.revision, model.dtype, variants[BASE].scores)
    return [*surprises, unknown] if unknown and (more or len(variants) > 1) else surprises


def _check_comparable(folder: Path, scores: dict[str, TaskResult], tasks: Mapping[str, Any]) -> None:
    """Refuse metrics by which no patch can be compared, before the first patch is evaluated."""
    from hfpatch.evaluation import check_comparable, primary_aggregations

    check_comparable(folder / BASE, scores, primary_aggregations(tasks, scores))


def _describe(model: ModelSettings, base: Base) -> dict[str, Any]:
    return {
        "name": base.name,
        "revision": base.revision,
        "sha256": base.sha256,
        "dtype": model.dtype,
        "model_type": base.model.config.model_type,
    }


def _compare(folder: Path, variants: Mapping[str, Variant], tasks: Mapping[str, Any]) -> list[Comparison]:
    others = [label for label in variants if label != BASE]
    if BASE not in variants or not others:
        return []
    from hfpatch.evaluation import compare, primary_aggregations

    return compare(
        {label: {0: folder / label} for label in variants},
        tasks=variants[BASE].scores,
        references={label: [BASE] for label in others},
        baseline=BASE,
        aggregations=primary_aggregations(tasks, variants[BASE].scores),
    )
