"""A patch as modules around those of a stock model, from the functions of :mod:`hfpatch.nn`.

:mod:`hfpatch.export.write` copies :class:`Hooked`, with all that it uses of hfpatch, into every exported folder. x is
a module's input, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import CALLS, HookedModule
from hfpatch.sites.family import NO_WEIGHTS
from hfpatch.tuners.hooks import PLACES, ActingModule, MethodSite, Modules, scaled


class Matrix(nn.Module):
    """A linear map that quantisers and adapters for linear layers do not replace."""

    onednn: Any = None  # see use_onednn

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        fast = self.onednn is not None and x.device.type == "cpu" and x.dtype == torch.float32
        result: Tensor = (self.onednn if fast else F.linear)(x, self.weight, self.bias)
        return result


def use_onednn(model: nn.Module) -> None:
    """Compute the larger fp32 products of a model's parts with oneDNN where they are on the CPU, also in compiled code.

    vLLM does so with its own layers. torch takes MKL, which needs twice the time on AMD processors. The operator
    ``hfpatch::linear`` is there because compilers do not take oneDNN's with weights that are no constants.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return
    if not hasattr(torch.ops.hfpatch, "linear"):
        torch.library.define("hfpatch::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
        product = partial(torch.ops.mkldnn._linear_pointwise, attr="none", scalars=[], algorithm="")
        torch.library.impl("hfpatch::linear", "cpu", product)
        torch.library.register_fake("hfpatch::linear", F.linear)
    for part in model.modules():
        if isinstance(part, Matrix) and part.weight.numel() >= 1 << 14:
            part.onednn = torch.ops.hfpatch.linear


class Around(nn.Module):
    """A module of the base, ``base``, in a place where a part acts.

    Tools replace the modules of the base: quantisers and servers every linear layer, servers many norms. Parts
    that act on this module stay. It shows the tensors and sizes of ``base`` as its own.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module of the base."""
        return self.base(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a module or parameter of this module, or a tensor or plain value of ``base``; no objects or methods.

        Servers call methods of their own linear layers, such as ``quant_method``, once for each.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = None if name.startswith("_") else getattr(super().__getattr__("base"), name, None)
            if not isinstance(value, (Tensor, int, float, str)):
                raise
            return value


class Method:
    """The options of a method, its modules and its actions at each place; subclasses follow below."""

    def __init__(self, **options: Any) -> None:
        kinds = type(self).__annotations__
        for name, value in options.items():  # JSON has no tuples and no sets
            hint = kinds.get(name, "") if isinstance(value, list) else ""
            setattr(self, name, tuple(value) if "tuple" in hint else set(value) if "set" in hint else value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Compute values that depend only on the options."""

    def acts_at(self) -> tuple[str, ...]:
        """Return the places where the method acts."""
        return tuple(place for place in PLACES if hasattr(self, place))

    def takes_autocast(self) -> bool:
        """Return whether the method takes tensors in autocast's dtype and still rounds its result only once."""
        return False

    def steps_back(self) -> int:
        """Return how many earlier positions the method reads."""
        return 0


METHODS: dict[str, Any] = {}


class MethodParts(ActingModule):
    """The parts of one method at one site: those of each adapter, which act one after the other."""

    def __init__(
        self,
        method: str,
        sites: list[dict[str, Any]],
        adapters: list[dict[str, Any]],
        factors: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.factors = factors or [1.0] * len(adapters)
        self.sites = [MethodSite.read(site) for site in sites]
        self.site = self.sites[0]  # equal for all adapters
        self.methods = [METHODS[method](**options) for options in adapters]
        self.parts = nn.ModuleList(config.build(site, 0) for config, site in zip(self.methods, self.sites, strict=True))
        for module in list(self.parts.modules()):
            module._non_persistent_buffers_set.clear()  # a file has the values of all
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):  # and no subclass that computes something else
                    setattr(module, name, Matrix(child.in_features, child.out_features, child.bias is not None))

    def acting(self, place: str) -> Iterator[tuple[Any, Any, MethodSite]]:
        """Yield the methods that act at a place, with their parts and the site."""
        for index, (method, parts, site) in enumerate(zip(self.methods, self.parts, self.sites, strict=True)):
            if place in method.acts_at():
                in_call = self.in_call(site, method, str(index), place) if self.reads_rows else site
                yield scaled(method, self.factors[index]), parts, in_call

    def reads_earlier_positions(self) -> bool:
        """Return whether a method reads earlier positions of the row."""
        return any(method.steps_back() for method in self.methods)


class Lora(HookedModule):
    """Low-rank terms of a linear projection.

    .. math::
        y = x W + scaling · (x A) B                    A: d -> rank,  B: rank -> out

    x is the projection's input before a method changes it. Source: arXiv 2106.09685.
    """

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.a = nn.ModuleList(Matrix(part["inputs"], part["rank"]) for part in parts)
        self.b = nn.ModuleList(Matrix(part["rank"], part["outputs"], part["bias"]) for part in parts)
        self.scaling = [part["scaling"] for part in parts]

    def act_on(self, modules: Modules) -> None:
        """Register the hooks of the projection ``linear``."""
        self.before(modules["linear"][0], Lora.keep_input, first=True)  # as it is before a method changes it
        self.after(modules["linear"][0], Lora.change)

    def keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the projection's input."""
        CALLS.keep(self, "x", args[0])

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Add every part to the projection's output."""
        x, result = CALLS.take(self, "x"), output
        for a, b, scaling in zip(self.a, self.b, self.scaling, strict=True):
            result = result + b(a(x.to(next(a.parameters()).dtype))) * scaling
        return result.to(output.dtype)


class Rows(HookedModule):
    """Gives an output projection its rows of ``width`` where a server's attention returns them with the heads joined.

    Attention modules that join the last two axes themselves (GPT-2's) then join the sequence: (batch, seq·width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def act_on(self, modules: Modules) -> None:
        """Register the hook of the output projection, ``projection``."""
        self.before(modules["projection"][0], Rows.split, first=True)

    def split(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with ``(batch, seq, width)`` for ``(batch, seq·width)``."""
        x = args[0]
        return None if x.shape[-1] == self.width else ((x.reshape(*x.shape[:-1], -1, self.width), *args[1:]), kwargs)


MADE: dict[str, Callable[..., HookedModule]] = {
    "hfpatch_method": MethodParts,
    "hfpatch_lora": Lora,
    "hfpatch_rows": Rows,
}


class HookedConfig:
    """A configuration of a stock model with the description of a patch, ``hfpatch``.

    In a file it has the model type of the base, by which transformers finds the tokenizer without this code, and names
    weights that are none, so that the base's own class refuses to load without the patch.
    """

    model_type = ""
    hfpatch_base_type = ""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a file's values, with the model type of this class and without those weights."""
        stock: Any = super()
        values, others = stock.get_config_dict(*args, **kwargs)
        values = {key: value for key, value in values.items() if key != "transformers_weights"}
        return {**values, "model_type": cls.model_type}, others

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the file."""
        this: Any = self
        values = json.loads(this.to_json_string(use_diff=use_diff))
        values |= {"model_type": self.hfpatch_base_type, "transformers_weights": NO_WEIGHTS}
        Path(json_file_path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class Hooked:
    """A model with the parts of a patch: every item of ``config.hfpatch`` is a child of the module ``host``.

    An item acts on the modules ``at``. The modules ``around`` are put into an :class:`Around`.
    """

    config_class: Any = HookedConfig
    hfpatch_prefix = ""  # of the items' paths, where the model is a part of the one that was patched

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of the class beside it
        model: Any = self
        start = f"{self.hfpatch_prefix}." if self.hfpatch_prefix else ""

        def module(path: str) -> nn.Module:
            submodule: nn.Module = model.get_submodule(f"{path}.".removeprefix(start).rstrip("."))
            return submodule

        for item in config.hfpatch:
            around = [f"{item['around_blocks']}."] if item.get("around_blocks") else []
            paths = [item["host"], item["block"], *around, *(path for paths in item["at"].values() for path in paths)]
            if not all(path.startswith(start) for path in paths):
                continue  # it is not in this model
            if config._attn_implementation == "vllm" and "around_blocks" in item:
                raise HfpatchError(
                    f"{item['options']['method']} passes tensors from layer to layer in one call of the model, which "
                    "vLLM does not make; generate with transformers"
                )

            # Add the part and let it act
            for path in item["around"]:
                if not isinstance(module(path), Around):
                    parent, _, name = path.rpartition(".")
                    setattr(module(parent), name, Around(module(path)))
            part: Any = MADE[item["kind"]](**item["options"])
            module(item["host"]).add_module(item["name"], part)
            modules = {role: [module(path) for path in role_paths] for role, role_paths in item["at"].items()}
            inside = f"{item['host']}.{item['name']}".removeprefix(item["block"]).lstrip(".")
            part.hook_into(module(item["block"]), inside, partial(part.act_on, modules))
            if "around_blocks" in item:
                blocks = item["around_blocks"]
                part.share_across(module(blocks), item["block"].removeprefix(blocks).lstrip("."))

        # Tied weights have other names now
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
        if config._attn_implementation == "vllm":
            use_onednn(model)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Tell transformers to initialise weights and buffers as in the stock classes."""
        return False
