"""hfpatch: model surgery on the attention branch of Hugging Face causal language models.

Importing this package loads neither torch nor transformers: every public name is loaded when it is first used. PEFT
learns hfpatch's methods as soon as both packages are imported, in whichever order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hfpatch.errors import HfpatchError
from hfpatch.with_peft import register_when_peft_is_imported

if TYPE_CHECKING:
    from hfpatch.budget import match_lora_rank
    from hfpatch.patch_files import load_patch, save_patch
    from hfpatch.patching import patch, patch_summary, unpatch
    from hfpatch.promises import check
    from hfpatch.sites import AttentionSite, Family, find_sites, register_family
    from hfpatch.tuners import NonlinearQueryConfig, PreProjectionConfig

__version__ = "0.1.0"

_HOMES = {
    "AttentionSite": "hfpatch.sites",
    "Family": "hfpatch.sites",
    "NonlinearQueryConfig": "hfpatch.tuners",
    "PreProjectionConfig": "hfpatch.tuners",
    "check": "hfpatch.promises",
    "find_sites": "hfpatch.sites",
    "load_patch": "hfpatch.patch_files",
    "match_lora_rank": "hfpatch.budget",
    "patch": "hfpatch.patching",
    "patch_summary": "hfpatch.patching",
    "register_family": "hfpatch.sites",
    "save_patch": "hfpatch.patch_files",
    "unpatch": "hfpatch.patching",
}

__all__ = [
    "AttentionSite",
    "Family",
    "HfpatchError",
    "NonlinearQueryConfig",
    "PreProjectionConfig",
    "__version__",
    "check",
    "find_sites",
    "load_patch",
    "match_lora_rank",
    "patch",
    "patch_summary",
    "register_family",
    "save_patch",
    "unpatch",
]

register_when_peft_is_imported()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hfpatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
