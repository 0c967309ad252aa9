"""Pre-projection and content skip as a PEFT method."""

from hfpatch.tuners.pre_projection.config import PreProjectionConfig
from hfpatch.tuners.pre_projection.layer import PreProjectionLayer
from hfpatch.tuners.pre_projection.model import PreProjectionModel
from hfpatch.tuners.registration import SurgeryType, register_tuner

register_tuner(SurgeryType.PRE_PROJECTION, config=PreProjectionConfig, model=PreProjectionModel)

__all__ = ["PreProjectionConfig", "PreProjectionLayer", "PreProjectionModel"]
