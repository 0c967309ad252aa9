"""Which tokens of conversations and completions are learned, against tokens put together by hand."""

import importlib.util
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from data.conftest import pieces_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hfpatch.data import corpora
from hfpatch.data.blocks import IGNORE
from hfpatch.data.completions import Completions
from hfpatch.data.load import load_splits
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = st.text("ab \né😀", min_size=0, max_size=8)


@pytest.fixture(scope="module")
def chat(texts) -> PreTrainedTokenizerFast:
    made = train_tokenizer(texts, 300)
    made.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]})
    made.chat_template = PLAIN
    return made


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def by_hand(messages, tokenizer, first=0):
    """Token ids and labels, message by message: special tokens keep the pieces of text apart."""
    ids, labels = [], []
    for number, message in enumerate(messages):
        header = [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>")]
        content = tokenizer(message["content"])["input_ids"] + [tokenizer.convert_tokens_to_ids("<|end|>")]
        learned = message["role"] == "assistant" and number >= first
        ids += header + content
        labels += [IGNORE] * len(header) + (content if learned else [IGNORE] * len(content))
    return ids, labels


def encode(value, tokenizer, **options):
    data = DataSettings(source="x", format="messages" if "messages" in value else "prompt_completion", **options)
    ((ids, mask, _),) = Completions(tokenizer, data).encode([json.dumps(value)])
    return ids, [token if learned else IGNORE for token, learned in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@settings(deadline=None)  # the first example compiles the template
@given(contents=st.lists(WORDS, min_size=2, max_size=6))
def test_the_assistant_s_turns_are_learned_with_their_ends(chat, template, contents):
    chat.chat_template = template
    messages = turns(*zip(["system", "user", "assistant", "user", "assistant", "assistant"], contents, strict=False))
    assert encode({"messages": messages}, chat) == by_hand(messages, chat)
    earlier, last = turns(("assistant", "old"), ("user", contents[0])), turns(("assistant", contents[1]))
    encoded = encode({"prompt": earlier, "completion": last}, chat)
    assert encoded == by_hand(earlier + last, chat, first=2)
    chat.chat_template = PLAIN


TRAINING = sorted((Path(importlib.util.find_spec("trl").origin).parent / "chat_templates").glob("*_training.jinja"))


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_training_template_of_trl_is_taken(chat, path):
    """The learned tokens are those of transformers' own mask, of which TRL computes its loss."""
    messages = turns(("user", "Where is it?"), ("assistant", "At the mill."), ("user", "And he?"), ("assistant", "In."))
    if path.stem.startswith(("idefics3", "llava_next", "smolvlm")):  # of models that see: parts of a message
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    ids, labels = encode({"messages": messages}, chat, chat_template=str(path))
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = chat.apply_chat_template(messages, chat_template=path.read_text(encoding="utf-8"), **options)
    assert ids == theirs["input_ids"]
    assert [label != IGNORE for label in labels] == [bool(learned) for learned in theirs["assistant_masks"]]
    learned = chat.decode([label for label in labels if label != IGNORE])
    assert "At the mill." in learned
    assert "And he?" not in learned


@settings(deadline=None)
@given(prompt=st.text("ab .", max_size=9), completion=st.text("ab .", max_size=9))
def test_a_completion_is_learned_with_the_end_of_text(tokenizer, prompt, completion):
    """A token that joins the end of a prompt with the completion is learned."""
    ids, labels = encode({"prompt": prompt, "completion": completion}, tokenizer)
    expected = tokenizer(prompt + completion)["input_ids"]
    assert ids == [*expected, tokenizer.eos_token_id]
    ends = np.cumsum([len(tokenizer.decode([token])) for token in expected])
    assert labels == [*(t if end > len(prompt) else IGNORE for t, end in zip(expected, ends, strict=True)), ids[-1]]
    without, _ = encode({"prompt": prompt, "completion": completion}, tokenizer, append_eos=False)
    assert without == expected


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_blocks_have_the_labels_of_each_conversation_by_itself(chat, tmp_path, layout):
    """Also from the cache; held-out conversations, too; what is cut or has nothing left to learn is said."""
    shapes = np.random.default_rng(0).integers(1, 9, (14, 4))
    made = [
        turns(*(pair for n in row for pair in (("user", "a" * n), ("assistant", "mill " * n))))
        for row in shapes.tolist()
    ]
    made += [turns(("user", "b" * 60), ("assistant", "late")), turns(("user", "c"), ("assistant", "d"))]
    rows = [{"messages": messages} for messages in made]
    data = DataSettings(
        source=write_rows(tmp_path / "a.jsonl", rows), format="messages", layout=layout, block_size=60, held_out=1
    )
    expected = [[np.asarray(part[:60]) for part in by_hand(messages, chat)] for messages in made]
    cut = sum(len(by_hand(messages, chat)[0]) > 60 for messages in made)
    said = rf"of 15 examples {cut} are longer than data.block_size \(60\).*; 1 have none"
    with pytest.warns(UserWarning, match=said):
        first = load_splits(data, chat, cache_dir=tmp_path / "cache")
    with pytest.warns(UserWarning, match=said):
        again = load_splits(data, chat, cache_dir=tmp_path / "cache")
    for splits in (first, again):
        for blocks, documents in ((splits.train, expected[:14]), (splits.held_out, expected[15:])):
            wanted = [(ids.tolist(), [IGNORE, *labels[1:].tolist()]) for ids, labels in documents]
            assert sorted(pieces_of(blocks)) == sorted(wanted)
            labelled = sum(int((labels[1:] != IGNORE).sum()) for _, labels in documents)
            assert blocks.count_predicted(range(len(blocks))) == blocks.to_json()["predicted_tokens"] == labelled
            assert blocks.tokens == sum(len(ids) for ids, _ in documents)
    assert first.train.sha256 == again.train.sha256
    half = first.train.take(np.arange(len(first.train))[::2])
    assert half[1]["labels"].tolist() == first.train[2]["labels"].tolist()


def test_the_hash_and_the_cache_follow_the_template(chat, tmp_path):
    rows = [{"messages": turns(("user", "a"), ("assistant", "b"))}]
    source, other = write_rows(tmp_path / "a.jsonl", rows), tmp_path / "t.jinja"
    other.write_text(MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"))
    made = [
        load_splits(DataSettings(source=source, format="messages", **options), chat, cache_dir=tmp_path / "cache").train
        for options in ({}, {"chat_template": str(other)})
    ]
    assert (made[0].rows == made[1].rows).all()  # only what is learned differs
    assert made[0].sha256 != made[1].sha256
    assert [blocks.to_json()["predicted_tokens"] for blocks in made] == [2, 1]


WITH_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if brief %}Be brief.\n{% endif %}"
    "{{ documents[0].text if documents else '' }}" + PLAIN
)
TOOLS = [
    {"type": "function", "function": {"name": "light", "parameters": {"properties": {"lamp": {"type": "string"}}}}}
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("form", ["messages", "prompt_completion"])
def test_tools_and_template_options_are_given_as_trl_gives_them(chat, tmp_path, monkeypatch, kind, form):
    """Also as JSON, and without the nulls that a table adds where rows differ."""
    trl = pytest.importorskip("trl.data_utils")
    asked, reply = turns(("user", "Light the lamp.")), turns(("assistant", "It is lit."))
    shape = {"messages": asked + reply} if form == "messages" else {"prompt": asked, "completion": reply}
    other = [
        {"type": "function", "function": {"name": "dim", "parameters": {"properties": {"by": {"type": "integer"}}}}}
    ]
    given = [{"tools": TOOLS, "chat_template_kwargs": {"brief": True}}, {"tools": other}, {"tools": []}, {}]
    rows = [{**shape, **{"tools": None, "chat_template_kwargs": None}, **columns} for columns in given]
    if kind == "jsonl":
        rows[1]["tools"] = json.dumps(other)
        source = write_rows(tmp_path / "a.jsonl", rows)
    else:
        table, source = datasets.Dataset.from_list(rows), str(tmp_path / f"a.{kind}")
        table.to_parquet(source) if kind == "parquet" else table.save_to_disk(source)
    monkeypatch.setattr(chat, "chat_template", WITH_TOOLS)
    blocks = load_splits(DataSettings(source=source, format=form, layout="padded", block_size=400), chat).train
    rows = [blocks[row] for row in range(len(blocks))]
    texts = [chat.decode(row["input_ids"][row.get("attention_mask") == 1]) for row in rows]
    brief = {"chat_template_kwargs": {"brief": True}}
    assert texts == [
        "".join(trl.apply_chat_template({**shape, **options}, chat, tools=tools).values())
        for tools, options in ((TOOLS, brief), (other, {}), (None, {}), (None, {}))
    ]
    assert '"dim"' in texts[1]
    assert "tools" not in texts[2]


ASKED = turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template; give a file with one as data.chat_template"),
        (FORGETFUL, r"writes message 2 .* differently once other messages follow.*\{% generation %\}"),
        ("{{ raise_exception('no system') }}", r"refuses a conversation \(no system\)"),
        ({"tool_use": PLAIN}, "several chat templates and no default"),
    ],
)
def test_templates_that_do_not_fit_are_one_clear_line(chat, tmp_path, monkeypatch, template, message):
    data = DataSettings(source=write_rows(tmp_path / "a.jsonl", [{"messages": ASKED}]), format="messages")
    monkeypatch.setattr(chat, "chat_template", template)
    with pytest.raises(HfpatchError, match=message):
        load_splits(data, chat)
    with pytest.raises(HfpatchError, match=r"data.chat_template: .*none.jinja cannot be read"):
        load_splits(data.model_copy(update={"chat_template": str(tmp_path / "none.jinja")}), chat)


