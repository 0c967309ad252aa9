"""Tiny models, a tiny tokenizer and small data files in the hub's schemas."""

import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from hfpatch.data.tokenizer import train_tokenizer

NAMES = ["Anna", "Bert", "Cleo", "Dora", "Emil", "Fritz"]
PLACES = ["garden", "kitchen", "harbour", "library", "stable", "mill"]
THINGS = ["lamp", "ladder", "coin", "violin", "basket", "kettle"]


@pytest.fixture(scope="session")
def support():
    """The functions of this file, for tests to call."""
    return sys.modules[__name__]


def passages(count):
    """Sentences whose last word has been said before."""
    for i in range(count):
        name, room, thing = NAMES[i % 6], PLACES[(i // 6 + i) % 6], THINGS[(i // 2) % 6]
        yield f"{name} took the {thing} to the {room}. In the {room} it was cold, so {name} left the {thing}"


def lambada():
    return [{"text": text} for text in passages(24)]


def hellaswag():
    rows = []
    for i in range(24):
        name, thing = NAMES[i % 6], THINGS[i % 5]
        endings = [f"lifts the {thing} slowly.", "sings [laughing] a song.", f"{name} eats it", "is away. Then."]
        context, label = f"{name} looks at the {thing}.", "[header] Moving things" if i % 3 else "Housework"
        row = {"ind": i, "activity_label": label, "ctx_a": context, "ctx_b": "the man" if i % 2 else ""}
        rows.append({**row, "ctx": f"{context} {row['ctx_b']}".strip(), "endings": endings, "label": str(i % 4)})
    return rows


def arc(count, offset):
    rows = []
    for i in range(offset, offset + count):
        number, question = 3 + i % 3, f"Where does {NAMES[i % 6]} keep the {THINGS[i % 6]}?"
        labels = [str(k + 1) for k in range(number)] if i % 4 == 0 else list("ABCDE"[:number])
        choices = {"text": [f"in the {PLACES[(i + k) % 6]}" for k in range(number)], "label": labels}
        rows.append({"id": f"Q{i}", "question": question, "choices": choices, "answerKey": labels[i // 3 % number]})
    return rows


def articles(count):
    lines = list(passages(40))
    return [{"page": f" = Page {i} = \n\n {' . '.join(lines[i : i + 3 + i])} . \n"} for i in range(count)]


def paragraphs():
    lines = []
    for i, text in enumerate(passages(30)):
        lines += [{"text": ""}, {"text": f" = Heading {i} = \n"}, {"text": f" {text} ; {text} @-@ {i} . \n"}]
    return lines


FILES = {
    "lambada_openai/test.jsonl": lambada,
    "hellaswag/validation.jsonl.gz": hellaswag,
    "ai2_arc/ARC-Easy/train.jsonl": lambda: arc(12, 100),
    "ai2_arc/ARC-Easy/validation.jsonl": lambda: arc(16, 50),
    "ai2_arc/ARC-Easy/test.jsonl": lambda: arc(20, 0),
    "wikitext_document_level/wikitext-2-raw-v1/validation.jsonl": lambda: articles(2),
    "wikitext_document_level/wikitext-2-raw-v1/test.jsonl": lambda: articles(4),
    "wikitext/wikitext-2-raw-v1/validation.jsonl": paragraphs,
}


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in FILES.items():
        write_rows(folder / name, rows())
    return folder


@pytest.fixture
def own_data_dir(data_dir, tmp_path):
    """A data folder that a test may spoil."""
    return shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def tokenizer():
    texts = [*passages(36), *(row["question"] for row in arc(12, 0)), *(row["page"] for row in articles(3))]
    return train_tokenizer(texts, 320)


def gpt_neox(positions=128):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    limits = {"max_position_embeddings": positions, "vocab_size": 320, "initializer_range": 0.2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **limits, bos_token_id=0, eos_token_id=0)).eval()


def gpt2(positions=128):
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": positions, "vocab_size": 320}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=0)).eval()


@pytest.fixture(params=[gpt_neox, gpt2], ids=["gpt_neox", "gpt2"])
def model(request):
    return request.param()


@pytest.fixture(scope="session")
def taught(tokenizer):
    """A GPT-NeoX that has learned the last words of half the passages, so that it is right on some and not on all."""
    model = gpt_neox()
    rows = tokenizer(list(passages(12)), padding=False)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        for row in rows[::3]:
            ids = torch.tensor([row])
            model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def continuation(model, tokenizer, context, text):
    """Log-probabilities (tokens,) of ``text`` after ``context`` and whether each token is the greedy one."""
    start = len(tokenizer(context)["input_ids"])
    ids = torch.tensor([tokenizer(context + text)["input_ids"]])
    logits = model(ids).logits[0, start - 1 : -1].float()
    targets = ids[0, start:]
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], logits.argmax(-1) == targets


@pytest.fixture(scope="session")
def shared_data():
    """Real evaluation data, where it is at hand."""
    here = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("HFPATCH_DATA_DIR", here.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set HFPATCH_DATA_DIR")
    return folder
