"""examples/own-package, installed: its method and its architecture, without a file of hfpatch that knows them."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from own_methods import forgotten
from peft import LoraConfig

import hfpatch
from hfpatch.export.write import write_model
from hfpatch.promises import run
from hfpatch.recipes.comparison import Recipe
from hfpatch.sites import family
from hfpatch.surgery.budget import attention_modules
from hfpatch.surgery.methods import build_method
from hfpatch.tuners import registration as methods

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the package as pip does, into a folder."""
    pytest.importorskip("setuptools", reason="pip needs it to build the package, without network")
    source, target = tmp_path_factory.mktemp("source") / "own-package", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "own-package", source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--quiet", "--target", str(target)]
    pip = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(autouse=True)
def _known(installed, monkeypatch):
    """Let this process find the package, and forget it afterwards."""
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    monkeypatch.setattr(family, "DECLARED", dict(family.DECLARED))
    with forgotten():
        for plugins in (methods, family):
            plugins.load_plugins.cache_clear()
        methods.load_plugins()
        yield
    for plugins in (methods, family):
        plugins.load_plugins.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        del sys.modules[name]


def sage():
    from own_package.modeling import SageConfig, SageForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2}
    return SageForCausalLM(SageConfig(**sizes, **heads)).eval()


def make(case):
    return sage() if case == "sage" else make_model(case)


def config(model, **options):
    """Return the configuration that a recipe names."""
    recipe = Recipe(name="own", methods={"baseline": [], "mix": [{"type": "head_mix", **options}]})
    return build_method(model, recipe.methods, "mix").configs[0]


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama", "gemma2", "sage"])
def test_every_promise_holds_of_the_method(case, monkeypatch):
    long = {"sage": (), "llama": ("torch.compile",)}.get(case, ("torch.compile", "PEFT's features"))
    monkeypatch.setattr(run, "PROMISES", [entry for entry in run.PROMISES if entry[0] not in long])
    model = make(case)
    report = hfpatch.check(model, config(model))
    assert report.passed, str(report)


@pytest.mark.parametrize("method", [hfpatch.PreProjectionConfig(content_skip=True), hfpatch.NonlinearQueryConfig()])
def test_the_promises_hold_of_the_architecture(method, monkeypatch):
    about = ("attention is", "pure", "x~", "the content", "projections")
    monkeypatch.setattr(run, "PROMISES", [entry for entry in run.PROMISES if entry[0].startswith(about)])
    report = hfpatch.check(sage(), method)
    assert report.passed, str(report)


def test_the_architecture_reads_its_cache():
    """Else the check takes it for a model that disagrees with its cache by itself."""
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with_cache, without = (sage().generate(make_tokens(), use_cache=use, **options).logits for use in (True, False))
    torch.testing.assert_close(with_cache, without)


@pytest.mark.parametrize("shared", ["head", "column"])
@torch.no_grad()
def test_the_method_is_its_formula(shared):
    """Head h of a column gets the sum of M_gh over all heads g: one M, or one for each column of a head."""
    model = make_model("llama")
    expected, tokens = copy.deepcopy(model), make_tokens()
    hfpatch.patch(model, config(model, shared=shared))
    assert hfpatch.patch_summary(model).added == 2 * 4 * 4 * (1 if shared == "head" else 8)
    perturb(model, std=0.3)
    for number, layer in enumerate(expected.model.layers):
        weight = model.get_parameter(f"model.layers.{number}.self_attn.hfpatch_head_mix.head_mix_mix.head_mix.weight")

        def mixed(module, args, m=weight):
            heads = args[0].unflatten(-1, (4, -1))
            out = heads.clone()
            for h in range(4):
                for k in range(8):
                    row = m[h] if shared == "head" else m[4 * k + h]
                    out[..., h, k] += (heads[..., k] * row).sum(-1)
            return (out.flatten(-2),)

        layer.self_attn.o_proj.register_forward_pre_hook(mixed)
    actual, wanted = logits_of(model, tokens), logits_of(expected, tokens)
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(wanted, logits_of(make_model("llama"), tokens), atol=1e-2)


def stacked(case):
    """Return a model with the method between a pre-projection and a LoRA, off their initial values."""
    model = make(case)
    lora = LoraConfig(r=2, target_modules=attention_modules(model))
    hfpatch.patch(model, [hfpatch.PreProjectionConfig(content_skip=True), config(model), lora])
    perturb(model)
    return model


def test_the_architecture_is_exported(tmp_path):
    """What is written computes what the patched model computes; its file imports the stock classes of the package."""
    written = write_model(stacked("sage"), tmp_path)
    assert (written.model_class, written.merged) == ("HfpatchSageForCausalLM", [])
