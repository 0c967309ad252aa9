"""Every benchmark runs at its smallest size and prints what its users read."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hfpatch.evaluation.tasks import load_tasks
from hfpatch.tinyworld import checkpoint

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SPEND = "import time\nbegin = time.process_time()\nwhile time.process_time() < begin + 0.2: pass\n"
SIZES = ["--hidden", "32", "--layers", "1", "--heads", "4", "--vocabulary", "64", "--rows", "1", "--length", "8"]


@pytest.fixture
def start(monkeypatch, capsys):
    """Run a benchmark as a program, in this process, which has imported everything; return what it prints."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setitem(sys.modules, "evaluation", None)  # absent again after the test
    threads = torch.get_num_threads()

    def run(name, *options):
        sys.modules.pop("evaluation", None)  # agreement.py imports evaluation.py
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def small(tmp_path):
    """Save a Llama with a tokenizer. Grouped heads: 4 of 8 wide for queries, 2 for keys and values; an MLP of 48."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("gpt-neox"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=48, vocab_size=len(tokenizer))
    for each in (LlamaForCausalLM(config), tokenizer):
        each.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_step_time_gives_a_ratio_for_every_method(start):
    printed = json.loads(start("step_time", *SIZES, "--rounds", "2", "--json"))
    rows = {row["method"]: row for row in printed["rows"]}
    assert rows["lora"]["ratio"] == 1
    assert rows["pre_projection"]["trainable"] == 2 * 32 * 40
    assert rows["pre_projection_skip"]["trainable"] == 2 * 32 * 40 + 32 * 32
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows.values())


@pytest.mark.slow
def test_evaluation_compares_time_memory_and_answers(start, tmp_path, monkeypatch):
    """Its processes, which measure their memory, are forks here."""
    run = subprocess.run

    def fork(command, **options):
        here = command[0] == sys.executable
        return forked.python(command[1:], env=options["env"]) if here else run(command, **options)

    monkeypatch.setattr(subprocess, "run", fork)
    out = tmp_path / "speed.json"
    options = ["--shapes", "tiny", "--tasks", "tinyworld_endings", "--tokenizer", "tinyworld", "--requests", "6"]
    printed = start("evaluation", *options, "--rounds", "2", "--no-start", "--profile", "--out", out)
    assert "tinyworld_endings" in printed
    written = json.loads(out.read_text(encoding="utf-8"))
    (row,) = written["scoring"]
    assert written["provenance"]["versions"]["torch"]
    assert row["requests"] % 4 == 0
    assert row["profile"]["matrix products"] > 0
    assert row["profile"]["attention"] > 0
    assert f"attention {row['profile']['attention']:.3f}" in printed
    assert row["agreement"]["largest_excess"] <= 0
    assert row["agreement"]["other_greedy_decisions"] == 0
    for clock in ("wall", "cpu"):
        figures = row[clock]
        peers = {name: seconds for name, seconds in figures["seconds"].items() if name != "hfpatch"}
        assert peers[figures["best_peer"]] == min(peers.values())
        assert 0 < figures["lowest"] <= figures["times_faster"] <= figures["highest"]
        assert figures["ratio_to_bound"] > 1
    assert set(row["peak_bytes"]) == {"hfpatch", "hflm-8"}


def test_evaluation_measures_a_models_own_weights_against_its_own_bound(start, small, tmp_path):
    tokenizer, out = AutoTokenizer.from_pretrained(small), tmp_path / "speed.json"
    options = ["--model", small, "--tasks", "tinyworld_cloze", "--requests", "3", "--peers", "1"]
    start("evaluation", *options, "--rounds", "1", "--dtype", "bfloat16", "--no-start", "--no-memory", "--out", out)
    (row,) = json.loads(out.read_text(encoding="utf-8"))["scoring"]
    assert (row["shape"], row["dtype"]) == ("small", "bfloat16")
    apart = row["distance_to_float32"]  # rounding alone
    assert set(apart) == {"hfpatch", "hflm-1"}
    assert all(0 < each["mean"] <= each["largest"] < 1 for each in apart.values())
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    task = load_tasks(["tinyworld_cloze"])["tinyworld_cloze"]
    task.build_all_requests(limit=row["requests"], rank=0, world_size=1)
    operations = 0
    for request in task.instances:
        context, whole = request.args[0].rstrip(), "".join(request.args)
        given, seen = (len(tokenizer(text)["input_ids"]) for text in (context, whole))
        tokens = seen - 1
        operations += 2 * linear * tokens + 4 * 32 * 2 * tokens * (tokens + 1) // 2
        operations += 2 * 32 * len(tokenizer) * (seen - given)
    assert row["operations"] == operations


def test_agreement_counts_differences_of_every_family(start, tmp_path):
    out = tmp_path / "agreement.json"
    options = ["--tasks", "tinyworld_endings", "--tokenizer", "tinyworld", "--requests", "4"]
    options += ["--families", "gpt2,falcon_h1", "--out", out]
    start("agreement", *options)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    found = [(row["family"], row["patched"]) for row in rows]
    assert found == [(family, patched) for family in ("gpt2", "falcon_h1") for patched in (False, True)]
    assert all(row["largest_excess"] <= 0 and row["other_choices"] == 0 for row in rows)
    written = out.read_bytes()
    assert (start("agreement", *options), out.read_bytes()) == ("", written)


@pytest.mark.slow
def test_training_gives_every_ratio_with_its_facts(start, tmp_path):
    forked.context()  # whose server of processes the benchmark takes
    out = tmp_path / "out.json"
    printed = start("training", "--shape", "tiny", "--rounds", "2", "--rows", "2", "--no-memory", "--json", out)
    told = json.loads(out.read_text())
    assert printed.count("[") == 4
    assert {name: len(seconds) for name, seconds in told["seconds"].items()} == dict.fromkeys(
        ("published", "ours", "lora", "lora_ours", "forward"), 2
    )
    for value in told["ratios"].values():
        assert 0 < value["lowest"] <= value["median"] <= value["highest"]
    added, body, head = 2 * (2 * 32 * 40 + 32 * 32), 2 * (12 * 32 * 32 + 9 * 32 + 4 * 32) + 2 * 32, 512 * 32
    assert told["parameters"]["ours"] == added
    assert told["arithmetic"] == pytest.approx(2 + 3 * added / (body + head))
    assert abs(told["parameters"]["lora"] / added - 1) < 0.05
    assert told["data"]["fill_packed"] > 0.9
    assert told["provenance"]["versions"]["torch"]


@pytest.mark.parametrize("own", [False, True])
def test_a_profile_of_a_training_step_has_the_rate_of_each_product(start, small, tmp_path, own):
    """Of a made-up shape in fp32, and of a model's own in bf16."""
    out = tmp_path / "profile.json"
    options = ["--model", small, "--autocast", "bfloat16"] if own else ["--shape", "tiny"]
    printed = start("training", *options, "--rows", "2", "--profile", "--json", out)
    told = json.loads(out.read_text(encoding="utf-8"))
    assert sum(told["share"].values()) == pytest.approx(1, abs=0.05)
    assert min(told["share"][kind] for kind in ("matrix products", "attention", "norms", "optimiser")) > 0
    shapes = {(each["rows"], each["in"], each["out"]) for each in told["products"]}
    sizes = [(32, 16), (32, 48), (48, 32)] if own else [(32, 3 * 32), (4 * 32, 32)]
    assert {(512, *size) for size in [*sizes, (32, 40), (40, 32)]} <= shapes
    assert all(each["gflops"] > 0 for each in told["products"])
    assert "under the profiler" in printed


