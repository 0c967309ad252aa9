"""The options of ``eval``: lm-eval's spellings, what they say, and what is refused."""

import argparse
import json

import pytest
import typer
from lm_eval._cli.run import Run
from lm_eval._cli.utils import _int_or_none_list_arg_type, key_val_to_dict

from hfpatch.__main__ import main
from hfpatch.cli.app import app
from hfpatch.cli.eval_options import EvalOptions
from hfpatch.cli.evaluation import device_map_of, read_models, read_settings, with_model_args
from hfpatch.cli.lm_eval_options import REFUSED, as_hfpatch, read_arguments


def settings_of(**options):
    return read_settings(EvalOptions(**{"tasks": "a,b", **options}))


def test_every_option_of_lm_eval_is_taken_or_refused():
    subparsers = argparse.ArgumentParser().add_subparsers()
    Run.create(subparsers)
    command = typer.main.get_command(app).commands["eval"]
    ours = {name for option in command.params for name in option.opts}
    for action in subparsers.choices["run"]._actions:
        for name in action.option_strings:
            if name not in ("-h", "--help") and name.replace("_", "-") not in REFUSED:
                assert as_hfpatch([name])[0] in ours or REFUSED.keys() & map(_dashed, action.option_strings), name


def _dashed(name):
    return name.replace("_", "-")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num_fewshot 2 --model_args=pretrained=a_b", "--num-fewshot 2 --model-args=pretrained=a_b"),
        ("--tasks a b c_d --limit 3", "--tasks a,b,c_d --limit 3"),
        ("-t a, b -a x=1 y=2 -L 3", "-t a,b -a x=1,y=2 -L 3"),
        ("--apply_chat_template --log_samples", "--apply-chat-template true --log-samples"),
        ("--apply_chat_template tool_use", "--apply-chat-template tool_use"),
        ("--fewshot_as_multiturn", "--fewshot-as-multiturn true"),
        ("--fewshot_as_multiturn False --tp", "--fewshot-as-multiturn False --tp"),
        ("--patch a_b --output_path c_d", "--patch a_b --output c_d"),
    ],
)
def test_words_of_lm_eval(words, expected):
    assert as_hfpatch(words.split()) == expected.split()


@pytest.mark.parametrize(
    "text",
    [
        "temperature=0.8,top_p=0.95,do_sample=true,max_gen_toks=12",
        "until=['\\n\\n', 'Q:'],stop=\"a,b\",nested={'x': [1, 2]}",
        "pretrained=org/model-1.4b,trust_remote_code=True,revision=step1000,n=-1,e=1e-3,path=a=b",
        "",
    ],
)
def test_arguments_are_read_as_lm_eval_reads_them(text):
    assert read_arguments(text, "--x") == key_val_to_dict(text)
    as_json = read_arguments(text, "--x")
    assert read_arguments(json.dumps(as_json), "--x") == as_json or not as_json


def test_values_that_are_no_python_stay_text():
    deep = "-" * 50_000 + "1"
    assert read_arguments(f"x={{[]: 1}},y={deep},z=:),n=2", "--x") == {"x": "{[]: 1}", "y": deep, "z": ":)", "n": 2}


def test_what_options_say():
    settings = settings_of(limit=["100", "b=0.5"], batch_size="auto:4", gen_kwargs="temperature=0.5")
    assert list(settings.tasks) == ["a", "b"]
    assert [settings.limit_of(name, 9) for name in settings.tasks] == [100, 5]  # ⌈4.5⌉
    assert (settings.batch_size, settings.gen_kwargs) == (16, {"temperature": 0.5})
    assert settings_of(limit=["7"]).tasks == ("a", "b")
    assert settings_of(apply_chat_template="true").apply_chat_template is True
    named = settings_of(apply_chat_template="tool_use", fewshot_as_multiturn="no", batch_size="3")
    assert (named.apply_chat_template, named.fewshot_as_multiturn, named.batch_size) == ("tool_use", False, 3)
    for text in ("42", "0,1234,1234,5", "1,2,3", "None,2,None,4"):
        expected = _int_or_none_list_arg_type(3, 4, "0,1234,1234,1234", text)
        assert list(settings_of(seed=text).seed) == expected
    assert settings_of().model_dump().keys() == {
        *("tasks", "include_path", "limit", "num_fewshot", "batch_size", "token_budget", "max_length"),
        *("allow_unknown_base", "cluster"),
    }


