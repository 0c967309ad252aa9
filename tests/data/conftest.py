import json

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hfpatch.data.blocks import IGNORE
from hfpatch.data.tokenizer import END_OF_TEXT, train_tokenizer

TEXTS = [
    "Anna walked to the mill and left the blue lamp there.",
    "Then Ben carried the lamp to the harbour.",
    "Where is the lamp? It is at the harbour.",
    "Clara likes the mill, and the mill likes nobody at all, as mills do.",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def text_file(tmp_path, texts):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(texts))
    return path


def with_start(tokenizer, start=END_OF_TEXT, template="{0} $A"):
    """Return a tokenizer that writes each text by a template with a start token, as Llama's does; None writes none."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([start])
    if template is not None:
        special = [(start, backend.token_to_id(start))]
        backend.post_processor = TemplateProcessing(single=template.format(start), special_tokens=special)
    made = {"bos_token": start, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return type(tokenizer)(tokenizer_object=backend, **made)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pieces_of(blocks):
    """Return the ids and the labels of each piece of text in the rows, of which nothing else is learned."""
    pieces = []
    for index in range(len(blocks)):
        row, start = blocks[index], 0
        for size in blocks.sizes[blocks.offsets[index] : blocks.offsets[index + 1]].tolist():
            part = slice(start, start + size)
            pieces.append((row["input_ids"][part].tolist(), row["labels"][part].tolist()))
            assert "position_ids" not in row or row["position_ids"][part].tolist() == list(range(size))
            start += size
        assert (row["labels"][start:] == IGNORE).all()
    return pieces


def stream_rows(documents, size, start=()):
    """Return the rows of a stream, those that begin inside a document with the start tokens."""
    flat = [(token, index == 0) for document in documents for index, token in enumerate(document)]
    rows, at = [], 0
    while at < len(flat):
        before = [] if flat[at][1] else [*start]
        taken = flat[at : at + size - len(before)]
        rows.append([*before, *(token for token, _ in taken)])
        at += len(taken)
    return [row for row in rows if len(row) == size]
