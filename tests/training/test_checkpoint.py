import json
import shutil

import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.training.checkpoint import (
    load_optimizer,
    load_trainables,
    newest_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.settings import TrainingSettings

SETTINGS = TrainingSettings(steps=10, warmup_steps=2, lr=1e-2)


def build(width=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.LayerNorm(width))
    optimizer = build_optimizer(model, SETTINGS)
    return dict(model.named_parameters()), optimizer, build_scheduler(optimizer, SETTINGS, steps=10), model


def advance(model, optimizer, scheduler):
    model(torch.ones(1, 2)).pow(3).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path):
    parameters, optimizer, scheduler, model = build()
    for step in (1, 2, 3):
        advance(model, optimizer, scheduler)
        save_checkpoint(
            tmp_path, step=step, parameters=parameters, optimizer=optimizer, scheduler=scheduler,
            identity={"seed": 0}, survival={"A": (1, 2)}, keep=2,
        )  # fmt: skip
    return tmp_path, model, optimizer, scheduler


def test_everything_comes_back_and_goes_on_bit_equal(saved):
    folder, model, optimizer, scheduler = saved
    checkpoint = newest_checkpoint(folder, {"seed": 0})
    assert (checkpoint.step, checkpoint.survival) == (3, {"A": (1, 2)})
    parameters, new_optimizer, new_scheduler, new_model = build()
    load_trainables(checkpoint, parameters)
    load_optimizer(checkpoint, parameters, new_optimizer, new_scheduler)
    for _ in range(3):
        advance(model, optimizer, scheduler)
        advance(new_model, new_optimizer, new_scheduler)
    for name, value in model.named_parameters():
        assert torch.equal(value, parameters[name])


def test_only_the_newest_are_kept(saved):
    assert sorted(path.name for path in saved[0].iterdir()) == ["step-00000002", "step-00000003"]


def test_none_yet(tmp_path):
    assert newest_checkpoint(tmp_path, {}) is None


def test_leftovers_of_a_killed_process_are_no_checkpoints(saved):
    folder = saved[0]
    shutil.copytree(folder / "step-00000003", folder / ".step-00000004.abc.tmp")
    (folder / ".step-00000004.abc.tmp" / "state.json").unlink()
    assert newest_checkpoint(folder, {}).step == 3
    remove_leftovers(folder)
    assert len(list(folder.iterdir())) == 2


def test_misfits_are_refused(saved):
    folder = saved[0]
    with pytest.raises(HfpatchError, match=r"another seed \(0, now 1\)"):
        newest_checkpoint(folder, {"seed": 1})
    checkpoint = newest_checkpoint(folder, {})
    with pytest.raises(HfpatchError, match=r"0.weight is \(3, 2\) .* the model's is \(4, 2\)"):
        load_trainables(checkpoint, build(width=4)[0])
    with pytest.raises(HfpatchError, match=r"of another patch; 0.bias is only on one side"):
        load_trainables(checkpoint, {"0.weight": build()[0]["0.weight"]})


@pytest.mark.parametrize("name", ["trainable.safetensors", "optimizer.safetensors"])
def test_a_truncated_file_is_one_clear_error(saved, name):
    path = saved[0] / "step-00000003" / name
    path.write_bytes(path.read_bytes()[:-5])
    parameters, optimizer, scheduler, _ = build()
    checkpoint = newest_checkpoint(saved[0], {})
    load = {
        "trainable.safetensors": lambda: load_trainables(checkpoint, parameters),
        "optimizer.safetensors": lambda: load_optimizer(checkpoint, parameters, optimizer, scheduler),
    }
    with pytest.raises(HfpatchError, match="the checkpoint is damaged"):
        load[name]()


def test_a_broken_state_is_one_clear_error(saved):
    (saved[0] / "step-00000003" / "state.json").write_text(json.dumps({})[:-1])
    with pytest.raises(HfpatchError, match=r"state.json: cannot be read as JSON"):
        newest_checkpoint(saved[0], {})


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hfpatch.training.checkpoint.write_json", full)
    parameters, optimizer, scheduler, model = build()
    advance(model, optimizer, scheduler)
    with pytest.raises(HfpatchError, match="No space left on device"):
        save_checkpoint(
            tmp_path, step=1, parameters=parameters, optimizer=optimizer, scheduler=scheduler,
            identity={}, survival={}, keep=1,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
