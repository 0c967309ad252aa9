"""A temperature for the query of each head as a PEFT method."""

from hfpatch.tuners.query_temperature.config import QueryTemperatureConfig
from hfpatch.tuners.query_temperature.layer import QueryTemperatureLayer
from hfpatch.tuners.query_temperature.model import QueryTemperatureModel
from hfpatch.tuners.registration import SurgeryType, register_tuner

register_tuner(SurgeryType.QUERY_TEMPERATURE, config=QueryTemperatureConfig, model=QueryTemperatureModel)

__all__ = ["QueryTemperatureConfig", "QueryTemperatureLayer", "QueryTemperatureModel"]
