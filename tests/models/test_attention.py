from collections import deque
from itertools import pairwise
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, MistralConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch.models.attention
from hfpatch.models.attention import fast_attention, mask_to_add, read_mask
from hfpatch.nn.matmul import fast_matmul
from hfpatch.support.cpu import active, has_onednn

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2}
CONFIGS = {
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "llama with grouped keys": LlamaConfig(**GROUPED),
    "mistral within its window": MistralConfig(**GROUPED, sliding_window=24),
}


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def positions_of(*rows):
    return torch.tensor([[at for length in lengths for at in range(length)] for lengths in rows])


def mask_of(lengths, window=None):
    """Causal within documents, written out place by place."""
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    mask = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for begin, end in pairwise(ends):
        for query in range(begin, end):
            for key in range(begin, query + 1):
                mask[query, key] = window is None or query - key < window
    return mask


@pytest.fixture
def calls(monkeypatch):
    """The lengths of the queries, and whether there was a mask, of each call of torch's attention."""
    lengths, stock = [], torch.nn.functional.scaled_dot_product_attention

    def attention(query, *args, attn_mask=None, **options):
        lengths.append((query.shape[2], attn_mask is not None))
        return stock(query, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return lengths


@pytest.mark.parametrize("window", [None, 2, 4, 20])
@pytest.mark.parametrize("lengths", [[5, 1, 4], [10], [1] * 4, [3, 7]])
def test_lengths_and_windows_are_read_from_a_mask(lengths, window):
    mask, cuts = mask_of(lengths, window)[None, None], window is not None and window < max(lengths)
    assert read_mask(mask) == ([lengths], window if cuts else None)
    assert read_mask(mask.expand(3, 1, -1, -1)) == ([lengths] * 3, window if cuts else None)


@pytest.mark.parametrize(
    "mask",
    [
        torch.stack([mask_of([5, 5], window) for window in (3, 4)])[:, None],
        mask_of([6]).index_fill(1, torch.tensor([0]), False)[None, None],  # left padding: a row without a key
        mask_of([6]).index_fill(1, torch.tensor([5]), False)[None, None],  # right padding
        torch.ones(1, 1, 6, 6, dtype=torch.bool),
        mask_of([3, 3])[None, None, :, :4],
        mask_of([3, 3])[None, None].float(),
        mask_of([3, 3])[None, None].expand(1, 2, 6, 6),
        (mask_of([6]) & ~torch.eye(6, dtype=torch.bool).roll(1, 0))[None, None],  # a hole
    ],
)
def test_any_other_mask_is_left_alone(mask):
    assert read_mask(mask) is None


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)[None, None]


def test_what_a_tree_adds_to_logits():
    no = -torch.inf
    added = mask_to_add(TREE.expand(2, -1, -1, -1))
    assert added.dtype == torch.float32
    assert added.tolist() == [[[[0, no, no, no], [0, 0, no, no], [0, no, 0, no], [0, no, 0, 0]]]] * 2


@pytest.mark.parametrize(
    "mask",
    [
        TREE.mT,  # reads later keys
        TREE & ~torch.eye(4, dtype=torch.bool).index_fill(0, torch.tensor([0]), False),  # queries without their own key
        TREE[..., :3],
        TREE.float(),
        TREE.expand(1, 2, 4, 4),
    ],
)
def test_no_other_mask_is_added(mask):
    assert mask_to_add(mask) is None


def computed(model, tokens, **options):
    """Return the logits and the gradients of their mean square."""
    logits = model(tokens, use_cache=False, **options).logits
    logits.square().mean().backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return logits, gradients


