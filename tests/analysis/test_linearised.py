"""The linear approximation of a nonlinear query, and the share of the logits that it explains."""

import pytest
import torch
from families import FAMILIES, HIDDEN, make_model, make_tokens, perturb
from peft import LoraConfig

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, find_sites, patch
from hfpatch.analysis.heads import head_weights
from hfpatch.analysis.linearised import linearise
from hfpatch.support.modes import hooked

CASES = ["gpt_neox", "gpt2", "llama"]
K = 8


def texts(seed=0, rows=12):
    return [{"input_ids": make_tokens(rows, 20, seed=seed)}]


def both():
    return texts(0), texts(1)


@torch.no_grad()
def seen_in(model, layer, batch):
    """x before the patch, and the query and key after it, taken at the modules of a Llama."""
    attention, kept = model.model.layers[layer].self_attn, {}

    def enter(_, args, kwargs):
        kept["x"] = kwargs["hidden_states"]

    handles = [
        attention.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        attention.q_proj.register_forward_hook(lambda _, a, out: kept.update(q=out)),
        attention.k_proj.register_forward_hook(lambda _, a, out: kept.update(k=out)),
    ]
    with hooked(handles):
        model(batch["input_ids"])
    return [kept[name].double() for name in ("x", "q", "k")]


def rope(vectors):
    """Llama's rotation of (batch, heads, seq, 8), written out."""
    length = vectors.shape[2]
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, K, 2) / K)[None]
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = vectors[..., :4], vectors[..., 4:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def logits_of(q, k):
    q, k = (v.view(*v.shape[:2], -1, K).movedim(2, 1) for v in (q, k))
    return rope(q) @ rope(k).repeat_interleave(2, dim=1).mT


def within_rows(logits, head):
    """Sum of squares around each row's mean over the keys that the row sees, row by row."""
    total = 0.0
    for row in logits[:, head]:
        for i in range(row.shape[0]):
            visible = row[i, : i + 1]
            total += float((visible - visible.mean()).pow(2).sum())
    return total


@pytest.mark.parametrize("config", [NonlinearQueryConfig(form="literal"), PreProjectionConfig(init="paper")])
def test_the_shares_are_those_of_the_logits_themselves(config):
    model = perturb_and_patch("llama", config)
    (fit, held_out) = both()
    layers = linearise(model, fit, held_out)
    assert [layer.layer for layer in layers] == [0, 1]
    for layer in layers:
        x, q, k = seen_in(model, layer.layer, fit[0])
        flat_x, flat_q, flat_k = (v.flatten(0, 1) for v in (x, q, k))
        x, q, k = seen_in(model, layer.layer, held_out[0])
        query, key = (side.movedim(0, 1).flatten(1) for side in (layer.weights.query, layer.weights.key))
        # the bias of a least-squares fit is whatever makes the mean residual on the fitted tokens zero
        q_hat = x @ query + (flat_q - flat_x @ query).mean(0)
        k_hat = x @ key + (flat_k - flat_x @ key).mean(0)
        attention = model.model.layers[layer.layer].self_attn
        q_0, k_0 = (x @ getattr(attention, f"{name}_proj").weight.double().T for name in "qk")
        true, fitted, base = logits_of(q, k), logits_of(q_hat, k_hat), logits_of(q_0, k_0)
        for head in range(4):
            left = within_rows(true - fitted, head)
            assert layer.explained[head] == pytest.approx(1 - left / within_rows(true, head), abs=1e-6)
            change = within_rows(true - base, head)
            assert layer.explained_change[head] == pytest.approx(1 - left / change, abs=1e-4)


def perturb_and_patch(case, config):
    model = patch(make_model(case), config)
    perturb(model, std=0.3)
    return model


@pytest.mark.parametrize("rows", [3, 12])
def test_the_fit_is_the_ridge_regression_of_least_cross_validation_score(rows):
    """W = W_0 + (XᵀX + λI)⁻¹XᵀR, with λ of the least RSS / (1 − df/n)² from the hat matrix H: df = tr H."""
    model = perturb_and_patch("llama", NonlinearQueryConfig(targets=("query", "key")))
    fit, held_out = texts(0, rows), texts(1)
    layer, base = linearise(model, fit, held_out)[0], head_weights(model)[0]
    x, *sides = (v.flatten(0, 1) for v in seen_in(model, 0, fit[0]))
    n = len(x)
    for side, w, w_0 in zip(sides, (layer.weights.query, layer.weights.key), (base.query, base.key), strict=True):
        r = side - x @ w_0.movedim(0, 1).flatten(1)
        centred, r = x - x.mean(0), r - r.mean(0)
        gram, scores = centred.T @ centred, {}
        for ridge in 10.0 ** torch.arange(-9, 4).double() * gram.trace() / HIDDEN:
            solve = torch.linalg.solve(gram + ridge * torch.eye(HIDDEN).double(), centred.T)
            left = float((r - centred @ solve @ r).pow(2).sum())
            scores[left / (1 - float((centred @ solve).trace()) / n) ** 2] = solve @ r
        change = (w - w_0).movedim(0, 1).flatten(1)
        torch.testing.assert_close(change, scores[min(scores)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_patch_that_does_nothing_leaves_the_relation(case):
    model = patch(make_model(case), [PreProjectionConfig(), NonlinearQueryConfig()])
    for layer, base in zip(linearise(model, *both()), head_weights(make_model(case)), strict=True):
        assert float((layer.weights.query - base.query).abs().max()) < 1e-5
        assert float((layer.weights.key - base.key).abs().max()) < 1e-5
        assert layer.explained == pytest.approx([1.0] * 4, abs=1e-8)
        assert layer.explained_change == (None,) * 4
        assert layer.fit_tokens == 240


def test_the_rounding_of_a_bfloat16_base_is_no_change():
    model = patch(make_model("llama", torch.bfloat16), NonlinearQueryConfig())
    assert [layer.explained_change for layer in linearise(model, *both())] == [(None,) * 4] * 2


@pytest.mark.parametrize("case", CASES)
def test_a_linear_control_is_explained_whole_and_a_nonlinear_query_is_not(case):
    linear = {"activation": "identity", "input_norm": "none", "output_norm": "none"}
    control = perturb_and_patch(case, NonlinearQueryConfig(**linear))
    for layer in linearise(control, *both()):
        assert layer.explained_change == pytest.approx([1.0] * 4, abs=1e-6)
    nonlinear = perturb_and_patch(case, NonlinearQueryConfig(form="literal", activation="relu2"))
    for layer in linearise(nonlinear, *both()):
        assert all(share < 0.999 for share in layer.explained_change)
        assert all(share <= 1 for share in layer.explained)


def test_a_linear_pre_projection_is_absorbed_into_the_matrices():
    model = perturb_and_patch("llama", PreProjectionConfig(activation="identity"))
    layer, base = linearise(model, *both())[1], head_weights(make_model("llama"))[1]
    adapter = model.model.layers[1].self_attn.hfpatch_pre_projection
    names = (f"preproj_{part}.pre_projection.weight" for part in ("up", "down"))
    up, down = (adapter.get_parameter(name).detach().double() for name in names)
    mapped = torch.eye(HIDDEN).double() + up.T @ down.T
    for fitted, weights in ((layer.weights.query, base.query), (layer.weights.key, base.key)):
        assert fitted.flatten().tolist() == pytest.approx((mapped @ weights).flatten().tolist(), abs=1e-4)


def test_padding_and_packing_do_not_matter():
    model = perturb_and_patch("llama", NonlinearQueryConfig())
    ids, other = make_tokens(12, 20), make_tokens(1, 16, seed=5)
    plain = linearise(model, [{"input_ids": ids}], [{"input_ids": other[:, :9]}, {"input_ids": other[:, 9:]}])
    padded_ids = torch.cat([torch.zeros_like(ids[:, :3]), ids], dim=1)
    mask = (torch.arange(23) >= 3).long().expand(12, 23)
    padded = [{"input_ids": padded_ids, "attention_mask": mask}]
    packed = [{"input_ids": other, "position_ids": torch.tensor([[*range(9), *range(7)]])}]
    again = linearise(model, padded, packed)
    for one, two in zip(plain, again, strict=True):
        assert two.fit_tokens == one.fit_tokens == 240
        assert two.explained_change == pytest.approx(one.explained_change, abs=2e-4)


def test_lora_alone_needs_no_fit_and_too_little_text_is_refused():
    model = patch(make_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert linearise(model, *both()) == []
    model = patch(make_model("llama"), NonlinearQueryConfig())
    with pytest.raises(HfpatchError, match=f"{HIDDEN} tokens are too few"):
        linearise(model, [{"input_ids": make_tokens(2, HIDDEN // 2)}], texts())


def test_the_model_is_left_as_it_was():
    model = perturb_and_patch("gpt_neox", NonlinearQueryConfig()).train()
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    linearise(model, *both())
    assert all(module.training for module in model.modules())
    assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    assert find_sites(model)


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_analysed(case):
    """In every layout, an approximation of the right shape that explains nearly all of a slightly nonlinear query."""
    model = patch(make_model(case), NonlinearQueryConfig())
    perturb(model, std=0.02)
    layers = linearise(model, *both())
    assert [layer.layer for layer in layers] == [0, 1]
    for layer, base in zip(layers, head_weights(model, patched=False), strict=True):
        assert layer.weights.query.shape == base.query.shape
        assert layer.weights.key.shape == base.key.shape
        assert min(layer.explained) > 0.99
        assert all(share < 1 for share in layer.explained_change)