def test_the_table_has_the_ratios_of_the_committed_files(start):
    lines = start("table").splitlines()
    folder = BENCHMARKS.parent / "results"
    row = json.loads((folder / "evaluation" / "evaluation-amd.json").read_text())["scoring"][0]["cpu"]
    shown = f"{row['times_faster']:.2f} [{row['lowest']:.2f}, {row['highest']:.2f}]"
    (line,) = (each for each in lines if each.startswith("evaluation-amd") and "70m lambada_openai: times" in each)
    assert line.split()[1] == "float32"
    assert line.endswith(f"hflm-8                 {shown}")
    told = json.loads((folder / "training" / "training-70m.json").read_text())
    assert any(line.endswith(f"{told['memory']['ours'] / told['memory']['lora']:.2f}") for line in lines)
    assert {line.split()[0] for line in lines[1:]} >= {"training-160m-amd", "inference-amd", "start-amd", "evaluation"}


def test_a_committed_benchmark_is_run_again_with_other_data(start, tmp_path, monkeypatch):
    asked = []
    source = BENCHMARKS.parent / "results" / "training" / "training-70m-amd.json"

    def run(command, *, check):
        asked.extend(command)
        Path(command[command.index("--json") + 1]).write_bytes(source.read_bytes())

    monkeypatch.setattr(subprocess, "run", run)
    printed = start("table", "--run", "training-70m-amd", "--data-dir", "there", "--out", tmp_path)
    assert asked[1:3] == [str(BENCHMARKS / "training.py"), "--shape"]
    assert asked[asked.index("--text") + 1] == "there/wikitext/wikitext-2-raw-v1/validation.jsonl"
    assert asked[-1] == str(tmp_path / "training-70m-amd.json")
    assert "LoRA under HF Trainer" in printed
    with pytest.raises(SystemExit):
        start("table", "--run", "unknown")


