"""Tasks of one's own: files of every kind, a group and a tag, a model with a chat template, records and results."""

import json
import re

import pytest
import yaml

from hfpatch.evaluation import TaskResult
from hfpatch.results.identity import OF_TASK

CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = "{% for message in messages %}{{ message['content'] }}/{% endfor %}"
MEAN = {"aggregation": "mean", "higher_is_better": True}


def write_tasks(folder, passages):
    """Write the task files and their data; 12 documents each, and other ones for examples."""
    folder.mkdir()
    rows = [dict(zip(("text", "word"), text.rsplit(" ", 1), strict=True)) for text in passages]
    for index, row in enumerate(rows):
        row["choices"] = [rows[(index + k) % len(rows)]["word"] for k in (0, 1, 2)]
    examples = [{**row, "text": f"Then {row['text']}"} for row in rows]
    for name, part in (("rows", rows), ("examples", examples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{folder}/rows.jsonl", "train": f"{folder}/examples.jsonl"}},
        "test_split": "test",
        "fewshot_split": "train",
        "metadata": {"version": 1.0},
    }
    word = {"output_type": "loglikelihood", "doc_to_text": "text", "doc_to_target": "{{' ' + word}}"}
    first = {"function": "take_first"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    tasks = {
        "own_word": {**word, "metric_list": [{"metric": "acc", **MEAN}, {"metric": "perplexity"}]},
        "own_choice": {
            **choice,
            "doc_to_text": "{{text}}",
            "tag": "own_tag",
            "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
        },
        "own_other": {**choice, "doc_to_text": "So {{text}}", "tag": ["own_tag"], "metric_list": [{"metric": "acc"}]},
        "own_page": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "own_speech": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "word",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match", **MEAN}],
            "filter_list": [
                {"name": "whole", "filter": [first]},
                {"name": "first", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}, first]},
            ],
        },
    }  # fmt: skip
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}), encoding="utf-8")
    group = {
        "group": "own_group",
        "task": [{"task": "own_choice", "doc_to_text": "Now {{text}}"}, "own_other"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 2.0},
    }
    (folder / "_group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")


def write_model(folder, model, tokenizer, template=None):
    """Save a model and its tokenizer with a chat template."""
    model.save_pretrained(folder)
    tokenizer.chat_template, before = template, tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = before


def write_task(folder, name, **config):
    """Write a task whose documents are the rows of ``rows.jsonl`` in its folder."""
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": f"{folder}/rows.jsonl"}, "test_split": "train"}
    text = yaml.safe_dump({"task": name, **data, **config}, width=1000)
    text = re.sub(r"'(!function [\w.]+)'", r"\1", text)  # a tag, not a text
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def task_result(task, primary="acc", higher=True, **fields):
    """Return the result of a task without scores but for what is given."""
    given = {"n": 0, "metrics": {}, "stderr": {}, "num_fewshot": 0, **dict.fromkeys(OF_TASK, ""), "version": "1"}
    return TaskResult(task=task, primary=primary, higher_is_better=higher, **given | fields)


def write_record(folder, task, metric, values, **columns):
    """Write the values of a metric, and other columns, as the record of a task; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"doc_id": i, "doc_hash": f"h{i}", "target": "é", metric: value} for i, value in enumerate(values)]
    for name, column in columns.items():
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def read_record(folder, task):
    """Return the rows of a record, which has no NaN and no infinity."""
    lines = (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]
