"""Whatever decides a score: kept and new scores are told apart by it, in every place that keeps or joins scores.

Each setting and each source of text is changed alone. A resumed and a grown run must refuse it, the cache of answers
must give what a fresh evaluation gives, and a joint report and the explorer must show it, unless it changes no score.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from own_methods import forgotten
from own_tasks import CHAT, write_model, write_tasks
from reporting.conftest import example
from safetensors.torch import load_file, save_file
from tiny_runs import NEOX, Nothing

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import evaluate
from hfpatch.evaluation.cache import model_key
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.selection import select
from hfpatch.recipes.base import NOT_IDENTITY as NOT_OF_MODEL
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.recipes.training import TrainingSettings
from hfpatch.recipes.tuning import TuningSettings
from hfpatch.reporting.differing import measured_differently, trained_differently
from hfpatch.reporting.explorer.entries import entries
from hfpatch.reporting.explorer.page import Source, explorer_document
from hfpatch.reporting.html import html
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.identity import COMPUTED_WITH, OF_BASE, OF_TASK, base_identity, task_identity
from hfpatch.results.layout import Method, Parameters, Run
from hfpatch.runs import Progress, compare
from hfpatch.runs.folder import NOT_IDENTITY, changes
from hfpatch.runs.identity import check_scores, identify_base
from hfpatch.support.files import write_json, write_text
from hfpatch.surgery.bases import load_base
from hfpatch.tinyworld import documents
from hfpatch.training.architecture import build_model

TASKS = ("own_choice", "own_word", "own_page", "own_speech", "own_code")
METHOD = """
from dataclasses import dataclass

import own_methods
import hfpatch

FACTOR = 2.0


def added(parts, x):
    return FACTOR * parts["b"](parts["a"](x))


@hfpatch.method("mine_of_identity")
@dataclass
class Mine(hfpatch.MethodConfig):
    def build(self, site, seed):
        return own_methods.low_rank(site, seed, site.width("query"))

    def query(self, parts, q, x, site):
        return q + added(parts, x)
"""
SCORING = """
from pathlib import Path

WEIGHT = 1.0


def right(value):
    return WEIGHT * float(Path(__file__).with_name("factor.txt").read_text()) * value


def process_results(doc, results):
    values = [value for value, _ in results]
    return {"acc": right(float(values.index(max(values)) == 0))}
"""
MODELLING = """
from transformers import GPTNeoXForCausalLM


class Mine(GPTNeoXForCausalLM):
    def forward(self, *arguments, **options):
        found = super().forward(*arguments, **options)
        found.logits = 1.0 * found.logits
        return found
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base with a chat template, tasks, a text and a method of one's own, and a comparison of it that is complete."""
    folder = tmp_path_factory.mktemp("identity")
    texts = list(documents("base", count=60))
    texts, kept = texts[:40], texts[40:]
    tokenizer = train_tokenizer(texts, 300)
    write_model(
        folder / "base", build_model({**NEOX, "max_position_embeddings": 128}, tokenizer=tokenizer), tokenizer, CHAT
    )
    (folder / "text.txt").write_text("\n\n".join(texts))
    (folder / "kept.txt").write_text("\n\n".join(kept))
    write_tasks(folder / "tasks", [" ".join(text.split()[:9]).rstrip(".,") for text in texts[:12]])
    rows = folder / "tasks" / "rows.jsonl"
    lines = [json.loads(line) | {"half": str(number % 3)} for number, line in enumerate(rows.read_text().splitlines())]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    choice = yaml.safe_load((folder / "tasks" / "own_choice.yaml").read_text())
    code = {**choice, "task": "own_code", "metric_list": [{"metric": "acc"}], "doc_to_text": "Hm {{text}}"}
    (folder / "tasks" / "own_code.yaml").write_text(
        yaml.safe_dump(code) + "process_results: !function scoring.process_results\n"
    )
    (folder / "tasks" / "scoring.py").write_text(SCORING)
    (folder / "tasks" / "factor.txt").write_text("1.0")
    (folder / "mine_of_identity.py").write_text(METHOD)
    sys.path.insert(0, str(folder))
    with forgotten():
        compare(recipe(folder), str(folder / "out"))
        yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("mine_of_identity", None)


@pytest.fixture
def restored(folder):
    """``folder``, put back afterwards."""
    kept = shutil.copytree(folder, folder.with_name(f"{folder.name}-kept"))
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)
    sys.modules.pop("mine_of_identity", None)


