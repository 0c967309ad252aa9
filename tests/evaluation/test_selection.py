"""Tasks by their own names and by those of groups, tags and patterns, each with its limit; chat templates by name.

Prompts are compared with lm-eval's in test_same_as_lm_eval.py.
"""

import pytest
from lm_eval.tasks import TaskManager
from own_tasks import CHAT, SHORT, write_model, write_tasks
from transformers import AutoTokenizer

from hfpatch.__main__ import main
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import index, load_tasks
from hfpatch.evaluation.selection import select, template_arguments
from hfpatch.recipes.evaluation import EvaluationSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory, support):
    folder = tmp_path_factory.mktemp("own") / "tasks"
    write_tasks(folder, list(support.passages(12)))
    return folder


@pytest.fixture
def no_full_index(monkeypatch):
    """Make indexing all of lm-eval's tasks an error."""
    monkeypatch.setattr(index, "_everything", lambda: pytest.fail("all of lm-eval's tasks are indexed"))


@pytest.mark.usefixtures("no_full_index")
def test_groups_and_tags_of_ones_own(folder):
    chosen = select(EvaluationSettings(tasks=("own_group", "own_word"), include_path=folder))
    assert list(chosen.tasks) == ["own_choice", "own_other", "own_word"]
    choice = chosen.tasks["own_choice"]
    assert choice.doc_to_text(choice.eval_docs[0]).startswith("Now ")  # as the group says
    assert chosen.groups["own_group"].child_names == ["own_choice", "own_other"]
    assert list(load_tasks(["own_tag"], include_path=folder)) == ["own_choice", "own_other"]
    alone = load_tasks(["own_choice"], include_path=folder)["own_choice"]
    assert not alone.doc_to_text(alone.eval_docs[0]).startswith("Now ")


def test_limits_and_groups_of_documents_of_single_tasks(folder):
    tasks = {"own_group": {"limit": 0.3}, "own_word": {"limit": 5}, "own_page": None}
    settings = EvaluationSettings(tasks=tasks, limit=7, include_path=folder, cluster={"own_group": "word"})
    chosen = select(settings)
    assert chosen.limits == {"own_choice": 4, "own_other": 4, "own_word": 5, "own_page": 7}  # ⌈0.3 · 12⌉ is 4
    assert chosen.clusters == {"own_choice": "word", "own_other": "word"}


@pytest.mark.usefixtures("no_full_index")
def test_the_groups_of_lm_eval_have_the_tasks_that_it_gives_them():
    entries = index.entries_of("mmlu", index.AddedFolder())
    assert entries["mmlu"].kind.name == "GROUP"
    listed = {member["task"] if isinstance(member, dict) else member for member in entries["mmlu"].cfg["task"]}
    assert listed == {"mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities"}
    assert listed <= set(entries)
    assert sum(entry.kind.name == "TASK" for entry in entries.values()) == 57


def test_tags_and_patterns_of_lm_eval_need_its_whole_index(folder, monkeypatch):
    entries = index._index((index._files()["arc_easy"][0].parent,))  # in place of all, which takes seconds
    monkeypatch.setattr(index, "_everything", lambda: entries)
    index.entries_of.cache_clear()
    assert index.entries_of("ai2_arc", index.AddedFolder())["ai2_arc"].kind.name == "TAG"
    added = index.AddedFolder.at(folder)
    assert list(load_tasks(["own_[co]*"], include_path=folder)) == ["own_choice", "own_other"]
    assert "arc_easy" in index.entries_of("own_*", added)
    index.entries_of.cache_clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("own_chioce",)}, r"unknown task 'own_chioce' \(did you mean 'own_choice'\?\)"),
        ({"tasks": ("own_grup",)}, r"unknown task 'own_grup' \(did you mean 'own_group'\?\)"),
        ({"tasks": ("own_wordd_in_context",)}, r"unknown task .* \(did you mean '.*' or 'own_word'\?\)"),
        ({"tasks": ("own_group", "own_other")}, "task own_other: is part of both 'own_group' and 'own_other'"),
        ({"tasks": ("own/choice.yaml",)}, r"--tasks own/choice.yaml: name the task as the file does, .*include_path"),
        ({"tasks": ("ownn*",)}, r"ownn\*: no task, group or tag has this name"),
        ({"tasks": ("own_word",), "gen_kwargs": {"top_p": 1}}, "gen_kwargs: none of the tasks generates text"),
    ],
)
def test_mistakes_are_one_line(folder, monkeypatch, settings, message):
    monkeypatch.setattr(index, "_everything", dict)
    with pytest.raises(HfpatchError, match=message):
        select(EvaluationSettings(**settings, include_path=folder))


