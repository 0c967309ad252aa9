"""The models that one evaluation compares: a base with each of several patches, or several whole models."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfpatch.data.tokenizer import hash_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import HfpatchLM
from hfpatch.evaluation.cache import computed_with
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.paper_tasks import TokenTask
from hfpatch.evaluation.selection import template_arguments
from hfpatch.nn.matmul import choose_library
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.parts import Values
from hfpatch.runs.identity import describe_base
from hfpatch.runs.progress import Progress
from hfpatch.sites import count_values
from hfpatch.support.cpu import pinned_library
from hfpatch.support.files import hash_values, sha256_file
from hfpatch.surgery.bases import Base, load_base, place_base, require_causal
from hfpatch.surgery.manifest import CONFIG, MANIFEST
from hfpatch.surgery.placement import Placement
from hfpatch.training.processes import start_processes, start_ranks

BASE = "base"
ANSWERS = "answers"  # the folder of an evaluation that is not of a model or patch


@dataclass(frozen=True)
class Variant:
    """One of the models that an evaluation compares.

    Attributes:
        label: its name in the results, and its folder of records.
        model: how its base is loaded.
        references: the labels that it is compared with.
        patch: the folder of its patch; None for the bare model.
        scale: the factor of the patch's change.
    """

    label: str
    model: ModelSettings
    references: tuple[str, ...] = ()
    patch: Path | None = None
    scale: float = 1.0


class Variants:
    """The variants of one evaluation. One model is in memory at a time, if callers keep none.

    Args:
        variants: the variants, in the order in which they are scored.
        placement: where the weights go.
        progress: called when a model is loaded.
        allow_other_base: take patches whose base had other weights.

    Attributes:
        variants: the variants.
        of_models: whether they are several whole models, and not one base with patches.
        ranks: the processes that evaluate together.
        compared: the models compared with a bare one, as messages call them; empty for none.
        facts: those of each model that results have, by label; of one base only the first. `prepare` collects them.

    Raises:
        HfpatchError: if the processes cannot meet, or the placement does not go with their number.
    """

    def __init__(
        self, variants: Sequence[Variant], placement: Placement, progress: Progress, *, allow_other_base: bool = False
    ) -> None:
        self.ranks = start_ranks(split=placement.tp)
        placement.check(self.ranks.count)
        self.variants, self.progress = variants, progress
        self._placement, self._allow_other_base = placement, allow_other_base
        self.of_models = len(variants) > 1 and all(variant.patch is None for variant in variants)
        self.compared = "the other models" if self.of_models else "the patches" if len(variants) > 1 else ""
        self.facts: dict[str, dict[str, Any]] = {}
        self._loaded: tuple[ModelSettings, Base] | None = None

    @property
    def identities(self) -> dict[str, Values]:
        """What decides the weights of each variant: how its model is loaded, and the hashes of weights and patch."""
        identities: dict[str, Values] = {}
        for variant in self.variants:
            identity = identities[variant.label] = dict(variant.model.identity)
            if facts := self.facts.get(variant.label if self.of_models else self.variants[0].label):
                identity["sha256"] = facts["sha256"]
            if variant.patch is not None:
                identity["patch"] = hash_patch(variant.patch)
        return identities

    def prepare(self, settings: EvaluationSettings) -> None:
        """Load everything once, so that a mistake shows before anything is scored.

        Raises:
            HfpatchError: if a model or a patch cannot be loaded or scored, or two models are the same.
        """
        first, *_ = self.variants
        for variant in reversed(self.variants):  # as the first one, which is scored first, then stays in memory
            base = self.load(variant.model)
            if variant.patch is None or variant is first:
                self.facts[variant.label] = self._describe(base, variant, settings)
            if variant.patch is not None:
                with self.opened(variant):
                    pass
            del base  # one model is in memory at a time
        self.facts = self.ranks.same(dict(reversed(self.facts.items())))
        labels: dict[str, str] = {}
        for label, facts in self.facts.items():
            other = labels.setdefault(facts["identity_sha256"], label)
            if other != label:
                raise HfpatchError(
                    f"--model {facts['name']}: {label} is the same model as {other} (weights, configuration, code "
                    "and tokenizer); leave one of them out"
                )

    def _describe(self, base: Base, variant: Variant, settings: EvaluationSettings) -> dict[str, Any]:
        """Return the facts of a bare model, after a check that it can be scored."""
        try:
            with quiet():
                template_arguments(base.tokenizer, settings.apply_chat_template)
                scorer = HfpatchLM(base.model, tokenizer=base.tokenizer, max_length=settings.max_length)
        except HfpatchError as error:
            raise HfpatchError(f"--model {variant.model.name}: {error}") from error
        described, tokenizer = describe_base(base, variant.model), hash_tokenizer(base.tokenizer)
        chat = bool(settings.apply_chat_template)  # else its template writes no prompt
        identity = {**described["identity"], **({} if chat else {"tokenizer": tokenizer})}
        return {
            **described,
            "parameters": sum(map(count_values, base.model.parameters())),
            "max_length": scorer.max_length,
            "tokenizer_sha256": tokenizer,
            "identity_sha256": hash_values([base.sha256, identity]),
            "matmul": choose_library(base.model),
            "computed_with": computed_with(base.model),
        }

    @contextmanager
    def opened(self, variant: Variant) -> Iterator[tuple[Base, int]]:
        """Load a variant, yield its base and how many parameters its patch adds, and remove the patch.

        The bare base decides the library for matrix products, so that all patches share it.

        Raises:
            HfpatchError: as `load_base` and `load_patch`.
        """
        base, patch = self.load(variant.model), variant.patch
        with ExitStack() as stack:
            stack.enter_context(pinned_library(self.ranks.same(choose_library(base.model))))
            added = 0
            if patch is not None:
                from hfpatch.surgery.folder import load_patch  # here, as a bare model needs no PEFT
                from hfpatch.surgery.patch import patch_summary, unpatch

                load_patch(base.model, patch, allow_other_base=self._allow_other_base, scale=variant.scale)
                stack.callback(unpatch, base.model)
                added = patch_summary(base.model).added
            yield base, added

    def cut_by_tokens(self, tasks: Mapping[str, Any]) -> list[str]:
        """Return the tasks that count or cut by tokens, where the models' tokenizers differ."""
        if len({facts["tokenizer_sha256"] for facts in self.facts.values()}) <= 1:
            return []
        return [name for name, task in tasks.items() if isinstance(task, TokenTask)]

    def warnings(self, tasks: Mapping[str, Any]) -> list[str]:
        """Return which scores do not compare: those per token, or of windows of different lengths."""
        cautions = []
        if per_token := self.cut_by_tokens(tasks):
            cautions.append(
                f"{', '.join(per_token)}: scored per token, and the models have different tokenizers, so these scores "
                "do not compare; accuracies, bits per byte and perplexities per word or byte do."
            )
        rolling = [name for name, task in tasks.items() if task.OUTPUT_TYPE == "loglikelihood_rolling"]
        lengths = {label: facts["max_length"] for label, facts in self.facts.items()}
        if rolling and len(set(lengths.values())) > 1:
            shown = ", ".join(f"{label} {length:,}" for label, length in lengths.items())
            cautions.append(
                f"{', '.join(rolling)}: the models have context windows of different lengths (tokens: {shown}), and a "
                f"longer one lowers the perplexity; --max-length {min(lengths.values())} sets one length for all."
            )
        return cautions

    def load(self, model: ModelSettings) -> Base:
        """Return a model on the device where it is scored; the one that was loaded last stays in memory.

        Raises:
            HfpatchError: as `load_base`.
        """
        if self._loaded is None or self._loaded[0] != model:
            self._loaded = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.progress.preparing(model.loading_text)
            loading, processes = model.loading, self.ranks.count
            if self._placement.device_map is not None:
                loading["device_map"] = self._placement.device_map
            base = load_base(model.name, **loading, tensor_parallel=processes if self._placement.tp else None)
            place_base(base, start_processes().device)
            require_causal(base.model, model.name)
            self._loaded = model, base
        return self._loaded[1]


