"""The options of ``eval``: what they set, and what is refused."""

import argparse
from dataclasses import fields
from functools import partial

import pytest
from cli.conftest import refused
from lm_eval.tasks import TaskManager

from hfpatch.cli.eval_options import EvalOptions, with_overrides
from hfpatch.cli.evaluation import device_map_of, read_models, read_overrides, read_settings
from hfpatch.errors import HfpatchError
from hfpatch.recipes.evaluation import EvaluationSettings


def settings_of(*overrides, **options):
    given = EvalOptions(overrides=list(overrides), **{"tasks": "a,b", **options})
    return read_settings(given, read_overrides(given)["evaluation"])


def test_options_and_keys_of_recipes_become_settings():
    keys = ["evaluation.gen_kwargs.temperature=0.5", "evaluation.batch_size=3"]
    settings = settings_of(*keys, limit=["100", "b=0.5"])
    assert list(settings.tasks) == ["a", "b"]
    assert [settings.limit_of(name, 9) for name in settings.tasks] == [100, 5]  # ⌈4.5⌉
    assert (settings.batch_size, settings.gen_kwargs) == (3, {"temperature": 0.5})
    assert settings_of(limit=["7"]).tasks == ("a", "b")
    assert settings_of(limit=["7", "8"]).limit == 8  # the last one counts, as of overrides
    named = settings_of("evaluation.apply_chat_template=tool_use", "evaluation.seed=[null, 2, null, 4]")
    assert (named.apply_chat_template, named.seed, named.batch_size) == ("tool_use", (None, 2, None, 4), 16)
    assert settings_of().model_dump().keys() == {
        *("tasks", "include_path", "limit", "num_fewshot", "batch_size", "token_budget", "max_length"),
        *("allow_unknown_base", "cluster"),
    }


def test_models_have_the_revision_after_the_at_sign_and_all_keys_of_the_section():
    given = EvalOptions(model=["x/y@1.10", "z"], dtype="float16", overrides=["model.load_in_8bit=true"])
    models = read_models(given, read_overrides(given)["model"])
    assert [(model.name, model.revision, model.dtype) for model in models] == [
        ("x/y", "1.10", "float16"),
        ("z", None, "float16"),
    ]
    assert all(model.load_in_8bit for model in models)
    assert device_map_of(EvalOptions(device="cuda:1")) == "cuda:1"


