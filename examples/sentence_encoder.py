"""A sentence encoder: a tiny BERT learns to tell questions from statements with a pre-projection and a new head.

    python examples/sentence_encoder.py

The body stays frozen; `Trainer` trains the adapter and, because of `task_type="SEQ_CLS"`, the head. The saved adapter
loads to the same logits, bit for bit. Words and sentences are artificial, the body is random.
"""

import tempfile

import torch
from peft import PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import hfpatch

WORDS = 40  # ids 4 to 43; a sentence that holds one of the last four is a question
LENGTH = 8


def sentences(count: int, seed: int) -> list[dict[str, list[int] | int]]:
    """Return token ids and labels; half of the sentences have one of the four question words somewhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, WORDS, (count, LENGTH), generator=generator)
    labels = torch.arange(count) % 2
    at = torch.randint(0, LENGTH, (count,), generator=generator)
    word = torch.randint(WORDS, WORDS + 4, (count,), generator=generator)
    ids[torch.arange(count), at] = torch.where(labels == 1, word, ids[torch.arange(count), at])
    begin = torch.full((count, 1), 2)
    rows = torch.cat((begin, ids), 1).tolist()
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(rows, labels, strict=True)]


def encoder() -> BertForSequenceClassification:
    """Return a tiny BERT; in use: ``from_pretrained(..., num_labels=2)``."""
    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 4, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return BertForSequenceClassification(config)


@torch.no_grad()
def logits(model: torch.nn.Module, rows: list[dict]) -> torch.Tensor:
    """Return the logits ``(rows, 2)``, with every gradient off: torch picks kernels by these flags."""
    model.eval().requires_grad_(False)
    return model(input_ids=torch.tensor([row["input_ids"] for row in rows])).logits


def main(epochs: int = 12) -> dict[str, float]:
    """Train, save, load; return the accuracies before and after."""
    train, test = sentences(1024, seed=0), sentences(256, seed=1)
    wanted = torch.tensor([row["labels"] for row in test])
    before = (logits(encoder(), test).argmax(-1) == wanted).float().mean().item()

    model = get_peft_model(encoder(), hfpatch.PreProjectionConfig(gated=True, task_type="SEQ_CLS"))
    model.print_trainable_parameters()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=3e-3, seed=0,
            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        Trainer(model, options, train_dataset=train).train()
        model.save_pretrained(folder)
        after = logits(model, test)
        loaded = PeftModel.from_pretrained(encoder(), folder)
    assert torch.equal(logits(loaded, test), after), "the loaded adapter and head give other logits"
    return {"before": before, "after": (after.argmax(-1) == wanted).float().mean().item()}


if __name__ == "__main__":
    print(main())