def recipe(folder: Path, *others: str) -> Recipe:
    """Return the recipe, with a LoRA under these names beside the method of one's own."""
    return Recipe.model_validate(
        {
            "name": "small",
            "model": {"name": str(folder / "base")},
            "data": {"source": str(folder / "text.txt"), "block_size": 32},
            "training": {"steps": 2, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2},
            "evaluation": settings(folder).model_dump(),
            "retention": {"texts": {"kept": {"source": str(folder / "kept.txt")}}, "tasks": []},
            "methods": {
                "baseline": [],
                "mine": [{"type": "mine_of_identity:Mine"}],
                **{name: [{"type": "lora", "r": 2}] for name in others},
            },
        }
    )


def settings(folder: Path, **changed) -> EvaluationSettings:
    given = {"tasks": TASKS, "include_path": str(folder / "tasks"), "limit": 6, "num_fewshot": 1, **changed}
    return EvaluationSettings.model_validate(given)


def replaced(name, before, after):
    def change(folder):
        path = folder / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    return change


def add_a_word(folder):
    """A word of the tokenizer that no text has changes its id with another: the same tokens otherwise."""
    path = folder / "base" / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["e"], words["a"] = words["a"], words["e"]
    path.write_text(json.dumps(content))


def edit_json(name, **changed):
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changed))


def edit_the_weights(folder):
    path = folder / "base" / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})


SOURCES = {
    "weights": (edit_the_weights, "base weights"),
    "configuration": (edit_json("base/config.json", layer_norm_eps=0.1), "base configuration"),
    "generation": (edit_json("base/generation_config.json", repetition_penalty=1.5), "base configuration"),
    "vocabulary": (add_a_word, "tokenizer or its chat template"),
    "template": (replaced("base/chat_template.jinja", "<assistant>", "<model>"), "tokenizer or its chat template"),
    "training text": (replaced("text.txt", " ", "  "), "training text"),
    "retention text": (replaced("kept.txt", " ", "  "), "text of retention"),
    "prompt": (replaced("tasks/own_choice.yaml", "'{{text}}'", "'So {{text}}'"), "prompts"),
    "continuation": (replaced("tasks/own_word.yaml", "'' '' + word", "''  '' + word"), "prompts"),
    "stop of generation": (replaced("tasks/own_speech.yaml", "max_gen_toks: 8", "max_gen_toks: 5"), "prompts"),
    "right answer": (replaced("tasks/own_choice.yaml", "doc_to_target: 0", "doc_to_target: 1"), ""),
    "metric": (replaced("tasks/own_word.yaml", "metric: perplexity", "metric: acc_all"), "metrics, filters or code"),
    "filter": (replaced("tasks/own_speech.yaml", "(\\w+)", "(\\w)"), "metrics, filters or code"),
    "scoring": (
        replaced("tasks/scoring.py", "values.index(max(values))", "values.index(min(values))"),
        "metrics, filters",
    ),
    "helper of scoring": (replaced("tasks/scoring.py", "WEIGHT * float", "WEIGHT - float"), "metrics, filters"),
    "constant of scoring": (replaced("tasks/scoring.py", "WEIGHT = 1.0", "WEIGHT = 2.0"), "metrics, filters"),
    "file of scoring": (replaced("tasks/factor.txt", "1.0", "2.0"), "metrics, filters"),
    "documents": (replaced("tasks/rows.jsonl", '"text": "', '"text": "Then '), ""),
    "method": (replaced("mine_of_identity.py", "q + added", "q - added"), "settings or code of the method"),
    "helper of the method": (
        replaced("mine_of_identity.py", "FACTOR * parts", "parts"),
        "settings or code of the method",
    ),
    "constant of the method": (replaced("mine_of_identity.py", "= 2.0", "= 3.0"), "settings or code of the method"),
}
"""Each source of text that decides a score, how it is changed alone, and what the refusal calls it."""


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_does_not_grow_where_a_source_has_changed(restored, source):
    change, named = SOURCES[source]
    change(restored)
    sys.modules.pop("mine_of_identity", None)
    for cached in restored.rglob("*.pyc"):
        cached.unlink()
    out = restored / "out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(HfpatchError, match="choose another --out") as caught:
        compare(recipe(restored, "lora"), out, resume=True, progress=Nothing())
    assert named in str(caught.value)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_grows_where_nothing_has_changed(restored):
    results = compare(recipe(restored, "lora"), restored / "out", resume=True)
    assert set(results["methods"]) == {"baseline", "mine", "lora"}
    assert not [warning for warning in results["warnings"] if "computed with" in warning]


