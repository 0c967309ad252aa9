import gzip
import os
from types import SimpleNamespace

import lm_eval
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.dummy import DummyLM
from lm_eval.tasks import TaskManager
from own_tasks import write_task

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import index, tasks
from hfpatch.evaluation.run import hash_task
from hfpatch.evaluation.tasks import load_tasks, local_data, read_documents, task_documents
from hfpatch.support.folders import eval_dir

PACKED = gzip.compress(b'{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": [], "label": "0"}', mtime=0)
TYPES = b'{"text": "one two"}\n{"text": 7}\n'


@pytest.fixture(autouse=True)
def no_full_index(monkeypatch):
    """Make indexing all of lm-eval's tasks an error."""

    def manager(*, include_defaults=True, **options):
        assert not include_defaults
        return TaskManager(include_defaults=False, **options)

    monkeypatch.setattr(index, "TaskManager", manager)


@pytest.mark.parametrize("shots", [None, 2])
def test_lm_evals_own_call_gets_the_examples_that_it_asks_for(data_dir, shots):
    """Also after another call has changed the task, which is built once and shared."""
    few = {"limit": 2, "bootstrap_iters": 0, "task_manager": TaskManager(include_defaults=False)}
    for asked in (1, shots):
        task = load_tasks(("arc_easy",), data_dir=data_dir)["arc_easy"]
        results = lm_eval.simple_evaluate(model="dummy", tasks=[task], num_fewshot=asked, **few)
        assert results["n-shot"] == {"arc_easy": asked or 0}
        context = results["samples"]["arc_easy"][0]["arguments"][0][0]
        assert context.count("Question: ") == 1 + (asked or 0)
    plain = lm_eval.evaluate(DummyLM(), load_tasks(("arc_easy",), data_dir=data_dir), limit=2, bootstrap_iters=0)
    assert plain["n-shot"] == {"arc_easy": 0}
    fixed = load_tasks(("arc_easy",), data_dir=data_dir, num_fewshot=0)["arc_easy"]
    pinned = lm_eval.simple_evaluate(model="dummy", tasks=[fixed], num_fewshot=2, **few)
    assert pinned["n-shot"] == {"arc_easy": 0}  # asked for from load_tasks: lm-eval leaves such a task as it is


def test_every_local_file_names_tasks_that_exist():
    ours = TaskManager(include_defaults=False, include_path=[eval_dir() / folder for folder in ("paper", "metamath")])
    assert set(local_data()) <= {*ours.task_index, *index._files()}


def test_without_a_data_folder_the_hub_is_asked(monkeypatch):
    asked = {}

    def load_dataset(path, name=None, **_):
        asked[path] = name
        raise ConnectionError(f"Couldn't reach {path!r}\nmore")

    monkeypatch.setattr("lm_eval.api.task.datasets.load_dataset", load_dataset)
    for name in ("lambada_openai", "paper_hellaswag"):
        message = rf"^task {name}: its data cannot be loaded \(Couldn't reach '.*'\); go online"
        with pytest.raises(HfpatchError, match=message):
            load_tasks((name,))
    assert asked == {"EleutherAI/lambada_openai": "default", "Rowan/hellaswag": None}


@pytest.mark.parametrize(("name", "meant"), [("helaswag", "hellaswag"), ("paper_lambda", "paper_lambada")])
def test_unknown_names(name, meant):
    with pytest.raises(HfpatchError, match=rf"unknown task '{name}' \(did you mean '{meant}'"):
        load_tasks((name,))


@pytest.mark.parametrize("given", [{"num_fewshot": -1}, {"fewshot_seed": -1}])
def test_a_number_out_of_range_is_one_line(given):
    with pytest.raises(HfpatchError, match=r"load_tasks: .*-1; must be"):
        load_tasks("tinyworld_cloze", **given)


def test_a_task_whose_file_has_another_name_is_found():
    assert "cola" not in index._files()
    entries = index.entries_of("cola", index.AddedFolder())
    assert entries["cola"].kind.name == "TASK"
    assert len(entries) < 100


