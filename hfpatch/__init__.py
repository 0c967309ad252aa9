"""hfpatch: model surgery on the attention branch of Hugging Face causal language models.

Importing this package loads neither torch nor transformers: every public name is loaded when it is first used. PEFT
learns hfpatch's methods as soon as both packages are imported, in whichever order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.errors import HfpatchError
from hfpatch.support.lazy import lazy_names
from hfpatch.support.version import __version__
from hfpatch.surgery.peft_registration import register_when_peft_is_imported

if TYPE_CHECKING:
    from hfpatch.export import export_patch
    from hfpatch.methods import (
        CanonConfig,
        LoReFTConfig,
        NonlinearLoraConfig,
        NonlinearQueryConfig,
        OutputGateConfig,
        ParallelAdapterConfig,
        PreProjectionConfig,
        QueryTemperatureConfig,
        ValueResidualConfig,
    )
    from hfpatch.nn.matmul import fast_matmul
    from hfpatch.promises import check
    from hfpatch.results import load_results
    from hfpatch.sites import AttentionSite, Family, find_sites, register_family
    from hfpatch.surgery.bases import load_base, load_tokenizer
    from hfpatch.surgery.budget import attention_modules, count_added, match_lora_rank, sized
    from hfpatch.surgery.fold import fold
    from hfpatch.surgery.folder import load_patch, save_patch
    from hfpatch.surgery.methods import build_method
    from hfpatch.surgery.patch import patch, patch_summary, unpatch
    from hfpatch.surgery.scale import scale_patch
    from hfpatch.tuners import MethodConfig, MethodSite, method
    from hfpatch.tuners.hooks import Parts

_HOMES = {
    "AttentionSite": "sites",
    "CanonConfig": "methods",
    "Family": "sites",
    "LoReFTConfig": "methods",
    "MethodConfig": "tuners.config",
    "MethodSite": "tuners.hooks",
    "NonlinearLoraConfig": "methods",
    "NonlinearQueryConfig": "methods",
    "OutputGateConfig": "methods",
    "ParallelAdapterConfig": "methods",
    "Parts": "tuners.hooks",
    "PreProjectionConfig": "methods",
    "QueryTemperatureConfig": "methods",
    "ValueResidualConfig": "methods",
    "attention_modules": "surgery.budget",
    "build_method": "surgery.methods",
    "check": "promises",
    "count_added": "surgery.budget",
    "export_patch": "export",
    "fast_matmul": "nn.matmul",
    "find_sites": "sites",
    "fold": "surgery.fold",
    "load_base": "surgery.bases",
    "load_patch": "surgery.folder",
    "load_results": "results",
    "load_tokenizer": "surgery.bases",
    "match_lora_rank": "surgery.budget",
    "method": "tuners.registration",
    "patch": "surgery.patch",
    "patch_summary": "surgery.patch",
    "register_family": "sites",
    "save_patch": "surgery.folder",
    "scale_patch": "surgery.scale",
    "sized": "surgery.budget",
    "unpatch": "surgery.patch",
}

__all__ = [
    "AttentionSite",
    "CanonConfig",
    "Family",
    "HfpatchError",
    "LoReFTConfig",
    "MethodConfig",
    "MethodSite",
    "NonlinearLoraConfig",
    "NonlinearQueryConfig",
    "OutputGateConfig",
    "ParallelAdapterConfig",
    "Parts",
    "PreProjectionConfig",
    "QueryTemperatureConfig",
    "ValueResidualConfig",
    "__version__",
    "attention_modules",
    "build_method",
    "check",
    "count_added",
    "export_patch",
    "fast_matmul",
    "find_sites",
    "fold",
    "load_base",
    "load_patch",
    "load_results",
    "load_tokenizer",
    "match_lora_rank",
    "method",
    "patch",
    "patch_summary",
    "register_family",
    "save_patch",
    "scale_patch",
    "sized",
    "unpatch",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__


register_when_peft_is_imported()  # last: packages with methods of their own use the names above
