"""What every further method keeps to in use: generation, batches, memory, precision, several adapters, disk, threads.

An entry of ``FURTHER`` is all that a method needs to be tested here.
"""

from pathlib import Path

import elsewhere
import forked
import pytest
import torch
from architectures.further import FURTHER
from families import close, gradients, hooks_act_as_registered, logits_of, make_model, make_tokens, perturb
from in_step import in_step
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.export.write import write_model
from hfpatch.surgery.budget import attention_modules
from hfpatch.tuners.adapters import adapter_parameters

TESTS = Path(__file__).parents[1]
CASES = ["gpt_neox", "gpt2", "llama"]  # fused per head and parallel; Conv1D; grouped queries
ONE = "llama"
every_method = pytest.mark.parametrize("name", FURTHER)
every_case = pytest.mark.parametrize("case", CASES)

LOADER = """
import sys
sys.path[:0] = {paths!r}
from safetensors.torch import load_file, save_file
from families import logits_of, make_model
import hfpatch
found = {{}}
for index in range({count}):
    model = hfpatch.load_patch(make_model({case!r}), f"{folder}/{{index}}", allow_other_base=True)
    found[str(index)] = logits_of(model, load_file("{folder}/tokens.safetensors")["tokens"])
save_file(found, "{folder}/logits.safetensors")
"""


def patched(case, name, *, dtype=torch.float32, std=None):
    """A small model with an adapter of one method, off its initial values."""
    method = FURTHER[name]
    model = hfpatch.patch(make_model(case, dtype), method.config(), names=["a"])
    perturb(model, std=method.std if std is None else std)
    return model


def greedy(model, tokens, *, use_cache, mask=None, **options):
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens) if mask is None else mask, use_cache=use_cache,
        max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@every_method
@every_case
def test_generation_with_and_without_cache(case, name):
    """A batch with a padded row and one without; beam search reorders what the cache holds."""
    model, tokens = patched(case, name), make_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    (cached, with_cache), (plain, without) = (greedy(model, tokens, use_cache=use, mask=mask) for use in (True, False))
    assert torch.equal(cached, plain)
    assert close(with_cache, without)
    alone, _ = greedy(model, tokens[:1, 3:], use_cache=True)
    assert torch.equal(alone[0, 3:], cached[0, 6:])


@every_method
def test_beam_search_with_and_without_cache(name):
    model, tokens = patched(ONE, name), make_tokens(2, 6)
    actual, expected = (greedy(model, tokens, use_cache=use, num_beams=3)[0] for use in (True, False))
    assert torch.equal(actual, expected)


