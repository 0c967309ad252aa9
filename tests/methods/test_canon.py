"""Canon layers, and what a method that looks back is given: rows, documents, caches, and what is refused."""

import copy

import elsewhere
import pytest
import torch
from architectures.catalogue import make
from families import LAYERS, close, make_model, make_tokens, perturb
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch import CanonConfig, HfpatchError
from hfpatch.data.packing import packing_obstacle
from hfpatch.evaluation.scorer.exactness import declared_sharing
from hfpatch.export.write import write_model
from hfpatch.nn import ShortConvolution
from hfpatch.tuners.lookback import MARGIN, Row

CASES = ["gpt_neox", "gpt2", "gemma2"]  # fused; Conv1D, cache by position; eager, a window in every other layer
WINDOW = 6  # which the texts leave
PLACES = ("input", "qkv")
MIXES = "a method of its patch reads earlier positions of the row"  # why endings cannot share a row


def patched(case="llama", *, std=0.3, attention=None, **options):
    model = make_model(case)
    if case == "gemma2":
        model.config.sliding_window = model.model.layers[0].self_attn.sliding_window = WINDOW
    if attention:
        model.set_attn_implementation(attention)
    hfpatch.patch(model, CanonConfig(**options))
    perturb(model, std=std)
    return model.requires_grad_(False)


def written(model, tokens, *, new=8, use_cache=True, mask=None, **options):
    mask, options = torch.ones_like(tokens) if mask is None else mask, {"eos_token_id": None, **options}
    return model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, use_cache=use_cache, do_sample=False, pad_token_id=0, **options
    )


def steps(model, tokens, cache, sizes):
    """Return the logits of tokens that come in pieces."""
    pieces = torch.split(tokens, sizes, dim=1)
    return torch.cat([model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], dim=1)


