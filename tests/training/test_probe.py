import errno
import json
import math

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, VeraConfig, get_peft_model
from training_blocks import Killed, metrics_of, plain_loop, same, trainables
from training_blocks import run_probe as run
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from hfpatch import PreProjectionConfig, patch
from hfpatch.data.plan import draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import group_of
from hfpatch.support.cpu import has_onednn

STEPS, BATCH = 8, 4


def plan_for(blocks, steps=STEPS):
    return draw_plan(blocks=len(blocks), steps=steps, batch_size=BATCH, seed=3)


def losses(folder):
    return [line["loss"] for line in metrics_of(folder)]


@pytest.mark.parametrize(("kind", "data"), [("gpt_neox", "blocks"), ("gpt2", "blocks"), ("gpt2", "completion_blocks")])
def test_equals_a_plain_loop_over_lone_documents(patched, request, tmp_path, kind, data):
    blocks = request.getfixturevalue(data)
    expected_model = patched(kind)
    expected, _ = plain_loop(expected_model, blocks, plan_for(blocks), lr=1e-2, warmup=2, clip=0.5)
    model = patched(kind)
    result = run(model, blocks, tmp_path, max_grad_norm=0.5)
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    assert result.final_loss == losses(tmp_path)[-1] < expected[0]
    torch.testing.assert_close(trainables(model), trainables(expected_model), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "micro"), [("blocks", 2), ("blocks", 1), ("padded_blocks", 1), ("completion_blocks", 1)]
)
def test_accumulation_weights_tokens_and_not_micro_batches(patched, request, tmp_path, data, micro):
    blocks = request.getfixturevalue(data)
    run(patched(), blocks, tmp_path / "whole")
    run(patched(), blocks, tmp_path / "parts", micro_batch_size=micro)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "rel"),
    [({"gradient_checkpointing": True}, 1e-6), ({"compile": True}, 1e-5)],
)
def test_recomputed_or_compiled_it_trains_the_same_and_stays_itself(
    patched, blocks, tmp_path, monkeypatch, options, rel
):
    monkeypatch.setattr("hfpatch.training.loop.COMPILE_BACKEND", "eager")
    plain, other = patched(), patched()
    names = list(dict(other.named_parameters()))
    run(plain, blocks, tmp_path / "plain")
    run(other, blocks, tmp_path / "other", **options)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), rel=rel)
    assert list(dict(other.named_parameters())) == names
    assert not any(getattr(module, "gradient_checkpointing", False) for module in other.modules())
    torch.testing.assert_close(trainables(other), trainables(plain), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_is_trained_changes_in_float32(patched, blocks, tmp_path, dtype):
    model = patched(dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use_cache = model.config.use_cache
    model.get_output_embeddings().train()  # the others are in evaluation mode
    modes = [module.training for module in model.modules()]
    run(model, blocks, tmp_path)
    trained = trainables(model)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    for name, value in model.state_dict().items():
        kept = value.dtype is before[name].dtype and torch.equal(value, before[name])
        assert kept is (name not in trained), name
    assert model.config.use_cache is use_cache
    assert [module.training for module in model.modules()] == modes
    assert all(value.grad is None for value in model.parameters())


def test_metrics_and_result_which_a_finished_run_returns_again(patched, blocks, tmp_path, capfd):
    records, first, again = [], patched(), patched()
    result = run(first, blocks, tmp_path, on_step=records.append)
    lines = metrics_of(tmp_path)
    assert [list(line) for line in lines] == [["step", "loss", "lr", "tokens", "seconds"]] * STEPS
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)) == [record.step for record in records]
    assert [line["tokens"] for line in lines] == [blocks.count_tokens(rows) for rows in plan_for(blocks).indices]
    assert lines[0]["lr"] == pytest.approx(1e-2 / 3)
    assert lines[2]["lr"] == pytest.approx(1e-2)
    assert result.tokens == sum(line["tokens"] for line in lines)
    assert result.wall_s == pytest.approx(sum(line["seconds"] for line in lines))
    assert result.tokens_per_s == pytest.approx(result.tokens / result.wall_s)
    assert 10**8 < result.peak_memory_bytes < 10**11
    assert json.loads(json.dumps(result.to_json()))["steps"] == STEPS
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "checkpoints"}
    repeated = run(again, blocks, tmp_path, on_step=lambda record: pytest.fail("trained again"))
    assert same(trainables(first), trainables(again))
    assert repeated.to_json() | {"peak_memory_bytes": 0} == result.to_json() | {"peak_memory_bytes": 0}
    assert capfd.readouterr() == ("", "")


