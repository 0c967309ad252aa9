"""Families that other packages declare, and models whose code comes with them."""

import json
import sys

import forked
import pytest
from families import make_config, make_model
from own_methods import installed
from transformers import AutoModelForCausalLM

from hfpatch import PreProjectionConfig, find_sites, patch
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.sites import family as registry
from hfpatch.sites.family import load_plugins
from hfpatch.surgery.bases import load_base

MODULE = """
from hfpatch import Family
from hfpatch.sites import per_head

def family(name, *types):
    return Family(name=name, model_types=types, layers="layers", attention="attention",
                  qkv=per_head("query_key_value"), output="dense")

ONE = family("theirs", "their_neox")
SEVERAL = [ONE, family("others", "other_neox")]
REPEATED = family("again", "gpt_neox")
OTHER = "a word"
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a package whose entry point names an object of MODULE, and forget it again."""

    def install(what):
        installed(tmp_path, registry.GROUP, "their_families", MODULE, theirs=what)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(registry, "DECLARED", dict(registry.DECLARED))
        load_plugins.cache_clear()

    yield install
    sys.modules.pop("their_families", None)
    load_plugins.cache_clear()


def theirs(model_type="their_neox"):
    model = make_model("gpt_neox")
    model.config.model_type = model_type
    return model


@pytest.mark.parametrize(("what", "kinds"), [("ONE", ["their_neox"]), ("SEVERAL", ["their_neox", "other_neox"])])
def test_an_installed_package_declares_families(plugin, what, kinds):
    plugin(what)
    for kind in kinds:
        assert [site.path for site in find_sites(theirs(kind))] == [s.path for s in find_sites(make_model("gpt_neox"))]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("MISSING", r"entry point 'theirs' \(their_families:MISSING\) cannot be loaded: .*MISSING"),
        ("OTHER", r"entry point 'theirs' .* must be a hfpatch\.Family or several"),
        ("REPEATED", "entry point 'theirs' .*'gpt_neox' is declared already, by family 'gpt-neox'"),
    ],
)
def test_a_broken_plugin_is_one_line_with_its_name(plugin, what, message):
    plugin(what)
    with pytest.raises(HfpatchError, match=message):
        find_sites(make_model("gpt_neox"))


CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A model folder with its own code, as trust_remote_code models have."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = make_model("llama")
    folder = tmp_path / "own"
    model.save_pretrained(folder)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    config = make_config("llama").to_dict() | {
        "model_type": "own_llama",
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_with_its_own_code_is_patched_like_any_other(own_code):
    model = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert [site.path for site in find_sites(model)] == [site.path for site in find_sites(make_model("llama"))]
    patch(model, PreProjectionConfig(content_skip=True))


def test_its_code_is_not_run_unasked(own_code, tmp_path):
    with (own_code / "configuration_own.py").open("a") as code:
        code.write(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    with pytest.raises(HfpatchError, match="contains code of its own"):
        load_base(str(own_code))
    assert not (tmp_path / "sprung").exists()
    train_tokenizer(["a mill"], 300).save_pretrained(own_code)
    assert type(load_base(str(own_code), trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert (tmp_path / "sprung").exists()
    done = forked.python(["-m", "hfpatch", "check", own_code, "--config-only"])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
