"""Where the attention branch lives in each architecture. All knowledge of architectures stands here."""

from hfpatch.sites import families  # importing it registers them
from hfpatch.sites.columns import Columns
from hfpatch.sites.discovery import AttentionSite, base_model, find_sites, select_sites
from hfpatch.sites.family import Family, family_of, register_family, supported_model_types
from hfpatch.sites.layouts import TARGETS, Projection, concatenated, per_head, separate
from hfpatch.sites.modules import features, submodule, unwrapped

__all__ = [
    "TARGETS",
    "AttentionSite",
    "Columns",
    "Family",
    "Projection",
    "base_model",
    "concatenated",
    "families",
    "family_of",
    "features",
    "find_sites",
    "per_head",
    "register_family",
    "select_sites",
    "separate",
    "submodule",
    "supported_model_types",
    "unwrapped",
]
