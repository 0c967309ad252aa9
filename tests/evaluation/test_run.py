import json
import math
import re

import pytest
import torch
from lm_eval.utils import env
from own_tasks import read_record, write_task
from own_tasks import read_record as rows
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import TaskResult, evaluate, load_tasks
from hfpatch.evaluation.metrics import metric_named
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.scorer import Scorer
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.cautions import document_cautions, tie_cautions
from hfpatch.results.low_noise import LOW_NOISE
from hfpatch.results.parts import LeftOut

TASKS = ("lambada_openai", "hellaswag", "arc_easy", "wikitext")


def settings(*tasks, **options):
    return EvaluationSettings(tasks=tasks or TASKS, batch_size=4, **options)


@pytest.fixture(scope="module")
def outcome(taught, tokenizer, data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    return evaluate(taught, tokenizer, select(settings(), data_dir), storage=Storage(records=folder)), folder


def test_lambada_is_the_greedy_share_and_the_perplexity(outcome, taught, tokenizer, support):
    results, folder = outcome
    scored = [text.rpartition(" ") for text in support.passages(24)]
    expected = [support.continuation(taught, tokenizer, context, f" {word}") for context, _, word in scored]
    right, values = [bool(greedy.all()) for _, greedy in expected], [float(log.sum()) for log, _ in expected]
    result = results["lambada_openai"]
    assert 0 < sum(right) < 24
    assert result.metrics["acc"] == sum(right) / 24
    assert result.metrics["perplexity"] == pytest.approx(math.exp(-sum(values) / 24), rel=1e-4)
    table = rows(folder, "lambada_openai")
    assert [row["acc"] for row in table] == right
    assert [row["perplexity"] for row in table] == pytest.approx(values, rel=1e-5, abs=1e-4)
    assert (result.n, result.primary, result.higher_is_better) == (24, "acc", True)


def test_arc_is_the_likeliest_choice(outcome, taught, tokenizer, support):
    results, folder = outcome
    right, right_by_length = [], []
    for row in support.arc(20, 0):
        gold = row["choices"]["label"].index(row["answerKey"])
        prompt, choices = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
        sums = [float(support.continuation(taught, tokenizer, prompt, f" {choice}")[0].sum()) for choice in choices]
        scaled = [value / len(choice) for value, choice in zip(sums, choices, strict=True)]
        right.append(sums.index(max(sums)) == gold)
        right_by_length.append(scaled.index(max(scaled)) == gold)
    for metric, expected in {"acc": right, "acc_norm": right_by_length}.items():
        assert [row[metric] for row in rows(folder, "arc_easy")] == expected
        assert results["arc_easy"].metrics[metric] == sum(expected) / 20
    assert results["arc_easy"].primary == "acc"


@torch.no_grad()
def test_wikitext_perplexity_is_per_word_of_the_original(outcome, taught, tokenizer, support):
    results, folder = outcome
    total, words, size = 0.0, 0, 0
    detokenised = {" = \n\n ": " =\n\n", " . ": ". ", " \n": "\n"}
    for row in support.articles(4):
        text = row["page"]
        for old, new in detokenised.items():
            text = text.replace(old, new)
        ids = [0, *tokenizer(text)["input_ids"]]
        for start in range(0, len(ids) - 1, 128):
            block = ids[max(0, min(start + 129, len(ids)) - 129) : start + 129]
            new = min(128, len(ids) - 1 - start)
            table = taught(torch.tensor([block[:-1]])).logits[0].log_softmax(-1)
            total += float(table.gather(1, torch.tensor(block[1:])[:, None])[-new:].sum())
        words += len(re.split(r"\s+", row["page"]))
        size += len(row["page"].encode())
    metrics = results["wikitext"].metrics
    assert metrics["word_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert sum(row["word_perplexity"][1] for row in rows(folder, "wikitext")) == words
    assert not results["wikitext"].higher_is_better


def test_records_give_the_scores_again_and_results_survive_json(outcome):
    results, folder = outcome
    p = results["lambada_openai"].metrics["acc"]
    assert results["lambada_openai"].stderr["acc"] == pytest.approx(math.sqrt(p * (1 - p) / 23))
    for task, result in results.items():
        assert TaskResult.model_validate_json(json.dumps(result.to_json())) == result
        table = rows(folder, task)
        assert [row["doc_id"] for row in table] == list(range(result.n))
        assert len({row["doc_hash"] for row in table}) > 1
        for name, value in result.metrics.items():
            assert metric_named(name).overall([row[name] for row in table]) == pytest.approx(value, rel=1e-9)
            assert result.stderr[name] >= 0


def test_limit_takes_the_first_documents(outcome, taught, tokenizer, data_dir, tmp_path):
    _, folder = outcome
    called = []
    chosen = select(settings("arc_easy", "lambada_openai", limit=5), data_dir)

    def note(task):
        called.append((task, sorted(path.name for path in tmp_path.iterdir())))

    results = evaluate(taught, tokenizer, chosen, storage=Storage(tmp_path), on_task=note)
    assert called == [("arc_easy", []), ("lambada_openai", ["arc_easy.jsonl"])]
    for row, whole in zip(rows(tmp_path, "arc_easy"), rows(folder, "arc_easy")[:5], strict=True):
        for metric in LOW_NOISE:  # no decisions: equal to rounding
            assert row.pop(metric) == pytest.approx(whole.pop(metric), abs=1e-4)
        assert row == whole
    assert [result.n for result in results.values()] == [5, 5]


def test_the_data_hash_follows_the_documents(outcome, taught, tokenizer, own_data_dir):
    results, _ = outcome
    again = evaluate(taught, tokenizer, select(settings("lambada_openai"), own_data_dir))
    assert again["lambada_openai"] == results["lambada_openai"]
    path = own_data_dir / "lambada_openai" / "test.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("Anna", "Ada"), encoding="utf-8")
    other = evaluate(taught, tokenizer, select(settings("lambada_openai"), own_data_dir))
    assert other["lambada_openai"].data_sha256 != results["lambada_openai"].data_sha256


def test_a_task_of_the_name_of_other_results_is_refused(outcome, taught, tokenizer, data_dir):
    chosen = select(settings("lambada_openai", limit=2), data_dir)
    with pytest.raises(HfpatchError, match=r"task lambada_openai: .* data.held_out"):
        evaluate(taught, tokenizer, chosen, scored={"lambada_openai": None})


def test_nothing_is_printed_and_the_mode_is_kept(model, tokenizer, data_dir, capfd):
    model.train()
    evaluate(model, tokenizer, select(settings("lambada_openai", "wikitext", limit=2), data_dir))
    assert model.training
    assert capfd.readouterr() == ("", "")


def test_nan_stops_with_the_document_and_keeps_what_was_scored(support, tokenizer, own_data_dir, tmp_path):
    model, folder = support.gpt_neox().train(), tmp_path / "records"
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("%")["input_ids"][0]] = float("nan")
    path = own_data_dir / "ai2_arc" / "ARC-Easy" / "test.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("does Cleo", "% Cleo", 1), encoding="utf-8")
    chosen = settings("lambada_openai", "arc_easy", limit=4)
    with pytest.raises(HfpatchError, match="task arc_easy, document 2: the log-likelihood is NaN"):
        evaluate(model, tokenizer, select(chosen, own_data_dir), storage=Storage(records=folder))
    assert [path.name for path in folder.iterdir()] == ["lambada_openai.jsonl"]
    assert model.training


ACC = [{"metric": "acc"}]
SHARED = {"text": "Anna left the lamp in t", "word": "he", "wrong": "is", "gold": 0}  # " the" is one token
KINDS = {
    "word": {"output_type": "loglikelihood", "doc_to_target": "{{word}}"},
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{[word, wrong]}}", "doc_to_target": "gold"},
}


