"""Exports, loaded by a process in which neither hfpatch nor PEFT can be imported."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from families import logits_of, make_model, make_tokens, perturb
from peft import IA3Config, LoraConfig
from transformers import AutoTokenizer

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.export import export_patch
from hfpatch.surgery.bases import locate_base
from hfpatch.surgery.budget import attention_modules

CASES = {
    "gpt_neox": torch.float32,
    "gpt2": torch.float32,
    "llama": torch.bfloat16,
    "gemma2": torch.float32,
}
LOADER = """
import json, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        absent = name.split(".")[0] in ("hfpatch", "peft")
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    tokens = torch.tensor(json.load(open(folder + "/../tokens.json")))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval().requires_grad_(False)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        written = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    dtypes = {name: str(p.dtype) for name, p in model.named_parameters()}
    save_file({"logits": logits, "written": written}, folder + "/../theirs.safetensors")
    json.dump(dtypes, open(folder + "/../dtypes.json", "w"))
assert not {"hfpatch", "peft"} & set(sys.modules)
"""


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
    AutoTokenizer.from_pretrained(locate_base("tinyworld/gpt-neox")).save_pretrained(folder)
    return folder


def write_patch(base, dtype, folder, configs):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    hfpatch.patch(model, configs(model))
    perturb(model, std=0.2)
    hfpatch.save_patch(model, folder)
    return model


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return for each case the folder with its export, our results and what the other process found."""
    root, tokens = tmp_path_factory.mktemp("exports"), make_tokens(2, 7)
    for case, dtype in CASES.items():
        home = root / case
        base = write_base(case, dtype, home / "base")
        model = write_patch(base, dtype, home / "patch", stack_for)
        with torch.no_grad():
            written = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
        safetensors.torch.save_file({"logits": logits_of(model, tokens), "written": written}, home / "ours.safetensors")
        (home / "tokens.json").write_text(json.dumps(tokens.tolist()))
        export_patch(home / "patch", home / "export", dtype=str(dtype).removeprefix("torch."))
    folders = [str(root / case / "export") for case in CASES]
    kernels = ("OMP_", "MKL_", "ATEN_", "ONEDNN_")  # threads and instruction sets: bits depend on them
    environment = {name: value for name, value in os.environ.items() if name.startswith(kernels)}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(root / "modules"), "PATH": ""}
    subprocess.run([sys.executable, "-c", LOADER, *folders], check=True, env=environment, cwd=root, timeout=120)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_another_process_without_hfpatch_computes_and_writes_the_same(exports, case):
    ours, theirs = (safetensors.torch.load_file(exports / case / f"{who}.safetensors") for who in ("ours", "theirs"))
    assert torch.equal(ours["logits"], theirs["logits"])
    assert torch.equal(ours["written"], theirs["written"])
    base = logits_of(make_model(case, CASES[case]), make_tokens(2, 7))
    assert not torch.allclose(ours["logits"], base, atol=1e-2)


@pytest.mark.slow
def test_the_patch_stays_in_fp32_on_a_bf16_base(exports):
    dtypes = json.loads((exports / "llama" / "dtypes.json").read_text())
    assert {kind for name, kind in dtypes.items() if "hfpatch" in name} == {"torch.float32"}
    assert {kind for name, kind in dtypes.items() if "hfpatch" not in name} == {"torch.bfloat16"}


@pytest.mark.slow
def test_it_does_not_load_without_its_patch(exports):
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match=r"hfpatch_gpt_neox|trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(exports / "gpt_neox" / "export", trust_remote_code=False)


@pytest.mark.slow
def test_the_file_states_licence_and_source_and_nothing_of_this_machine(exports):
    folder = exports / "gpt2" / "export"
    source = (folder / "modeling_hfpatch.py").read_text()
    assert "SPDX-License-Identifier: MIT" in source
    assert "hfpatch/export/runtime.py of hfpatch" in source
    assert not [
        line for line in source.splitlines() if line.startswith(("import hfpatch", "from hfpatch", "import peft"))
    ]
    for file in (each for each in folder.iterdir() if each.is_file()):
        assert str(exports).encode() not in file.read_bytes(), file.name


def refused(tmp_path, configs, message, **options):
    base = write_base("gpt2", torch.float32, tmp_path / "base")
    write_patch(base, torch.float32, tmp_path / "patch", configs)
    with pytest.raises(HfpatchError, match=message) as error:
        export_patch(tmp_path / "patch", tmp_path / "export", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "export").exists()


def test_other_methods_of_peft_are_refused(tmp_path):
    refused(tmp_path, lambda _: IA3Config(target_modules=["c_attn"], feedforward_modules=[]), "cannot be exported")


def test_dora_is_refused(tmp_path):
    refused(tmp_path, lambda _: LoraConfig(r=2, target_modules=["c_attn"], use_dora=True), "only plain LoRA")


def test_a_folder_in_use_is_not_touched(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(HfpatchError, match="exists already"):
        export_patch(tmp_path / "patch", tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_run_is_not_a_patch(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(HfpatchError, match="give one of its patches"):
        export_patch(tmp_path, tmp_path / "export")


def test_a_patch_that_names_no_base_needs_one(tmp_path):
    with pytest.raises(HfpatchError, match="--model"):
        export_patch(tmp_path / "patch", tmp_path / "export")
