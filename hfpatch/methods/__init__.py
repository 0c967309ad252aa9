"""The methods of hfpatch, one file each; importing this package registers them, and those of other packages."""

from hfpatch.methods.nonlinear_query import NonlinearQueryConfig
from hfpatch.methods.output_gate import OutputGateConfig
from hfpatch.methods.pre_projection import PreProjectionConfig
from hfpatch.methods.query_temperature import QueryTemperatureConfig
from hfpatch.tuners.plugins import load_plugins

__all__ = ["NonlinearQueryConfig", "OutputGateConfig", "PreProjectionConfig", "QueryTemperatureConfig"]

load_plugins()  # after hfpatch's own, which they may use