def test_model_arguments():
    text = "pretrained=x/y,revision=main,dtype=bfloat16,peft=folder,load_in_8bit=true,batch_size=2,parallelize=True"
    given, more = with_model_args(EvalOptions(model=["hf"], model_args=text))
    assert (given.model, given.batch_size, device_map_of(given)) == (["x/y"], "2", "auto")
    (model,) = read_models(given, more)
    assert (model.name, model.revision, model.dtype, model.load_in_8bit) == ("x/y", "main", "bfloat16", True)
    assert [str(patch) for patch in given.patch] == ["folder"]
    given, more = with_model_args(EvalOptions(model=["x/y", "z"], model_args="dtype=float16"))
    assert [(model.name, model.dtype) for model in read_models(given, more)] == [("x/y", "float16"), ("z", "float16")]
    assert device_map_of(EvalOptions(device="cuda:1")) == "cuda:1"
    for text, revision in (("12", "12"), ("1.10", "1.10"), ("'1e5'", "1e5"), ("None", None)):
        (model,) = read_models(*with_model_args(EvalOptions(model=["x"], model_args=f"revision={text}")))
        assert model.revision == revision


MODEL = ("--model", "tinyworld/gpt2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (MODEL, "--tasks: missing; name tasks with commas between them"),
        (("--tasks", "tinyworld_cloze"), "--model: missing; give a hub id or a folder"),
        (("--model", "hf"), "--model hf: name the model as --model ID, or with --model-args pretrained=ID"),
        (("--model", "vllm", "--model_args", "pretrained=x"), "--model vllm: with --model-args pretrained=, --model"),
        ((*MODEL, "--model_args", "tokenzier=x"), "--model-args tokenzier: hfpatch eval does not take it"),
        ((*MODEL, "--model_args", "dtype"), "--model-args dtype: write it as key=value"),
        ((*MODEL, "--model_args", "{dtype"), "--model-args: not valid JSON"),
        (
            (*MODEL, "--model_args", "dtype=auto"),
            "model tinyworld/gpt2: dtype is \"auto\"; must be 'float32', 'bfloat16' or 'float16'",
        ),
        ((*MODEL, "--model_args", "dtype=float16", "--dtype", "bfloat16"), "--dtype is bfloat16; leave one out"),
        ((*MODEL, "--gen_kwargs", "a=1,a=2"), "--gen-kwargs a=2: a is given twice"),
        ((*MODEL, "--gen_kwargs", "temperature=1"), "gen_kwargs: none of the tasks generates text"),
        ((*MODEL, "--limit", "x"), "--limit x: 'x' is not a number of documents"),
        ((*MODEL, "--limit", "0"), "--limit 0: must be above 0; leave it out for all documents"),
        ((*MODEL, "--limit", "tinyworld_cloze=-1"), "--limit tinyworld_cloze=-1: must be above 0"),
        ((*MODEL, "--limit", "1.5"), "limit: must be a whole number of documents, or a share of them"),
        ((*MODEL, "--limit", "tinyworld_clze=5"), "not among --tasks (did you mean 'tinyworld_cloze'?)"),
        ((*MODEL, "--batch_size", "0"), "--batch-size 0: must be auto or a number of rows"),
        ((*MODEL, "--seed", "4294967296"), "seed contains 4294967296; must be from 0 to 2**32 - 1"),
        ((*MODEL, "--seed", "1,2"), "--seed 1,2: must be one number, or four"),
        ((*MODEL, "--seed", "None"), "--seed None: the last one chooses few-shot examples"),
        ((*MODEL, "--fewshot_as_multiturn"), "fewshot_as_multiturn: needs apply_chat_template"),
        ((*MODEL, "--fewshot_as_multiturn", "maybe"), "--fewshot-as-multiturn maybe: must be true or false"),
        ((*MODEL, "--device", "gpu"), "--device gpu: must be cpu, cuda"),
        ((*MODEL, "--model_args", '{"device": 0}'), "--device 0: must be cpu, cuda"),
        ((*MODEL, "--device", "npu:7"), "device npu:7: not available here ("),
        ((*MODEL, "--device", "cpu", "--device-map", "auto"), "--device cpu: --device-map and --tp choose the devices"),
        ((*MODEL, "--log_samples"), "--log-samples: needs --output DIR"),
        ((*MODEL, "--output_path", "x.json"), "--output x.json: is a folder"),
        ((*MODEL, "--json", "--latex"), "--json and --latex: print one of them"),
        ((*MODEL, "--predict_only"), "--predict-only: hfpatch eval has no such option; the samples of --log-samples"),
        ((*MODEL, "--wandb_args", "project=x"), "hfpatch lm_eval runs lm-eval's own command"),
        ((*MODEL, "--apply_chat_template"), "apply_chat_template: the tokenizer of this model has no chat template"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, words, message):
    tasks = () if "--tasks" in words or words == MODEL else ("--tasks", "tinyworld_cloze")
    assert main(["eval", *tasks, *words]) == 2
    *bars, line = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpatch: error: ")
    assert message in line
    assert all("Loading weights" in bar for bar in bars if bar)