def test_inference_gives_the_multiply_adds_beside_the_times(start, tmp_path):
    out = tmp_path / "inference.json"
    start("inference", "--shapes", "tiny", "--seconds", "0.1", "--json", out)
    told = json.loads(out.read_text(encoding="utf-8"))
    rows = {(row["what"], row["variant"]): row for row in told["rows"]}
    token, head = 2 * (12 * 32 * 32 + 2 * 32 * 129), 512 * 32
    added = 2 * (2 * 32 * 40 + 32 * 32)
    assert len(rows) == 12
    assert rows["decoding", "pre + skip"]["multiply_adds"] == pytest.approx(1 + added / (token + head))
    assert rows["decoding", "bare"]["ratio"] == rows["prefill", "bare"]["over_multiply_adds"] == 1
    assert all(row["milliseconds"] > 0 and row["passes"] >= 3 for row in rows.values())
    assert told["provenance"]["processor"]


@pytest.mark.slow
def test_start_counts_the_cpu_time_of_processes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "start.json"
    names = runpy.run_path(str(BENCHMARKS / "start.py"))
    assert all(names["cpu_seconds"](name) > 1 for name in ("minimal training script", "hfpatch train"))
    names["COMMANDS"].update({"minimal training script": ["-c", SPEND], "hfpatch train": ["-c", SPEND * 2]})
    options = ["--rounds", "2", "--only", "minimal training script,hfpatch train", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["start.py", *options])
    names["main"]()
    told = json.loads(out.read_text(encoding="utf-8"))
    assert {name: len(seconds) for name, seconds in told["seconds"].items()} == dict.fromkeys(options[3].split(","), 2)
    script, command = (min(told["seconds"][name]) for name in options[3].split(","))
    assert told["ratios"] == {"hfpatch train": pytest.approx(command / script)}
    assert told["ratios"]["hfpatch train"] > 1.3
    assert "x minimal training script" in capsys.readouterr().out


def test_precision_makes_a_row_for_each_method_and_dtype():
    names, runs = runpy.run_path(str(BENCHMARKS / "precision.py")), {}
    for seed in (1, 2):
        survival = {"lora_A": 0.25 * seed, "all": 0.5}
        runs[str(seed)] = {"train": {"update_survival": survival, "final_eval_loss": 1.0 + seed}}
    methods = {"baseline": {"runs": {"0": {"train": None}}}, "lora": {"runs": runs, "parameters": {"trainable": 7}}}
    rows = names["summarise"]("bfloat16", {"methods": methods}, 2.0)
    assert len(rows) == 1
    assert rows[0]["survival"] == {"lora_A": 0.375, "all": 0.5}
    assert (rows[0]["eval_loss"], rows[0]["change"], rows[0]["eval_loss_by_seed"]) == (2.5, 0.5, [2.0, 3.0])
    text = names["table"](names["load_recipe"]("precision"), rows, 2.0)
    assert "| lora | bfloat16 | 50% | lora_A 38% | 2.50000 | +0.50000 |" in text


