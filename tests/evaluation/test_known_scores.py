import math

import huggingface_hub.constants
import pytest
from own_tasks import task_result

from hfpatch.evaluation import check_known_scores
from hfpatch.evaluation.known_scores import KNOWN_SCORES
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.recipes.strict import read_yaml
from hfpatch.support.folders import recipes_dir

COMMIT = "9879c9b5f8bea9051dcb0e68dff21493d67e9d4f"


def results(acc, n=5153, task="lambada_openai", num_fewshot=0, metric="acc"):
    metrics = {metric: acc, "perplexity": 5.0}
    return {task: task_result(task, metric, n=n, metrics=metrics, num_fewshot=num_fewshot)}


def check(acc, name="EleutherAI/pythia-410m", revision=None, dtype="float32", plain=True, **options):
    model = ModelSettings(name=name, revision=revision, dtype=dtype)
    return check_known_scores(model, results(acc, **options), plain=plain)


def test_a_broken_base_is_named():
    (sentence,), unknown = check(0.466)
    assert unknown == []
    assert "(acc, 5153 documents, float32), but 0.516 ± 0.006 is known of EleutherAI/pythia-410m" in sentence


@pytest.mark.parametrize(
    ("acc", "case"),
    [
        (0.58, {}),
        (0.128, {"name": "EleutherAI/pythia-160m"}),
        (0.121, {"name": "EleutherAI/pythia-160m", "dtype": "bfloat16"}),
        (0.128, {"name": "EleutherAI/pythia-160m", "revision": "step123000", "n": 500}),
        (0.30, {"name": "gpt2"}),
        (0.30, {"name": "openai-community/gpt2", "dtype": "float16"}),
        (0.29, {"name": "gpt2", "task": "hellaswag", "metric": "acc_norm", "n": 10042}),
        (0.50, {"revision": "step143000"}),
        (0.50, {"revision": COMMIT}),
        (0.50, {"dtype": "bfloat16"}),
        (0.487, {}),
        (0.545, {}),
    ],
)
def test_what_is_known_is_compared_whatever_the_revision_is_called_and_the_dtype(acc, case):
    surprises, unknown = check(acc, **case)
    assert (len(surprises), unknown) == (1, [])


def test_a_sound_base_passes():
    # Scores of the same checkpoints that others published.
    assert check(0.514) == check(0.1842, "EleutherAI/pythia-70m") == check(0.330, "EleutherAI/pythia-160m") == ([], [])
    assert check(0.5162, dtype="bfloat16") == check(0.510, dtype="bfloat16") == ([], [])
    assert check(0.525, task="arc_easy", n=2376) == ([], [])
    assert check(0.45, n=200) == ([], [])  # 200 documents tell little


def test_the_whole_test_set_leaves_no_sampling_error():
    (published,) = (k for k in KNOWN_SCORES if k.model.endswith("410m") and k.task == "lambada_openai")
    assert published.tolerance(5153, "float32") == pytest.approx(0.0005 + 3 * math.sqrt(0.02 / 5153))
    half = 0.02 / 2000 + published.value * (1 - published.value) / 2000 * (1 - 2000 / 5153)
    assert published.tolerance(2000, "float32") == pytest.approx(0.0005 + 3 * math.sqrt(half))


def test_folders_and_snapshots_are_recognised(tmp_path, monkeypatch):
    cache = tmp_path / "hub" / "models--EleutherAI--pythia-410m"
    other = cache / "snapshots" / ("0" * 40)
    for folder in (cache / "refs", cache / "snapshots" / COMMIT, other, tmp_path / "pythia-410m"):
        folder.mkdir(parents=True)
    (cache / "refs" / "step143000").write_text("1" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in (cache / "snapshots" / COMMIT, tmp_path / "pythia-410m"):
        (sentence,), _ = check(0.4, str(name))
        assert sentence.startswith(str(name))
        assert "of EleutherAI/pythia-410m" in sentence
    assert len(check(0.4, revision="1" * 40)[0]) == 1  # the cache knows which step that is
    assert check(0.4, str(other))[0] == check(0.4, str(tmp_path))[0] == []


@pytest.mark.parametrize(
    ("name", "revision", "given"),
    [
        ("EleutherAI/pythia-12b", None, {}),
        ("EleutherAI/pythia-410m", "step1000", {}),
        ("EleutherAI/pythia-410m", "0" * 40, {}),
        ("EleutherAI/pythia-410m", None, {"num_fewshot": 5}),
        ("EleutherAI/pythia-410m", None, {"plain": False}),  # other prompts
        ("EleutherAI/pythia-410m", None, {"task": "winogrande"}),
        ("EleutherAI/pythia-410m", None, {"task": "hellaswag", "n": 10042}),
        ("EleutherAI/pythia-410m", None, {"metric": "f1"}),
    ],
)
def test_where_nothing_is_known_that_is_said(name, revision, given):
    surprises, (unknown,) = check(0.1, name, revision, **given)
    assert surprises == []
    assert f"no published score of {name}" in unknown
    text = results(0.1, task=HELD_OUT, metric="nats_per_token")
    assert check_known_scores(ModelSettings(name=name, revision=revision), text) == ([], [])  # no task


def test_the_recipes_of_real_models_are_gated_where_a_score_is_known():
    gated = {}
    for path in sorted(recipes_dir().glob("*.yaml")):
        raw = read_yaml(path)
        if "methods" in raw and raw["model"]["name"].startswith(("EleutherAI/", "openai-community/")):
            recipe = Recipe.model_validate(raw)
            scores = {name: results(0.0, task=name)[name] for name in recipe.evaluation.tasks}
            gated[path.stem] = bool(check_known_scores(recipe.model, scores)[0])
    with_scores = dict.fromkeys(("gpt2", "pythia-160m", "pythia-160m-zoo", "pythia-410m"), True)
    assert gated == with_scores | dict.fromkeys(("pythia-160m-as-published", "pythia-410m-as-published"), False)


def test_the_table_has_the_published_figures():
    assert all(score.source for score in KNOWN_SCORES)
    assert {(s.model.rpartition("/")[2], s.revisions[0], s.task, s.metric): s.value for s in KNOWN_SCORES} == {
        ("pythia-70m", "step143000", "lambada_openai", "acc"): 0.18455,
        ("pythia-70m", "step143000", "arc_easy", "acc"): 0.37374,
        ("pythia-160m", "step123000", "lambada_openai", "acc"): 0.33107,
        ("pythia-160m", "step123000", "arc_easy", "acc"): 0.43056,
        ("pythia-160m", "step143000", "lambada_openai", "acc"): 0.328,
        ("pythia-410m", "step143000", "lambada_openai", "acc"): 0.5162,
        ("pythia-410m", "step143000", "arc_easy", "acc"): 0.52104,
        ("pythia-1.4b-deduped", "step143000", "lambada_openai", "acc"): 0.61867,
        ("gpt2", "main", "lambada_openai", "acc"): 0.3256,
        ("gpt2", "main", "hellaswag", "acc"): 0.2892,
        ("gpt2", "main", "hellaswag", "acc_norm"): 0.3114,
    }
