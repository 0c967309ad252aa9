"""The identity of a run: the hashes of all it comes from, as plain data that whatever goes on with it must share.

A run folder's ``identity.json`` has what all its runs share. What a single run leaves (its training, its result, its
checkpoints) has the run's own identity under ``identity``. Everything is compared before anything is run or written,
so results of two bases or two texts never meet in one folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import PLAN, BatchPlan, read_plans, write_plans
from hfpatch.data.tokenizer import hash_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.nn.matmul import MatmulLibrary
from hfpatch.recipes.training import NOT_IDENTITY, LoopSettings
from hfpatch.support.files import read_json, write_json, write_text
from hfpatch.surgery.bases import Base, hash_tensors
from hfpatch.training.checkpoint import stored_origins

if TYPE_CHECKING:
    from hfpatch.surgery.methods import Method

Identity: TypeAlias = dict[str, str | None]
"""A SHA-256 by name, see :data:`NAMES`; None where there is no such thing."""

FILE = "identity.json"
MATMUL = "matmul"
NAMES = {
    "base_weights": "base weights",
    "base_buffers": "base buffers",
    "base_config": "base configuration",
    "tokenizer": "tokenizer",
    "text": "training text",
    "evaluation_text": "evaluation text",
    "plan": "batch plan",
    "method": "method settings",
    "architecture": "architecture",
    "training": "training settings",
}
"""What each hash of an identity is of; where several differ, the first of them is named."""

_OUTCOMES = ("training.json", "result.json")
_CONFIG_WITHOUT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
_METHOD_WITHOUT = {"base_model_name_or_path", "revision", "inference_mode", "peft_version"}


def identify_base(base: Base) -> Identity:
    """Return the hashes of a base's parameters, of its persistent buffers and of its configuration."""
    model: nn.Module = base.model
    parameters, tensors = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    config = base.model.config.to_diff_dict()
    return {
        "base_weights": base.sha256,
        "base_buffers": hash_tensors({name: value for name, value in tensors.items() if name not in parameters}),
        "base_config": hash_values({key: value for key, value in config.items() if key not in _CONFIG_WITHOUT}),
    }


def identify_data(tokenizer: PreTrainedTokenizerBase, text: TokenBlocks, evaluation: TokenBlocks | None) -> Identity:
    """Return the hashes of a tokenizer and of the token blocks: their content, whatever file they are from."""
    return {
        "tokenizer": hash_tokenizer(tokenizer),
        "text": text.sha256,
        "evaluation_text": evaluation.sha256 if evaluation else None,
    }


def identify_method(method: Method) -> Identity:
    """Return the hash of a method's settings, every default and the solved rank included."""
    configs = [config.to_dict() for config in method.configs]
    kept = [{key: value for key, value in config.items() if key not in _METHOD_WITHOUT} for config in configs]
    return {"method": hash_values(kept)}


def identify_training(settings: LoopSettings, plan: BatchPlan) -> Identity:
    """Return the hashes of a batch plan and of the training settings that a continuation must share."""
    return {
        "plan": plan.sha256,
        "training": hash_values(settings.model_dump(mode="json", exclude=set(NOT_IDENTITY))),
    }


def hash_values(values: Any) -> str:
    """Return the SHA-256 of values as JSON, sets sorted and what JSON does not know as its text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=_plain).encode()).hexdigest()


def check_shared(out: Path, shared: Identity, plans: Mapping[int, BatchPlan]) -> None:
    """Refuse a folder whose runs come from something else than ``shared`` and ``plans``; nothing is written.

    Raises:
        HfpatchError: naming the file, what differs and both hashes; or if there are runs and no identity, as in the
            folders of older versions.
    """
    if (out / FILE).is_file():
        _check(out / FILE, read_json(out / FILE), shared)
    elif (out / "runs").is_dir() and any((out / "runs").iterdir()):
        raise HfpatchError(_nameless(out))
    if (out / PLAN).is_file():
        _check_plans(out, plans)


def check_run(folder: Path, identity: Identity) -> None:
    """Refuse a run whose training, result or checkpoint comes from something else; nothing is written.

    Raises:
        HfpatchError: as `check_shared`.
    """
    for path in (folder / name for name in _OUTCOMES):
        if path.is_file():
            _check(path, read_json(path).get("identity"), identity)
    for path, stored in stored_origins(folder / "checkpoints"):
        _check(path, stored, identity)


def stored_library(out: Path) -> MatmulLibrary | None:
    """Return the library for matrix products that the runs of a folder were begun with; None if there is none yet."""
    stored: Any = read_json(out / FILE).get(MATMUL) if (out / FILE).is_file() else None
    return cast("MatmulLibrary | None", stored)


def write_shared(
    out: Path,
    recipe: str,
    shared: Identity,
    plans: Mapping[int, BatchPlan],
    matmul: MatmulLibrary | None = None,
) -> None:
    """Write what all runs of a folder share, where it is missing; the recipe first, as it marks the folder as a run."""
    if not (out / "recipe.yaml").is_file():
        write_text(out / "recipe.yaml", recipe)
    if plans and not (out / PLAN).is_file():
        write_plans(out, plans)
    if not (out / FILE).is_file():
        write_json(out / FILE, {**shared, MATMUL: matmul} if matmul else shared)


def _check(path: Path, stored: Any, identity: Identity) -> None:
    if not isinstance(stored, Mapping):
        raise HfpatchError(_nameless(path))
    for key in (key for key in NAMES if key in identity or key in stored):
        old, new = stored.get(key), identity.get(key)
        if old != new:
            raise HfpatchError(
                f"{path}: made with another {NAMES[key]} (sha256 {_short(old)} there, {_short(new)} now); "
                "restore what it was made with, or choose another --out"
            )


def _check_plans(out: Path, plans: Mapping[int, BatchPlan]) -> None:
    stored = read_plans(out)
    for seed, plan in plans.items():
        if seed not in stored or stored[seed].sha256 != plan.sha256:
            raise HfpatchError(
                f"{out / PLAN}: the plan of seed {seed} is another: the training text or the tokenizer has changed "
                "since this run began; choose another --out"
            )


def _nameless(path: Path) -> str:
    return (
        f"{path}: does not say which base and which text it is from, as an older version of hfpatch wrote it, so it "
        "cannot be resumed; choose another --out"
    )


def _short(sha256: Any) -> str:
    return str(sha256)[:12] if sha256 else "none"


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
