"""Every PEFT call, and transformers' own adapter calls, with each method on every family."""

import pytest
import torch
from families import FAMILIES, FEW, logits_of, make_model, make_tokens, perturb
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig

LOW = [torch.bfloat16, torch.float16]
METHODS = {
    "pre": lambda **options: PreProjectionConfig(gated=True, content_skip=True, **options),
    "query": lambda **options: NonlinearQueryConfig(rank=4, **options),
}
BOTH = pytest.mark.parametrize("method", METHODS)


def trained(case, method, **options):
    """A PeftModel whose adapter is off its initial values."""
    model = get_peft_model(make_model(case), METHODS[method](**options)).eval()
    perturb(model, std=0.3)
    return model


@BOTH
def test_further_adapters_take_their_own_layers(method, tmp_path):
    """Each by its own configuration, whatever the one before it chose, injected or loaded."""
    model = trained("llama", method, layers_to_transform=[0])
    model.add_adapter("second", METHODS[method](layers_to_transform=[1]))
    model.add_adapter("third", METHODS[method]())

    def layers(peft_model, name):
        keys = [key for key, _ in peft_model.named_parameters() if f".{name}." in key]
        return {int(key.split(".layers.")[1].split(".")[0]) for key in keys}

    names = list(model.state_dict())
    with pytest.raises(HfpatchError, match="do not exist"):
        model.add_adapter("fourth", METHODS[method](layers_to_transform=[7]))
    assert list(model.state_dict()) == names
    assert [layers(model, name) for name in model.peft_config] == [{0}, {1}, {0, 1}]
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_model("llama"), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    assert [layers(again, name) for name in ("default", "second")] == [{0}, {1}]


@BOTH
@pytest.mark.parametrize("case", FAMILIES)
def test_adapter_calls_of_transformers(case, method, tmp_path):
    tokens = make_tokens()
    base = logits_of(make_model(case), tokens)
    model = make_model(case)
    model.add_adapter(METHODS[method](), adapter_name="a")
    model.add_adapter(METHODS[method](seed=1), adapter_name="b")
    perturb(model, std=0.3)
    model.set_adapter("a")
    only_a = logits_of(model, tokens)
    model.set_adapter("b")
    only_b = logits_of(model, tokens)
    model.set_adapter(["a", "b"])
    assert model.active_adapters() == ["a", "b"]
    both = logits_of(model, tokens)
    assert len({float(x.double().abs().sum()) for x in (base, only_a, only_b, both)}) == 4
    model.disable_adapters()
    assert torch.equal(logits_of(model, tokens), base)
    model.enable_adapters()
    assert torch.equal(logits_of(model, tokens), both)
    model.set_adapter("a")
    model.save_pretrained(tmp_path)
    model.delete_adapter("b")
    assert torch.equal(logits_of(model, tokens), only_a)
    again = make_model(case)
    again.load_adapter(str(tmp_path), adapter_name="loaded")
    assert torch.equal(logits_of(again, tokens), only_a)


@BOTH
@pytest.mark.parametrize("case", FEW)
def test_auto_classes_load_the_base_and_the_adapter(case, method, tmp_path):
    make_model(case).save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), METHODS[method]()).eval()
    perturb(model, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert card.count("pip install hfpatch") == card.count("import hfpatch\n") == 1
    assert ModelCard(card).data.library_name == "peft"
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        loaded = auto.from_pretrained(tmp_path / "adapter")
        assert torch.equal(logits_of(loaded, make_tokens()), logits_of(model, make_tokens()))


@BOTH
@pytest.mark.parametrize("case", FEW)
def test_an_adapter_for_each_row(case, method):
    model, tokens = trained(case, method, layers_to_transform=[1]), make_tokens(batch=4)
    model.add_adapter("other", METHODS[method](seed=1))
    perturb(model, std=0.3, seed=3)
    alone = {"__base__": logits_of(make_model(case), tokens)}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = logits_of(model, tokens)
    names = ["other", "__base__", "default", "other"]
    by_row = logits_of(model, tokens, adapter_names=names)
    torch.testing.assert_close(by_row, torch.stack([alone[name][row] for row, name in enumerate(names)]))
    assert torch.equal(logits_of(model, tokens), alone["other"])  # and nothing is left behind
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2, "eos_token_id": None}
    mixed = model.generate(tokens[:2], adapter_names=["default", "other"], **options)
    for row, name in enumerate(("default", "other")):
        model.set_adapter(name)
        assert torch.equal(model.generate(tokens[:2], **options)[row], mixed[row])


