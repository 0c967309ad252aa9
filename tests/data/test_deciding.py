"""The documents that decide: they occur once, in no task, and nothing that they say is trained on."""

import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from data.conftest import with_start, write_rows
from draws import drawn, without
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from hfpatch.data.blocks import IGNORE
from hfpatch.data.copies import Digester, Digests
from hfpatch.data.corpora import filtered_documents, open_corpus
from hfpatch.data.deciding import (
    NOTHING,
    Candidates,
    TaskDocument,
    choose_documents,
    copies_of_tasks,
    digest_tasks,
    draw,
    tokenizer_documents,
)
from hfpatch.data.load import load_splits
from hfpatch.data.rows import Document
from hfpatch.data.token_file import describe_token_file, write_token_file
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings

TEXTS = [f"document number {number} tells of things" for number in range(20)]
TEXTS[4] = TEXTS[17]  # twice
TEXTS[9] = "  document number\n 15 tells of   things"  # the same but for white space
TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = {"role": "system", "content": "You are a lamp that shines on the harbour whenever a ship comes by at night."}


@pytest.fixture
def chat(tokenizer):
    return with_template(tokenizer)


def with_template(tokenizer, begun=False):
    """Return a tokenizer with a chat template; documents may begin with the token that ends them."""
    made = with_start(tokenizer, template="{0} $A" if begun else None)
    made.chat_template = TEMPLATE
    return made


def candidates(texts, held_out=0, tuning=0):
    digester = Digester()
    digests = Digests.of([[(digester.text(text), True)] for text in texts])
    nothing = np.zeros(len(texts), bool)
    return Candidates("here", digests, ~nothing, nothing, held_out, tuning)


def task(*texts, read=()):
    """Return the documents of one task, one for each text."""
    return {"own": [TaskDocument(read, (text,)) for text in texts]}


def test_documents_are_drawn_that_occur_once_and_in_no_task():
    tasks = task("A long article.\ndocument number 14 tells of things\nIt ends.", TEXTS[16])
    _, digests = digest_tasks(tasks, Digester())
    ((chosen,), _) = choose_documents([candidates(TEXTS, held_out=1, tuning=6)], digests)
    once = without(range(20), [4, 9, 15, 17])
    assert chosen.held_out.tolist() == drawn(once, 1)
    free = [index for index in once if index not in (14, 16, *chosen.held_out)]  # 16 is a task's, 14 a line of one
    assert chosen.tuning.tolist() == drawn(free, 6, use=1)
    assert chosen.train.tolist() == without(range(20), [*chosen.held_out, *chosen.tuning])
    ((other,), _) = choose_documents([candidates(TEXTS, held_out=6)], NOTHING, seed=5)
    assert other.held_out.tolist() == drawn(once, 6, seed=5) != drawn(once, 6)


@given(st.integers(1, 200), st.data())
def test_the_draw_has_one_run_of_neighbours_in_each_stratum(total, data):
    count, run = data.draw(st.integers(1, total)), data.draw(st.integers(1, 5))
    places = 3 * np.arange(total)
    drawn_places = draw(places, count, seed=(data.draw(st.integers(0, 9)), 0), run=run)
    assert len(set(drawn_places.tolist())) == count
    for first in range(0, count, run):
        neighbours = drawn_places[first : first + run] // 3
        assert (np.diff(neighbours) == 1).all()
        assert total * first // count <= neighbours[0] <= neighbours[-1] < total * (first + len(neighbours)) // count
    many = np.array([draw(places, count, seed=(seed, 0), run=run)[0] for seed in range(40)])
    free = total * min(run, count) // count - min(run, count)  # how far the first run can move
    assert (free > 0) == (len(set(many.tolist())) > 1)
    assert many.min() >= 0
    assert many.max() <= 3 * free


