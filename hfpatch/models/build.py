"""A new model from a configuration and scratch settings."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hfpatch.errors import HfpatchError, one_line
from hfpatch.models.classes import FILE, scratch_classes
from hfpatch.models.plan import make_plan
from hfpatch.recipes.models import MLP_WIDTHS, ScratchSettings


def build_scratch(config: PreTrainedConfig, settings: ScratchSettings, *, seed: int = 0) -> PreTrainedModel:
    """Build a float32 model of a causal language model's configuration, with the query path of ``settings``.

    All draws depend on ``seed`` alone, and the parts that a variant shares with the linear W_Q start from the same
    weights. Where the settings ask for nothing that the stock class lacks, the stock class is built. On
    ``torch.device("meta")`` nothing is allocated.

    Args:
        config: of any type that ``AutoModelForCausalLM`` knows; left as it is.
        settings: query path, pre-projection, biases, width of the MLP.
        seed: seed of the initialisation.

    Raises:
        HfpatchError: if the architecture cannot be built so; the message names the setting.
    """
    config = copy.deepcopy(config)
    if settings.mlp_width is not None:
        name = next((name for name in MLP_WIDTHS if hasattr(config, name)), None)
        if name is None:
            raise HfpatchError(
                f"architecture.mlp_width: {config.model_type} has no MLP width that hfpatch recognises; leave it out "
                "and set the configuration's own key"
            )
        width = round(settings.mlp_width * config.hidden_size)
        if width < 1:
            raise HfpatchError(
                f"architecture.mlp_width: {settings.mlp_width} times d={config.hidden_size} is below 1; raise it"
            )
        setattr(config, name, width)

    # The stock class, or one of its own that follows a plan
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if settings.query.path == "linear" and settings.pre_projection is None and settings.biases:
            return _built(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        stock: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            outline = _built(lambda: stock(copy.deepcopy(config)))
        plan = make_plan(outline, settings, seed=seed)
        model_class, config_class = scratch_classes(config.model_type)
        values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        config_of = config_class(**values, hfpatch_scratch=plan)
        home = FILE.removesuffix(".py")
        config_of.auto_map = {
            "AutoConfig": f"{home}.{config_class.__name__}",
            "AutoModelForCausalLM": f"{home}.{model_class.__name__}",
        }
        torch.manual_seed(seed)
        return _built(lambda: model_class._from_config(config_of, dtype=torch.float32))


def inner_width(config: PreTrainedConfig) -> int | None:
    """Return how wide an architecture's MLP, or each expert's, is inside; None where its configuration does not say.

    A GPT-2 that leaves ``n_inner`` out has 4d.
    """
    name = next((name for name in MLP_WIDTHS if hasattr(config, name)), None)
    value = getattr(config, name) if name else None
    if name == "n_inner" and value is None:
        value = 4 * config.hidden_size
    return value if isinstance(value, int) else None


def non_embedding_parameters(model: Any) -> int:
    """Return the number of parameters outside the embeddings of tokens and positions and an output head."""
    head = model.get_output_embeddings()
    outside = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    left_out = {id(parameter) for module in outside for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in left_out)


def _built(make: Any) -> Any:
    try:
        return make()
    except HfpatchError as error:
        raise HfpatchError(f"architecture.query: {error}") from error
    except Exception as error:  # a model may raise any
        raise HfpatchError(f"architecture: cannot be built ({one_line(error)})") from error
