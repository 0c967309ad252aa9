"""What a patch changes on a text, against the formulas in plain torch in fp64."""

import numpy as np
import pytest
import torch
from families import make_model, perturb
from peft import LoraConfig
from torch.nn.functional import log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from training_blocks import made

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch, scale_patch, unpatch
from hfpatch.data.blocks import IGNORE, blocks_from_stream
from hfpatch.data.tokenizer import TokenStream
from hfpatch.recipes.data import DataSettings
from hfpatch.training import retention
from hfpatch.training.retention import compare_logits, document_changes

MAKE = {
    "gpt_neox": lambda: make_model("gpt_neox"),
    "gpt2": lambda: make_model("gpt2"),
    "llama": lambda: make_model("llama"),
    "gemma2": lambda: make_model("gemma2"),  # a soft cap
    "granite": lambda: made("granite", logits_scaling=8.0),
    "phi": lambda: made("phi", num_key_value_heads=None),  # a head with a bias
}


def text(count=9, vocabulary=96, size=8):
    generator = np.random.default_rng(5)
    documents = [generator.integers(3, vocabulary, size=length) for length in generator.integers(2, 21, size=count)]
    stream = TokenStream(np.concatenate(documents).astype(np.uint32), np.array(list(map(len, documents))), None)
    settings = DataSettings(source="made-up", block_size=size)
    return blocks_from_stream(stream, settings, pad_token_id=0, with_owners=True)


def logits_of(model, row):
    """Return a row's logits in fp64, each document by itself."""
    with torch.no_grad():
        logits = model(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None] if "position_ids" in row else None,
            attention_mask=row["attention_mask"][None] if "attention_mask" in row else None,
            use_cache=False,
        ).logits
    return logits[0].double()


def by_hand(model, blocks):
    """Return tokens and sums of each document by the formulas; ``model`` is the patched one, and loses its patch."""
    patched = [logits_of(model, blocks[index]) for index in range(len(blocks))]
    unpatch(model)
    sums = np.zeros((int(blocks.owners.max()) + 1, 5))
    for index, q_logits in enumerate(patched):
        row, p_logits = blocks[index], logits_of(model, blocks[index])
        log_p, log_q = log_softmax(p_logits, -1), log_softmax(q_logits, -1)
        for position in range(1, len(row["labels"])):
            token = int(row["labels"][position])
            if token != IGNORE:
                p, q = log_p[position - 1], log_q[position - 1]
                kl, agrees = float((p.exp() * (p - q)).sum()), float(p.argmax() == q.argmax())
                sums[blocks.owners[index, position]] += 1, -float(p[token]), -float(q[token]), kl, agrees
    return sums


@pytest.mark.parametrize("config", [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(), LoraConfig(r=2)])
@pytest.mark.parametrize("family", MAKE)
def test_the_sums_are_those_of_the_formulas(family, config, monkeypatch):
    monkeypatch.setitem(retention._TILES, "cpu", (5, 7))
    model, blocks = MAKE[family](), text()
    if isinstance(config, LoraConfig):
        config = LoraConfig(r=2, target_modules="all-linear")
    patch(model, config)
    perturb(model, std=0.5)
    shares = [document_changes(model, blocks, batch_size=2, process=p, processes=2) for p in range(2)]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    sums = sum(shares)
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    expected = by_hand(model, blocks)
    assert expected[:, 3].sum() / expected[:, 0].sum() > 1e-4  # the patch changes something
    np.testing.assert_allclose(sums, expected, rtol=2e-4, atol=1e-4)


def test_a_model_that_computes_its_own_logits_is_measured_by_them():
    model, blocks = make_model("llama"), text()
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 1.5)
    patch(model, PreProjectionConfig())
    perturb(model, std=0.5)
    sums = document_changes(model, blocks, batch_size=4)
    np.testing.assert_allclose(sums, by_hand(model, blocks), rtol=2e-4, atol=1e-4)


def test_nothing_changes_at_scale_0_and_without_a_patch():
    model, blocks = make_model("gpt_neox"), text()
    bare = document_changes(model, blocks, batch_size=2)
    patch(model, PreProjectionConfig())
    perturb(model, std=0.5)
    scale_patch(model, 0)
    for sums in (bare, document_changes(model, blocks, batch_size=2)):
        np.testing.assert_array_equal(sums[:, 1], sums[:, 2])
        np.testing.assert_array_equal(sums[:, 3], 0.0)
        np.testing.assert_array_equal(sums[:, 4], sums[:, 0])


def test_tokens_that_are_masked_out_count_nothing_and_far_logits_stay_exact():
    a = torch.tensor([[0.0, -float("inf"), 80.0], [300.0, -300.0, -float("inf")]])
    b = torch.tensor([[1.0, -float("inf"), 79.0], [-300.0, 300.0, -float("inf")]])
    targets = torch.tensor([0, 1])
    changes = compare_logits((a, b), lambda rows, tokens: rows[:, tokens].clone(), targets, 3)
    assert changes.kl.tolist() == pytest.approx([0.0, 600.0], abs=1e-6)  # log sums are 80 and 79
    assert changes.base.tolist() == pytest.approx([80.0, 600.0])
    assert changes.patched.tolist() == pytest.approx([78.0, 0.0])
    assert changes.agrees.tolist() == [1.0, 0.0]
    a = torch.randn(300, 40)
    b = a + 1e-5 * torch.randn(300, 40)  # rounding of their softmax is larger than so small a KL, which is not below 0
    alike = compare_logits((a, b), lambda rows, tokens: rows[:, tokens].clone(), torch.zeros(300).long(), 40)
    assert 0 <= float(alike.kl.min()) <= float(alike.kl.max()) < 1e-6


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, torch.Tensor) and value._base is None:
                self.numbers = max(self.numbers, value.numel())
        return output


def test_no_more_than_a_tile_of_logits_is_in_memory():
    vocabulary, rows = 32_768, 600  # at once 19 million numbers a model
    torch.manual_seed(0)
    weight, states = torch.randn(vocabulary, 4), (torch.randn(rows, 4), torch.randn(rows, 4))
    targets = torch.randint(vocabulary, (rows,))
    with Largest() as largest, torch.no_grad():
        changes = compare_logits(states, lambda rows, tokens: rows @ weight[tokens].T, targets, vocabulary)
    assert largest.numbers <= 512 * 2048
    p, q = (log_softmax((hidden[:3] @ weight.T).double(), -1) for hidden in states)
    np.testing.assert_allclose(changes.kl[:3], (p.exp() * (p - q)).sum(1), rtol=1e-5)
