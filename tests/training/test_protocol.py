"""The published protocol, from its own recipes: every hyper-parameter, and a step of it on a tiny model."""

import contextlib

import pytest
import torch
from families import make_model
from training_blocks import make_blocks

from hfpatch.data.plan import draw_plan
from hfpatch.recipes.comparison import load_recipe
from hfpatch.recipes.training import group_of
from hfpatch.surgery.methods import build_method
from hfpatch.surgery.patch import patch
from hfpatch.training.probe import train_probe
from hfpatch.training.run import Run

RECIPES = ["pythia-160m-as-published", "pythia-410m-as-published"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_has_the_published_values(name):
    recipe = load_recipe(name)
    training, data = recipe.training, recipe.data
    assert (training.steps, training.warmup_steps, training.lr, training.schedule) == (500, 50, 1e-5, "cosine")
    assert (training.batch_size, training.micro_batch_size) == (16, 4)
    assert (training.trainable_dtype, training.trainable_dtypes) == ("bfloat16", {"lora": "float32"})
    assert (data.source, data.config, data.split) == ("Salesforce/wikitext", "wikitext-103-raw-v1", "train")
    assert (data.max_documents, data.min_characters, data.block_size, data.layout) == (2000, 51, 512, "padded")
    assert (recipe.model.dtype, recipe.evaluation.limit) == ("bfloat16", 500)
    assert {part["init"] for parts in recipe.methods.values() for part in parts if "init" in part} == {"paper"}


@pytest.mark.parametrize("method", ["pre_projection", "pre_projection_skip", "lora", "pre_projection_lora"])
def test_steps_of_it_run_in_the_published_dtypes(tmp_path, method):
    recipe = load_recipe(RECIPES[0], ["training.steps=3", "training.warmup_steps=1"])
    model = make_model("gpt_neox", torch.bfloat16)
    small = [{**part, "r": 4} if "r" in part else part for part in recipe.methods[method]]
    patch(model, build_method(model, {method: small}, method).configs, seed=42)
    blocks = make_blocks(layout="padded", vocabulary=96)
    plan = draw_plan(blocks=len(blocks), steps=3, batch_size=16, seed=42)
    low = pytest.warns(UserWarning, match="kept in bfloat16") if "pre" in method else contextlib.nullcontext()
    with low:
        result = train_probe(model, Run(recipe.training, blocks, plan, 42, tmp_path))
    dtypes = {(group_of(name) == "lora", p.dtype) for name, p in model.named_parameters() if p.requires_grad}
    assert dtypes <= {(True, torch.float32), (False, torch.bfloat16)}
    survival = {name: share for name, share in result.update_survival.items() if name != "all"}
    assert all(share > 0.9 for name, share in survival.items() if name.startswith("lora"))
    assert all(share < 0.5 for name, share in survival.items() if name == "preproj_up")
