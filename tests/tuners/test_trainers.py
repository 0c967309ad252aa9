"""transformers' Trainer and TRL's SFTTrainer, given a model or our configuration and nothing else of ours."""

import copy
import math
import re

import pytest
import torch
from accelerate import Accelerator
from families import VOCABULARY, logits_of, make_model, make_tokens, perturb
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, methods

METHODS = {"pre": lambda: PreProjectionConfig(content_skip=True), "query": NonlinearQueryConfig}
BOTH = pytest.mark.parametrize("method", METHODS)
OPTIONS = {
    "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "learning_rate": 0.05,
    "logging_steps": 1, "lr_scheduler_type": "constant", "disable_tqdm": True,
}  # fmt: skip


def rows():
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in make_tokens(8, 10)]


def words():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", bos_token="w1")


def parts(model):
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    added = {name for name in state if re.search("preproj_|nonlinear_|lora_|modules_to_save", name)}
    return {n: p for n, p in state.items() if n not in added}, {n: p for n, p in state.items() if n in added}


def assert_only_the_added_are_trained(trainer):
    base, added = parts(trainer.model)
    trainer.train()
    after_base, after_added = parts(trainer.model)
    assert added
    assert all(torch.equal(base[name], after_base[name]) for name in base)
    assert all(not torch.equal(added[name], after_added[name]) for name in added)
    assert {p.dtype for p in after_added.values()} == {torch.float32}


@BOTH
def test_trainer_on_a_model_with_transformers_own_adapter(method, tmp_path):
    model = make_model("gpt2")
    model.add_adapter(METHODS[method]())
    options = {**OPTIONS, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    args = TrainingArguments(output_dir=str(tmp_path), **options)
    assert_only_the_added_are_trained(Trainer(model=model, args=args, train_dataset=rows()))


def stack_of_parts():
    return [
        LoraConfig(r=2, target_modules=["dense"], lora_dropout=0.2, modules_to_save=["final_layer_norm"]),
        DROPPING,
        NonlinearQueryConfig(),
        LoraConfig(r=3, target_modules=["query_key_value"]),
    ]


DROPPING = PreProjectionConfig(content_skip=True, dropout=0.2)
ATTACHED = {
    "get_peft_model": lambda: get_peft_model(make_model("gpt_neox"), copy.copy(DROPPING)),
    "patch": lambda: hfpatch.patch(make_model("gpt_neox"), DROPPING),
    "stack": lambda: hfpatch.patch(make_model("gpt_neox"), stack_of_parts()),
    "copy of a stack": lambda: copy.deepcopy(hfpatch.patch(make_model("gpt_neox"), stack_of_parts())),
}
LONGER = {**OPTIONS, "max_steps": 4, "save_steps": 2, "lr_scheduler_type": "linear", "save_strategy": "steps"}


def make_trainer(model, folder, **options):
    options = {**LONGER, **options}
    data = {"train_dataset": rows(), "eval_dataset": rows()[:2]}
    return Trainer(model=model, args=TrainingArguments(output_dir=str(folder), **options), **data)


def make_sft_trainer(model, folder, peft_config=None, **options):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": " ".join(f"w{i}" for i in row["input_ids"])} for row in rows()])
    options = {**LONGER, "bf16": False, **options}
    args = SFTConfig(output_dir=str(folder), **options)
    data = {"train_dataset": data, "eval_dataset": data}
    return SFTTrainer(model=model, args=args, processing_class=words(), peft_config=peft_config, **data)


def losses_and_tensors(trainer):
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


RUNS = [(make_trainer, how) for how in ATTACHED]
RUNS += [pytest.param(make_sft_trainer, how, marks=pytest.mark.slow) for how in ("get_peft_model", "stack")]


@pytest.mark.parametrize(("make", "how"), RUNS)
def test_a_resumed_run_ends_as_one_never_stopped(make, how, tmp_path):
    trainer = make(ATTACHED[how](), tmp_path)
    assert_only_the_added_are_trained(trainer)
    losses, tensors = losses_and_tensors(trainer)
    resumed = make(ATTACHED[how](), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    losses_after, tensors_after = losses_and_tensors(resumed)
    assert len(losses) == 4
    assert losses_after == losses
    assert tensors.keys() == tensors_after.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], tensors_after[name])] == []
    load = PeftModel.from_pretrained if how == "get_peft_model" else hfpatch.load_patch
    loaded = load(make_model("gpt_neox"), tmp_path / "checkpoint-4")
    assert torch.equal(logits_of(loaded, make_tokens()), logits_of(trainer.model.eval(), make_tokens()))


def test_a_checkpoint_of_another_stack_or_base_is_refused(tmp_path):
    trainer = make_trainer(ATTACHED["stack"](), tmp_path, max_steps=2)
    trainer.train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(HfpatchError, match="the checkpoint has other adapters; patch the model as it was"):
        make_trainer(ATTACHED["patch"](), tmp_path).train(resume_from_checkpoint=checkpoint)
    other = make_model("gpt_neox")
    other.gpt_neox.layers[0].attention.dense.weight.data += 1
    with pytest.raises(HfpatchError, match="the checkpoint was made on another base"):
        make_trainer(hfpatch.patch(other, stack_of_parts()), tmp_path).train(resume_from_checkpoint=checkpoint)


