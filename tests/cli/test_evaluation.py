"""``hfpatch eval`` from the command line to its files: answers that are kept, patches, scales and whole models."""

import json

import pytest
import torch
from cli.conftest import refused

from hfpatch.__main__ import main
from hfpatch.results import load_results


def printed_json(capsys, *arguments):
    """Run hfpatch, and return the JSON that it prints."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_keeps_answers_for_the_next_call(capsys, monkeypatch, tmp_path):
    from hfpatch.evaluation.scorer import Scorer

    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path))
    scored = []
    score = Scorer._features
    monkeypatch.setattr(Scorer, "_features", lambda self, batch, *rest: scored.append(1) or score(self, batch, *rest))
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "8"]

    def scores(*options):
        scored.clear()
        results = printed_json(capsys, *arguments, *options)
        return len(scored), results["variants"]["base"]["scores"]["tinyworld_cloze"]

    cost, first = scores()
    assert cost > 0
    assert first["n"] == 8
    assert 0 <= first["metrics"]["acc"] <= 1
    assert "reused" not in first
    assert len(list((tmp_path / "answers").glob("*.jsonl"))) == 1
    assert scores() == (0, first)
    assert scores("--no-cache") == (cost, first)
    assert scores("--dtype", "bfloat16")[0] == cost
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tinyworld_cloze" in shown
    assert "8 answers were kept from an earlier call" in shown
    assert main([*arguments, "--no-cache"]) == 0
    assert "answers were kept" not in capsys.readouterr().out


def test_an_interrupted_eval_says_what_is_kept(capsys, monkeypatch, tmp_path):
    from hfpatch.runs import evaluation

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(evaluation, "run_tasks", interrupt)
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze"]
    for options, kept in (((), "answers"), (("--output", str(tmp_path / "out")), "out")):
        assert main([*arguments, *options]) == 130
        assert f"the same command continues from what is in {tmp_path / kept}" in capsys.readouterr().err
    assert main([*arguments, "--no-cache"]) == 130
    assert "nothing is kept with --no-cache" in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_patches(tmp_path_factory):
    """Two patches of the tiny world's GPT-NeoX: one that changes nothing and one that spoils it."""
    from hfpatch import PreProjectionConfig, patch, save_patch, unpatch
    from hfpatch.surgery.bases import load_base

    model, folder = load_base("tinyworld/gpt-neox").model, tmp_path_factory.mktemp("patches")
    torch.manual_seed(0)  # before that of the first test
    for name, std in (("same", 0.0), ("spoilt", 0.3)):
        patch(model, PreProjectionConfig(content_skip=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += std * torch.randn_like(parameter)
        save_patch(model, folder / name / "patch")
        unpatch(model)
    return [folder / name / "patch" for name in ("same", "spoilt")]


def test_eval_compares_several_patches_with_one_base(capsys, tmp_path, two_patches):
    out = tmp_path / "out"
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "60", "--baseline"]
    for patch in two_patches:
        arguments += ["--patch", str(patch)]
    as_json = printed_json(capsys, *arguments, "--output", out)
    assert as_json == json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert as_json == load_results(out, "evaluation").to_json()
    assert (as_json["schema"], as_json["kind"]) == (2, "evaluation")
    assert list(as_json["variants"]) == ["base", "same-patch", "spoilt-patch"]
    base, same, spoilt = (variant["scores"]["tinyworld_cloze"]["metrics"] for variant in as_json["variants"].values())
    assert same == pytest.approx(base)
    assert spoilt["acc"] < base["acc"] - 0.3
    same, spoilt = as_json["verdicts"]
    assert (same["method"], same["difference"], same["outcome"]) == ("same-patch", 0, "not decided")
    assert (spoilt["outcome"], spoilt["metric"], spoilt["family"]) == ("worse", "bits_per_byte", 2)
    assert [(pair["method"], pair["metric"]) for pair in as_json["comparisons"]] == [
        (patch, metric) for metric in ("acc", "bits_per_byte") for patch in ("same-patch", "spoilt-patch")
    ]
    for label in as_json["variants"]:
        assert len((out / label / "tinyworld_cloze.jsonl").read_text(encoding="utf-8").splitlines()) == 60
    assert len(list((out / "answers").glob("*.jsonl"))) == 3
    assert main([*arguments, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "worse" in printed
    assert "verdict" in printed
    assert "answers were kept" in printed
    assert main(["report", str(out)]) == 0
    again = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "kept" not in line] == again.splitlines()[:-1]
    assert again.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert "named twice" in refused(capsys, *arguments, "--patch", two_patches[0])
    assert "no patch here" in refused(capsys, *arguments, "--patch", tmp_path)
    assert "holds no evaluation" in refused(capsys, *arguments, "--output", two_patches[0])


def test_eval_scales_a_patch_from_the_base_to_the_patch(capsys, two_patches):
    spoilt = two_patches[1]
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "20"]
    variants = printed_json(capsys, *arguments, "--patch", spoilt, "--scale", "0,0.5,1", "--baseline")["variants"]
    assert list(variants) == ["base", "patch at 0", "patch at 0.5", "patch"]
    assert [variant.get("scale") for variant in variants.values()] == [None, 0, 0.5, None]
    bits = [variant["scores"]["tinyworld_cloze"]["metrics"]["bits_per_byte"] for variant in variants.values()]
    assert bits[1] == pytest.approx(bits[0], rel=1e-6)
    assert bits[2] != pytest.approx(bits[1], rel=1e-3)
    assert bits[3] != pytest.approx(bits[2], rel=1e-3)
    (alone,) = printed_json(capsys, *arguments, "--patch", spoilt)["variants"].values()
    assert alone["scores"]["tinyworld_cloze"]["metrics"]["bits_per_byte"] == pytest.approx(bits[3], rel=1e-6)
    assert "give numbers with commas" in refused(capsys, *arguments, "--patch", spoilt, "--scale", "half")
    assert "different finite numbers" in refused(capsys, *arguments, "--patch", spoilt, "--scale", "1,inf")
    assert "--scale: there is no patch" in refused(capsys, *arguments, "--scale", "0.5")
    assert main(["export", str(spoilt), "--scale", "0.5"]) == 0
    assert "HfpatchGPTNeoXForCausalLM" in capsys.readouterr().out
    arguments[2] = str(spoilt.with_name("patch-standalone"))
    (exported,) = printed_json(capsys, *arguments, "--trust-remote-code")["variants"].values()
    assert exported["scores"]["tinyworld_cloze"]["metrics"]["bits_per_byte"] == pytest.approx(bits[2], rel=1e-5)


def test_eval_compares_whole_models(capsys, tmp_path):
    out = tmp_path / "out"
    models = ["--model", "tinyworld/gpt-neox", "--model", "tinyworld/gpt2"]
    tasks = ["--tasks", "tinyworld_cloze,tinyworld_questions", "--limit", "60"]
    arguments = ["eval", *models, *tasks, "--cluster", "tinyworld_questions=passage", "--output", str(out)]
    as_json = printed_json(capsys, *arguments)
    assert {label: variant["model"]["name"] for label, variant in as_json["variants"].items()} == {
        "gpt-neox": "tinyworld/gpt-neox", "gpt2": "tinyworld/gpt2",
    }  # fmt: skip
    assert [(one["method"], one["reference"]) for one in as_json["comparisons"][:2]] == [("gpt2", "gpt-neox")] * 2
    assert as_json["verdicts"][0]["outcome"] == "worse"
    assert as_json["comparisons"][1]["clusters"]["column"] == "passage"
    assert main(["report", str(out)]) == 0
    assert "Differences between the models" in capsys.readouterr().out
    assert (out / "results.csv").read_text(encoding="utf-8").splitlines()[1].startswith("gpt-neox,,0,tinyworld_cloze")
    refusals = {
        ("--baseline",): "--baseline: goes with one --model, not with 2",
        ("--patch", "p"): "--patch: goes with one --model, not with 2",
        ("--revision", "main"): "write the revision of each model as --model tinyworld/gpt-neox@main",
        ("--model", "tinyworld/gpt2"): "--model tinyworld/gpt2: named twice",
        ("--model", "x/y@"): "--model x/y@: no revision after the @",
        ("--model", "tinyworld/gpt3"): "tinyworld has no checkpoint 'gpt3'",
        ("--model", "tinyworld/gpt2@main"): "revision main: tinyworld/gpt2 is embedded in hfpatch",
    }
    for options, message in refusals.items():
        assert message in refused(capsys, "eval", *models, *options, *tasks)


def test_eval_stops_before_the_patches_of_a_base_outside_its_known_score(capsys, monkeypatch, two_patches):
    from hfpatch.evaluation import known_scores

    published = known_scores.KnownScore("tinyworld/gpt-neox", ("main",), "tinyworld_cloze", "acc", 200, 0.1, "x")
    monkeypatch.setattr(known_scores, "KNOWN_SCORES", (published,))
    bare = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "40"]
    assert main(bare) == 0
    assert "but 0.100" in " ".join(capsys.readouterr().out.split())
    compared = [*bare, "--baseline", "--patch", str(two_patches[0])]
    assert "--allow-unknown-base evaluates the patches" in refused(capsys, *compared)
    assert main([*compared, "--allow-unknown-base"]) == 0
