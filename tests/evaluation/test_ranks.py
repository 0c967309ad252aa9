"""One evaluation on two processes: gloo, a share for each, pieces of a model, and a process that dies."""

import json
import os
import time
from pathlib import Path

import forked
import pytest
import torch
from architectures.formulas import twin_of
from evaluate_on_processes import run
from families import make_model, make_tokens, perturb
from launched import free_port
from own_tasks import write_task

import hfpatch
from hfpatch import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer.batching import BatchLimits, batches, units
from hfpatch.evaluation.scorer.trees import TokenRequest, group
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.runs import evaluate
from hfpatch.support import ranks
from hfpatch.support.ranks import Ranks
from hfpatch.surgery.bases import hash_weights, load_base

TESTS = Path(__file__).parent.parent
PROGRAM = TESTS / "evaluate_on_processes.py"
WRITING = {
    "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6}, "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip
PRE, QUERY = PreProjectionConfig(content_skip=True, init="paper"), NonlinearQueryConfig(rank=5, form="literal")
KINDS = (PreProjectionConfig, NonlinearQueryConfig)
A_FEW_DRAWS = 5e-4  # of a p-value that is a share of 9,999 random halves: rounding may move a few
LEFT_OUT = ("provenance", "wall_s", "tokens_per_s", "peak_memory_bytes", "mfu", "layers")
METHODS = {"baseline": [], "pre_projection": [{"type": "pre_projection"}]}


def make_patch(model, configs, folder: Path) -> str:
    hfpatch.patch(model, configs, seed=0)
    with torch.no_grad():
        perturb(model)
    hfpatch.save_patch(model, folder)
    hfpatch.unpatch(model)
    return str(folder)


@pytest.fixture(scope="module")
def launched(tmp_path_factory, support):
    """Run every scenario on two processes, in one launch, and all but the last here; return the folder of all."""
    root = tmp_path_factory.mktemp("ranks")
    texts = ("Anna took the lamp " + "to the mill " * (n % 5) for n in range(11))
    support.write_rows(root / "rows.jsonl", [{"text": text} for text in texts])
    write_task(root, "writing", **WRITING)
    base = load_base("tinyworld/gpt2").model
    patches = [make_patch(base, config, root / name) for name, config in {"pre": PRE, "query": QUERY}.items()]
    settings = {"limit": 24, "tasks": ["tinyworld_cloze", "tinyworld_endings"], "batch_size": 2}
    with_texts = {**settings, "tasks": [*settings["tasks"], "tinyworld_text", "writing"], "include_path": str(root)}
    recipe = {
        "name": "small", "model": {"name": "tinyworld/gpt2"},
        "data": {"block_size": 32, "max_documents": 30, "held_out": 9},
        "training": {"steps": 2, "warmup_steps": 1, "batch_size": 4, "lr": 1e-3, "seeds": [0]},
        "evaluation": {"tasks": ["tinyworld_cloze"], "limit": 24, "allow_unknown_base": True}, "methods": METHODS,
    }  # fmt: skip
    scenarios = {
        "patches": {"kind": "evaluate", "model": "tinyworld/gpt2", "patches": patches, "settings": with_texts},
        "models": {"kind": "models", "models": ["tinyworld/gpt2", "tinyworld/gpt-neox"], "settings": settings},
        "compare": {"kind": "compare", "recipe": recipe},
    }
    shared = list(scenarios)
    scenarios["loads"] = {"kind": "loads"}
    for case in ("llama", "gpt_neox"):
        model = make_model(case)
        model.save_pretrained(root / case)
        made = [make_patch(model, [PRE, QUERY], root / f"{case}-patch")]
        tokens = make_tokens().tolist()
        scenarios[case] = {"kind": "pieces", "model": str(root / case), "patches": made, "tokens": tokens}
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HFPATCH_MATMUL", "mkl")
        patched.setattr("hfpatch.reporting.write_report", lambda _: None)  # only the processes' own is looked at
        torch.set_num_threads(1)
        for name in shared:
            run(root / "one" / name, scenarios[name])
        arguments = ["eval", "--model", "tinyworld/gpt2", "--tasks"]
        scenarios["bad"] = {"kind": "command", "arguments": [*arguments, "tinyworld_clozed"]}
        killed = [*arguments, "tinyworld_cloze", "--limit", "300", "--output", str(root / "two" / "killed")]
        scenarios["command"] = {"kind": "command", "arguments": killed, "kill": 20}  # the last: it ends the launch
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HFPATCH_MATMUL": "mkl"}
        command = ["-m", "accelerate.commands.launch", "--config_file", "docs/accelerate/ddp-cpu.yaml"]
        command += ["--main_process_port", str(free_port()), str(PROGRAM), str(root / "two"), json.dumps(scenarios)]
        ended = forked.python(command, env=environment, cwd=TESTS.parent)
        assert (root / "two" / "killed" / "answers").exists(), ended.stderr[-4000:]
        torch.set_num_threads(threads)
    return root, ended, time.time()


@pytest.fixture(scope="module")
def root(launched):
    return launched[0]


def read(path: Path):
    return json.loads(path.read_text())


def assert_alike(actual, expected, *, rel=1e-6):
    """Compare JSON values, but for times; numbers to rounding."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            if key not in LEFT_OUT:
                assert_alike(actual[key], value, rel=max(rel, A_FEW_DRAWS) if key in ("p", "p_corrected") else rel)
    elif isinstance(expected, list):
        for one, two in zip(actual, expected, strict=True):
            assert_alike(one, two, rel=rel)
    else:
        assert actual == (pytest.approx(expected, rel=rel, abs=rel) if isinstance(expected, float) else expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patches", "models"])
def test_results_and_records_are_those_of_one_process(root, name):
    one, two = root / "one" / name, root / "two" / name
    assert_alike(*(read(folder / "results.json") for folder in (two, one)))
    records = sorted(path.relative_to(one) for path in one.rglob("*.jsonl"))
    assert records == sorted(path.relative_to(two) for path in two.rglob("*.jsonl"))
    assert len([path for path in records if path.parts[0] != "answers"]) == {"patches": 12, "models": 4}[name]
    for path in records:
        lines = [[json.loads(line) for line in (folder / path).read_text().splitlines()] for folder in (two, one)]
        if path.parts[0] == "answers":
            lines = [sorted(rows[1:]) for rows in lines]
        assert_alike(*lines)


@pytest.mark.slow
def test_compare_is_shared_by_all_processes_evenly(root):
    one, two = (read(root / name / "compare" / "results.json") for name in ("one", "two"))
    assert_alike(two, one, rel=1e-4)
    assert (root / "two" / "compare" / "report.html").is_file()
    loads = read(root / "two" / "loads" / "rank-0.json")["loads"]
    assert loads == read(root / "two" / "loads" / "rank-1.json")["loads"]
    assert 0.45 <= loads[0] / sum(loads) <= 0.55


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_pieces_of_a_model_compute_the_formula(root, case):
    tokens, plain = make_tokens(), make_model(case)
    patched = hfpatch.load_patch(make_model(case), root / f"{case}-patch")
    pre, query = (next(name for name, part in patched.peft_config.items() if isinstance(part, kind)) for kind in KINDS)
    formula = twin_of(patched, case, pre_projection=(pre, PRE), nonlinear_query=(query, QUERY))
    expected = [model(tokens).logits for model in (plain, formula)]
    assert not torch.allclose(*expected, rtol=1e-2)
    for rank in (0, 1):
        facts = read(root / "two" / case / f"rank-{rank}.json")
        assert facts["sha256"] == hash_weights(plain)
        assert [name for name in facts["cut"] if "q_proj.weight" in name or "query_key_value.weight" in name]
        torch.testing.assert_close([*map(torch.tensor, facts["logits"])], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_bad_input_is_said_once_and_ends_all(launched):
    root, ended, _ = launched
    assert [read(root / "two" / "bad" / f"rank-{rank}.json") for rank in (0, 1)] == [{"code": 2}] * 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("hfpatch: error")]
    assert len([line for line in errors if "tinyworld_clozed" in line]) == 1
    assert len(errors) == 2, errors


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_and_loses_no_answer(launched):
    root, ended, ended_at = launched
    out = root / "two" / "killed"
    assert ended.returncode != 0
    assert ended_at - (out / "evaluation.json").stat().st_mtime < 60
    assert "a process of this run was ended, so the others end too" in ended.stderr
    assert not (out / "results.json").exists()
    lines = {path.name: path.read_text().count("\n") - 1 for path in (out / "answers").iterdir()}
    assert next(count for name, count in lines.items() if name.endswith(".rank-1.jsonl")) >= 3
    settings = EvaluationSettings(tasks=["tinyworld_cloze"], limit=300)
    results = evaluate(ModelSettings(name="tinyworld/gpt2"), settings=settings, output=out)
    assert results.variants["base"].scores["tinyworld_cloze"].reused >= sum(lines.values())
    assert not list((out / "answers").glob("*.rank-*"))


def test_shares_are_even_and_contexts_stay_together(monkeypatch):
    monkeypatch.setattr(Ranks, "same", lambda self, value: value)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, 60, (150,), generator=generator).tolist()
    contexts = [torch.randint(90, (size,), generator=generator).tolist() for size in sizes]
    requests = [
        TokenRequest.cut(context, [ending, *context[: ending % 4]], 200) for context in contexts for ending in range(4)
    ]
    for limits in (BatchLimits(512, 1), BatchLimits(32768, 1, 2048)):
        rows = group(requests, longest=128)
        work = units(batches(rows, limits.divided(sum(map(len, rows)))), limits)
        assert sorted(index for unit in work for index in unit.requests()) == list(range(len(requests)))
        if limits.overhead > 100:
            continue  # so few tokens are not worth several batches on a GPU
        for count in (2, 3):
            shared = Ranks(count=count)
            owners = shared.share_out([unit.cost(()) for unit in work])
            assert max(shared.loads) / sum(shared.loads) <= 1.1 / count
            by_request = {index: owner for unit, owner in zip(work, owners, strict=True) for index in unit.requests()}
            assert all(len({by_request[4 * context + ending] for ending in range(4)}) == 1 for context in range(150))


def test_small_tasks_keep_batches_and_products_large():
    cpu, gpu = (BatchLimits.for_device(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert [cpu.divided(total).tokens for total in (10, 10**6)] == [512, 512]
    assert [gpu.divided(total).tokens for total in (10, 16 * 10_000, 10**6)] == [8192, 10_000, 32768]
    rows = group([TokenRequest.cut([token], [1], 8) for token in range(100)], longest=128)
    assert [len(list(unit.requests())) for unit in units([[row] for row in rows], cpu)][:-1] == [16] * 6
    pairs = [rows[start : start + 2] for start in range(0, 100, 2)]
    assert [len(list(unit.requests())) for unit in units(pairs, cpu)][:-1] == [32] * 3


def test_one_speaks_for_all(monkeypatch):
    assert ranks.prints_errors()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "_SILENCE_S", 0.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert ranks.prints_errors() is (rank == 0)


def test_a_lost_connection_is_one_line(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(torch.distributed, "all_gather_object", fail)
    with pytest.raises(HfpatchError, match="a process of this run was ended"):
        Ranks(0, 2).everyone(1)
