"""The identity of a run: the hashes of all its inputs, which a continuation must share.

A run folder's ``identity.json`` has the hashes that all its runs share. The files of a single run (its training, its
result, its checkpoints) have the run's own identity under ``identity``. Everything is compared before anything is run
or written, so results of two bases or two texts never mix in one folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from hfpatch.data.load import Splits
from hfpatch.data.plan import PLAN, BatchPlan, read_plans, write_plans
from hfpatch.data.tokenizer import identify_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import validate
from hfpatch.recipes.training import NOT_IDENTITY, LoopSettings
from hfpatch.results.identity import OF_BASE, OF_TASK, task_identity
from hfpatch.runs.records import Identity, Measurement, Record, RunResult, Shared
from hfpatch.support.cpu import MatmulLibrary
from hfpatch.support.files import hash_values, write_text
from hfpatch.surgery.bases import Base, hash_model_code, hash_tensors
from hfpatch.training.checkpoint import stored_origins

if TYPE_CHECKING:
    from hfpatch.recipes.base import ModelSettings

FILE = "identity.json"
NAMES = {
    **OF_BASE,
    "text": "training text",
    "evaluation_text": "evaluation text",
    "tuning_text": "text of tuning",
    "retention_text": "text of retention",
    "plan": "batch plan",
    "method": "settings or code of the method",
    "architecture": "architecture",
    "training": "training settings",
}
"""The name of each hash in messages; if several differ, an error names the first of them."""

_OUTCOMES = ("training.json", "result.json")
_CONFIG_WITHOUT = {"_name_or_path", "_from_model_config", "transformers_version", "dtype", "torch_dtype"}


def identify_base(base: Base) -> Identity:
    """Return the hashes of a base's parameters, persistent buffers, configuration and modules' code."""
    model: nn.Module = base.model
    parameters, tensors = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    configs = [base.model.config, *filter(None, [getattr(model, "generation_config", None)])]
    settings = [{k: v for k, v in config.to_diff_dict().items() if k not in _CONFIG_WITHOUT} for config in configs]
    return Identity(
        base_weights=base.sha256,
        base_buffers=hash_tensors({name: value for name, value in tensors.items() if name not in parameters}),
        base_config=hash_values(settings),
        base_code=hash_model_code(model),
    )


def describe_base(base: Base, settings: ModelSettings, identity: Identity | None = None) -> dict[str, Any]:
    """Return the facts about a base that results have: its name, dtype, type and identity; None computes the last."""
    loading = settings.describe()
    if identity is None:
        identity = identify_base(base).model_copy(update={"tokenizer": identify_tokenizer(base.tokenizer)})
    return {
        **base.facts,
        "dtype": settings.dtype,
        "model_type": base.model.config.model_type,
        **({"loading": loading} if loading else {}),
        "identity": {name: getattr(identity, name) for name in OF_BASE if name != "base_weights"},  # which has a hash
    }


def identify_data(tokenizer: PreTrainedTokenizerBase, splits: Splits) -> Identity:
    """Return the hashes of a tokenizer and of the token blocks: their content, whatever file they are from."""
    of_tuning = {} if splits.tuning is None else {"tuning_text": splits.tuning.sha256}
    return Identity(
        tokenizer=identify_tokenizer(tokenizer),
        text=splits.train.sha256,
        evaluation_text=splits.held_out.sha256 if splits.held_out else None,
        **of_tuning,
    )


def identify_training(shared: Identity, settings: LoopSettings, plan: BatchPlan, **of_run: str) -> Identity:
    """Return ``shared`` with the hashes of a batch plan and of the settings that a resumed training must share.

    ``of_run`` is what else the run has: its ``method``, or its ``architecture``.
    """
    training = hash_values(settings.model_dump(mode="json", exclude=set(NOT_IDENTITY)))
    return shared.model_copy(update={**of_run, "plan": plan.sha256, "training": training})


def check_shared(out: Path, shared: Identity, plans: Mapping[int, BatchPlan]) -> None:
    """Refuse a folder whose runs were not made with ``shared`` and ``plans``; nothing is written.

    Raises:
        HfpatchError: naming the file, what differs and both hashes; or if there are runs and no identity.
    """
    if (out / FILE).is_file():
        _check(out / FILE, Shared.read(out / FILE), shared)
    elif (out / "runs").is_dir() and any((out / "runs").iterdir()):
        _check(out, None, shared)
    stored = read_plans(out) if (out / PLAN).is_file() else plans
    for seed, plan in plans.items():
        if seed in stored and stored[seed].sha256 != plan.sha256:
            raise HfpatchError(
                f"{out / PLAN}: the batch plan of seed {seed} does not match: the training text or the tokenizer has "
                "changed since this run was started; choose another --out"
            )


def check_run(folder: Path, identity: Identity) -> None:
    """Refuse a run whose training, result or checkpoint was not made with ``identity``; nothing is written.

    Raises:
        HfpatchError: as `check_shared`.
    """
    for path in (folder / name for name in _OUTCOMES):
        if path.is_file():
            _check(path, Record.read(path).identity, identity)
    for path, origin in stored_origins(folder / "checkpoints"):
        _check(path, validate(origin or {}, Identity, str(path)), identity)


def check_measured(path: Path, identity: Identity) -> Measurement:
    """Return the scores on the texts of ``retention``, unless they have another identity.

    Raises:
        HfpatchError: as `check_shared`, or if the file cannot be read.
    """
    stored = Measurement.read(path)
    _check(path, stored.identity, identity)
    return stored


def check_seeds(method: Path, identity: Identity) -> None:
    """Refuse to train a method with one seed if it was trained with others in another way, as code may be changed.

    Raises:
        HfpatchError: as `check_shared`.
    """
    for path in sorted(method.glob("seed-*/training.json")):
        stored = Record.read(path).identity
        _check(path, stored, identity.model_copy(update={"plan": stored.plan, "training": stored.training}))


def check_scores(result: Path, tasks: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse scores that are not of the documents, prompts and task definitions that evaluations have now.

    Args:
        result: the outcome of a run; it need not exist, or have scores.
        tasks: the identity of each task now, see :func:`hfpatch.results.identity.task_identity`.

    Raises:
        HfpatchError: naming the file, the task and what differs.
    """
    scores = RunResult.read(result).evaluation if result.is_file() else {}
    for task, now in tasks.items():
        stored = task_identity(scores[task]) if task in scores else now
        for name in [key for key in OF_TASK if stored[key] != now.get(key)]:
            raise HfpatchError(
                f"{result}: its scores on {task} are of other {OF_TASK[name]} {_shown(stored[name], now.get(name))}; "
                "restore what they were made with, or choose another --out"
            )


