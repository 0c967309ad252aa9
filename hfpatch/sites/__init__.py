"""Where the attention branch is in each architecture. All knowledge of architectures is in this package."""

from hfpatch.sites import families  # importing it registers them
from hfpatch.sites.discovery import Survey, find_sites, select_sites, survey
from hfpatch.sites.family import Family, family_of, register_family
from hfpatch.sites.layouts import TARGETS, Columns, Projection, concatenated, gated, latent, per_head, separate
from hfpatch.sites.modules import (
    base_model,
    codebooks,
    count_values,
    features,
    input_device,
    require_matrix,
    submodule,
    text_config,
    unwrapped,
)
from hfpatch.sites.site import AttentionSite

__all__ = [
    "TARGETS",
    "AttentionSite",
    "Columns",
    "Family",
    "Projection",
    "Survey",
    "base_model",
    "codebooks",
    "concatenated",
    "count_values",
    "families",
    "family_of",
    "features",
    "find_sites",
    "gated",
    "input_device",
    "latent",
    "per_head",
    "register_family",
    "require_matrix",
    "select_sites",
    "separate",
    "submodule",
    "survey",
    "text_config",
    "unwrapped",
]
