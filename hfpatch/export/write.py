"""Writing a patched model as modelling file, configuration and weights, and comparing the loaded result with it."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper

from hfpatch.errors import HfpatchError, one_line
from hfpatch.export.parts import Description, Tensors, base_name, describe, exported_name, merge_others
from hfpatch.export.runtime import MADE
from hfpatch.promises.common import compared
from hfpatch.promises.inputs import example_inputs, logits
from hfpatch.sites.family import EXPORTED
from hfpatch.support.files import write_text
from hfpatch.support.generated import modelling_file
from hfpatch.tuners.adapters import adapter_state
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import PLACES
from hfpatch.tuners.layer import layers_by_site

_COUNT = itertools.count()
FILE = "modeling_hfpatch.py"
_CALLED = ("build", "acts_at", "takes_autocast", "steps_back", *PLACES)  # of a method, by the runtime
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
    # These read the source file of their class
    _can_set_attn_implementation = {stock}._can_set_attn_implementation
    _can_set_experts_implementation = {stock}._can_set_experts_implementation
'''


@dataclass(frozen=True)
class Export:
    """A written export.

    Attributes:
        directory: the folder.
        model_class: the class in its modelling file.
        added: how many parameters the patch adds; merged adapters add none.
        merged: the modules whose weights contain an adapter, because it cannot be a separate part.
    """

    directory: Path
    model_class: str
    added: int
    merged: list[str]


def write_model(model: Any, folder: Path) -> Export:
    """Write a patched model into a folder, and compare the logits of the loaded export with its own.

    They are equal bit for bit or, if adapters were merged into weights, up to rounding. Merged adapters stay in the
    model's weights.

    Raises:
        HfpatchError: if a part of the patch or the architecture cannot be exported.
    """
    inputs = example_inputs(model, [site for site, _ in layers_by_site(model)])
    model.requires_grad_(False)  # torch picks kernels by it
    expected = logits(realigned(model), inputs)
    merged = merge_others(model)
    description, tensors = describe(model)

    # The base's tensors by their names without adapters; copies in `modules_to_save` replace the original
    added = adapter_state(model)
    base = {base_name(name): value for name, value in model.state_dict(keep_vars=True).items() if name not in added}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and not module.disable_adapters:
            for adapter in (key for key in module.active_adapters if key in module.modules_to_save):
                for key, tensor in module.modules_to_save[adapter].state_dict(keep_vars=True).items():
                    base[f"{base_name(name)}.{key}"] = tensor
    base = {exported_name(name, description): tensor for name, tensor in base.items()}

    try:
        kind = _write(model, description, base, tensors, folder)
        loaded, report = kind.from_pretrained(str(folder), output_loading_info=True)
        lost = sorted({*report["missing_keys"], *report["unexpected_keys"], *map(str, report["mismatched_keys"])})
        if lost:
            raise _refused(model, f"transformers does not load {lost[0]} as it was saved")
        reloaded = logits(realigned(loaded).eval().requires_grad_(False), inputs)
    except (HfpatchError, OSError, MemoryError):
        raise
    except Exception as error:  # a method's code may raise any without hfpatch around it
        raise _refused(model, f"its modelling file fails with {one_line(error)}") from error
    same = torch.equal(reloaded, expected)
    if merged:
        ways = (lambda: logits(loaded, inputs)), (lambda: expected)
        same = compared(loaded, *ways).is_rounding
    if not same:
        why = "differs from the patched model; nothing was written"
        raise HfpatchError(f"the export {why}" + (f" (merged: {merged[0]}, ...)" if merged else ""))
    return Export(folder, kind.__name__, sum(tensor.numel() for tensor in tensors.values()), merged)


def realigned(model: Any) -> Any:
    """Copy every weight to aligned memory: some kernels compute other bits at the addresses of a file's tensors."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def imported(folder: Path) -> ModuleType:
    """Import the modelling file of an export under a unique name."""
    name, file = f"hfpatch_export_{next(_COUNT)}", str(folder / FILE)
    module = sys.modules[name] = ModuleType(name)  # dataclasses look it up there
    module.__file__ = file
    exec(compile((folder / FILE).read_bytes(), file, "exec"), vars(module))  # a loader would leave compiled code there
    return module


