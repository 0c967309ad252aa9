"""The experiments for PEFT's method comparison, and the steps of its benchmark on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
import yaml
from lm_eval.filters.extraction import RegexFilter
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from hfpatch.recipes.comparison import load_recipe
from hfpatch.runs.comparison import compare
from hfpatch.surgery.bases import load_tokenizer
from hfpatch.surgery.methods import build_method

HERE = Path(__file__).parents[2] / "examples/peft-method-comparison"
EXPERIMENTS = sorted(path.parent for path in HERE.glob("experiments/*/*/adapter_config.json"))
RUN = """
import json, sys
import argparse
from pathlib import Path
from utils import suffix
from peft import PeftConfig

parser = argparse.ArgumentParser()
parser.add_argument("-v", action="store_true")
parser.add_argument("experiment")
given = parser.parse_args()
print(PeftConfig.from_pretrained(given.experiment).peft_type + suffix, given.v)
"""


def tiny(vocabulary=128):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=vocabulary, pad_token_id=0))


@pytest.fixture(scope="module")
def made():
    sys.path.insert(0, str(HERE))
    try:
        yield __import__("make_experiments")
    finally:
        sys.path.remove(str(HERE))
        sys.modules.pop("make_experiments")


def test_each_has_the_size_of_lora_on_the_real_shapes(made):
    assert {path.parent.name for path in EXPERIMENTS} == set(made.METHODS)
    assert len(EXPERIMENTS) == len(made.METHODS) * len(made.RATES)
    with torch.device("meta"):
        model = made.AutoModelForCausalLM.from_config(made.LLAMA)
    lora = get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj", "v_proj"]))
    target = lora.get_nb_trainable_parameters()[0]
    assert target == 28 * 32 * (3072 + 3072 + 3072 + 1024) == 9_175_040
    model = lora.unload()
    for path in EXPERIMENTS[::2]:
        wrapped = get_peft_model(model, PeftConfig.from_pretrained(str(path)))
        assert wrapped.get_nb_trainable_parameters()[0] == pytest.approx(target, rel=0.02), path
        model = wrapped.unload()


@pytest.mark.parametrize("path", EXPERIMENTS[::2], ids=lambda path: path.parent.name)
def test_the_steps_of_the_benchmark(path, tmp_path):
    """Load, wrap, train with clipping and a cosine, generate with a static cache, save."""
    config = PeftConfig.from_pretrained(str(path))
    base = tiny().to(torch.bfloat16)
    model = get_peft_model(base, config, autocast_adapter_dtype=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=4)
    tokens = torch.randint(0, base.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1:, :3] = 0

    def loss():
        with torch.inference_mode():
            return model.eval()(input_ids=tokens, attention_mask=mask, labels=tokens).loss.item()

    before = loss()
    model.train()
    for _ in range(4):
        optimizer.zero_grad()
        labels = tokens.masked_fill(mask == 0, -100)
        items = int(mask.sum())
        model(input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=items).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert loss() < before
    options = {"cache_implementation": "static", "max_length": 16, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        cached = model.generate(input_ids=tokens, attention_mask=mask, **options)
        assert cached.shape == (4, 16)
    model.save_pretrained(str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 0
    json.dumps({key: list(v) if isinstance(v, set) else v for key, v in config.to_dict().items()})


def test_the_launcher_registers_the_methods_and_runs_what_it_finds(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "utils.py").write_text("suffix = '!'\n")
    experiment = str(next(path for path in EXPERIMENTS if path.parent.name == "pre_projection").relative_to(HERE))

    command = [sys.executable, HERE / "launch.py", tmp_path, "-v", experiment]
    assert subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout == "PRE_PROJECTION! True\n"
    missing = forked.python([HERE / "launch.py", tmp_path / "none", experiment], cwd=HERE)
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)


def test_the_recipe_has_the_size_of_lora_for_every_method(made):
    with torch.device("meta"):
        model = made.AutoModelForCausalLM.from_config(made.LLAMA)
    methods = load_recipe("metamathqa-llama-3b").methods
    for name in methods:
        size = 0
        for config in build_method(model, methods, name).configs:
            wrapped = get_peft_model(model, config)
            size += wrapped.get_nb_trainable_parameters()[0]
            wrapped.unload()
        assert size == pytest.approx(9_175_040 if methods[name] else 0, rel=0.02), name


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is 7. The answer is: 7", "7"),
        ("The answer is 3. No: the answer is: $1,250.00.", "1,250.00"),
        ("#### -5", "-5"),
        ("a half, the answer is: 1/2", "1/2"),
        ("I do not know 4", "[invalid]"),
    ],
)
def test_the_number_after_the_last_mark_is_the_answer(text, answer):
    task = yaml.safe_load((HERE.parents[1] / "eval/metamath/metamath_gsm8k.yaml").read_text())
    options = {key: value for key, value in task["filter_list"][0]["filter"][0].items() if key != "function"}
    assert RegexFilter(**options).apply([[text]], [{}]) == [[answer]]


@pytest.mark.slow
def test_the_recipe_runs_on_a_tiny_model(tmp_path):
    """Prompt template, generation and forgetting, two steps; the number after "The answer is:" counts."""
    tokenizer = load_tokenizer("tinyworld/gpt-neox")
    tiny(len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [{"query": f"What is {n} + 1?", "response": f"It is {n + 1}. The answer is: {n + 1}"} for n in range(40)]
    asked += [{"query": f"What is {n} + 2?", "response": f"The answer is: {n + 2}"} for n in range(40)]
    asked = [{"original_question": row["query"], **row} for row in asked]
    tests = [{"question": f"What is {n} + 3?", "answer": f"It is so.\n#### {n + 3}"} for n in range(3)]
    pages = [{"page": "The lamp is at the mill. " * (n + 2)} for n in range(2)]
    for name, rows in {
        "MetaMathQA/train.jsonl": asked,
        "gsm8k/main/test.jsonl": tests,
        "wikitext_document_level/wikitext-2-raw-v1/test.jsonl": pages,
        "wikitext_document_level/wikitext-2-raw-v1/validation.jsonl": pages,
    }.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [f"model.name={tmp_path / 'model'}", f"data_dir={tmp_path / 'data'}", "training.steps=2", "tuning=null"]
    small += ["training.seeds=[0]", "training.warmup_steps=1", "training.save_every=null", "training.lr=1e-3"]
    small += ["methods.pre_projection.0={type: pre_projection, expansion: 0.25}", "data.block_size=96"]
    small += ["data.held_out=8", "evaluation.max_length=640", "model.dtype=bfloat16"]
    recipe = load_recipe("metamathqa-llama-3b", small)
    keep = {name: recipe.methods[name] for name in ("baseline", "lora", "pre_projection")}
    results = compare(recipe.model_copy(update={"methods": keep}), tmp_path / "out")
    assert {"metamath_gsm8k", "wikitext"} <= set(results["tasks"])
    assert sorted(results["methods"]) == sorted(keep)
