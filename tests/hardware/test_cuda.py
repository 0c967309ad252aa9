"""What only a GPU computes: its kernels against the CPU's values. Skipped without one; benchmarks/gpu.py runs these."""

import pytest
import torch
from families import logits_of, make_tokens
from hardware.test_fake_devices import patched
from torch.nn.functional import cross_entropy
from training_blocks import make_blocks

from hfpatch import fast_matmul
from hfpatch.data.plan import draw_plan
from hfpatch.evaluation.scorer import Scorer, TokenRequest
from hfpatch.recipes.training import TrainingSettings
from hfpatch.training import loss
from hfpatch.training.probe import train_probe
from hfpatch.training.run import Run

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", ["gated", "content_skip", "literal", "lora_stack"])
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "gemma2"])
def test_logits_and_scores_are_those_of_the_cpu(family, name):
    tokens, scores = make_tokens(4, 20), {}
    requests = [TokenRequest.cut(row[:6], row[6 : 8 + i], 40) for i, row in enumerate(tokens.tolist())]
    models = {device: patched(family, name, device).eval() for device in ("cpu", "cuda")}
    for device, model in models.items():
        scores[device] = {}
        with fast_matmul(model) as library:
            assert (library is None) == (device == "cuda")
            Scorer(model, 40).score(requests, scores[device].update)
    actual, expected = logits_of(models["cuda"], tokens.to("cuda")).cpu(), logits_of(models["cpu"], tokens)
    assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    for index, (value, _) in scores["cpu"].items():
        assert scores["cuda"][index][0] == pytest.approx(value, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("liger", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradient_are_those_of_full_logits(monkeypatch, liger, dtype):
    if liger:
        pytest.importorskip("liger_kernel")
    else:
        monkeypatch.setattr(loss, "_liger", lambda: None)
    hidden = torch.randn(2, 40, 32, device="cuda", dtype=dtype, requires_grad=True)
    weight, labels = torch.randn(600, 32, device="cuda", dtype=dtype), torch.randint(600, (2, 40), device="cuda")
    actual = loss.loss_from_hidden(hidden, weight, None, labels)
    (gradient,) = torch.autograd.grad(actual, hidden)
    logits = (hidden.double() @ weight.double().T)[:, :-1].flatten(0, 1)
    expected = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    (wanted,) = torch.autograd.grad(expected, hidden)
    near = {torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    assert float(actual) == pytest.approx(float(expected), rel=near)
    assert float((gradient.double() - wanted.double()).abs().max() / wanted.abs().max()) < near


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"autocast": "bfloat16", "gradient_checkpointing": True}])
def test_a_run_trains(tmp_path, options):
    blocks = make_blocks(documents=20)
    settings = TrainingSettings(steps=3, batch_size=4, micro_batch_size=2, warmup_steps=1, lr=1e-2, **options)
    plan = draw_plan(blocks=len(blocks), steps=3, batch_size=4, seed=0)
    losses = {}
    for device in ("cuda", "reference"):
        model, steps = patched("gpt_neox", "gated", "cuda"), []
        chosen = settings if device == "cuda" else settings.model_copy(update=dict.fromkeys(options))
        train_probe(model, Run(chosen, blocks, plan, 0, tmp_path / device, on_step=steps.append))
        losses[device] = [record.loss for record in steps]
    assert losses["cuda"] == pytest.approx(losses["reference"], rel=2e-2)
