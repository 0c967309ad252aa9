import os
import shutil
from struct import pack

import gguf
import pytest
import torch
from families import logits_of
from gguf_models import TEMPLATE, WORDS, damaged, holding, write_gguf
from surgery.test_bases import downloaded
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hfpatch
from hfpatch import HfpatchError, PreProjectionConfig
from hfpatch.support.files import sha256_file
from hfpatch.surgery.bases import load_base, load_config, load_tokenizer
from hfpatch.surgery.gguf_files import gguf_loading, parsed_once, read_gguf

TOKENS = torch.arange(2 * 9).view(2, 9) * 7 % len(WORDS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return folder / "tiny.Q8_0.gguf", write_gguf(folder / "tiny.Q8_0.gguf", "llama")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_1"), ("llama", "F32"), ("llama", "BF16"), ("qwen2", "Q8_0"), ("qwen2", "Q5_0"), ("gpt2", "Q8_0"),
        ("gpt2", "Q4_0"), ("gpt2", "F16"),
    ],
)  # fmt: skip
def test_a_file_is_the_model_of_its_dequantised_weights(tmp_path, family, kind):
    file = tmp_path / f"tiny.{kind}.gguf"
    plain = holding(family, write_gguf(file, family, kind))
    base = load_base(str(file))
    assert torch.equal(logits_of(base.model, TOKENS), logits_of(plain, TOKENS))
    assert type(base.model) is type(plain)
    assert (base.gguf.quantization, base.gguf.sha256) == (kind, sha256_file(file))
    words = f"{'read as' if 'F' in kind else 'dequantised from'} {kind}"
    assert base.facts["gguf"] == {
        "file": file.name, "file_sha256": sha256_file(file), "quantization": kind, "weights": words
    }  # fmt: skip
    assert base.tokenizer.decode(base.tokenizer("the the")["input_ids"]) == "the the"
    assert base.tokenizer.chat_template == TEMPLATE


def test_a_patch_goes_on_the_file_and_on_the_folder_but_on_no_other_quantisation(llama, tmp_path):
    model = hfpatch.patch(load_base(str(llama[0])).model, PreProjectionConfig(init="paper"))
    hfpatch.save_patch(model, tmp_path / "patch")
    logits = logits_of(model, TOKENS)
    hfpatch.unpatch(model).save_pretrained(tmp_path / "plain")
    load_base(str(llama[0])).tokenizer.save_pretrained(tmp_path / "plain")
    for name in (str(llama[0]), str(tmp_path / "plain")):
        assert torch.equal(logits_of(hfpatch.load_patch(load_base(name).model, tmp_path / "patch"), TOKENS), logits)
    write_gguf(tmp_path / "tiny.Q4_1.gguf", "llama", "Q4_1")
    other = load_base(str(tmp_path / "tiny.Q4_1.gguf")).model
    with pytest.raises(HfpatchError, match=r"made for another base, .*tiny\.Q8_0\.gguf"):
        hfpatch.load_patch(other, tmp_path / "patch")


def test_ways_to_name_a_file(llama, tmp_path, monkeypatch):
    file = llama[0]
    assert load_base(str(file.parent), gguf_file=file.name).name == str(file)
    assert load_base(str(file.parent)).name == str(file)  # the only one in a folder without a model
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / file.name, "llama", seed=1)  # one of the same name here is another
    assert load_base(str(file.parent), gguf_file=file.name).gguf.sha256 == sha256_file(file)
    assert load_base(file.name).gguf.sha256 == sha256_file(tmp_path / file.name)
    assert load_config(str(file)).hidden_size == 64
    assert len(load_tokenizer(str(file))) == len(WORDS)


