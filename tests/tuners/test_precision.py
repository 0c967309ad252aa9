"""Trainables are fp32 whatever the base's dtype, by whichever way they came in."""

import pytest
import torch
from families import FAMILIES, make_model, make_tokens, perturb
from peft import PeftModel, get_peft_model

from hfpatch import NonlinearQueryConfig, PreProjectionConfig

CONFIGS = {"pre": lambda: PreProjectionConfig(gated=True, content_skip=True), "query": NonlinearQueryConfig}
LOW = [torch.bfloat16, torch.float16]


def dtypes(model):
    added = [p.dtype for name, p in model.named_parameters() if "preproj_" in name or "nonlinear_" in name]
    base = {p.dtype for name, p in model.named_parameters() if "preproj_" not in name and "nonlinear_" not in name}
    assert added
    return set(added), base


def saved(tmp_path, method, dtype=torch.bfloat16):
    model = get_peft_model(make_model("gpt_neox", dtype), CONFIGS[method]())
    tensors = {name: p.clone() for name, p in perturb(model).items()}
    model.save_pretrained(tmp_path / "a")
    return tmp_path / "a", tensors


def assert_values(model, tensors):
    by_name = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    for name, tensor in tensors.items():
        assert torch.equal(by_name[name.removeprefix("base_model.model.")], tensor)


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", FAMILIES)
def test_injected(case, dtype, method):
    model = make_model(case, dtype)
    model.add_adapter(CONFIGS[method]())
    assert dtypes(model) == ({torch.float32}, {dtype})
    assert dtypes(get_peft_model(make_model(case, dtype), CONFIGS[method]())) == ({torch.float32}, {dtype})


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("dtype", LOW)
def test_training_step_keeps_them_in_fp32_and_runs(method, dtype):
    model = get_peft_model(make_model("gpt_neox", dtype), CONFIGS[method]())
    tokens = make_tokens()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    assert grads == {torch.float32}
    assert torch.isfinite(loss)


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("options", [{}, {"is_trainable": True}, {"low_cpu_mem_usage": True}])
def test_loaded_by_peft_and_by_transformers(method, dtype, options, tmp_path):
    folder, tensors = saved(tmp_path, method)
    by_transformers = make_model("gpt_neox", dtype)
    by_transformers.load_adapter(str(folder), **options)
    for model in (PeftModel.from_pretrained(make_model("gpt_neox", dtype), folder, **options), by_transformers):
        assert dtypes(model) == ({torch.float32}, {dtype})
        assert_values(model, tensors)
    again = get_peft_model(make_model("gpt_neox", dtype), CONFIGS[method]())
    again.load_adapter(folder, "second")
    assert dtypes(again) == ({torch.float32}, {dtype})


@pytest.mark.parametrize("method", CONFIGS)
def test_a_cast_of_the_whole_model_is_the_users_will(method):
    model = get_peft_model(make_model("gpt_neox"), CONFIGS[method]()).to(torch.bfloat16)
    tokens = make_tokens()
    assert model(input_ids=tokens, use_cache=False).logits.dtype == torch.bfloat16
