"""`inspect`: everything that the analyses find, as JSON, tables and a page."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from families import make_config
from reporting.inspection.test_document import OUTCOME, tables_of

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, patch, save_patch
from hfpatch.__main__ import main
from hfpatch.analysis.inspection import Inspection
from hfpatch.analysis.norms import skip_norms
from hfpatch.recipes.base import ModelSettings
from hfpatch.reporting.inspection.document import inspection_document
from hfpatch.reporting.inspection.figures import figures
from hfpatch.runs import inspect, inspection
from hfpatch.sites.family import DECLARED
from hfpatch.surgery.bases import load_base
from hfpatch.tinyworld import checkpoint
from hfpatch.training.architecture import build_model
from hfpatch.twins import random_model

MODEL = ModelSettings(name="tinyworld/gpt-neox")
RELATION = ["Q-K relation", "Q-K relation by relative offset"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run: a patch that moved, what the training recorded, and a name that is no name."""
    folder = tmp_path_factory.mktemp("run") / "<script>alert(1)" / "seed-0"
    base = load_base(MODEL.name)
    patch(base.model, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()], seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in base.model.named_parameters():
        if parameter.requires_grad and "up" not in name.split(".")[-3]:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    save_patch(base.model, folder / "patch")
    survival = {"update_survival": {"preproj_down": 0.5, "all": 0.75}}
    (folder / "training.json").write_text(json.dumps({**OUTCOME, **survival, "identity": {}}))
    return folder


@pytest.fixture(scope="module")
def results(run):
    return inspect(MODEL, run / "patch")


def test_every_analysis_is_made(results):
    raw = results.to_json()
    layers = [0, 1, 2, 3]
    for name in ("skip_norms", "skip_sizes", "pre_projection_sizes", "query_sizes", "linearised"):
        assert [row["layer"] for row in raw[name]] == layers, name
    assert [row["layer"] for row in raw["sites"]] == layers
    assert len(raw["relations"]) == len(raw["relations_patched"]) == 16
    assert len(raw["attention"]) == len(raw["attention_patched"]) == 16
    assert raw["attention"] != raw["attention_patched"]
    assert [row["layer"] for row in raw["ablations"]["without"]] == [*layers, None]
    assert raw["parameters"]["added"] == results.summary.added > 0
    assert raw["text"]["tokens"] >= 2048
    assert raw["run"]["steps"] == 5
    assert raw["notes"] == []
    kinds = {row["tensor"] for row in raw["movement"]}
    assert len(raw["movement"]) == 4 * len(kinds)
    unmoved = {row["tensor"].split(".")[-3]: row["unmoved"] == row["weights"] for row in raw["movement"]}
    assert unmoved["preproj_up"]
    assert not unmoved["preproj_down"]
    assert json.loads(json.dumps(raw, allow_nan=False)) == raw


@pytest.mark.parametrize("content", ["{", '{"steps": "of another program"}'])
def test_an_outcome_that_cannot_be_read_is_a_note(run, tmp_path, content):
    shutil.copytree(run / "patch", tmp_path / "patch")
    (tmp_path / "training.json").write_text(content)
    made = Inspection(load_base(MODEL.name), tmp_path / "patch", [], None)
    inspection._inspect_training(made, tmp_path / "patch", allow_other_base=False)
    assert made.run is None
    assert any(note.startswith("Training: not shown; ") for note in made.notes)


def figures_of(results):
    return [*inspection_document(results, figures(results)).parts[0].figures]


def test_the_numbers_are_those_of_the_analyses(results, run):
    from hfpatch.surgery.folder import load_patch

    model = load_patch(load_base(MODEL.name).model, run / "patch")
    assert results.skip_norms == skip_norms(model)
    cells = tables_of(results)
    assert cells["What the patch adds"][2][2] == f"{results.skip_norms[2].norm:.3g}"
    kept = {row[0]: row[-1] for row in cells["Training"]}
    assert (kept["preproj_down"], kept["preproj_up"]) == ("50.0%", "–")
    assert cells["Without one layer's adapters"][-1][0] == "all"
    shares = [relation.here.symmetric for relation in results.relations if relation.layer == 1]
    expected = f"{sum(shares) / 4:.2f} [{min(shares):.2f}, {max(shares):.2f}]"
    assert cells["Q-K relation"][1][2] == expected


def test_a_base_alone_shows_its_relation_and_says_nothing_of_patches():
    results = inspect(MODEL, None)
    assert len(results.relations) == 16
    assert [*tables_of(results)] == ["Attention branches", "Attention on the text", *RELATION]
    assert figures_of(results) == ["attention", "relation", "offsets"]


