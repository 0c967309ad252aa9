import subprocess
import sys

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.model import HfpatchLM


def requests(kind, arguments):
    return [Instance(kind, {}, args, 0, metadata=("some_task", i, 1)) for i, args in enumerate(arguments)]


@pytest.fixture
def pairs(support):
    made = []
    for text in support.passages(12):
        context, _, word = text.rpartition(" ")
        made += [
            (context, f" {word}"),
            (context, " lamp post"),
            (f"{context} ", word),
            ("", text),
            (text * 3, " again"),
        ]
    return made


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_registers_the_model_without_torch():
    code = """
import sys, hfpatch.evaluation, hfpatch.evaluation.settings
print([name for name in ('torch', 'transformers', 'datasets', 'scipy') if name in sys.modules])
from lm_eval.api.registry import model_registry
print('hf' in model_registry, 'hfpatch' in model_registry)
"""
    assert run(code).splitlines() == ["[]", "True True"]


def test_lm_eval_finds_the_model_by_name():
    from lm_eval.api.registry import get_model

    import hfpatch.evaluation  # noqa: F401

    assert get_model("hfpatch") is HfpatchLM
    assert get_model("hf") is HFLM


@pytest.mark.parametrize("batch_size", [1, 5])
def test_loglikelihoods_equal_hflm(model, tokenizer, batch_size, pairs, support):
    options = {"tokenizer": tokenizer, "batch_size": batch_size, "max_length": 64}
    ours, theirs = HfpatchLM(model, **options), HFLM(model, **options)
    made = pairs
    got = ours.loglikelihood(requests("loglikelihood", made))
    expected = theirs.loglikelihood(requests("loglikelihood", made))
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    torch.testing.assert_close([value for value, _ in got], [value for value, _ in expected], rtol=1e-6, atol=1e-4)
    texts = [(text * length,) for length, text in enumerate(support.passages(5), start=1)]
    rolling = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    also = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    torch.testing.assert_close(rolling, also, rtol=1e-6, atol=1e-4)


def test_generation_equals_hflm(model, tokenizer, support):
    arguments = [(text, {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}) for text in support.passages(3)]
    ours, theirs = (kind(model, tokenizer=tokenizer, batch_size=2) for kind in (HfpatchLM, HFLM))
    got = ours.generate_until(requests("generate_until", arguments))
    assert got == theirs.generate_until(requests("generate_until", arguments))
    assert any(got)


def test_loglikelihood_is_the_formula(taught, tokenizer, pairs, support):
    made = [pair for pair in pairs if pair[0] and not pair[0].endswith(" ")]
    got = HfpatchLM(taught, tokenizer=tokenizer, batch_size=4).loglikelihood(requests("loglikelihood", made))
    expected = [support.continuation(taught, tokenizer, *pair) for pair in made]
    torch.testing.assert_close(
        [value for value, _ in got], [float(log.sum()) for log, _ in expected], rtol=1e-6, atol=1e-4
    )
    greedy = [value for _, value in got]
    assert greedy == [bool(matches.all()) for _, matches in expected]
    assert {True, False} == set(greedy)


def test_bf16_models_are_scored_in_fp32(taught, tokenizer, pairs, support):
    half = support.gpt_neox()
    half.load_state_dict(taught.state_dict())
    half = half.to(torch.bfloat16)
    (pair,) = pairs[:1]
    ((value, _),) = HfpatchLM(half, tokenizer=tokenizer).loglikelihood(requests("loglikelihood", [pair]))
    log, _ = support.continuation(half, tokenizer, *pair)
    assert value == pytest.approx(float(log.sum()), rel=1e-6)
    with pytest.raises(HfpatchError, match="softmax_dtype is bfloat16"):
        HfpatchLM(half, tokenizer=tokenizer, softmax_dtype="bfloat16")


def test_a_folder_is_loaded_on_this_machine(model, tokenizer, tmp_path, pairs):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    made = pairs[:3]
    loaded = HfpatchLM(str(tmp_path), batch_size=2).loglikelihood(requests("loglikelihood", made))
    given = HfpatchLM(model, tokenizer=tokenizer, batch_size=2).loglikelihood(requests("loglikelihood", made))
    torch.testing.assert_close(loaded, given, rtol=1e-6, atol=1e-4)


def test_names_of_the_tiny_world_are_known():
    with pytest.raises(HfpatchError, match="gpt-3"):
        HfpatchLM("tinyworld/gpt-3")


def test_a_patch_is_put_on(tokenizer, tmp_path, pairs, support):
    from hfpatch import PreProjectionConfig, patch, save_patch

    base = support.gpt_neox()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    patched = patch(base, PreProjectionConfig(content_skip=True))
    with torch.no_grad():
        for parameter in patched.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    save_patch(patched, tmp_path / "patch")
    made = pairs[:4]
    expected = HfpatchLM(patched, tokenizer=tokenizer).loglikelihood(requests("loglikelihood", made))
    plain = HfpatchLM(str(tmp_path / "base")).loglikelihood(requests("loglikelihood", made))
    got = HfpatchLM(str(tmp_path / "base"), patch=str(tmp_path / "patch")).loglikelihood(
        requests("loglikelihood", made)
    )
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-4)
    assert abs(got[0][0] - plain[0][0]) > 1e-3


def test_tokens_are_counted(model, tokenizer, pairs, support):
    made = [pair for pair in pairs if pair[0] and not pair[0].endswith(" ")]
    scorer = HfpatchLM(model, tokenizer=tokenizer, batch_size=4)
    got = scorer.loglikelihood_per_token(requests("loglikelihood_per_token", made))
    expected = [support.continuation(model, tokenizer, *pair)[0] for pair in made]
    assert [tokens for _, tokens in got] == [len(log) for log in expected]
    torch.testing.assert_close(
        [value for value, _ in got], [float(log.sum()) for log in expected], rtol=1e-6, atol=1e-4
    )


@torch.no_grad()
def test_paragraphs_are_cut_and_start_unconditioned(model, tokenizer, support):
    text = " ".join(support.passages(3))
    scorer = HfpatchLM(model, tokenizer=tokenizer)
    for longest in (20, 10_000):
        ((value, tokens),) = scorer.paragraph_loglikelihood(requests("paragraph_loglikelihood", [(text, longest)]))
        ids = torch.tensor([tokenizer(text)["input_ids"][: min(longest, 128)]])
        assert tokens == ids.shape[1] - 1
        assert value == pytest.approx(-float(model(ids, labels=ids).loss) * tokens, rel=1e-5)
    with pytest.raises(HfpatchError, match="task some_task, document 0: one token"):
        scorer.paragraph_loglikelihood(requests("paragraph_loglikelihood", [("a", 512)]))


def test_nan_names_the_document(tokenizer, support):
    model = support.gpt_neox()
    scorer = HfpatchLM(model, tokenizer=tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("%")["input_ids"][0]] = float("nan")
    made = [("Anna left", " the lamp"), ("Anna % left", " the lamp")]
    assert scorer.loglikelihood(requests("loglikelihood", made[:1]))[0][0] < 0
    with pytest.raises(HfpatchError, match="task some_task, document 1: the log-likelihood is NaN"):
        scorer.loglikelihood(requests("loglikelihood", made))
    with pytest.raises(HfpatchError, match="document 0: the log-likelihood is NaN"):
        scorer.loglikelihood_rolling(requests("loglikelihood_rolling", [("100 % of it",)]))
    with pytest.raises(HfpatchError, match="document 0: the log-likelihood is NaN"):
        scorer.loglikelihood_per_token(requests("loglikelihood_per_token", made[1:]))
