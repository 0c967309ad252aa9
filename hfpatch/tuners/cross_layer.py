"""Values that the layers of one forward pass share, kept by thread and never on a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import HookedModule

CHECKPOINT = "_gradient_checkpointing_func"  # through which transformers calls a block


class Shared(dict[str, Any]):
    """The values that one adapter left in the layers of a forward pass, by name."""

    def __missing__(self, name: str) -> Any:
        """Refuse to read a name that no layer wrote.

        Raises:
            HfpatchError: always.
        """
        raise HfpatchError(f"site.shared[{name!r}]: no earlier layer left it in this forward pass")


@dataclass
class ForwardPass:
    """A running forward pass: the module whose call it is, and the values that layers left so far, by adapter."""

    owner: object
    shared: dict[str, Shared] = field(default_factory=dict)

    def values(self) -> dict[tuple[str, str], Any]:
        """Return all values by adapter and name."""
        return {(adapter, name): value for adapter, shared in self.shared.items() for name, value in shared.items()}


@dataclass(eq=False)
class Passes(threading.local):
    """The running passes of this thread, the innermost last."""

    stack: list[ForwardPass] = field(default_factory=list)


PASSES = Passes()


class SharingModule(HookedModule):
    """A module that may share tensors with those of other blocks, within one forward pass.

    A pass lasts as long as the call of the module that encloses all blocks. Every sharing module begins one, and all of
    them use the innermost. Threads, nested calls and failed calls do not meet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._around: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no child
        self._checkpointed: list[str] = []

    def share_across(self, around: nn.Module, path: str) -> None:
        """Register the hooks that begin and end a pass.

        Args:
            around: the module that encloses all blocks.
            path: path of this module's block, from there.
        """
        self._around = (around,)
        inside = around.get_submodule(path).named_modules(prefix=path)
        self._checkpointed = ["", *(name for name, module in inside if hasattr(module, "gradient_checkpointing"))]
        self._hooks.append(around.register_forward_pre_hook(self._begin_pass))
        self._hooks.append(around.register_forward_hook(_end_pass, always_call=True))

    def unhook(self) -> None:
        """Remove every hook, and restore the checkpoint functions."""
        super().unhook()
        for module in (around.get_submodule(path) for around in self._around for path in self._checkpointed):
            if isinstance(checkpoint := vars(module).get(CHECKPOINT), SharingCheckpoint):
                setattr(module, CHECKPOINT, checkpoint.function)

    def _begin_pass(self, around: nn.Module, args: tuple[Any, ...]) -> None:
        PASSES.stack.append(ForwardPass(around))
        for module in (around.get_submodule(path) for path in self._checkpointed if around.training):
            checkpoint = vars(module).get(CHECKPOINT)  # set whenever checkpointing is switched on
            if checkpoint is not None and not isinstance(checkpoint, SharingCheckpoint):
                setattr(module, CHECKPOINT, SharingCheckpoint(checkpoint))


def _end_pass(owner: object, *call: Any) -> None:
    """End the innermost pass of an owner, and the passes that interrupted calls left inside it."""
    for index in reversed(range(len(PASSES.stack))):
        if PASSES.stack[index].owner is owner:
            del PASSES.stack[index:]
            return


@dataclass(eq=False)
class SharingCheckpoint:
    """Gradient checkpointing that passes shared values into and out of a block, as its arguments and results.

    A recomputed block finds the values of the first time, and gradients go through them as through the hidden state, in
    both kinds of checkpointing.

    Args:
        function: the checkpoint function that transformers was given.
    """

    function: Callable[..., Any]

    def __call__(self, compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``compute(*args)``, checkpointed."""
        if not PASSES.stack:
            return self.function(compute, *args, **options)
        values = PASSES.stack[-1].values()
        names = tuple(values)
        new: tuple[tuple[str, str], ...]
        structure: TreeSpec

        def run(*inputs: Any) -> tuple[Any, ...]:
            nonlocal new, structure
            entering = dict(zip(names, inputs[len(args) :], strict=True))
            inside = ForwardPass(object())
            for (adapter, name), value in entering.items():
                inside.shared.setdefault(adapter, Shared())[name] = value
            PASSES.stack.append(inside)
            try:
                leaves, structure = tree_flatten(compute(*inputs[: len(args)]))
                made = {name: value for name, value in inside.values().items() if value is not entering.get(name)}
            finally:
                _end_pass(inside.owner)
            new = tuple(made)
            return *leaves, *made.values()

        results = self.function(run, *args, *values.values(), **options)
        count = len(results) - len(new)
        for (adapter, name), value in zip(new, results[count:], strict=True):
            PASSES.stack[-1].shared.setdefault(adapter, Shared())[name] = value
        return tree_unflatten(results[:count], structure)