@every_method
@every_case
def test_left_padding_and_packed_documents(case, name):
    """Each row of a batch, and each document of a row, computes what it does alone."""
    model, pad, cut = patched(case, name), 4, 5
    tokens, mask = make_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :pad] = 0
    together = logits_of(model, tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    assert close(together[0, pad:], logits_of(model, tokens[:1, pad:])[0])
    assert close(together[1], logits_of(model, tokens[1:])[0])

    positions = torch.cat([torch.arange(cut), torch.arange(9 - cut)]).expand(2, -1)
    packed = logits_of(model, tokens, position_ids=positions)
    alone = torch.cat([logits_of(model, tokens[:, :cut]), logits_of(model, tokens[:, cut:])], dim=1)
    assert close(packed, alone)
    assert not close(logits_of(model, tokens), alone, 1e-3)


@every_method
def test_gradient_checkpointing_of_both_kinds(name):
    model, tokens = patched(ONE, name).train(), make_tokens()
    expected = gradients(model, tokens)
    model.enable_input_require_grads()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for at, gradient in gradients(model, tokens).items():
            assert close(gradient, expected[at]), at


@every_method
def test_a_base_in_half_precision(name):
    """Nothing changes at init; what is added stays in fp32 and computes what it does on an fp32 base, coarsely."""
    tokens = make_tokens()
    model = patched(ONE, name, dtype=torch.bfloat16, std=0)
    assert torch.equal(logits_of(model, tokens), logits_of(make_model(ONE, torch.bfloat16), tokens))
    perturb(model, std=FURTHER[name].std)
    logits = logits_of(model, tokens)
    assert {p.dtype for p in adapter_parameters(model).values()} == {torch.float32}
    assert logits.dtype == torch.bfloat16
    assert close(logits.float(), logits_of(patched(ONE, name), tokens), 0.1)


@every_method
def test_a_model_without_values_has_shapes(name):
    """As tools call it that count operations or plan memory."""
    with torch.device("meta"):
        model = hfpatch.patch(LlamaForCausalLM(make_model(ONE).config), FURTHER[name].config())
        logits = model(make_tokens(2, 6).to("meta")).logits
    assert (logits.device.type, logits.shape[:2]) == ("meta", (2, 6))


@every_method
def test_two_threads_in_one_model(name):
    """Both are in the same module at any time."""
    model, tokens = patched(ONE, name).requires_grad_(False), [make_tokens(2, 7, seed=seed) for seed in (0, 1)]
    expected = [logits_of(model, batch) for batch in tokens]
    assert all(map(torch.equal, in_step(model, tokens), expected))


def stack_for(model, order):
    parts = {name: method.config() for name, method in FURTHER.items()}
    parts["lora"] = LoraConfig(r=2, init_lora_weights=True, target_modules=attention_modules(model))
    names = [*parts] if order == "lora last" else ["lora", *(name for name in parts if name != "lora")]
    return hfpatch.patch(model, [parts[name] for name in names], names=[name.replace(" ", "_") for name in names])


@every_case
def test_all_methods_with_lora_in_two_orders(case):
    tokens, logits = make_tokens(), []
    base = logits_of(make_model(case), tokens)
    for order in ("lora first", "lora last"):
        model = stack_for(make_model(case), order)
        assert torch.equal(logits_of(model, tokens), base)
        perturb(model, std=0.05)
        logits.append(logits_of(model, tokens))
    assert close(*logits)
    assert not close(logits[0], base, 1e-2)
    hfpatch.unpatch(model)
    assert torch.equal(logits_of(model, tokens), base)


def test_all_methods_compiled():
    model, tokens = stack_for(make_model(ONE), "lora last"), make_tokens()
    perturb(model, std=0.05)
    with torch.no_grad():
        eager = model(tokens, use_cache=False).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)(tokens, use_cache=False).logits
    torch.compiler.reset()
    assert close(compiled, eager)
    assert hooks_act_as_registered(model)


@pytest.mark.slow
def test_another_process_loads_every_saved_patch(tmp_path):
    tokens, expected = make_tokens(), []
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    for index, name in enumerate(FURTHER):
        model = patched(ONE, name)
        hfpatch.save_patch(model, tmp_path / str(index))
        expected.append(logits_of(model, tokens))
    program = LOADER.format(paths=[str(TESTS), str(TESTS.parent)], count=len(expected), case=ONE, folder=tmp_path)
    done = forked.python(["-c", program])
    assert done.returncode == 0, done.stderr
    loaded = load_file(tmp_path / "logits.safetensors")
    for index, name in enumerate(FURTHER):
        assert torch.equal(loaded[str(index)], expected[index]), name


@pytest.mark.slow
def test_a_process_without_hfpatch_computes_every_export(tmp_path):
    """Logits and new tokens, of each method alone and of all together."""
    tokens = make_tokens(2, 6)
    models = {name: patched(ONE, name) for name in FURTHER} | {"all": stack_for(make_model(ONE), "lora last")}
    perturb(models["all"], std=0.05)
    for index, (name, model) in enumerate(models.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        written, expected = greedy(model, tokens, use_cache=True)[0], logits_of(model, tokens)
        write_model(model, folder)
        computed, _ = elsewhere.computed(folder, tokens, new_tokens=5)
        assert torch.equal(computed["logits"], expected), name
        assert torch.equal(computed["written"], written), name
