"""Generation, padding, checkpointing, copies, compilation and training with both methods in one model, every family."""

import copy
import hashlib
import inspect

import pytest
import torch
from families import (
    CASES,
    FAMILIES,
    FEW,
    PLACES,
    VOCABULARY,
    logits_of,
    make_config,
    make_model,
    make_tokens,
    model_type,
    perturb,
)
from transformers import AutoModelForCausalLM

from hfpatch import NonlinearQueryConfig, PreProjectionConfig


def patched(case, *, std=0.2, dtype=torch.float32, **pre):
    """A model with a gated pre-projection, a skip and a nonlinear query, off their initial values."""
    model = make_model(case, dtype).requires_grad_(False)
    model.add_adapter(PreProjectionConfig(gated=True, content_skip=True, **pre), adapter_name="pre")
    model.add_adapter(NonlinearQueryConfig(), adapter_name="query")
    model.set_adapter(["pre", "query"])
    perturb(model, std=std)
    return model


def added(model):
    return {name: p for name, p in model.named_parameters() if "preproj_" in name or "nonlinear_" in name}


def base_bytes(model):
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        if name not in added(model):
            digest.update(name.encode() + p.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("case", FAMILIES)
def test_generation_with_and_without_cache(case):
    model, tokens = patched(case), make_tokens(2, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(tokens), "return_dict_in_generate": True, "output_logits": True}
    cached, plain = (model.generate(tokens, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
    base = make_model(case).generate(tokens, use_cache=True, **options)
    assert (base.logits[0] - cached.logits[0]).abs().max() > 0.1


@pytest.mark.parametrize("case", FAMILIES)
def test_left_padding(case):
    model, tokens, pad = patched(case), make_tokens(2, 9), 4
    mask = torch.ones_like(tokens)
    mask[0, :pad] = 0  # row 0 is padded, row 1 is not
    extra = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    together = logits_of(model, tokens, attention_mask=mask, **extra)
    torch.testing.assert_close(together[0, pad:], logits_of(model, tokens[:1, pad:])[0], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(together[1], logits_of(model, tokens[1:])[0], rtol=1e-4, atol=2e-4)


def gradients(model, tokens):
    model.zero_grad()
    torch.manual_seed(0)  # the same dropout
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in added(model).items()}


@pytest.mark.parametrize("case", FAMILIES)
def test_gradient_checkpointing_of_both_kinds(case):
    model, tokens = patched(case, dropout=0.3).train(), make_tokens()
    expected = gradients(model, tokens)
    assert all(g.abs().max() > 0 for g in expected.values())
    model.enable_input_require_grads()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = gradients(model, tokens)
        for name, gradient in expected.items():
            torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-6 + 1e-4 * gradient.abs().max())


@pytest.mark.parametrize("case", FAMILIES)
def test_dropout_acts_in_training_only(case):
    model, tokens = patched(case, dropout=0.5).eval(), make_tokens()
    assert torch.equal(logits_of(model, tokens), logits_of(model, tokens))
    model.train()
    assert not torch.equal(logits_of(model, tokens), logits_of(model, tokens))


@pytest.mark.parametrize("case", FAMILIES)
def test_a_deep_copy_acts_on_its_own_layers(case):
    model, tokens = patched(case), make_tokens()
    before = logits_of(model, tokens)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, tokens), before)
    perturb(twin, std=0.5, seed=1)
    assert torch.equal(logits_of(model, tokens), before)
    changed = logits_of(twin, tokens)
    assert not torch.equal(changed, before)
    perturb(model, std=0.5, seed=2)
    assert torch.equal(logits_of(twin, tokens), changed)


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
def test_gradients_reach_everything_added_within_two_steps_and_the_base_stays(case):
    model, tokens = patched(case, std=0).train(), make_tokens(4, 12)
    before, start = base_bytes(model), {name: p.detach().clone() for name, p in added(model).items()}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(added(model))
    optimizer = torch.optim.SGD(added(model).values(), lr=0.5)
    reached, losses = set(), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) <= 2:
            reached |= {name for name, p in added(model).items() if p.grad.abs().max() > 0}
    assert reached == set(added(model))
    assert not [name for name, p in model.named_parameters() if p.grad is not None and name not in reached]
    assert base_bytes(model) == before
    assert all(not torch.equal(p, start[name]) for name, p in added(model).items())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("case", FEW)
def test_state_outside_the_call_does_not_leak_into_the_next(case):
    """A forward pass that breaks between entry and exit leaves nothing behind for the next one."""
    model, tokens = patched(case), make_tokens()
    expected = logits_of(model, tokens)

    def stop(module, args, output):
        raise RuntimeError("stopped")

    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            handle = module.register_forward_hook(stop)
            with pytest.raises(RuntimeError, match="stopped"):
                logits_of(model, make_tokens(3, 4, seed=5))
            handle.remove()
            assert torch.equal(logits_of(model, tokens), expected)
    model.disable_adapters()
    assert torch.equal(logits_of(model, tokens), logits_of(make_model(case), tokens))


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


def test_every_case_has_its_own_vocabulary_and_ids_inside():
    for case in CASES:
        config = make_config(case)
        assert config.vocab_size == VOCABULARY
        assert max(config.bos_token_id, config.eos_token_id, config.pad_token_id) < VOCABULARY
