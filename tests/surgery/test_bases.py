import json
import shutil
import socket

import pytest
import torch
from families import FAMILIES, VOCABULARY, logits_of, make_config, make_model, make_tokens
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

import hfpatch
from hfpatch import HfpatchError, PreProjectionConfig
from hfpatch.sites import concatenated, family, gated, per_head, separate
from hfpatch.surgery.bases import (
    difference,
    fingerprint,
    hash_model_code,
    hash_weights,
    load_base,
    load_config,
    load_tokenizer,
    locate,
)
from hfpatch.surgery.budget import attention_modules


def save_checkpoint(folder, *, pad=None, case="gpt_neox"):
    make_model(case).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token=pad).save_pretrained(folder)
    return folder


def downloaded(cache, name, folder):
    """Put a folder into a hub cache as the only snapshot of a repository; return its revision."""
    revision, repository = "0123456789abcdef0123456789abcdef01234567", cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return revision


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("bases") / "checkpoint")


def test_a_folder_without_the_head_of_a_causal_model_is_refused(tmp_path):
    config = make_config("llama")
    config.pad_token_id, config.tie_word_embeddings = 0, False
    for kind in (AutoModelForSequenceClassification, AutoModel):
        model = kind.from_config(config)
        folder = save_checkpoint(tmp_path / kind.__name__)
        model.save_pretrained(folder)
        with pytest.raises(HfpatchError, match=rf"was saved as {type(model).__name__}\): 1 weights, such as lm_head"):
            load_base(folder)


def test_a_folder(checkpoint):
    base = load_base(str(checkpoint))
    assert (base.name, base.revision) == (str(checkpoint), None)
    assert torch.equal(logits_of(base.model, make_tokens()), logits_of(make_model("gpt_neox"), make_tokens()))
    assert not base.model.training
    assert base.sha256 == hash_weights(make_model("gpt_neox"))
    assert base.tokenizer.pad_token == "w2"
    for dtype in ("float32", torch.bfloat16, "float16"):
        model = load_base(checkpoint, dtype=dtype).model
        assert {f"{p.dtype}" for p in model.parameters()} == {f"torch.{dtype}".replace("torch.torch", "torch")}


def test_a_padding_token_that_is_there_is_kept_and_a_tokenizer_may_be_alone(tmp_path, checkpoint):
    assert load_base(str(save_checkpoint(tmp_path / "c", pad="w5"))).tokenizer.pad_token == "w5"
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (len(tokenizer), tokenizer.pad_token) == (VOCABULARY, "w2")