def stored_library(out: Path) -> MatmulLibrary | None:
    """Return the library for matrix products that the runs of a folder were started with; None if there is none yet."""
    return Shared.read(out / FILE).matmul if (out / FILE).is_file() else None


def write_shared(
    out: Path, recipe: str, shared: Identity, plans: Mapping[int, BatchPlan], matmul: MatmulLibrary | None = None
) -> None:
    """Write the files that all runs of a folder share, if missing; the recipe first, as it marks a run folder."""
    if not (out / "recipe.yaml").is_file():
        write_text(out / "recipe.yaml", recipe)
    if plans and not (out / PLAN).is_file():
        write_plans(out, plans)
    if not (out / FILE).is_file():
        Shared(**shared.to_json(), **({"matmul": matmul} if matmul else {})).write(out / FILE)


def _check(path: Path, stored: Identity | None, identity: Identity) -> None:
    if stored is None or not stored.model_fields_set:
        raise HfpatchError(
            f"{path}: has no hashes of the base and the text it was made with, so it cannot be resumed; choose another "
            "--out"
        )
    for key, name in NAMES.items():
        there, here = getattr(stored, key), getattr(identity, key)
        if there != here:
            raise HfpatchError(
                f"{path}: does not match the current {name} {_shown(there, here)}; restore what it was made with, or "
                "choose another --out"
            )


def _shown(there: str | None, here: str | None) -> str:
    return f"(sha256 {(there or 'none')[:12]} there, {(here or 'none')[:12]} now)"
