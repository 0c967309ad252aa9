"""hfpatch's methods as an adapter of axolotl.

In axolotl's configuration, with the options that a part has in a recipe::

    plugins:
      - hfpatch.integrations.axolotl.HfpatchPlugin
    adapter: hfpatch
    hfpatch:
      type: pre_projection
      content_skip: true
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import AdapterCapabilities, BasePlugin
from peft import PeftConfig, PeftModel, get_peft_model
from pydantic import BaseModel

from hfpatch.errors import HfpatchError
from hfpatch.surgery.methods import build_method, validate_methods

ADAPTER = "hfpatch"


class HfpatchArgs(BaseModel):
    """The section of axolotl's configuration: a part as in a recipe, its ``type`` and its options."""

    hfpatch: dict[str, Any] | None = None


class HfpatchPlugin(BasePlugin):
    """Makes ``adapter: hfpatch`` known to axolotl; the adapter is saved and loaded by PEFT."""

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the section before axolotl loads anything.

        Raises:
            HfpatchError: if it is missing, or a method or an option is not valid.
        """
        if cfg.get("adapter") == ADAPTER:
            validate_methods({ADAPTER: [_part(cfg)]})

    def get_input_args(self) -> str:
        """Return the name of the class of the section."""
        return f"{__name__}.{HfpatchArgs.__name__}"

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        """Return the adapter's name; it is none of axolotl's LoRA kinds and does not restart."""
        return [AdapterCapabilities(name=ADAPTER)]

    def load_adapter(
        self, model: Any, cfg: Any, inference: bool = False, config_only: bool = False
    ) -> tuple[PeftModel | None, PeftConfig] | None:
        """Return the model with the adapter and its configuration; None where another adapter is asked for.

        Args:
            model: the base.
            cfg: axolotl's configuration. ``lora_model_dir`` names an adapter to continue from.
            inference: load that adapter without training it.
            config_only: return the configuration alone.

        Raises:
            HfpatchError: if the method is not valid or does not fit the model.
        """
        if cfg.get("adapter") != ADAPTER:
            return None
        options: dict[str, Any] = {}
        if cfg.get("peft_autocast_adapter_dtype") is not None:
            options["autocast_adapter_dtype"] = cfg["peft_autocast_adapter_dtype"]
        if saved := cfg.get("lora_model_dir"):
            if config_only:
                return None, PeftConfig.from_pretrained(saved)
            loaded = PeftModel.from_pretrained(model, saved, is_trainable=not inference, **options)
            return loaded, loaded.peft_config["default"]
        (config,) = build_method(model, {ADAPTER: [_part(cfg)]}, ADAPTER).configs
        return (None if config_only else get_peft_model(model, config, **options)), config


def _part(cfg: Mapping[str, Any]) -> dict[str, Any]:
    part = cfg.get(ADAPTER)
    if not isinstance(part, Mapping):
        raise HfpatchError(
            f"adapter: {ADAPTER} needs a section {ADAPTER} with a method's type and options, such as "
            f"{{type: pre_projection, content_skip: true}}; got {part!r}"
        )
    return {**part}