MODEL = ("--model", "tinyworld/gpt2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (MODEL, "--tasks: missing; name tasks with commas between them"),
        (("--tasks", "tinyworld_cloze"), "--model: missing; give a hub id or a folder"),
        ((*MODEL, "--dtype", "auto"), "dtype is \"auto\"; must be 'float32', 'bfloat16' or 'float16'"),
        ((*MODEL, "model.dtype=float16"), "model.dtype=float16: write it as the option --dtype"),
        ((*MODEL, "model.name=x"), "model.name=x: write it as the option --model"),
        ((*MODEL, "evaluation.limit=3"), "evaluation.limit=3: write it as the option --limit"),
        ((*MODEL, "evaluation.sed=1"), "unknown key 'evaluation.sed' (did you mean 'seed'?)"),
        ((*MODEL, "training.steps=3"), "training.steps=3: eval takes keys in a recipe's sections model and evaluation"),
        ((*MODEL, "model=tinyworld/gpt2"), "model=tinyworld/gpt2: eval takes keys in a recipe's sections"),
        ((*MODEL, "evaluation={limit: 3}"), "evaluation={limit: 3}: eval takes keys in a recipe's sections"),
        ((*MODEL, "--baseline"), "--baseline: there is no patch; give --patch DIR"),
        ((*MODEL, "--allow_other_base"), "--allow-other-base: there is no patch"),
        ((*MODEL, "--no_cache", "--output", "x"), "--no-cache: answers are kept in --output x"),
        ((*MODEL, "tinyworld_text"), "tinyworld_text: give a model as --model tinyworld_text"),
        ((*MODEL, "evaluation.gen_kwargs.temperature=1"), "gen_kwargs: none of the tasks generates text"),
        ((*MODEL, "--limit", "x"), "--limit x: 'x' is not a number of documents"),
        ((*MODEL, "--limit", "0"), "--limit 0: must be above 0; leave it out for all documents"),
        ((*MODEL, "--limit", "tinyworld_cloze=-1"), "--limit tinyworld_cloze=-1: must be above 0"),
        ((*MODEL, "--limit", "1.5"), "limit: must be a whole number of documents, or a share of them"),
        ((*MODEL, "--limit", "tinyworld_clze=5"), "not among --tasks (did you mean 'tinyworld_cloze'?)"),
        ((*MODEL, "evaluation.seed=[4294967296, 0, 0, 0]"), "seed.0 is 4294967296; must be less than 4294967296"),
        ((*MODEL, "evaluation.fewshot_as_multiturn=true"), "fewshot_as_multiturn: needs apply_chat_template"),
        ((*MODEL, "--device", "gpu"), "--device gpu: must be cpu, cuda"),
        ((*MODEL, "--device_map", "autoo"), "--device-map has 'autoo' (did you mean 'auto'?); use auto, balanced"),
        ((*MODEL, "--device", "npu:7"), "device npu:7: not available here ("),
        ((*MODEL, "--device", "cpu", "--device_map", "auto"), "--device cpu: --device-map and --tp choose the devices"),
        ((*MODEL, "--log_samples"), "use hfpatch lm_eval --model hfpatch --model_args pretrained=ID,patch=DIR"),
        ((*MODEL, "--num-fewshots", "3"), "--num-fewshots: eval has no such option (did you mean '--num-fewshot'?)"),
        ((*MODEL, "--outptu", "x"), "--outptu: eval has no such option (did you mean '--output'?)"),
        ((*MODEL, "--num_fewshot", "-1"), "num_fewshot is -1; must be greater than or equal to 0"),
        ((*MODEL, "--num_fewshot"), "--num_fewshot: needs a value; write --num_fewshot VALUE"),
        ((*MODEL, "--gen_kwargs=temperature=0"), "gen_kwargs: none of the tasks generates text"),
        ((*MODEL, "--cluster", "kind"), 'cluster is "kind"; must be'),
        ((*MODEL, "--cluster", "tinyworld_cloze=pasage"), "no column 'pasage' to be the cluster"),
        ((*MODEL, "--cluster", "boolq=passage"), "cluster names 'boolq', which is not among tasks"),
        ((*MODEL, "--tasks", "tinyworld_close"), "did you mean 'tinyworld_cloze'"),
        ((*MODEL, "--tasks", ","), "tasks"),
        ((*MODEL, "--output", "x.json"), "--output x.json: is a folder"),
        ((*MODEL, "--json", "--latex"), "--json and --latex: print one of them"),
        (
            (*MODEL, "evaluation.apply_chat_template=true"),
            "apply_chat_template: the tokenizer of this model has no chat template",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, words, message):
    tasks = () if "--tasks" in words or words == MODEL else ("--tasks", "tinyworld_cloze")
    assert message in refused(capsys, "eval", *tasks, *words)


OPTIONS = {"--model", "--tasks", "--limit", "--allow-other-base"}
"""Some that `eval` has itself."""


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (
            "--tasks a --limit a=3 --allow_other_base x=1",
            ["--tasks", "a", "--limit", "a=3", "--allow_other_base", "x=1"],
        ),
        ("--num_fewshot 5 --batch-size=8", ["evaluation.num_fewshot=5", "evaluation.batch_size=8"]),
        ("-- x=1", ["--", "x=1"]),
        ("-f 5 -b 8", ["evaluation.num_fewshot=5", "evaluation.batch_size=8"]),
        ("--seed [1,2,3,4]", ["evaluation.seed=[1,2,3,4]"]),
        ("--load-in-4bit --bnb-4bit-quant-type fp4", ["model.load_in_4bit=true", "model.bnb_4bit_quant_type=fp4"]),
        ("--allow_unknown_base model.dtype=x", ["evaluation.allow_unknown_base=true", "model.dtype=x"]),
        ("--apply_chat_template rag", ["evaluation.apply_chat_template=rag"]),
        ("--apply_chat_template", ["evaluation.apply_chat_template=true"]),
        ("--fewshot_as_multiturn false", ["evaluation.fewshot_as_multiturn=false"]),
        ("--gen_kwargs a=1,b=2", ["evaluation.gen_kwargs.a=1", "evaluation.gen_kwargs.b=2"]),
        ("--cluster t=c --cluster u=d", ["evaluation.cluster.t=c", "evaluation.cluster.u=d"]),
        ("--system_instruction a=b", ['evaluation.system_instruction="a=b"']),
        ("--system_instruction 3:#x", ['evaluation.system_instruction="3:#x"']),
        ("-b8 -- --num_fewshot 5", ["evaluation.batch_size=8", "--", "--num_fewshot", "5"]),
    ],
)
def test_options_are_keys_of_recipes(words, read):
    assert with_overrides(words.split(), OPTIONS) == read


def test_a_key_that_needs_a_value_takes_no_option_for_it():
    with pytest.raises(HfpatchError, match=r"--num-fewshot: needs a value"):
        with_overrides(["--num-fewshot", "--limit", "5"], OPTIONS)
    assert with_overrides(["--batch-size", "-1"], OPTIONS) == ["evaluation.batch_size=-1"]


def test_every_option_of_lm_eval_is_taken_or_refused_in_one_line(capsys):
    from lm_eval._cli.run import Run  # lm-eval's parser is private

    parser = argparse.ArgumentParser()
    Run(parser.add_subparsers())
    (run,) = [action.choices["run"] for action in parser._actions if action.choices]
    names = {max(action.option_strings, key=len).removeprefix("--") for action in run._actions}
    taken = {field.name for field in fields(EvalOptions)} | {*EvaluationSettings.model_fields}
    assert {"apply_chat_template", "batch_size", "gen_kwargs", "num_fewshot", "seed"} <= names & taken
    for name in names - taken - {"help"}:
        assert "use hfpatch lm_eval" in refused(capsys, "eval", f"--{name}")


def test_an_unknown_task_of_lm_eval_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # which take seconds
    unknown = ["--tasks", "lambda_openai", "--include_path", tmp_path]
    assert "Tasks not found: lambda_openai" in refused(capsys, "lm_eval", "--model", "hfpatch", *unknown)
