"""hfpatch: model surgery on the attention branch of Hugging Face causal language models.

Importing this package loads neither torch nor transformers: every public name is loaded when it is first used. PEFT
learns hfpatch's methods as soon as both packages are imported, in whichever order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.errors import HfpatchError as HfpatchError
from hfpatch.support.lazy import lazy_names
from hfpatch.support.version import __version__ as __version__
from hfpatch.surgery.peft_registration import register_when_peft_is_imported

if TYPE_CHECKING:
    from hfpatch.export import export_patch as export_patch
    from hfpatch.methods import CanonConfig as CanonConfig
    from hfpatch.methods import LoReFTConfig as LoReFTConfig
    from hfpatch.methods import NonlinearLoraConfig as NonlinearLoraConfig
    from hfpatch.methods import NonlinearQueryConfig as NonlinearQueryConfig
    from hfpatch.methods import OutputGateConfig as OutputGateConfig
    from hfpatch.methods import ParallelAdapterConfig as ParallelAdapterConfig
    from hfpatch.methods import PreProjectionConfig as PreProjectionConfig
    from hfpatch.methods import QueryTemperatureConfig as QueryTemperatureConfig
    from hfpatch.methods import ValueResidualConfig as ValueResidualConfig
    from hfpatch.nn.matmul import fast_matmul as fast_matmul
    from hfpatch.promises import check as check
    from hfpatch.results import load_results as load_results
    from hfpatch.sites import AttentionSite as AttentionSite
    from hfpatch.sites import Family as Family
    from hfpatch.sites import find_sites as find_sites
    from hfpatch.sites import register_family as register_family
    from hfpatch.surgery.bases import load_base as load_base
    from hfpatch.surgery.bases import load_tokenizer as load_tokenizer
    from hfpatch.surgery.budget import attention_modules as attention_modules
    from hfpatch.surgery.budget import count_added as count_added
    from hfpatch.surgery.budget import match_lora_rank as match_lora_rank
    from hfpatch.surgery.budget import sized as sized
    from hfpatch.surgery.fold import fold as fold
    from hfpatch.surgery.folder import load_patch as load_patch
    from hfpatch.surgery.folder import save_patch as save_patch
    from hfpatch.surgery.methods import build_method as build_method
    from hfpatch.surgery.patch import patch as patch
    from hfpatch.surgery.patch import patch_summary as patch_summary
    from hfpatch.surgery.patch import unpatch as unpatch
    from hfpatch.surgery.scale import scale_patch as scale_patch
    from hfpatch.tuners import MethodConfig as MethodConfig
    from hfpatch.tuners import MethodSite as MethodSite
    from hfpatch.tuners import method as method
    from hfpatch.tuners.hooks import Parts as Parts

_NAMES = {
    "export": ["export_patch"],
    "methods": [
        "CanonConfig",
        "LoReFTConfig",
        "NonlinearLoraConfig",
        "NonlinearQueryConfig",
        "OutputGateConfig",
        "ParallelAdapterConfig",
        "PreProjectionConfig",
        "QueryTemperatureConfig",
        "ValueResidualConfig",
    ],
    "nn.matmul": ["fast_matmul"],
    "promises": ["check"],
    "results": ["load_results"],
    "sites": ["AttentionSite", "Family", "find_sites", "register_family"],
    "surgery.bases": ["load_base", "load_tokenizer"],
    "surgery.budget": ["attention_modules", "count_added", "match_lora_rank", "sized"],
    "surgery.fold": ["fold"],
    "surgery.folder": ["load_patch", "save_patch"],
    "surgery.methods": ["build_method"],
    "surgery.patch": ["patch", "patch_summary", "unpatch"],
    "surgery.scale": ["scale_patch"],
    "tuners.config": ["MethodConfig"],
    "tuners.hooks": ["MethodSite", "Parts"],
    "tuners.registration": ["method"],
}

__all__ = sorted(["HfpatchError", "__version__", *(name for names in _NAMES.values() for name in names)])
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__


register_when_peft_is_imported()  # last: packages with methods of their own use the names above
