"""Pure torch modules: the mathematics of the methods, with no Hugging Face import."""

from hfpatch.nn.anchors import IdentityAnchoredQuery, WeightAnchoredQuery, anchor_preserving, anchored
from hfpatch.nn.convolution import ShortConvolution, short_convolution
from hfpatch.nn.functions import ACTIVATIONS, NORMS, activation, make_norm
from hfpatch.nn.initialization import low_rank_, normal_, orthonormal_, orthonormal_rows, seeded_generator, uniform_
from hfpatch.nn.mixed import MixedProjection
from hfpatch.nn.nonlinear import NonlinearProjection, nonlinear_map
from hfpatch.nn.preprojection import ContentSkip, PreProjection, inner_width, pre_project
from hfpatch.nn.temperature import QueryTemperature, scale_heads

__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "ContentSkip",
    "IdentityAnchoredQuery",
    "MixedProjection",
    "NonlinearProjection",
    "PreProjection",
    "QueryTemperature",
    "ShortConvolution",
    "WeightAnchoredQuery",
    "activation",
    "anchor_preserving",
    "anchored",
    "inner_width",
    "low_rank_",
    "make_norm",
    "nonlinear_map",
    "normal_",
    "orthonormal_",
    "orthonormal_rows",
    "pre_project",
    "scale_heads",
    "seeded_generator",
    "short_convolution",
    "uniform_",
]
