"""Exports, loaded by a process in which neither hfpatch nor PEFT can be imported."""

import elsewhere
import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from peft import BeftConfig, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.export import export_patch
from hfpatch.surgery.bases import locate
from hfpatch.surgery.budget import attention_modules

CASES = {"gpt_neox": torch.float32, "gpt2": torch.float32, "llama": torch.bfloat16, "gemma2": torch.float32}


def stack_for(model):
    return [
        PreProjectionConfig(gated=True, content_skip=True),
        LoraConfig(r=2, lora_alpha=6, use_rslora=True, target_modules=attention_modules(model)),
        NonlinearQueryConfig(rank=3, targets=("query", "value")),
        PreProjectionConfig(activation="relu2", content_skip=True),
        NonlinearQueryConfig(rank=4, form="literal", activation="relu", input_norm="layernorm", output_norm="none"),
    ]


def write_base(case, dtype, folder):
    make_model(case, dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(locate("tinyworld/gpt-neox")[0]).save_pretrained(folder)
    return folder


def write_patch(base, dtype, folder, configs):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    hfpatch.patch(model, configs(model))
    perturb(model, std=0.2)
    hfpatch.save_patch(model, folder)
    return model


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return for each case its export, our logits and new tokens, what the other process computes, and its dtypes."""
    root, tokens, found = tmp_path_factory.mktemp("exports"), make_tokens(2, 7), {}
    for case, dtype in CASES.items():
        home = root / case
        base = write_base(case, dtype, home / "base")
        model = write_patch(base, dtype, home / "patch", stack_for)
        with torch.no_grad():
            ours = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        folder = export_patch(home / "patch", home / "export", dtype=str(dtype).removeprefix("torch.")).directory
        found[case] = (folder, logits_of(model, tokens), ours, *elsewhere.computed(folder, tokens, new_tokens=6))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_another_process_without_hfpatch_computes_and_writes_the_same(exports, case):
    _, logits, written, theirs, dtypes = exports[case]
    assert torch.equal(theirs["logits"], logits)
    assert torch.equal(theirs["written"], written)
    assert {kind for name, kind in dtypes.items() if "hfpatch" in name} == {"torch.float32"}
    assert {kind for name, kind in dtypes.items() if "hfpatch" not in name} == {str(CASES[case])}
    base = logits_of(make_model(case, CASES[case]), make_tokens(2, 7))
    assert not torch.allclose(logits, base, atol=1e-2)


@pytest.mark.slow
def test_the_file_states_its_source_and_nothing_of_this_machine(exports):
    folder = exports["gpt2"][0]
    assert len({file.stat().st_mode for file in folder.iterdir() if file.is_file()}) == 1  # others read all of it
    source = (folder / "modeling_hfpatch.py").read_text()
    assert "hfpatch/export/runtime.py" in source
    assert "hfpatch/methods/nonlinear_query.py" in source
    for file in folder.iterdir():
        assert file.is_file(), file.name
        assert str(folder.parents[1]).encode() not in file.read_bytes(), file.name


def test_a_method_of_peft_that_cannot_be_merged_is_refused(tmp_path):
    base = write_base("llama", torch.float32, tmp_path / "base")
    write_patch(base, torch.float32, tmp_path / "patch", lambda _: BeftConfig(target_modules=["q_proj"]))
    with pytest.raises(HfpatchError, match=r"a beft adapter .* cannot merge it") as error:
        export_patch(tmp_path / "patch", tmp_path / "export")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "export").exists()


def test_folders_that_cannot_be_read_or_written(tmp_path):
    for folder in (tmp_path, str(tmp_path)):
        with pytest.raises(HfpatchError, match="patch: no such folder"):
            export_patch(f"{folder}/patch", f"{folder}/export")
    with pytest.raises(HfpatchError, match="the model has no name"):
        export_patch(tmp_path / "patch", tmp_path / "export", model="")
    (tmp_path / "patch").mkdir()
    with pytest.raises(HfpatchError, match=r"names no base .*--model"):
        export_patch(tmp_path / "patch", tmp_path / "export")
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(HfpatchError, match="exists already"):
        export_patch(tmp_path / "patch", tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"
    (tmp_path / "runs" / "lora" / "seed-0" / "patch").mkdir(parents=True)
    with pytest.raises(HfpatchError, match=r"is a run; .*runs/lora/seed-0/patch"):
        export_patch(tmp_path, tmp_path / "export")
