"""What the layers of one forward pass hand to each other, kept by thread and never on a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import HookedModule

_CHECKPOINT = "_gradient_checkpointing_func"  # through which transformers calls what a block computes


class Shared(dict[str, Any]):
    """What one adapter left in the layers of a forward pass, by the names that it chose."""

    def __missing__(self, name: str) -> Any:
        """Refuse to read what no layer left.

        Raises:
            HfpatchError: always.
        """
        raise HfpatchError(f"site.shared[{name!r}]: no earlier layer left it in this forward pass")


class ForwardPass:
    """A forward pass under way: the module whose call it is, and what the adapters left so far, by their names."""

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.shared: dict[str, Shared] = {}

    def left(self) -> dict[tuple[str, str], Any]:
        """Return all that was left, by adapter and name."""
        return {(adapter, name): each for adapter, shared in self.shared.items() for name, each in shared.items()}

    def leave(self, values: dict[tuple[str, str], Any]) -> None:
        """Leave values, by adapter and name."""
        for (adapter, name), value in values.items():
            self.shared.setdefault(adapter, Shared())[name] = value


class Passes(threading.local):
    """The passes under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[ForwardPass] = []

    def begin(self, owner: object) -> ForwardPass:
        """Begin a pass."""
        self.stack.append(ForwardPass(owner))
        return self.stack[-1]

    def end(self, owner: object) -> None:
        """End the innermost pass of an owner, and those that an interrupted call left inside it."""
        for index in reversed(range(len(self.stack))):
            if self.stack[index].owner is owner:
                del self.stack[index:]
                return


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
        self._checkpointed = ["", *(each for each, module in inside if hasattr(module, "gradient_checkpointing"))]
        self._hooks.append(around.register_forward_pre_hook(self._begin_pass, prepend=True))
        self._hooks.append(around.register_forward_hook(_end_pass, always_call=True))

    def unhook(self) -> None:
        """Remove every hook, and what acts in checkpointing."""
        super().unhook()
        for module in (around.get_submodule(path) for around in self._around for path in self._checkpointed):
            if isinstance(checkpoint := vars(module).get(_CHECKPOINT), SharingCheckpoint):
                setattr(module, _CHECKPOINT, checkpoint.function)

    def _begin_pass(self, around: nn.Module, args: tuple[Any, ...]) -> None:
        PASSES.begin(around)
        for module in (around.get_submodule(path) for path in self._checkpointed if around.training):
            checkpoint = vars(module).get(_CHECKPOINT)  # set whenever checkpointing is switched on
            if checkpoint is not None and not isinstance(checkpoint, SharingCheckpoint):
                setattr(module, _CHECKPOINT, SharingCheckpoint(checkpoint))


def _end_pass(around: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    PASSES.end(around)


class SharingCheckpoint:
    """Gradient checkpointing that passes what layers share into and out of a block, as its arguments and results.

    So a recomputed block finds what it found the first time, and gradients go through it as through the hidden state,
    in both kinds of checkpointing.

    Args:
        function: what transformers was given for it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``compute(*args)``, checkpointed."""
        if not PASSES.stack:
            return self.function(compute, *args, **options)
        found = PASSES.stack[-1].left()
        names = tuple(found)
        new: tuple[tuple[str, str], ...]
        structure: TreeSpec

        def run(*inputs: Any) -> tuple[Any, ...]:
            nonlocal new, structure
            given = dict(zip(names, inputs[len(args) :], strict=True))
            inside = PASSES.begin(object())
            try:
                inside.leave(given)
                leaves, structure = tree_flatten(compute(*inputs[: len(args)]))
                made = {name: each for name, each in inside.left().items() if each is not given.get(name)}
            finally:
                PASSES.end(inside.owner)
            new = tuple(made)
            return *leaves, *made.values()

        results = self.function(run, *args, *found.values(), **options)
        count = len(results) - len(new)
        PASSES.stack[-1].leave(dict(zip(new, results[count:], strict=True)))
        return tree_unflatten(results[:count], structure)
