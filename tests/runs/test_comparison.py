"""From a recipe to a run folder: complete, resumable, and refused where it would mix or mislead."""

import errno
import json
import math
import re
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from draws import drawn
from own_tasks import write_task
from safetensors.torch import load_file
from scipy import stats
from tiny_runs import NEOX, Nothing, Stop, Trained, has_files, lines, numbers, refused, reports, save_base, small_recipe
from torch.nn.functional import cross_entropy

import hfpatch.runs.comparison
import hfpatch.runs.train_eval
import hfpatch.support.files
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import compare_again
from hfpatch.evaluation.stats import paired_permutation
from hfpatch.recipes.comparison import Recipe
from hfpatch.results import load_results
from hfpatch.results.identity import COMPUTED_WITH, OF_BASE, OF_TASK
from hfpatch.results.records import read_values
from hfpatch.runs import Progress, compare, train
from hfpatch.runs.folder import changes
from hfpatch.runs.locks import FOLDER, new_holder
from hfpatch.runs.plan import plan_runs
from hfpatch.runs.session import open_runs
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.support.files import read_json, write_json
from hfpatch.surgery.bases import load_base
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.patch import unpatch
from hfpatch.tinyworld import documents

METHODS = {
    "baseline": [],
    "pre_projection": [{"type": "pre_projection"}],
    "lora": [{"type": "lora", "match": "pre_projection"}],
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture
def recipe(model_folder):
    return make_recipe(model_folder)


def make_recipe(model_folder: Path, methods: dict | None = None, **sections: dict) -> Recipe:
    given = {"data": {"block_size": 32, "max_documents": 30}, "methods": methods or METHODS}
    given["evaluation"] = {"tasks": ["tinyworld_cloze", "tinyworld_text"], "limit": 8}
    return small_recipe(model_folder, **given | sections)


@pytest.fixture(scope="module")
def straight(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    with reports():
        compare(make_recipe(model_folder), out)
    return out


def files(out: Path, *folders: str) -> list[str]:
    paths = [path for folder in folders or ("",) for path in (out / folder).rglob("*")]
    return sorted(str(path.relative_to(out)) for path in paths if path.is_file())


def test_compare_writes_the_run_folder(straight):
    written = files(straight)
    assert {"recipe.yaml", "plan.json", "results.json", "results.csv", "report.html", "report.md"} <= set(written)
    for method in ("pre_projection", "lora"):
        for seed in (0, 1):
            run = straight / "runs" / method / f"seed-{seed}"
            steps = lines(run / "metrics.jsonl")
            assert [line["step"] for line in steps] == [1, 2, 3]
            assert {"loss", "lr", "tokens", "seconds"} <= set(steps[0])
            assert len((run / "evaluations" / "tinyworld_cloze.jsonl").read_text().splitlines()) == 8
            assert (run / "patch" / "patch.json").is_file()
            assert (run / "result.json").is_file()
    assert "runs/baseline/seed-0/result.json" in written
    assert not any("baseline/seed-1" in file for file in written)
    assert not any(file.endswith(".tmp") or "checkpoints" in file for file in written)
    # Others may read the tensors as they may the rest
    assert len({(straight / file).stat().st_mode for file in written}) == 1


def test_results_name_everything_a_result_must_name(straight, model_folder):
    results = read_json(straight / "results.json")
    assert (results["schema"], results["kind"], results["complete"]) == (2, "comparison", True)
    assert {"commit", "dirty", "command", "started", "wall_s", "python", "platform", "device", "threads"} < set(
        results["provenance"]
    )
    assert results["provenance"]["versions"]["torch"] == torch.__version__
    base = load_base(str(model_folder))
    assert results["model"]["sha256"] == base.sha256
    assert results["model"]["parameters"] == sum(p.numel() for p in base.model.parameters())
    assert results["data"]["documents"] == 30
    assert set(results["plan"]) == {"0", "1"}
    plans = read_json(straight / "plan.json")
    assert {seed: plan["sha256"] for seed, plan in plans.items()} == {
        seed: plan["sha256"] for seed, plan in results["plan"].items()
    }
    assert results["training"]["steps"] == 3
    task = {key: value for key, value in results["tasks"]["tinyworld_cloze"].items() if value is not None}
    assert task == {
        "primary": "acc",
        "higher_is_better": True,
        "n": 8,
        "num_fewshot": 0,
        **{name: results["tasks"]["tinyworld_cloze"][name] for name in OF_TASK},
        "version": "1.0",
    }
    shared = read_json(straight / "identity.json")
    assert results["model"]["identity"] == {name: shared[name] for name in OF_BASE if name != "base_weights"}
    methods = results["methods"]
    runs = [run for method in methods.values() for run in method["runs"].values()]
    assert all(set(run["computed_with"]) == set(COMPUTED_WITH) for run in runs)
    assert {run["commit"] for run in runs} == {"c0ffee"}
    # Each method with its size and runs
    assert list(methods) == ["baseline", "pre_projection", "lora"]
    assert methods["baseline"]["parameters"]["trainable"] == 0
    assert set(methods["baseline"]["runs"]) == {"0"}
    assert methods["baseline"]["runs"]["0"]["train"] is None
    d, layers = NEOX["hidden_size"], NEOX["num_hidden_layers"]
    assert methods["pre_projection"]["parameters"]["trainable"] == layers * 2 * d * (5 * d // 4)
    rank = methods["lora"]["match"]["rank"]
    assert methods["lora"]["parameters"]["trainable"] == layers * rank * ((d + 3 * d) + (d + d))
    assert methods["lora"]["match"]["to"] == "pre_projection"
    assert set(methods["lora"]["runs"]) == {"0", "1"}
    assert methods["lora"]["runs"]["1"]["train"]["steps"] == 3


def held_out_by_hand(model, tokenizer):
    """Return (documents, 2): nats and predicted tokens, each piece of each document by itself."""
    sums = []
    for text in drawn(list(documents("shifted", count=60)), 25):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        pieces = [torch.tensor(ids[at : at + 16]) for at in range(0, len(ids), 16)]
        with torch.no_grad():
            losses = [
                cross_entropy(model(piece[None]).logits[0, :-1].double(), piece[1:], reduction="sum")
                for piece in pieces
                if len(piece) > 1
            ]
        sums.append([float(sum(losses)), sum(len(piece) - 1 for piece in pieces)])
    return np.array(sums)


def test_every_run_keeps_the_loss_of_each_held_out_document(model_folder, tmp_path):
    """Of one seed; the documents are split over packed rows."""
    training = {"steps": 3, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": [0]}
    data, tasks = {"block_size": 16, "max_documents": 60, "held_out": 25}, {"tasks": ["tinyworld_cloze"], "limit": 8}
    compare(make_recipe(model_folder, data=data, evaluation=tasks, training=training), tmp_path)
    results, base = load_results(tmp_path), load_base(str(model_folder))
    losses = {}
    for method in ("baseline", "pre_projection", "lora"):
        if method != "baseline":
            load_patch(base.model, tmp_path / "runs" / method / "seed-0" / "patch")
        losses[method] = held_out_by_hand(base.model, base.tokenizer)
        unpatch(base.model)
        folder = tmp_path / "runs" / method / "seed-0" / "evaluations"
        records, values = lines(folder / "held_out_text.jsonl"), read_values(folder)["held_out_text"].metrics
        for name in ("nats_per_token", "bytes"):
            assert values[name].tolist() == [record[name] for record in records]
        assert [record["doc_id"] for record in records] == list(range(25))
        nats = np.array([record["nats_per_token"] for record in records])
        np.testing.assert_allclose(nats * [-1, 1], losses[method], rtol=1e-4)
        score = results.methods[method].runs[0].evaluation["held_out_text"]
        assert score.metrics == {"nats_per_token": pytest.approx(-nats[:, 0].sum() / nats[:, 1].sum())}
        train = results.methods[method].runs[0].train
        assert train is None or score.metrics["nats_per_token"] == pytest.approx(train.final_eval_loss, rel=1e-5)
    mean = losses["baseline"].sum(axis=0)
    assert results.data["held_out"]["base_loss"] == pytest.approx(mean[0] / mean[1], rel=1e-4)
    starts = {name: method.runs[0].evaluation["held_out_text"].starts for name, method in results.methods.items()}
    assert {name for name, costs in starts.items() if costs} == {"baseline"}
    assert all(1 < loss < 6 for loss in starts["baseline"].values())
    for made in (pair for pair in results.comparisons if pair.task == "held_out_text"):
        difference = losses[made.method][:, 0] - losses[made.reference][:, 0]
        weights = losses["baseline"][:, 1]
        assert made.difference == pytest.approx(difference.sum() / weights.sum(), rel=1e-3)
        p, (low, high) = paired_permutation(difference, weights)
        assert (made.p, made.low, made.high) == pytest.approx((p, low, high), rel=1e-2, abs=5e-4)
    assert {(pair.method, pair.reference) for pair in results.comparisons if pair.task == "held_out_text"} == {
        (pair.method, pair.reference) for pair in results.comparisons
    }


def test_every_declared_pair_is_compared_and_each_question_has_a_verdict_for_every_task(straight):
    results = read_json(straight / "results.json")
    made = results["comparisons"]
    pairs = {(comparison["method"], comparison["reference"]) for comparison in made}
    assert pairs == {("pre_projection", "baseline"), ("pre_projection", "lora"), ("lora", "baseline")}
    assert {(comparison["task"], comparison["metric"]) for comparison in made} == {
        *(("tinyworld_cloze", "acc"), ("tinyworld_text", "word_perplexity")),
        *(("tinyworld_cloze", "bits_per_byte"), ("tinyworld_text", "bits_per_byte")),
    }
    assert {comparison["seeds"] for comparison in made} == {2}
    assert results["questions"] == []  # LoRA has 1.25 % more parameters
    assert results["pairs"] == {
        "base": [["pre_projection", "baseline"], ["lora", "baseline"]],
        "lora": [["pre_projection", "lora"]],
    }
    verdicts = {(verdict["question"], verdict["method"], verdict["task"]): verdict for verdict in results["verdicts"]}
    assert len(verdicts) == 3 * 2
    assert {verdict["metric"] for verdict in verdicts.values()} == {"bits_per_byte"}
    outcomes = {(verdict["outcome"], verdict["why"], verdict["family"]) for verdict in verdicts.values()}
    assert outcomes == {("not tested", "too few documents", 0)}  # there are eight


def test_questions_are_declared_before_the_first_result_and_marked_where_they_change(model_folder, tmp_path):
    out, pairs = tmp_path / "out", [["pre_projection", "lora"]]
    with pytest.raises(KeyboardInterrupt):
        compare(make_recipe(model_folder, questions={"gain": {"pairs": pairs}}), out, progress=Stop(1, "finished"))
    first = read_json(out / "questions.json")
    assert (first["questions"][0]["on"], first["later"]) == (["tinyworld_text"], False)

    # Until a method is trained they may change
    cloze = {"gain": {"on": "tinyworld_cloze", "pairs": pairs}, "keep": None}
    with pytest.raises(KeyboardInterrupt):
        compare(make_recipe(model_folder, questions=cloze), out, resume=True, progress=Stop(1))
    declared = read_json(out / "questions.json")
    assert declared["questions"] == [
        {"question": "gain", "pairs": [["pre_projection", "lora"]], "on": ["tinyworld_cloze"]}
    ]

    # Afterwards, when the loss on held-out text may be known, they are marked, with their verdicts
    compare(make_recipe(model_folder, questions=cloze, margin={"bits_per_byte": 0.3}), out, resume=True)
    late, now = "when results existed already", load_results(out)
    assert {verdict.changed for verdict in now.primary} == {f"declared {late}"}
    assert f"Margin changed {late}: no test is corrected for that." in now.warnings
    more = {"gain": {"on": "tinyworld_text", "pairs": pairs}, "keep": {"on": ["tinyworld_cloze"], "methods": ["lora"]}}
    compare(make_recipe(model_folder, questions=more, margin={"bits_per_byte": 0.3}), out, resume=True)
    assert read_json(out / "questions.json") == declared
    assert [question.changed for question in load_results(out).questions] == [f"declared {late}"] * 2

    # So are seeds, without looks that were declared, as well as documents, for which all scores are made anew
    training = {**make_recipe(model_folder).training.model_dump(), "seeds": [0, 1, 2]}
    evaluation = {"tasks": ["tinyworld_cloze", "tinyworld_text"], "limit": 9}
    changed = {"training": training, "evaluation": evaluation, "margin": {"bits_per_byte": 0.3}}
    with pytest.raises(KeyboardInterrupt):
        compare(make_recipe(model_folder, questions=cloze, **changed), out, resume=True, progress=Stop(1, "finished"))
    compare(make_recipe(model_folder, questions=cloze, training=training, evaluation=evaluation), out, resume=True)
    assert {verdict.changed for verdict in load_results(out).primary} == {f"seeds and documents changed {late}"}
    compare(make_recipe(model_folder, questions=more, **changed), out, resume=True)
    assert read_json(out / "questions.json") == declared
    grown = load_results(out)
    assert [question.changed for question in grown.questions] == [f"declared {late}"] * 2
    assert any(warning.startswith(f"Seeds, documents and margin changed {late}") for warning in grown.warnings)
    write_json(out / "questions.json", {**declared, "margin": {"bits_per_byte": 0.3}})
    with pytest.raises(HfpatchError, match=r"questions.json: was changed since it was written"):
        compare(make_recipe(model_folder, **changed), out, resume=True)


def test_questions_that_change_after_a_training_of_their_own_are_marked(model_folder, tmp_path, monkeypatch):
    """`train` may measure the held-out text before `compare` declares the questions that its recipe had.

    Also where `compare` is killed in between.
    """
    killed = Mock(side_effect=KeyboardInterrupt)
    train(make_recipe(model_folder), "lora", tmp_path / "out")
    for margin, later in ({}, False), ({"bits_per_byte": 0.3}, True):
        out = shutil.copytree(tmp_path / "out", tmp_path / str(later))
        with monkeypatch.context() as patched:
            patched.setattr("hfpatch.runs.session.write_shared", killed)
            with pytest.raises(KeyboardInterrupt):
                compare(make_recipe(model_folder, margin=margin), out, resume=True)
        with pytest.raises(KeyboardInterrupt):
            compare(make_recipe(model_folder, margin=margin), out, resume=True, progress=Stop(1, "evaluating"))
        assert read_json(out / "questions.json")["later"] == later


def test_grouped_lines_are_decided_by_hand(model_folder, tmp_path):
    """Two pairs, two seeds, 24 held-out groups of one to five lines: t over seeds, CR3 over groups, Bonferroni."""
    sizes = np.random.default_rng(0).integers(1, 6, 48).tolist()
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    texts = (" ".join(text.split()[:20]) for text in documents("shifted", count=len(groups)))
    rows = [{"text": text, "book": f"book {group}"} for text, group in zip(texts, groups, strict=True)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "lines.jsonl"), "group": "book", "held_out": 24, "block_size": 32}
    recipe = small_recipe(
        model_folder,
        data=data,
        evaluation={"tasks": []},
        training={"steps": 3, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": [0, 1]},
        methods={**METHODS, "small": [{"type": "lora", "r": 1}]},
        questions={"gain": {"pairs": [["pre_projection", "lora"], ["small", "lora"]]}, "keep": None},
        margin={"nats_per_token": 0.5},
    )
    compare(recipe, tmp_path / "out")
    results = load_results(tmp_path / "out")
    assert [*results.tasks] == ["held_out_text"]
    assert [(verdict.method, verdict.other, verdict.task) for verdict in results.primary] == [
        ("pre_projection", "lora", "held_out_text"),
        ("small", "lora", "held_out_text"),
    ]
    for verdict in results.primary:
        read = {
            (name, seed): lines(tmp_path / f"out/runs/{name}/seed-{seed}/evaluations/held_out_text.jsonl")
            for name in (verdict.method, verdict.other)
            for seed in (0, 1)
        }
        nats = {run: -np.array([row["nats_per_token"][0] for row in records]) for run, records in read.items()}
        records = read[verdict.method, 0]
        tokens = np.array([row["nats_per_token"][1] for row in records])
        named = np.array([row["cluster"] for row in records])
        differences = np.stack([nats[verdict.method, seed] - nats[verdict.other, seed] for seed in (0, 1)])
        assert len(set(named)) == verdict.clusters.groups == 24 < len(records) == verdict.n
        by_seed = differences.sum(1) / tokens.sum()
        difference, of_seeds = by_seed.mean(), by_seed.std(ddof=1) / math.sqrt(2)

        # Each group left out in turn
        left_out = [
            differences.mean(0)[named != name].sum() / tokens[named != name].sum() - difference
            for name in dict.fromkeys(named)
        ]
        of_groups = math.sqrt(23 / 24 * np.sum(np.square(left_out)))

        def half(p, parts=((of_groups, 23), (of_seeds, 1))):
            return math.hypot(*(stats.t.ppf(1 - p / 2, freedom) * error for error, freedom in parts))

        assert verdict.difference == pytest.approx(difference)
        assert (verdict.low, verdict.high) == pytest.approx((difference - half(0.05), difference + half(0.05)))
        assert half(verdict.p) == pytest.approx(abs(difference))
        assert verdict.p_corrected == pytest.approx(min(1.0, 2 * verdict.p))
        is_sign, is_within = abs(difference) > half(0.025), abs(difference) + half(0.05) < 0.5
        assert (verdict.level, verdict.family) == (0.05 if is_within else 0.025, 2)
        assert verdict.corrected_high - difference == pytest.approx(half(verdict.level))
        sign = "better" if difference < 0 else "worse"
        expected = {(True, True): f"{sign} by less than the margin", (True, False): sign, (False, True): "equivalent"}
        assert verdict.outcome == expected.get((is_sign, is_within), "undecided")
        assert verdict.outcome != "not tested"


def test_every_method_sees_the_same_batches_and_begins_at_the_loss_of_the_base(straight):
    for seed in (0, 1):
        paths = [straight / "runs" / name / f"seed-{seed}" / "metrics.jsonl" for name in ("pre_projection", "lora")]
        ours, theirs = map(lines, paths)
        assert [line["tokens"] for line in ours] == [line["tokens"] for line in theirs]
        assert ours[0]["loss"] == theirs[0]["loss"]


def test_an_interrupted_comparison_resumes_to_the_same_results(straight, recipe, tmp_path):
    """Five interruptions: before any answer, after the baseline, in a training, in an evaluation, after every run."""
    out = tmp_path / "out"
    for kind, count in (("evaluating", 1), ("finished", 1), ("stepped", 2), ("evaluating", 2), ("finished", 5)):
        with pytest.raises(KeyboardInterrupt):
            compare(recipe, out, resume=kind != "evaluating" or count > 1, progress=Stop(count, kind))
        assert not read_json(out / "results.json")["complete"] if (out / "results.json").is_file() else True
    results = compare(recipe, out, resume=True, progress=Nothing())
    assert numbers(results) == numbers(read_json(straight / "results.json"))
    assert files(out, "runs") == files(straight, "runs")
    for path in files(out, "runs"):
        if path.endswith(".safetensors"):
            ours, theirs = load_file(out / path), load_file(straight / path)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        if "evaluations" in path:
            assert (out / path).read_bytes() == (straight / path).read_bytes()


def test_units_may_run_in_any_order_that_their_needs_allow(straight, recipe, tmp_path):
    plan, log, done = plan_runs(recipe, tmp_path / "out"), Trained(), []
    session = TrainEvalSession(plan, log)
    with open_runs(plan, session.set_up, resume=False):
        while left := [unit for unit in plan.units if unit not in done]:
            done.append(next(unit for unit in reversed(left) if all(need in done for need in unit.needs)))
            session.complete(done[-1])
    assert log.trained == [f"{method} · seed {seed}" for seed in (1, 0) for method in ("lora", "pre_projection")]
    results = compare(recipe, tmp_path / "out", resume=True, progress=Nothing())
    assert numbers(results) == numbers(read_json(straight / "results.json"))


def test_resuming_a_finished_run_only_reports_again(straight, recipe, tmp_path):
    out = shutil.copytree(straight, tmp_path / "out")
    (out / "report.md").unlink()
    before = (out / "results.json").read_bytes()
    with reports():
        compare(recipe, out, resume=True, progress=Nothing())
    assert (out / "report.md").is_file()
    assert (out / "results.json").read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
def test_another_recipes_run_is_refused_by_its_first_difference(straight, model_folder, resume):
    other = make_recipe(model_folder, evaluation={"tasks": ["tinyworld_cloze", "tinyworld_text"], "limit": 7})
    message = refused(compare, other, straight, resume=resume)
    assert "another recipe" in message
    assert "evaluation.limit is 8 there, 7 here" in message
    fewer = {name: parts for name, parts in METHODS.items() if name != "lora"}
    assert "methods.lora" in refused(compare, make_recipe(model_folder, fewer), straight, resume=resume)


def test_a_finished_run_takes_more_methods_seeds_and_documents(straight, recipe, model_folder, tmp_path):
    out, training = tmp_path / "out", recipe.training.model_dump()
    first = {name: METHODS[name] for name in ("baseline", "pre_projection")}
    few = {"tasks": recipe.evaluation.tasks, "limit": 5}
    compare(make_recipe(model_folder, first, training={**training, "seeds": [0]}, evaluation=few), out)
    (added,) = re.findall(r"--resume to add what is new \((.*)\)", refused(compare, recipe, out))
    assert set(added.split(", ")) == {"training.seeds", "methods.lora", "evaluation.limit"}
    assert len(lines(out / "runs" / "baseline" / "seed-0" / "evaluations" / "tinyworld_text.jsonl")) == 5

    with pytest.raises(KeyboardInterrupt):  # killed before anything new is complete
        compare(recipe, out, resume=True, progress=Stop(2))
    assert not read_json(out / "results.json")["complete"]
    log = Trained()
    grown, expected = compare(recipe, out, resume=True, progress=log), read_json(straight / "results.json")
    of_questions = {"questions", "verdicts", "warnings"}  # which say that there were results before
    ours, theirs = ({key: results[key] for key in results.keys() - of_questions} for results in (grown, expected))
    assert numbers(ours) == numbers(theirs)
    assert set(log.trained) == {"pre_projection · seed 1", "lora · seed 0", "lora · seed 1"}
    for name in files(straight, "runs"):
        if name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (straight / name).read_bytes()

    fewer = make_recipe(model_folder, training={**training, "seeds": [1]})
    assert "training.seeds is [0, 1] there, [1] here" in refused(compare, fewer, out, resume=True)
    other = make_recipe(model_folder, {**METHODS, "lora": [{"type": "lora", "r": 1}]})
    assert "methods.lora is" in refused(compare, other, out, resume=True)


def test_seeds_that_move_the_trials_are_no_addition(model_folder, tmp_path):
    tuning = {"learning_rates": [1e-3, 1e-2], "held_out": 4}
    training = {"steps": 3, "warmup_steps": 1, "batch_size": 4, "seeds": [0]}
    recipe = make_recipe(model_folder, tuning=tuning, training=training)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    for seeds, fits in {(0, 5): True, (0, 1000): False}.items():
        added, changed = changes(
            tmp_path, make_recipe(model_folder, tuning=tuning, training={**training, "seeds": seeds})
        )
        assert [list(added), list(changed)] == ([["training.seeds"], []] if fits else [[], ["training.seeds"]])


def test_a_base_off_its_known_score_stops_before_any_training(model_folder, tmp_path, monkeypatch):
    methods = {name: METHODS[name] for name in ("baseline", "pre_projection")}
    recipe = make_recipe(model_folder, methods)
    for module in ("hfpatch.evaluation", "hfpatch.runs.results"):
        monkeypatch.setattr(
            f"{module}.check_known_scores", lambda *_, **__: (["The base scores too low."], ["None is known."])
        )
    log = Trained()
    message = refused(compare, recipe, tmp_path / "out", progress=log)
    assert "The base scores too low." in message
    assert "evaluation.allow_unknown_base=true" in message
    assert not log.trained
    allowed = {**recipe.evaluation.model_dump(), "allow_unknown_base": True}
    results = compare(make_recipe(model_folder, methods, evaluation=allowed), tmp_path / "out", resume=True)
    assert {"The base scores too low.", "None is known."} <= set(results["warnings"])


def test_a_metric_that_compares_nothing_stops_before_any_training(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(hfpatch.evaluation, "all_aggregations", lambda *_: {"tinyworld_cloze": {"acc": len}})
    assert "task tinyworld_cloze: its metric acc does not follow from" in refused(compare, recipe, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "runs").iterdir()] == ["baseline"]


def test_a_method_that_changes_the_base_is_refused(recipe, tmp_path, monkeypatch):
    """Again where it is resumed: nothing that was trained counts as complete."""
    real = hfpatch.runs.train_eval.train_probe

    def changing(model, run):
        base, on_step = next(p for p in model.parameters() if not p.requires_grad), run.on_step

        def step(record):
            base.data += 1e-3
            on_step(record)

        run.on_step = step
        return real(model, run)

    monkeypatch.setattr(hfpatch.runs.train_eval, "train_probe", changing)
    for _ in range(2):
        message = refused(train, recipe, "lora", tmp_path / "out", resume=True)
        assert "lora · seed 0: methods.lora changed the base's own weights" in message
        assert not (tmp_path / "out" / "runs" / "lora" / "seed-0").exists()


def test_a_seed_that_diverges_is_a_result_and_ends_nothing_else(model_folder, tmp_path, monkeypatch):
    """Also once the runs are gone, and with them the values of a score that is no mean of documents."""
    rows = [{"question": f"{i} is even.", "label": i % 2} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    quiz = {"doc_to_text": "{{question}}", "doc_to_choice": ["yes", "no"], "doc_to_target": "label"}
    write_task(tmp_path, "quiz", output_type="multiple_choice", metric_list=[{"metric": "f1"}], **quiz)
    tasks = {"tasks": ["tinyworld_cloze", "quiz"], "limit": 8, "include_path": str(tmp_path)}
    real = hfpatch.runs.train_eval.train_probe

    def spoilt(model, run):
        if run.folder.parts[-2:] == ("lora", "seed-1"):
            run.settings = run.settings.model_copy(update={"lr": 1e30})
        return real(model, run)

    monkeypatch.setattr(hfpatch.runs.train_eval, "train_probe", spoilt)
    chosen, out, log = make_recipe(model_folder, evaluation=tasks), tmp_path / "out", Trained()
    with pytest.warns(UserWarning, match=r"lora · seed 1: diverged at step 2: it has no patch"), reports():
        results = compare(chosen, out, progress=log)
    assert results["complete"] is True
    good, bad = results["methods"]["lora"]["runs"].values()
    assert (bad["train"]["diverged_step"], bad["evaluation"]) == (2, {})
    assert (good["train"]["diverged_step"], len(good["evaluation"])) == (None, 2)
    assert not (out / "runs" / "lora" / "seed-1" / "patch").exists()
    assert [name for name in log.evaluated if name.startswith("lora · seed 1")] == []
    seeds = {(pair["method"], pair["reference"]): pair["seeds"] for pair in results["comparisons"]}
    assert (seeds["lora", "baseline"], seeds["pre_projection", "baseline"]) == (1, 2)
    compared = {(pair["task"], pair["metric"]) for pair in results["comparisons"]}
    assert {("quiz", "f1"), ("quiz", "bits_per_byte")} < compared
    warning = "lora, seed 1: diverged at step 2; it has no scores, and no comparison counts it."
    assert warning in results["warnings"]
    assert warning in (out / "report.md").read_text()
    assert "diverged at step 2" in (out / "report.html").read_text()
    before = files(out)
    assert numbers(compare(chosen, out, resume=True, progress=Nothing())) == numbers(results)
    assert files(out) == before
    shutil.rmtree(out / "runs")
    assert compare_again(out).comparisons == load_results(out).comparisons


def test_a_run_without_finite_scores_counts_as_diverged(model_folder, tmp_path, monkeypatch):
    """The others are compared, and resuming changes nothing."""
    train_real = hfpatch.runs.train_eval.train_probe

    def broken(model, run):
        outcome = train_real(model, run)
        if "lora" in str(run.folder):
            with torch.no_grad():
                next(value for name, value in model.named_parameters() if "lora_B" in name)[0] = float("nan")
        return outcome

    monkeypatch.setattr(hfpatch.runs.train_eval, "train_probe", broken)
    recipe, out = make_recipe(model_folder), tmp_path / "out"
    with pytest.warns(
        UserWarning, match=r"lora · seed 0: task .*, document \d+: the log-likelihood is NaN.* as diverged"
    ):
        results = compare(recipe, out)
    steps = recipe.training.steps
    assert results["complete"]
    runs = results["methods"]["lora"]["runs"].values()
    assert [(run["train"]["diverged_step"], run["evaluation"]) for run in runs] == [(steps, {})] * len(runs)
    assert {comparison["method"] for comparison in results["comparisons"]} == {"pre_projection"}
    assert any(f"lora, seed 0: diverged at step {steps}" in warning for warning in results["warnings"])
    run = out / "runs" / "lora" / "seed-0"  # as a kill may leave it
    shutil.copytree(out / "runs" / "pre_projection" / "seed-0" / "patch", run / "patch")
    (run / "result.json").unlink()
    write_json(out / "results.json", {**results, "complete": False})
    again = compare(recipe, out, resume=True)
    assert numbers(again["methods"]) == numbers(results["methods"])
    assert again["comparisons"] == results["comparisons"]
    assert not (run / "patch").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "report_to": ["made_up"]}},
            "report_to: made_up",
        ),
        ({"evaluation": {"tasks": ["tinyworld_clozze"]}}, "tinyworld_clozze"),
        ({"data_dir": "absent"}, "data_dir: absent is not a folder"),
        ({"data": {"block_size": 1024, "max_documents": 90}}, "longer than the model's context"),
    ],
)
def test_a_start_that_fails_leaves_no_file_and_the_next_needs_no_resume(
    model_folder, tmp_path, monkeypatch, sections, message
):
    out = tmp_path / "new" / "out"
    monkeypatch.setattr(hfpatch.runs.train_eval, "train_probe", lambda *args, **kwargs: pytest.fail("trained"))
    starts = [compare] if "evaluation" in sections else [compare, partial(train, method="lora")]
    for start in starts:
        with pytest.raises(HfpatchError, match=message):
            start(make_recipe(model_folder, **sections), out=out)
        assert not has_files(out)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused_before_training(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = load_base(str(folder)).tokenizer
    tokenizer.add_tokens(["<added>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(HfpatchError, match="tokenizer has ids up to 300 and the model 300 embeddings"):
        train(make_recipe(folder), "lora", tmp_path / "out")
    assert not has_files(tmp_path / "out")


def test_a_trained_patch_that_is_gone_is_named(recipe, tmp_path):
    out = tmp_path / "out"
    (patch, *_) = train(recipe, "lora", out)
    shutil.rmtree(patch)
    for command in (partial(train, recipe, "lora", out), partial(compare, recipe, out)):
        message = refused(command, resume=True)
        assert f"{patch}: is missing; restore it, or delete the folder that it is in, and --resume trains" in message


def test_a_failure_before_the_first_step_leaves_what_others_have_done(recipe, tmp_path, monkeypatch):
    """Two methods are trained in one folder: the one that fails takes nothing away from the other."""
    out = tmp_path / "out"
    train(recipe, "lora", out)
    before = files(out)

    def fail(*args, **kwargs):
        raise HfpatchError("no memory")

    monkeypatch.setattr(hfpatch.runs.train_eval, "train_probe", fail)
    assert "no memory" in refused(train, recipe, "pre_projection", out)
    assert files(out) == before
    alone = tmp_path / "alone"
    assert "no memory" in refused(train, recipe, "pre_projection", alone)
    assert files(alone) == []
    (alone / ".hidden").write_text("of someone else")
    assert "no memory" in refused(train, recipe, "pre_projection", alone)
    assert files(alone) == [".hidden"]


def test_a_full_disk_leaves_nothing_half_written_and_resumes(straight, recipe, tmp_path, monkeypatch):
    sync, out = hfpatch.support.files._sync, tmp_path / "out"
    for fatal in ("plan.json", "result.json", "results.json", "patch", "report.md"):  # as a comparison writes them

        def full(path: Path, fatal: str = fatal) -> None:
            if any(part.startswith(f".{fatal}.") for part in path.parts):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(path)

        with monkeypatch.context() as patched, reports():
            patched.setattr(hfpatch.support.files, "_sync", full)
            assert "No space left on device" in refused(compare, recipe, out, resume=True)
        assert not any(fatal in file or ".tmp" in file for file in files(out))
    results = compare(recipe, out, resume=True)
    assert numbers(results) == numbers(read_json(straight / "results.json"))


def test_a_training_waits_for_the_worker_of_a_killed_command(model_folder, tmp_path, monkeypatch):
    lock, waited, starts = tmp_path / "out" / FOLDER / "lora@seed-0.work", [], []
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps(new_holder()))

    def sleep(seconds):
        waited.append(seconds)
        lock.unlink()

    progress = Progress()
    progress.started = lambda run, steps: starts.append(list(waited))
    monkeypatch.setattr("hfpatch.runs.locks.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    train(small_recipe(model_folder), "lora", tmp_path / "out", progress=progress)
    assert len(waited) == len(starts[0]) == 1