def assert_agree(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_and_gradients_are_those_of_the_masked_attention(config, calls):
    model, tokens, positions = model_of(config), torch.randint(50, (2, 20)), positions_of([7, 12, 1], [20])
    expected = computed(model, tokens, position_ids=positions)
    with fast_attention():
        assert_agree(computed(model, tokens, position_ids=positions), expected)
    assert calls == [(20, True)] * 2 + [(length, False) for length in (7, 12, 1, 20)] * 2


def test_windows_shorter_than_documents_keep_a_mask_and_padding_the_stock_function(calls):
    tokens, kept = torch.randint(50, (1, 20)), torch.ones(1, 20, dtype=torch.long)
    kept[:, 15:] = 0
    model, positions = model_of(MistralConfig(**GROUPED, sliding_window=8)), positions_of([8, 12])
    expected = model(tokens, position_ids=positions, use_cache=False).logits
    with fast_attention():
        actual = model(tokens, position_ids=positions, use_cache=False).logits
        model_of(CONFIGS["gpt_neox"])(tokens, attention_mask=kept, use_cache=False)
    assert calls == [(20, True)] * 2 + [(8, False), (12, True)] * 2 + [(20, True)] * 2
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_it_lasts_until_the_last_of_several_runs_has_ended():
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    first, second = fast_attention(), fast_attention()
    first.__enter__()
    thread = Thread(target=second.__enter__)
    thread.start()
    thread.join()
    changed = ALL_ATTENTION_FUNCTIONS["sdpa"]
    first.__exit__(None, None, None)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is changed is not stock
    second.__exit__(None, None, None)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


def test_threads_that_read_other_masks_meanwhile_take_none_away(monkeypatch):
    class Crowded(deque):
        def append(self, layout):
            for entry in (layout, (torch.ones(1), None), (torch.ones(1), None)):
                super().append(entry)

    monkeypatch.setattr(hfpatch.models.attention, "deque", Crowded)
    model, tokens, positions = model_of(CONFIGS["gpt2"]), torch.zeros(1, 20, dtype=torch.long), positions_of([8, 12])
    expected = model(tokens, position_ids=positions, use_cache=False).logits
    with fast_attention():
        actual = model(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_mask_decides_and_not_what_the_module_says():
    query, key, value = (torch.randn(1, 2, 6, 4) for _ in range(3))
    document = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = ((document[:, None] == document) & torch.ones(6, 6, dtype=torch.bool).tril())[None, None]
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    module = torch.nn.Module()
    module.is_causal = False  # it relies on its mask
    with fast_attention():
        actual, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask)
    torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("name", CONFIGS)
def test_long_rows_are_computed_in_blocks(name, calls):
    """From 256 tokens where heads share keys, else from 512; the gradients too."""
    config = CONFIGS[name]
    model, length = model_of(config), 256 if name.startswith("llama") else 512
    tokens = torch.randint(50, (2, length))
    expected = computed(model, tokens)
    calls.clear()
    with fast_matmul(model, library="onednn"), fast_attention():
        assert_agree(computed(model, tokens), expected)
        assert calls == []
        with torch.no_grad():
            model(tokens[:, 1:], use_cache=False)
        assert len(calls) == (0 if name.startswith("mistral") else 2)  # a shorter window is always in blocks


@pytest.mark.parametrize("length", [30, 300])
@pytest.mark.parametrize("way", ["bf16", "autocast", "bf16 with AMX"])
def test_in_bf16_attention_is_computed_in_fp32_and_rounded(way, length, monkeypatch):
    """With AMX only short rows that need gradients are: there torch's bf16 kernel is fast, short gradients aside."""
    monkeypatch.setattr(hfpatch.models.attention, "_HAS_AMX", way.endswith("AMX"))
    kernel, dtypes = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, *args, **options):
        dtypes.append(torch.bfloat16 if torch.is_autocast_enabled("cpu") else query.dtype)
        return kernel(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    shape = {"query": (1, 4, length, 8), "key": (1, 2, length, 8), "value": (1, 2, length, 8)}
    halves = [torch.randn(size).bfloat16() for size in shape.values()]
    exact = [tensor.double().requires_grad_() for tensor in halves]
    query, key, value = (tensor if at == 0 else tensor.repeat_interleave(2, 1) for at, tensor in enumerate(exact))
    beyond = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = (query @ key.transpose(2, 3) * 8**-0.5).masked_fill(beyond, -torch.inf).softmax(-1)
    wanted = (weights @ value).transpose(1, 2)
    outer = torch.randn(wanted.shape).bfloat16()

    given = [(tensor.float() if way == "autocast" else tensor.clone()).requires_grad_() for tensor in halves]
    library = "onednn" if has_onednn() else "mkl"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"), active(library), fast_attention():
        actual, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *given, None, is_causal=True)
        gradients = torch.autograd.grad(actual, given, outer)
        with torch.no_grad():
            alone, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *given, None, is_causal=True)
    assert actual.dtype == alone.dtype == torch.bfloat16
    if way.endswith("AMX"):
        assert dtypes == [torch.float32 if length == 30 else torch.bfloat16, torch.bfloat16]
    else:
        assert dtypes == ([] if length == 300 and has_onednn() else [torch.float32] * 2)
    torch.testing.assert_close(alone.double(), wanted, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(actual.double(), wanted, rtol=2**-7, atol=2**-7)
    for gradient, right in zip(gradients, torch.autograd.grad(wanted, exact, outer.double()), strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=0.02, atol=0.02 * float(right.abs().max()))


NO = ["library mkl", "library fp32", "training", "gradients", "float32", "autocast", "few", "dropout", "bias", "AMX"]


@pytest.mark.parametrize("but", [None, *NO, "any mask"])
@pytest.mark.parametrize("masked", [True, False])
def test_products_are_in_bf16_in_evaluation_alone(but, masked, calls, monkeypatch):
    """And where that is faster, and nothing else is added to the logits."""
    monkeypatch.setattr(hfpatch.models.attention, "_HAS_AMX", but == "AMX")
    torch.manual_seed(0)
    module = torch.nn.Module().train(but == "training")
    module.num_key_value_groups = 2
    batch, length = 1 if but == "few" else 7, 60
    shapes = [(batch, heads, length, 8) for heads in (4, 2, 2)]
    given = [torch.randn(shape, dtype=torch.float32 if but == "float32" else torch.bfloat16) for shape in shapes]
    given[2].requires_grad_(but == "gradients")
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if masked:
        hidden = hidden | (torch.rand(batch, 1, length, length) < 0.5) & ~torch.eye(length, dtype=torch.bool)
    mask = ~hidden if masked else None
    if but == "any mask":
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool)
    options = {"dropout": {"dropout": 0.5}, "bias": {"position_bias": torch.zeros(batch, 4, length, length)}}
    library = but.split()[1] if (but or "").startswith("library") else "bf16"
    with torch.autocast("cpu", torch.bfloat16, enabled=but == "autocast"), active(library), fast_attention():
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *given, mask, **options.get(but, {}))
    assert len(calls) == (but is not None)
    if but is None:
        query, key, value = (tensor.double() for tensor in given)
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        weights = (query @ key.mT * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(output.double(), (weights @ value).transpose(1, 2), rtol=2**-7, atol=2**-7)


def test_torchs_kernel_computes_where_no_other_library_is_faster(calls):
    model = model_of(CONFIGS["llama with grouped keys"])
    with fast_matmul(model, library="mkl"), fast_attention():
        model(torch.randint(50, (1, 300)), use_cache=False)
    assert calls == [(300, False)] * 2


def test_a_model_with_a_fused_projection_compiles_to_one_graph():
    tokens = torch.arange(12)[None]
    with fast_attention():
        graphs = torch._dynamo.explain(model_of(CONFIGS["gpt_neox"]))(tokens, labels=tokens, use_cache=False)
    assert (graphs.graph_count, graphs.graph_break_count) == (1, 0)
