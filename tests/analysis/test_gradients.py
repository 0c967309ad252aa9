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
    found = gradient_norms(patched(), [{"input_ids": rows}, {"input_ids": short}])
    model = patched()
    nats = [model(ids, labels=ids).loss * ids.numel() * (1 - 1 / ids.shape[1]) for ids in (rows, short)]
    (sum(nats) / (2 * 8 + 4)).backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    whole = {(each.layer, each.tensor): f"gpt_neox.layers.{each.layer}.{each.tensor}" for each in found}
    assert {whole[each.layer, each.tensor]: each.gradient for each in found} == pytest.approx(expected, rel=1e-4)
    weights = {name: float(p.detach().norm()) for name, p in model.named_parameters() if name in expected}
    assert {whole[each.layer, each.tensor]: each.weight for each in found} == pytest.approx(weights, rel=1e-5)
    assert {each.layer for each in found} == {0, 1}


def test_frozen_patches_too_and_everything_is_left_as_it_was():
    model = patched().train()
    for parameter in model.parameters():
        parameter.requires_grad = False
    found = gradient_norms(model, [{"input_ids": make_tokens()}])
    assert all(each.gradient > 0 for each in found)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_silent_tensors_and_plain_models_have_none():
    model = patch(make_model("llama"), NonlinearQueryConfig())  # its gain is 0, so nothing reaches what lies before
    found = gradient_norms(model, [{"input_ids": make_tokens()}])
    pulled = {each.tensor.split(".")[-3] for each in found if each.gradient > 0}
    assert pulled == {"nonlinear_query_norm_out"}
    assert gradient_norms(make_model("llama"), [{"input_ids": torch.ones(1, 4, dtype=torch.long)}]) == []
