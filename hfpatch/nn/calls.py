"""Values that modules pass to each other within one forward call, kept per thread and never on a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError


@dataclass(eq=False)
class Calls(threading.local):
    """Per-thread state of running forward calls: tensors by owner and name, and replicas by their original module."""

    values: dict[Any, dict[str, Any]] = field(default_factory=dict)
    replicas: dict[nn.Module, nn.Module] = field(default_factory=dict)

    def keep(self, owner: Any, name: str, value: Any) -> None:
        """Keep a value until it is taken or its owner's call ends."""
        self.values.setdefault(owner, {})[name] = value

    def look(self, owner: Any, name: str) -> Any:
        """Return a value and keep it; None where there is none."""
        return self.values.get(owner, {}).get(name)

    def take(self, owner: Any, name: str) -> Any:
        """Return a value and forget it; None where there is none."""
        kept = self.values.get(owner, {})
        value = kept.pop(name, None)
        if not kept:
            self.values.pop(owner, None)
        return value


CALLS = Calls()


class HookedModule(nn.Module):
    """A module that acts through hooks on other modules of its block.

    Values that one hook leaves for a later one are kept in :data:`CALLS` and cleared when the block's forward ends,
    also by an exception: threads, recomputation and failed calls do not meet. A replica of ``nn.DataParallel`` shares
    the hooks of its original; the block that is called then shows which replica of this module has to act. Hooks are
    kept as bound methods, so that a deep copy or an unpickled model acts on its own modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._path = ""

    def hook_into(self, block: nn.Module, path: str, register: Callable[[], None]) -> None:
        """Register hooks.

        Args:
            block: the module whose call encloses every call of the hooked modules.
            path: path of this module, from the block.
            register: registers the hooks by :meth:`before` and :meth:`after`.
        """
        self._path = path
        self._hooks.append(block.register_forward_pre_hook(self._begin))
        register()
        self._hooks.append(block.register_forward_hook(self._end, always_call=True))

    def before(self, module: nn.Module, hook: Callable[..., Any], *options: Any, first: bool = False) -> None:
        """Call ``hook(self, *options, module, args, kwargs)`` before every forward; ``hook`` is a plain function.

        ``first``: before the hooks that are there already.
        """
        acting = partial(self._act, hook, len(options) + 3, *options)
        self._hooks.append(handle := module.register_forward_pre_hook(acting, with_kwargs=True))
        hooks = module._forward_pre_hooks
        for other in [key for key in hooks if first and key != handle.id]:  # torch 2.11 does not compile `prepend`
            hooks[other] = hooks.pop(other)

    def after(self, module: nn.Module, hook: Callable[..., Any], *options: Any, always: bool = False) -> None:
        """Call ``hook(self, *options, module, args, kwargs, output)`` after every forward.

        ``always``: also one that fails.
        """
        acting = partial(self._act, hook, len(options) + 4, *options)
        self._hooks.append(module.register_forward_hook(acting, with_kwargs=True, always_call=always))

    def unhook(self) -> None:
        """Remove every hook."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _act(self, hook: Callable[..., Any], count: int, *signals: Any) -> Any:
        if len(signals) != count:  # torch.ao.quantization registers hooks again without `with_kwargs`
            raise quantised_later()
        return hook(CALLS.replicas.get(self, self), *signals)

    def _begin(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if getattr(block, "_is_replica", False):
            CALLS.replicas[self] = block.get_submodule(self._path)

    def _end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        CALLS.values.pop(CALLS.replicas.pop(self, self), None)


def quantised_later() -> HfpatchError:
    """Return the refusal of a model whose linear layers were replaced after it was patched."""
    return HfpatchError(
        "torch's quantize_dynamic has replaced linear layers of a patched model, and with them parts of the patch; "
        "quantise the base first and patch it then, or quantise what `hfpatch export` writes"
    )


class SharedLinear(nn.Linear):
    """A linear layer that takes its product from where it was computed with others, if that was for the same x.

    There ``CALLS.keep(layer, "product", (x, product))`` keeps it for the next call of the layer in this thread.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map x ``(batch, seq, in)`` to ``(batch, seq, out)``."""
        kept = CALLS.take(self, "product")
        if kept is None or kept[0] is not input:
            return super().forward(input)
        product: Tensor = kept[1]
        return product


def shared(linear: nn.Linear) -> SharedLinear:
    """Return a linear layer of the same parameters that can take its product from elsewhere."""
    made = SharedLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made.train(linear.training)


def shared_inside(module: nn.Module) -> SharedLinear | None:
    """Return the module itself, or the one inside an adapter; None if that is of another class."""
    return next((inner for inner in module.modules() if isinstance(inner, SharedLinear)), None)
