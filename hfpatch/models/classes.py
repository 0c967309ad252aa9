"""The classes of models pretrained from scratch: a stock class that follows the plan in its configuration."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hfpatch.errors import HfpatchError, first_line
from hfpatch.models.attach import Plan, attach
from hfpatch.sites.family import family_of, register_family
from hfpatch.support.files import read_json, write_text
from hfpatch.support.generated import modelling_file

PREFIX = "hfpatch_scratch_"
FILE = "modeling_hfpatch_scratch.py"
_ABOUT = "a {stock} with another query path, in plain torch. Method: arXiv 2603.13381."
_CLASSES = '''\
class HfpatchScratch{config}({config}):
    """The stock configuration with the plan of its model, ``hfpatch_scratch``."""

    model_type = "{model_type}"


class HfpatchScratch{stock}({stock}):
    """The stock model with the query paths of ``config.hfpatch_scratch``."""

    config_class = HfpatchScratch{config}

    def __init__(self, config: HfpatchScratch{config}) -> None:
        super().__init__(config)
        attach(self, config.hfpatch_scratch)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return the answer of the stock class, which reads its own source file."""
        return bool({stock}._can_set_attn_implementation())

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return the answer of the stock class, which reads its own source file."""
        return bool({stock}._can_set_experts_implementation())
'''


@functools.cache
def scratch_classes(model_type: str) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return model and configuration class for a stock model type, known to transformers' Auto classes from now on."""
    stock_config = CONFIG_MAPPING[model_type]
    stock: Any = MODEL_FOR_CAUSAL_LM_MAPPING[stock_config]

    class Config(stock_config):  # type: ignore[misc, valid-type]  # a class chosen at run time
        """The stock configuration with the plan of its model, ``hfpatch_scratch``."""

    Config.model_type = f"{PREFIX}{model_type}"
    Config.__name__ = Config.__qualname__ = f"HfpatchScratch{stock_config.__name__}"

    class Model(stock):
        """The stock model with the query paths of ``config.hfpatch_scratch``; saved with its own modelling file."""

        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            attach(self, config.hfpatch_scratch)

        # the answers of the stock class, which reads its own source file
        _can_set_attn_implementation = stock._can_set_attn_implementation
        _can_set_experts_implementation = stock._can_set_experts_implementation

        def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
            """Save as transformers does, with a modelling file that needs no hfpatch."""
            if is_main_process:
                write_text(Path(save_directory) / FILE, modelling_source(stock, stock_config))
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)

    Model.__name__ = Model.__qualname__ = f"HfpatchScratch{stock.__name__}"
    AutoConfig.register(Config.model_type, Config)
    AutoModelForCausalLM.register(Config, Model)
    family = family_of(model_type)
    if family is not None:
        register_family(dataclasses.replace(family, model_types=(Config.model_type,)))
    return Model, Config


def modelling_source(stock: type[PreTrainedModel], config: type[PreTrainedConfig]) -> str:
    """Return the modelling file of a saved model: the modules that it is made of, and subclasses of the stock ones."""
    names = {"stock": stock.__name__, "config": config.__name__}
    classes = _CLASSES.format(**names, model_type=f"{PREFIX}{config.model_type}")
    about = _ABOUT.format(stock=stock.__name__)
    return modelling_file(about, "hfpatch.models.attach", "attach", stock=(stock, config), footer=classes)


def take_apart(config: PreTrainedConfig) -> tuple[PreTrainedConfig, Plan] | None:
    """Return the stock configuration inside that of a model from scratch, and the plan; None for any other."""
    if not config.model_type.startswith(PREFIX):
        return None
    identity = ("model_type", "architectures", "auto_map", "hfpatch_scratch")
    values = {key: value for key, value in config.to_dict().items() if key not in identity}
    return CONFIG_MAPPING[config.model_type.removeprefix(PREFIX)](**values), config.hfpatch_scratch


def register_scratch(folder: str | Path) -> bool:
    """Make ``AutoModelForCausalLM`` know the class of a saved model, by its folder or its config.json.

    Nothing happens for others. Returns whether it is a model from scratch.

    Raises:
        HfpatchError: if this version of transformers does not have its architecture.
    """
    path = Path(folder) if Path(folder).suffix == ".json" else Path(folder) / "config.json"
    own_type = str(read_json(path).get("model_type", "")) if path.is_file() else ""
    if not own_type.startswith(PREFIX):
        return False
    model_type = own_type.removeprefix(PREFIX)
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise HfpatchError(f"{folder}: this version of transformers has no causal language model {model_type!r}")
    scratch_classes(model_type)
    return True


def load_scratch(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a saved model from scratch, in evaluation mode; no code of the folder is run.

    Raises:
        HfpatchError: if the folder holds no such model, or as `load_whole`.
    """
    if not register_scratch(folder):
        raise HfpatchError(f"{folder}: contains no model that hfpatch pretrained from scratch")
    return load_whole(folder, dtype=dtype)


def load_whole(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a saved causal language model, from scratch or not, in evaluation mode; no code of the folder is run.

    Raises:
        HfpatchError: if it cannot be read, or a tensor is missing or of another shape.
    """
    register_scratch(folder)
    try:
        model, differences = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise HfpatchError(f"{folder}: cannot be loaded ({first_line(error)})") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if differences[kind]:
            raise HfpatchError(f"{folder}: cannot be loaded ({kind.replace('_', ' ')}: {sorted(differences[kind])[0]})")
    return model.eval()
