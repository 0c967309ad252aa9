"""The loss inside the forward pass, on models whose heads do more than a matrix product too."""

from functools import partial

import pytest
import torch
from families import CASES, frozen, logits_of, make_model, make_tokens
from peft import LoraConfig, get_peft_model
from sites.test_lm_head import odd
from torch import nn
from training_blocks import made

from hfpatch import PreProjectionConfig, patch
from hfpatch.training import head
from hfpatch.training.head import loss_in_forward
from hfpatch.training.loop import switch_checkpointing


def reference(model, tokens, labels):
    """The sum of -log softmax of the model's own logits, one token at a time."""
    scores = torch.log_softmax(logits_of(model, tokens).double(), dim=-1)
    wanted = [(b, t) for b in range(labels.shape[0]) for t in range(labels.shape[1] - 1) if labels[b, t + 1] != -100]
    return -sum(scores[b, t, labels[b, t + 1]] for b, t in wanted)


def some_labels(tokens):
    labels = tokens.clone()
    labels[0, :4] = -100
    return labels


MODELS = {
    **{case: partial(make_model, case) for case in CASES},
    "granite": partial(made, "granite", logits_scaling=8.0),
    "hyperclovax": partial(made, "hyperclovax", logits_scaling=0.2),  # a factor by the key of Granite's divisor
    "phi": partial(made, "phi", num_key_value_heads=None),  # a head with a bias
}


@pytest.mark.parametrize("case", MODELS)
def test_the_loss_of_every_family_is_that_of_its_logits_which_are_not_computed(case, monkeypatch):
    monkeypatch.setattr(head, "loss_from_logits", None)
    model, tokens = MODELS[case](), make_tokens()
    expected = reference(model, tokens, some_labels(tokens))
    with torch.no_grad(), frozen(model), loss_in_forward(model):
        outputs = model(tokens, labels=some_labels(tokens), use_cache=False)
        assert torch.equal(model(tokens, use_cache=False).logits, logits_of(model, tokens))
    assert outputs.get("logits") is None
    torch.testing.assert_close(outputs.loss.double(), expected, rtol=1e-5, atol=1e-4)
    assert "forward" not in vars(model) and "forward" not in vars(model.get_output_embeddings())  # noqa: PT018


def hooked_before(model):
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def hooked_behind(model):
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 1.5)


@pytest.mark.parametrize("change", [odd, hooked_before, hooked_behind])
def test_a_head_that_does_more_falls_back_to_full_logits(change, monkeypatch):
    monkeypatch.setattr(head, "loss_from_hidden", None)
    model, tokens = make_model("llama"), make_tokens()
    change(model)
    expected = reference(model, tokens, tokens)
    with torch.no_grad(), loss_in_forward(model):
        torch.testing.assert_close(model(tokens, labels=tokens).loss.double(), expected, rtol=1e-5, atol=1e-4)


def test_an_adapter_on_the_head_is_trained_through_its_own_logits():
    model = get_peft_model(make_model("llama"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    tokens = make_tokens()
    with loss_in_forward(model):
        model(tokens, labels=tokens).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert any("lm_head" in name for name in gradients)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "gemma2"])
def test_gradients_are_those_of_the_stock_loss(case):
    grads = {}
    for fused in (True, False):
        model, tokens = patch(make_model(case), PreProjectionConfig(content_skip=True, init="paper")), make_tokens()
        labels = some_labels(tokens)
        if fused:
            with loss_in_forward(model):
                model(tokens, labels=labels, use_cache=False).loss.backward()
        else:
            scores = torch.log_softmax(model(tokens, use_cache=False).logits.float(), dim=-1)[:, :-1]
            mask = labels[:, 1:] != -100
            (-scores.gather(-1, tokens[:, 1:, None]).squeeze(-1) * mask).sum().backward()
        grads[fused] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(grads[True], grads[False], rtol=2e-4, atol=2e-5)


def test_blocks_of_the_loss_nest_and_leave_nothing_behind():
    model, tokens = make_model("gpt2"), make_tokens()
    before = dict(vars(model))
    with loss_in_forward(model):
        with loss_in_forward(model):
            inner = model(tokens, labels=tokens).loss
        assert torch.equal(inner, model(tokens, labels=tokens).loss)
    assert vars(model).keys() == before.keys()
    assert isinstance(model.lm_head, nn.Linear)


def test_a_forward_that_was_replaced_before_is_used_and_put_back():
    """accelerate's hooks, which move tensors between devices, replace forward too."""
    model, tokens, calls = make_model("llama"), make_tokens(), []
    stock = model.forward

    def hooked(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    model.forward = hooked
    with loss_in_forward(model):
        before = len(calls)
        logits = logits_of(model, tokens)
    assert len(calls) == before + 1
    assert model.forward is hooked
    assert torch.equal(logits, logits_of(make_model("llama"), tokens))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["gpt_neox", "llama"])
def test_frozen_layers_below_the_first_patched_one_build_no_graph(case, checkpointing):
    model = patch(make_model(case), PreProjectionConfig(layers_to_transform=[1], init="paper")).train()
    if checkpointing:
        switch_checkpointing(model, on=True)
    needs, tokens = [], make_tokens()

    def note(module, args, output):
        needs.append((output[0] if isinstance(output, tuple) else output).requires_grad)

    with loss_in_forward(model):
        for layer in model.gpt_neox.layers if case == "gpt_neox" else model.model.layers:
            layer.register_forward_hook(note)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert needs[:2] == [False, True]
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_model_that_removes_its_embeddings_hook_without_a_look_can_recompute(monkeypatch):
    """Modelling code on the hub has this method from earlier versions of transformers, where there may be no hook."""
    model = make_model("llama")
    monkeypatch.setattr(type(model), "disable_input_require_grads", lambda self: self._require_grads_hook.remove())
    switch_checkpointing(model, on=True)
    assert model.is_gradient_checkpointing
