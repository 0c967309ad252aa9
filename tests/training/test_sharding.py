"""What DeepSpeed would do, on a stand-in; it runs itself in test_deepspeed, and FSDP2 in test_processes."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from training_blocks import make_blocks, run_probe

from hfpatch.errors import HfpatchError
from hfpatch.training.sharding import configure_deepspeed, whole_tensors

CONFIGS = sorted((Path(__file__).parent.parent.parent / "docs" / "accelerate").glob("*.yaml"))


@pytest.fixture
def deepspeed(monkeypatch):
    """A module that shows a ZeRO-3 parameter's values within GatheredParameters only."""

    @contextmanager
    def gathered(parameters):
        for parameter in parameters:
            parameter.data = parameter.hidden
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    module = ModuleType("deepspeed")
    module.zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", module)


@pytest.mark.usefixtures("deepspeed")
def test_a_parameter_of_zero_3_is_gathered():
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.hidden = 3, torch.arange(4.0)
    whole = whole_tensors({"a": parameter, "b": torch.ones(2)})
    assert torch.equal(whole["a"], torch.arange(4.0))
    assert torch.equal(whole["b"], torch.ones(2))
    assert parameter.numel() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": 2}, "training.save_every does not work under DeepSpeed"),
        ({"on_bad_loss": "skip"}, "training.on_bad_loss=skip does not work under DeepSpeed"),
    ],
)
def test_what_deepspeed_does_not_allow_is_refused(patched, tmp_path, monkeypatch, options, message):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(HfpatchError, match=message):
        run(patched(), tmp_path, **options)


def test_deepspeed_is_told_what_the_recipe_decides(monkeypatch):
    def plugin(**launched):
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        return SimpleNamespace(num_processes=2, state=SimpleNamespace(deepspeed_plugin=DeepSpeedPlugin()))

    accelerator = plugin()
    configure_deepspeed(accelerator, 16, 4, 0.5)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    sizes = [config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    assert (sizes, config["gradient_accumulation_steps"], config["gradient_clipping"]) == ([16, 4], 2, 0.5)
    other = plugin(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4", ACCELERATE_GRADIENT_CLIPPING="1.0")
    with pytest.raises(
        HfpatchError, match=r"accumulation_steps=4 vs .*=2.* gradient_clipping=1\.0 vs .*; set these .* auto"
    ):
        configure_deepspeed(other, 16, 4, 0.5)


def test_a_run_does_not_go_on_under_deepspeed(patched, tmp_path, monkeypatch):
    run(patched(), tmp_path, save_every=2, keep_checkpoints=2)
    next((tmp_path / "checkpoints").glob("step-00000004")).rename(tmp_path / "last")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    steps = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(HfpatchError, match=r"step-00000002: a run under DeepSpeed cannot be resumed"):
        run(patched(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == steps


def run(model, folder, **values):
    return run_probe(model, make_blocks(), folder, **{"steps": 4, "warmup_steps": 1, **values})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_launcher_reads_our_configurations(path):
    config = load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    assert config.num_processes == written["num_processes"] > 1
    assert getattr(config.distributed_type, "value", config.distributed_type) == written["distributed_type"]