def test_names_of_rows_that_cannot_be_are_refused():
    model, tokens = trained("llama", "pre"), make_tokens()
    with pytest.raises(HfpatchError, match=r"there is no adapter 'defualt' .did you mean 'default'"):
        model(tokens, adapter_names=["defualt", "__base__"])
    with pytest.raises(HfpatchError, match="adapter_names: 3 names for 2 rows"):
        model(tokens, adapter_names=["default"] * 3)
    with pytest.raises(HfpatchError, match=r"in training mode; call model.eval\(\) first"):
        model.train()(tokens, adapter_names=["default"] * 2)
    linear = get_peft_model(make_model("llama"), PreProjectionConfig(activation="identity")).eval()
    linear.merge_adapter()
    with pytest.raises(HfpatchError, match="while adapters are merged; call unmerge_adapter"):
        linear(tokens, adapter_names=["default"] * 2)


def test_parameter_names_have_the_form_of_loras():
    model = make_model("gpt_neox")
    model.add_adapter(PreProjectionConfig(gated=True, content_skip=True), adapter_name="x")
    model.add_adapter(NonlinearQueryConfig(), adapter_name="y")
    path = "gpt_neox.layers.0.attention"
    names = {n.removeprefix(path) for n, _ in model.named_parameters() if n.startswith(path) and "hfpatch" in n}
    assert names == {
        *(f".hfpatch_pre_projection.preproj_{what}.x.weight" for what in ("up", "gate", "down", "skip")),
        *(f".hfpatch_query.nonlinear_query_{what}.y.weight" for what in ("norm_in", "up", "down", "norm_out")),
    }


def dtypes(model):
    """The dtypes of the added parameters and of the others."""
    added = {p.dtype for name, p in model.named_parameters() if ".hfpatch_" in name}
    return added, {p.dtype for name, p in model.named_parameters() if ".hfpatch_" not in name}


@BOTH
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("options", [{}, {"is_trainable": True}, {"low_cpu_mem_usage": True}])
def test_loaded_parameters_are_fp32_on_any_base(method, dtype, options, tmp_path):
    model = get_peft_model(make_model("gpt_neox", torch.bfloat16), METHODS[method]())
    tensors = {name.removeprefix("base_model.model."): p for name, p in perturb(model).items()}
    model.save_pretrained(tmp_path)
    by_transformers = make_model("gpt_neox", dtype)
    by_transformers.load_adapter(str(tmp_path), **options)
    for loaded in (PeftModel.from_pretrained(make_model("gpt_neox", dtype), tmp_path, **options), by_transformers):
        assert dtypes(loaded) == ({torch.float32}, {dtype})
        parameters = {name.removeprefix("base_model.model."): p for name, p in loaded.named_parameters()}
        assert all(torch.equal(parameters[name], tensor) for name, tensor in tensors.items())
    again = get_peft_model(make_model("gpt_neox", dtype), METHODS[method]())
    again.load_adapter(tmp_path, "second")
    assert dtypes(again) == ({torch.float32}, {dtype})


@BOTH
def test_a_cast_of_the_whole_model_is_the_users_will(method):
    model = get_peft_model(make_model("gpt_neox"), METHODS[method]()).to(torch.bfloat16)
    assert model(input_ids=make_tokens(), use_cache=False).logits.dtype == torch.bfloat16


@BOTH
@pytest.mark.parametrize("name", ["self_attn", "model", "layers", "weight", "base_model", "parts", "child"])
def test_a_name_that_peft_would_take_for_another_is_refused(method, name):
    """PEFT removes an adapter's name from the names of tensors, wherever it is."""
    config, tokens = METHODS[method](), make_tokens()
    part = {"pre": "preproj_up", "query": "nonlinear_query_up"}[method]
    name = {"parts": part, "child": config.spec.child}.get(name, name)
    model = trained("llama", method)
    before, names = logits_of(model, tokens), list(model.state_dict())
    for call in (
        lambda: get_peft_model(make_model("llama"), config, adapter_name=name),
        lambda: make_model("llama").add_adapter(config, adapter_name=name),
        lambda: model.add_adapter(name, config),
    ):
        with pytest.raises(HfpatchError, match=f"adapter name '{name}' is a part of .* names, from which PEFT would"):
            call()
    assert list(model.peft_config) == ["default"]
    assert list(model.state_dict()) == names
    assert torch.equal(logits_of(model, tokens), before)