@pytest.mark.parametrize(
    ("name", "before", "after"), [("text", "Hm", "So"), ("scoring", "WEIGHT = 1.0", "WEIGHT = 0.5")]
)
def test_a_task_that_changes_while_a_run_is_on_stops_it(restored, tmp_path, name, before, after):
    file = "tasks/own_code.yaml" if name == "text" else "tasks/scoring.py"

    class Edits(Progress):
        def started(self, run, steps):
            replaced(file, before, after)(restored)
            for cached in restored.rglob("*.pyc"):
                cached.unlink()
            (restored / "tasks" / "own_code.yaml").touch()

    with pytest.raises(HfpatchError, match=r"baseline/seed-0/result.json: its scores on own_code are of other"):
        compare(recipe(restored), tmp_path / "out", progress=Edits())


# --- settings of an evaluation ----------------------------------------------------------------------------------------

IN_TURNS = {"apply_chat_template": True}
SETTINGS = {
    "tasks": ({}, {"tasks": {name: {"limit": 3} if name == "own_choice" else None for name in TASKS}}),
    "include_path": ({}, {"include_path": "others"}),
    "limit": ({}, {"limit": 4}),
    "num_fewshot": ({}, {"num_fewshot": 0}),
    "max_length": ({}, {"max_length": 24}),
    "cluster": ({}, {"cluster": {"own_choice": "half"}}),
    "apply_chat_template": ({}, IN_TURNS),
    "system_instruction": ({}, {"system_instruction": "Answer."}),
    "fewshot_as_multiturn": (IN_TURNS, {**IN_TURNS, "fewshot_as_multiturn": False}),
    "gen_kwargs": ({}, {"gen_kwargs": {"max_gen_toks": 3}}),
    "seed": ({}, {"seed": (0, 0, 0, 7)}),
    "batch_size": ({}, {"batch_size": 1}),
    "token_budget": ({}, {"token_budget": 64}),
    "allow_unknown_base": ({}, {"allow_unknown_base": True}),
    "confirm_run_unsafe_code": ({}, {"confirm_run_unsafe_code": True}),
}
"""Each setting: what it is changed from, and to."""
NO_SCORE = {"batch_size", "token_budget", "allow_unknown_base", "confirm_run_unsafe_code"}
"""Settings that change no score, but for rounding."""


def test_every_setting_is_tried():
    assert set(SETTINGS) == set(EvaluationSettings.model_fields)


class Scored:
    """Evaluations of the base, each made once, with a cache of their answers and without."""

    def __init__(self, folder, cache):
        self.base, self.folder, self.cache, self._known = load_base(str(folder / "base")), folder, cache, {}
        self.others = shutil.copytree(folder / "tasks", folder.parent / f"{folder.name}-others")
        replaced("own_code.yaml", "Hm", "So")(self.others)

    def __call__(self, changed, *, cached=False):
        changed = {**changed, **({"include_path": str(self.others)} if "include_path" in changed else {})}
        key = json.dumps([changed, cached], sort_keys=True)
        if key not in self._known:
            asked = settings(self.folder, **changed)
            storage = Storage(answers=self.cache if cached else None, base_sha256=self.base.sha256)
            scores = evaluate(self.base.model, self.base.tokenizer, select(asked), storage=storage)
            self._known[key] = asked, scores
        return self._known[key]


@pytest.fixture(scope="module")
def scored(folder, tmp_path_factory):
    scorer = Scored(folder, tmp_path_factory.mktemp("answers"))
    for before, _ in SETTINGS.values():
        scorer(before, cached=True)  # answers that a change must not be given
    return scorer


def results_of(asked, scores, **model) -> ComparisonResults:
    facts = {"name": "base", "sha256": "a" * 64, "dtype": "float32", **model}
    run = {"parameters": Parameters(trainable=0, added=0, base=1), "runs": {0: Run(evaluation=scores)}}
    return ComparisonResults(
        name="one",
        complete=True,
        model=facts,
        evaluation=asked.model_dump(mode="json"),
        tasks={name: score.shared for name, score in scores.items()},
        methods={"baseline": Method(**run), "mine": Method(parts=[{"type": "mine"}], **run)},
    )


