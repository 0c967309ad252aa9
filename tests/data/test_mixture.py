import json
from collections import Counter

import numpy as np
import pytest
from data.conftest import write_rows

from hfpatch.data.blocks import IGNORE
from hfpatch.data.deciding import TaskDocument
from hfpatch.data.load import load_splits
from hfpatch.data.plan import draw_evaluation, draw_plan, draw_plans
from hfpatch.data.token_file import write_token_file
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.training import TrainingSettings, with_steps


def write_texts(path, texts, column="text"):
    return write_rows(path, [{column: text} for text in texts])


def words(name, count):
    return [f"{name}{number} " * 9 for number in range(count)]


@pytest.fixture
def mixture(tmp_path):
    sources = [
        {"source": write_texts(tmp_path / "a.jsonl", words("a", 40)), "weight": 3.0},
        {"source": write_texts(tmp_path / "b.jsonl", words("b", 25), "body"), "text_column": "body"},
    ]
    return DataSettings(mixture=sources, block_size=40, layout="padded")


def texts_of(blocks, tokenizer):
    return [tokenizer.decode(blocks[row]["input_ids"], skip_special_tokens=True) for row in range(len(blocks))]


def test_a_mixture_is_its_sources_one_after_the_other(mixture, tokenizer, tmp_path):
    """With a share of what is held out from each by its weight; the cache is that of each source."""
    settings = mixture.model_copy(update={"held_out": 8})
    made = load_splits(settings, tokenizer, cache_dir=tmp_path / "cache")
    assert texts_of(made.train, tokenizer) == [*words("a", 40)[:34], *words("b", 25)[:23]]
    assert texts_of(made.held_out, tokenizer) == [*words("a", 40)[34:], *words("b", 25)[23:]]
    alone = [load_splits(part, tokenizer, cache_dir=tmp_path / "cache").train for part in settings.parts()]
    assert len(list((tmp_path / "cache").iterdir())) == 4  # two texts, each in one layout
    facts = made.train.to_json()
    assert facts["mixture"] == [
        {"source": each.source, "revision": None, "sha256": each.sha256, "weight": weight}
        | {"documents": each.documents, "blocks": len(each), "tokens": each.tokens}
        for each, weight in zip(alone, (3.0, 1.0), strict=True)
    ]
    assert (facts["blocks"], facts["tokens"]) == (57, sum(each.tokens for each in alone))
    assert made.train.count_predicted([0, 40]) == alone[0].count_predicted([0]) + alone[1].count_predicted([6])
    drawn = draw_evaluation(made.train, 9)
    assert set(texts_of(drawn, tokenizer)) <= set(texts_of(made.train, tokenizer))
    assert (len(drawn), drawn.to_json().get("mixture")) == (9, None)


def test_the_plan_gives_each_source_its_share(mixture, tokenizer):
    blocks = load_splits(mixture, tokenizer).train
    training = TrainingSettings(steps=20, batch_size=10, warmup_steps=1)
    plans = draw_plans(training, blocks, [0, 1])
    for plan in plans.values():
        seen = Counter(plan.indices.flatten().tolist())
        own = [[seen[block] for block in range(40)], [seen[block] for block in range(40, 65)]]
        assert [sum(each) for each in own] == [150, 50]
        assert all(max(each) - min(each) <= 1 for each in own)  # every block once before any again
    assert (plans[0].indices != plans[1].indices).any()
    plain = draw_plan(blocks=65, steps=20, batch_size=10, seed=0)
    assert plans[0].sha256 != plain.sha256
    order = np.random.Generator(np.random.PCG64(0)).permutation(65)
    assert (plain.indices.flatten()[:65] == order).all()  # as it always was
    epochs = with_steps(TrainingSettings(epochs=1.5, batch_size=10, warmup_steps=1), len(blocks))
    assert (epochs.steps, epochs.model_dump()["steps"]) == (10, 10)


def test_tuning_takes_documents_that_no_source_has_twice(mixture, tokenizer, tmp_path):
    a, b = words("a", 40), words("b", 25)
    write_texts(tmp_path / "a.jsonl", [*a[:33], b[3], *a[34:]])
    write_texts(tmp_path / "b.jsonl", [*b[:23], a[5], b[24]], "body")
    tasks = {"own": [TaskDocument((), [a[35]])]}
    made = load_splits(mixture.model_copy(update={"held_out": 4}), tokenizer, tuning=8, tasks=tasks)
    tuning = texts_of(made.tuning, tokenizer)
    # before the three that a holds out, and the one of b; 33 and 23 are in the other, 35 is in a task
    assert tuning == [*a[29:33], a[34], a[36], *b[21:23]]
    rest = texts_of(made.train, tokenizer) + texts_of(made.held_out, tokenizer)
    assert not set(tuning) & set(rest)
    assert len(tuning) + len(rest) == 65


def test_conversations_and_texts_mix(mixture, tokenizer, tmp_path):
    rows = [{"prompt": "Where? " * (1 + n % 3), "completion": f"the mill {n}"} for n in range(12)]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(rows))
    sources = [*mixture.mixture, {"source": str(path), "format": "prompt_completion"}]
    blocks = load_splits(DataSettings(mixture=sources, block_size=40), tokenizer).train
    alone = [load_splits(part, tokenizer).train for part in DataSettings(mixture=sources, block_size=40).parts()]
    labels = [each[row]["labels"].tolist() for each in alone for row in range(len(each))]
    assert [blocks[row]["labels"].tolist() for row in range(len(blocks))] == labels
    every = range(len(blocks))
    assert blocks.count_predicted(every) == sum(token != IGNORE for row in labels for token in row)
    assert blocks.tokens == sum(each.tokens for each in alone)
    assert len({blocks.sha256, *(each.sha256 for each in alone)}) == 4


def test_what_a_task_says_is_no_conversation_of_tuning(tokenizer, tmp_path):
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(9)]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    settings = DataSettings(source=str(tmp_path / "c.json"), format="prompt_completion", block_size=40, layout="padded")
    tasks = {"own": [TaskDocument((), ["question 8", "answer  6"])]}
    made = load_splits(settings, tokenizer, tuning=2, tasks=tasks)
    assert texts_of(made.tuning, tokenizer) == ["question 5answer 5", "question 7answer 7"]


def test_token_files_mix(tokenizer, tmp_path):
    sources = []
    for name in "ab":
        settings = DataSettings(source="x", layout="stream")
        write_token_file(tmp_path / f"{name}.bin", words(name, 9), tokenizer, settings)
        sources.append({"source": str(tmp_path / f"{name}.bin")})
    made = load_splits(DataSettings(mixture=sources, layout="stream", block_size=16, held_out=2), tokenizer)
    for name, half in zip("ab", (made.train.rows.arrays, made.held_out.rows.arrays), strict=True):
        assert len(half) == 2, name
    assert "b8" in tokenizer.decode(made.held_out.rows[len(made.held_out) - 1])
    assert "b8" not in tokenizer.decode(np.concatenate(list(made.train.rows)))
