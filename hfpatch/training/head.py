"""The loss inside a model's forward pass, so that wrapped models (DDP, FSDP) compute it where their weights are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from hfpatch.sites.lm_head import find_lm_head
from hfpatch.sites.modules import base_model
from hfpatch.support.modes import replaced
from hfpatch.training.loss import loss_from_hidden, loss_from_logits

_ACTIVE = "_hfpatch_loss_in_forward"


@contextmanager
def loss_in_forward(model: nn.Module, *, by_token: bool = False) -> Iterator[None]:
    """Let ``model(..., labels=labels)`` return the summed loss as ``.loss`` and no logits, for as long as this lasts.

    Where the head is a plain linear layer whose output becomes the logits by a scale and a soft cap at most (see
    :func:`hfpatch.sites.lm_head.find_lm_head`), full logits are never in memory; any other model computes its own
    logits first. Without ``labels`` the model is as it was. With ``by_token`` ``.loss`` is each position's loss
    (batch, seq) instead, without a gradient.
    """
    causal: Any = base_model(model)
    if hasattr(causal, _ACTIVE):  # within another such block
        yield
        return
    lm_head: Any = find_lm_head(causal)
    head: Any = causal.get_output_embeddings()
    from_hidden = lm_head is not None and is_plain(head)
    stock: Any = causal.forward
    stock_head: Any = getattr(head, "forward", None)

    def with_loss(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return stock(*args, **kwargs)
        if from_hidden:
            loss = head(lm_head.body(*args, **kwargs)[0], labels)  # a module, so that FSDP gathers it
        else:
            loss = loss_from_logits(stock(*args, **kwargs).logits, labels, by_token=by_token)
        return CausalLMOutput(loss=loss)

    def head_with_loss(hidden: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return stock_head(hidden)
        return loss_from_hidden(hidden, head.weight, head.bias, labels, tail=lm_head.tail, by_token=by_token)

    with_head_loss = replaced(head, forward=head_with_loss) if from_hidden else nullcontext()
    with replaced(causal, forward=with_loss, **{_ACTIVE: True}), with_head_loss:
        yield


def is_plain(head: nn.Module) -> bool:
    """Return whether a head is a matrix and nothing else: its hooks, accelerate's too, would act on the loss."""
    hooked = head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook")
    return type(head) is nn.Linear and not hooked