def patch_variants(
    model: ModelSettings, patches: Sequence[Path], scales: Sequence[float] = (1.0,), *, baseline: bool = False
) -> list[Variant]:
    """Return a base with each of several patches at every scale, after the bare one; the arguments are `evaluate`'s.

    Raises:
        HfpatchError: if a folder or a scale is given twice, or a scale is no finite number.
    """
    parts = [patch.absolute().parts[1:] for patch in patches]
    for index, folder in enumerate(patches):
        if parts[index] in parts[:index]:
            raise HfpatchError(f"--patch {folder}: named twice")
    if not all(map(math.isfinite, scales)) or len(set(scales)) < len(scales) or not scales:
        raise HfpatchError(f"--scale {','.join(map(str, scales))}: give different finite numbers, such as 0.5,1")
    if tuple(scales) != (1.0,) and not patches:
        raise HfpatchError("--scale: there is no patch to scale; give --patch DIR")
    names = [f"{name} (patch)" if name in (BASE, ANSWERS) else name for name in short_names(parts)]
    variants = [Variant(BASE, model)] if baseline or not patches else []
    references = (BASE,) if variants else ()
    for name, folder in zip(names, patches, strict=True):
        for scale in scales:
            at = "" if scale == 1 else f" at {scale:g}"
            variants.append(Variant(f"{name}{at}", model, references, folder, scale))
    return variants


def model_variants(models: Sequence[ModelSettings]) -> list[Variant]:
    """Return several whole models, each compared with all before it.

    They are called by the last parts of their ids or folders, and their revisions.

    Raises:
        HfpatchError: if a model is given twice.
    """
    parts = []
    for model in models:
        path = Path(model.full_name)
        *above, last = path.absolute().parts[1:] if path.exists() else model.full_name.split("/")
        ending = f"@{model.revision.replace('/', '-')}" if model.revision else ""
        parts.append((*above, f"{last}{ending}"))
        if parts[-1] in parts[:-1]:
            raise HfpatchError(f"--model {model.name}: named twice; a model is compared with others")
    labels = tuple(f"{name} (model)" if name == ANSWERS else name for name in short_names(parts))
    pairs = zip(labels, models, strict=True)
    return [Variant(label, model, labels[:number]) for number, (label, model) in enumerate(pairs)]


def hash_patch(folder: Path) -> str:
    """Return the hash of the files of a patch that decide its scores, which its cards do not."""
    files = sorted(folder.rglob("*"))
    files = [path for path in files if path.suffix == ".safetensors" or path.name in (CONFIG, MANIFEST)]
    listing = "".join(f"{path.relative_to(folder).as_posix()} {sha256_file(path)}\n" for path in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def short_names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a folder name for each of several different paths: its last parts, as many as the others do not have."""
    names = []
    for path in paths:
        others = [other for other in paths if other != path]
        sizes = (n for n in range(1, len(path)) if all(other[-n:] != path[-n:] for other in others))
        names.append("-".join(path[-next(sizes, len(path)) :]))
    return names
