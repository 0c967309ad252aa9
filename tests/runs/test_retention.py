"""Retention and rewinding in a run: measured once, beside everything else, and added to a finished run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import numbers, small_recipe
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from hfpatch import load_patch, load_results, scale_patch, unpatch
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import compare_again
from hfpatch.recipes.comparison import Recipe
from hfpatch.results.forecast import MeasuredKind
from hfpatch.runs import compare
from hfpatch.runs.measuring import Measured
from hfpatch.runs.plan import plan_runs
from hfpatch.runs.retention import collect_retention
from hfpatch.runs.setup import set_up

TASK = "retention_old"
RETENTION = {"texts": {"old": {"source": "tinyworld/base"}}, "documents": 24}


def make_recipe(model_folder: Path, **sections) -> Recipe:
    data = {"block_size": 64, "max_documents": 60, "held_out": 24}
    tuning = {"learning_rates": [1e-3, 1e-2], "held_out": 4, "extend": 0, "steps": 2}
    return small_recipe(model_folder, **{"data": data, "tuning": tuning, **sections})


@pytest.fixture(scope="module")
def grown(model_folder, tmp_path_factory):
    """A run without retention, with it, and with rewinding: its folder, and what each step changed."""
    out = tmp_path_factory.mktemp("grown") / "out"
    steps = [{}, {"retention": RETENTION}, {"retention": RETENTION, "rewind": [0.5]}]
    changed, before = [], {}
    for step in steps:
        compare(make_recipe(model_folder, **step), out, resume=True)
        now = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()}
        changed.append({path.relative_to(out / "runs").as_posix() for path in now if now[path] != before.get(path)})
        before = now
    return out, changed


def mean_over(model, blocks, value):
    """Return the mean of ``value`` of both models' log-probabilities over predicted tokens; the patch is taken out."""
    rows = [{key: tensor[None] for key, tensor in blocks[i].items()} for i in range(len(blocks))]

    def log_probs():
        with torch.no_grad():
            given = [{key: row[key] for key in row if key != "labels"} for row in rows]
            return [log_softmax(model(**row, use_cache=False).logits.double(), -1)[0, :-1] for row in given]

    patched = log_probs()
    unpatch(model)
    values = []
    for row, p, q in zip(rows, log_probs(), patched, strict=True):
        kept = row["labels"][0, 1:] != -100
        values += value(p, q, row["labels"][0, 1:])[kept].tolist()
    return np.mean(values)


def test_each_run_has_what_its_patch_changes(grown, model_folder):
    out, _ = grown
    setup = set_up(make_recipe(model_folder, retention=RETENTION))
    results = load_results(out)
    base = results.methods["baseline"].runs[0].retention[TASK].metrics
    assert (base["kl"], base["top1_agreement"], base["forgetting"]) == (0.0, 1.0, 0.0)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    formulas = {
        "kl": lambda p, q, _: (p.exp() * (p - q)).sum(-1),
        "top1_agreement": lambda p, q, _: (p.argmax(-1) == q.argmax(-1)).double(),
        "forgetting": lambda p, q, at: (p - q).gather(-1, at.clamp(min=0)[:, None])[:, 0],
    }
    for name, formula in formulas.items():
        load_patch(model, out / "runs" / "lora" / "seed-1" / "patch")
        expected = mean_over(model, setup.retained["old"], formula)
        assert results.methods["lora"].runs[1].retention[TASK].metrics[name] == pytest.approx(expected, abs=2e-6)
    load_patch(model, out / "runs" / "pre" / "seed-0" / "patch")
    scale_patch(model, 0.5)
    rewound = results.methods["pre"].runs[0].rewound["0.5"]
    expected = mean_over(model, setup.retained["old"], formulas["kl"])
    assert rewound.evaluation[TASK].metrics["kl"] == pytest.approx(expected, abs=2e-6)


def test_what_is_added_to_a_finished_run_is_measured_alone(grown):
    _, (first, second, third) = grown
    assert "lora/seed-0/training.json" in first
    added = ("retention.json", "evaluations/retention_old.jsonl", "evaluations/values.safetensors")
    runs = ("baseline/seed-0", *(f"{name}/seed-{seed}" for name in ("pre", "lora") for seed in (0, 1)))
    assert second == {f"{run}/{file}" for run in runs for file in added}
    at_half = ("result.json", "held_out_text.jsonl", "retention_old.jsonl", "values.safetensors")
    files = (*(f"rewind/0.5/{file}" for file in at_half), "rewind/1/result.json")  # at 1 the text of tuning alone
    assert third == {f"{run}/{file}" for run in runs[1:] for file in files}


