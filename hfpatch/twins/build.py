"""A tiny model of random weights from a configuration: the same options, a few small layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpatch.errors import HfpatchError, one_line
from hfpatch.models import build_scratch, take_apart
from hfpatch.nn import normal_
from hfpatch.recipes.models import ScratchSettings
from hfpatch.twins.sizes import DROPOUTS, HEAD, HEADS, LAYER_COUNTS, LAYERS, SIZES, SWITCHES, VOCABULARY, correct

MOST_LAYERS = 6
RANK = 24  # below the twins' width, as W_1 and W_2 are in real models
NOISE = 0.1  # moves biases and gains off the zero and one where a wrong site would not show


def twin(config: PreTrainedConfig, kind: Any = None, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny random model of the architecture and switches of ``config``; see :func:`shrink`.

    Models from scratch keep their query paths.

    Args:
        config: the configuration.
        kind: the class of the model; None: the causal language model.
        seed: of its weights.

    Raises:
        HfpatchError: as :func:`random_model`.
    """
    parts = take_apart(config)
    if parts is None:
        return random_model(shrink(config), kind, seed=seed)
    stock, plan = parts
    settings = ScratchSettings.model_validate(plan["settings"])
    if settings.query.rank is not None:
        query = settings.query.model_copy(update={"rank": min(settings.query.rank, RANK)})
        settings = settings.model_copy(update={"query": query})
    return _with_noise(build_scratch(shrink(stock), settings, seed=seed), seed)


def random_model(config: PreTrainedConfig, kind: Any = None, *, seed: int = 0) -> PreTrainedModel:
    """Return a model of random fp32 weights, in evaluation mode; the same for the same seed.

    Every parameter is transformers' initial value plus noise of standard deviation 0.1, so that no bias is zero and
    no gain one.

    Raises:
        HfpatchError: if transformers cannot build a model of this configuration and class; None is that of a causal
            language model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            decoder: Any = getattr(config, "decoder", None)
            if kind is not None:
                model = kind(config)
            elif isinstance(decoder, PreTrainedConfig):  # some causal models are registered under their composite
                model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])(decoder)
            else:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # a model may raise any
            raise _refused(config, error) from error
    return _with_noise(model, seed)


def _refused(config: PreTrainedConfig, error: Exception) -> HfpatchError:
    reason = one_line(error)  # may list every class that transformers has
    return HfpatchError(f"a tiny model of type {config.model_type!r} cannot be built: {reason:.300}")


def _with_noise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter += normal_(torch.empty(parameter.shape), std=NOISE, seed=seed, name=name)
    return model.eval()


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same class and switches whose random model takes milliseconds.

    Sizes become small, keeping what the structure depends on: whether heads share keys and values, whether heads times
    head size is the hidden size, and one layer at least of each kind that the configuration lists. Dropout is off.

    Raises:
        HfpatchError: if the configuration refuses the small sizes.
    """
    # The constructor's arguments; transformers derives or ignores some
    skip = {"transformers_version", "architectures", "id2label", "label2id", "dtype", "problem_type"}
    plain = config.to_dict()  # reads attributes that differ between layers, too
    names = list(inspect.signature(type(config).__init__).parameters)
    if dataclasses.is_dataclass(config):  # as configurations became in the course of transformers 5
        names = [field.name for field in dataclasses.fields(config) if field.init]
    values = {name: plain[name] for name in names if name in plain and name not in skip}
    values |= {name: getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None}
    if plain.get("per_layer_config"):
        values["per_layer_config"] = {int(index): changes for index, changes in plain["per_layer_config"].items()}

    # Fewer layers, and small sizes
    counts = (values.get(name) for name in LAYER_COUNTS)
    total = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    per_layer = [v for v in values.values() if isinstance(v, list | tuple) and len(v) == total]
    of_layers, kinds = values.get("per_layer_config") or {}, dict[str, int]()
    for index in range(total):  # the first of each kind that some list distinguishes, at least two
        kinds.setdefault(str([*(v[index] for v in per_layer), of_layers.get(index)]), index)
    chosen = sorted(kinds.values())[:MOST_LAYERS]
    chosen += [index for index in range(total) if index not in chosen][: max(0, LAYERS - len(chosen))]
    layers = sorted(chosen) or list(range(LAYERS))
    small = {name: _small(name, value, total, layers) for name, value in values.items()}

    # Numbers of heads and a head size of the same structure
    heads, head_size, hidden = (values.get(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    for name in ("num_key_value_heads", "num_kv_heads"):
        shared = values.get(name)
        if isinstance(shared, int) and isinstance(heads, int):
            small[name] = HEADS if shared == heads else min(shared, HEADS // 2)
    if isinstance(head_size, int) and isinstance(heads, int) and isinstance(hidden, int):
        small["head_dim"] = HEAD if head_size * heads == hidden else HEAD + HEAD // 2
    correct(config.model_type, small)
    try:
        return type(config)(**small)
    except Exception as error:  # a rule of this configuration that the small sizes break
        raise _refused(config, error) from error


def _small(name: str, value: Any, total: int, layers: Sequence[int]) -> Any:
    if isinstance(value, PreTrainedConfig):
        return shrink(value)
    if name == "per_layer_config":  # exceptions of single layers: sizes twice those of the others, or fewer heads
        changes = {new: value[old] for new, old in enumerate(layers) if old in value}
        sizes = {key: 2 * size for key, size in SIZES.items()} | {"num_key_value_heads": 1}
        return {index: {key: sizes.get(key, old) for key, old in change.items()} for index, change in changes.items()}
    if name in LAYER_COUNTS and isinstance(value, int):
        return len(layers)
    if isinstance(value, list | tuple) and len(value) == total and total > 0:
        return [SIZES.get(name, value[index]) for index in layers]
    if isinstance(value, bool) or value is None:
        return value
    if name in DROPOUTS:
        return type(value)(0)
    if name.endswith(("token_id", "_index")) and isinstance(value, int):
        return min(value, VOCABULARY - 1)
    if isinstance(value, list | tuple) or (name in SWITCHES and value == 0):
        return value  # one size for each stage of a hierarchy
    return SIZES.get(name, value)