@pytest.mark.slow
def test_query_step_gives_a_ratio_for_every_query_path(start, tmp_path):
    out = tmp_path / "step.json"
    start("query_step", *SIZES, "--rounds", "2", "--threads", "1", "--out", out)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["provenance"]["threads"] == found["settings"]["threads"] == 1
    rows = {row["variant"]: row for row in found["rows"]}
    assert rows["linear"]["ratio"] == 1
    assert rows["linear"]["parameters"] == 12 * 32 * 32 + 3 * 32
    assert rows["nonlinear"]["parameters"] == rows["nonlinear_fused"]["parameters"] == 12 * 32 * 32 + 5 * 32
    assert rows["identity"]["parameters"] == 11 * 32 * 32 + 3 * 32
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows.values())


@pytest.mark.slow
def test_gpu_keeps_each_measurement_and_fills_its_place_in_the_readme(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\nafter\n", encoding="utf-8")
    options = ["--device", "cpu", "--shapes", "tiny,unknown", "--tasks", "arc_easy", "--requests", "8", "--rounds", "1"]
    options += ["--rows", "1,2", "--threads", "1", "--no-compile", "--readme", str(readme)]
    command = [BENCHMARKS / "gpu.py", "--out", tmp_path / "out", *options]
    assert forked.python(command).returncode == 0
    written = json.loads((tmp_path / "out" / "gpu.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in written["measurements"]}
    checks = {name.split()[1]: row for name, row in rows.items() if name.startswith("correctness")}
    assert {name: row["passed"] for name, row in checks.items()} == dict.fromkeys(
        ("noop", "formula", "attention", "checkpointing", "resume", "agreement"), True
    )
    training, scoring = rows["training tiny"], rows["scoring tiny arc_easy"]
    assert training["trainable"]["pre_projection"] == 2 * (2 * 32 * 40 + 32 * 32)
    assert abs(training["trainable"]["lora, HF Trainer"] / training["trainable"]["pre_projection"] - 1) < 0.05
    assert 0 < training["mfu"]["pre_projection"] < 1
    assert set(training["extra_bytes"]) == set(training["seconds"])
    assert rows["training tiny, 2 rows"]["tokens"] > training["tokens"]
    for part in (rows["profile tiny"]["step"], rows["profile tiny"]["scoring"]):
        assert part["device_share"] == pytest.approx(part["device_seconds"] / part["seconds"])
        assert sum(part["share_of_device"].values()) == pytest.approx(1)
        assert sum(each["seconds"] for each in part["longest"]) <= part["device_seconds"]
    for name, (seconds,) in scoring["seconds"].items():
        assert scoring["tokens_per_s"][name] == pytest.approx(scoring["tokens"] / seconds)
    assert set(scoring["times_faster"]) == {"hflm-auto", "hflm-64", "hflm-256"}
    assert rows["scoring unknown arc_easy"]["failed"] == "KeyError: 'unknown'"
    assert written["provenance"]["versions"]["torch"]
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!--")
    assert text.endswith("<!-- gpu: end -->\nafter\n")
    assert "old" not in text
    assert "| tiny, arc_easy, hflm-auto |" in text
    assert "Not measured: training unknown" in text
    readme.write_text("before\n", encoding="utf-8")
    refused = forked.python(command)
    assert (refused.returncode, "<!-- gpu: begin -->" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_many_runs_are_made_collected_and_reported(start, tmp_path):
    size = ["--methods", "3", "--seeds", "2", "--documents", "30", "--steps", "5"]
    start("many_runs", "--out", tmp_path, *size, "--stage", "make")
    for stage in ("update", "collect", "report"):
        found = json.loads(start("many_runs", "--out", tmp_path, "--stage", stage))
        assert found["cpu_s"] > 0
        assert found["peak_mb"] > 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {len(method["runs"]) for name, method in results["methods"].items() if name != "baseline"} == {2}
    assert len(results["verdicts"]) == 2 * 4
    assert (tmp_path / "report.html").is_file()


def test_serving_prepares_a_case_and_gathers_what_was_served(start, tmp_path):
    """vLLM is in an environment of its own; here is what runs without it."""
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
