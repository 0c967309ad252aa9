"""Anchored nonlinear queries as a PEFT method."""

from hfpatch.tuners.nonlinear_query.config import NonlinearQueryConfig
from hfpatch.tuners.nonlinear_query.layer import NonlinearQueryLayer
from hfpatch.tuners.nonlinear_query.model import NonlinearQueryModel
from hfpatch.tuners.registration import SurgeryType, register_tuner

register_tuner(SurgeryType.NONLINEAR_QUERY, config=NonlinearQueryConfig, model=NonlinearQueryModel)

__all__ = ["NonlinearQueryConfig", "NonlinearQueryLayer", "NonlinearQueryModel"]
