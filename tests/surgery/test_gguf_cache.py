import os

import pytest
import torch
from gguf_models import TEMPLATE, write_gguf

import hfpatch.surgery.gguf_cache as cache
from hfpatch.runs.identity import identify_base, identify_tokenizer
from hfpatch.support.folders import cache_folder
from hfpatch.surgery.bases import load_base


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_1")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def read(monkeypatch):
    """Whether each load read a kept model."""
    reads = []

    def noting(*given):
        reads.append((kept := plain(*given)) is not None)
        return kept

    plain = cache.read_dequantised
    monkeypatch.setattr("hfpatch.surgery.bases.read_dequantised", noting)
    return reads


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("gpt2", "float32")])
def test_a_kept_model_equals_the_dequantised_one_bit_for_bit(file, read, family, dtype):
    """Also where the tokenizer would read back as another one, as Qwen2's."""
    write_gguf(file, family, "Q4_1")
    first, second = (load_base(file, dtype=dtype) for _ in range(2))
    assert read == [False, True]
    values, kept = first.model.state_dict(), second.model.state_dict()
    assert values.keys() == kept.keys()
    assert all(torch.equal(values[name], kept[name]) and kept[name].dtype == values[name].dtype for name in values)
    assert first.facts == second.facts
    assert identify_base(first) == identify_base(second)
    assert first.model.config.to_dict() == second.model.config.to_dict()
    assert first.model.name_or_path == second.model.name_or_path
    assert first.model.config.name_or_path == second.model.config.name_or_path
    assert identify_tokenizer(first.tokenizer) == identify_tokenizer(second.tokenizer)
    assert first.tokenizer.name_or_path == second.tokenizer.name_or_path
    for text in ("the the", ["<|start|>the", " t"]):
        assert first.tokenizer(text)["input_ids"] == second.tokenizer(text)["input_ids"]
    assert second.tokenizer.chat_template == TEMPLATE
    assert second.tokenizer.pad_token_id == first.tokenizer.pad_token_id


def test_nothing_of_the_file_is_parsed_for_a_kept_model(file, monkeypatch):
    load_base(file)
    monkeypatch.setattr("hfpatch.surgery.bases.parsed_once", lambda: pytest.fail("gguf, slow to import, was asked"))
    load_base(file)


def test_it_is_known_by_the_files_content_and_the_dtype(file, read, tmp_path):
    load_base(file)
    file = file.rename(tmp_path / "other.gguf")
    load_base(file)
    load_base(file, dtype="bfloat16")
    write_gguf(file, "llama", "Q4_1", seed=1)
    load_base(file)
    assert read == [False, True, False, False]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "kept.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_one_is_dequantised_again(file, read, name, damage):
    expected = load_base(file).sha256
    (folder,) = cache_folder("gguf").iterdir()
    content = bytearray((folder / name).read_bytes())
    content[-9] ^= 1
    (folder / name).unlink()
    if damage != "missing":
        (folder / name).write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    assert load_base(file).sha256 == expected
    assert load_base(file).sha256 == expected
    assert read == [False, False, True]


def test_the_last_ones_that_were_read_are_kept(file, read, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 2)
    for seed in range(3):
        write_gguf(tmp_path / f"{seed}.gguf", "llama", "Q4_1", seed=seed)
        load_base(tmp_path / f"{seed}.gguf")
        for age, folder in enumerate(sorted(cache_folder("gguf").iterdir(), key=lambda path: path.stat().st_mtime)):
            os.utime(folder, (age, age))
    read.clear()
    for seed in (1, 2, 0):
        load_base(tmp_path / f"{seed}.gguf")
    assert read == [True, True, False]


def test_a_cache_that_can_only_be_read_is_read(file, read, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "read-only")

    load_base(file)
    monkeypatch.setattr("pathlib.Path.touch", refuse)
    load_base(file)
    assert read == [False, True]


def test_nothing_is_kept_of_small_or_large_models_or_where_nothing_can_be_written(file, read, monkeypatch):
    for name, value in (("LEAST_BYTES", 1 << 40), ("MOST_BYTES", 1)):
        with monkeypatch.context() as patched:
            patched.setattr(cache, name, value)
            load_base(file)
    cache_folder("gguf").parent.mkdir(exist_ok=True)
    cache_folder("gguf").write_text("no folder")
    load_base(file)
    load_base(file)
    assert not any(read)
