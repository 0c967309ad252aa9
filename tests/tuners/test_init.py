"""The initial values depend on the seed, the layer and the parameter's name alone."""

import pytest
import torch
from families import FEW, make_model
from peft import LoraConfig, get_peft_model

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch


def configs():
    return {
        "pre": PreProjectionConfig(gated=True, content_skip=True, init="paper", seed=3),
        "query": NonlinearQueryConfig(form="literal", targets=("query", "value"), seed=3),
    }


def values(model, *names):
    """The tensors of some adapters, by name without LoRA's wrapping."""
    state = {key.replace(".base_layer", ""): p.detach() for key, p in model.named_parameters()}
    return {key: p for key, p in state.items() if any(f".{name}." in key for name in names)}


def assert_same(first, second):
    assert first
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("case", FEW)
def test_init_is_independent_of_the_other_layers_and_of_options_that_add_nothing_to_it(case):
    def made(**options):
        model = make_model(case)
        model.add_adapter(PreProjectionConfig(init="paper", **options), adapter_name="a")
        return values(model, "a")

    everything = made(gated=True, content_skip=True)
    for options in (
        {},
        {"gated": True},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "content_skip": True},
    ):
        some = made(**options)
        assert_same(some, {name: everything[name] for name in some})


def test_layers_adapter_matrices_and_seeds_differ():
    model = make_model("llama")
    model.add_adapter(PreProjectionConfig(init="paper", content_skip=True, expansion=1.0, seed=1), adapter_name="a")
    model.add_adapter(PreProjectionConfig(init="paper", content_skip=True, expansion=1.0, seed=2), adapter_name="b")
    tensors = [p / p.std() for p in values(model, "a", "b").values()]
    assert len(tensors) == 2 * 2 * 3
    for i, one in enumerate(tensors):
        assert all((one - other).abs().max() > 0.1 for other in tensors[:i])


@pytest.mark.parametrize("kind", ["pre", "query", "lora"])
def test_two_parts_of_a_kind_start_apart_and_each_depends_on_its_own_name_alone(kind):
    def part():
        return LoraConfig(r=2, target_modules=["q_proj"]) if kind == "lora" else configs()[kind]

    names = ["pre_projection", "nonlinear_query", "lora"][["pre", "query", "lora"].index(kind)], "two"
    both = patch(make_model("llama"), [part(), part()], names=names, seed=3)
    first, second = (
        {key.replace(f".{name}.", "."): p for key, p in values(both, name).items() if p.dim() == 2 and p.any()}
        for name in names
    )
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert abs(torch.cosine_similarity(tensor.flatten(), second[key].flatten(), dim=0)) < 0.5, key
    alone = patch(make_model("llama"), [configs()["query"], part()], names=["first", "two"], seed=3)
    assert_same(values(both, "two"), values(alone, "two"))
    unnamed = patch(make_model("llama"), [part(), part()], seed=3)
    assert_same(values(both, names[0]), values(unnamed, names[0]))


def test_default_the_methods_name_and_the_way_in_do_not_matter():
    model = make_model("llama")
    model.add_adapter(configs()["pre"], adapter_name="pre_projection")
    wrapped = get_peft_model(make_model("llama"), configs()["pre"])
    first = {key.replace(".pre_projection.", "."): p for key, p in values(model, "pre_projection").items()}
    second = {key.replace(".default.", "."): p for key, p in values(wrapped.get_base_model(), "default").items()}
    assert_same(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_init_does_not_depend_on_the_dtype_of_the_base(dtype):
    low, full = make_model("gpt2", dtype), make_model("gpt2")
    for model in (low, full):
        model.add_adapter(configs()["query"], adapter_name="query")
    assert_same(values(full, "query"), values(low, "query"))
