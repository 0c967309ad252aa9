"""The self-contained modelling file of an export."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.export.runtime import MADE
from hfpatch.sites.family import EXPORTED
from hfpatch.support.generated import modelling_file
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import PLACES

FILE = "modeling_hfpatch.py"
_CALLED = ("build", "acts_at", "steps_back", *PLACES)  # of a method, by the runtime
_ABOUT = """\
a {stock} with a patch in its attention branches, in plain torch. Methods: arXiv 2604.10791, 2603.13381, 2106.09685.
The licence below covers this file. The weights of the base keep their own licence: see README.md."""
_CONFIG = '''\
class Hfpatch{config}(HookedConfig, {config}):
    """Configuration of the base with the description of its patch, ``hfpatch``."""

    model_type = "{prefix}{model_type}"
    hfpatch_base_type = "{model_type}"
'''
_MODEL = '''

class Hfpatch{stock}(Hooked, {stock}):
    """{stock} with the parts that ``config.hfpatch`` lists{where}."""

    config_class = Hfpatch{config}
    _keep_in_fp32_modules_strict = {fp32}
    _keys_to_ignore_on_load_unexpected = None  # the file has all tensors; vLLM skips those named here
    hfpatch_prefix = "{prefix}"
'''


def patched_name(kind: type) -> str:
    """Return the name of the generated subclass of a stock class."""
    return f"Hfpatch{kind.__name__}"


def modelling_source(
    model: Any, methods: Sequence[type[MethodConfig]], *, keep_fp32: bool, integers: Sequence[str] = ()
) -> str:
    """Return the file: licence and source, the runtime, and subclasses of the stock classes.

    The model type is the export's own, and its configuration keeps it from being loaded without its patch.

    Args:
        model: the base; its class and that of its part without a head, where it has one, get a subclass each.
        methods: the methods of the patch, whose classes are copied.
        keep_fp32: keep the patch in fp32 for every dtype of the model.
        integers: ends of the names of the patch's tensors that are no floats, which transformers would make such.

    Raises:
        HfpatchError: if the source of a method cannot be copied.
    """
    stock, config = type(model), type(model.config)
    kinds = {"": stock} | ({model.base_model_prefix: type(model.base_model)} if has_tower(model) else {})
    names = {"config": config.__name__}
    table = "".join(f"    {each.spec.name}={each.__name__},\n" for each in methods)
    made = f"METHODS.update(\n{table})\n\n\n" if methods else ""
    made += _CONFIG.format(**names, prefix=EXPORTED, model_type=config.model_type)
    other = f"(?!.+[.]({'|'.join(map(re.escape, integers))})$)" if integers else ""
    fp32 = [f"{each}{other}" for each in MADE] if keep_fp32 else []
    for prefix, kind in kinds.items():
        kept = sorted({*(kind._keep_in_fp32_modules_strict or []), *fp32})
        where = f", those below ``{prefix}``" if prefix else ""
        listed = f"[\n        {', '.join(map(repr, kept))}\n    ]" if kept else None
        made += _MODEL.format(**names, stock=kind.__name__, prefix=prefix, fp32=listed, where=where)
    about = _ABOUT.format(stock=stock.__name__)
    given: dict[str, Any] = {"stock": (*kinds.values(), config), "methods": methods, "called": _CALLED}
    try:
        return modelling_file(about, "hfpatch.export.runtime", "Hooked", footer=made, **given)
    except ValueError as error:
        raise HfpatchError(
            f"{stock.__name__} cannot be exported with this patch: {error}; nothing was written"
        ) from error


def has_tower(model: Any) -> bool:
    """Return whether a model holds its layers in a model without a head, which ``AutoModel`` loads."""
    return model.base_model is not model and type(model.base_model).config_class is type(model.config)