def test_parameters_are_one_weight_a_column_and_position():
    model, width = make_model("llama"), 32
    hfpatch.patch(model, CanonConfig())
    assert hfpatch.patch_summary(model).added == LAYERS * 4 * width
    hfpatch.unpatch(model)
    hfpatch.patch(model, CanonConfig(at="qkv", width=3))
    assert hfpatch.patch_summary(model).added == LAYERS * 3 * (width + width // 2 + width // 2)
    assert declared_sharing(model, 64).reason == MIXES
    hfpatch.unpatch(model)
    scale = hfpatch.patch(model, CanonConfig(width=1))  # of each column
    assert declared_sharing(scale, 64).longest == 64


def test_the_module_adds_what_was_before():
    layer, x = ShortConvolution(size=3, width=3), torch.arange(12.0).reshape(1, 4, 3)
    assert torch.equal(layer(x), x)
    layer.weight.data = torch.tensor([[0.0] * 3, [1.0, 0.0, 0.0], [0.0, 10.0, 0.0]])
    expected = [[0, 1, 2], [3 + 0, 4, 5], [6 + 3, 7 + 10 * 1, 8], [9 + 6, 10 + 10 * 4, 11]]
    assert layer(x)[0].tolist() == expected


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_decoding_with_a_cache_equals_decoding_without(case, at):
    """Greedy with a padded row, by beams that swap rows, assisted with tokens taken back, and in pieces."""
    model, tokens = patched(case, at=at), make_tokens(2, 7, seed=3)
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0  # so that new tokens look back into the padding
    with_cache, without = (written(model, tokens, mask=mask, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache, without)
    assert torch.equal(written(model, tokens[:1, 6:])[0], without[0, 6:])
    beams = [written(model, tokens, use_cache=use, num_beams=3, length_penalty=0.0) for use in (True, False)]
    assert torch.equal(*beams)
    one = written(model, tokens[1:], use_cache=False, new=12)
    if case != "gemma2" or hasattr(DynamicCache, "activate_past_recording"):  # else a window cannot be taken back
        for assisted in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": copy.deepcopy(model)}):
            assert torch.equal(written(model, tokens[1:], new=12, eos_token_id=1000, **assisted), one)
    whole = model(one, use_cache=False).logits
    assert close(steps(model, one, DynamicCache(config=model.config), [5, 1, 2, 1, 10]), whole)


@torch.no_grad()
def test_a_cache_treats_what_it_keeps_as_its_keys_and_values():
    model, tokens = patched(), make_tokens(3, 12)
    whole = model(tokens, use_cache=False).logits
    cache = DynamicCache()  # grows as it is filled
    steps(model, tokens[:, :8], cache, [6, 2])
    cache.crop(-3)
    assert close(steps(model, tokens[:, 5:7], cache, [2]), whole[:, 5:7])
    rows = torch.tensor([2, 0])
    cache.batch_select_indices(rows)
    other = copy.deepcopy(cache)
    assert close(steps(model, tokens[rows, 7:], cache, [5]), whole[rows, 7:])
    other.batch_repeat_interleave(2)
    other.reorder_cache(torch.tensor([3, 1, 0]))
    rows = rows.repeat_interleave(2)[[3, 1, 0]]
    assert close(steps(model, tokens[rows, 7:], other, [1, 4]), whole[rows, 7:])
    assert len(cache) == LAYERS
    other.reset()
    if other.get_seq_length():  # older transformers fill it with zeros instead
        return
    assert close(steps(model, tokens, other, [1, 2, 9]), whole)


@torch.no_grad()
def test_a_cache_keeps_the_last_positions_alone():
    model, cache = patched("gpt_neox"), DynamicCache()
    for _ in range(3):
        model(make_tokens(1, MARGIN // 4), past_key_values=cache)
    for _ in range(MARGIN):
        model(make_tokens(1, 1), past_key_values=cache, position_ids=torch.tensor([[50]]))
    (kept,) = cache.layers[0].kept.values()
    assert kept.values.shape[1] == 3 + MARGIN
    with pytest.raises(HfpatchError, match="only 2 are kept"):
        cache.crop(-MARGIN - 1)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["gpt_neox", "llama"])
def test_packed_documents_equal_those_alone(case, attention):
    model, tokens, lengths = patched(case, attention=attention), make_tokens(2, 12), [5, 1, 2, 4]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    alone = torch.cat([model(part, use_cache=False).logits for part in torch.split(tokens, lengths, dim=1)], dim=1)
    assert close(model(tokens, position_ids=positions, use_cache=False).logits, alone)
    assert not close(model(tokens, use_cache=False).logits, alone)
    assert packing_obstacle(model, 16) is None  # what training asks before it packs
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    padded = model(tokens, attention_mask=mask, use_cache=False).logits[:, 3:]  # position ids go on from the padding
    assert close(padded, model(tokens[:, 3:], use_cache=False).logits)


@pytest.mark.parametrize(
    "beginnings",
    [
        {"positions": torch.tensor([[0, 1, 0, 1, 2]])},  # all that flash attention is given of packed documents
        {"mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], *[[0, 0, 1, 1, 1]] * 3]).bool()[None]},
    ],
)
def test_a_row_says_where_a_document_begins(beginnings):
    earlier = Row(5, **beginnings).earlier("x", torch.arange(1.0, 6.0)[None, :, None], 3)
    assert [values[0, :, 0].tolist() for values in earlier] == [[0, 1, 0, 3, 4], [0, 0, 0, 0, 3], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_packed_documents_gives_the_same_gradients(reentrant):
    model, tokens = patched(at="qkv").train(), make_tokens(1, 9)
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    weights = [p.requires_grad_() for name, p in model.named_parameters() if "canon_" in name]
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        logits = model(tokens, position_ids=positions, use_cache=False).logits
        logits.square().mean().backward()
        gradients.append([weight.grad for weight in weights])
        model.zero_grad()
    assert all(close(*pair) for pair in zip(*gradients, strict=True))


def test_what_keeps_no_values_is_refused_before_anything_is_computed():
    model, tokens = patched(), make_tokens(1, 6)
    with pytest.raises(HfpatchError, match="StaticCache has a StaticLayer"):
        written(model, tokens, cache_implementation="static")
    with torch.no_grad():
        model(tokens, past_key_values=DynamicCache())  # nothing is left behind
    other = make_model("llama")
    other.set_attn_implementation("flex_attention")
    with pytest.raises(HfpatchError, match=r"'flex_attention' does not say .*sdpa"):
        hfpatch.patch(other, CanonConfig())
    assert not [module for module in other.modules() if module._forward_hooks or module._forward_pre_hooks]
    cache = make_model("llama")(tokens, use_cache=True).past_key_values
    with pytest.raises(HfpatchError, match="holds 6 tokens, of which the method has seen 0"):
        model(tokens, past_key_values=cache)


def test_a_method_says_how_far_it_looks_back():
    model, x = hfpatch.patch(make_model("llama"), CanonConfig(width=3)), torch.ones(1, 4, 2)
    layer = next(module for module in model.modules() if hasattr(module, "configs"))
    (_, _, site), *_ = layer.acting("entered")
    assert [before[0, :, 0].tolist() for before in site.earlier(x, 2)] == [[0, 1, 1, 1], [0, 0, 1, 1]]
    with pytest.raises(HfpatchError, match=r"steps=3 of the 2 that steps_back\(\) declares"):
        site.earlier(x, 3)
    with pytest.raises(HfpatchError, match="define steps_back"):
        layer.site.earlier(x, 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mpt", "its mask is True where others are False"),
        ("llama4_text", "attends within chunks"),
        ("bigbird_pegasus", "is not causal"),
        ("big_bird", "is not called with the hidden state"),
        ("xlm", "none of its arguments is called attention_mask or position_ids"),
    ],
)
def test_models_in_which_nothing_says_what_is_earlier_are_refused(kind, reason):
    model = make(kind)
    with pytest.raises(HfpatchError, match=reason):
        hfpatch.patch(model, CanonConfig())
    window = make("mistral")
    window.model.layers[0].self_attn.sliding_window = 3
    with pytest.raises(HfpatchError, match="it attends to 3 positions, and the method looks back 3"):
        hfpatch.patch(window, CanonConfig(layers_to_transform=0))


@pytest.mark.slow
@pytest.mark.parametrize("at", PLACES)
def test_an_export_decodes_with_its_cache_and_refuses_servers(at, tmp_path, monkeypatch):
    model, tokens = patched("gpt_neox", at=at), make_tokens(2, 7)
    expected = written(model, tokens, use_cache=False)
    write_model(model, tmp_path)
    computed, _ = elsewhere.computed(tmp_path, tokens, new_tokens=8)
    assert torch.equal(computed["written"], expected)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    loaded = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert declared_sharing(loaded, 64).reason == MIXES
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", ALL_ATTENTION_FUNCTIONS["sdpa"])
    with pytest.raises(ValueError, match="'vllm' does not say"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="vllm")
