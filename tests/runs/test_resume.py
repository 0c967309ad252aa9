"""A folder goes on only with what it was begun with: base, text, tokenizer, plans and methods."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import GPT2, NEOX, Nothing, Stop, refused, save_base, small_recipe
from transformers import AutoModelForCausalLM

from hfpatch.data.plan import draw_plan, write_plans
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import compare, train
from hfpatch.runs.identity import identify_base
from hfpatch.support.files import read_json
from hfpatch.surgery.bases import Base
from hfpatch.tinyworld import documents
from hfpatch.training.architecture import build_model

TRAINING = {"keep_finished": True, "steps": 3, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "save_every": 1}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """For each kind of run a folder with what is complete, a run stopped after a checkpoint and one not begun."""
    places = {}
    for kind, (run, steps) in RUN.items():
        places[kind], texts = tmp_path_factory.mktemp(kind), list(documents("base", count=40))
        save_base(places[kind] / "base", texts)
        (places[kind] / "text.txt").write_text("\n\n".join(texts))
        with pytest.raises(KeyboardInterrupt):
            run(places[kind], progress=Stop(steps))
        assert list((places[kind] / "out").rglob("checkpoints/step-*"))
    return places


@pytest.fixture
def folder(begun, request):
    """One of the folders of ``begun``; base and text are put back afterwards."""
    folder = begun[request.param]
    kept = {path: path.read_bytes() for path in [*(folder / "base").iterdir(), folder / "text.txt"]}
    yield folder
    for path in {*(folder / "base").iterdir()} - set(kept):
        path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)


def recipe(folder: Path, *, rank: int = 2) -> Recipe:
    data = {"source": str(folder / "text.txt"), "block_size": 32, "held_out": 5}
    methods = {"baseline": [], "skip": [{"type": "pre_projection"}], "lora": [{"type": "lora", "r": rank}]}
    return small_recipe(folder / "base", data=data, training=TRAINING, methods=methods)


def run_study(folder, **options):
    data = {"source": str(folder / "text.txt"), "block_size": 32, "held_out": 5}
    study = {"name": "small", "architecture": GPT2, "tokenizer": {"path": str(folder / "base")}, "data": data}
    study |= {"training": TRAINING, "baseline": "one", "variants": {"one": {}, "two": {}}}
    return compare(StudyRecipe.model_validate(study), folder / "out", **options)


RUN = {
    "compare": (lambda folder, **options: compare(recipe(folder), folder / "out", **options), 5),
    "study": (run_study, 5),
}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_the_text(folder, out):
    """The same documents the other way round: as many tokens and blocks as before."""
    path = folder / "text.txt"
    path.write_text("\n\n".join(reversed(path.read_text().split("\n\n"))))


def bring_a_checkpoint(folder, out):
    """Replace the folder's LoRA checkpoint by one of another rank."""
    shutil.rmtree(out / "runs" / "lora")
    train(recipe(folder, rank=3), "lora", folder / "elsewhere")
    shutil.move(folder / "elsewhere" / "runs" / "lora", out / "runs" / "lora")
    shutil.rmtree(folder / "elsewhere")
    (out / "runs" / "lora" / "seed-0" / "training.json").unlink()


def bring_what_was_trained(folder, out):
    training = out / "runs" / "skip" / "seed-0" / "training.json"
    edit(training, identity={**read_json(training)["identity"], "method": "0" * 64})


def forget_where_it_is_from(folder, out):
    (out / "identity.json").unlink()


def forget_where_a_run_is_from(folder, out):
    edit(out / "runs" / "skip" / "seed-0" / "result.json", identity={})


def redraw_the_plans(folder, out):
    blocks = json.loads((out / "plan.json").read_text())["0"]["blocks"]
    write_plans(out, {0: draw_plan(blocks=blocks, steps=3, batch_size=4, seed=9)})


MIXTURES = [  # of the text of a comparison: test_identity.py
    ("study", change_the_text, "identity.json: does not match the current training text (sha256 "),
    ("compare", bring_what_was_trained, "skip/seed-0/training.json: does not match the current settings or code of"),
    ("compare", bring_a_checkpoint, "step-00000003/state.json: does not match the current settings or code of the"),
    ("compare", forget_where_it_is_from, "has no hashes of the base and the text"),
    ("study", forget_where_it_is_from, "has no hashes of the base and the text"),
    ("compare", forget_where_a_run_is_from, "skip/seed-0/result.json: has no hashes of the base"),
    ("compare", redraw_the_plans, "plan.json: the batch plan of seed 0 does not match"),
    ("study", redraw_the_plans, "plan.json: the batch plan of seed 0 does not match"),
]


@pytest.mark.parametrize(("folder", "mix", "reason"), MIXTURES, indirect=["folder"])
def test_nothing_goes_on_in_a_folder_that_mixes_runs(folder, request, mix, reason):
    out, kept = folder / "out", folder / "kept"
    shutil.copytree(out, kept)
    try:
        mix(folder, out)
        before = on_disk(out)
        run = RUN[request.node.callspec.params["folder"]][0]
        message = refused(run, folder, resume=True, progress=Nothing())
        assert reason in message
        assert "another --out" in message
        assert on_disk(out) == before
    finally:
        shutil.rmtree(out)
        kept.rename(out)


@pytest.mark.parametrize("folder", ["compare"], indirect=True)
def test_everything_in_a_folder_names_what_it_comes_from(folder):
    out = folder / "out"
    parameters = dict(AutoModelForCausalLM.from_pretrained(folder / "base").named_parameters())
    content = b"".join(name.encode() + parameters[name].detach().numpy().tobytes() for name in sorted(parameters))
    weights = hashlib.sha256(content).hexdigest()
    runs = out / "runs"
    named = {
        name: read_json(path)["identity"]
        for name, path in {
            "baseline": runs / "baseline" / "seed-0" / "result.json",
            "training": runs / "skip" / "seed-0" / "training.json",
            "result": runs / "skip" / "seed-0" / "result.json",
            "checkpoint": runs / "lora" / "seed-0" / "checkpoints" / "step-00000002" / "state.json",
        }.items()
    }
    named["checkpoint"] = named["checkpoint"]["origin"]
    shared = read_json(out / "identity.json")
    assert shared.pop("matmul") == read_json(out / "results.json")["provenance"]["matmul"] == "mkl"  # a small model
    assert shared["base_weights"] == weights == read_json(out / "results.json")["model"]["sha256"]
    assert shared["text"] == read_json(out / "results.json")["data"]["sha256"]
    assert None not in shared.values()
    assert named["baseline"] == shared
    assert named["training"] == named["result"]
    for name in ("training", "checkpoint"):
        assert named[name].items() > shared.items()
        assert named[name]["plan"] == read_json(out / "plan.json")["0"]["sha256"]
    assert named["training"]["training"] == named["checkpoint"]["training"]
    assert named["training"]["method"] != named["checkpoint"]["method"]


def test_buffers_are_part_of_a_base():
    model = build_model(NEOX, tokenizer=train_tokenizer(["a few words"], 260))
    names = []
    for value in (0.0, 0.0, 1.0):
        model.register_buffer("bias_of_the_router", torch.full((3,), value))
        names.append(dict(identify_base(Base("name", None, model, None, "weights"))))
    assert names[0] == names[1]
    assert {key for key in names[0] if names[0][key] != names[2][key]} == {"base_buffers"}
