"""The class of transformers that a model of any kind was saved as."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpatch.errors import HfpatchError
from hfpatch.surgery.bases import load_base, load_config, loading, locate
from hfpatch.tuners.model import TASK_HEAD

_OPTIONAL = ("pooler", "masked_spec_embed", "mask_token")  # heads without one need none; for masked inputs in training


def own_class(config: Any) -> Any | None:
    """Return the class of a saved model; None for causal language models and for classes that transformers lacks."""
    names = getattr(config, "architectures", None) or []
    if names:
        return other_class(getattr(transformers, names[0], None))
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return None if is_causal else AutoModel._model_mapping.get(type(config), None)


def other_class(kind: Any) -> Any | None:
    """Return a class if it is one of transformers' and none of its causal language models; None otherwise."""
    name = getattr(kind, "__name__", "")
    is_other = getattr(transformers, name, None) is kind and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return kind if is_other else None


def load_model(name: str, **options: Any) -> Any:
    """Load a model of any kind as the class that it was saved as, in evaluation mode.

    Weights that are not in its files are random, as transformers reports; they may be those of a new head only, such as
    a classifier's.

    Args:
        name: as :func:`hfpatch.load_base` takes it.
        options: its options; those for quantisation and devices are for causal language models alone.

    Raises:
        HfpatchError: as :func:`hfpatch.load_base`, and if other weights are not in its files.
    """
    inside = f"/{options['gguf_file']}" if options.get("gguf_file") else ""
    source, gguf = locate(f"{name}{inside}", options.get("revision"))
    used = {key: options[key] for key in ("revision", "trust_remote_code") if options.get(key) is not None}
    kind = None if gguf is not None else own_class(load_config(name, **used))
    if kind is None:
        return load_base(name, **options).model
    with loading(f"model {name!r}"):
        dtype = getattr(torch, options.get("dtype", "float32"))
        revision = options.get("revision")
        model, report = kind.from_pretrained(source, dtype=dtype, revision=revision, output_loading_info=True)
    if lost := _pretrained(model, report["missing_keys"]):
        raise HfpatchError(
            f"{name} is no complete {kind.__name__}: {len(lost)} weights, such as {lost[0]}, are not in its files and "
            "would be random; save the whole model again"
        )
    return model.eval()


def _pretrained(model: Any, missing: set[str]) -> list[str]:
    """Return the weights among missing ones that are none of a task's new head, nor of a part that may be left out."""
    names = sorted(name for name in missing if not any(part in _OPTIONAL for part in name.split(".")))
    if not names or not TASK_HEAD.search(type(model).__name__):  # heads of language models and projections are trained
        return names
    with torch.device("meta"):
        body = AutoModel.from_config(model.config).state_dict()
    # Below the name that the body has in the model, if it has one: in T5 it is no module of its own
    return [name for name in names if any(name.endswith(f".{key}") or name == key for key in body)]