@pytest.mark.parametrize(
    ("norm", "names", "reason"),
    [
        ("RMSNorm", ("q_norm", "k_norm"), "gains are: B ="),
        ("LayerNorm", ("q_norm", "k_norm"), "B stands before them"),
        ("RMSNorm", ("declared", "other"), "B stands before them"),
    ],
)
def test_norms_behind_the_projections_are_named(monkeypatch, norm, names, reason):
    if "declared" in names:
        monkeypatch.setitem(DECLARED, "gpt_neox", replace(DECLARED["gpt_neox"], query_norm="declared"))

    def with_norms(*arguments, **options):
        base = load_base(*arguments, **options)
        for layer in base.model.gpt_neox.layers:
            for name in names:
                setattr(layer.attention, name, getattr(torch.nn, norm)(32))
        return base

    monkeypatch.setattr(inspection, "load_base", with_norms)
    (note,) = inspect(MODEL, None).notes
    assert note.startswith("Q-K relation: queries and keys are normed behind W_Q and W_K")
    assert reason in note


def test_a_model_from_scratch_shows_its_own_f(tmp_path):
    tokenizer = load_base(MODEL.name).tokenizer
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    for path in ("nonlinear", "identity"):
        architecture = {**shape, "num_attention_heads": 2, "query": {"path": path}}
        build_model(architecture, tokenizer=tokenizer).save_pretrained(tmp_path / path)
        tokenizer.save_pretrained(tmp_path / path)
    (text := tmp_path / "stories.txt").write_text("One day.\n<|endoftext|>\nAnother day, another walk.\n" * 40)
    results = inspect(ModelSettings(name=str(tmp_path / "nonlinear")), None, text=str(text), tokens=60)
    assert [(row.layer, row.adapter, row.target) for row in results.query_sizes] == [
        (0, "built-in", "query"), (1, "built-in", "query"),
    ]  # fmt: skip
    assert all(row.size > 0 for row in results.query_sizes)
    assert any("counts as 0" in note for note in results.notes)
    assert tables_of(results)["What f adds to its anchor"][1][1] == f"{results.query_sizes[1].size:.3g}"
    assert figures_of(results) == ["queries", "attention", "relation", "offsets"]
    without_text = inspect(ModelSettings(name=str(tmp_path / "nonlinear")), None)
    assert without_text.query_sizes == []
    assert any("give text with --text" in note for note in without_text.notes)
    assert inspect(ModelSettings(name=str(tmp_path / "identity")), None).notes == []


def test_without_text_what_needs_it_is_noted(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(checkpoint("gpt-neox"), model)
    results = inspect(ModelSettings(name=str(model)), run / "patch")
    assert results.text is None
    assert results.skip_norms
    assert results.ablations is None
    assert any("--text" in note for note in results.notes)
    assert any("not shown for 4 layers whose query is not linear" in note for note in results.notes)
    assert figures_of(results) == ["skips", "relation", "offsets"]


def test_the_command_prints_tables_json_and_a_page(capsys, tmp_path, run):
    arguments = ["inspect", "tinyworld/gpt-neox", "--patch", str(run / "patch")]
    page = tmp_path / "page.html"
    assert main([*arguments, "--json", "--html", "--out", str(page)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["patch"] == str(run / "patch")
    assert f"page: {page}" in err
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    (text := tmp_path / "stories.txt").write_text("One day.\n<|endoftext|>\nAnother day, another walk.\n" * 40)
    plain = ["inspect", "tinyworld/gpt2", "--text", str(text), "--tokens", "300"]
    assert main(plain) == 0
    out = capsys.readouterr().out
    assert all(title in out for title in ("Attention branches", "Q-K relation"))
    assert str(text) in re.sub(r"\s", "", out)


def test_a_model_of_a_short_context_is_inspected(capsys, tmp_path):
    random_model(make_config("gpt2", n_positions=6, vocab_size=12)).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "Attention branches" in capsys.readouterr().out


def test_text_that_is_not_there_is_one_line(capsys, tmp_path):
    assert main(["inspect", "tinyworld/gpt-neox", "--text", str(tmp_path / "absent.txt")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hfpatch: error: ")]
    assert "absent.txt" in line
    (short := tmp_path / "short.txt").write_text("One\n")
    assert main(["inspect", "tinyworld/gpt-neox", "--text", str(short)]) == 2
    assert "fewer than four documents" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--tokens", "300"]) == 2
    assert "--tokens 300: counts tokens of a text, and there is none" in capsys.readouterr().err


def failing(message):
    def measure(*arguments):
        raise HfpatchError(message)

    return measure


def test_what_cannot_be_measured_is_noted_and_the_rest_is_shown(run, tmp_path, monkeypatch):
    """Here the fit on few tokens, and sizes where an attention reads other positions than the text's."""
    (text := tmp_path / "short.jsonl").write_text('{"text": "Anna took the lamp."}\n' * 6)
    monkeypatch.setattr(inspection, "skip_sizes", failing("an attention reads 2 x 36 positions"))
    results = inspect(MODEL, run / "patch", text=str(text))
    assert results.linearised == results.skip_sizes == []
    assert any("too few to fit" in note for note in results.notes)
    assert "Sizes of content skips on the text: not shown; an attention reads 2 x 36 positions." in results.notes
    assert len(results.pre_projection_sizes) == len(results.query_sizes) == 4
    assert results.ablations is not None