def test_what_tasks_say_is_found_by_task_and_short_or_shared_parts_are_not():
    rule, line = "Answer the question below in as few words as you can, without a reason.", story(1)
    tasks = {
        "read": [TaskDocument((f"{TEXTS[3]} yes", "no way"), (TEXTS[5],)), TaskDocument((story(2),), ())],
        "lines": [TaskDocument((), (rule, f"A title\n{line}\nA short line")), TaskDocument((), (rule, "A title"))],
    }
    texts = [f"{TEXTS[3]}\n yes", "no way", TEXTS[5], story(2), line, "A title", rule, story(3)]
    documents = [[(Digester().text(text), True)] for text in texts]
    for parts in ([rule, "a"], [line, "b"], ["no way", "c"], [story(2), "d"]):  # of conversations
        documents.append([(Digester().text(" ".join(parts)), True), (Digester().text(parts[0]), False)])
    copies, _ = digest_tasks(tasks, Digester())
    copied, counts = copies_of_tasks(Digests.of(documents), len(documents), copies)
    assert np.flatnonzero(copied).tolist() == [0, 1, 3, 4, 6, 9, 11]
    assert counts == {"read": 4, "lines": 3}
    plain = Candidates("here", Digests.of(documents), np.ones(len(documents), bool), copied)
    ((chosen,), _) = choose_documents([plain], NOTHING)
    assert chosen.train.tolist() == [2, 5, 7, 8, 10]


def test_blocks_stay_where_no_task_has_a_document(tmp_path, tokenizer):
    settings = DataSettings(source=write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), block_size=64)
    alone = load_splits(settings, tokenizer)
    beside = load_splits(settings, tokenizer, tasks=task(story(1), TEXTS[3]))
    assert (beside.train.sha256, beside.cautions) == (alone.train.sha256, ())


def test_a_token_file_without_ends_is_named(tmp_path, tokenizer):
    """What the tasks have of it cannot be found; with ends it is left out, also of the file of another tool."""
    texts, cautions = [story(n) for n in range(9)], []
    for ends in (True, False):
        file = tmp_path / f"{ends}.bin"
        write_token_file(file, map(Document, texts), tokenizer, DataSettings(layout="stream", append_eos=ends))
        for suffix in (".json", ".safetensors"):
            file.with_suffix(suffix).unlink()
        describe_token_file(file, tokenizer)
        settings = DataSettings(source=str(file), layout="stream", block_size=16)
        with pytest.warns(UserWarning, match="data: "):
            splits = load_splits(settings, tokenizer, tasks=task(story(4)))
        cautions += splits.cautions
    assert [caution.partition(".bin ")[2] for caution in cautions] == [
        "are in the tasks, too (own 1), and are not trained on",
        "has no end-of-text token between documents, so whether the tasks' documents are in it is not known",
    ]


def test_digests_differ_with_the_words_alone(tokenizer):
    digester = Digester(tokenizer)
    assert digester.text("a  b\n") == digester.text(" a b") != digester.text("ab")
    assert digester.text("A b") != digester.text("a b")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    lower = Digester(type(tokenizer)(tokenizer_object=backend))
    assert lower.text("A  ﬁsh") == lower.text("a fish")
    ids = np.array([0, 5, 6, 0, 0], np.uint16)
    assert digester.ids(ids) == digester.ids(ids[1:3]) != digester.ids(ids[1:2])


@pytest.mark.parametrize(
    ("tuning", "held_out", "message"),
    [
        (20, 0, "tuning.held_out is 20 and there are 20 documents, so none is left"),
        (15, 5, "tuning.held_out is 15, data.held_out 5 and there are 20 documents"),
        (17, 0, "of 20 documents only 16 occur once in the text and in none of the tasks"),
        (0, 20, "data.held_out is 20 and there are 20 documents, so none is left"),
        (0, 17, "data.held_out is 17, and of 20 documents only 16 occur once in the text; hold fewer out"),
    ],
)
def test_too_few_documents_are_one_line(tuning, held_out, message):
    with pytest.raises(HfpatchError, match=message):
        choose_documents([candidates(TEXTS, held_out, tuning)], NOTHING)