def _write(model: Any, description: Description, base: Tensors, parts: Tensors, folder: Path) -> Any:
    """Write modelling file, configuration and weights; return the class of the model."""
    fp32 = any(tensor.dtype == torch.float32 for tensor in parts.values())
    integers = sorted({name.partition(".parts.")[2] for name, value in parts.items() if not value.is_floating_point()})
    layers = [layer for _, layers in layers_by_site(model) for layer in layers if layer.working_adapters()]
    methods = list(dict.fromkeys(layer.method for layer in layers))
    write_text(folder / FILE, modelling_source(model, methods, keep_fp32=fp32, integers=integers))
    module, home = imported(folder), FILE.removesuffix(".py")
    kind, config_kind = (getattr(module, f"Hfpatch{type(stock).__name__}") for stock in (model, model.config))
    model.config.save_pretrained(str(folder))  # read again as transformers keeps it
    values, _ = config_kind.get_config_dict(str(folder))
    settings = config_kind.from_dict({**values, "model_type": config_kind.model_type, "hfpatch": description})
    ties = getattr(model, "all_tied_weights_keys", {}).items()
    pairs = [[base[exported_name(name, description)] for name in tie] for tie in ties]
    if not all(one is other or torch.equal(one, other) for one, other in pairs):  # one of two was merged into
        settings.tie_word_embeddings = settings.get_text_config(decoder=True).tie_word_embeddings = False
    settings.auto_map = {"AutoConfig": f"{home}.{config_kind.__name__}"}
    settings.auto_map["AutoModelForCausalLM"] = f"{home}.{kind.__name__}"
    if has_tower(model):
        settings.auto_map["AutoModel"] = f"{home}.Hfpatch{type(model.base_model).__name__}"
    with ExitStack() as on:
        for context in kind.get_init_context(model.dtype, False, False, None):  # as from_pretrained builds it
            on.enter_context(context)
        copy: Any = kind(settings)
    names, tensors = copy.state_dict().keys(), {name: value.detach() for name, value in (base | parts).items()}
    if names != tensors.keys():
        raise _refused(model, f"tensor {min(names ^ tensors.keys())!r} has no counterpart")
    copy.load_state_dict(tensors, assign=True)  # each in its own dtype
    copy.tie_weights()
    copy.generation_config = getattr(model, "generation_config", None)
    copy.save_pretrained(str(folder))
    return kind


def _refused(model: Any, why: str) -> HfpatchError:
    return HfpatchError(f"{type(model).__name__} cannot be exported: {why}; nothing was written")


def modelling_source(
    model: Any, methods: Sequence[type[MethodConfig]], *, keep_fp32: bool, integers: Sequence[str] = ()
) -> str:
    """Return the modelling file: licence and source, the runtime, and subclasses of the stock classes.

    Args:
        model: the base; its class and that of its part without a head, if any, get a subclass each.
        methods: the methods of the patch, whose classes are copied.
        keep_fp32: keep the patch in fp32 for every dtype of the model.
        integers: ends of the names of the patch's integer tensors, which transformers would convert to floats.

    Raises:
        HfpatchError: if the source of a method cannot be copied.
    """
    stock, config = type(model), type(model.config)
    kinds = {"": stock} | ({model.base_model_prefix: type(model.base_model)} if has_tower(model) else {})
    names = {"config": config.__name__}
    table = "".join(f"    {method.spec.name}={method.__name__},\n" for method in methods)
    made = f"METHODS.update(\n{table})\n\n\n" if methods else ""
    made += _CONFIG.format(**names, prefix=EXPORTED, model_type=config.model_type)
    other = f"(?!.+[.]({'|'.join(map(re.escape, integers))})$)" if integers else ""
    fp32 = [f"{verb}{other}" for verb in MADE] if keep_fp32 else []
    for prefix, kind in kinds.items():
        kept = sorted({*(kind._keep_in_fp32_modules_strict or []), *fp32})
        where = f", those below ``{prefix}``" if prefix else ""
        listed = f"[\n        {', '.join(map(repr, kept))}\n    ]" if kept else None
        made += _MODEL.format(**names, stock=kind.__name__, prefix=prefix, fp32=listed, where=where)
    about = _ABOUT.format(stock=stock.__name__)
    header: dict[str, Any] = {"stock": (*kinds.values(), config), "methods": methods, "called": _CALLED}
    try:
        return modelling_file(about, "hfpatch.export.runtime", "Hooked", footer=made, **header)
    except ValueError as error:
        raise HfpatchError(
            f"{stock.__name__} cannot be exported with this patch: {error}; nothing was written"
        ) from error


def has_tower(model: Any) -> bool:
    """Return whether a model contains a model without a head, which ``AutoModel`` loads."""
    return model.base_model is not model and type(model.base_model).config_class is type(model.config)