def killed_after(step):
    def on_step(record):
        if record.step == step:
            raise Killed

    return on_step


@pytest.mark.parametrize(("killed", "saved"), [(5, 4), (4, 4), (3, 2), (1, 0)])
def test_a_killed_run_resumes_bit_equal(patched, blocks, tmp_path, killed, saved):
    straight, broken, resumed = (patched(dropout=0.2) for _ in range(3))
    whole = run(straight, blocks, tmp_path / "straight", save_every=2)
    with pytest.raises(Killed):
        run(broken, blocks, tmp_path / "broken", save_every=2, on_step=killed_after(killed))
    assert len(losses(tmp_path / "broken")) == killed
    records = []
    result = run(resumed, blocks, tmp_path / "broken", save_every=2, on_step=records.append)
    assert [record.step for record in records] == list(range(saved + 1, STEPS + 1))
    strip = [{**line, "seconds": 0} for line in metrics_of(tmp_path / "broken")]
    assert strip == [{**line, "seconds": 0} for line in metrics_of(tmp_path / "straight")]
    assert same(trainables(resumed), trainables(straight))
    assert result.update_survival == whole.update_survival


def test_a_checkpoint_holds_no_base_and_nothing_pickled(patched, blocks, tmp_path):
    model = patched()
    run(model, blocks, tmp_path, save_every=3, keep_checkpoints=2)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-00000006", "step-00000008"]
    files = {path.name for path in (tmp_path / "checkpoints" / folders[0]).iterdir()}
    assert files == {"manifest.json", "trainable.safetensors", "optimizer.safetensors", "state.json"}
    trained = sum(value.nbytes for value in trainables(model).values())
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / folders[0]).iterdir())
    assert 3 * trained < size < 3 * trained + 20_000


def test_update_survival_shows_what_bf16_loses(patched, blocks, tmp_path):
    fp32 = run(patched(), blocks, tmp_path / "fp32", lr=1e-5).update_survival
    with pytest.warns(UserWarning, match="kept in bfloat16, which loses small updates"):
        bf16 = run(patched(), blocks, tmp_path / "bf16", lr=1e-5, trainable_dtype="bfloat16").update_survival
    assert fp32.keys() == bf16.keys() == {"lora_A", "lora_B", "all"}
    assert min(fp32.values()) > 0.99
    assert max(bf16.values()) < 0.3


def test_autocast_stays_near_and_differs(patched, blocks, tmp_path):
    run(patched(), blocks, tmp_path / "full")
    run(patched(), blocks, tmp_path / "half", autocast="bfloat16")
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "full"), rel=1e-2)
    assert losses(tmp_path / "half") != losses(tmp_path / "full")


def test_a_loss_of_nan_stops_and_names_step_and_blocks(patched, blocks, tmp_path):
    model, plan = patched(), plan_for(blocks)
    poisoned = blocks.rows.copy()
    poisoned[plan.indices[4, 1], 0] = 63
    assert (blocks.rows != 63).all()
    bad = type(blocks)(**{**vars(blocks), "rows": poisoned})
    first = next(step for step, rows in enumerate(plan.indices, 1) if plan.indices[4, 1] in rows)
    model.get_input_embeddings().weight.data[63] = float("nan")
    blocks_named = str(plan.indices[first - 1].tolist()).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(HfpatchError, match=f"step {first}: the loss is nan, on blocks {blocks_named}"):
        run(model, bad, tmp_path / "stop", save_every=1, on_bad_loss="stop")
    result = run(model, bad, tmp_path / "record")
    assert result.diverged_step == result.steps == first
    other = patched()
    other.get_input_embeddings().weight.data[63] = float("nan")
    again = run(other, bad, tmp_path / "record", on_step=lambda _: pytest.fail("trained again"))
    assert again.to_json() | {"peak_memory_bytes": 0} == result.to_json() | {"peak_memory_bytes": 0}


@pytest.mark.parametrize("on_bad_loss", ["record", "skip"])
def test_a_last_update_that_breaks_the_model_counts_as_divergence(patched, blocks, tmp_path, on_bad_loss):
    """Its own loss was finite, and there is no second."""
    result = run(patched(), blocks, tmp_path, steps=1, warmup_steps=0, lr=1e30, on_bad_loss=on_bad_loss)
    assert all(math.isfinite(loss) for loss in losses(tmp_path))
    assert (len(losses(tmp_path)), result.diverged_step) == (1, 1)


