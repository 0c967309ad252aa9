from contextlib import nullcontext

import pytest
import torch
from families import perturb
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import CONFIG_MAPPING, BartForConditionalGeneration, PreTrainedTokenizerFast

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch, save_patch, unpatch
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.cache import model_key
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.models.attention import fast_attention
from hfpatch.support.cpu import has_onednn
from hfpatch.surgery.bases import load_base
from hfpatch.twins import random_model, shrink


def requests(kind, arguments):
    return [Instance(kind, {}, args, 0, metadata=("some_task", i, 1)) for i, args in enumerate(arguments)]


def assert_same(got, expected):
    """The same log-likelihoods to rounding, and the same decisions."""
    (values, decisions), (others, also) = (zip(*answers, strict=True) for answers in (got, expected))
    torch.testing.assert_close(values, others, rtol=1e-6, atol=1e-4)
    assert decisions == also


@pytest.fixture
def pairs(support):
    made = []
    for text in support.passages(12):
        context, _, word = text.rpartition(" ")
        endings = [(context, f" {word}"), (context, " lamp post"), (f"{context} ", word)]
        made += [*endings, ("", text), (text * 3, " again")]
    return made


def test_names_are_known():
    assert get_model("hfpatch") is HfpatchLM
    assert get_model("hf") is HFLM
    with pytest.raises(HfpatchError, match="gpt-3"):
        HfpatchLM("tinyworld/gpt-3")


def test_one_text_split_at_two_places(model, tokenizer):
    """lm-eval 0.4.13 scores such a pair together, and gives the shorter continuation the longer one's first scores."""
    text = "Anna took the lamp to the garden. In the garden"
    made = requests("loglikelihood", [(text[:cut], text[cut:]) for cut in (20, 34)])
    apart = [HFLM(model, tokenizer=tokenizer).loglikelihood([request])[0] for request in made]
    assert_same(HfpatchLM(model, tokenizer=tokenizer).loglikelihood(made), apart)


FIRST_TOKENS = [{"add_bos_token": True}, {"add_bos_token": False}, {"prefix_token_id": 5}]


@pytest.mark.parametrize("options", [*({"batch_size": size, "max_length": 64} for size in (1, 5)), *FIRST_TOKENS])
def test_loglikelihoods_equal_hflm(model, tokenizer, options, pairs, support):
    made = [*pairs, ("<|endoftext|>Anna left", " the lamp"), ("", "<|endoftext|>Anna")]
    both = [kind(model, tokenizer=tokenizer, **options) for kind in (HfpatchLM, HFLM)]
    assert_same(*(scorer.loglikelihood(requests("loglikelihood", made)) for scorer in both))
    texts = [(text * length,) for length, text in enumerate(support.passages(5), start=1)]
    rolling = requests("loglikelihood_rolling", texts)
    torch.testing.assert_close(*(scorer.loglikelihood_rolling(rolling) for scorer in both), rtol=1e-6, atol=1e-4)


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
def test_loglikelihoods_by_onednn_equal_hflm(model, tokenizer, pairs, monkeypatch):
    asked = requests("loglikelihood", pairs)
    expected = HFLM(model, tokenizer=tokenizer, batch_size=1).loglikelihood(asked, disable_tqdm=True)
    keys = []
    for library in ("mkl", "onednn"):
        monkeypatch.setenv("HFPATCH_MATMUL", library)
        answers = HfpatchLM(model, tokenizer=tokenizer).loglikelihood(asked)
        assert_same(answers, expected)
        keys.append(model_key(model))
    assert keys[0] != keys[1]
    assert not any("forward" in vars(module) for module in model.modules())


def test_generation_equals_hflm(model, tokenizer, support):
    arguments = [(text, {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}) for text in support.passages(3)]
    ours, theirs = (kind(model, tokenizer=tokenizer, batch_size=2) for kind in (HfpatchLM, HFLM))
    got = ours.generate_until(requests("generate_until", arguments))
    assert got == theirs.generate_until(requests("generate_until", arguments))
    assert any(got)


def test_loglikelihood_is_the_formula(taught, tokenizer, pairs, support):
    made = [pair for pair in pairs if pair[0] and not pair[0].endswith(" ")]
    scorer = HfpatchLM(taught, tokenizer=tokenizer, batch_size=4)
    got = scorer.loglikelihood(requests("loglikelihood", made))
    expected = [support.continuation(taught, tokenizer, *pair) for pair in made]
    assert_same(got, [(float(log.sum()), bool(matches.all())) for log, matches in expected])
    assert {greedy for _, greedy in got} == {True, False}
    counted = scorer.loglikelihood_per_token(requests("loglikelihood_per_token", made))
    assert_same(counted, [(float(log.sum()), len(log)) for log, _ in expected])
    both = scorer.loglikelihood(requests("loglikelihood", pairs)), scorer.loglikelihood_per_token(requests("", pairs))
    assert [value for value, _ in both[0]] == [value for value, _ in both[1]]  # also without a context