def test_characters_are_those_of_what_is_said(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "defg"}]}
    for characters, row in (
        (7, {"messages": [*turns(("user", " abc ")), parts]}),
        (4, {"messages": [*turns(("user", "abc")), call]}),
        (7, {"prompt": "abc", "completion": " defg"}),
        (7, {"prompt": turns(("user", "abc")), "completion": turns(("assistant", "defg"))}),
    ):
        kind = "messages" if "messages" in row else "prompt_completion"
        data = DataSettings(source=write_rows(tmp_path / "a.jsonl", [row]), format=kind, min_characters=characters)
        assert len(list(corpora.documents(data))) == 1
        with pytest.raises(HfpatchError, match=f"no document has {characters + 1} characters"):
            list(corpora.documents(data.model_copy(update={"min_characters": characters + 1})))


def test_a_template_surrounds_the_prompt(chat, tmp_path):
    template = "Question: {} Think {step}.\nAnswer:"
    rows = [{"query": "1 {} 1?", "response": " 2"}, {"query": "2 + 2?", "response": " 4"}]
    data = DataSettings(
        source=write_rows(tmp_path / "a.jsonl", rows), format="prompt_completion", prompt_template=template,
        prompt_column="query", completion_column="response", layout="padded", block_size=64,
    )  # fmt: skip
    blocks = load_splits(data, chat).train
    for row, asked in enumerate(rows):
        prompt = f"Question: {asked['query']} Think {{step}}.\nAnswer:"
        ids, labels = encode({"prompt": prompt, "completion": asked["response"]}, chat)
        assert blocks[row]["input_ids"][: len(ids)].tolist() == ids
        assert blocks[row]["labels"][: len(ids)].tolist() == labels


