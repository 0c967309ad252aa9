"""The loss inside a model's forward pass, so that wrapped models (DDP, FSDP) compute it where their weights are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hfpatch.training.loss import Tail, loss_from_hidden, loss_from_logits

_PROBE_TOKENS = 5
_PROBE_RANGE = 60.0
_ACTIVE = "_hfpatch_loss_in_forward"


@contextmanager
def loss_in_forward(model: nn.Module) -> Iterator[None]:
    """Let ``model(..., labels=labels)`` return the summed loss as ``.loss`` and no logits, for as long as this lasts.

    Where the head is a plain linear layer whose output becomes the logits by a scale and a soft cap at most (which is
    tried out, not assumed), full logits are never in memory; any other model computes its own logits first. Without
    ``labels`` the model is as it was.

    Args:
        model: a causal LM, or a PEFT model around one.
    """
    causal = _causal(model)
    if hasattr(causal, _ACTIVE):  # within another such block
        yield
        return
    tail = find_tail(causal)
    stock, head = causal.forward, causal.get_output_embeddings()

    def from_logits(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = stock(*args, **kwargs)
        return outputs if labels is None else CausalLMOutput(loss=loss_from_logits(outputs.logits, labels))

    def from_hidden(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return stock(*args, **kwargs)
        hidden = _body(causal)(*args, **kwargs)[0]
        return CausalLMOutput(loss=head(hidden, labels))

    setattr(causal, _ACTIVE, True)
    try:
        with _replaced_forward(causal, from_logits if tail is None else from_hidden), _head_with_loss(head, tail):
            yield
    finally:
        delattr(causal, _ACTIVE)


@torch.no_grad()
def find_tail(model: PreTrainedModel) -> Tail | None:
    """Find out what a model does between its head and its logits; None where that is more than a scale and a cap.

    The stock forward pass runs once on five tokens with a head that returns known values: the logits show what became
    of them, and the head's input must be what the model's body returns.
    """
    head, body = model.get_output_embeddings(), _body(model)
    if type(head) is not nn.Linear or body is model:
        return None
    vocabulary, device = head.out_features, head.weight.device
    ids = torch.arange(_PROBE_TOKENS, device=device)[None] % vocabulary
    probe = torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, vocabulary, device=device).to(head.weight.dtype)
    seen: list[Tensor] = []

    def remember(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return probe.expand(*hidden.shape[:-1], vocabulary)

    training = model.training
    model.eval()
    try:
        with _replaced_forward(head, remember):
            logits = model(input_ids=ids, use_cache=False).logits
        hidden = body(input_ids=ids, use_cache=False)[0]
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    finally:
        model.train(training)
    if len(seen) != 1 or logits.shape[-1] != vocabulary or not torch.allclose(seen[0].float(), hidden.float()):
        return None
    probe, logits = probe.float(), logits[0, -1].float()
    exact = (tail for tail in _declared_tails(model) if torch.allclose(tail(probe), logits, rtol=1e-2, atol=1e-3))
    return next(exact, None)


def _declared_tails(model: PreTrainedModel) -> Iterator[Tail]:
    """Yield the tails that a model's configuration may mean; which one it is, if any, only a trial shows."""
    config = model.config.get_text_config()
    cap, scales = getattr(config, "final_logit_softcapping", None), [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value > 0:
            scales += [float(value), 1 / value]
    for scale in scales:
        yield Tail(scale=scale)
        if cap:
            yield Tail(scale=scale, cap=float(cap))


def _causal(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _body(model: Any) -> Any:
    return getattr(model, model.base_model_prefix, model)


@contextmanager
def _head_with_loss(head: Any, tail: Tail | None) -> Iterator[None]:
    """Let ``head(hidden, labels)`` return the loss; called as a module, so that FSDP gathers its weight."""
    if tail is None:
        yield
        return
    stock = head.forward

    def forward(hidden: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return stock(hidden)
        return loss_from_hidden(hidden, head.weight, head.bias, labels, tail=tail)

    with _replaced_forward(head, forward):
        yield


@contextmanager
def _replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
