"""The base of all recipe sections: strict, immutable, documented field by field."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A section of a recipe. An unknown key is an error, and a section never changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
