"""What every further method keeps to in use: generation, batches, memory, precision, several adapters, disk, threads.

An entry of ``FURTHER`` is all that a method needs to be tested here.
"""

from pathlib import Path

import elsewhere
import forked
import pytest
import torch
from architectures.further import FURTHER
from families import close, hooks_act_as_registered, logits_of, make_model, make_tokens, perturb
from in_step import in_step
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.export.write import write_model
from hfpatch.promises import behaviour, run
from hfpatch.surgery.budget import attention_modules

TESTS = Path(__file__).parents[1]
PROMISES = [
    behaviour.no_op, behaviour.cache, behaviour.padding, behaviour.checkpointing, behaviour.full_precision,
]  # fmt: skip
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


def patched(case, name):
    """A small model with an adapter of one method, off its initial values."""
    model = hfpatch.patch(make_model(case), FURTHER[name].config(), names=["a"])
    perturb(model, std=FURTHER[name].std)
    return model


def greedy(model, tokens, **options):
    options = {"attention_mask": torch.ones_like(tokens), "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(tokens, max_new_tokens=5, do_sample=False, **options)


@every_method
@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.float32) for case in CASES), (ONE, torch.bfloat16)])
def test_the_promises_about_a_patched_model_hold(case, dtype, name, monkeypatch):
    monkeypatch.setattr(run, "PROMISES", [(promise.__name__, promise) for promise in PROMISES])
    report = hfpatch.check(make_model(case, dtype), FURTHER[name].config())
    assert report.passed, str(report)


@every_method
def test_beam_search_with_and_without_cache(name):
    """It reorders what the cache holds, in a batch with a padded row."""
    model, tokens = patched(ONE, name), make_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "num_beams": 3}
    assert torch.equal(*(greedy(model, tokens, use_cache=use, **options) for use in (True, False)))


@every_method
@every_case
def test_packed_documents(case, name):
    """Each document of a row computes what it does alone."""
    model, tokens, cut = patched(case, name), make_tokens(2, 9), 5
    positions = torch.cat([torch.arange(cut), torch.arange(9 - cut)]).expand(2, -1)
    packed = logits_of(model, tokens, position_ids=positions)
    alone = torch.cat([logits_of(model, tokens[:, :cut]), logits_of(model, tokens[:, cut:])], dim=1)
    assert close(packed, alone)
    assert not close(logits_of(model, tokens), alone, 1e-3)


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
        written, expected = greedy(model, tokens, use_cache=True), logits_of(model, tokens)
        write_model(model, folder)
        computed, _ = elsewhere.computed(folder, tokens, new_tokens=5)
        assert torch.equal(computed["logits"], expected), name
        assert torch.equal(computed["written"], written), name
