"""The section ``model`` of a recipe: the base and how it is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.strict import Dtype, PathText, Section

NOT_IDENTITY = ("trust_remote_code", "device_map")
"""Options of loading that decide no number."""
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?")


def check_device_map(key: str, value: str | Mapping[str, int | str] | None) -> None:
    """Refuse a device map with a name that is no device."""
    names = ("disk",) if isinstance(value, Mapping) else _MAPS
    for device in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(device, str) and device not in names and not DEVICE.fullmatch(device):
            hint = nearest(device, [*names, "cpu", "cuda"])
            raise HfpatchError(f"{key} has {device!r}{hint}; use {', '.join(names)} or a device such as cpu or cuda:0")


class ModelSettings(Section):
    """The base model, which is never trained."""

    name: PathText = "tinyworld/gpt-neox"
    """A hub id, a local folder, a GGUF file, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``."""
    gguf_file: str | None = None
    """A GGUF file of the hub repository or the folder ``name``, dequantised as it is loaded: the same as
    ``name: ORG/REPO/FILE.gguf``."""
    revision: str | None = None
    """The hub revision; None takes the newest and records which one it was."""
    dtype: Dtype = "float32"
    """The dtype of the base; of a quantised one the dtype of its products."""
    load_in_8bit: bool = False
    """Quantise the linear layers of the base to 8 bits with bitsandbytes (LLM.int8)."""
    load_in_4bit: bool = False
    """Quantise them to 4 bits."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit numbers: NormalFloat, or floating point."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales of the 4-bit numbers too."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = (
        None
    )
    """The implementation of attention; None leaves it to transformers."""
    trust_remote_code: bool = False
    """Run code that comes with the model or its tokenizer, such as an exported one's; read it before."""
    device_map: str | dict[str, int | str] | None = None
    """Where the modules of the base are: ``auto``, ``balanced``, ``sequential``, a device, or a device for each module;
    None puts all on the device of the process."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> ModelSettings:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("model.load_in_8bit and model.load_in_4bit are both on; choose one")
        if not self.load_in_4bit and (changed := self.changed(["bnb_4bit_quant_type", "bnb_4bit_use_double_quant"])):
            raise ValueError(f"model.{changed[0]} applies to 4-bit bases; set model.load_in_4bit, or leave it out")
        if self.gguf_file is not None and not self.gguf_file.endswith(".gguf"):
            raise ValueError(f"model.gguf_file is {self.gguf_file!r}, which is not a .gguf file")
        if self.gguf_file is not None and self.name.endswith(".gguf"):
            raise ValueError(f"model.name {self.name} is a GGUF file already; leave model.gguf_file out")
        if self.full_name.endswith(".gguf") and (self.load_in_8bit or self.load_in_4bit):
            raise ValueError("model.load_in_8bit and model.load_in_4bit: a GGUF file is dequantised; leave them out")
        check_device_map("model.device_map", self.device_map)
        return self

    @property
    def full_name(self) -> str:
        """The name, with the GGUF file where there is one."""
        return f"{self.name}/{self.gguf_file}" if self.gguf_file else self.name

    @property
    def loading(self) -> dict[str, Any]:
        """All settings but the name, as `hfpatch.surgery.bases.load_base` takes them."""
        return self.model_dump(exclude={"name"})

    @property
    def loading_text(self) -> str:
        """What takes place while it is loaded, as progress shows it."""
        bits = 8 if self.load_in_8bit else 4 if self.load_in_4bit else None
        how = f" in {bits} bits" if bits else ", whose weights are dequantised" * self.full_name.endswith(".gguf")
        return f"loading {self.full_name}{how}"

    def describe(self) -> dict[str, Any]:
        """Return the settings of loading that are not at their defaults, without name, revision and dtype."""
        return self.model_dump(mode="json", exclude={"name", "revision", "dtype"}, exclude_defaults=True)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the model: not its devices, nor the consent to its code."""
        settings = self.model_dump(mode="json", include={"name", "revision", "dtype"})
        return settings | {key: value for key, value in self.describe().items() if key not in NOT_IDENTITY}
