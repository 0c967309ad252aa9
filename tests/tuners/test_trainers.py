"""transformers' Trainer and TRL's SFTTrainer, given a model or our configuration and nothing else of ours."""

import pytest
import torch
from families import VOCABULARY, logits_of, make_model, make_tokens
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hfpatch import NonlinearQueryConfig, PreProjectionConfig

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
    state = {name.replace("base_model.model.", ""): p.detach().clone() for name, p in model.named_parameters()}
    added = {name for name in state if "preproj_" in name or "nonlinear_" in name}
    return {n: p for n, p in state.items() if n not in added}, {n: p for n, p in state.items() if n in added}


@BOTH
def test_trainer(method, tmp_path):
    model = get_peft_model(make_model("gpt_neox"), METHODS[method]())
    base, added = parts(model)
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), **OPTIONS), train_dataset=rows())
    trainer.train()
    after_base, after_added = parts(model)
    assert all(torch.equal(base[name], after_base[name]) for name in base)
    assert all(not torch.equal(added[name], after_added[name]) for name in added)
    saved = sorted(tmp_path.glob("checkpoint-2/adapter_*"))
    assert [file.name for file in saved] == ["adapter_config.json", "adapter_model.safetensors"]
    again = PeftModel.from_pretrained(make_model("gpt_neox"), saved[0].parent)
    assert torch.equal(logits_of(again, make_tokens()), logits_of(model.eval(), make_tokens()))


@BOTH
def test_trainer_on_a_model_with_transformers_own_adapter(method, tmp_path):
    model = make_model("gpt2")
    model.add_adapter(METHODS[method]())
    base, added = parts(model)
    options = {**OPTIONS, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), **options), train_dataset=rows()).train()
    after_base, after_added = parts(model)
    assert all(torch.equal(base[name], after_base[name]) for name in base)
    assert all(not torch.equal(added[name], after_added[name]) for name in added)


@pytest.mark.slow
@BOTH
def test_sft_trainer_of_trl(method, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": " ".join(f"w{i}" for i in row["input_ids"])} for row in rows()])
    trainer = SFTTrainer(
        model=make_model("llama"),
        args=SFTConfig(output_dir=str(tmp_path), bf16=False, **OPTIONS),
        train_dataset=data,
        processing_class=words(),
        peft_config=METHODS[method](),
    )
    assert isinstance(trainer.model, PeftModel)
    base, added = parts(trainer.model)
    trainer.train()
    after_base, after_added = parts(trainer.model)
    assert all(torch.equal(base[name], after_base[name]) for name in base)
    assert added
    assert all(not torch.equal(added[name], after_added[name]) for name in added)
    assert {p.dtype for p in after_added.values()} == {torch.float32}
