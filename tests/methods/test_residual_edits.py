"""What is the parallel adapters' and LoReFT's own: counts, orthonormal rows, options, and where there is no place."""

import pytest
import torch
from architectures.catalogue import make
from families import HIDDEN, LAYERS, make_model, make_tokens, perturb, train

import hfpatch
from hfpatch import HfpatchError, LoReFTConfig, ParallelAdapterConfig
from hfpatch.nn import orthonormal_, orthonormal_rows
from hfpatch.recipes.sizes import SIZES
from hfpatch.surgery.budget import match_size
from hfpatch.tuners.adapters import adapter_parameters

RANK = 3


@pytest.mark.parametrize("at", ["branch", "stream"])
@pytest.mark.parametrize(("config", "biases"), [(ParallelAdapterConfig, 0), (LoReFTConfig, RANK)])
def test_counts(config, biases, at):
    model = hfpatch.patch(make_model("gpt_neox"), config(rank=RANK, at=at))
    assert hfpatch.patch_summary(model).added == LAYERS * (2 * HIDDEN * RANK + biases)


def test_the_stream_behind_a_layer_is_what_the_next_one_reads():
    """An edit of the first block's end alone: the first block computes as before, the second reads the edit."""
    model, base, tokens = make_model("llama"), make_model("llama"), make_tokens()
    hfpatch.patch(model, LoReFTConfig(rank=RANK, layers_to_transform=0))
    perturb(model)
    hidden = [net(tokens, output_hidden_states=True, use_cache=False).hidden_states for net in (model, base)]
    assert torch.equal(hidden[0][0], hidden[1][0])
    assert (hidden[0][1] - hidden[1][1]).abs().max() > 1e-2


def test_rows_stay_orthonormal_in_training():
    model, tokens = hfpatch.patch(make_model("gpt2"), LoReFTConfig(rank=RANK, at="branch")), make_tokens()
    rows = [p for name, p in adapter_parameters(model).items() if "rows" in name]
    before = [orthonormal_rows(p).detach().clone() for p in rows]
    for matrix, r in zip(rows, before, strict=True):
        torch.testing.assert_close(r, matrix.detach(), rtol=1e-5, atol=1e-6)  # drawn orthonormal
    train(model, tokens, lr=0.1)
    for matrix, old in zip(rows, before, strict=True):
        r = orthonormal_rows(matrix).detach()
        torch.testing.assert_close(r @ r.T, torch.eye(RANK), rtol=0, atol=1e-5)
        assert (matrix @ matrix.T - torch.eye(RANK)).abs().max() > 0.1
        assert (r - old).abs().max() > 0.05


def test_rows_are_orthonormal_whatever_the_precision_around():
    matrix = orthonormal_(torch.empty(4, 32), seed=1, name="x") + 0.1
    expected = orthonormal_rows(matrix)
    q, s = torch.linalg.qr(matrix.T)
    torch.testing.assert_close(expected, (q * s.diagonal().sign()).T, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(orthonormal_rows(matrix), expected)
    assert orthonormal_rows(matrix.bfloat16()).dtype == torch.bfloat16
    assert orthonormal_rows(matrix.to("meta")).shape == matrix.shape


def test_a_subspace_has_no_more_dimensions_than_the_stream():
    model = make_model("gpt2")
    with pytest.raises(HfpatchError, match="rank=33 must be at most 32, the width of the residual stream"):
        hfpatch.patch(model, LoReFTConfig(rank=33))
    assert not hasattr(model, "peft_config")

    def build(rank):
        return LoReFTConfig(rank=rank)

    assert match_size(model, SIZES["loreft"], {}, build, budget=10**9) == (32, LAYERS * (2 * HIDDEN * 32 + 32))


@pytest.mark.parametrize(
    ("case", "config", "message"),
    [
        ("deepseek_v4", LoReFTConfig(), "the blocks pass several residual streams on"),
        ("deepseek_v4", LoReFTConfig(at="branch"), "takes its own data-dependent share of the branch"),
        ("gemma3n_text", ParallelAdapterConfig(at="stream"), "the blocks pass several residual streams on"),
        ("bloom", LoReFTConfig(at="branch"), "returns its branch and the residual stream in one sum"),
        ("xlm", ParallelAdapterConfig(at="stream"), "is a block by itself"),
        ("longcat_flash", LoReFTConfig(), "is one of 2 in its block"),
    ],
)
def test_where_there_is_no_place(case, config, message):
    model = make(case)
    with pytest.raises(HfpatchError, match=message):
        hfpatch.patch(model, config)
    assert not hasattr(model, "peft_config")
