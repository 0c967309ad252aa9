import ast
import warnings
from functools import partial
from pathlib import Path

import families
import pytest
import torch
from own_methods import defined, forgotten
from peft import LoraConfig, VeraConfig, get_peft_model
from transformers import AutoConfig

import hfpatch
from hfpatch import PreProjectionConfig, patch
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import evaluate
from hfpatch.evaluation.cache import ScoreCache, model_key
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.scorer import TokenRequest
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.support.sources import COMPUTING
from hfpatch.twins import random_model, shrink

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
LORA_A = f"{Q_PROJ}.lora_A.default.weight"
FIRST, SECOND = TokenRequest((1, 2, 3), (3, 4)), TokenRequest((1, 2, 3), (4,))


def test_scores_are_read_back_to_the_last_bit(tmp_path):
    path = tmp_path / "new" / "scores.jsonl"
    kept = ScoreCache(path, {"model": 1})
    assert kept.find(FIRST) is None
    assert not path.exists()
    value = -1 / 3 * 1e5
    kept.add([(FIRST, (value, True))])
    kept.add([(SECOND, (-0.1, False))])
    again = ScoreCache(path, {"model": 1})
    for cache in (kept, again):
        assert cache.find(FIRST) == (value, True)
        assert cache.find(SECOND) == (-0.1, False)
        assert cache.find(TokenRequest((1, 2), (3, 4))) is None
        assert cache.find(TokenRequest((1, 2, 3), (3, 5))) is None


def test_incomplete_and_damaged_lines_are_dropped(tmp_path):
    path = tmp_path / "scores.jsonl"
    kept = ScoreCache(path, {})
    kept.add([(FIRST, (-1.5, True)), (SECOND, (-2.5, False))])
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        again = ScoreCache(path, {})
        scores = [again.find(request) for request in (FIRST, SECOND)]
        assert scores in ([None, None], [(-1.5, True), None])
        again.add([(SECOND, (-9.0, False))])
        assert ScoreCache(path, {}).find(SECOND) == (-9.0, False)
    path.write_text(whole.decode().replace("-1.5, true", "-1.5"), encoding="utf-8")
    assert ScoreCache(path, {}).find(FIRST) is None
    assert ScoreCache(path, {}).find(SECOND) == (-2.5, False)
    ScoreCache(path, {"another": "model"})
    assert not path.exists()


FULL = Path("/dev/full")  # a full disk


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_ends_an_evaluation_if_scores_must_be_saved_and_else_warns():
    with pytest.raises(HfpatchError, match=r"log-likelihoods cannot be saved .*free space or choose another folder"):
        ScoreCache(FULL, {}).add([(FIRST, (-1.0, True))])
    kept = ScoreCache(FULL, {}, optional=True)
    with pytest.warns(UserWarning, match="log-likelihoods cannot be saved"):
        kept.add([(FIRST, (-1.0, True))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.add([(SECOND, (-2.0, True))])
    assert kept.find(SECOND) == (-2.0, True)


def lora_model(config=None):
    torch.manual_seed(0)
    config = config or LoraConfig(target_modules=["q_proj"])
    return get_peft_model(families.make_model("llama"), config).eval()


LLAMA = partial(families.make_model, "llama")
VERA = partial(lora_model, VeraConfig(target_modules=["q_proj"], r=2))
ATTENTION = "model.layers.0.self_attn"
CHANGES = {
    "dtype": (LLAMA, lambda model: model.to(torch.bfloat16)),
    "patch": (LLAMA, lambda model: patch(model, PreProjectionConfig())),
    "values of a patch": (lambda: patch(LLAMA(), PreProjectionConfig()), families.perturb),
    "parameter": (LLAMA, lambda model: model.lm_head.weight[0, 0].add_(1)),
    "rotary_frequencies": (LLAMA, lambda model: model.model.rotary_emb.inv_freq.mul_(1.01)),
    "rotary_scale": (LLAMA, lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5)),
    "attention_scale": (LLAMA, lambda model: setattr(model.get_submodule(ATTENTION), "scaling", 0.3)),
    "norm_epsilon": (LLAMA, lambda model: setattr(model.model.norm, "variance_epsilon", 0.1)),
    "activation": (LLAMA, lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh())),
    "configuration": (
        LLAMA,
        lambda model: setattr(model.config, "rope_parameters", {"rope_type": "default", "rope_theta": 5}),
    ),
    "attention_kernel": (LLAMA, lambda model: model.set_attn_implementation("eager")),
    "router_bias": (
        lambda: random_model(shrink(AutoConfig.for_model("deepseek_v3"))),
        lambda model: model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").add_(1),
    ),
    "lora_factor": (lora_model, lambda model: model.get_parameter(LORA_A).mul_(2)),
    "lora_scale": (lora_model, lambda model: model.get_submodule(Q_PROJ).scaling.update(default=3.0)),
    "adapter_off": (lora_model, lambda model: model.base_model.disable_adapter_layers()),
    "shared_projection": (VERA, lambda model: model.base_model.vera_A["default"].mul_(2)),
}
PRECISIONS = {"tf32": torch.backends.cuda.matmul, "bf16": torch.backends.mkldnn.matmul}


