"""Patching a model from scratch: adapters find the matrices inside its projections, and every promise holds."""

import copy
import warnings

import pytest
import torch
from families import logits_of, make_tokens, perturb
from models.test_build import ATTENTIONS, CASES, build, projection
from peft import LoraConfig
from typer.testing import CliRunner

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, find_sites
from hfpatch.analysis.heads import head_weights
from hfpatch.analysis.norms import query_sizes
from hfpatch.cli.app import app
from hfpatch.promises import run
from hfpatch.surgery.budget import attention_modules, count_added
from hfpatch.tinyworld import checkpoint

# path -> (settings, the matrices below the projection of a query alone)
PATHS = {
    "identity": ({"path": "identity"}, []),
    "residual": ({"path": "residual"}, ["paths.query.f"]),
    "nonlinear": ({}, ["paths.query.f.up", "paths.query.f.down"]),
    "weight": ({"anchor": "weight"}, ["paths.query.anchor", "paths.query.f.up", "paths.query.f.down"]),
    "fused": ({"fused": True}, ["paths.query.f.up", "paths.query.f.down"]),
}
OUTPUTS = {"gpt2": "c_proj", "gpt_neox": "dense", "llama": "o_proj", "mixtral": "o_proj"}
STACK = [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()]


def lora(model, **options):
    return LoraConfig(r=3, lora_alpha=6, target_modules=attention_modules(model), **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_the_matrices_of_the_attention_are_named(case, path):
    settings, inside = PATHS[path]
    fused = projection(case) != "q_proj"
    names = [f"{projection(case)}.{part}" for part in [*(["rest"] if fused else []), *inside]]
    names += [] if fused else ["k_proj", "v_proj"]
    model, at = build(case, **settings), ATTENTIONS[case].format(1)
    expected = [f"{at}.{name}" for name in [*names, OUTPUTS[case]]]
    assert find_sites(model)[1].linear_paths == expected
    hfpatch.patch(model, lora(model))
    assert find_sites(model)[1].linear_paths == expected
    widths = [sum(model.get_submodule(f"{name}.base_layer").weight.shape) for name in expected]
    cost = 2 * sum(widths)  # of a rank
    assert hfpatch.patch_summary(model).added == 3 * cost
    hfpatch.unpatch(model)
    assert count_added(model, [lora(model)]) == 3 * cost


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_lora_inside_a_path_is_its_matrix_moved(case, path):
    """The reference is the model without adapters, whose matrices took B A·(alpha/r) in."""
    model, tokens = build(case, **PATHS[path][0]), make_tokens()
    merged = copy.deepcopy(model)
    before = logits_of(model, tokens)
    hfpatch.patch(model, lora(model))
    assert torch.equal(logits_of(model, tokens), before)  # fused too: the joint product is the same
    perturb(model)
    with torch.no_grad():
        for name in attention_modules(merged):
            layer, plain = model.get_submodule(name), merged.get_submodule(name)
            delta = 2 * layer.lora_B["lora"].weight @ layer.lora_A["lora"].weight
            plain.weight += delta.T if hasattr(plain, "nf") else delta
    expected = logits_of(merged, tokens)
    assert float((expected - before).abs().max()) > 1e-2
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["preserving", "literal"])
@pytest.mark.parametrize("path", PATHS)
def test_the_anchor_of_a_nonlinear_query_is_what_the_model_itself_takes_for_the_query(path, form):
    model = build("llama", **PATHS[path][0])
    name = f"{ATTENTIONS['llama'].format(0)}.q_proj"
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        anchor = model.get_submodule(name)(x)
    hfpatch.patch(model, NonlinearQueryConfig(form=form))
    perturb(model)
    layer = model.get_submodule(ATTENTIONS["llama"].format(0)).hfpatch_query
    with torch.no_grad():
        f = layer.configs["nonlinear_query"].nonlinear("query", layer.parts("nonlinear_query"), x)
        expected = (2 * anchor + f) / 2 if form == "preserving" else (anchor + f) / 2
        torch.testing.assert_close(model.get_submodule(name)(x), expected)


def without_compile(monkeypatch, *, features):
    """Run the promises but for those that take longest; test_catalogue.py has compiled scratch models."""
    left_out = {"torch.compile", *([] if features else ["PEFT's features"])}
    monkeypatch.setattr(run, "PROMISES", [entry for entry in run.PROMISES if entry[0] not in left_out])


