"""The models that one evaluation compares: a base with each of several patches, or several whole models."""

from __future__ import annotations

import gc
import hashlib
import math
from abc import ABC, abstractmethod
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
from hfpatch.evaluation.sample_log import FOLDER
from hfpatch.evaluation.selection import template_arguments
from hfpatch.nn.matmul import choose_library
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.runs.identity import describe_base
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import EvaluationIdentity
from hfpatch.sites import count_values
from hfpatch.support.cpu import pinned_library
from hfpatch.support.files import hash_values, sha256_file
from hfpatch.surgery.bases import Base, load_base, place_base, require_causal
from hfpatch.surgery.placement import Placement
from hfpatch.training.processes import start_processes, start_ranks

BASE = "base"
ANSWERS = "answers"
RESERVED = (ANSWERS, FOLDER)
"""Folders of an evaluation that are not of a model or patch."""
_PATCH_FILES = ("adapter_config.json", "patch.json")


@dataclass(frozen=True)
class Patch:
    """A saved patch of an evaluated base.

    Attributes:
        folder: where it is.
        scale: the factor of its change.
        allow_other_base: whether its base may have had other weights.
    """

    folder: Path
    scale: float = 1.0
    allow_other_base: bool = False

    def __str__(self) -> str:
        return str(self.folder) if self.scale == 1 else f"{self.folder} at {self.scale:g}"

    @property
    def sha256(self) -> str:
        """The hash of the files that decide its scores, which its cards do not."""
        files = sorted(self.folder.rglob("*"))
        files = [path for path in files if path.suffix == ".safetensors" or path.name in _PATCH_FILES]
        listing = "".join(f"{path.relative_to(self.folder).as_posix()} {sha256_file(path)}\n" for path in files)
        return hashlib.sha256(listing.encode()).hexdigest()


@dataclass(frozen=True)
class Variant:
    """One of the models that an evaluation compares.

    Attributes:
        label: its name in the results, and its folder of records.
        log_name: its name in lm-eval's own files.
        model: how its base is loaded.
        patch: the patch; None for the bare model.
        references: the labels that it is compared with.
    """

    label: str
    log_name: str
    model: ModelSettings
    patch: Patch | None = None
    references: tuple[str, ...] = ()


class Variants(ABC):
    """The variants of one evaluation. One model is in memory at a time, if callers keep none.

    Args:
        variants: the variants, in the order in which they are scored.
        placement: where the weights go.

    Attributes:
        variants: the variants.
        ranks: the processes that evaluate together.
        identity: identifies the evaluation; `prepare` adds the hashes of the weights.
        compared: the models compared with a bare one, as messages call them; empty for none.
        model: the facts that results give of the base, or of the first model; `prepare` finds them.
        models: those of each whole model, by label; `prepare` finds them.
        computed: how the scores are computed, where that is the same for all variants; `prepare` finds it.
        progress: called when a model is loaded.

    Raises:
        HfpatchError: if the processes cannot meet, or the placement does not go with their number.
    """

    identity: EvaluationIdentity
    model: dict[str, Any]
    compared: str

    def __init__(self, variants: Sequence[Variant], placement: Placement) -> None:
        self.ranks = start_ranks(split=placement.tp)
        placement.check(self.ranks.count)
        self.models: dict[str, dict[str, Any]] = {}
        self.computed: dict[str, Any] = {}
        self.progress = Progress()
        self.variants, self._placement = variants, placement
        self._loaded: tuple[ModelSettings, Base] | None = None

    @abstractmethod
    def prepare(self, settings: EvaluationSettings) -> None:
        """Load everything once, so that a mistake shows before anything is scored.

        Raises:
            HfpatchError: if a model or a patch cannot be loaded, or not be compared with the others.
        """

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

                load_patch(base.model, patch.folder, allow_other_base=patch.allow_other_base, scale=patch.scale)
                stack.callback(unpatch, base.model)
                added = patch_summary(base.model).added
            yield base, added

    def cut_by_tokens(self, tasks: Mapping[str, Any]) -> list[str]:
        """Return the tasks that count or cut by tokens, where the models' tokenizers differ."""
        if len({facts["tokenizer_sha256"] for facts in self.models.values()}) <= 1:
            return []
        return [name for name, task in tasks.items() if isinstance(task, TokenTask)]

    def warnings(self, tasks: Mapping[str, Any]) -> list[str]:
        """Return which scores do not compare: those per token, or of windows of different lengths."""
        said = []
        if per_token := self.cut_by_tokens(tasks):
            said.append(
                f"{', '.join(per_token)}: scored per token, and the models have different tokenizers, so these scores "
                "do not compare; accuracies, bits per byte and perplexities per word or byte do."
            )
        rolling = [name for name, task in tasks.items() if task.OUTPUT_TYPE == "loglikelihood_rolling"]
        lengths = {label: facts["max_length"] for label, facts in self.models.items()}
        if rolling and len(set(lengths.values())) > 1:
            shown = ", ".join(f"{label} {length:,}" for label, length in lengths.items())
            said.append(
                f"{', '.join(rolling)}: the models have context windows of different lengths (tokens: {shown}), and a "
                f"longer one lowers the perplexity; --max-length {min(lengths.values())} sets one length for all."
            )
        return said

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