def test_results_have_every_point_and_can_be_computed_again(grown, tmp_path):
    out, _ = grown
    results = load_results(out)
    retention = results.retention
    assert [(point.method, point.scale) for point in retention.points] == [
        ("pre", 0.5), ("pre", 1.0), ("lora", 0.5), ("lora", 1.0)
    ]  # fmt: skip
    text = retention.texts[TASK]
    assert (text["source"], text["documents"]) == ("tinyworld/base", 24)
    for point in retention.points:
        runs = [run.rewound[f"{point.scale:g}"] for run in results.methods[point.method].runs.values()]
        assert point.tuning_loss == pytest.approx(np.mean([rewound_run.tuning_loss for rewound_run in runs]))
        scores = [run.retention if point.scale == 1 else run.rewound["0.5"].evaluation for run in
                  results.methods[point.method].runs.values()]  # fmt: skip
        kl = point.comparison(TASK, "kl")
        assert kl.difference == pytest.approx(np.mean([score[TASK].metrics["kl"] for score in scores]))
        assert (point.comparison("held_out_text", "nats_per_token") is None) == (point.scale == 1)
    table = results.to_pandas("retention")
    gains = sum(point.scale == 1 for point in retention.points)  # which are comparisons of the results
    assert len(table) == sum(len(point.comparisons) for point in retention.points) + gains
    assert set(table.method[table.chosen]) == {"pre", "lora"}
    kept = [verdict for verdict in results.primary if verdict.question == "keep"]
    assert {(verdict.method, verdict.task) for verdict in kept} == {
        (method, task) for method in ("pre", "lora") for task in (TASK, "tinyworld_cloze")
    }
    assert {(verdict.family, verdict.margin) for verdict in kept} == {(4, 0.01)}
    assert TASK not in results.tasks
    for name in ("results.json", "values.safetensors"):
        shutil.copy(out / name, tmp_path)
    assert {(pair.method, pair.task) for pair in results.kept} == {(m, "tinyworld_cloze") for m in ("pre", "lora")}
    again = compare_again(tmp_path)
    assert again.retention.points == retention.points
    assert again.kept == results.kept
    assert again.comparisons == results.comparisons
    assert again.verdicts == results.verdicts


@pytest.mark.parametrize("diverged_step", [None, 2])
def test_a_scale_has_a_loss_of_all_seeds_but_diverged_ones_or_none(grown, model_folder, diverged_step):
    """Without one of the seeds a scale could be the lowest by the others' losses."""
    setup, results = set_up(make_recipe(model_folder, retention=RETENTION, rewind=[0.5])), load_results(grown[0])
    pre = results.methods["pre"]
    first, second = pre.runs.values()
    broken = {at: one.model_copy(update={"tuning_loss": None}) for at, one in second.rewound.items()}
    rewound = broken if diverged_step else {**second.rewound, "0.5": broken["0.5"]}
    train = second.train.model_copy(update={"diverged_step": diverged_step})
    second = second.model_copy(update={"rewound": rewound, "train": train})
    methods = results.methods | {"pre": pre.model_copy(update={"runs": {0: first, 1: second}})}
    points = collect_retention(setup, grown[0], methods, results.tasks, complete=False).of("pre")
    of_first = [first.rewound[at].tuning_loss for at in ("0.5", "1")]
    expected = of_first if diverged_step else [None, results.retention.of("pre")[1].tuning_loss]
    assert [point.tuning_loss for point in points] == expected


def test_a_run_at_once_is_the_same(grown, model_folder, tmp_path):
    """One of its seeds."""
    recipe = make_recipe(model_folder, retention=RETENTION, rewind=[0.5])
    one = recipe.model_copy(update={"training": recipe.training.model_copy(update={"seeds": (0,)})})
    compare(one, tmp_path / "out")
    at_once, by_steps = (load_results(out).methods for out in (tmp_path / "out", grown[0]))
    for name, method in at_once.items():
        run, other = method.runs[0], by_steps[name].runs[0]
        assert (run.retention, run.rewound) == (other.retention, other.rewound)
        assert run.retention
        assert bool(run.rewound) == (name != "baseline")