@pytest.mark.parametrize("process", ["this one", "another one"])
@pytest.mark.parametrize("kind", ["data folder", "data_files", "pattern", "dictionary", "folder"])
def test_a_file_of_the_same_size_and_time_is_read_again(own_data_dir, tmp_path, support, kind, process, monkeypatch):
    """Also in another process, which has `datasets`' cache alone."""
    folder = tmp_path / "texts"
    file = own_data_dir / "lambada_openai" / "test.jsonl" if kind == "data folder" else folder / "rows.jsonl"
    given = {"data_dir": own_data_dir} if kind == "data folder" else {"include_path": tmp_path / "tasks"}
    name = "lambada_openai" if kind == "data folder" else "riddle"
    support.write_rows(file, [{"text": "one two", "gold": "A"}])
    (tmp_path / "tasks").mkdir()
    sources = {"data_files": str(file), "pattern": f"{folder}/*.jsonl", "dictionary": {"train": [str(file)]}}
    reading = {"dataset_kwargs": {"data_files": sources[kind]}} if kind in sources else {"dataset_path": str(folder)}
    reading |= {"dataset_kwargs": None} if kind == "folder" else {}
    word = {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{gold}}"}
    write_task(tmp_path / "tasks", "riddle", **word, metric_list=[{"metric": "acc"}], **reading)

    def text():
        return load_tasks((name,), **given)[name].eval_docs[0]["text"]

    assert text() == "one two"
    before = file.stat()
    file.write_text(file.read_text(encoding="utf-8").replace("one", "six"), encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)
    if process == "another one":
        monkeypatch.setattr(tasks, "_built", {})
    assert text() == "six two"
    assert load_tasks((name,), **given)[name] is load_tasks((name,), **given)[name]


@pytest.mark.parametrize(
    ("task", "file", "content", "message"),
    [
        ("lambada_openai", "lambada_openai/test.jsonl", None, "no such data file"),
        ("lambada_openai", "lambada_openai/test.jsonl", b"\n \n", "contains no documents"),
        ("paper_hellaswag", "hellaswag/validation.jsonl.gz", PACKED, "gz:1: no field 'ctx'; required fields"),
        ("lambada_openai", "lambada_openai/test.jsonl", TYPES, r"jsonl, document 1 \(counted from 0\): a field has"),
        ("paper_lambada", "lambada_openai/test.jsonl", b'{"text": "word"}\n', "task paper_lambada .* cannot be built"),
    ],
)
def test_bad_data_is_one_line(own_data_dir, task, file, content, message):
    path = own_data_dir / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(HfpatchError, match=message):
        load_tasks((task,), data_dir=own_data_dir)


def test_local_rows_are_read_with_only_the_fields(tmp_path):
    text = '{"a": 1, "b": "é", "c": null}\n\n{"b": "\\u2028", "a": [2]}\n'.encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(text)
    (packed := tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(text))
    for file in (path, packed):
        assert read_documents(file, ["a", "b"]) == [{"a": 1, "b": "é"}, {"a": [2], "b": "\u2028"}]


@pytest.fixture
def own_tasks(tmp_path, support):
    """A folder with a task of one's own, and its data elsewhere."""
    data, folder = tmp_path / "data" / "riddles.jsonl", tmp_path / "tasks"
    rows = [{"question": f"What is {n}?", "choices": ["a", "b"], "gold": n % 2} for n in range(4)]
    support.write_rows(data, rows)
    (folder / "deeper").mkdir(parents=True)
    riddle = {"doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
    riddle |= {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    write_task(folder / "deeper", "riddle", **riddle, dataset_kwargs={"data_files": str(data)})
    return folder


def test_a_task_has_the_same_hash_in_every_folder(tmp_path, support):
    def hashed(name, factor):
        (folder := tmp_path / name).mkdir()
        support.write_rows(folder / "rows.jsonl", [{"text": "one", "word": "two"}])
        code = "FACTOR = {}\ndef grade(doc, results):\n    return {{'acc': FACTOR * results[0][1]}}\n"
        (folder / "own.py").write_text(code.format(factor))
        given = {"doc_to_text": "text", "doc_to_target": "word", "process_results": "!function own.grade"}
        mean = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
        write_task(folder, "graded", output_type="loglikelihood", metric_list=[mean], **given)
        (task,) = load_tasks(("graded",), include_path=folder).values()
        return hash_task(task)

    assert hashed("here", 1) == hashed("there", 1) != hashed("changed", 2)


def rewrite(folder, old, new):
    file = folder / "deeper" / "riddle.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def test_tasks_of_ones_own_are_built_once_until_they_change_and_may_replace_another(own_tasks, data_dir):
    loaded = load_tasks(("riddle", "lambada_openai"), data_dir=data_dir, include_path=own_tasks)
    assert len(loaded["riddle"].eval_docs) == 4
    assert loaded["riddle"].doc_to_text(loaded["riddle"].eval_docs[2]) == "Question: What is 2?\nAnswer:"
    assert loaded["lambada_openai"].get_config("output_type") == "loglikelihood"
    assert load_tasks("riddle", include_path=str(own_tasks))["riddle"] is loaded["riddle"]
    rewrite(own_tasks, "Question:", "A question:")
    changed = load_tasks(("riddle",), include_path=own_tasks)["riddle"]
    assert changed.doc_to_text(changed.eval_docs[2]).startswith("A question:")
    rewrite(own_tasks, "task: riddle", "task: hellaswag")
    for path, documents in ((own_tasks, 4), (None, 24)):
        (task,) = load_tasks(("hellaswag",), data_dir=data_dir, include_path=path).values()
        assert len(task.eval_docs) == documents


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (("", ""), "ridle", r"unknown task 'ridle' \(did you mean 'riddle'.*include_path"),
        (("metric_list:", "metric_list: ["), "riddle", r"riddle\.yaml, line \d+: not valid YAML"),
        (("metric: acc", "metric: accc"), "riddle", r"riddle\.yaml\): there is no metric 'accc'"),
        (("metric: acc", "metric: accc\n  aggregation: mean"), "riddle", r"riddle\.yaml\): .*no metric 'accc'"),
        (("test_split", "nonsense: 3\ntest_split"), "riddle", r"riddle\.yaml\): cannot be built .*'nonsense'"),
        (("test_split", "process_docs: !function nowhere.f\ntest_split"), "riddle", r"riddle\.yaml\): cannot be built"),
        (("test_split: train", "test_split: nowhere"), "riddle", r"riddle\.yaml\): cannot be built .*nowhere"),
        (("riddles.jsonl", "gone.jsonl"), "riddle", r"task riddle: its data cannot be loaded .*gone\.jsonl.*write"),
    ],
)
def test_a_mistake_in_a_task_of_ones_own_is_one_line(own_tasks, change, name, message):
    rewrite(own_tasks, *change)
    with pytest.raises(HfpatchError, match=message):
        load_tasks((name,), include_path=own_tasks)
    with pytest.raises(HfpatchError, match=r"nowhere: no such folder; include_path"):
        load_tasks((name,), include_path=own_tasks / "nowhere")


