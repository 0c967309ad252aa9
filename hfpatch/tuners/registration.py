"""Registration with PEFT from outside; the only file that fills PEFT's mappings."""

from __future__ import annotations

import enum
from typing import Any

from peft.config import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner


class SurgeryType(str, enum.Enum):
    """The ``peft_type`` of hfpatch's methods.

    PEFT's own enumeration is closed, but its mappings take any ``str`` enumeration whose members' names equal their
    values: a member hashes and compares as the string in ``adapter_config.json``.
    """

    PRE_PROJECTION = "PRE_PROJECTION"
    NONLINEAR_QUERY = "NONLINEAR_QUERY"
    QUERY_TEMPERATURE = "QUERY_TEMPERATURE"


def register_tuner(kind: SurgeryType, *, config: type[PeftConfig], model: type[BaseTuner]) -> None:
    """Make PEFT know a method: its configuration, its tuner and the prefix of its parameter names."""
    entries: list[tuple[dict[Any, Any], object]] = [
        (PEFT_TYPE_TO_CONFIG_MAPPING, config),
        (PEFT_TYPE_TO_TUNER_MAPPING, model),
        (PEFT_TYPE_TO_PREFIX_MAPPING, model.prefix),
    ]
    for mapping, value in entries:
        mapping[kind] = value
