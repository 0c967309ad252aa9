"""PEFT learns the methods as soon as both packages are imported."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb

from hfpatch import PreProjectionConfig, patch, save_patch

ROOT = Path(__file__).parents[2]


def run(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


ORDERS = """
import copy, importlib, importlib.metadata, importlib.util, itertools, pickle, sys
from importlib.machinery import ModuleSpec

class Methods:  # in the place of hfpatch.methods, which would import torch
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "hfpatch.methods" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        import peft
        peft.PeftModel.known.append("hfpatch")

def lazily():
    if "peft" not in sys.modules:
        spec = importlib.util.find_spec("peft")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules["peft"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["peft"])

STEPS = {
    "hfpatch": lambda: importlib.import_module("hfpatch"),
    "find": lambda: importlib.util.find_spec("peft"),
    "pickle": lambda: pickle.loads(pickle.dumps(copy.deepcopy(importlib.util.find_spec("peft").loader))),
    "data": lambda: importlib.util.find_spec("peft").loader.is_package("peft"),
    "metadata": lambda: list(importlib.metadata.distributions()),
    "invalidate": importlib.invalidate_caches,
    "lazily": lazily,
    "peft": lambda: importlib.import_module("peft.tuners"),
    "reload": lambda: importlib.reload(importlib.import_module("peft")),
}
ALONE = [("hfpatch", *steps, "peft") for n in (0, 1, 2) for steps in itertools.permutations(STEPS, n)]
sys.meta_path.insert(0, Methods())
for order in [*ALONE, *itertools.permutations(("hfpatch", "find", "peft", "reload"))]:
    for name in [name for name in sys.modules if name.split(".")[0] in ("hfpatch", "peft")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "hfpatch" not in type(finder).__module__]
    for step in order:
        STEPS[step]()
    import peft
    assert peft.PeftModel.known == ["hfpatch"], (order, peft.PeftModel.known)
    assert type(peft.__loader__) is type(peft.__spec__.loader) is type(importlib.util.find_spec("peft").loader), order
    assert "hfpatch" not in type(peft.__loader__).__module__, order
    assert not [finder for finder in sys.meta_path if "hfpatch" in type(finder).__module__], order
print("done")
"""
FAKE = {"peft/__init__.py": "from peft.model import PeftModel", "peft/model.py": "class PeftModel:\n    known = []"}


@pytest.mark.parametrize("packed", [False, True])
def test_every_order_of_imports_and_queries_registers_the_methods_once(tmp_path, packed):
    """Asking whether there is a PEFT, as transformers does, is no import; run with a PEFT that takes no time."""
    archive_path = tmp_path / "peft.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        for name, text in {**FAKE, "peft/tuners.py": ""}.items():
            archive.writestr(name, text)
        if not packed:
            archive.extractall(tmp_path)
    assert run(f"import sys; sys.path.insert(0, {str(archive_path if packed else tmp_path)!r})\n{ORDERS}") == "done\n"


@pytest.mark.slow
def test_an_adapter_loads_through_transformers_with_import_hfpatch_alone_and_the_import_hook_is_gone(tmp_path):
    model = make_model("gpt2")
    model.save_pretrained(tmp_path / "base")
    patch(model, PreProjectionConfig(content_skip=True))
    perturb(model)
    save_patch(model, tmp_path / "patch")
    torch.save(logits_of(model, make_tokens()), tmp_path / "logits")
    card = (tmp_path / "patch" / "pre_projection" / "README.md").read_text()
    assert "pip install hfpatch" in card
    assert "import hfpatch" in card
    run(
        "import sys; before = list(sys.meta_path)\n"
        "import hfpatch, torch; from transformers import AutoModelForCausalLM\n"
        f"base, adapter = {str(tmp_path / 'base')!r}, {str(tmp_path / 'patch' / 'pre_projection')!r}\n"
        f"tokens, expected = torch.tensor({make_tokens().tolist()}), torch.load({str(tmp_path / 'logits')!r})\n"
        "model = AutoModelForCausalLM.from_pretrained(base).eval()\n"
        "model.load_adapter(adapter)\n"
        "torch.testing.assert_close(model(tokens).logits, expected)\n"
        "import importlib.util, peft\n"
        "model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()\n"
        "torch.testing.assert_close(model(tokens).logits, expected)\n"
        "assert all(finder in sys.meta_path for finder in before)\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('hfpatch')], sys.meta_path\n"
        "assert type(peft.__loader__).__name__ == 'SourceFileLoader' == type(peft.__spec__.loader).__name__\n"
        "assert importlib.util.find_spec('peft').origin == peft.__file__\n"
    )


def test_a_missing_peft_is_reported_as_python_does():
    code = (
        "import sys, hfpatch\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "try:\n    import peft\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert "No module named 'peft'" in run(code)
