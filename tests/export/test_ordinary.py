"""An export is an ordinary transformers model: saved again, trained, cast, adapted; the commands take it."""

import json
import shutil
import subprocess
import sys

import elsewhere
import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    Gemma2ForCausalLM,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)

import hfpatch
from hfpatch import NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.__main__ import main
from hfpatch.export import export_patch
from hfpatch.export.runtime import Around
from hfpatch.export.write import write_model
from hfpatch.surgery.bases import locate

TOKENS = make_tokens(2, 7)
LORA = LoraConfig(r=2, target_modules=["q_proj"])
STACK = [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(rank=3), LORA]


def patched():
    model = hfpatch.patch(make_model("gemma2"), STACK)
    perturb(model)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("export")
    write_model(patched(), path)
    return path


def save_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(locate("tinyworld/gpt-neox")[0])
    tokenizer.save_pretrained(folder)
    return tokenizer


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


TOKENIZE = """
import sys
from transformers import AutoTokenizer
print([AutoTokenizer.from_pretrained(home)("Anna ran.").input_ids for home in sys.argv[1:]])
"""


def test_its_tokenizer_loads_without_a_question_and_without_a_word(folder, tmp_path):
    """In a process of its own, which nobody answers; saved again, too."""
    model, homes = load(folder), [tmp_path / "export", tmp_path / "resaved"]
    shutil.copytree(folder, homes[0])
    model.save_pretrained(homes[1])
    tokenizer, *_ = [save_tokenizer(home) for home in homes]
    alone = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", TOKENIZE, *map(str, homes)], **alone)
    assert json.loads(done.stdout) == [tokenizer("Anna ran.").input_ids] * 2
    assert done.stderr == ""
    for home in homes:
        assert torch.equal(logits_of(load(home), TOKENS), logits_of(model, TOKENS))


def test_nothing_loads_it_without_its_patch(folder, tmp_path, capsys):
    """Its file has the base's model type, whose classes are there."""
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gemma2"
    assert load(folder).config.model_type == "hfpatch_gemma2"
    for kind in (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification, Gemma2ForCausalLM):
        with pytest.raises(ValueError, match="none without trust_remote_code=True"):
            kind.from_pretrained(folder)
    export = str(shutil.copytree(folder, tmp_path / "export"))
    save_tokenizer(export)
    evaluated = ["eval", "--tasks", "tinyworld_cloze", "--model", export]
    for command in (["inspect", export], ["check", export], ["check", export, "--config-only"], evaluated):
        assert main(command) == 2
        assert "contains code of its own" in capsys.readouterr().err


@torch.no_grad()
def test_the_body_alone_computes_what_the_patched_model_does(folder):
    body = AutoModel.from_pretrained(folder, trust_remote_code=True).eval().requires_grad_(False)
    assert torch.equal(*(part(TOKENS, use_cache=False).last_hidden_state for part in (body, patched().model)))


def test_trainer_trains_and_saves_it(folder, tmp_path):
    model = load(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    options = {"max_steps": 2, "learning_rate": 1e-2, "gradient_checkpointing": True}
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert torch.equal(logits_of(load(tmp_path / "last"), TOKENS), logits_of(model.eval(), TOKENS))


def test_another_dtype_is_the_one_of_the_base_and_the_parts_stay_in_fp32(folder):
    model = load(folder, dtype=torch.bfloat16, device_map="cpu")
    dtypes = {("hfpatch_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    actual, expected = (logits_of(net, TOKENS).flatten().float() for net in (model, load(folder)))
    assert torch.nn.functional.cosine_similarity(actual, expected, dim=0) > 0.99


@torch.no_grad()
def test_under_autocast_it_computes_what_the_patched_model_does(tmp_path):
    make_model("gemma2").save_pretrained(tmp_path / "base")
    model = hfpatch.patch(load(tmp_path / "base", dtype=torch.bfloat16), STACK)
    perturb(model)
    (tmp_path / "export").mkdir()
    write_model(model, tmp_path / "export")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = (logits_of(net.requires_grad_(False), TOKENS) for net in (load(tmp_path / "export"), model))
    assert torch.equal(actual, expected)


@pytest.mark.slow
def test_it_is_quantised_as_its_base_would_be(tmp_path):
    parts = [PreProjectionConfig(expansion=0, content_skip=True), QueryTemperatureConfig(), QueryTemperatureConfig()]
    make_model("llama").save_pretrained(tmp_path / "base")
    model = hfpatch.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), [*STACK, *parts])
    perturb(model)
    hfpatch.save_patch(model, tmp_path / "patch")
    (tmp_path / "export").mkdir()
    write_model(model, tmp_path / "export")
    eight_bits = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **eight_bits).eval()
    plain = logits_of(base, TOKENS)
    expected = logits_of(hfpatch.load_patch(base, tmp_path / "patch", allow_other_base=True), TOKENS)
    exported = load(tmp_path / "export", **eight_bits)
    assert {p.dtype for name, p in exported.named_parameters() if "q_proj.base.weight" in name} == {torch.int8}
    assert torch.equal(logits_of(exported, TOKENS), expected)
    assert not torch.allclose(expected, plain, atol=1e-2)


def test_a_new_model_of_its_configuration_computes_what_a_new_base_does(folder):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
    assert logits_of(model, TOKENS).isfinite().all()


def test_lora_on_top_goes_into_the_base_inside_the_parts(folder):
    model = load(folder)
    expected = logits_of(model, TOKENS)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    assert torch.equal(logits_of(adapted, TOKENS), expected)
    perturb(adapted)
    expected = logits_of(adapted, TOKENS)
    merged = adapted.merge_and_unload()
    around = [module for module in merged.modules() if type(module).__name__ == Around.__name__]
    assert len(around) == 4  # query, last norm; 2 blocks
    assert torch.allclose(logits_of(merged, TOKENS), expected, atol=1e-4)


@pytest.mark.slow
def test_a_peft_adapter_folder_is_exported_with_what_stands_beside_it_and_the_commands_take_it(tmp_path, capsys):
    make_model("llama").save_pretrained(tmp_path / "base")
    tokenizer = save_tokenizer(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    perturb(model)
    model.base_model.model.lm_head.modules_to_save["default"].weight.data *= 1.5
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.chat_template = "of the adapter"
    tokenizer.save_pretrained(tmp_path / "adapter")
    GenerationConfig(max_new_tokens=3, eos_token_id=None).save_pretrained(tmp_path / "adapter")

    folder = export_patch(tmp_path / "adapter", tmp_path / "export").directory
    computed, _ = elsewhere.computed(folder, TOKENS)
    assert torch.allclose(computed["logits"], logits_of(model, TOKENS), atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "of the adapter"
    assert load(folder).generate(TOKENS, do_sample=False, pad_token_id=0).shape == (2, 10)

    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "--trust-remote-code" in error
    assert error.count("\n") == 1
    assert main(["inspect", str(folder), "--trust-remote-code", "--json"]) == 0
    assert main(["check", str(folder), "--config-only", "--trust-remote-code"]) == 2
    assert "leave --config-only out" in capsys.readouterr().err
