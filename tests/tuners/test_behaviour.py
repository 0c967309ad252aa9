"""Compilation, and construction without values, with both methods in one model."""

import pytest
import torch
from families import (
    FAMILIES,
    PLACES,
    make_config,
    make_model,
    make_tokens,
    model_type,
    perturb,
)
from transformers import AutoModelForCausalLM

from hfpatch import NonlinearQueryConfig, PreProjectionConfig


def patched(case):
    """A model with a gated pre-projection, a skip and a nonlinear query, off their initial values."""
    model = make_model(case).requires_grad_(False)
    model.add_adapter(PreProjectionConfig(gated=True, content_skip=True), adapter_name="pre")
    model.add_adapter(NonlinearQueryConfig(), adapter_name="query")
    model.set_adapter(["pre", "query"])
    perturb(model, std=0.2)
    return model


def added(model):
    return {name: p for name, p in model.named_parameters() if "preproj_" in name or "nonlinear_" in name}


def compiled_agrees(case, backend):
    """Compare on the first block alone: tracing takes seconds a block, and all are alike."""
    model, base, tokens = patched(case), make_model(case), make_tokens()
    for each in (model, base):
        blocks = each.get_submodule(PLACES[model_type(case)][0].partition(".0.")[0])
        del blocks[1:]
        each.config.num_hidden_layers = 1
    with torch.no_grad():
        eager = model(tokens, labels=tokens, use_cache=False).loss
        torch.compiler.reset()
        loss = torch.compile(model, backend=backend)(tokens, labels=tokens, use_cache=False).loss
    torch.compiler.reset()
    torch.testing.assert_close(loss, eager, rtol=1e-5, atol=1e-5)
    assert abs(base(tokens, labels=tokens, use_cache=False).loss - loss) > 1e-4


@pytest.mark.parametrize("case", {model_type(case): case for case in reversed(FAMILIES)}.values())  # one of each type
def test_compiled(case):
    compiled_agrees(case, "eager")


@pytest.mark.slow
def test_compiled_to_machine_code():
    compiled_agrees("gpt_neox", "inductor")


@pytest.mark.parametrize("case", FAMILIES)
def test_meta_device(case):
    """Constructed without values: same names and shapes, in fp32 on the meta device, for counts of any size."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(case), dtype=torch.bfloat16)
    model.add_adapter(PreProjectionConfig(gated=True, content_skip=True), adapter_name="pre")
    model.add_adapter(NonlinearQueryConfig(), adapter_name="query")
    real = patched(case)
    assert {name: p.shape for name, p in added(model).items()} == {name: p.shape for name, p in added(real).items()}
    assert {(p.device.type, p.dtype) for p in added(model).values()} == {("meta", torch.float32)}
