"""What an evaluation compares: labels, and where models are loaded."""

from types import SimpleNamespace

import pytest

from hfpatch.errors import HfpatchError
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.runs import Progress, evaluate, variants
from hfpatch.runs.variants import Variants, model_variants, short_names
from hfpatch.surgery.placement import Placement


def test_models_are_called_by_what_distinguishes_them():
    named = [ModelSettings(name=name) for name in ("x/gpt2", "gpt2", "y/gpt2", "y/small")]
    named.append(ModelSettings(name="y/small", revision="refs/pr/1"))
    labels = [variant.label for variant in model_variants(named)]
    assert labels == ["x-gpt2", "gpt2", "y-gpt2", "small", "small@refs-pr-1"]
    for options in ({"patches": ["patch"]}, {"scales": [0.5]}, {"baseline": True}):
        with pytest.raises(HfpatchError, match="patches and their scales go with one base"):
            evaluate(*named, **options, settings=EvaluationSettings(tasks=["tinyworld_cloze"]))
    assert short_names([("p", "q"), ("r", "q"), ("s",)]) == ["p-q", "r-q", "s"]


def test_what_is_asked_for_goes_to_transformers(monkeypatch):
    given = []
    loaded = SimpleNamespace(model=None)
    monkeypatch.setattr(variants, "load_base", lambda name, **options: given.append(options) or loaded)
    monkeypatch.setattr(variants, "place_base", lambda base, device: None)
    monkeypatch.setattr(variants, "require_causal", lambda model, name: None)
    model = ModelSettings(name="some/model", device_map="cpu")
    for asked in (Placement(), Placement("auto"), Placement(tp=True)):
        monkeypatch.setattr(variants, "start_ranks", lambda split: SimpleNamespace(count=2))
        monkeypatch.setattr(Placement, "check", lambda self, processes: None)
        made = Variants(model_variants([model]), asked, Progress())
        made.load(model)
    assert [options["device_map"] for options in given] == ["cpu", "auto", "cpu"]
    assert [options["tensor_parallel"] for options in given] == [None, None, 2]