def test_every_text_of_every_document_is_found_however_deep():
    """Also where the task's templates fail on a document."""
    documents = [{"ctx": "a", "endings": ["b", "c"], "label": 2, "more": {"d": ("e", None)}}, {"ctx": "f"}]
    read = task_documents({"task": SimpleNamespace(eval_docs=documents, get_config=lambda _: None)})["task"]
    assert [(document.read, document.texts) for document in read] == [([], ["a", "b", "c", "e"]), ([], ["f"])]


@pytest.mark.parametrize(
    ("few", "texts"),
    [
        ({"num_fewshot": 0, "fewshot_split": "train"}, ["c"]),
        ({"num_fewshot": 1, "fewshot_split": "train"}, ["c", "a", "b"]),
        ({"num_fewshot": 1, "fewshot_split": "test"}, ["c"]),  # the scored documents themselves
        ({"num_fewshot": 1, "fewshot_config": {"sampler": "first_n", "samples": [{"text": "d"}]}}, ["c", "d"]),
    ],
)
def test_documents_shown_as_examples_are_the_task_s_too(few, texts):
    data = {"train": Dataset.from_list([{"text": "a"}, {"text": "b"}]), "test": Dataset.from_list([{"text": "c"}])}
    form = {"output_type": "loglikelihood", "doc_to_text": "Say:", "doc_to_target": " {{text}}"}
    task = ConfigurableTask(
        config={"task": "own", "test_split": "test", "custom_dataset": lambda **_: data, **form, **few}
    )
    documents = task_documents({"own": task})["own"]
    assert [document.texts for document in documents] == [[text] for text in texts]
    assert [document.read for document in documents] == [[f"Say: {text}"] for text in texts]


def test_a_model_reads_a_prompt_with_each_answer():
    """The right one where it writes the answer itself; contexts where those are the choices; no answer alone."""
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["one A", "one B"], "doc_to_target": 0}
    forms = {
        "choice": {**choice, "doc_to_text": "Q:", "metric_list": [{"metric": "acc_mutual_info"}]},
        "inputs": {**choice, "doc_to_text": "{{gold}}", "doc_to_choice": ["A", "B"], "doc_to_target": "one"},
        "generated": {"output_type": "generate_until", "doc_to_text": "Q:", "doc_to_target": "{{answers}}"},
    }
    data = Dataset.from_list([{"gold": 0, "answers": ["A", "B"]}])
    common = {"task": "own", "test_split": "test", "custom_dataset": lambda **_: {"test": data}}
    read = task_documents({kind: ConfigurableTask(config={**common, **form}) for kind, form in forms.items()})
    assert {name: documents[0].read for name, documents in read.items()} == {
        "choice": ["Q: one A", "Q: one B"],
        "inputs": ["A one", "B one"],
        "generated": ["Q: A", "Q: B"],
    }
