"""axolotl's plugin: against a stand-in of the interface that it uses, and axolotl itself where there is one.

The test with axolotl needs it beside hfpatch, or in an environment whose Python AXOLOTL_PYTHON names.
"""

import importlib
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from families import logits_of, make_model, make_tokens
from peft import PeftModel
from transformers import Trainer, TrainingArguments

from hfpatch import HfpatchError

ROOT = Path(__file__).parents[2]
SECTION = {"type": "pre_projection", "content_skip": True, "layers_to_transform": [1]}


@dataclass(frozen=True)
class Capabilities:
    """axolotl's description of an adapter."""

    name: str
    lora_like: bool = False
    relora: bool = False


@pytest.fixture
def home(monkeypatch):
    """The module of the plugin, loaded with a stand-in of axolotl."""
    base = types.ModuleType("axolotl.integrations.base")
    base.AdapterCapabilities, base.BasePlugin = Capabilities, object
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "hfpatch.integrations.axolotl", raising=False)
    yield importlib.import_module("hfpatch.integrations.axolotl")
    sys.modules.pop("hfpatch.integrations.axolotl", None)


@pytest.fixture
def plugin(home):
    return home.HfpatchPlugin()


def test_it_declares_its_adapter_and_its_section(home, plugin):
    assert plugin.get_adapter_capabilities() == [Capabilities("hfpatch")]
    module, _, name = plugin.get_input_args().rpartition(".")
    arguments = getattr(importlib.import_module(module), name)
    assert arguments is home.HfpatchArgs
    assert arguments(hfpatch=SECTION).model_dump(exclude_none=True) == {"hfpatch": SECTION}
    plugin.register({"adapter": "hfpatch", "hfpatch": SECTION})
    plugin.register({"adapter": "lora"})
    assert plugin.load_adapter(make_model("gpt2"), {"adapter": "lora"}) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "adapter: hfpatch needs a section hfpatch"),
        ({"content_skip": True}, "a part is a mapping with a 'type'"),
        ({"type": "pre_projektion"}, "did you mean 'pre_projection'"),
        ({"type": "pre_projection", "content_skipp": True}, "did you mean 'content_skip'"),
        ({"type": "pre_projection", "expansion": "wide"}, "expansion='wide' must be of type finite float"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_loaded(plugin, section, message):
    with pytest.raises(HfpatchError, match=message):
        plugin.register({"adapter": "hfpatch", "hfpatch": section})


def test_it_trains_saves_and_reloads(plugin, tmp_path):
    cfg = {"adapter": "hfpatch", "hfpatch": SECTION}
    model, config = plugin.load_adapter(make_model("llama"), cfg)
    assert isinstance(model, PeftModel)
    assert (config.content_skip, config.layers_to_transform) == (True, [1])
    assert plugin.load_adapter(make_model("llama"), cfg, config_only=True)[0] is None
    before = logits_of(model, make_tokens())
    rows = [{"input_ids": row, "labels": row} for row in make_tokens(8, 12)]
    options = {"max_steps": 3, "learning_rate": 0.1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(tmp_path / "trainer"), save_strategy="no", **options)
    Trainer(model, arguments, train_dataset=rows).train()
    after = logits_of(model.eval(), make_tokens())
    assert (after - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    for inference in (False, True):
        cfg = {"adapter": "hfpatch", "lora_model_dir": str(tmp_path / "adapter")}
        again, config = plugin.load_adapter(make_model("llama"), cfg, inference=inference)
        assert any(parameter.requires_grad for parameter in again.parameters()) is not inference
        assert torch.equal(logits_of(again.eval(), make_tokens()), after) or not inference
        assert config.content_skip


@pytest.mark.slow
def test_axolotl_trains_saves_and_continues(tmp_path):
    python = os.environ.get("AXOLOTL_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import axolotl"], capture_output=True).returncode:
        pytest.skip("axolotl is not installed; AXOLOTL_PYTHON names the Python of an environment that has it")
    spec = importlib.util.spec_from_file_location("texts", ROOT / "tests" / "evaluation" / "conftest.py")
    texts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(texts)
    tokenizer, model = texts.tokenizer.__wrapped__(), texts.gpt_neox()
    tokenizer.pad_token = tokenizer.eos_token
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "base")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.passages(24)))
    settings = {
        "base_model": f"{tmp_path}/base", "plugins": ["hfpatch.integrations.axolotl.HfpatchPlugin"],
        "adapter": "hfpatch", "hfpatch": SECTION, "attn_implementation": "sdpa", "sequence_len": 64,
        "datasets": [{"path": f"{tmp_path}/texts.jsonl", "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": f"{tmp_path}/prepared", "special_tokens": {"pad_token": tokenizer.pad_token},
        "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "num_epochs": 1, "save_strategy": "no",
        "optimizer": "adamw_torch", "learning_rate": 0.01, "lr_scheduler": "constant", "bf16": False, "fp16": False,
    }  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    read = {}
    for run, more in (("first", {}), ("second", {"lora_model_dir": f"{tmp_path}/first", "learning_rate": 1e-9})):
        config = tmp_path / f"{run}.yml"
        config.write_text(yaml.safe_dump({**settings, "output_dir": f"{tmp_path}/{run}", **more}))
        command = [python, "-m", "axolotl.cli.train", str(config)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        loaded = PeftModel.from_pretrained(texts.gpt_neox(), tmp_path / run)
        assert loaded.peft_config["default"].content_skip
        read[run] = {name: tensor for name, tensor in loaded.named_parameters() if "preproj" in name}
    assert all(tensor.any() for tensor in read["first"].values())  # those that start at zero were trained
    torch.testing.assert_close(read["second"], read["first"], atol=1e-6, rtol=0)  # it went on from there
