"""axolotl's plugin, against a stand-in of the interface that it uses."""

import importlib
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from families import logits_of, make_model, make_tokens
from peft import PeftModel
from transformers import Trainer, TrainingArguments

from hfpatch import HfpatchError

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
