"""Benchmarks at their smallest sizes: the counts and decisions beside their times are those of the formulas."""

import json
import os
import runpy
import sys
from pathlib import Path

import forked
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hfpatch.evaluation.tasks import load_tasks
from hfpatch.tinyworld import checkpoint

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SIZES = ["--hidden", "32", "--layers", "1", "--heads", "4", "--vocabulary", "64", "--rows", "1", "--length", "8"]


@pytest.fixture
def start(monkeypatch, capsys):
    """Run a benchmark as a program, in this process, which has imported everything; return what it prints."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setitem(sys.modules, "evaluation", None)  # absent again after the test
    threads, environment = torch.get_num_threads(), dict(os.environ)

    def run(name, *options):
        sys.modules.pop("evaluation", None)  # agreement.py imports evaluation.py
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)
    for variable in os.environ.keys() - environment:  # a benchmark sets variables of its process
        del os.environ[variable]
    os.environ.update(environment)


@pytest.fixture
def small(tmp_path):
    """Save a Llama with a tokenizer. Grouped heads: 4 of 8 wide for queries, 2 for keys and values; an MLP of 48."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("gpt-neox"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=48, vocab_size=len(tokenizer))
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_step_time_gives_a_ratio_for_every_method(start):
    printed = json.loads(start("step_time", *SIZES, "--rounds", "2", "--json"))
    rows = {row["method"]: row for row in printed["rows"]}
    assert rows["lora"]["ratio"] == 1
    assert rows["pre_projection"]["trainable"] == 2 * 32 * 40
    assert rows["pre_projection_skip"]["trainable"] == 2 * 32 * 40 + 32 * 32
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows.values())


def test_evaluation_measures_a_models_own_weights_against_its_own_bound(start, small, tmp_path):
    tokenizer, out = AutoTokenizer.from_pretrained(small), tmp_path / "speed.json"
    options = ["--model", small, "--tasks", "tinyworld_cloze", "--requests", "3", "--peers", "1"]
    start("evaluation", *options, "--rounds", "1", "--dtype", "bfloat16", "--no-start", "--no-memory", "--out", out)
    (row,) = json.loads(out.read_text(encoding="utf-8"))["scoring"]
    assert (row["shape"], row["dtype"]) == ("small", "bfloat16")
    apart = row["distance_to_float32"]  # rounding alone
    assert set(apart) == {"hfpatch", "hflm-1"}
    assert all(0 < distance["mean"] <= distance["largest"] < 1 for distance in apart.values())
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    task = load_tasks(["tinyworld_cloze"])["tinyworld_cloze"]
    task.build_all_requests(limit=row["requests"], rank=0, world_size=1)
    operations = 0
    for request in task.instances:
        context, whole = request.args[0].rstrip(), "".join(request.args)
        given, total = (len(tokenizer(text)["input_ids"]) for text in (context, whole))
        tokens = total - 1
        operations += 2 * linear * tokens + 4 * 32 * 2 * tokens * (tokens + 1) // 2
        operations += 2 * 32 * len(tokenizer) * (total - given)
    assert row["operations"] == operations


def test_agreement_counts_differences_of_every_family(start, tmp_path):
    out = tmp_path / "agreement.json"
    options = ["--tasks", "tinyworld_endings", "--tokenizer", "tinyworld", "--requests", "4"]
    options += ["--families", "gpt2,falcon_h1", "--out", out]
    start("agreement", *options)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    pairs = [(row["family"], row["patched"]) for row in rows]
    assert pairs == [(family, patched) for family in ("gpt2", "falcon_h1") for patched in (False, True)]
    assert all(row["largest_excess"] <= 0 and row["other_choices"] == 0 for row in rows)
    written = out.read_bytes()
    assert (start("agreement", *options), out.read_bytes()) == ("", written)