def alike(first, second):
    """Whether two evaluations have the same scores, but for rounding."""
    return all(
        (score.n, score.clusters) == (second[task].n, second[task].clusters)
        and score.metrics == pytest.approx(second[task].metrics, rel=1e-5)
        for task, score in first.items()
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_a_score_is_told_apart_in_all_places(folder, scored, tmp_path, name):
    before, after = (scored(chosen) for chosen in SETTINGS[name])
    first, second = results_of(*before), results_of(*after)
    new = {task: task_identity(score) for task, score in after[1].items()}
    # the cache
    assert alike(scored(SETTINGS[name][1], cached=True)[1], after[1])
    if name in NO_SCORE:
        assert alike(before[1], after[1])
        assert {task: task_identity(score) for task, score in before[1].items()} == new
        return
    # a resumed run, by its recipe and, whatever that says, by its scores
    assert not alike(before[1], after[1]) or name in ("seed", "gen_kwargs")  # on this model
    write_text(tmp_path / "recipe.yaml", recipe(folder).model_copy(update={"evaluation": before[0]}).to_yaml())
    for run in ("baseline", "mine"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    assert changes(tmp_path, recipe(folder).model_copy(update={"evaluation": after[0]}))[1]
    if name != "cluster":  # which decides no score but its interval
        write_json(tmp_path / "result.json", {"evaluation": {task: s.to_json() for task, s in before[1].items()}})
        with pytest.raises(HfpatchError, match="its scores on own_"):
            check_scores(tmp_path / "result.json", new)
    # a joint report and the explorer
    assert [*measured_differently({"first": first, "second": second})]
    axes = [{entry.axis for entry in entries(results)} for results in (first, second)]
    assert axes[0] != axes[1]


# --- the one list, in reports -----------------------------------------------------------------------------------------


def with_task(raw, name):
    for info in raw["tasks"].values():
        info[name] = "e" * 64


def with_base(raw, name):
    (raw["model"] if name == "base_weights" else raw["model"]["identity"])[
        {"base_weights": "sha256"}.get(name, name)
    ] = "e" * 64


def with_computing(raw, name):
    for method in raw["methods"].values():
        for run in method["runs"].values():
            run["computed_with"][name] = "another"


LISTED = [
    *((with_task, name) for name in OF_TASK),
    *((with_base, name) for name in OF_BASE),
    *((with_computing, name) for name in COMPUTED_WITH),
]


@pytest.mark.parametrize(("change", "name"), LISTED, ids=[name for _, name in LISTED])
def test_reports_of_several_runs_show_each_thing_on_the_list(change, name):
    raw, other = example(), copy.deepcopy(example())
    change(other, name)
    runs = {"first": ComparisonResults.model_validate(raw), "second": ComparisonResults.model_validate(other)}
    assert [*measured_differently(runs)]
    assert not [*trained_differently(runs)]
    shown = html(explorer_document([Source(label, results) for label, results in runs.items()]))
    alike = html(explorer_document([Source(label, runs["first"]) for label in runs]))
    assert shown != alike
    assert len({entry.axis for run in runs.values() for entry in entries(run)}) > 3 or "computed with another" in shown


# --- every key of a recipe --------------------------------------------------------------------------------------------

BASE = {
    "name": "small",
    "evaluation": {"tasks": ["tinyworld_cloze"]},
    "tuning": {"learning_rates": [1e-3, 1e-2], "held_out": 8},
    "methods": {"baseline": [], "lora": [{"type": "lora"}]},
}
QUANTISED = {"load_in_4bit": True}
MESSAGES, PAIRS = ({"format": name, "source": "chats"} for name in ("messages", "prompt_completion"))
KEYS = {
    "model": {
        "name": "tinyworld/gpt2", "gguf_file": "small.gguf", "revision": "v2", "dtype": "bfloat16",
        "load_in_8bit": True, "load_in_4bit": True,
        "bnb_4bit_quant_type": (QUANTISED, "fp4"), "bnb_4bit_use_double_quant": (QUANTISED, True),
        "attn_implementation": "eager", "trust_remote_code": True,
        "device_map": ({"device_map": {"model.layers.0": 0, "lm_head": 1}}, {"": "cpu"}),
    },
    "data": {
        "source": "tinyworld/base", "config": ({"source": "a/b"}, "de"), "split": "train[:50%]",
        "revision": ({"source": "a/b"}, "v2"), "format": ({"source": "chats"}, "messages"), "text_column": "body",
        "messages_column": (MESSAGES, "turns"), "prompt_column": (PAIRS, "question"),
        "completion_column": (PAIRS, "answer"), "prompt_template": (PAIRS, "Question: {}"), "max_documents": 50,
        "streaming": ({"source": "a/b", "max_documents": 5}, True),
        "mixture": [{"source": f"tinyworld/{name}", "weight": 1.0} for name in ("base", "shifted")],
        "chat_template": (MESSAGES, "chat.jinja"),
        "min_characters": 5, "block_size": 64, "layout": "padded", "held_out": 4, "append_eos": False,
        "seed": 1, "scored_tokens": 9, "group": ({"source": "notes.jsonl"}, "title"),
    },
    "training": {
        "steps": 90, "epochs": 1.5, "batch_size": 8, "micro_batch_size": 4, "lr": 1e-3,
        "learning_rates": {"lora": 1e-3},
        "schedule": "linear", "decay_steps": ({"schedule": "wsd"}, 5), "min_lr_ratio": 0.1, "warmup_steps": 5,
        "weight_decay": 0.1, "betas": [0.8, 0.9], "max_grad_norm": 2.0, "autocast": "bfloat16",
        "gradient_checkpointing": True, "compile": True, "evaluate_every": 5, "patience": ({"evaluate_every": 5}, 3),
        "keep_best": ({"evaluate_every": 5}, True), "save_every": 5, "keep_checkpoints": 2, "keep_finished": True,
        "report_to": ["tensorboard"], "seeds": [1], "on_bad_loss": "skip", "trainable_dtype": "bfloat16",
        "trainable_dtypes": {"lora": "bfloat16"},
    },
    "tuning": {
        "learning_rates": [1e-3, 2e-2], "steps": 50, "held_out": 9, "extend": 1, "grid": {"weight_decay": [0.0, 0.1]},
        "refine": 1,
    },
}  # fmt: skip
SECTIONS = {"model": ModelSettings, "data": DataSettings, "training": TrainingSettings, "tuning": TuningSettings}
FREE = {
    *("description", "data_dir", "evaluation.allow_unknown_base", "model.device_map", "model.trust_remote_code"),
    *("training.micro_batch_size", "training.gradient_checkpointing", "training.compile", "training.save_every"),
    *("training.keep_checkpoints", "training.keep_finished", "training.report_to"),
}
"""What a resumed run may have otherwise, as it decides no number but for rounding."""
EACH_KEY = [(section, key) for section, keys in KEYS.items() for key in keys]


def test_every_key_is_tried_and_only_these_are_free():
    assert {name: set(keys) for name, keys in KEYS.items()} == {k: set(v.model_fields) for k, v in SECTIONS.items()}
    assert FREE == NOT_IDENTITY


@pytest.mark.parametrize(("section", "key"), EACH_KEY, ids=[".".join(names) for names in EACH_KEY])
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_run_resumes_with_no_other_value_of_a_key_that_decides(section, key, tmp_path, monkeypatch):
    given = KEYS[section][key]
    before, after = given if isinstance(given, tuple) else ({}, given)
    base = Recipe.model_validate(BASE)  # it, and it with one key changed, need not be possible as a whole
    old = getattr(base, section).model_copy(update=before)
    first, second = (base.model_copy(update={section: part}) for part in (old, old.model_copy(update={key: after})))
    monkeypatch.setattr("hfpatch.runs.folder.load_study", lambda path, **_: None)
    monkeypatch.setattr("hfpatch.runs.folder.load_recipe", lambda path, **_: first)
    for run in ("baseline", "lora"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    assert bool(changes(tmp_path, second)[1]) == (f"{section}.{key}" not in FREE)
    raw, other = example(), example()
    if section == "model":
        for chosen, facts in ((first, raw), (second, other)):
            facts["model"] |= {"dtype": chosen.model.dtype, "loading": chosen.model.describe()}
        differ = base_identity(raw["model"]) != base_identity(other["model"])
        assert differ == (
            key not in (*NOT_OF_MODEL, "name", "gguf_file", "revision")
        )  # these are known by the hash of the weights
    if section == "training":
        for chosen, facts in ((first, raw), (second, other)):
            facts["training"] = chosen.training.model_dump(mode="json")
        runs = {"a": ComparisonResults.model_validate(raw), "b": ComparisonResults.model_validate(other)}
        assert [*trained_differently(runs)] or key == "seeds"
        if key != "seeds":
            assert html(explorer_document([Source(k, v) for k, v in runs.items()])) != html(
                explorer_document([Source(k, runs["a"]) for k in runs])
            )


# --- the code of a model ----------------------------------------------------------------------------------------------


def test_the_cache_and_a_base_know_the_modelling_file(restored):
    (restored / "base" / "modeling_mine.py").write_text(MODELLING)
    weights = load_file(restored / "base" / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("embed_out.weight")  # as the class calls it, whose folders nothing renames
    save_file(weights, restored / "base" / "model.safetensors", metadata={"format": "pt"})
    edit_json("base/config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})(restored)

    def hashes():
        base = load_base(str(restored / "base"), trust_remote_code=True)
        assert type(base.model).__name__ == "Mine"
        return identify_base(base).base_code, model_key(base.model, base.sha256)

    before = hashes()
    assert hashes() == before
    replaced("base/modeling_mine.py", "1.0 *", "2.0 *")(restored)
    assert all(now != then for now, then in zip(hashes(), before, strict=True))
