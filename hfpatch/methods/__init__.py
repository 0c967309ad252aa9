"""The methods of hfpatch, one file each; importing this package registers them with PEFT."""

from hfpatch.methods.canon import CanonConfig
from hfpatch.methods.nonlinear_query import NonlinearQueryConfig
from hfpatch.methods.output_gate import OutputGateConfig
from hfpatch.methods.pre_projection import PreProjectionConfig
from hfpatch.methods.query_temperature import QueryTemperatureConfig

__all__ = ["CanonConfig", "NonlinearQueryConfig", "OutputGateConfig", "PreProjectionConfig", "QueryTemperatureConfig"]
