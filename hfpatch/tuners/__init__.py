"""PEFT tuners for the methods of hfpatch; importing this package registers them with PEFT."""

from hfpatch.tuners.nonlinear_query import NonlinearQueryConfig, NonlinearQueryLayer, NonlinearQueryModel
from hfpatch.tuners.pre_projection import PreProjectionConfig, PreProjectionLayer, PreProjectionModel
from hfpatch.tuners.query_temperature import QueryTemperatureConfig, QueryTemperatureLayer, QueryTemperatureModel

__all__ = [
    "NonlinearQueryConfig",
    "NonlinearQueryLayer",
    "NonlinearQueryModel",
    "PreProjectionConfig",
    "PreProjectionLayer",
    "PreProjectionModel",
    "QueryTemperatureConfig",
    "QueryTemperatureLayer",
    "QueryTemperatureModel",
]
