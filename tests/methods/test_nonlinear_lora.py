"""What is nonlinear LoRA's own: its counts, its linear form, options and refusals."""

import pytest
import torch
from families import HEADS, HIDDEN, LAYERS, logits_of, make_model, make_tokens, perturb
from peft import LoraConfig

import hfpatch
from hfpatch import NonlinearLoraConfig
from hfpatch.nn import seeded_generator
from hfpatch.tuners.adapters import adapter_parameters

KEYS = HIDDEN // HEADS * 2  # of llama's two key and value heads
RANK = 3


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("query", "value"), RANK * (2 * HIDDEN) + RANK * (HIDDEN + KEYS)),
        (("query", "key", "value", "output"), RANK * (4 * HIDDEN) + RANK * 2 * (HIDDEN + KEYS)),
        ("output", RANK * 2 * HIDDEN),
    ],
)
def test_counts_are_those_of_lora(targets, count):
    model = hfpatch.patch(make_model("llama"), NonlinearLoraConfig(rank=RANK, targets=targets))
    assert hfpatch.patch_summary(model).added == LAYERS * count
    hfpatch.unpatch(model)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    modules = [names[target] for target in ([targets] if isinstance(targets, str) else targets)]
    model = hfpatch.patch(model, LoraConfig(r=RANK, target_modules=modules))
    assert hfpatch.patch_summary(model).added == LAYERS * count


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_without_its_activation_it_is_lora(alpha):
    ours, theirs = make_model("llama"), make_model("llama")
    targets = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    hfpatch.patch(ours, NonlinearLoraConfig(rank=RANK, alpha=alpha, activation="identity", targets=tuple(targets)))
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK if alpha is None else alpha, target_modules=[*targets.values()])
    hfpatch.patch(theirs, lora)
    moved = perturb(ours, std=0.2)
    with torch.no_grad():
        for name, parameter in moved.items():
            target = next(kind for kind in targets if f"_{kind}_" in name)
            matrix = "lora_A" if "_down." in name else "lora_B"
            attention = name.partition(".hfpatch_")[0]
            adapter = theirs.get_submodule(f"{attention}.{targets[target]}.{matrix}.lora")
            adapter.weight.copy_(parameter)
    tokens = make_tokens()
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)
    assert (logits_of(ours, tokens) - logits_of(make_model("llama"), tokens)).abs().max() > 0.1


def test_a_is_drawn_as_lora_draws_it_and_b_is_zero():
    model = hfpatch.patch(make_model("llama"), NonlinearLoraConfig(rank=64, targets="query", seed=3))
    parameters = {name.partition("hfpatch_nonlinear_lora.")[2]: p for name, p in adapter_parameters(model).items()}
    a, b = (parameters[f"nonlinear_lora_query_{part}.nonlinear_lora.weight"] for part in ("down", "up"))
    uniform = torch.rand(a.shape, generator=seeded_generator(3, "layer.1.query_down"))
    torch.testing.assert_close(a, (2 * uniform - 1) / HIDDEN**0.5)
    assert not b.any()
