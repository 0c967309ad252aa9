"""Base, adapter, data sets and pushes go through the real clients to a local stand-in of the hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

PROGRAM = Path(__file__).parent / "through_the_hub.py"
WORDS = ["Anna", "Bert", "lamp", "coin", "garden", "mill", "took", "left", "found", "the", "to", "in"]


def write_base(folder):
    """Write a tiny GPT-2 over whole words."""
    words = {word: index for index, word in enumerate(["<end>", "<unknown>", *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    end = {"bos_token": "<end>", "eos_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **end).save_pretrained(folder)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "initializer_range": 0.2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)


def write_texts(folder):
    """Write a data set of sentences; the last word of each is a column of its own."""
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", 60), ("test", 6)):
        rows = []
        for i in range(count):
            text = f"{WORDS[i % 2]} took the {WORDS[2 + i % 2]} to the {WORDS[4 + i // 2 % 2]} in the"
            whole = f"{text} {WORDS[5 - i % 2]}"  # twice in a document to train on, which is then not one of the task
            rows.append(
                {"text": f"{whole} {whole}" if split == "train" else whole, "context": text, "word": WORDS[5 - i % 2]}
            )
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(folder):
    folder.mkdir()
    task = {
        "task": "last_word", "dataset_path": "me/texts", "test_split": "test", "output_type": "loglikelihood",
        "doc_to_text": "context", "doc_to_target": "{{' ' + word}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / "last_word.yaml").write_text(yaml.safe_dump(task))


@pytest.mark.slow
def test_base_data_patch_and_export_go_through_the_hub(hub, tmp_path):
    write_base(tmp_path / "base")
    write_texts(tmp_path / "texts")
    write_task(tmp_path / "tasks")
    hub.add("models", "me/base", tmp_path / "base")
    hub.add("datasets", "me/texts", tmp_path / "texts")
    environment = {**hub.environment, "HF_HOME": f"{tmp_path}/home", "HFPATCH_CACHE": f"{tmp_path}/cache"}
    environment.pop("HF_MODULES_CACHE", None)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout.endswith("through the hub\n"), done.stderr[-3000:]

    patch, export = (hub.repositories["models", name] for name in ("me/patch", "me/export"))
    got = {path for method, path, _ in hub.requests if method == "GET"}
    for name in ("me/base", "datasets/me/texts", "me/patch", "me/export"):
        assert any(path.startswith(f"/{name}/resolve/") for path in got), name
    assert json.loads(patch["patch.json"])["base"]["name"] == "me/base"
    data = ModelCard(patch["README.md"].decode()).data
    assert (data.base_model, data.library_name, data.tags) == ("me/base", "peft", ["hfpatch"])
    assert b"modeling_hfpatch.Hfpatch" in export["config.json"]
    files = [patch["patch.json"], patch["README.md"], patch["pre_projection/adapter_config.json"], *export.values()]
    assert str(tmp_path).encode() not in b"".join(files)

    results = json.loads(patch["results.json"])
    scores = results["methods"]["pre_projection"]["runs"]["0"]["evaluation"]["last_word"]
    (entry,) = yaml.safe_load(patch[".eval_results/last_word.yaml"])
    assert entry["dataset"] == {"id": "me/texts", "task_id": "last_word"}
    assert entry["value"] == scores["metrics"][results["tasks"]["last_word"]["primary"]]
    assert entry["source"]["url"] == f"{hub.address}/me/patch/blob/main/report.md"
    assert "0-shot, 6 documents, seed 0" in entry["notes"]
    hub_module = pytest.importorskip("huggingface_hub")
    if hasattr(hub_module, "parse_eval_result_entries"):  # the hub's own reader
        (read,) = hub_module.parse_eval_result_entries([entry])
        assert (read.dataset_id, read.value) == ("me/texts", entry["value"])