ALTERNATING = [  # each method in every architecture and on every path; the second half where time is no matter
    pytest.param(case, path, (i + j) % 2, marks=[pytest.mark.slow] if (i + j // 2) % 2 else [])
    for i, case in enumerate(CASES)
    for j, path in enumerate(PATHS)
]


@pytest.mark.parametrize(("case", "path", "method"), ALTERNATING)
def test_the_promises_hold(case, path, method, monkeypatch, request):
    without_compile(monkeypatch, features=request.node.get_closest_marker("slow"))
    report = hfpatch.check(build(case, **PATHS[path][0]), STACK[method])
    assert report.passed, str(report)
    skip, x = "the content skip reaches the residual", "x~ reaches query, key and value"
    idle = [*([] if method == 0 else [x, skip]), "temperatures scale their own heads"]
    assert [v.promise for v in report.verdicts if "does not apply" in v.measured] == idle


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("identity", "layers.0.self_attn.q_proj is not one matrix; it contains none"),
        ("residual", r"q_proj is not one matrix; name those inside it: \S+q_proj.paths.query.f \("),
    ],
)
def test_a_query_matrix_that_is_not_there_is_one_clear_line(path, message):
    model = build("llama", **PATHS[path][0])
    state = list(model.state_dict())
    for attempt in (
        lambda: hfpatch.patch(model, LoraConfig(target_modules=["q_proj", "v_proj"])),
        lambda: hfpatch.match_lora_rank(model, budget=1000, target_modules=["q_proj", "v_proj"]),
    ):
        with pytest.raises(HfpatchError, match=message):
            attempt()
    assert list(model.state_dict()) == state
    assert not hasattr(model, "peft_config")
    hfpatch.patch(model, LoraConfig(target_modules=["k_proj", "v_proj"]))
    hfpatch.unpatch(model)
    hfpatch.patch(model, LoraConfig(target_modules="all-linear"))


def test_the_matrix_of_a_path_with_lora_in_it():
    model = build("llama", anchor="weight")
    hfpatch.patch(model, lora(model))
    perturb(model)
    path = model.model.layers[1].self_attn.q_proj.paths["query"]
    base = path.anchor.base_layer.weight.detach().double().T
    added = 2 * (path.anchor.lora_B["lora"].weight @ path.anchor.lora_A["lora"].weight).detach().double().T
    for patched, expected in ((False, base / 2), (True, (base + added) / 2)):
        actual = head_weights(model, patched=patched)[1].query
        torch.testing.assert_close(actual, expected.view(32, 4, 8).movedim(1, 0), rtol=1e-5, atol=1e-6)


def test_check_on_the_folder(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    promises, features = run.PROMISES, "PEFT's features"  # of a twin, whichever model is checked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("gpt_neox", anchor="weight").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoint("gpt-neox")).save_pretrained(tmp_path)
    for arguments, some in (([], [features]), (["--config-only"], [])):
        some += ["no-op at init", "save and load"]
        monkeypatch.setattr(run, "PROMISES", [entry for entry in promises if entry[0] in some])
        result = CliRunner().invoke(app, ["check", str(tmp_path), *arguments])
        assert result.exit_code == 0, result.output
        assert result.output.count("ok  ") == 2 * len(some), result.output
        assert "FAIL" not in result.output
    hfpatch.save_patch(hfpatch.patch(build("gpt_neox", anchor="weight"), STACK), tmp_path / "patch")
    line = CliRunner().invoke(app, ["export", str(tmp_path / "patch"), "--model", str(tmp_path)])
    assert isinstance(line.exception, HfpatchError)
    assert "only patches of stock models can be exported" in str(line.exception)
    assert not (tmp_path / "patch-standalone").exists()


@pytest.mark.parametrize("path", ["residual", "weight", "fused"])
def test_the_size_of_the_models_own_f_is_heard_through_lora(path):
    model, batch = build("gpt2", **PATHS[path][0]), {"input_ids": make_tokens()}
    before = query_sizes(model, [batch])
    hfpatch.patch(model, lora(model))
    assert query_sizes(model, [batch]) == before
    perturb(model)
    assert [layer.size for layer in query_sizes(model, [batch])] != [layer.size for layer in before]
