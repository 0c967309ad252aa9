from types import SimpleNamespace

from tiny_runs import small_recipe

from hfpatch.runs.plan import plan_runs
from hfpatch.runs.records import Identity
from hfpatch.runs.session import open_runs


def test_a_methods_code_is_hashed_once_before_its_runs_are_there(tmp_path):
    training = {"steps": 2, "warmup_steps": 1, "seeds": [0, 1, 2]}
    methods = {"baseline": [], "lora": [{"type": "lora", "r": 2}], "ia3": [{"type": "ia3"}]}
    recipe = small_recipe("tinyworld/gpt-neox", training=training, methods=methods)
    out, expected = tmp_path / "out", ["baseline · seed 0", "lora · seed 0", "ia3 · seed 0"]
    identified, shared = [], Identity(text="a" * 64)

    def identify(run):
        identified.append(run.name)
        return shared

    loaded = SimpleNamespace(plans={}, shared=shared, matmul=None, identify=identify)
    for number in (0, 1):
        identified.clear()
        with open_runs(plan_runs(recipe, out), lambda: loaded, resume=number > 0):
            (out / "runs" / "ia3" / "seed-2").mkdir(parents=True, exist_ok=True)
        assert identified == [*expected, "ia3 · seed 2"][: len(expected) + number]
