"""Whole models compared pairwise: one in memory at a time, each with its own tokenizer, on the same documents."""

import json
import math
import weakref

import numpy as np
import pytest
import torch
from own_tasks import CHAT, SHORT, write_model, write_task
from transformers import AutoTokenizer

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import known_scores
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results import load_results
from hfpatch.runs import evaluate, evaluation, variants
from hfpatch.support.files import read_json
from hfpatch.surgery.bases import load_base
from hfpatch.tinyworld import documents
from hfpatch.tinyworld.tasks import items
from hfpatch.training.architecture import build_model

TASKS = ("tinyworld_endings", "tinyworld_text", "paper_wikitext")
LIMIT = 24
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three random models: two of one architecture with different tokenizers, and one with a shorter context."""
    folder = tmp_path_factory.mktemp("models")
    for index, (name, vocabulary, positions) in enumerate((("a", 300, 1024), ("b", 400, 1024), ("c", 300, 640))):
        tokenizer = train_tokenizer(documents("base", count=50), vocabulary)
        torch.manual_seed(index)
        shape = {"model_type": "gpt_neox", **SIZES, "max_position_embeddings": positions, "initializer_range": 0.3}
        build_model(shape, tokenizer=tokenizer).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = "".join(json.dumps({"text": f"{item['text']} {item['text']}"}) + "\n" for item in items("text")[:40])
    (folder / "data" / "wikitext" / "wikitext-2-raw-v1").mkdir(parents=True)
    (folder / "data" / "wikitext" / "wikitext-2-raw-v1" / "validation.jsonl").write_text(lines, encoding="utf-8")
    return folder


def settings_of(folder, names="abc"):
    return [ModelSettings(name=str(folder / name)) for name in names]


def evaluation_of(*tasks, **options):
    return EvaluationSettings(tasks=tasks or TASKS, limit=LIMIT, **options)


@pytest.fixture(scope="module")
def outcome(folder):
    """The results, where they are, and for each load how many models of earlier loads were still in memory."""
    alive, loaded = [], []

    def load(*arguments, **options):
        alive.append(sum(model() is not None for model in loaded))
        base = load_base(*arguments, **options)
        loaded.append(weakref.ref(base.model))
        return base

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(variants, "load_base", load)
        results = evaluate(
            *settings_of(folder), settings=evaluation_of(), data_dir=folder / "data", output=folder / "out"
        )
    return results, folder / "out", alive


def test_one_model_is_in_memory_at_a_time_with_the_scores_that_it_has_alone(outcome, folder):
    assert outcome[2] == [0] * 5  # three to see that they can be loaded, the first of which stays to be scored
    variant = outcome[0].variants["b"]
    model = ModelSettings(name=str(folder / "b"))
    alone = evaluate(model, settings=evaluation_of(), data_dir=folder / "data").variants["base"]
    for task in TASKS:
        assert variant.scores[task].metrics == pytest.approx(alone.scores[task].metrics, rel=1e-5)
    assert variant.model["name"] == str(folder / "b")
    assert variant.model["parameters"] == load_base(str(folder / "b")).model.num_parameters()


@torch.no_grad()
def test_bits_per_byte_are_those_of_the_text_whatever_the_tokenizer(outcome, folder):
    for label, variant in outcome[0].variants.items():
        base = load_base(str(folder / label))
        total = size = 0
        for item in items("text")[:LIMIT]:
            ids = [base.tokenizer.eos_token_id, *base.tokenizer(item["text"])["input_ids"]]
            table = base.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
            total += float(table.gather(1, torch.tensor(ids[1:])[:, None]).sum())
            size += len(item["text"].encode())
        expected = -total / size / math.log(2)
        assert variant.scores["tinyworld_text"].metrics["bits_per_byte"] == pytest.approx(expected, rel=1e-5)


def test_every_pair_is_compared_with_one_correction(outcome):
    results, out, _ = outcome
    pairs = [(one.method, one.other, one.task) for one in results.verdicts]
    assert pairs == [(*pair, task) for pair in (("b", "a"), ("c", "a"), ("c", "b")) for task in TASKS]
    largest = 0.0
    tested = sorted((one for one in results.verdicts if one.p is not None), key=lambda one: one.p)
    for index, one in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - index) * one.p))
        assert one.p_corrected == pytest.approx(largest)
        assert one.family == len(tested)
    (one,) = (
        one
        for one in results.comparisons
        if (one.method, one.reference, one.task, one.metric) == ("c", "b", TASKS[0], "acc")
    )
    right = [
        np.mean([json.loads(line)["acc"] for line in (out / label / f"{TASKS[0]}.jsonl").read_text().splitlines()])
        for label in "cb"
    ]
    assert one.difference == pytest.approx(right[0] - right[1])


def test_what_does_not_compare_across_models_is_said(outcome, folder):
    results, _, _ = outcome
    tokens, windows = results.warnings[:2]
    assert tokens.startswith("paper_wikitext: scored per token, and the models have different tokenizers")
    assert windows.startswith("tinyworld_text, paper_wikitext: the models have context windows of different lengths")
    assert "c 640" in windows
    assert "--max-length 640" in windows
    chosen = evaluation_of("paper_wikitext", "tinyworld_text", max_length=600)
    same = evaluate(*settings_of(folder, "ac"), settings=chosen, data_dir=folder / "data")
    assert not any("windows" in warning or "per token" in warning for warning in same.warnings)


def test_the_same_call_continues_and_another_is_refused(outcome, folder, monkeypatch):
    results, out, _ = outcome
    assert load_results(out, "evaluation") == results
    assert set(read_json(out / "evaluation.json")["models"]) == {"a", "b", "c"}
    again = evaluate(*settings_of(folder), settings=evaluation_of(), data_dir=folder / "data", output=out)
    assert again.comparisons == results.comparisons
    assert all(score.reused for variant in again.variants.values() for score in variant.scores.values())
    monkeypatch.setattr(variants, "load_base", lambda *_, **__: pytest.fail("loaded"))
    for names, key in (("ab", "models.c.name"), ("abc", "settings.num_fewshot")):
        chosen = evaluation_of(**({} if names == "ab" else {"num_fewshot": 1}))
        with pytest.raises(HfpatchError, match=rf"holds another evaluation \({key}"):
            evaluate(*settings_of(folder, names), settings=chosen, data_dir=folder / "data", output=out)


def test_models_that_leave_out_other_documents_are_scored_and_not_compared_there(folder, tmp_path):
    """Tokenizers differ in the contexts and answers that share a token."""
    tokenizers = {name: AutoTokenizer.from_pretrained(folder / name) for name in "ab"}
    words = sorted({word for text in documents("base", count=50) for word in text.split()})

    def shares(name, word):  # its last letter is no token after the others
        start, whole = (tokenizers[name](f"so {text}")["input_ids"] for text in (word[:-1], word))
        return len(start) == len(whole)

    word = next(word for word in words if shares("b", word) and not shares("a", word))
    rows = [{"text": "so", "word": " it"}] * 24 + [{"text": f"so {word[:-1]}", "word": word[-1]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    ending = {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{word}}"}
    write_task(tmp_path, "words", **ending, target_delimiter="", metric_list=[{"metric": "acc"}])
    chosen = EvaluationSettings(tasks=("words", "tinyworld_endings"), limit=25, include_path=str(tmp_path))
    results = evaluate(*settings_of(folder, "ab"), settings=chosen)
    assert [variant.scores["words"].n for variant in results.variants.values()] == [25, 24]
    assert {comparison.task for comparison in results.comparisons} == {"tinyworld_endings"}
    assert any(text.startswith("words: not compared") and "(a 25, b 24)" in text for text in results.warnings)
    assert any(text.startswith("words: 1 of 25 documents cannot be scored") for text in results.warnings)


def test_a_larger_limit_scores_only_new_documents(folder, tmp_path):
    """A task of its own at a time; a smaller limit, which would leave out what is there, is refused."""
    rows = [{"text": f"so it is {n}", "choices": ["it is", "was"]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    }
    write_task(tmp_path, "choice", **choice, metric_list=[{"metric": "acc"}])
    page = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    write_task(tmp_path, "page", **page, metric_list=[{"metric": "word_perplexity"}])

    def results_with(tasks, **options):
        settings = EvaluationSettings(tasks=tasks, include_path=str(tmp_path), **options)
        return evaluate(settings_of(folder, "a")[0], settings=settings, output=tmp_path / "out")

    def scored(**limits):
        scores = results_with({name: {"limit": limit} for name, limit in limits.items()}).variants["base"].scores
        return {name: (score.n, score.reused) for name, score in scores.items()}

    assert scored(choice=4, page=2) == {"choice": (4, 0), "page": (2, 0)}
    assert scored(choice=6, page=2) == {"choice": (6, 4 * 2), "page": (2, 2)}
    written = read_json(tmp_path / "out" / "results.json")["variants"]["base"]["scores"]["choice"]
    assert written["n"] == 6
    six = EvaluationSettings(tasks=("choice", "page"), limit=6, include_path=str(tmp_path))
    fresh = evaluate(settings_of(folder, "a")[0], settings=six).variants["base"].scores["choice"]
    assert fresh.data_sha256 == written["data_sha256"]
    with pytest.raises(HfpatchError, match="holds 6 documents of choice, and --limit asks for the first 5"):
        scored(choice=5, page=2)
    assert results_with(("choice", "page")).variants["base"].scores["page"].n == len(rows)
    with pytest.raises(HfpatchError, match="holds all documents of choice"):
        scored(choice=6, page=2)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("a", "named twice"),
        ("copy", "copy is the same model as a"),
        ("broken", "broken' cannot be loaded"),
        ("missing", "missing' does not exist"),
        ("mute", "mute: the tokenizer has ids up to 399 and the model 300 embeddings"),
    ],
)
def test_models_that_cannot_be_compared_are_refused_before_any_is_scored(
    folder, tmp_path, monkeypatch, second, message
):
    def copied(name, tokenizer="a"):
        if second == name and not (folder / name).exists():
            load_base(str(folder / "a")).model.save_pretrained(folder / name)
            load_base(str(folder / tokenizer)).tokenizer.save_pretrained(folder / name)
        return folder / name

    copied("copy")
    copied("mute", "b")
    if second == "broken":
        (copied("broken") / "model.safetensors").write_bytes(b"no tensors")
    monkeypatch.setattr(evaluation, "run_tasks", lambda *_, **__: pytest.fail("scored"))
    named = [ModelSettings(name=str(folder / name)) for name in ("a", second)]
    with pytest.raises(HfpatchError, match=message):
        evaluate(*named, settings=evaluation_of("tinyworld_endings"), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_outside_its_known_score_stops_the_comparison(folder, monkeypatch):
    known_score = known_scores.KnownScore(str(folder / "b"), ("main",), "tinyworld_endings", "acc", 24, 0.99, "x")
    monkeypatch.setattr(known_scores, "KNOWN_SCORES", (known_score,))
    with pytest.raises(HfpatchError, match=r"0\.990 .*--allow-unknown-base evaluates the other models anyway"):
        evaluate(*settings_of(folder, "ab"), settings=evaluation_of("tinyworld_endings"))
    chosen = evaluation_of("tinyworld_endings", allow_unknown_base=True)
    assert any("0.990" in text for text in evaluate(*settings_of(folder, "ab"), settings=chosen).warnings)


def test_models_that_differ_in_their_template_alone_differ_where_it_is_used(folder, tmp_path):
    for name, template in (("one", CHAT), ("two", SHORT)):
        base = load_base(str(folder / "a"))
        write_model(tmp_path / name, base.model, base.tokenizer, template)
    given = [ModelSettings(name=str(tmp_path / name)) for name in ("one", "two")]
    with pytest.raises(HfpatchError, match="two is the same model as one"):
        evaluate(*given, settings=evaluation_of("tinyworld_endings"))
    results = evaluate(*given, settings=evaluation_of("tinyworld_endings", apply_chat_template=True))
    one, two = (results.variants[name] for name in ("one", "two"))
    assert one.model["identity"]["tokenizer"] != two.model["identity"]["tokenizer"]
    assert one.scores["tinyworld_endings"].prompts_sha256 != two.scores["tinyworld_endings"].prompts_sha256
    assert one.model["sha256"] == two.model["sha256"]