@pytest.mark.parametrize("own_shape", [False, True])
def test_a_profile_of_a_training_step_has_the_rate_of_each_product(start, small, tmp_path, own_shape):
    """Of a made-up shape in fp32, and of a model's own in bf16."""
    out = tmp_path / "profile.json"
    options = ["--model", small, "--autocast", "bfloat16"] if own_shape else ["--shape", "tiny"]
    printed = start("training", *options, "--rows", "2", "--profile", "--json", out)
    profile = json.loads(out.read_text(encoding="utf-8"))
    assert sum(profile["share"].values()) == pytest.approx(1, abs=0.05)
    assert min(profile["share"][kind] for kind in ("matrix products", "attention", "norms", "optimiser")) > 0
    shapes = {(product["rows"], product["in"], product["out"]) for product in profile["products"]}
    sizes = [(32, 16), (32, 48), (48, 32)] if own_shape else [(32, 3 * 32), (4 * 32, 32)]
    assert {(512, *size) for size in [*sizes, (32, 40), (40, 32)]} <= shapes
    assert all(product["gflops"] > 0 for product in profile["products"])
    assert "under the profiler" in printed


def test_inference_gives_the_multiply_adds_beside_the_times(start, tmp_path):
    out = tmp_path / "inference.json"
    start("inference", "--shapes", "tiny", "--seconds", "0.1", "--json", out)
    written = json.loads(out.read_text(encoding="utf-8"))
    rows = {(row["what"], row["variant"]): row for row in written["rows"]}
    token, head = 2 * (12 * 32 * 32 + 2 * 32 * 129), 512 * 32
    added = 2 * (2 * 32 * 40 + 32 * 32)
    assert len(rows) == 12
    assert rows["decoding", "pre + skip"]["multiply_adds"] == pytest.approx(1 + added / (token + head))
    assert rows["decoding", "bare"]["ratio"] == rows["prefill", "bare"]["over_multiply_adds"] == 1
    assert all(row["milliseconds"] > 0 and row["passes"] >= 3 for row in rows.values())
    assert written["provenance"]["processor"]


def test_serving_prepares_a_case_and_gathers_what_was_served(start, tmp_path, monkeypatch):
    """vLLM is in an environment of its own; here is what runs without it."""
    contexts = {"spawn": forked.context()}  # vLLM's threads and settings need processes that are not forks of this one
    monkeypatch.setattr("multiprocessing.get_context", contexts.__getitem__)
    out = tmp_path / "vllm.json"
    assert "prepared gpt2-skip_alone" in start("serving", "prepare", tmp_path, "--only", "gpt2-skip_alone")
    case = tmp_path / "gpt2-skip_alone"
    expected = json.loads((case / "reference.json").read_text(encoding="utf-8"))
    assert [len(row) for row in expected["tokens"]] == [32] * 8
    assert [len(values) + 1 for values in expected["logprobs"]] == [len(row) for row in expected["prompts"]]
    block, skip, head = 12 * 128**2, 128**2, 384 * 128
    assert expected["multiply_adds"] == 2 * (block + skip) + head
    assert 0 < expected["bfloat16"] < 1
    row = {"case": case.name, "mode": "eager", "largest_difference": 1e-6, "equal_tokens": 8, "cached_tokens": 128}
    (case / "served-eager.json").write_text(json.dumps({**row, "kv_bytes_per_token": 2048, "passed": True}))
    assert "1 of 1 passed" in start("serving", "gather", tmp_path, "--json", out)
    assert json.loads(out.read_text(encoding="utf-8"))["cases"][0]["case"] == "gpt2-skip_alone"


def test_the_table_has_the_ratios_of_the_committed_files(start):
    results = BENCHMARKS.parent / "results"
    row = json.loads((results / "evaluation" / "evaluation-amd.json").read_text())["scoring"][0]["cpu"]
    shown = f"{row['times_faster']:.2f} [{row['lowest']:.2f}, {row['highest']:.2f}]"
    assert any(line.startswith("evaluation-amd") and shown in line for line in start("table").splitlines())


