"""Few-shot examples: none is the document itself, all models see the same ones, and lm-eval's command has its own."""

import lm_eval
import pytest
from own_tasks import write_task

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import evaluate, load_tasks, run
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.cautions import document_cautions

SPLITS = {  # name -> the task's keys, and whether lm-eval shows documents themselves
    "test alone": ({"test_split": "train"}, True),
    "validation alone": ({"test_split": None, "validation_split": "train"}, False),
    "named validation": ({"test_split": None, "validation_split": "train", "fewshot_split": "train"}, True),
    "named": ({"test_split": "train", "fewshot_split": "train"}, False),
    "a copy": ({"test_split": "train", "fewshot_split": "copy"}, True),
    "another": ({"test_split": "train", "fewshot_split": "other"}, False),
    "written out": (
        {"test_split": "train", "fewshot_config": {"samples": [{"question": "Who?", "answer": "me"}] * 2}},
        False,
    ),
}


@pytest.fixture
def write(tmp_path, support):
    """Return a function that writes a task of 24 questions in six groups."""

    def written(**keys):
        rows = [{"question": f"What comes after {n}?", "answer": f"{n + 1}", "group": f"g{n % 6}"} for n in range(48)]
        for name, part in (("rows", rows[:24]), ("other", rows[24:])):
            support.write_rows(tmp_path / f"{name}.jsonl", part)
        files = dict(zip(("train", "copy", "other"), ("rows", "rows", "other"), strict=True))
        data = {"data_files": {split: f"{tmp_path}/{name}.jsonl" for split, name in files.items()}}
        word = {"output_type": "loglikelihood", "doc_to_text": "Q: {{question}} A:", "doc_to_target": "{{answer}}"}
        task = {**word, "dataset_kwargs": data, "metric_list": [{"metric": "acc"}], **keys}
        write_task(tmp_path, "after", **task)
        return tmp_path

    return written


def asked(folder, support, tokenizer, shots=5, **options):
    """Return the prompts of the task and its result, which hfpatch's evaluation gives."""
    outputs, stock = [], run.run_lm_eval
    settings = EvaluationSettings(tasks=("after",), include_path=str(folder), num_fewshot=shots, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "run_lm_eval", lambda *given, **more: outputs.append(stock(*given, **more)) or outputs[0])
        result = evaluate(support.gpt_neox(512), tokenizer, select(settings))["after"]
    samples = outputs[0]["samples"]["after"]
    return [(sample["doc"], sample["arguments"][0][0]) for sample in samples], result


def of_lm_eval(folder, support, tokenizer, shots=5):
    """Return lm-eval's own prompts, with the model hfpatch, as hfpatch lm_eval asks them."""
    scorer = HfpatchLM(support.gpt_neox(512), tokenizer=tokenizer)
    tasks = load_tasks(("after",), include_path=folder, num_fewshot=shots)
    samples = lm_eval.evaluate(scorer, tasks, bootstrap_iters=0)["samples"]["after"]
    return [(sample["doc"], sample["arguments"][0][0]) for sample in samples]


def own_shown(prompts):
    return sum(prompt.count(document["question"]) > 1 for document, prompt in prompts)


@pytest.mark.parametrize("name", SPLITS)
def test_no_document_is_among_its_own_examples(write, support, tokenizer, name):
    keys, leaks = SPLITS[name]
    folder, shots = write(**keys), 2 if name == "written out" else 5
    theirs = of_lm_eval(folder, support, tokenizer, shots)
    ours, result = asked(folder, support, tokenizer, shots)
    assert (own_shown(theirs) > 0) == leaks
    assert own_shown(ours) == 0
    assert all(prompt.count("Q: ") == 1 + shots for _, prompt in ours)
    assert (ours != theirs) == leaks
    assert (result.few_shot is not None) == leaks
    warnings = [sentence for sentence in document_cautions({"after": result}) if "differ from lm-eval's" in sentence]
    assert len(warnings) == leaks
    assert all("fewshot_split" in sentence for sentence in warnings)
    assert of_lm_eval(folder, support, tokenizer, shots) == theirs  # the task is as it was


def test_the_examples_are_those_of_lm_eval_with_the_split_named(write, support, tokenizer):
    ours, _ = asked(write(test_split="train"), support, tokenizer)
    assert ours == of_lm_eval(write(test_split="train", fewshot_split="train"), support, tokenizer)


def test_every_model_is_asked_the_same(write, support, tokenizer):
    """The generator of examples is not where the last model left it."""
    settings = EvaluationSettings(tasks=("after",), include_path=str(write()), num_fewshot=2)
    chosen = select(settings)
    first, second = (evaluate(support.gpt_neox(512), tokenizer, chosen)["after"] for _ in range(2))
    assert first.prompts_sha256 == second.prompts_sha256


def test_examples_of_the_same_group_are_counted(write, support, tokenizer):
    prompts, result = asked(write(), support, tokenizer, cluster={"after": "group"})
    numbers = [[int(part.split("?")[0]) for part in prompt.split("What comes after ")[1:]] for _, prompt in prompts]
    related = sum(any(n % 6 == asked % 6 for n in others) for *others, asked in numbers)
    assert result.few_shot.related == related > 0
    assert any(
        f"{related} of 24 documents have a few-shot example" in text for text in document_cautions({"after": result})
    )


@pytest.mark.parametrize("keys", [{"test_split": "train"}, {"test_split": "train", "fewshot_split": "train"}])
def test_a_document_that_is_there_again_with_another_number_is_no_example(tmp_path, write, support, tokenizer, keys):
    folder = write(**keys)
    support.write_rows(
        tmp_path / "rows.jsonl",
        [{"question": f"Who is {n % 8}?", "answer": "me", "group": f"{n}"} for n in range(24)],
    )
    prompts, result = asked(folder, support, tokenizer)
    assert own_shown(prompts) == 0
    assert all(prompt.count("Q: ") == 6 for _, prompt in prompts)
    assert result.few_shot.own_left_out


@pytest.mark.parametrize("name", ["test alone", "a copy"])
@pytest.mark.parametrize("sampler", ["default", "first_n"])
def test_all_other_documents_can_be_examples(write, support, tokenizer, name, sampler):
    folder = write(**SPLITS[name][0], fewshot_config={"sampler": sampler})
    prompts, _ = asked(folder, support, tokenizer, shots=23)
    assert own_shown(prompts) == 0
    assert all(len({*prompt.split("Q: ")[1:]}) == 24 for _, prompt in prompts)


def test_too_many_examples_are_one_line(write, support, tokenizer):
    with pytest.raises(HfpatchError, match=r"task after: 24 few-shot examples cannot be chosen .*; lower num_fewshot"):
        asked(write(), support, tokenizer, shots=24)
