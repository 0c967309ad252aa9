"""Build a model of random weights from a configuration."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch, take_apart
from hfpatch.nn import normal_
from hfpatch.twins.shrink import shrink, shrink_settings

NOISE = 0.1  # moves biases and gains off the zero and one where a wrong site would not show


def twin(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny random model of the architecture and switches of ``config``; see :func:`shrink`.

    Models from scratch keep their query paths.

    Raises:
        HfpatchError: as :func:`random_model`.
    """
    parts = take_apart(config)
    if parts is None:
        return random_model(shrink(config), seed=seed)
    stock, plan = parts
    model = build_scratch(shrink(stock), shrink_settings(plan["settings"], stock), seed=seed)
    return _with_noise(model, seed)


def random_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return a causal language model of random fp32 weights, in evaluation mode; the same for the same seed.

    Every parameter is what transformers initialises plus noise of standard deviation 0.1, so that no bias is zero and
    no gain one.

    Raises:
        HfpatchError: if transformers cannot build a causal language model of this configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = _causal_lm(config)
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise HfpatchError(f"a tiny model of type {config.model_type!r} cannot be built: {reason}") from error
    return _with_noise(model, seed)


def _with_noise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter += normal_(torch.empty(parameter.shape), std=NOISE, seed=seed, name=name)
    return model.eval()


def _causal_lm(config: PreTrainedConfig) -> PreTrainedModel:
    decoder: Any = getattr(config, "decoder", None)
    if isinstance(decoder, PreTrainedConfig):  # transformers registers some causal models under their composite
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        built: PreTrainedModel = getattr(transformers, name)(decoder)
        return built
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model
