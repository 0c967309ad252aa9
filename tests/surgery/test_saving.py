"""What is saved is what was trained, whatever the adapter, and comes back in the state that it was saved in."""

import copy

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from families import VOCABULARY, logits_of, make_model, make_tokens, perturb
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from tuners.test_offloading import base_in_pieces, to_disk, to_memory

import hfpatch
from hfpatch import HfpatchError, PreProjectionConfig
from hfpatch.surgery import part_files
from hfpatch.surgery.bases import fingerprint, hash_weights

TENSORS = "adapter_model.safetensors"
QUERIES = {"target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def experts():
    """A mixture of experts, whose weights transformers keep in one fused parameter for all experts."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **heads)).eval()


def all_linear(**options):
    return LoraConfig(r=2, target_modules="all-linear", **options)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize(
    "parts",
    [
        [all_linear()],
        [all_linear(), PreProjectionConfig(), IA3Config(feedforward_modules=[], **QUERIES)],
        [IA3Config(feedforward_modules=[], **QUERIES), all_linear()],
    ],
    ids=["alone", "first", "last"],
)
def test_lora_on_fused_experts_is_saved_whole(experts, parts, tmp_path):
    model, tokens = copy.deepcopy(experts), make_tokens()
    hfpatch.patch(model, parts)
    trained = perturb(model, std=0.2)
    assert len([name for name in trained if ".lora." in name]) == 28
    hfpatch.save_patch(model, tmp_path / "patch")
    files = (tmp_path / "patch").rglob("*.safetensors")
    assert sum(len(safetensors.torch.load_file(file)) for file in files) == len(trained)
    fresh = hfpatch.load_patch(copy.deepcopy(experts), tmp_path / "patch")
    state = {name: parameter for name, parameter in fresh.named_parameters() if name in trained}
    torch.testing.assert_close(state, trained, rtol=0, atol=0)
    assert torch.equal(logits_of(fresh, tokens), logits_of(model, tokens))
    model.set_adapter("lora")
    alone = PeftModel.from_pretrained(copy.deepcopy(experts), tmp_path / "patch" / "lora")
    assert torch.equal(logits_of(alone, tokens), logits_of(model, tokens))


def test_a_model_that_peft_wrapped_is_saved_as_one_that_it_did_not(tmp_path):
    model, tokens = get_peft_model(make_model("llama"), LoraConfig(r=2, **QUERIES)), make_tokens()
    model.add_adapter("more", LoraConfig(r=3, target_modules=["k_proj", "q_proj"]))
    model.base_model.set_adapter(["default", "more"])
    perturb(model, std=0.2)
    hfpatch.save_patch(model, tmp_path / "patch")
    fresh = hfpatch.load_patch(make_model("llama"), tmp_path / "patch")
    assert torch.equal(logits_of(fresh, tokens), logits_of(model, tokens))
    assert not torch.equal(logits_of(fresh, tokens), logits_of(make_model("llama"), tokens))


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors: tensors.clear(),
        lambda tensors: tensors.pop(min(tensors)),
        lambda tensors: tensors.update({min(tensors): torch.empty(0)}),
        lambda tensors: tensors.update({min(tensors): tensors[min(tensors)][:1].clone()}),
        lambda tensors: tensors.update({min(tensors): tensors[min(tensors)].to(torch.float16)}),
        lambda tensors: tensors.update({min(tensors): tensors[min(tensors)] + 1e-7}),
    ],
    ids=["empty file", "one missing", "one empty", "one partial", "another dtype", "other values"],
)
@pytest.mark.parametrize("to_disk", [True, False])
def test_a_tensor_that_is_not_in_the_files_is_an_error_and_nothing_is_written(to_disk, damage, tmp_path, monkeypatch):
    """Whether the disk loses it, or PEFT does not say that there is one."""
    parts = [PreProjectionConfig(content_skip=True), LoraConfig(r=2, **QUERIES)]  # some are zero, with equal bytes
    model = hfpatch.patch(make_model("llama"), parts)
    home, name = (safetensors.torch, "save_file") if to_disk else (part_files, "get_peft_model_state_dict")
    whole = getattr(home, name)

    def less(given, *args, **kwargs):
        tensors = dict(given if to_disk else whole(given, *args, **kwargs))
        damage(tensors)
        return whole(tensors, *args, **kwargs) if to_disk else tensors

    monkeypatch.setattr(home, name, less)
    message = "the file of 'pre_projection' is not what was saved" if to_disk else "of 10 trained tensors would not be"
    with pytest.raises(HfpatchError, match=f"patch: .*{message}"):
        hfpatch.save_patch(model, tmp_path / "patch")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["llama", "gemma2"])  # gemma2 ties its embeddings
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},  # PEFT saves the base's embeddings beside it
        {"modules_to_save": ["lm_head"], **QUERIES},  # saved under the name of a tensor of the base
        {"trainable_token_indices": [1, 2, 3], **QUERIES},
    ],
    ids=["on embeddings", "trained copy", "trained tokens"],
)
def test_what_peft_saves_of_embeddings_is_loaded(case, options, tmp_path):
    model, tokens = get_peft_model(make_model(case), LoraConfig(r=2, **options)), make_tokens()
    perturb(model, std=0.2)
    model.save_pretrained(tmp_path / "by_peft")
    for folder in (tmp_path / "by_peft", hfpatch.save_patch(model, tmp_path / "by_us")):
        fresh = hfpatch.load_patch(make_model(case), folder)
        assert torch.equal(logits_of(fresh, tokens), logits_of(model, tokens))


@pytest.mark.parametrize("offload", [to_memory, to_disk, None], ids=["cpu", "disk", "part"])
def test_an_offloaded_model_is_the_same_base_and_peft_has_no_values_for_its_adapters(offload, tmp_path):
    """With tied embeddings."""
    offloaded = offload(make_model("gemma2"), tmp_path) if offload else base_in_pieces(tmp_path, "gemma2")
    assert any(p.is_meta for p in offloaded.parameters())
    assert fingerprint(offloaded) == fingerprint(make_model("gemma2"))
    assert hash_weights(offloaded) == hash_weights(make_model("gemma2"))
    before = {name: p.requires_grad for name, p in offloaded.named_parameters()}
    with pytest.raises(HfpatchError, match=r"q_proj\.lora_A.* is offloaded, and PEFT gives its adapter no values"):
        hfpatch.patch(offloaded, LoraConfig(r=2, **QUERIES))
    assert {name: p.requires_grad for name, p in offloaded.named_parameters()} == before
    assert not any(p.is_meta for p in hfpatch.patch(make_model("gemma2"), LoraConfig(r=2, **QUERIES)).parameters())


@pytest.mark.parametrize(
    "parts", [[PreProjectionConfig()], [PreProjectionConfig(), all_linear()]], ids=["one", "stack"]
)
def test_sharded_adapters_are_refused_in_one_line(parts, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(hfpatch.patch(make_model("llama"), parts), mesh=init_device_mesh("cpu", (1,)))
        for save in (hfpatch.save_patch, lambda model, folder: model.save_pretrained(folder)):
            with pytest.raises(HfpatchError, match=r"\.weight: is sharded over processes; "):
                save(model, tmp_path / "saved")
    finally:
        dist.destroy_process_group()
    assert not (tmp_path / "saved").exists()