@pytest.mark.parametrize("layout", ["padded", "packed", "stream"])
@pytest.mark.parametrize("held_out", [None, 2])
def test_the_splits_share_no_document_and_lose_none(tmp_path, tokenizer, layout, held_out):
    path = tmp_path / "text.jsonl"
    write_rows(path, [{"text": text} for text in TEXTS])
    size = 8 if layout == "stream" else 64
    settings = DataSettings(source=str(path), block_size=size, layout=layout, held_out=held_out)
    once = without(range(20), [4, 9, 15, 17])
    last = drawn(once, held_out or 0)
    in_task = drawn(without(once, [once.index(index) for index in last]), 3, use=1)[1]  # it would be drawn
    given = {"tuning": 3, "tasks": task(TEXTS[in_task])}  # too short not to be trained on
    splits = load_splits(settings, tokenizer, **given)
    tuned = drawn([index for index in once if index not in (in_task, *last)], 3, use=1)
    expected = {"train": [text for index, text in enumerate(TEXTS) if index not in (*tuned, *last)]}
    expected |= {"held_out": [TEXTS[index] for index in last]} if held_out else {}
    expected["tuning"] = [TEXTS[index] for index in tuned]
    parts = blocks_of(splits)
    assert {name: blocks.documents for name, blocks in parts.items()} == {n: len(t) for n, t in expected.items()}
    for name, texts in expected.items():
        ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
        if layout == "stream":  # the rest that fills no block is left out
            joined = [token for row_ids in ids for token in row_ids]
            rows = [token for row in range(len(parts[name])) for token in parts[name].rows[row].tolist()]
            assert rows == joined[: len(joined) // size * size]
        else:
            sizes = parts[name].sizes.tolist()
            assert sorted(sizes) == sorted(map(len, ids))
            assert parts[name].tokens == sum(map(len, ids))
    if held_out is None:
        other = load_splits(settings, tokenizer)
        assert other.tuning is None
        assert other.train.documents == len(TEXTS)
    cache = tmp_path / "cache"
    for _ in range(2):
        kept = load_splits(settings, tokenizer, **given, cache_dir=cache)
        assert {name: blocks.sha256 for name, blocks in blocks_of(kept).items()} == {
            name: blocks.sha256 for name, blocks in parts.items()
        }
    excluding = load_splits(settings, tokenizer, tuning=3, cache_dir=cache)
    assert excluding.tuning.sha256 != splits.tuning.sha256


def blocks_of(splits):
    return {name: part for name in ("train", "held_out", "tuning") if (part := getattr(splits, name)) is not None}


def text_of(blocks, tokenizer):
    return "".join(tokenizer.decode(blocks[row]["input_ids"]) for row in range(len(blocks)))


def as_messages(number):
    question, answer = f"Where is lamp {number}?", f"At mill {number}."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def reordered(message):
    return dict(reversed(message.items()))


@pytest.mark.parametrize(
    "copy",
    [
        lambda turns: {"messages": [reordered(message) for message in turns]},
        lambda turns: {"messages": [{**message, "id": 7} for message in turns]},
        lambda turns: {"messages": [{**message, "name": None} for message in turns]},
        lambda turns: {"messages": [*turns, {"role": "user", "content": "And now?"}, reordered(as_messages(99)[1])]},
        lambda turns: {"prompt": turns[:1], "completion": turns[1:]},
        lambda turns: {"text": turns[1]["content"]},
        lambda turns: {"text": f"<user>{turns[0]['content']}<|endoftext|><assistant>{turns[1]['content']}"},
    ],
    ids=["order of keys", "unused key", "null", "longer", "prompt and completion", "text of a reply", "rendered"],
)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_conversations_that_are_trained_on_in_another_form_do_not_decide(tmp_path, chat, layout, copy):
    rows = [{"messages": as_messages(number)} for number in range(12)]
    copies = [copy(as_messages(number)) for number in range(6, 12)]
    name = next(name for name in ("messages", "prompt", "text") if name in copies[0])
    format_ = {"prompt": "prompt_completion"}.get(name, name)
    mixture = [
        {"source": write_rows(tmp_path / "a.jsonl", rows), "format": "messages"},
        {"source": write_rows(tmp_path / "b.jsonl", copies), "format": format_, "weight": 1e-6},
    ]
    settings = DataSettings(mixture=mixture, layout=layout, block_size=60, held_out=2)
    splits = load_splits(settings, chat, tuning=3, tasks=task("At mill 3."))
    held_out = drawn(range(6), 2)
    tuning = drawn([n for n in range(6) if n not in (3, *held_out)], 3, use=1)
    assert [n for n in range(12) if f"mill {n}." in text_of(splits.held_out, chat)] == held_out
    assert [n for n in range(12) if f"mill {n}." in text_of(splits.tuning, chat)] == tuning


def test_documents_of_one_token_are_not_chosen(tmp_path, chat):
    """Nor others in their place; and a reply that is cut off is nothing to decide by."""
    texts = [*(f"the lamp {n}" for n in range(6)), "the lamp 0", *"eamil"]
    source = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = DataSettings(source=source, append_eos=False, layout="padded", block_size=16, held_out=2)
    splits = load_splits(settings, chat, tuning=2)
    decoded = [
        [text_of(part.take(np.array([row])), chat).partition("<|")[0] for row in range(len(part))]
        for part in blocks_of(splits).values()
    ]
    once = texts[1:6]
    held_out = drawn(once, 2)
    tuning = drawn([text for text in once if text not in held_out], 2, use=1)
    rest = [text for text in once if text not in held_out + tuning]
    assert decoded == [["the lamp 0", *rest, "the lamp 0"], held_out, tuning]
    rows = [{"prompt": "why? " * (9 if n > 3 else 1), "completion": f"for {n}"} for n in range(7)]
    source = write_rows(tmp_path / "b.jsonl", rows)
    settings = DataSettings(source=source, format="prompt_completion", layout="padded", block_size=16, held_out=2)
    with pytest.warns(UserWarning, match="have none to learn"):
        splits = load_splits(settings, chat)
    assert [n for n in range(7) if f"for {n}" in text_of(splits.held_out, chat)] == drawn(range(4), 2)


def test_a_tokenizer_is_not_trained_on_what_is_held_out(tmp_path, tokenizer):
    """The same documents as the model's, in a mixture too."""
    texts = ["", *(f"the lamp {n}" for n in range(8)), "<|endoftext|>", "lonely", "the lamp 0"]
    paths = [write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])]
    paths.append(write_rows(tmp_path / "b.jsonl", [{"text": text} for text in ["the lamp 7", "the lamp 8", "more"]]))
    given = {"held_out": 4, "seed": 3, "layout": "padded", "min_characters": 0}
    chosen = DataSettings(mixture=[{"source": path} for path in paths], **given)
    texts_to_train = list(tokenizer_documents([(open_corpus(part), part) for part in chosen.parts()]))
    trained = load_splits(chosen, tokenizer).train
    assert len(texts_to_train) == 9
    rows = [trained.rows[index] for index in range(len(trained))]
    assert [tokenizer.decode(row[row != 0]) for row in rows] == texts_to_train
    free = [part.model_copy(update={"held_out": None}) for part in chosen.parts()]
    assert len(list(tokenizer_documents([(open_corpus(part), part) for part in free]))) == 13
    wrong = DataSettings(source=paths[0], held_out=1, append_eos=False)
    with pytest.raises(HfpatchError, match="has a document of one word \\('lonely'\\), which may be a single token"):
        list(tokenizer_documents([(open_corpus(wrong), wrong)]))


