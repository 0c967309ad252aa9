import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from training_blocks import run_probe, same

from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import TrainingSettings
from hfpatch.support.files import write_manifest
from hfpatch.training.checkpoint import (
    load_optimizer,
    load_trainables,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.records import LoopState

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


def save(folder, step, parameters, optimizer, scheduler, model, **values):
    """Do a step and save a checkpoint behind it."""
    advance(model, optimizer, scheduler)
    given = {"parameters": parameters, "optimizer": optimizer, "scheduler": scheduler}
    save_checkpoint(folder, step=step, **{**given, "identity": {}, "state": LoopState(), "keep": 1, **values})


@pytest.fixture
def saved(tmp_path):
    made, state = build(), LoopState({"A": (1, 2)}, [2], 1.5, 2, 1, True, matmul="mkl")
    for step in (1, 2, 3):
        save(tmp_path, step, *made, identity={"seed": 0}, state=state, keep=2)
    return tmp_path, made[3], made[1], made[2]


def test_everything_comes_back_and_goes_on_bit_equal(saved):
    folder, model, optimizer, scheduler = saved
    checkpoint = newest_checkpoint(folder, {"seed": 0})
    assert (checkpoint.step, checkpoint.state) == (3, LoopState({"A": (1, 2)}, [2], 1.5, 2, 1, True, matmul="mkl"))
    parameters, new_optimizer, new_scheduler, new_model = build()
    load_trainables(checkpoint, parameters)
    load_optimizer(checkpoint, parameters, new_optimizer, new_scheduler)
    for _ in range(3):
        advance(model, optimizer, scheduler)
        advance(new_model, new_optimizer, new_scheduler)
    assert same(dict(model.named_parameters()), parameters)


def test_only_the_newest_are_kept(saved, tmp_path):
    assert sorted(path.name for path in saved[0].iterdir()) == ["step-00000002", "step-00000003"]
    (tmp_path / "none").mkdir()
    assert newest_checkpoint(tmp_path / "none", {}) is None

    # What a killed process left is no checkpoint.
    folder = saved[0]
    shutil.copytree(folder / "step-00000003", folder / ".step-00000004.abc.tmp")
    (folder / ".step-00000004.abc.tmp" / "state.json").unlink()
    assert newest_checkpoint(folder, {"seed": 0}).step == 3


def test_misfits_are_refused(saved):
    folder = saved[0]
    with pytest.raises(HfpatchError, match=r"another seed \(0, now None\)"):
        newest_checkpoint(folder, {})
    checkpoint = newest_checkpoint(folder, {"seed": 0})
    with pytest.raises(HfpatchError, match=r"0.weight is \(3, 2\) .* the model's is \(4, 2\)"):
        load_trainables(checkpoint, build(width=4)[0])
    with pytest.raises(HfpatchError, match=r"of another patch; 0.bias is only on one side"):
        load_trainables(checkpoint, {"0.weight": build()[0]["0.weight"]})


FILES = ["trainable.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_a_digit(path):
    """A number that is as good as the one before, so that nothing but a hash can tell."""
    text = path.read_text()
    changed = text.replace("0.9,", "0.8,", 1)
    assert changed != text
    path.write_text(changed)


def empty(path):
    path.write_text("{}")


def sign_an_empty_state(path):
    """What its own manifest says, and no state."""
    empty(path)
    (path.parent / "manifest.json").unlink()
    write_manifest(path.parent)


DAMAGE = [
    *((name, damage) for name in FILES for damage in (cut, flip, Path.unlink)),
    ("state.json", change_a_digit),
    ("state.json", empty),
    ("state.json", sign_an_empty_state),
    ("manifest.json", empty),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(saved, name, damage):
    damage(saved[0] / "step-00000003" / name)
    with pytest.warns(UserWarning, match=r"step-00000003.*going on from step-00000002"):
        assert newest_checkpoint(saved[0], {"seed": 0}).step == 2


def test_where_all_are_damaged_one_line_says_so(saved):
    for folder in saved[0].iterdir():
        cut(folder / "optimizer.safetensors")
    with pytest.raises(HfpatchError, match=r"step-00000003/optimizer.safetensors: .*; no whole checkpoint is left"):
        newest_checkpoint(saved[0], {"seed": 0})


def test_the_best_is_kept_besides_the_newest(tmp_path):
    made, state = build(), LoopState()
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), start=1):
        state.evaluated(step, loss, None)
        save(tmp_path, step, *made, state=state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    assert read_checkpoint(tmp_path / "step-00000002").state.best_loss == 1.0


@pytest.mark.parametrize("origin", [None, {"base_weights": "a", "method": "b"}])
def test_a_run_does_not_go_on_with_another_base_or_method(patched, blocks, tmp_path, origin):
    run = partial(run_probe, blocks=blocks, folder=tmp_path, steps=2, warmup_steps=1)
    run(patched(), origin=origin)
    (tmp_path / "checkpoints" / "step-00000001").mkdir()  # a kill while it was removed, after the last save
    (tmp_path / "checkpoints" / ".step-00000003.abc.tmp").mkdir()  # and one while another was written
    run(patched(), origin=origin)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    other = patched()
    next(value for value in other.parameters() if not value.requires_grad).data[3, 5] += 0.25
    changed, name = ({**origin, "method": "c"}, "method") if origin else (None, "frozen")
    with pytest.raises(HfpatchError, match=rf"step-00000002: the checkpoint is of a run with another origin.{name} \("):
        run(other, origin=changed)