def test_growth_fits_exponents_and_draws_them(start, tmp_path):
    path, page = tmp_path / "growth.json", tmp_path / "README.md"
    growth = runpy.run_path(str(BENCHMARKS / "growth.py"))
    points = [
        {"part": "scoring", "curve": "documents", "at": x, "who": who, "x": x, "seconds": [9 * x, times * x**1.5]}
        | {"peak_bytes": 1e6 * x**0.5, "stages": {}}
        for x in (4, 16, 256)
        for who, times in (("hfpatch", 0.1), ("lm-eval", 0.2))
    ]
    fits = growth["exponents"](points)
    assert [(row["what"], round(row["all"], 9), round(row["largest"], 9)) for row in fits] == 2 * [
        ("seconds", 1.5, 1.5),
        ("peak_bytes", 0.5, 0.5),
    ]
    path.write_text(json.dumps({"points": points, "not_measured": [], "exponents": fits}))
    page.write_text("before\n<!-- growth: begin -->\nold\n<!-- growth: end -->\nafter\n")
    start("growth", "--draw", path, "--readme", page)
    assert "| scoring, hfpatch | documents | 4 | 256 | 0.8 to 410 | 1.50 | 1.50 | 2 to 16 | 0.50 |" in page.read_text()


@pytest.mark.slow
def test_training_counts_parameters_and_arithmetic(start, tmp_path):
    forked.context()  # whose server of processes the benchmark takes
    out = tmp_path / "out.json"
    start("training", "--shape", "tiny", "--rounds", "2", "--rows", "2", "--no-memory", "--json", out)
    printed = json.loads(out.read_text())
    added, body, head = 2 * (2 * 32 * 40 + 32 * 32), 2 * (12 * 32 * 32 + 9 * 32 + 4 * 32) + 2 * 32, 512 * 32
    assert printed["parameters"]["ours"] == added
    assert abs(printed["parameters"]["lora"] / added - 1) < 0.05
    assert printed["arithmetic"] == pytest.approx(2 + 3 * added / (body + head))
    assert all(0 < value["lowest"] <= value["median"] <= value["highest"] for value in printed["ratios"].values())


@pytest.mark.slow
def test_training_compares_activations_and_pretraining(start, tmp_path):
    forked.context()  # as above
    out, steps = tmp_path / "out.json", ["--rounds", "1", "--rows", "2", "--no-memory", "--json"]
    start("training", "--shape", "tiny", "--activations", *steps, out)
    written = json.loads(out.read_text())
    assert set(written["seconds"]) == {"ours", "all_kept", "lora"}
    kept = written["kept_bytes_a_layer_and_token"]
    # σ(W_up x) of both layers, and the norm of the second; that of the first has no gradient
    assert kept["all_kept"] - kept["ours"] == 4 * (2 * 40 + 32) / 2
    start("training", "--shape", "tiny", "--scratch", *steps, out)
    ratios = json.loads(out.read_text())["ratios"]
    assert all(ratios[f"scratch_over_{peer}"]["median"] > 0 for peer in ("plain", "plain_compiled"))


@pytest.mark.slow
def test_the_checks_of_a_gpu_pass_on_a_cpu(tmp_path):
    options = ["--device", "cpu", "--shapes", "tiny,unknown", "--tasks", "arc_easy", "--requests", "8", "--rounds", "1"]
    options += ["--rows", "1", "--threads", "1", "--no-compile", "--readme", tmp_path / "README.md"]
    (tmp_path / "README.md").write_text("<!-- gpu: begin -->\nold\n<!-- gpu: end -->\n", encoding="utf-8")
    assert forked.python([BENCHMARKS / "gpu.py", "--out", tmp_path, *options]).returncode == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["measurements"]}
    checks = [row["passed"] for name, row in rows.items() if name.startswith("correctness")]
    assert checks == [True] * 6
    assert rows["training tiny"]["trainable"]["pre_projection"] == 2 * (2 * 32 * 40 + 32 * 32)
    assert rows["scoring unknown arc_easy"]["failed"] == "KeyError: 'unknown'"
    assert "\nold\n" not in (tmp_path / "README.md").read_text(encoding="utf-8")