@pytest.mark.parametrize(
    ("format_", "row", "message"),
    [
        ("messages", {"messages": ASKED, "tools": "{"}, "a.jsonl:1: column 'tools' is not valid JSON"),
        ("messages", {"messages": ASKED, "tools": "[" * 99_999}, "a.jsonl:1: column 'tools' is not valid JSON .nested"),
        ("messages", {"messages": ASKED, "tools": {"name": 1}}, "a.jsonl:1: column 'tools' is dict, not a list"),
        ("messages", {"messages": ASKED, "chat_template_kwargs": [1]}, "'chat_template_kwargs' is list, not a dict"),
        ("messages", {"messages": "hello"}, "a.jsonl:1: column 'messages' is str, not a list of messages"),
        ("messages", {"messages": []}, "column 'messages' is empty, not a list"),
        ("messages", {"messages": [{"from": "human"}]}, r"message 1 of column .* has no 'role' \(it has from\)"),
        ("messages", {"messages": [{"role": "user"}]}, r"message 1 .* has no 'content' \(it has role\)"),
        ("messages", {"messages": turns(("user", "a"))}, "is null or has no assistant's message in every row"),
        ("messages", {"mesages": []}, r"no column 'messages' \(did you mean 'mesages'\?\).*; set data.messages_column"),
        ("text", {"messages": [], "id": 1}, "no column 'text'.*; set data.text_column or data.format=messages$"),
        ("text", {"prompt": "a", "completion": "b"}, "set data.text_column or data.format=prompt_completion$"),
        ("prompt_completion", {"prompt": "a"}, "no column 'completion'.*; set data.completion_column"),
        ("prompt_completion", {"prompt": "a", "completion": ASKED}, "column 'completion' is list, not text"),
        ("prompt_completion", {"prompt": ASKED, "completion": "b"}, "'completion' is str, not a list of messages"),
    ],
)  # fmt: skip
def test_rows_that_are_not_what_the_format_says(chat, tmp_path, format_, row, message):
    data = DataSettings(source=write_rows(tmp_path / "a.jsonl", [row]), format=format_)
    with pytest.raises(HfpatchError, match=message):
        load_splits(data, chat)
