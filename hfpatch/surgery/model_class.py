"""The class of transformers that a model of any kind was saved as."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpatch.surgery.bases import load_base, load_config, loading, locate


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

    Args:
        name: as :func:`hfpatch.load_base` takes it.
        options: its options; those for quantisation and devices are for causal language models alone.

    Raises:
        HfpatchError: as :func:`hfpatch.load_base`.
    """
    inside = f"/{options['gguf_file']}" if options.get("gguf_file") else ""
    source, gguf = locate(f"{name}{inside}", options.get("revision"))
    used = {key: options[key] for key in ("revision", "trust_remote_code") if options.get(key) is not None}
    kind = None if gguf is not None else own_class(load_config(name, **used))
    if kind is None:
        return load_base(name, **options).model
    with loading(f"model {name!r}"):
        dtype = getattr(torch, options.get("dtype", "float32"))
        return kind.from_pretrained(source, dtype=dtype, revision=options.get("revision")).eval()
