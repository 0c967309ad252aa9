"""What a transformers model does, a model from scratch does: every query path in every architecture."""

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from families import logits_of, make_tokens
from in_step import in_step
from models.test_build import ATTENTIONS, build, config_of, projection
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch, load_scratch, register_scratch
from hfpatch.nn.calls import CALLS
from hfpatch.recipes.models import ScratchSettings

PATHS = {
    "identity": {"path": "identity"},
    "residual": {"path": "residual"},
    "nonlinear": {},
    "weight": {"anchor": "weight", "activation": "relu2"},
    "fused": {"fused": True},
}
ALL = [("gpt_neox", "weight"), *((case, path) for case in ("gpt2", "llama", "mixtral") for path in PATHS)]
EVERY = pytest.mark.parametrize(("case", "path"), ALL)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def made(case, path):
    return build(case, **PATHS[path])


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY
def test_gradient_checkpointing_changes_no_gradient(case, path, reentrant):
    tokens, grads = make_tokens(), []
    for checkpointing in (False, True):
        model = made(case, path).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize(("case", "path"), [("gpt2", "fused"), ("llama", "nonlinear")])
def test_compiled_it_is_one_graph_of_the_same_function(case, path):
    model, tokens = made(case, path), make_tokens()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [m(tokens, use_cache=False).logits.square().mean() for m in (model, compiled)]
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.compiler.reset()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_two_threads_in_step_and_a_call_that_fails():
    """What modules hand to each other belongs to a call: both threads are in the same module at any time."""
    model, tokens = made("llama", "fused").requires_grad_(False), [make_tokens(seed=seed) for seed in (0, 1)]
    expected = [logits_of(model, batch) for batch in tokens]

    def fail(*_):
        raise ZeroDivisionError

    assert all(map(torch.equal, in_step(model, tokens), expected))
    for module in model.model.layers.modules():
        handle = module.register_forward_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            logits_of(model, tokens[0])
        handle.remove()
        assert not [owner for owner in model.modules() if owner in CALLS.values]


@EVERY
def test_a_copy_is_a_model_of_its_own(case, path):
    model, tokens = made(case, path), make_tokens()
    expected = logits_of(model, tokens)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert torch.equal(logits_of(other, tokens), expected)
    other(tokens, labels=tokens).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


@EVERY
def test_it_moves_to_another_dtype_and_device(case, path):
    model, tokens = made(case, path), make_tokens()
    expected = logits_of(model, tokens)
    assert torch.equal(logits_of(model.double().float(), tokens), expected)
    low = logits_of(model.to(torch.bfloat16), tokens)
    assert low.dtype == torch.bfloat16
    if case != "mixtral":  # whose router decides otherwise
        assert float((low - expected).norm()) < 0.05 * float(expected.norm())
    first = model.to("meta").get_submodule(f"{ATTENTIONS[case].format(0)}.{projection(case)}")
    x = torch.empty(2, 3, 32, dtype=torch.bfloat16, device="meta")
    assert first(x).shape == (2, 3, first.out_features)
    assert first(x).dtype == torch.bfloat16


ALONE = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hfpatch":
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM
def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.save_pretrained(folder + "/again")
    return model
"""
THROUGH = "from hfpatch.models import load_scratch as load"
ANSWER = """
import json, sys
import torch
tokens, answers = torch.tensor(json.loads(sys.argv[1])), []
for folder in sys.argv[2:]:
    model = load(folder).requires_grad_(False)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = model.generate(tokens, **options).tolist()
    answers.append([logits.tolist(), generated, tied, getattr(model.config, "_experts_implementation", None)])
assert ("hfpatch" in {name.partition(".")[0] for name in sys.modules}) == ("hfpatch" in load.__module__)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every model saved, every third one in shards; every second head tied, as GPT-2's always is."""
    saved = {}
    for number, (case, path) in enumerate(ALL):
        config = config_of(case, tie_word_embeddings=case == "gpt2" or number % 2 == 0)
        model = build_scratch(config, ScratchSettings(query=PATHS[path]), seed=number).eval()
        folder = tmp_path_factory.mktemp(f"{case}-{path}")
        model.save_pretrained(folder, **({"max_shard_size": "20KB"} if number % 3 == 0 else {}))
        saved[case, path] = (folder, model)
    return saved


