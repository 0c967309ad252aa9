"""The interface of methods, and the PEFT tuner that is made of a method."""

import peft  # noqa: F401  # first: hfpatch.methods follows its import, and imports modules of this package

from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite
from hfpatch.tuners.layer import MethodLayer, method_layer
from hfpatch.tuners.registration import method

__all__ = ["MethodConfig", "MethodLayer", "MethodSite", "method", "method_layer"]