@pytest.fixture
def hub_cache(checkpoint, tmp_path, monkeypatch):
    """A hub cache that holds one model, as a download leaves it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return downloaded(tmp_path, "some/model", checkpoint)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_model_in_the_cache_of_the_hub(hub_cache, no_network, tmp_path):
    base = load_base("some/model")
    assert (base.name, base.revision) == ("some/model", hub_cache)
    assert (locate("some/model"), locate("gpt2")) == (("some/model", None), ("gpt2", None))
    assert base.sha256 == hash_weights(make_model("gpt_neox"))
    assert load_base("some/model", revision=hub_cache).revision == hub_cache
    assert load_base("some/model", revision="main").revision == hub_cache
    assert load_base(tmp_path / "models--some--model" / "snapshots" / hub_cache).revision == hub_cache


@pytest.mark.parametrize(
    ("load", "name", "options", "message"),
    [
        *(
            (load_base, name, {"revision": revision}, f"model '{name}' cannot be loaded: ")
            for name, revision in (("some/other", None), ("some/model", "v2"), ("gpt9", None), ("a b/x", None))
        ),
        *(
            (load_base, name, {}, r"model folder .* does not exist")
            for name in ("./nowhere", "/no/where", "a/b/c", "~/models/x")
        ),
        *(
            (load_base, "{saved}", {"device_map": at}, r"device (npu:7|77): not available")
            for at in ("npu:7", {"": "npu:7"}, {"": 77})
        ),
        (load_base, "{saved}", {"dtype": torch.int8}, "dtype='int8' is not one of"),
        (load_base, "some/model", {"dtype": "floating16"}, r"dtype='floating16' is not one .*did you mean 'float16'"),
        (load_base, "{saved}/config.json", {}, r"config.json' is a file; give the folder of a model"),
        (load_base, "{empty}", {}, r"no config.json; .* runs/\*/seed-\*/model\); a patch .* with --patch"),
        (load_tokenizer, "tinyworld/gpt3", {}, "tinyworld has no checkpoint 'gpt3'.*did you mean 'gpt2'"),
        (load_tokenizer, "some/other", {}, "tokenizer 'some/other' cannot be loaded: "),
        (load_tokenizer, "./nowhere", {}, "'./nowhere' does not exist"),
        (load_tokenizer, "{empty}", {}, "tokenizer .* cannot be loaded: "),
    ],
)
@pytest.mark.usefixtures("hub_cache", "no_network")
def test_what_cannot_be_loaded(load, name, options, message, checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(HfpatchError, match=message):
        load(name.format(saved=checkpoint, empty=tmp_path / "empty"), **options)


@pytest.mark.parametrize("name", ["tinyworld/gpt-neox", ""])
def test_what_is_not_of_the_hub_has_no_revision(name, checkpoint):
    for load in (load_base, load_tokenizer, load_config):
        with pytest.raises(
            HfpatchError, match=r"revision main: .* is (embedded in hfpatch|local), and only hub models have revisions"
        ):
            load(name or str(checkpoint), revision="main")


@pytest.mark.parametrize("name", ["", " "])
def test_a_model_without_a_name(name, checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)  # the folder that '' would mean
    for load in (load_base, load_tokenizer, load_config):
        with pytest.raises(HfpatchError, match="the model has no name"):
            load(name)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", "{}"),
        ("model.safetensors", "xx"),
        ("model.safetensors", None),
        ("tokenizer.json", None),
    ],
)
def test_a_folder_with_a_broken_or_missing_file(checkpoint, tmp_path, file, text):
    folder = shutil.copytree(checkpoint, tmp_path / "c")
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    reason = "there is no tokenizer .*; save the model's own" if file == "tokenizer.json" and text is None else ""
    with pytest.raises(HfpatchError, match=f"cannot be loaded: {reason}"):
        load_base(str(folder))


@pytest.mark.parametrize("identify", [hash_weights, fingerprint])
@pytest.mark.parametrize("case", FAMILIES)
def test_hash_and_fingerprint_do_not_see_adapters(case, identify):
    model = make_model(case)
    before = identify(model)
    assert identify(make_model(case)) == before
    hfpatch.patch(model, [PreProjectionConfig(), LoraConfig(r=2, target_modules=attention_modules(model))])
    assert identify(model) == before
    assert identify(hfpatch.unpatch(model)) == before


@pytest.mark.parametrize("layout", [separate, gated, concatenated, per_head])
def test_the_hash_of_the_code_sees_the_users_own_family(monkeypatch, layout):
    """With another path, output or factor it is another one."""
    model, built_in = make_model("llama"), hash_model_code(make_model("llama"))
    path = "query" if layout in (separate, gated) else "path"

    def half(block):
        return 0.5

    def hashed(at="q_proj", **changes):
        given = {"layers": "layers", "attention": "self_attn", "qkv": layout(**{path: at}), "output": "o_proj"}
        declared = hfpatch.Family(name="mine", model_types=("mine",), **given | changes)
        monkeypatch.setitem(family.DECLARED, "llama", declared)
        return hash_model_code(model)

    assert hashed() == hashed() != built_in
    assert len({hashed(), hashed("k_proj"), hashed(factor=half), hashed(output="q_proj")}) == 4


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("loaded", DTYPES)
@pytest.mark.parametrize("saved", DTYPES)
def test_a_base_is_known_in_another_dtype(saved, loaded):
    """All but bfloat16 and float16 of one float32 checkpoint, of which neither follows from the other."""
    mark = json.loads(json.dumps(fingerprint(make_model("gemma2", saved))))
    incomparable = {saved, loaded} == {torch.bfloat16, torch.float16}
    assert ("do not match those in" in difference(mark, make_model("gemma2", loaded))) == incomparable
    in_bfloat16 = make_model("gemma2", torch.bfloat16)
    assert not difference(fingerprint(in_bfloat16), in_bfloat16.to(loaded))


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_hash_and_fingerprint_see_a_change_in_any_tensor(loaded):
    """The last bit of one value in the same dtype; in another, what its rounding leaves."""
    model = make_model("gemma2")
    model.model.register_buffer("correction", torch.ones(3))
    mark = fingerprint(model)
    model.to(loaded)
    weights = hash_weights(model)
    assert not difference(mark, model)
    for name, tensor in model.state_dict().items():
        flat = tensor.view(-1)
        index = flat.numel() * 5 // 7
        before = flat[index].clone()
        flat[index] = torch.nextafter(before, before + 1) if loaded == torch.float32 else before + before.abs() / 64
        assert difference(mark, model), name
        assert (hash_weights(model) == weights) == (name == "model.correction"), name  # it is of parameters
        flat[index] = before
    assert not difference(mark, model)
    down = model.model.layers[0].mlp.down_proj.weight.data
    down[:, [3, 5]] *= -1  # sums over positions would not see it
    assert difference(mark, model)
