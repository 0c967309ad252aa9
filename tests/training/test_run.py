import dataclasses

import pytest
from accelerate import PartialState
from training_blocks import make_blocks

from hfpatch.data.plan import draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import TrainingSettings
from hfpatch.training.loop import run_training
from hfpatch.training.run import Run, check_blocks, open_folder


def made(folder):
    blocks = make_blocks()
    plan = draw_plan(blocks=len(blocks), steps=3, batch_size=4, seed=0)
    return Run(settings=TrainingSettings(steps=3, warmup_steps=1), blocks=blocks, plan=plan, seed=0, folder=folder)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((50, "{blocks}", "{plan}"), r"\(checkpoint: 0, 50\); every machine must see the same .*"),
        ((0, "f00d", "{plan}"), r"\(training blocks: .*f00d"),
        ((0, "{blocks}", "f00d"), r"\(batch plan: .*f00d"),
    ],
)
def test_processes_that_see_different_things_are_refused(tmp_path, monkeypatch, others, message):
    run, state = made(tmp_path), PartialState()
    other = tuple(
        value.format(blocks=run.blocks.sha256, plan=run.plan.sha256) if isinstance(value, str) else value
        for value in others
    )
    monkeypatch.setitem(state.__dict__, "num_processes", 2)
    monkeypatch.setattr("hfpatch.training.run.gather_object", lambda gathered: [*gathered, other])
    with pytest.raises(HfpatchError, match=message):
        open_folder(run)
    monkeypatch.setattr("hfpatch.training.run.gather_object", lambda gathered: [*gathered, *gathered])
    open_folder(run)


def test_processes_share_a_batch_in_whole_micro_batches(tmp_path):
    run = made(tmp_path)
    assert [run.micro_batch(processes) for processes in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(HfpatchError, match="a batch of 4 cannot be divided in micro-batches of 1 on 3 processes"):
        run.micro_batch(3)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize("part", ["blocks", "held_out"])
def test_blocks_longer_than_the_context_are_refused_before_anything_is_written(tmp_path, base, kind, part):
    model, run = base(kind), made(tmp_path)
    model.config.max_position_embeddings = 24
    check_blocks(model, run.blocks, run.held_out)
    longer = dataclasses.replace(run, **{part: make_blocks(block_size=25)})
    longer.plan = draw_plan(blocks=len(longer.blocks), steps=3, batch_size=16, seed=0)
    with pytest.raises(HfpatchError, match=r"blocks of 25 tokens \(data.block_size\) are longer than .* context of 24"):
        run_training(model, longer)
    assert list(tmp_path.iterdir()) == []
    check_blocks(base("bloom"), make_blocks(layout="stream"))  # without a limit


def test_a_text_with_a_token_that_the_model_has_not_is_refused(base):
    for texts in ((make_blocks(vocabulary=90), None), (make_blocks(), make_blocks(vocabulary=90))):
        with pytest.raises(HfpatchError, match=r"the text has the token \d\d, and the model only 64 embeddings"):
            check_blocks(base("gpt2"), *texts)


@pytest.mark.parametrize("others", ["padded", "stream"])
def test_packed_documents_that_a_model_cannot_keep_apart_are_not_measured_either(base, others):
    blocks, packed = make_blocks(layout=others), make_blocks()
    for texts in ((packed, None), (packed, blocks), (blocks, packed)):
        with pytest.raises(HfpatchError, match="bloom: this model cannot keep packed documents apart"):
            check_blocks(base("bloom"), *texts)
        check_blocks(base("gpt_neox"), *texts)
