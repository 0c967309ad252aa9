"""The methods of hfpatch, one file each; importing this package registers them, and those of other packages."""

from hfpatch.methods.canon import CanonConfig
from hfpatch.methods.loreft import LoReFTConfig
from hfpatch.methods.nonlinear_lora import NonlinearLoraConfig
from hfpatch.methods.nonlinear_query import NonlinearQueryConfig
from hfpatch.methods.output_gate import OutputGateConfig
from hfpatch.methods.parallel_adapter import ParallelAdapterConfig
from hfpatch.methods.pre_projection import PreProjectionConfig
from hfpatch.methods.query_temperature import QueryTemperatureConfig
from hfpatch.methods.value_residual import ValueResidualConfig
from hfpatch.tuners.registration import load_plugins

__all__ = [
    "CanonConfig",
    "LoReFTConfig",
    "NonlinearLoraConfig",
    "NonlinearQueryConfig",
    "OutputGateConfig",
    "ParallelAdapterConfig",
    "PreProjectionConfig",
    "QueryTemperatureConfig",
    "ValueResidualConfig",
]

load_plugins()  # after hfpatch's own, which they may use