def test_damaged_files_and_other_texts_are_refused_in_one_line(grown, model_folder, tmp_path):
    out = shutil.copytree(grown[0], tmp_path / "out")
    with pytest.raises(HfpatchError, match=r"contains a run of another recipe \(retention\.documents"):
        compare(make_recipe(model_folder, retention={**RETENTION, "documents": 23}, rewind=[0.5]), out, resume=True)
    file = out / "runs" / "lora" / "seed-0" / "retention.json"
    stored = json.loads(file.read_text())
    recipe = make_recipe(model_folder, retention=RETENTION, rewind=[0.25, 0.5])
    file.write_text(json.dumps({**stored, "identity": {**stored["identity"], "retention_text": "0" * 64}}))
    with pytest.raises(HfpatchError, match=r"retention\.json: does not match the current text of retention"):
        compare(recipe, out, resume=True)
    file.write_text("{")
    with pytest.raises(HfpatchError, match=r"retention\.json: cannot be read as JSON"):
        compare(recipe, out, resume=True)


@pytest.mark.parametrize(
    ("record", "scores", "left"),  # each kind of record, empty or cut: all are read alike
    [
        ("baseline/seed-0/evaluations/tinyworld_cloze.jsonl", "baseline/seed-0/result.json", 100),
        ("lora/seed-1/evaluations/retention_old.jsonl", "lora/seed-1/retention.json", 0),
        ("lora/seed-1/rewind/0.5/retention_old.jsonl", "lora/seed-1/rewind/0.5/result.json", 100),
    ],
)
def test_a_damaged_record_is_written_again_where_its_scores_are_deleted(
    grown, model_folder, tmp_path, record, scores, left
):
    out, recipe = (
        shutil.copytree(grown[0], tmp_path / "out"),
        make_recipe(model_folder, retention=RETENTION, rewind=[0.5]),
    )
    before = json.loads((out / "results.json").read_text())
    (out / "results.json").unlink()
    path = out / "runs" / record
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(HfpatchError, match=rf"{record}: not a record of .*; delete .*{scores} and use --resume$"):
        compare(recipe, out, resume=True)
    (out / "runs" / scores).unlink()
    assert numbers(compare(recipe, out, resume=True)) == numbers(before)


def test_text_that_is_trained_on_and_a_method_that_cannot_be_scaled_are_refused_before_any_training(model_folder):
    same = {"texts": {"old": {"source": "tinyworld/shifted"}}, "documents": 24}
    with pytest.raises(HfpatchError, match=r"retention\.texts\.old: all 24 documents of .* are in the text that"):
        set_up(make_recipe(model_folder, retention=same))
    methods = {"baseline": [], "dora": [{"type": "lora", "r": 2, "use_dora": True}]}
    with pytest.raises(HfpatchError, match=r"^rewind: methods\.dora: the variant of LoRA"):
        set_up(make_recipe(model_folder, methods=methods, retention=RETENTION, rewind=[0.5]))


def test_a_plan_counts_the_passes_over_text(model_folder):
    recipe = make_recipe(model_folder, retention=RETENTION, rewind=[0.5])
    setup, plan = set_up(recipe), plan_runs(recipe, Path("nowhere"))
    kinds = {kind: MeasuredKind(method="lora", step_s=12.0) for kind in ("lora", "pre_projection", "base")}
    kinds["base"] = MeasuredKind(method="baseline")
    work = Measured(setup, {}, kinds=kinds).work(plan.units)
    retained, held_out, tuning = len(setup.retained["old"]), len(setup.held_out), len(setup.tuning_text)
    runs, block_s = 4, 12.0 / 4 / 3  # a third of a step's time for each block
    assert (work["retain"].units, work["rewind"].units) == (runs + 1, 2 * runs)
    assert work["retain"].seconds == pytest.approx(runs * 2 * retained * block_s)
    assert work["rewind"].seconds == pytest.approx(runs * (2 * retained + held_out + 2 * tuning) * block_s)