class Patches(Variants):
    """One base with each of several patches at every scale, and bare; the arguments are those of `evaluate`.

    Raises:
        HfpatchError: if a folder or a scale is given twice, a scale is no finite number, or as `Variants`.
    """

    def __init__(
        self,
        model: ModelSettings,
        patches: Sequence[Path],
        scales: Sequence[float],
        *,
        allow_other_base: bool,
        baseline: bool,
        placement: Placement,
    ) -> None:
        parts = [patch.absolute().parts[1:] for patch in patches]
        for index, folder in enumerate(patches):
            if parts[index] in parts[:index]:
                raise HfpatchError(f"--patch {folder}: named twice")
        if not all(map(math.isfinite, scales)) or len(set(scales)) < len(scales) or not scales:
            raise HfpatchError(f"--scale {','.join(map(str, scales))}: give different finite numbers, such as 0.5,1")
        if tuple(scales) != (1.0,) and not patches:
            raise HfpatchError("--scale: there is no patch to scale; give --patch DIR")
        names = [f"{name} (patch)" if name in (BASE, *RESERVED) else name for name in short_names(parts)]
        self._model = model
        variants = [Variant(BASE, model.full_name, model)] if baseline or not patches else []
        references = (BASE,) if variants else ()
        for label, folder in zip(names, patches, strict=True):
            for scale in scales:
                patch = Patch(folder, scale, allow_other_base)
                scaled = label if scale == 1 else f"{label} at {scale:g}"
                variants.append(Variant(scaled, str(patch), model, patch, references))
        super().__init__(variants, placement)
        self.compared = "the patches" if len(variants) > 1 else ""
        hashes = {variant.label: variant.patch and variant.patch.sha256 for variant in variants}
        self.identity = EvaluationIdentity(model=model.identity, variants=hashes)

    def prepare(self, settings: EvaluationSettings) -> None:
        """Load the base and, of several variants, try every patch on it."""
        base = self.load(self._model)
        for variant in self.variants if len(self.variants) > 1 else ():
            with self.opened(variant):
                pass
        self.identity = self.identity.model_copy(update={"model": {**self.identity.model, "sha256": base.sha256}})
        self.model = describe_base(base, self._model)
        self.computed = {"matmul": choose_library(base.model), "computed_with": computed_with(base.model)}


class Models(Variants):
    """Several whole models, each with its own tokenizer and compared with all before it.

    Raises:
        HfpatchError: if a model is given twice, or as `Variants`.
    """

    compared = "the other models"

    def __init__(self, models: Sequence[ModelSettings], placement: Placement) -> None:
        # The labels: the last parts of each id or folder, and the revision
        parts = []
        for model in models:
            path = Path(model.full_name)
            *above, last = path.absolute().parts[1:] if path.exists() else model.full_name.split("/")
            ending = f"@{model.revision.replace('/', '-')}" if model.revision else ""
            parts.append((*above, f"{last}{ending}"))
            if parts[-1] in parts[:-1]:
                raise HfpatchError(f"--model {model.name}: named twice; a model is compared with others")
        labels = tuple(f"{name} (model)" if name in RESERVED else name for name in short_names(parts))
        named = dict(zip(labels, models, strict=True))
        self.identity = EvaluationIdentity(models={label: model.identity for label, model in named.items()})
        variants = []
        for number, (label, model) in enumerate(named.items()):
            log_name = f"{model.full_name}@{model.revision}" if model.revision else model.full_name
            variants.append(Variant(label, log_name, model, references=labels[:number]))
        super().__init__(variants, placement)

    def prepare(self, settings: EvaluationSettings) -> None:
        """Load every model and check that each can be scored and no two are the same."""
        facts_of = {}
        for variant in reversed(self.variants):  # as the first one, which is scored first, then stays in memory
            base = self.load(variant.model)
            try:
                with quiet():
                    template_arguments(base.tokenizer, settings.apply_chat_template)
                    scorer = HfpatchLM(base.model, tokenizer=base.tokenizer, max_length=settings.max_length)
            except HfpatchError as error:
                raise HfpatchError(f"--model {variant.model.name}: {error}") from error
            described, tokenizer = describe_base(base, variant.model), hash_tokenizer(base.tokenizer)
            chat = bool(settings.apply_chat_template)  # else its template writes no prompt
            identity = {**described["identity"], **({} if chat else {"tokenizer": tokenizer})}
            facts_of[variant.label] = {
                **described,
                "parameters": sum(map(count_values, base.model.parameters())),
                "max_length": scorer.max_length,
                "tokenizer_sha256": tokenizer,
                "identity_sha256": hash_values([base.sha256, identity]),
                "matmul": choose_library(base.model),
                "computed_with": computed_with(base.model),
            }
            del base, scorer  # one model is in memory at a time
        self.models = self.ranks.same({variant.label: facts_of[variant.label] for variant in self.variants})
        self.model = next(iter(self.models.values()))
        first: dict[str, str] = {}
        for label, facts in self.models.items():
            other = first.setdefault(facts["identity_sha256"], label)
            if other != label:
                raise HfpatchError(
                    f"--model {facts['name']}: {label} is the same model as {other} (weights, configuration, code "
                    "and tokenizer); leave one of them out"
                )
        hashed = {
            label: {**settings, "sha256": self.models[label]["sha256"]}
            for label, settings in self.identity.models.items()
        }
        self.identity = self.identity.model_copy(update={"models": hashed})


def short_names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a folder name for each of several different paths: its last parts, as many as the others do not have."""
    names = []
    for path in paths:
        others = [other for other in paths if other != path]
        sizes = (n for n in range(1, len(path)) if all(other[-n:] != path[-n:] for other in others))
        names.append("-".join(path[-next(sizes, len(path)) :]))
    return names