# What decides is not trained on, whatever the sources, their formats, mixture, slices and layout


def story(number):
    """Return a sentence of words that no other has, long enough to count as a text by itself."""
    draw = random.Random(number)
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(9))


def row_of(numbers, form, spaced):
    """Return one or two stories in one of the forms of a row."""
    first, second = (story(number).replace(" ", "  " if spaced else " ") for number in numbers)
    asked, reply = {"role": "user", "content": f"Go on, {numbers[0]}."}, {"content": first, "role": "assistant"}
    more, last = {"role": "user", "content": "And then?"}, {"role": "assistant", "content": second, "id": spaced}
    return {
        "text": {"text": first},
        "prompt_completion": {"prompt": f"Tell of {numbers[1]}: ", "completion": first},
        "told": {"prompt": second + " ", "completion": first},
        "chat_completion": {"prompt": [SYSTEM, asked, reply, more], "completion": [last]},
        "messages": {"messages": [SYSTEM, asked, reply, more, last]},
        "short": {"messages": [asked, reply], "tools": [{"name": f"tool {numbers[1]}"}]},
    }[form]


def head(number, size):
    """Return more than ``size`` tokens that some long documents begin with."""
    return " ".join(story(10_000 + 100 * number + part) for part in range(2 + size // 60))


def long_row(kind, number, tail, size):
    """Return a row whose first tokens, more than a block has, others have too; its last words no other has."""
    text = f"{head(number, size)} {story(20_000 + tail)}"
    chat = [SYSTEM, {"role": "user", "content": "Go on."}], [{"role": "assistant", "content": text}]
    return {
        "text": {"text": text},
        "messages": {"messages": [*chat[0], *chat[1]]},
        "prompt_completion": {"prompt": "Tell of it: ", "completion": text},
        "chat": {"prompt": chat[0], "completion": chat[1]},
    }[kind]


FORMS = {
    "text": ["text"],
    "messages": ["messages", "short"],
    "prompt_completion": ["prompt_completion", "told"],
    "chat": ["chat_completion"],
}
LONG = {"text": 0, "messages": 10, "chat": 10, "prompt_completion": 20}
SEEDS = 10
EXPECTED = ("occur once", "do not fill", "all ", "a token to learn", "use longer blocks")
SPLITS = ["train", "train[:60%]", "train[40%:]", "train[:-2]", "train[3:]"]


def make_source(draw, folder, tokenizer, layout, number, size):
    """Write a source of a dozen rows, some of which are copies of others in some form, and say how it is read."""
    kind = draw.choice(["text"] if layout == "stream" else list(FORMS))
    pool = [*range(60), *range(100 * number, 100 * number + 40)]
    pairs = zip(draw.choices(pool, k=16), draw.choices(pool, k=16), strict=True)
    rows = [row_of(pair, draw.choice(FORMS[kind]), draw.random() < 0.3) for pair in pairs]
    if size >= 64 or layout == "padded":  # long documents, which others equal in what is read of them alone
        rows += [long_row(kind, LONG[kind] + draw.randrange(6), 100 * number + index, size) for index in range(5)]
        draw.shuffle(rows)
    path = folder / f"{number}.jsonl"
    options = {"source": write_rows(path, rows)}
    if layout == "stream" and draw.random() < 0.5:
        file = path.with_suffix(".bin")
        write_token_file(file, map(Document, [row["text"] for row in rows]), tokenizer, DataSettings(layout="stream"))
        if draw.random() < 0.5:  # as another tool would leave it
            file.with_suffix(".json").unlink()
            file.with_suffix(".safetensors").unlink()
            describe_token_file(file, tokenizer)
        return {"source": str(file)}
    return {**options, "format": {"chat": "prompt_completion"}.get(kind, kind), "split": draw.choice(SPLITS)}


def windows(blocks, size=12, *, learned):
    """Return every stretch of so many tokens in the rows; of those that are learned only, if so asked."""
    stretches = set()
    for index in range(len(blocks)):
        row = blocks[index]
        ids, counted = row["input_ids"].tolist(), (row["labels"] != IGNORE).tolist()
        for start in range(len(ids) - size + 1):
            if all(counted[start : start + size]) or not learned:
                stretches.add(tuple(ids[start : start + size]))
    return stretches


@pytest.mark.filterwarnings("ignore:.*data.block_size|.*are in the text that is trained|.*are in the tasks, too")
@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
@pytest.mark.parametrize("begun", [False, True])
def test_no_window_of_what_decides_is_trained_on(tokenizer, tmp_path, layout, begun):
    """Nor of what the tasks say."""
    chat, done, left_out = with_template(tokenizer, begun), 0, 0
    for seed in range(SEEDS):
        draw, folder = random.Random(f"{seed} {layout} {begun}"), tmp_path / str(seed)
        folder.mkdir()
        size = draw.choice([20, 64] if layout == "stream" else [100, 140, 400])
        made = [make_source(draw, folder, chat, layout, number, size) for number in range(draw.randint(1, 3))]
        common = {"layout": layout, "block_size": size, "held_out": draw.randint(0, 3)}
        mixture = {"mixture": [{**source, "weight": draw.choice([1.0, 2.0])} for source in made]}
        chosen = DataSettings(**(mixture if len(made) > 1 else made[0]), **common)
        tuning, task_texts = draw.randint(1, 3), [story(number) for number in draw.sample(range(60), 4)]
        tasks = {
            "read": [TaskDocument((f"{text} ",), ()) for text in task_texts[:2]],
            "lines": [TaskDocument((), (f"A title\n{text}\n", "more")) for text in task_texts[2:]],
        }
        evaluation = None
        if draw.random() < 0.5:
            evaluation = DataSettings(
                **make_source(draw, folder, chat, layout, 7, size), layout=layout, block_size=size
            )
        try:
            given = {"tuning": tuning, "tasks": tasks, "evaluation": evaluation}
            splits = load_splits(chosen, chat, **given, cache_dir=folder / "cache")
        except HfpatchError as error:
            if not any(part in str(error) for part in EXPECTED):
                raise
            continue
        trained, deciding = windows(splits.train, learned=False), windows(splits.tuning, learned=True)
        assert splits.tuning.documents == tuning
        assert not deciding & windows_of_texts(task_texts, chat), seed
        if splits.held_out is not None:
            deciding |= windows(splits.held_out, learned=True)
            assert evaluation or splits.held_out.documents == chosen.held_out
        deciding |= windows_of_texts(task_texts, chat)
        assert not deciding & trained, seed
        left_out += len(splits.cautions)
        done += 1
    assert min(done, left_out) > SEEDS / 3


def windows_of_texts(texts, tokenizer, size=12):
    rows = [tokenizer(text)["input_ids"] for text in texts]
    return {tuple(row[start : start + size]) for row in rows for start in range(len(row) - size + 1)}


# Groups


def article(number, lines):
    return [
        f" = Title {number} = \n",
        " = = Early life = = \n",
        *(f"Line {number} {line}: {story(line)}" for line in lines),
    ]


def test_groups_are_whole_in_every_use_and_what_others_have_too_is_left_out(tmp_path, tokenizer):
    """Lines of articles, whose headings are too short to be read; a part's heading is in all, line 3 of 7 in 8, too."""
    articles = [article(number, range(2 + number % 3)) for number in range(20)]
    articles[8].append(articles[7][2])
    lines = [line for lines_of_one in articles for line in lines_of_one]
    source = write_rows(tmp_path / "a.jsonl", [{"text": line} for line in lines])
    counts = {"held_out": 4, "tuning": 3}
    settings = DataSettings(
        source=source, group="wikitext", min_characters=14, block_size=96, layout="padded", held_out=4, seed=1
    )
    with pytest.warns(UserWarning, match="occur elsewhere, too") as warned:
        splits = load_splits(settings, tokenizer, tuning=3)
    again = load_splits(settings, tokenizer, tuning=3, cache_dir=tmp_path / "cache")
    cached = load_splits(settings, tokenizer, tuning=3, cache_dir=tmp_path / "cache")
    held_out = drawn(range(20), 4, seed=1, run=1)
    tuning = drawn([number for number in range(20) if number not in held_out], 3, use=1, seed=1, run=1)
    rest = [number for number in range(20) if number not in (*held_out, *tuning)]
    for name, numbers in (("held_out", held_out), ("tuning", tuning), ("train", rest)):
        blocks = getattr(splits, name)
        expected = [line for number in numbers for line in articles[number][2:]]
        if name == "train":  # the headings of parts are trained on
            expected = [line for number in numbers for line in articles[number][1:]]
        elif {7, 8} & set(numbers):
            expected = [line for line in expected if line != articles[7][2]]
        texts = [tokenizer.decode(blocks.rows[row][blocks.rows[row] != 0]) for row in range(len(blocks))]
        assert texts == expected, name
        assert getattr(again, name).sha256 == getattr(cached, name).sha256 == blocks.sha256
    for name, numbers in (("held_out", held_out), ("tuning", tuning)):
        owners = [number for number in numbers for line in articles[number][2:] if line != articles[7][2]]
        for loaded in (splits, again, cached):
            assert [numbers[group] for group in getattr(loaded, name).groups] == owners
    assert splits.train.groups is None
    cautions = [str(warning.message) for warning in warned if "occur elsewhere" in str(warning.message)]
    assert [text.partition(":")[0] for text in cautions] == ["data.held_out", "tuning.held_out"]
    assert cautions == list(splits.cautions)
    for (name, count), text in zip(counts.items(), cautions, strict=True):
        left_out = count + sum({7, 8} & set(held_out if name == "held_out" else tuning) != set() for _ in range(1))
        assert f" {left_out} of " in text


@pytest.mark.parametrize("kind", ["messages", "mixture", "token_file", "splits"])
def test_groups_of_every_kind_of_source(tmp_path, chat, kind):
    """A column, also of conversations and with gaps; a split begins a group; a token file keeps its groups."""
    texts = {"train": [story(n) for n in range(24)], "test": [story(n) for n in range(24, 48)]}
    data = tmp_path / "set"
    data.mkdir()
    for split, stories in texts.items():
        rows = [
            {"text": text, "by": None if n > 20 else n % 7, **row_of((n, n), "messages", False)}
            for n, text in enumerate(stories)
        ]
        write_rows(data / f"{split}.jsonl", rows)
    common = {"layout": "padded", "block_size": 400, "held_out": 3}
    one = {"source": str(data / "train.jsonl"), "group": "by"}
    chosen = {
        "messages": {**one, "format": "messages"},
        "mixture": {"mixture": [one, {"source": str(data / "test.jsonl")}]},
        "token_file": {"source": str(tmp_path / "a.bin")},
        "splits": {"source": "x/set", "split": "train+test", "group": "^"},
    }[kind]
    if kind == "token_file":
        settings, common["layout"] = DataSettings(**one, layout="stream"), "stream"
        documents = filtered_documents(open_corpus(settings), settings)
        write_token_file(tmp_path / "a.bin", documents, chat, settings)
        with pytest.raises(ValueError, match=r"data.group sets how text is read"):
            DataSettings(**chosen, **common, group="by")
    if kind == "splits":
        chosen["group"] = f"^{texts['train'][0]}|{texts['train'][12]}|{texts['test'][20]}"  # of 12, 12, 20 and 4 lines
        common["held_out"] = 1
    loaded = load_splits(DataSettings(**chosen, **common), chat, data_dir=tmp_path)
    groups = loaded.held_out.groups.tolist()
    train, held_out = text_of(loaded.train, chat), text_of(loaded.held_out, chat)
    all_texts = [*texts["train"], *(texts["test"] if kind in ("mixture", "splits") else [])]
    assert [text in train for text in all_texts] == [text not in held_out for text in all_texts] or kind == "token_file"
    sizes = sorted(np.bincount(groups).tolist())
    if kind == "splits":
        assert sizes in ([12], [20], [4])
    elif (
        kind == "mixture"
    ):  # by weight two of the groups and one of the documents of the other source, or the other way
        assert len(sizes) == 3
        assert sizes[0] == 1
    else:
        assert set(sizes) <= {1, 3}
        assert len(sizes) == 3


def test_a_tokenizer_is_not_trained_on_held_out_groups(tmp_path, tokenizer):
    lines = [line for number in range(9) for line in article(number, range(3))]
    source = write_rows(tmp_path / "a.jsonl", [{"text": line} for line in lines])
    settings = DataSettings(source=source, group="wikitext", layout="padded", block_size=96, held_out=3)
    trained = list(tokenizer_documents([(open_corpus(settings), settings)]))
    kept = drawn(range(9), 3, run=1)
    assert trained == [line for number in range(9) if number not in kept for line in article(number, range(3))]


@pytest.mark.parametrize("by_text", [False, True])
def test_documents_that_are_read_alike_do_not_decide(tmp_path, tokenizer, by_text):
    """They are not drawn; where the tokenizer has been trained on the others by then, they are left out and counted."""
    texts = [f"{story(n)} {'and' if n % 2 else 'or'} more" for n in range(20)]
    texts += [f"{story(n)} but less" for n in range(10)]  # the first ten again, but for the end
    source = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = DataSettings(source=source, layout="padded", block_size=32, held_out=8)
    with pytest.warns(UserWarning, match="occur elsewhere") if by_text else nullcontext():
        splits = load_splits(settings, tokenizer, by_text=by_text)
    chosen = drawn(range(30) if by_text else range(10, 20), 8)
    held_out = [index for index in chosen if 10 <= index < 20]
    assert [tokenizer.decode(row) for row in splits.held_out.rows[:]] == [
        tokenizer.decode(tokenizer(texts[index]).input_ids[:32]) for index in held_out
    ]
    assert splits.train.documents == 30 - 8
    trained = {tuple(row) for row in splits.train.rows[:].tolist()}
    assert not trained & {tuple(row) for row in splits.held_out.rows[:].tolist()}


def test_what_is_read_of_a_task_is_not_tuned_on(tmp_path, tokenizer):
    """Of documents that differ from a task's text only beyond the block: they are not trained on either."""
    texts = [f"{story(n)} {'and' if n % 2 else 'or'} more" for n in range(12)]
    source = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = DataSettings(source=source, layout="padded", block_size=32)
    with pytest.warns(UserWarning, match="6 of 12 documents .* are in the tasks, too"):
        splits = load_splits(settings, tokenizer, tuning=4, tasks=task(*(f"{story(n)} but less" for n in range(6))))
    tuned = drawn(range(6, 12), 4, use=1)
    expected = {"tuning": tuned, "train": without(range(6, 12), [n - 6 for n in tuned])}
    for name, indices in expected.items():
        rows = [tokenizer.decode(row) for row in getattr(splits, name).rows[:]]
        assert rows == [tokenizer.decode(tokenizer(texts[index]).input_ids[:32]) for index in indices], name


@given(st.data())
def test_no_use_of_documents_splits_a_group(data):
    groups = np.array(data.draw(st.lists(st.integers(0, 8), min_size=12, max_size=40)))
    texts = data.draw(st.lists(st.integers(0, 30), min_size=len(groups), max_size=len(groups)))
    names, groups = np.unique(groups, return_inverse=True)
    held_out, tuning = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    source = replace(candidates([f"text {n}" for n in texts], held_out, tuning), groups=groups)
    try:
        ((chosen,), _) = choose_documents([source], NOTHING, seed=data.draw(st.integers(0, 5)))
    except HfpatchError:
        return
    uses = [set(groups[indices].tolist()) for indices in (chosen.train, chosen.held_out, chosen.tuning)]
    assert sum(map(len, uses)) == len(set.union(*uses))
    assert (len(uses[1]), len(uses[2])) == (held_out, tuning)
    assert chosen.train.tolist() == [n for n, group in enumerate(groups) if group in uses[0]]
    assert len(names) > held_out + tuning
    for index in (*chosen.held_out, *chosen.tuning):
        others = [other for other, text in enumerate(texts) if text == texts[index]]
        assert {groups[other] for other in others} == {groups[index]}