def test_bf16_models_are_scored_in_fp32(taught, tokenizer, pairs, support):
    half = support.gpt_neox()
    half.load_state_dict(taught.state_dict())
    half = half.to(torch.bfloat16)
    with fast_attention():  # rounds other values than torch's kernel in bf16
        logs = {pair: support.continuation(half, tokenizer, *pair)[0] for pair in pairs if pair[0]}
    pair, log = min(logs.items(), key=lambda item: float(item[1].sum()))
    ((value, _),) = HfpatchLM(half, tokenizer=tokenizer).loglikelihood(requests("loglikelihood", [pair]))
    expected = float(log.sum())
    assert abs(value - expected) <= 1e-4 + 1e-6 * abs(expected)
    assert abs(float(log.bfloat16().sum()) - expected) > 1e-3  # what a softmax in bf16 would give at best
    with pytest.raises(HfpatchError, match="softmax_dtype is bfloat16"):
        HfpatchLM(half, tokenizer=tokenizer, softmax_dtype="bfloat16")


@pytest.mark.parametrize("library", ["bf16", "fp32"])
def test_bf16_scores_are_those_of_lm_eval_in_bf16_up_to_rounding(
    taught, tokenizer, pairs, support, monkeypatch, library
):
    """Both differ from the same weights in fp64 by bf16's rounding, hfpatch at most 1.5 times as much as lm-eval."""
    made = requests("loglikelihood", [pair for pair in pairs if pair[0]])
    models = {dtype: support.gpt_neox().to(dtype) for dtype in (torch.bfloat16, torch.float64)}
    for model in models.values():
        model.load_state_dict({name: value.bfloat16() for name, value in taught.state_dict().items()})
    monkeypatch.setenv("HFPATCH_MATMUL", library)
    assert model_key(models[torch.bfloat16])["matmul"] == library
    values = HfpatchLM(models[torch.bfloat16], tokenizer=tokenizer).loglikelihood(made)
    peer = HFLM(models[torch.bfloat16], tokenizer=tokenizer, softmax_dtype="float32").loglikelihood(made)
    exact = [float(support.continuation(models[torch.float64], tokenizer, *request.args)[0].sum()) for request in made]
    ours, others = (max(abs(v - e) for (v, _), e in zip(answers, exact, strict=True)) for answers in (values, peer))
    assert 1e-4 < ours < 1.5 * others + 1e-3
    assert sum(a != b for (_, a), (_, b) in zip(values, peer, strict=True)) <= 1


@pytest.mark.parametrize("content_skip", [True, False])
def test_a_folder_and_its_patch_are_loaded(tokenizer, tmp_path, pairs, support, content_skip):
    """Also where a part of the patch is given as HFLM's ``peft``."""
    made, base = requests("loglikelihood", pairs[:6]), support.gpt_neox()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    plain = HfpatchLM(str(tmp_path / "base"), batch_size=2).loglikelihood(made)
    assert_same(plain, HfpatchLM(base, tokenizer=tokenizer).loglikelihood(made))
    patched = patch(base, PreProjectionConfig(content_skip=content_skip))
    with torch.no_grad():
        perturb(patched, std=0.05)
    save_patch(patched, tmp_path / "patch")
    expected = HfpatchLM(patched, tokenizer=tokenizer).loglikelihood(made)
    for given in ({"patch": str(tmp_path / "patch")}, {"peft": str(tmp_path / "patch" / "pre_projection")}):
        assert_same(HfpatchLM(str(tmp_path / "base"), **given).loglikelihood(made), expected)
    assert abs(expected[0][0] - plain[0][0]) > 1e-3


@torch.no_grad()
def test_paragraphs_are_cut_and_start_unconditioned(model, tokenizer, support):
    text = " ".join(support.passages(3))
    scorer = HfpatchLM(model, tokenizer=tokenizer)
    for longest in (20, 10_000):
        made = requests("paragraph_loglikelihood", [(text, longest)])
        ((value, tokens, size),) = scorer.paragraph_loglikelihood(made)
        ids = torch.tensor([tokenizer(text)["input_ids"][: min(longest, 128)]])
        assert tokens == ids.shape[1] - 1
        assert size == len(tokenizer.decode(ids[0, 1:]).encode())
        assert value == pytest.approx(-float(model(ids, labels=ids).loss) * tokens, rel=1e-5)
    with pytest.raises(HfpatchError, match="task some_task, document 0: its context or its continuation has no token"):
        scorer.paragraph_loglikelihood(requests("paragraph_loglikelihood", [("a", 512)]))


