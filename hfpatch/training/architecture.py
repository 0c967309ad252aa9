"""A new model from a recipe's architecture section."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpatch.errors import HfpatchError, nearest
from hfpatch.models import build_scratch
from hfpatch.recipes.models import split_architecture


def build_model(
    architecture: Mapping[str, Any], *, tokenizer: PreTrainedTokenizerBase | None = None, seed: int = 0
) -> PreTrainedModel:
    """Build ``{model_type: gpt_neox, hidden_size: 128, ...}`` in float32, with its own initialisation.

    ``tokenizer`` gives ``vocab_size`` and the special tokens' ids where ``architecture`` does not. All draws depend on
    ``seed`` alone.

    Raises:
        HfpatchError: if the type or a key is unknown, a value is refused, or ``vocab_size`` is below the tokenizer's.
    """
    settings, values = split_architecture(architecture)
    if "model_type" not in values:
        raise HfpatchError("architecture.model_type is missing; name a causal language model, such as gpt2")
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = nearest(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise HfpatchError(f"architecture.model_type: {model_type} is not a causal language model{hint}")
    config_class = CONFIG_MAPPING[model_type]
    keys = [field.name for field in dataclasses.fields(config_class)] + list(config_class.attribute_map)
    for key in values:
        if key not in keys:
            raise HfpatchError(f"architecture.{key}: {model_type} has no such key{nearest(key, keys)}")
    if tokenizer is not None:
        specials = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        values = {"vocab_size": len(tokenizer), **specials, **values}
    try:
        config: PreTrainedConfig = config_class(**values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise HfpatchError(f"architecture: {model_type} refuses it ({' '.join(str(error).split())})") from error
    size = config.get_text_config().vocab_size
    if tokenizer is not None and size < len(tokenizer):
        raise HfpatchError(
            f"architecture.vocab_size is {size} and the tokenizer has {len(tokenizer)} tokens; make it at least that, "
            "or leave it out"
        )
    return build_scratch(config, settings, seed=seed)