def test_a_full_disk_is_one_line_and_keeps_the_checkpoints_before_it(patched, blocks, tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(record):
        if record.step == 3:
            monkeypatch.setattr("hfpatch.support.files._sync", full)

    with pytest.raises(HfpatchError, match=r"step-00000004: cannot be written \(No space left on device\)") as caught:
        run(patched(), blocks, tmp_path, save_every=2, on_step=fill)
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-00000002'}" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_what_cannot_be_trained_is_refused(patched, base, blocks, padded_blocks, tmp_path):
    with pytest.raises(HfpatchError, match="nothing to train"):
        run(base().requires_grad_(False), blocks, tmp_path)
    with pytest.raises(HfpatchError, match=f"drawn for 99 blocks and the data has {len(blocks)}:"):
        run(patched(), blocks, tmp_path, plan=draw_plan(blocks=99, steps=2, batch_size=4, seed=0))
    with pytest.raises(HfpatchError, match="plan has 9 steps of 4 blocks, the settings ask for 8 of 4"):
        run(patched(), blocks, tmp_path, plan=plan_for(blocks, steps=9))
    with pytest.raises(HfpatchError, match=r"training.report_to: made_up cannot be used \(.*"):
        run(patched(), blocks, tmp_path, report_to=["made_up"])
    with pytest.raises(HfpatchError, match=r"bloom: this model cannot .*; set data.layout=padded"):
        run(base("bloom"), blocks, tmp_path)
    assert not list(tmp_path.iterdir())
    run(base("bloom"), padded_blocks, tmp_path / "padded", lr=1e-3)


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
def test_a_run_keeps_its_library_for_matrix_products(patched, blocks, tmp_path, monkeypatch):
    plan = plan_for(blocks)
    expected, _ = plain_loop(patched(), blocks, plan, lr=1e-2, warmup=2, clip=1.0)
    monkeypatch.setenv("HFPATCH_MATMUL", "onednn")
    model = patched()
    assert run(model, blocks, tmp_path / "whole", plan=plan).matmul == "onednn"
    assert losses(tmp_path / "whole") == pytest.approx(expected, rel=1e-5)
    with pytest.raises(Killed):
        run(patched(), blocks, tmp_path / "cut", plan=plan, save_every=2, on_step=killed_after(5))
    monkeypatch.setenv("HFPATCH_MATMUL", "mkl")
    with pytest.raises(HfpatchError, match="HFPATCH_MATMUL is 'mkl', but the run was begun with onednn"):
        run(patched(), blocks, tmp_path / "cut", plan=plan, save_every=2)
    monkeypatch.setenv("HFPATCH_MATMUL", "auto")  # which would be mkl, as the model is small
    resumed = patched()
    assert run(resumed, blocks, tmp_path / "cut", plan=plan, save_every=2).matmul == "onednn"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same(trainables(resumed), trainables(model))


def test_another_run_in_the_folder_is_refused(patched, blocks, tmp_path):
    run(patched(), blocks, tmp_path, save_every=4)
    with pytest.raises(HfpatchError, match=r"a run with another settings.lr \(0.01, now 0.02\)"):
        run(patched(), blocks, tmp_path, lr=2e-2)
    with pytest.raises(HfpatchError, match=r"another settings.batch_size \(4, now 2\)"):
        run(patched(), blocks, tmp_path, batch_size=2)
    other = draw_plan(blocks=len(blocks), steps=STEPS, batch_size=BATCH, seed=4)
    with pytest.raises(HfpatchError, match="a run with another batch plan"):
        run(patched(), blocks, tmp_path, plan=other)
    with pytest.raises(HfpatchError, match="a run with another seed"):
        run(patched(), blocks, tmp_path, seed=1)
    run(patched(), blocks, tmp_path, micro_batch_size=1)


def test_tensor_groups_have_their_own_dtype(tmp_path, blocks, base):
    model = patch(
        base(dtype=torch.bfloat16), [PreProjectionConfig(content_skip=True), LoraConfig(r=2, target_modules=["dense"])]
    )
    with pytest.warns(UserWarning, match="kept in bfloat16, float16, which"):
        run(
            model, blocks, tmp_path, trainable_dtype="bfloat16", trainable_dtypes={"lora": "float32", "skip": "float16"}
        )  # fmt: skip
    dtypes = {}
    for name, value in model.named_parameters():
        if value.requires_grad:
            dtypes.setdefault(group_of(name), set()).add(value.dtype)
    assert dtypes == {"pre_projection": {torch.bfloat16}, "skip": {torch.float16}, "lora": {torch.float32}}


def test_learning_rates_of_groups_act(tmp_path, blocks, base):
    changes = {}
    for rate in (1e-3, 1e-2):
        model = patch(base(), PreProjectionConfig(content_skip=True, init="paper"), seed=0)
        before, chosen = trainables(model), {"learning_rates": {"skip": rate}, "warmup_steps": 0, "steps": 1}
        run(model, blocks, tmp_path / str(rate), lr=1e-3, **chosen)
        after = trainables(model)
        changes[rate] = {name: (after[name] - before[name]).abs().max().item() for name in after}
    for name, change in changes[1e-2].items():
        assert changes[1e-3][name] == pytest.approx(1e-3, rel=1e-2)  # AdamW's first step
        assert change == pytest.approx((10 if "skip" in name else 1) * changes[1e-3][name], rel=1e-3), name
    # The rate that is recorded is that of a group without one of its own, also where there is none.
    rates = {"skip": 1e-2, "pre_projection": 1e-4}
    run(model, blocks, tmp_path / "both", lr=1e-3, learning_rates=rates, warmup_steps=2, steps=4)
    runs = [metrics_of(tmp_path / name) for name in ("0.01", "both")]
    expected = [1e-3, 1e-3 / 3, 2e-3 / 3, 1e-3, 5e-4]  # a cosine after warm-up
    assert [line["lr"] for lines in runs for line in lines] == pytest.approx(expected)


def test_trackers_hear_of_every_step(patched, blocks, tmp_path, monkeypatch):
    """They write beside the checkpoints, which are removed after the run."""
    heard, events = [], []

    class Tracker(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            events.append((args.output_dir, args.learning_rate, args.max_steps))

        def on_log(self, args, state, control, *, logs, **kwargs):
            heard.append((state.global_step, logs))

        def on_train_end(self, args, state, control, **kwargs):
            events.append(state.global_step)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "made_up", Tracker)
    run(patched(), blocks, tmp_path, report_to=["made_up"], evaluate_every=4, held_out=blocks.head(2))
    assert events == [(str(tmp_path), 1e-2, STEPS), STEPS]
    steps = [(step, logs) for step, logs in heard if "mfu" in logs]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    lines = metrics_of(tmp_path)[1:]  # the first is of step 0
    assert [logs["loss"] for _, logs in steps] == [line["loss"] for line in lines]
    assert [logs["learning_rate"] for _, logs in steps] == [line["lr"] for line in lines]
    assert [step for step, logs in steps if "eval_loss" in logs] == [4, 8]
    for (_, logs), line in zip(steps, lines, strict=True):
        assert logs["tokens_per_s"] == pytest.approx(line["tokens"] / line["seconds"])
        assert 0 < logs["mfu"] < 1
        assert logs["peak_memory_bytes"] > 10**7


PEFT_METHODS = {
    "ia3": lambda: IA3Config(
        target_modules=["query_key_value", "dense_4h_to_h"], feedforward_modules=["dense_4h_to_h"]
    ),
    "vera": lambda: VeraConfig(r=4, target_modules=["dense"]),
    "dora": lambda: LoraConfig(r=2, use_dora=True, target_modules=["query_key_value"]),
    "norms": lambda: LNTuningConfig(target_modules=["input_layernorm"]),
}


@pytest.mark.parametrize(
    ("method", "wrapped"),  # PEFT injects VeRA into a PeftModel only
    [(method, wrapped) for method in PEFT_METHODS for wrapped in (False, True) if wrapped or method != "vera"],
)
def test_any_peft_method_is_trained(base, blocks, tmp_path, method, wrapped):
    config = PEFT_METHODS[method]()
    model = get_peft_model(base(), config) if wrapped else patch(base(), config)
    before = trainables(model)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    run(model, blocks, tmp_path, warmup_steps=0, held_out=blocks.head(2), evaluate_every=4)
    after = trainables(model)
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in frozen.items())
    evaluated = [line["eval_loss"] for line in metrics_of(tmp_path) if "eval_loss" in line]
    assert len(evaluated) == 3  # at the start, after 4 steps and in the end
    assert evaluated == sorted(evaluated, reverse=True)
