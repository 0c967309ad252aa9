import pytest
import torch
from families import make_model, make_tokens, perturb

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch
from hfpatch.analysis.gradients import gradient_norms


def patched():
    model = patch(make_model("gpt_neox"), [PreProjectionConfig(dropout=0.5), NonlinearQueryConfig()])
    perturb(model)
    return model


def test_gradient_norms_are_those_of_the_loss_over_all_batches():
    rows, short = make_tokens(2, 9), make_tokens(1, 5, seed=1)
    norms = gradient_norms(patched(), [{"input_ids": rows}, {"input_ids": short}])
    model = patched()
    nats = [model(ids, labels=ids).loss * ids.numel() * (1 - 1 / ids.shape[1]) for ids in (rows, short)]
    (sum(nats) / (2 * 8 + 4)).backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    whole = {(norm.layer, norm.tensor): f"gpt_neox.layers.{norm.layer}.{norm.tensor}" for norm in norms}
    assert {whole[norm.layer, norm.tensor]: norm.gradient for norm in norms} == pytest.approx(expected, rel=1e-4)
    weights = {name: float(p.detach().norm()) for name, p in model.named_parameters() if name in expected}
    assert {whole[norm.layer, norm.tensor]: norm.weight for norm in norms} == pytest.approx(weights, rel=1e-5)
    assert {norm.layer for norm in norms} == {0, 1}


def test_frozen_patches_too_and_everything_is_left_as_it_was():
    model = patched().train()
    for parameter in model.parameters():
        parameter.requires_grad = False
    norms = gradient_norms(model, [{"input_ids": make_tokens()}])
    assert all(norm.gradient > 0 for norm in norms)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_silent_tensors_and_plain_models_have_none():
    model = patch(make_model("llama"), NonlinearQueryConfig())  # its gain is 0, so nothing reaches what lies before
    norms = gradient_norms(model, [{"input_ids": make_tokens()}])
    pulled = {norm.tensor.split(".")[-3] for norm in norms if norm.gradient > 0}
    assert pulled == {"nonlinear_query_norm_out"}
    assert gradient_norms(make_model("llama"), [{"input_ids": torch.ones(1, 4, dtype=torch.long)}]) == []