@pytest.mark.parametrize(
    "program",
    [pytest.param(ALONE, id="without hfpatch"), pytest.param(THROUGH, id="through hfpatch", marks=pytest.mark.slow)],
)
def test_a_new_process_loads_the_folder_and_computes_the_same(folders, program, tmp_path):
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path)}
    if program is ALONE:
        env["PYTHONPATH"] = ""
    paths = [str(folder) for folder, _ in folders.values()]
    arguments = ["-c", program + ANSWER, json.dumps(make_tokens().tolist()), *paths]
    if program is ALONE:
        done = subprocess.run([sys.executable, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True)
    else:
        done = forked.python(arguments, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    for (entry, (folder, model)), (logits, generated, tied, experts) in zip(folders.items(), answers, strict=True):
        expected = logits_of(model, make_tokens())
        assert torch.equal(torch.tensor(logits), expected), entry
        assert model.generate(make_tokens(), **GREEDY).tolist() == generated, entry
        assert tied == model.config.tie_word_embeddings, entry
        assert experts == getattr(model.config, "_experts_implementation", None), entry
        if program is ALONE:  # what transformers alone saved again
            assert torch.equal(logits_of(load_scratch(folder / "again"), make_tokens()), expected), entry


def test_nothing_is_pickled_and_shards_are_shards(folders):
    for number, (folder, _) in enumerate(folders.values()):
        names = {file.name for file in folder.iterdir() if file.is_file()}
        assert {Path(name).suffix for name in names} == {".safetensors", ".json", ".py"}
        weights = [name for name in names if name.endswith(".safetensors")]
        assert (len(weights) > 1) == (number % 3 == 0)
        assert {"config.json", "modeling_hfpatch_scratch.py"} < names


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("path", PATHS)
def test_quantised_loading(tmp_path, path, bits):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit
    from transformers import BitsAndBytesConfig

    config = config_of("llama", hidden_size=128, intermediate_size=128, num_key_value_heads=4)
    model = build_scratch(config, ScratchSettings(query=PATHS[path]), seed=1).eval()
    model.save_pretrained(tmp_path)
    register_scratch(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**{f"load_in_{bits}bit": True}), dtype=torch.float32
    ).eval()
    attention = quantised.model.layers[1].self_attn
    linear = "SharedLinear" if path == "fused" else {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    inside = [attention.q_proj.get_submodule(name) for name in attention.q_proj.linear_parts()]
    expected = {"up": linear} if path == "fused" else {}
    for name, module in zip(attention.q_proj.linear_parts(), inside, strict=True):
        last = name.rpartition(".")[2]
        assert type(module).__name__ == expected.get(last, {4: "Linear4bit", 8: "Linear8bitLt"}[bits]), name
    assert type(attention.k_proj).__name__ == linear
    if bits == 4:  # compared with the same values in float
        for name, module in quantised.named_modules():
            if type(module).__name__ == "Linear4bit":
                values = dequantize_4bit(module.weight.data, module.weight.quant_state)
                model.get_submodule(name).weight.data.copy_(values)
    plain, actual = (logits_of(m, make_tokens()).float() for m in (model, quantised))
    error = float((actual - plain).norm() / plain.norm())
    assert error < (0.05 if bits == 4 else 0.1), error  # bitsandbytes computes in 16 bits where the processor can


def test_a_missing_tensor_and_another_folder_are_errors(folders, tmp_path):
    _, model = folders["gpt_neox", "weight"]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "norm_out" in name)
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(HfpatchError, match="missing keys"):
        load_scratch(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(HfpatchError, match="contains no model"):
        load_scratch(tmp_path / "other")