def test_a_file_in_the_cache_of_the_hub(llama, tmp_path, monkeypatch):
    revision = downloaded(tmp_path, "some/model-GGUF", llama[0].parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, file in (("some/model-GGUF", llama[0].name), (f"some/model-GGUF/{llama[0].name}", None)):
        base = load_base(name, gguf_file=file)
        assert (base.name, base.revision) == (f"some/model-GGUF/{llama[0].name}", revision)
        assert base.model.name_or_path == base.name
    with pytest.raises(HfpatchError, match=r"some/model-GGUF/other\.gguf: cannot be downloaded from the hub"):
        load_base("some/model-GGUF", gguf_file="other.gguf")


def test_several_files_and_none(llama, tmp_path, monkeypatch):
    shutil.copy(llama[0], tmp_path / "a.gguf")
    shutil.copy(llama[0], tmp_path / "b.gguf")
    with pytest.raises(HfpatchError, match=r"has several GGUF files \(a\.gguf, b\.gguf\); name one of them"):
        load_base(str(tmp_path))
    with pytest.raises(HfpatchError, match=r"c\.gguf: no such file \(GGUF files in its folder: a\.gguf, b\.gguf\)"):
        load_base(str(tmp_path / "c.gguf"))
    monkeypatch.chdir(tmp_path.parent)
    for name, file in (
        ("nowhere.gguf", None), ("tinyworld/gpt2", "c.gguf"), (f"{tmp_path.name}/a.gguf", "c.gguf"),
    ):  # fmt: skip
        with pytest.raises(HfpatchError, match=r"no such file"):
            load_base(name, gguf_file=file)
    (tmp_path / "x-00001-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(HfpatchError, match="is one of 3 parts"):
        load_base(str(tmp_path / "x-00001-of-00003.gguf"))


def test_damage_anywhere_in_the_file_is_one_line(llama, tmp_path):
    data, file = llama[0].read_bytes(), tmp_path / "broken.gguf"
    header = data.index(b"blk.1.ffn_down")  # in the table of tensors
    wrong = [b"", b"GGUF", data[:-40_000], data[: header + 5], data[:100], b"XXXX" + data[4:], b"GGUF" + b"\xff" * 400]
    wrong += [data[: len(data) * part // 20] for part in range(1, 19)]
    wrong += [damaged(data, key_count=10**12), damaged(data, key_count=3)]
    write_gguf(file, "llama", extra={"general.alignment": "0"})
    wrong.append(file.read_bytes())
    for content in wrong:
        file.write_bytes(content)
        with pytest.raises(HfpatchError, match=r"broken\.gguf: damaged, truncated or not a GGUF file"):
            load_base(str(file))


def test_a_big_endian_file_is_not_called_damaged(llama, tmp_path):
    data = llama[0].read_bytes()
    (tmp_path / "big.gguf").write_bytes(data[:4] + data[7:3:-1] + data[8:])  # the version
    with pytest.raises(HfpatchError, match=r"big\.gguf: is big-endian; convert a copy of it"):
        load_base(tmp_path / "big.gguf")


def test_what_transformers_would_leave_out_is_refused(tmp_path):
    write_gguf(tmp_path / "scaled.gguf", "llama", extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(HfpatchError, match="does not read its RoPE scaling 'yarn'"):
        load_base(str(tmp_path / "scaled.gguf"))
    write_gguf(tmp_path / "plain.gguf", "llama", extra={"llama.rope.scaling.type": "none"})
    load_base(str(tmp_path / "plain.gguf"))


def test_without_the_extra_it_is_one_clear_line(llama, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HfpatchError, match=r"need the package gguf; pip install 'hfpatch\[gguf\]'"):
        load_base(str(llama[0]))


@pytest.mark.parametrize("number", [None, 999, gguf.LlamaFileType.GUESSED])  # no name, a newer one, a guess
def test_the_quantisation_of_a_file_that_does_not_name_it(tmp_path, number):
    write_gguf(tmp_path / "x.gguf", "llama", "Q5_1")
    data, key = (tmp_path / "x.gguf").read_bytes(), b"general.file_type"
    start = data.index(key) + len(key) + 4  # behind the type of the value
    numbered = data[:start] + pack("<I", number or 0) + data[start + 4 :]
    data = data.replace(key, b"general.file_tipe") if number is None else numbered
    (tmp_path / "x.gguf").write_bytes(data)
    assert read_gguf(tmp_path / "x.gguf").quantization == "Q5_1"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_file_is_parsed_once_and_as_transformers_parses_it(tmp_path, monkeypatch, family):
    file, parsed = tmp_path / "tiny.Q4_1.gguf", []
    write_gguf(file, family, "Q4_1")
    given = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32, **gguf_loading())
    tokenizer, config = AutoTokenizer.from_pretrained(**given), AutoConfig.from_pretrained(**given)
    reader, init = gguf.GGUFReader, gguf.GGUFReader.__init__
    monkeypatch.setattr(reader, "__init__", lambda self, path: (parsed.append(path), init(self, path))[1])
    base = load_base(str(file))
    assert len(parsed) == 1
    assert gguf.GGUFReader is reader
    assert {name: value.tolist() for name, value in base.model.state_dict().items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    assert load_config(str(file)).to_dict() == config.to_dict()
    loaded, stock = load_tokenizer(str(file)), base.tokenizer
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (loaded.chat_template, loaded.special_tokens_map) == (stock.chat_template, stock.special_tokens_map)


def test_a_file_that_changed_is_parsed_again(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "llama", "Q8_0")
    with parsed_once():
        first = gguf.GGUFReader(file)
        assert gguf.GGUFReader(file) is first
        write_gguf(file, "llama", "Q8_0", seed=1)
        os.utime(file, ns=(1, 1))
        assert gguf.GGUFReader(file) is not first
