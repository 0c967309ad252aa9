"""Configuration of the query-temperature tuner."""

from __future__ import annotations

from dataclasses import dataclass

from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.registration import SurgeryType


@dataclass
class QueryTemperatureConfig(SurgeryConfig):
    """Configuration of :class:`QueryTemperatureModel`: q_h (1 + τ_h), one trained number for each query head.

    τ = 0 at init, an exact no-op. Works in every PEFT call; see :class:`hfpatch.nn.QueryTemperature` for the
    mathematics. It has no options beyond ``layers_to_transform``; there is nothing that ``seed`` draws.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = SurgeryType.QUERY_TEMPERATURE
