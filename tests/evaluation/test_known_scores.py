import pytest

from hfpatch.evaluation import TaskResult, check_known_scores
from hfpatch.evaluation.known_scores import KNOWN_SCORES


def results(acc, n=5153, task="lambada_openai", num_fewshot=0):
    return {task: TaskResult(task, n, {"acc": acc, "perplexity": 5.0}, {}, "acc", True, num_fewshot, "", "1.0")}


def check(acc, name="EleutherAI/pythia-410m", revision=None, dtype="float32", **options):
    return check_known_scores(name, revision, dtype, results(acc, **options))


def test_a_broken_base_is_named():
    (sentence,) = check(0.466)
    assert sentence.startswith(
        "EleutherAI/pythia-410m scores 0.466 on lambada_openai (acc, 5153 documents), but 0.516 ±"
    )
    assert "EleutherAI/pythia" in sentence
    assert len(check(0.128, "EleutherAI/pythia-160m", "step123000", n=500)) == 1
    assert len(check(0.58)) == 1


def test_a_sound_base_passes():
    assert check(0.516) == check(0.500) == []
    assert check(0.53, task="arc_easy", n=2376) == []
    assert check(0.45, n=200) == []  # 200 documents cannot tell


@pytest.mark.parametrize(
    "case",
    [
        {"name": "EleutherAI/pythia-70m"},
        {"revision": "step1000"},
        {"dtype": "bfloat16"},
        {"num_fewshot": 5},
        {"task": "hellaswag"},
        {"name": "EleutherAI/pythia-160m"},
    ],
)
def test_nothing_is_said_where_nothing_is_known(case):
    assert check(0.1, **case) == []


def test_the_table_is_the_published_one():
    known = {(score.model, score.revisions[0], score.task): (score.value, score.error) for score in KNOWN_SCORES}
    assert known == {
        ("EleutherAI/pythia-410m", "step143000", "lambada_openai"): (0.516, 0.007),
        ("EleutherAI/pythia-410m", "step143000", "arc_easy"): (0.521, 0.010),
        ("EleutherAI/pythia-160m", "step123000", "lambada_openai"): (0.331, 0.007),
    }
    assert all(score.source and score.dtypes for score in KNOWN_SCORES)