def test_nan_names_the_document(tokenizer, support):
    model = support.gpt_neox()
    scorer = HfpatchLM(model, tokenizer=tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("%")["input_ids"][0]] = float("nan")
    made = [("Anna left", " the lamp"), ("Anna % left", " the lamp")]
    assert scorer.loglikelihood(requests("loglikelihood", made[:1]))[0][0] < 0
    for kind, given, message in [
        ("loglikelihood", made, "task some_task, document 1: the log-likelihood is NaN"),
        ("loglikelihood_rolling", [("100 % of it",)], "document 0: the log-likelihood is NaN"),
        ("loglikelihood_per_token", made[1:], "document 0: the log-likelihood is NaN"),
    ]:
        with pytest.raises(HfpatchError, match=message):
            getattr(scorer, kind)(requests(kind, given))


def test_a_tokenizer_without_a_first_token_is_refused(model, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(HfpatchError, match="neither a bos_token nor an eos_token"):
        HfpatchLM(model, tokenizer=bare)


def test_what_cannot_be_scored_names_the_document(model, tokenizer, support):
    scorer = HfpatchLM(model, tokenizer=tokenizer, max_length=8)
    text = next(support.passages(1))
    for pair, why in [
        (("Anna", text), "document 1: its continuation has .* tokens and the model's longest row 8"),
        (("Anna", ""), "document 1: its context or its continuation has no token"),
        (("", ""), "document 1: its context or its continuation has no token"),
    ]:
        with pytest.raises(HfpatchError, match=why):
            scorer.loglikelihood(requests("loglikelihood", [("Anna", " left"), pair]))
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data[:40]
    with pytest.raises(HfpatchError, match=r"token \d+ is not among the model's 40 embeddings"):
        scorer.loglikelihood(requests("loglikelihood", [("Anna", " left")]))


def test_a_context_longer_than_the_model_is_cut_and_the_log_says_so(model, tokenizer, support, caplog):
    made = [(text * 2, " again") for text in support.passages(3)] + [("Anna", " left")]
    options = {"tokenizer": tokenizer, "max_length": 32}
    got = HfpatchLM(model, **options).loglikelihood(requests("loglikelihood", made))
    assert "3 of 4 requests have more than 32 tokens; their contexts are truncated from the left" in caplog.text
    assert_same(got, HFLM(model, **options).loglikelihood(requests("loglikelihood", made)))


def test_patching_and_unpatching_are_noticed(model, tokenizer, pairs):
    scorer = HfpatchLM(model, tokenizer=tokenizer)
    made = requests("loglikelihood", pairs[:10])
    bare, key = scorer.loglikelihood(made), model_key(model)
    patch(model, NonlinearQueryConfig(form="literal")).eval()
    patched = scorer.loglikelihood(made)
    assert_same(patched, HFLM(model, tokenizer=tokenizer).loglikelihood(made))
    assert patched != bare
    unpatch(model)
    assert (scorer.loglikelihood(made), model_key(model)) == (bare, key)


def test_lm_evals_own_cache_is_served(tokenizer, pairs, support, tmp_path):
    made = requests("loglikelihood", pairs[:4])
    scorer = HfpatchLM(support.gpt_neox(), tokenizer=tokenizer)
    cached = CachingLM(scorer, str(tmp_path / "cache.db"))
    first = cached.loglikelihood(made)
    scorer._scorer = None
    assert list(map(tuple, cached.loglikelihood(made))) == first


@pytest.mark.parametrize("kind", ["bart", "marian", "pegasus", "prophetnet"])
def test_decoders_of_encoder_decoder_types_are_causal_models(kind, tokenizer, pairs, tmp_path):
    model = random_model(shrunk(kind, tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"tokenizer": tokenizer, "max_length": 48}
    made = requests("loglikelihood", pairs[:8])
    expected = HFLM(model, backend="causal", **options).loglikelihood(made)
    assert_same(HfpatchLM(load_base(str(tmp_path)).model, **options).loglikelihood(made), expected)


def shrunk(kind, tokenizer):
    config = shrink(CONFIG_MAPPING[kind]())
    config.vocab_size = config.decoder_vocab_size = len(tokenizer)
    return config


def test_encoder_decoder_models_are_refused(tokenizer, support):
    with pytest.raises(HfpatchError, match="backend is seq2seq"):
        HfpatchLM(support.gpt2(), tokenizer=tokenizer, backend="seq2seq")
    with pytest.raises(HfpatchError, match="BartForConditionalGeneration is not a causal language model"):
        HfpatchLM(BartForConditionalGeneration(shrunk("bart", tokenizer)), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("kind", "refused"), [("gpt2", True), ("opt", True), ("gptj", True), ("llama", False), ("bloom", False)]
)
def test_rows_longer_than_a_table_of_positions_are_refused(kind, refused, tokenizer):
    model = random_model(shrunk(kind, tokenizer))
    HfpatchLM(model, tokenizer=tokenizer, max_length=64)
    with pytest.raises(HfpatchError, match="only 64 position embeddings") if refused else nullcontext():
        HfpatchLM(model, tokenizer=tokenizer, max_length=65)
