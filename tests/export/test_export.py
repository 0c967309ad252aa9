"""What an export holds, and what is refused; what it computes elsewhere is in tests/architectures and tests/methods."""

import pytest
import torch
from families import LLAMA, close, make_model, perturb
from peft import BeftConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.export import export_patch
from hfpatch.export.write import write_model
from hfpatch.promises.inputs import example_inputs, logits
from hfpatch.sites import survey
from hfpatch.surgery.bases import locate


def write_patch(case, folder, config):
    """Write a base and its patch."""
    make_model(case).save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(locate("tinyworld/gpt-neox")[0]).save_pretrained(folder / "base")
    model = hfpatch.patch(AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32").eval(), config)
    perturb(model, std=0.2)
    hfpatch.save_patch(model, folder / "patch")


def test_the_file_states_its_source_and_nothing_of_this_machine(tmp_path):
    write_patch("gpt2", tmp_path, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(rank=3)])
    folder = export_patch(tmp_path / "patch", tmp_path / "export").directory
    assert len({file.stat().st_mode for file in folder.iterdir() if file.is_file()}) == 1  # others read all of it
    source = (folder / "modeling_hfpatch.py").read_text()
    assert "hfpatch/export/runtime.py" in source
    assert "hfpatch/methods/nonlinear_query.py" in source
    for file in folder.iterdir():
        assert file.is_file(), file.name
        assert str(tmp_path).encode() not in file.read_bytes(), file.name


def test_a_patch_of_another_tower_is_exported_and_compared_with_images(tmp_path):
    vision = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    torch.manual_seed(0)
    config = Gemma3Config(text_config={**LLAMA, "head_dim": 8}, vision_config=vision, **tokens)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # 0 hides the images
    others = survey(model).others
    inputs = example_inputs(model, others)
    hfpatch.patch(model, PreProjectionConfig(target_modules={site.path for site in others}))
    perturb(model, std=0.3)
    added, expected = hfpatch.patch_summary(model).added, logits(model, inputs)
    assert write_model(model, tmp_path).added == added
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert close(logits(loaded, inputs), expected)
    assert not close(logits(hfpatch.unpatch(model), inputs), expected)


def test_a_method_of_peft_that_cannot_be_merged_is_refused(tmp_path):
    write_patch("llama", tmp_path, BeftConfig(target_modules=["q_proj"]))
    with pytest.raises(HfpatchError, match=r"a beft adapter .* cannot merge it"):
        export_patch(tmp_path / "patch", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_folders_that_cannot_be_read_or_written(tmp_path):
    for folder in (tmp_path, str(tmp_path)):
        with pytest.raises(HfpatchError, match=r"patch: no patch here .* of a run are runs/\*/seed-\*/patch"):
            export_patch(f"{folder}/patch", f"{folder}/export")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(HfpatchError, match="the model has no name"):
        export_patch(tmp_path, tmp_path / "export", model="")
    with pytest.raises(HfpatchError, match=r"adapter_config.json: names no base; give it with --model"):
        export_patch(tmp_path, tmp_path / "export")
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(HfpatchError, match="exists already"):
        export_patch(tmp_path, tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"
