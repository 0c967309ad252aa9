"""``hfpatch eval`` with lm-eval's options against the real lm-eval: the prompts, the answers and the scores."""

import json

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable
from own_tasks import CHAT, write_model, write_tasks

from hfpatch.__main__ import main
from hfpatch.evaluation import run
from hfpatch.results import load_results


@pytest.fixture(scope="module")
def folders(tmp_path_factory, taught, tokenizer, support):
    """A model with a chat template, and tasks of every kind."""
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "model", taught, tokenizer, CHAT)
    write_tasks(folder / "tasks", list(support.passages(12)))
    return folder


def run_lm_eval(folders, tasks, **options):
    """Let lm-eval evaluate, as its command does, without its index of all tasks."""
    manager = TaskManager(include_defaults=False, include_path=str(folders / "tasks"))
    arguments = {"pretrained": str(folders / "model"), "dtype": "float32"}
    return lm_eval.simple_evaluate(
        "hf", arguments, tasks=tasks, task_manager=manager, bootstrap_iters=2, device="cpu", batch_size=4, **options
    )


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
def test_prompts_answers_and_scores_are_lm_evals(tmp_path, capsys, monkeypatch, folders, tasks, given):
    words, options = given
    theirs = run_lm_eval(folders, tasks, **options)
    outputs, run_task = {}, run.run_task

    def keep(scorer, name, selection):
        answered = run_task(scorer, name, selection)
        outputs[name] = answered.output
        return answered

    monkeypatch.setattr(run, "run_task", keep)
    capsys.readouterr()
    command = ["eval", "--model", str(folders / "model"), "--include_path", str(folders / "tasks")]
    command += ["--tasks", ",".join(tasks), *words, "--json", "--device", "cpu", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)["variants"]["base"]
    assert set(outputs) == set(printed["scores"]) == set(theirs["configs"])
    for name, samples in theirs["samples"].items():
        both = outputs[name]["samples"][name], samples
        same(*(json.loads(json.dumps(one, default=handle_non_serializable)) for one in both))
        scores, score = outputs[name]["results"][name], printed["scores"][name]
        for key, value in theirs["results"][name].items():
            if key.startswith(("acc_stderr", "exact_match_stderr")):  # of means; lm-eval draws the others at random
                assert score["stderr"][key.replace("_stderr", "").removesuffix(",none")] == pytest.approx(
                    value, rel=1e-5
                )
            elif "stderr" not in key and key != "sample_count":
                same(scores[key], value)
        assert score["num_fewshot"] == theirs["n-shot"][name]
    for name, group in theirs.get("groups", {}).items():
        assert printed["groups"][name]["metrics"]["acc"] == pytest.approx(group["acc,none"])
        assert printed["groups"][name]["stderr"]["acc"] == pytest.approx(group["acc_stderr,none"], rel=1e-5)
    assert load_results(tmp_path / "out", "evaluation").to_json()["variants"]["base"] == printed
