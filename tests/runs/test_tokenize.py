"""From a pretraining recipe to a token file, and from that to the same training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draws import drawn
from safetensors.torch import load_file
from tiny_runs import NEOX, has_files
from transformers import AutoTokenizer

from hfpatch.__main__ import main
from hfpatch.data.corpora import Corpus
from hfpatch.data.load import load_blocks
from hfpatch.data.rows import Document
from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import StudyRecipe, load_pretraining
from hfpatch.runs import compare, tokenize
from hfpatch.runs.corpus import recipe_tokenizer
from hfpatch.support.files import read_json
from hfpatch.surgery.bases import load_base
from hfpatch.tinyworld import documents

VALUES = {
    "name": "tiny",
    "architecture": {**NEOX, "num_hidden_layers": 1, "max_position_embeddings": 32},
    "tokenizer": {"train_vocab_size": 300},
    "data": {"source": "tinyworld/base", "block_size": 32, "max_documents": 60, "layout": "stream", "held_out": 10},
    "training": {"steps": 3, "warmup_steps": 1, "batch_size": 4},
    "baseline": "tiny",
    "variants": {"tiny": {}},
}  # fmt: skip


def recipe(tokenizer=None, architecture=None, **data):
    chosen = {**VALUES, "data": {**VALUES["data"], **data}, "tokenizer": tokenizer or VALUES["tokenizer"]}
    return StudyRecipe.model_validate({**chosen, "architecture": {**VALUES["architecture"], **(architecture or {})}})


def from_file(made, **data):
    return recipe({"path": str(made.tokenizer)}, source=str(made.file), max_documents=None, **data)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path / "cache"))


def test_a_trained_tokenizer_has_not_seen_the_held_out_documents(tmp_path):
    source = tmp_path / "text.jsonl"
    texts = [*documents("base", count=20)]
    (index,) = drawn(range(21), 1)
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts[:index], "zyxw " * 500, *texts[index:]]]
    vocabularies = []
    for held_out in (None, 1):
        source.write_text("".join(lines))
        chosen = recipe({"train_vocab_size": 400}, source=str(source), max_documents=None, held_out=held_out)
        vocabularies.append(recipe_tokenizer(chosen).get_vocab())
    source.write_text("".join(lines[:index] + lines[index + 1 :]))
    without = recipe({"train_vocab_size": 400}, source=str(source), max_documents=None, held_out=None)
    assert recipe_tokenizer(without).get_vocab() == vocabularies[1]
    assert "zyxw" in vocabularies[0]
    assert "zyxw" not in vocabularies[1]


def test_a_trained_tokenizer_is_kept_for_one_configuration_and_split_of_a_hub_commit(monkeypatch):
    texts = {(None, "train"): "abab", ("other", "train"): "cdcd", (None, "test"): "efef"}

    def open_commit(settings, data_dir):  # the digest of a hub data set is its commit
        return Corpus(
            lambda: iter([Document(texts[settings.config, settings.split] * 99)]), lambda: "0" * 40, revision="0" * 40
        )

    monkeypatch.setattr("hfpatch.runs.corpus.open_corpus", open_commit)
    for (config, split), text in texts.items():
        chosen = recipe(source="owner/name", config=config, split=split, held_out=None, max_documents=None)
        assert text in recipe_tokenizer(chosen).get_vocab()


def test_training_on_a_token_file_is_training_on_its_text(tmp_path):
    made = tokenize(recipe(), tmp_path / "tiny.bin")
    assert (made.tokenizer, made.info.documents) == (tmp_path / "tiny-tokenizer", 60)
    compare(recipe(), tmp_path / "straight")
    compare(from_file(made), tmp_path / "again")
    runs = [tmp_path / name / "runs" / "tiny" / "seed-0" for name in ("straight", "again")]
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    results = [read_json(tmp_path / name / "results.json") for name in ("straight", "again")]
    assert results[0]["data"] == results[1]["data"]
    losses = [read_json(run / "training.json")["final_eval_loss"] for run in runs]
    assert losses[0] == losses[1] > 0
    text = load_base(str(runs[1] / "model")).tokenizer.decode(np.fromfile(made.file, dtype="<u2"))
    assert text == "".join(document + "<|endoftext|>" for document in documents("base", count=60))


def test_a_recipe_whose_tokenizer_is_tinyworlds_runs_offline(tmp_path, capsys):
    small = ["architecture.n_layer=1", "architecture.n_embd=8", "architecture.n_head=1", "data.max_documents=40"]
    short = ["training.steps=1", "training.warmup_steps=0", "training.batch_size=2"]
    measured = "evaluation_data={source: tinyworld/shifted, block_size: 32, max_documents: 10}"
    assert main(["pretrain", "tinyworld-gpt2", *small, *short, measured, "--out", str(tmp_path / "out")]) == 0
    assert f"report: {tmp_path / 'out' / 'report.html'}" in capsys.readouterr().out
    results = read_json(tmp_path / "out" / "results.json")
    assert results["data"]["layout"] == "stream"
    assert results["methods"]["tinyworld-gpt2"]["runs"]["0"]["train"]["final_eval_loss"] > 0
    assert results["comparisons"] == results["verdicts"] == []
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out/runs/tinyworld-gpt2/seed-0/model")) == 512


def test_the_command_writes_a_file_and_says_how_to_use_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tokenize", "tinyworld-gpt2", "data.max_documents=9", "--out", "made/text.bin"]) == 0
    info = json.loads((tmp_path / "made" / "text.json").read_text())
    assert capsys.readouterr().out.splitlines() == [
        f"tokens: made/text.bin ({info['tokens']:,} tokens, 9 documents)",
        "to train on them: data.source=made/text.bin data.layout=stream data.max_documents=null",
    ]
    assert sorted(path.suffix for path in (tmp_path / "made").iterdir()) == [".bin", ".json", ".safetensors"]
    chosen = ["tokenizer={train_vocab_size: 300}", "data.max_documents=9"]
    assert main(["tokenize", "tinyworld-gpt2", *chosen]) == 0
    overrides = capsys.readouterr().out.splitlines()[-1].removeprefix("to train on them: ").split()
    assert overrides[-1] == "tokenizer.path=tinyworld-gpt2-tokenizer"
    assert load_pretraining("tinyworld-gpt2", [*chosen, *overrides]).data.source == "tinyworld-gpt2.bin"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tinyworld-gpt2-tokenizer")) == 300
    assert main(["tokenize", "tinyworld-gpt2", *chosen]) == 2
    assert "tinyworld-gpt2.bin: exists already; delete it" in capsys.readouterr().err


def test_a_file_of_another_tool_gets_its_sidecar(tmp_path):
    made = tokenize(recipe(), tmp_path / "tiny.bin")
    theirs = tmp_path / "train.bin"
    theirs.write_bytes(made.file.read_bytes())
    chosen = recipe({"path": str(made.tokenizer)}, source=str(theirs), max_documents=None)
    with pytest.raises(HfpatchError, match=r"description train.json is missing"):
        compare(chosen, tmp_path / "out")
    with pytest.raises(HfpatchError, match=r"gets only its sidecar; leave out --out"):
        tokenize(chosen, tmp_path / "other.bin")
    assert tokenize(chosen).info.sha256 == made.info.sha256
    tokenizer = AutoTokenizer.from_pretrained(made.tokenizer)
    blocks = [load_blocks(settings.data, tokenizer) for settings in (chosen, from_file(made))]
    assert np.array_equal(blocks[0].rows, blocks[1].rows)


def test_nothing_is_left_where_a_mistake_is_found(tmp_path, monkeypatch):
    made = tokenize(recipe(), tmp_path / "tiny.bin")
    out = tmp_path / "out"
    cases = [
        (from_file(made).model_copy(update={"tokenizer": recipe().tokenizer}), "no text to train a tokenizer on; set"),
        (recipe({"path": "tinyworld/gpt2"}, source=str(made.file), max_documents=None), "made with another tokenizer"),
        (recipe(architecture={"vocab_size": 299}), "architecture.vocab_size is 299 and the tokenizer has 300 tokens"),
        (recipe(block_size=33), "blocks of 33 tokens .* longer than the model's context of 32"),
        (recipe(block_size=99999, held_out=None), "tokens of 60 documents do not fill one block"),
        (from_file(made, held_out=60), "held_out is 60 and there are 60 documents, so none is left"),
    ]
    for wrong, message in cases:
        with pytest.raises(HfpatchError, match=message):
            compare(wrong, out)
        assert not has_files(out)
    monkeypatch.setattr("hfpatch.runs.corpus.write_token_file", lambda *_, **__: pytest.fail("written"))
    made.file.unlink()
    for ending in (".json", ".safetensors"):
        made.file.with_suffix(ending).unlink()
    with pytest.raises(HfpatchError, match=r"tiny-tokenizer: exists already; delete it or choose another --out"):
        tokenize(recipe(), tmp_path / "tiny.bin")
    for nameless in (".", "/"):
        with pytest.raises(HfpatchError, match=r"the name of a token file must end with \.bin"):
            tokenize(recipe(), Path(nameless))