def write_words(folder, support, rows, kind):
    """Write a task whose targets follow the context without a space."""
    support.write_rows(folder / "rows.jsonl", rows)
    write_task(folder, "words", **KINDS[kind], doc_to_text="{{text}}", target_delimiter="", metric_list=ACC)
    return EvaluationSettings(tasks=("words",), include_path=str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_whose_context_and_answer_share_a_token_is_left_out(taught, tokenizer, support, tmp_path, kind):
    assert tokenizer(SHARED["text"])["input_ids"][:-1] == tokenizer(SHARED["text"] + "he")["input_ids"][:-1]
    rows = [{"text": f"{name} left the", "word": " lamp", "wrong": " coin", "gold": 0} for name in support.NAMES]
    scores, records = [], []
    for name, documents in (("with", [*rows[:2], SHARED, *rows[2:]]), ("without", rows)):
        chosen = write_words(tmp_path, support, documents, kind)
        storage = Storage(tmp_path / name, answers=tmp_path / "answers")
        scores.append(evaluate(taught, tokenizer, select(chosen), storage=storage)["words"])
        records.append(read_record(tmp_path / name, "words"))
    why = "its context or its continuation has no token of its own"
    assert scores[0].left_out == LeftOut(documents=1, first=2, why=why)
    assert [row["doc_id"] for row in records[0]] == [0, 1, 3, 4, 5, 6]
    assert [{**row, "doc_id": 0} for row in records[0]] == [{**row, "doc_id": 0} for row in records[1]]
    same = {"n", "metrics", "stderr", "data_sha256", "chance"}
    assert scores[0].model_dump(include=same) == scores[1].model_dump(include=same)
    assert scores[1].left_out is None
    (caution,) = document_cautions({"words": scores[0]})
    assert caution == f"words: 1 of 7 documents cannot be scored and are left out (document 2: {why})."
    chosen = write_words(tmp_path, support, [SHARED], kind)
    with pytest.raises(HfpatchError, match="task words: none of its documents can be scored; document 0: its context"):
        evaluate(taught, tokenizer, select(chosen))


def test_decisions_between_equal_scores_are_counted(support, tokenizer, tmp_path):
    """Those of a collapsed model, whose accuracy is how often the first choice is right."""
    model = support.gpt2()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    ends = [(" lamp", " lamp"), (" the the", " the"), (" the", " the the")]
    rows = [{"text": "Anna left", "word": one, "wrong": other, "gold": 0} for one, other in ends]
    result = evaluate(model, tokenizer, select(write_words(tmp_path, support, rows, "choice")))["words"]
    assert (result.metrics["acc"], result.ties) == (pytest.approx(2 / 3), 1)
    assert [caution.partition(" have")[0] for caution in tie_cautions({"words": result}, "it")] == [
        "it: 1 of 3 documents of words"
    ]
    assert not list(tie_cautions({"words": result.model_copy(update={"n": 100})}, "it"))
    rows = [{**row, "wrong": " coin"} for row in rows[:1]]
    other = evaluate(support.gpt2(), tokenizer, select(write_words(tmp_path, support, rows, "choice")))
    assert other["words"].ties is None


def test_a_tokenizer_of_another_model_or_without_tokens_is_refused(support, tokenizer, data_dir):
    model = support.gpt_neox()
    model.resize_token_embeddings(200)
    with pytest.raises(HfpatchError, match="the tokenizer has ids up to 319 and the model 200 embeddings"):
        evaluate(model, tokenizer, select(settings("lambada_openai"), data_dir))
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|endoftext|>")
    with pytest.raises(HfpatchError, match="only special tokens"):
        evaluate(support.gpt_neox(), bare, select(settings("lambada_openai"), data_dir))


def test_a_task_a_template_or_a_document_that_does_not_fit_is_named(
    taught, tokenizer, own_data_dir, support, monkeypatch
):
    def scored(*tasks, **options):
        return evaluate(taught, tokenizer, select(settings(*tasks, **options), own_data_dir))

    support.write_rows(own_data_dir / "wikitext/wikitext-2-raw-v1/validation.jsonl", [{"text": "short"}])
    with pytest.raises(HfpatchError, match=r"task paper_wikitext .* cannot be built"):
        scored("paper_wikitext")
    (task,) = load_tasks(("lambada_openai",), data_dir=own_data_dir).values()
    monkeypatch.setattr(task.config, "doc_to_text", "{{wrong.name}}")
    with pytest.raises(HfpatchError, match=r"lambada_openai, document 0: .* template.*'wrong' is undefined"):
        scored("lambada_openai")
    rows = support.arc(20, 0)
    rows[3]["answerKey"] = "Z"
    support.write_rows(own_data_dir / "ai2_arc" / "ARC-Easy" / "test.jsonl", rows)
    with pytest.raises(HfpatchError, match=r"task arc_easy, document 3: .* templates \(ValueError: 'Z' is not in list"):
        scored("arc_easy", limit=8)
    scored("arc_easy", limit=3)


def test_what_no_document_shows_is_said_in_one_line(taught, tokenizer, support, tmp_path):
    """A measure that no answer has, examples without a text, wrong arguments, no room or no token for a prompt."""
    kinds = {
        "choice": {"doc_to_choice": "{{words}}", "doc_to_target": "gold", "metric_list": [{"metric": "f1"}]},
        "several": {"doc_to_choice": "{{words}}", "doc_to_target": "{{[gold]}}", "num_fewshot": 1},
        "long": {"doc_to_target": "text", "generation_kwargs": {"until": ["."]}},
        "unmeasured": {"output_type": "loglikelihood_rolling", "doc_to_target": "text", "metric_list": ACC},
        "speech": {"doc_to_target": "text", "generation_kwargs": {"max_gen_toks": 4, "until": ["."]}},
        "newer": {"doc_to_target": "text", "generation_kwargs": {"max_new_tokens": 4, "until": ["."]}},
    }
    wrong = [{"temprature": 0.8}, {"do_sample": True}, {"until": None}, {"max_gen_toks": "four"}, {"num_beams": 0}]
    rows = [{"text": text, "words": ["one", "two", "three"], "gold": i} for i, text in enumerate(["Anna", "", "In"])]
    support.write_rows(tmp_path / "rows.jsonl", rows)
    for name, kind in kinds.items():
        given = {"output_type": "multiple_choice" if "doc_to_choice" in kind else "generate_until", **kind}
        write_task(tmp_path, name, doc_to_text="{{text}}", **given)
    for name, message in [
        ("choice", r"its prompts, filters or metrics fail \(ValueError: Target is multiclass.*, line \d+\); correct"),
        ("several", r"its prompts, filters or metrics fail \(AssertionError: Answer is not a string!.*; correct"),
        ("unmeasured", r"lm-eval gives it no score; set a metric of its output_type, loglikelihood_r"),
        ("long", r"document 0: max_gen_toks is 256, and the longest row 128 tokens, prompt included; set a smaller"),
    ]:
        with pytest.raises(HfpatchError, match=f"^task {name}[:,] {message}"):
            evaluate(taught, tokenizer, select(EvaluationSettings(tasks=(name,), include_path=str(tmp_path))))
    for given in wrong:
        chosen = EvaluationSettings(tasks=("speech",), include_path=str(tmp_path), gen_kwargs=given)
        with pytest.raises(HfpatchError, match=r"^task speech: no text can be generated with .* \(\w+Error: .*; cor"):
            evaluate(taught, tokenizer, select(chosen))
    with pytest.raises(HfpatchError, match=r"^task speech: .* max_gen_toks and max_new_tokens, .* write max_gen_toks"):
        select(EvaluationSettings(tasks=("speech",), include_path=str(tmp_path), gen_kwargs={"max_new_tokens": 2}))
    options = {"tasks": ("newer",), "include_path": str(tmp_path)}
    select(EvaluationSettings(**options, gen_kwargs={"max_gen_toks": 2}))  # which wins
    with pytest.raises(HfpatchError, match=r"^task newer: .* write max_gen_toks alone"):
        select(EvaluationSettings(**options, gen_kwargs={"max_gen_toks": 2, "max_new_tokens": 3}))
    for size in (1, 2):  # with which lm-eval stops, or generates after padding
        chosen = EvaluationSettings(tasks=("speech",), include_path=str(tmp_path), batch_size=size)
        result = evaluate(taught, tokenizer, select(chosen))["speech"]
        assert (result.n, result.left_out) == (2, LeftOut(documents=1, first=1, why="its prompt has no token"))


def test_what_is_no_mistake_in_a_document_is_not_hidden(taught, tokenizer, data_dir, monkeypatch):
    def fail(*_arguments, **_options):
        raise ZeroDivisionError("a mistake in the code")

    monkeypatch.setattr(Scorer, "score", fail)
    with pytest.raises(ZeroDivisionError):
        evaluate(taught, tokenizer, select(settings("lambada_openai", limit=2), data_dir))


def test_each_template_is_compiled_once_and_only_while_an_evaluation_runs(taught, tokenizer, data_dir, monkeypatch):
    compiled, real = [], type(env).compile
    selection = select(settings("arc_easy"), data_dir)  # which compiles them, too, if it loads the task

    def noted(self, source, *rest):
        compiled.append(source)
        return real(self, source, *rest)

    monkeypatch.setattr(type(env), "compile", noted)
    evaluate(taught, tokenizer, selection)
    assert 0 < len(compiled) == len(set(compiled))
    assert "from_string" not in vars(env)