def test_saving_a_stack_asks_for_files_in_a_folder_alone_and_ends_with_unpatching(tmp_path):
    model = ATTACHED["stack"]()
    with pytest.raises(HfpatchError, match=r"save_pretrained\(push_to_hub=...\) saves one adapter, and .* has 4"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    inactive = hfpatch.patch(make_model("llama"), PreProjectionConfig())
    inactive.set_adapter([])
    with pytest.raises(HfpatchError, match=r"variant=...\) saves one adapter, and pre_projection is not active"):
        inactive.save_pretrained(tmp_path, variant="fp16")
    model.save_pretrained(tmp_path / "worker", is_main_process=False)
    assert list(tmp_path.iterdir()) == []
    hfpatch.unpatch(model).save_pretrained(tmp_path)
    assert torch.equal(logits_of(type(model).from_pretrained(tmp_path), make_tokens()), logits_of(model, make_tokens()))


@pytest.mark.parametrize("how", ["patch", "stack"])
def test_the_loop_of_accelerates_examples_saves_a_patch(how, tmp_path):
    accelerator, model = Accelerator(cpu=True), ATTACHED[how]()
    perturb(model)
    prepared = accelerator.prepare(model)
    state = {"save_function": accelerator.save, "state_dict": accelerator.get_state_dict(prepared)}
    accelerator.unwrap_model(prepared).save_pretrained(tmp_path / "whole", is_main_process=True, **state)
    model.save_pretrained(tmp_path / "pieces", max_shard_size="1KB", safe_serialization=True)
    for folder in tmp_path.iterdir():
        loaded = hfpatch.load_patch(make_model("gpt_neox"), folder)
        assert torch.equal(logits_of(loaded, make_tokens()), logits_of(model, make_tokens()))
    other = {name: tensor.clone() for name, tensor in state["state_dict"].items()}
    if how == "stack":  # one that was gathered from several processes, whose tensors the model does not have
        with pytest.raises(HfpatchError, match=r"save_pretrained\(state_dict=...\) saves one adapter, and .* has 4"):
            model.save_pretrained(tmp_path, state_dict=other)


@pytest.mark.parametrize("how", ["patch", "stack"])
def test_a_checkpoint_that_would_lack_something_trained_is_refused(how, tmp_path):
    model = ATTACHED[how]()
    model.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.requires_grad = True
    message = r"1 of \d+ trained tensors would not be in the patch, such as gpt_neox\..*dense_4h_to_h\.weight"
    with pytest.raises(HfpatchError, match=message):
        make_trainer(model, tmp_path).train()


@pytest.mark.slow
@BOTH
def test_sft_trainer_of_trl(method, tmp_path):
    trainer = make_sft_trainer(make_model("llama"), tmp_path, METHODS[method](), **OPTIONS)
    assert isinstance(trainer.model, PeftModel)
    assert_only_the_added_are_trained(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.__all__)
def test_preferences_and_rewards_start_at_the_reference(name, tmp_path):
    """TRL's reference is the model without its adapter: DPO starts at ln 2, GRPO at no divergence, and both leave."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    rows = [{"prompt": f"w{i} w{i + 1}", "chosen": f" w{i + 2} w5", "rejected": f" w{i + 3}"} for i in range(5, 13)]
    options = {**OPTIONS, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 4}
    shared = {"processing_class": words(), "peft_config": getattr(methods, name)()}
    preferences = DPOTrainer(
        make_model("llama"), args=DPOConfig(str(tmp_path), **options), train_dataset=Dataset.from_list(rows), **shared
    )
    rewards = GRPOTrainer(
        make_model("llama"),
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
        args=GRPOConfig(str(tmp_path), beta=0.1, num_generations=4, max_completion_length=6, **options),
        train_dataset=Dataset.from_list(rows).select_columns(["prompt"]),
        **shared,
    )
    for trainer, key, start in ((preferences, "loss", math.log(2)), (rewards, "kl", 0.0)):
        trainer.train()
        first, second = (entry[key] for entry in trainer.state.log_history if key in entry)
        assert first == pytest.approx(start, abs=1e-6)
        assert second != pytest.approx(start, abs=1e-6)


DROPS = [kind for name in methods.__all__ if "dropout" in (kind := getattr(methods, name)).__dataclass_fields__]


@pytest.mark.parametrize("kind", DROPS)
def test_dropout_is_a_module_that_can_be_turned_off(kind):
    """As TRL's ``disable_dropout`` does, which compares with a reference."""
    model, tokens = get_peft_model(make_model("llama"), kind(dropout=0.5)), make_tokens()
    perturb(model)
    expected = logits_of(model.eval(), tokens)
    assert not torch.allclose(logits_of(model.train(), tokens), expected)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0
    assert torch.equal(logits_of(model, tokens), expected)