@pytest.mark.parametrize(
    ("mark", "message"),
    [("UNSAFE_CODE", "executes code that the model writes; evaluation.confirm"), ("MULTIMODAL", "images")],
)
def test_tasks_that_are_not_run_unasked(folder, monkeypatch, mark, message):
    task = load_tasks(["own_word"], include_path=folder)["own_word"]
    monkeypatch.setattr(task, mark, True, raising=False)
    with pytest.raises(HfpatchError, match=f"task own_word: .*{message}"):
        select(EvaluationSettings(tasks=("own_word",), include_path=folder))
    allowed = EvaluationSettings(tasks=("own_word",), include_path=folder, confirm_run_unsafe_code=True)
    if mark == "UNSAFE_CODE":
        assert list(select(allowed).tasks) == ["own_word"]


def test_the_tables_of_tasks_are_lm_evals(folder, capsys, monkeypatch):
    def manager(include_path, **_):
        return TaskManager(include_defaults=False, include_path=include_path)

    monkeypatch.setattr(index, "TaskManager", manager)  # without lm-eval's own tasks, which take seconds
    folders = [*index._HFPATCH_FOLDERS, folder]
    for words, given in (("list", {}), ("list_groups", {"list_subtasks": False, "list_tags": False})):
        assert main(["eval", "--tasks", words, "--include_path", str(folder)]) == 0
        assert capsys.readouterr().out == manager(folders).list_all_tasks(**given) + "\n"
    assert main(["eval", "--tasks", "list_tags", "--include_path", str(folder)]) == 0
    assert "own_tag" in capsys.readouterr().out
    assert main(["eval", "--tasks", "list", "--include_path", f"{folder}/gone"]) == 2
    for option in (["--limit", "3"], ["--json"], ["--model", "x"], ["--no-cache"], ["model.revision=main"]):
        capsys.readouterr()
        assert main(["eval", "--tasks", "list", *option]) == 2
        assert f"error: {option[0]}: --tasks list prints what tasks there are" in capsys.readouterr().err


def test_scores_of_groups_as_markdown_and_latex(capsys, folder):
    arguments = ["eval", "--model", "tinyworld/gpt2", "--tasks", "own_group,own_word", "--include_path", str(folder)]
    arguments += ["--limit", "own_word=3", "--limit", "5", "--no-cache"]
    assert main([*arguments, "--markdown"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| own_")]
    assert [(line[0], line[3], line[4]) for line in lines if line[3].startswith("acc")] == [
        ("| own_group", "acc", "10"),
        ("| own_choice", "acc", "5"),
        ("| own_choice", "acc_norm", "5"),
        ("| own_other", "acc", "5"),
        ("| own_word", "acc", "3"),
    ]
    mean, first, second = (float(line[5].split()[0]) for line in lines if line[3] == "acc" and line[0] != "| own_word")
    assert mean == pytest.approx((first + second) / 2, abs=1e-4)
    assert main([*arguments, "--latex"]) == 0
    printed = capsys.readouterr().out
    assert r"own\_group & 2.0 &" in printed
    assert printed.startswith(r"\begin{tabular}")


def test_templates_by_name(tmp_path, tokenizer, support):
    write_model(tmp_path / "one", support.gpt2(), tokenizer, CHAT)
    write_model(tmp_path / "two", support.gpt2(), tokenizer, {"default": CHAT, "short": SHORT})
    one, two = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert template_arguments(one, False) is template_arguments(one, True) is None
    chat = [{"role": "user", "content": "Hello"}]
    shown = [two.apply_chat_template(chat, tokenize=False, **template_arguments(two, name)) for name in (True, "short")]
    assert shown == ["<user>Hello\n", "Hello/"]
    with pytest.raises(HfpatchError, match=r"no template 'shrt' .did you mean 'short'.*; there are default, short"):
        template_arguments(two, "shrt")
    with pytest.raises(HfpatchError, match="the tokenizer has one template; give no name"):
        template_arguments(one, "short")
    with pytest.raises(HfpatchError, match="has no chat template; leave it out"):
        template_arguments(tokenizer, True)