@pytest.mark.parametrize("change", [*CHANGES, *PRECISIONS])
@torch.no_grad()
def test_the_key_is_stable_and_changes_with_all_that_changes_a_score(change, request):
    make, apply = CHANGES.get(change, (LLAMA, None))
    model = make()
    before = model_key(model)
    assert model_key(make()) == before
    model(torch.tensor([[5, 6, 7]]))
    assert model_key(model) == before
    if apply is None:
        backend = PRECISIONS[change]
        request.addfinalizer(partial(setattr, backend, "fp32_precision", backend.fp32_precision))
        backend.fp32_precision = change
    else:
        apply(model)
    assert model_key(model) != before


def test_the_formula_of_a_method_of_ones_own_is_part_of_the_key():
    def key(query):
        with forgotten():
            model = patch(families.make_model("llama"), defined(method="of_the_key", query=query)(), seed=0)
            return model_key(model)

    def right(self, parts, q, x, site):
        return q + parts["b"](parts["a"](x))

    def other(self, parts, q, x, site):
        return q + 2 * parts["b"](parts["a"](x))

    assert key(right) == key(right)
    before, after = key(right), key(other)
    assert {name for name in before if before[name] != after[name]} == {"modules_code"}


def test_only_sources_that_compute_are_part_of_the_key():
    """What they import of hfpatch computes too, or is known to compute nothing."""
    package = Path(hfpatch.__file__).parent
    parts = [package / part for part in COMPUTING]
    files = {file for part in parts for file in ([part] if part.is_file() else part.rglob("*.py"))}
    assert package / "evaluation" / "model.py" in files
    assert package / "reporting" / "document.py" not in files
    allowed = ("errors", "support", "recipes", "results", "tinyworld", "evaluation.cache")
    allowed += ("data.tokenizer",)  # of which only the check of a tokenizer
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hfpatch."):
                module = node.module.removeprefix("hfpatch.")
                source = package.joinpath(*module.split("."))
                assert module.startswith(allowed) or {source.with_suffix(".py"), source / "__init__.py"} & files, module


def evaluated(model, tokenizer, data_dir, folder, **options):
    chosen = EvaluationSettings(tasks=("arc_easy", "wikitext", "paper_hellaswag"), token_budget=100)
    storage = Storage(folder, answers=folder / "answers")
    return evaluate(model, tokenizer, select(chosen, data_dir), storage=storage, **options)


def test_an_interrupted_evaluation_goes_on_within_a_task_and_ends_the_same(
    tokenizer, data_dir, tmp_path, monkeypatch, support
):
    model = support.gpt_neox()
    expected = evaluated(model, tokenizer, data_dir, tmp_path / "whole")

    def stop(task, done, total):
        if task == "wikitext" and done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluated(model, tokenizer, data_dir, tmp_path / "cut", on_scored=stop)
    assert not (tmp_path / "cut" / "wikitext.jsonl").exists()
    (file,) = (tmp_path / "cut" / "answers").glob("wikitext-*.jsonl")
    (whole,) = (tmp_path / "whole" / "answers").glob("wikitext-*.jsonl")
    assert 2 < file.read_text().count("\n") < whole.read_text().count("\n")
    calls = []
    again = evaluated(model, tokenizer, data_dir, tmp_path / "cut", on_scored=lambda *call: calls.append(call))
    assert again == expected
    assert {task for task, _, _ in calls} == {"wikitext", "paper_hellaswag"}
    for task in expected:
        assert (tmp_path / "cut" / f"{task}.jsonl").read_bytes() == (tmp_path / "whole" / f"{task}.jsonl").read_bytes()
    monkeypatch.setattr(HfpatchLM, "_scorer", None)  # nothing is scored any more
    assert evaluated(model, tokenizer, data_dir, tmp_path / "whole") == expected
