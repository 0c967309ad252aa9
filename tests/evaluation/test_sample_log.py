"""``hfpatch eval`` with lm-eval's options against the real lm-eval: the scores, and the files that both write."""

import json

import lm_eval
import pytest
from datasets import load_dataset
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import sanitize_model_name
from own_tasks import CHAT, write_model, write_tasks
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch.__main__ import main
from hfpatch.results import load_results

TIMES = {"pretty_env_info", "git_hash", "date", "total_evaluation_time_seconds"}
KINDS = {"config", "model_source", "upper_git_hash"}
"""What cannot be equal: times, and which of the two programs it was."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, taught, tokenizer, support):
    """A model with a chat template, and tasks of every kind."""
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "model", taught, tokenizer, CHAT)
    write_tasks(folder / "tasks", list(support.passages(12)))
    return folder


def run_lm_eval(folders, out, tasks, **options):
    """Let lm-eval evaluate and write its files, as its command does, without its index of all tasks."""
    manager = TaskManager(include_defaults=False, include_path=str(folders / "tasks"))
    tracker = EvaluationTracker(output_path=str(out))
    arguments = {"pretrained": str(folders / "model"), "dtype": "float32"}
    results = lm_eval.simple_evaluate(
        "hf", arguments, tasks=tasks, task_manager=manager, evaluation_tracker=tracker, bootstrap_iters=2, device="cpu",
        batch_size=4, **options,
    )  # fmt: skip
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return read(next(out.iterdir()))


def read(folder):
    """Return lm-eval's results and samples in a folder."""
    (results,) = folder.glob("results_*.json")
    date = results.stem.removeprefix("results_")
    paths = list(folder.glob("samples_*"))
    assert all(path.name.endswith(f"_{date}.jsonl") for path in paths)
    samples = {path.name.removeprefix("samples_").removesuffix(f"_{date}.jsonl"): path for path in paths}
    lines = {task: list(map(json.loads, path.read_text().splitlines())) for task, path in samples.items()}
    return json.loads(results.read_text()), lines, samples


def same(ours, theirs):
    """Compare at any depth; a text that is a number is compared as one."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        try:
            assert float(ours) == pytest.approx(float(theirs), rel=1e-5, abs=1e-4)
        except (ValueError, TypeError):
            assert ours == theirs


ALONE = ["own_word", "own_choice", "own_page", "own_speech"]
PLAIN = (["--limit", "6", "--num_fewshot", "1"], {"limit": 6, "num_fewshot": 1, "fewshot_as_multiturn": False})
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
TURNS = (
    [
        *("evaluation.apply_chat_template=true", "evaluation.system_instruction=Be short.", "--num_fewshot=2"),
        *("--limit", "0.5", "evaluation.seed=[3, 3, 3, 3]", "evaluation.gen_kwargs={max_gen_toks: 3, until: [e]}"),
    ],
    {"apply_chat_template": True, "system_instruction": "Be short.", "num_fewshot": 2, "limit": 0.5}
    | {"gen_kwargs": {"max_gen_toks": 3, "until": ["e"]}, "fewshot_as_multiturn": True, **dict.fromkeys(SEEDS, 3)},
)
ONE_MESSAGE = (
    ["evaluation.apply_chat_template=true", "evaluation.fewshot_as_multiturn=false", "-f", "2", "-L", "5"],
    {"apply_chat_template": True, "fewshot_as_multiturn": False, "num_fewshot": 2, "limit": 5},
)


@pytest.mark.parametrize(
    ("tasks", "given"),
    [(ALONE, PLAIN), (["own_group", "own_word", "own_speech"], TURNS), (["own_tag"], ONE_MESSAGE)],
    ids=["plain", "turns", "one message"],
)
def test_scores_and_files_are_lm_evals(tmp_path, capsys, folders, tasks, given):
    words, options = given
    theirs, their_samples, _ = run_lm_eval(folders, tmp_path / "theirs", tasks, **options)
    capsys.readouterr()
    command = ["eval", "--model", str(folders / "model"), "--include_path", str(folders / "tasks")]
    command += ["--tasks", ",".join(tasks), *words, "--log_samples", "--json"]
    assert main([*command, "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out)["variants"]["base"]
    ours, our_samples, files = read(next((tmp_path / "out" / "lm_eval").iterdir()))
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [ours["model_name_sanitized"]]
    same(our_samples, their_samples)
    assert set(ours) == set(theirs)
    for key in set(theirs) - TIMES - KINDS - {"results", "groups", "configs", "n-shot", "higher_is_better"}:
        same(ours[key], theirs[key])
    for part in ("results", "groups"):
        for name, values in theirs.get(part, {}).items():
            assert set(ours[part][name]) | {"sample_count"} == set(values) | {"sample_count"}
            scores = {key: value for key, value in values.items() if "stderr" not in key and key != "sample_count"}
            same({key: ours[part][name][key] for key in scores}, scores)
            for key, value in values.items():  # those of means; lm-eval draws the others at random
                if key.startswith(("acc_stderr", "exact_match_stderr")):
                    assert ours[part][name][key] == pytest.approx(value, rel=1e-5)
    for name, group in theirs.get("groups", {}).items():
        assert printed["groups"][name]["metrics"]["acc"] == pytest.approx(group["acc,none"])
        assert printed["groups"][name]["stderr"]["acc"] == pytest.approx(group["acc_stderr,none"], rel=1e-5)
    assert set(printed["scores"]) == set(theirs["configs"])
    for name, score in printed["scores"].items():
        assert score["num_fewshot"] == theirs["n-shot"][name]
        shown = load_dataset("json", data_files=str(files[name]), split="train", cache_dir=tmp_path)
        assert len(shown) == len(their_samples[name])
    assert load_results(tmp_path / "out", "evaluation").to_json()["variants"]["base"] == printed


def test_each_model_and_patch_has_a_folder(tmp_path, folders):
    patched = AutoModelForCausalLM.from_pretrained(folders / "model")
    hfpatch.patch(patched, LoraConfig(r=2, target_modules="all-linear"))
    hfpatch.save_patch(patched, tmp_path / "my" / "patch")
    command = ["eval", "--tasks", "own_word", "--include_path", str(folders / "tasks"), "-L", "4", "--log_samples"]
    one = ["--model", str(folders / "model"), "--baseline", "--patch", str(tmp_path / "my" / "patch")]
    assert main([*command, *one, "--output", str(tmp_path / "one")]) == 0
    names = [str(folders / "model"), str(tmp_path / "my" / "patch")]
    assert {path.name for path in (tmp_path / "one" / "lm_eval").iterdir()} == set(map(sanitize_model_name, names))
    read_all = {path.name: read(path)[0] for path in (tmp_path / "one" / "lm_eval").iterdir()}
    assert read_all[sanitize_model_name(names[1])]["config"]["model_args"]["patch"] == names[1]
    assert main([*command, *one, "--output", str(tmp_path / "one")]) == 0  # again: files of another date, as in lm-eval
    assert len(list((tmp_path / "one" / "lm_eval" / sanitize_model_name(names[0])).glob("results_*"))) == 2
    several = ["--model", "tinyworld/gpt2", "--model", "tinyworld/gpt-neox"]
    assert main([*command, *several, "--output", str(tmp_path / "two")]) == 0
    shown = {path.name for path in (tmp_path / "two" / "lm_eval").iterdir()}
    assert shown == {"tinyworld__gpt2", "tinyworld__gpt-neox"}
