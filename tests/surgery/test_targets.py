import pytest
from families import make_model

from hfpatch import HfpatchError
from hfpatch.surgery.methods import build_method
from hfpatch.surgery.targets import target_names

PLACES = {  # read in transformers' modelling source: attention, MLP, and what all-linear has beside them
    "llama": (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"], "model.layers.{}"),
    "gpt_neox": (["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"], "gpt_neox.layers.{}"),
    "gpt2": (["c_attn", "c_proj"], ["c_fc", "c_proj"], "transformer.h.{}"),
}
BRANCHES = {"llama": ("self_attn", "mlp"), "gpt_neox": ("attention", "mlp"), "gpt2": ("attn", "mlp")}


def expected(case, where, layers=(0, 1)):
    attention, mlp, block = PLACES[case]
    branches = dict(zip(("attention", "mlp"), zip(BRANCHES[case], (attention, mlp), strict=True), strict=True))
    wanted = ["attention", "mlp"] if where == "all-linear" else [where]
    names = [(branches[each][0], name) for each in wanted for name in branches[each][1]]
    return {f"{block.format(layer)}.{branch}.{name}" for layer in layers for branch, name in names}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("where", ["attention", "mlp", "all-linear"])
def test_what_the_shorthands_name(case, where):
    model = make_model(case)
    assert set(target_names(model, where)) == expected(case, where)
    assert set(target_names(model, where, layers=[1])) == expected(case, where, layers=[1])


@pytest.mark.parametrize("kind", ["lora", "loha", "ia3", "oft", "vera"])
def test_all_tuners_take_them(kind):
    model = make_model("llama")
    part = {"type": kind, "target_modules": "mlp", "layers_to_transform": 0}
    if kind == "vera":
        with pytest.raises(HfpatchError, match="keeps tensors that its layers share"):
            build_method(model, {"x": [part]}, "x")
        return
    if kind == "ia3":
        part |= {"feedforward_modules": []}
        del part["layers_to_transform"]
    (config,) = build_method(model, {"x": [part]}, "x").configs
    assert set(config.target_modules) == expected("llama", "mlp", layers=(0, 1) if kind == "ia3" else (0,))


def test_hybrids_have_an_mlp_beside_another_mixer():
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4,
        "expert_layer_offset": 3, "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **options))
    mlps = {f"model.layers.{i}.feed_forward.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")}
    assert set(target_names(model, "mlp")) == mlps
    assert {f"model.layers.0.mamba.{n}" for n in ("in_proj", "x_proj", "dt_proj", "out_proj")} <= set(
        target_names(model, "all-linear")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [9]}, r"layers \[9\] do not exist"),
        ({"pattern": "layers"}, "layers_pattern does not go with target_modules=mlp"),
    ],
)
def test_what_cannot_be_named(options, message):
    with pytest.raises(HfpatchError, match=message):
        target_names(make_model("llama"), "mlp", **options)
