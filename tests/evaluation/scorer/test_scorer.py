"""The scorer against lm-eval's own on every kind of attention, on bare and on patched models."""

import logging
import random

import families
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, GPT2LMHeadModel

from hfpatch import CanonConfig, NonlinearQueryConfig, PreProjectionConfig, patch
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer import Scorer, TokenRequest, exactness, scorer
from hfpatch.evaluation.scorer.batching import BatchLimits
from hfpatch.evaluation.scorer.head import BodyAndHead, WholeModel
from hfpatch.twins import random_model, shrink

LONGEST = 40
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.linear}
SMALL = BatchLimits(tokens=160, logits=1 << 14)
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MORE = {
    "mistral_window": ("mistral", {**families.LLAMA, "sliding_window": 22}),
    "mistral_narrow": ("mistral", {**families.LLAMA, "sliding_window": 6}),
    "granite": ("granite", {**families.LLAMA, "logits_scaling": 4.0}),
    "cohere": ("cohere", {**families.LLAMA, "logit_scale": 0.3}),
    "falcon_h1": ("falcon_h1", {**families.LLAMA, **MAMBA}),
    "lfm2": (
        "lfm2",
        {**families.LLAMA, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}
# case -> longest row that endings share; 0 is none
SHARED = {
    "gpt_neox": LONGEST,
    "gpt2": LONGEST,
    "llama": LONGEST,
    "gemma2": LONGEST,
    "opt": LONGEST,
    "granite": LONGEST,
    "cohere": LONGEST,
    "mistral_window": 22,
    "mistral_narrow": 0,
    "falcon_per_head": 0,
    "bloom": 0,
    "falcon_h1": 0,
    "lfm2": 0,
}
ROPE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 20}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
INDEXERS = ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"]
OF_WHOLE_ROWS = {  # type -> what limits its short rows to 20 tokens, or nothing where every length counts
    **{kind: {"index_topk": 20} for kind in INDEXERS},
    "doge": {"keep_window_size": 20},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 20},
    "llama": {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 20},
    "xlnet": {},
}
SURGERY = [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()]
LORA = LoraConfig(target_modules=["q_proj", "v_proj"])


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(families, "CASES", {**families.CASES, **MORE})
    return families.make_model


def tokens_of(generator, count):
    return [generator.randrange(3, families.VOCABULARY) for _ in range(count)]


@torch.no_grad()
def encoded(model, contexts=7, seed=0):
    """Requests of every kind: shared beginnings, one token, greedy, longer than the longest row, twice the same."""
    generator = random.Random(seed)
    made = []
    for number in range(contexts):
        context = tokens_of(generator, generator.choice([1, 4, 11, 25, 45]))
        shared = tokens_of(generator, 2)
        endings = [shared[: k % 3] + tokens_of(generator, 1 + (k * number) % 7) for k in range(4)]
        greedy = context[-30:]
        for _ in range(3):
            greedy = [*greedy, int(model(torch.tensor([greedy])).logits[0, -1].argmax())]
        endings += [greedy[-3:], greedy[-3:][:1], endings[0]]
        made += [(("context", f"ending {k}"), context, ending) for k, ending in enumerate(endings)]
    return made


def ours(model, requests, limits=SMALL, **options):
    answers = {}
    tokens = [TokenRequest.cut(context, ending, LONGEST) for _, context, ending in requests]
    Scorer(model, LONGEST, limits).score(tokens, answers.update, **options)
    return [answers[index] for index in range(len(requests))]


def theirs(model, tokenizer, requests, batch_size=4):
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=LONGEST, softmax_dtype="float32")
    return lm._loglikelihood_tokens(requests, disable_tqdm=True)


def assert_equal(got, expected):
    for (value, greedy), (other, also) in zip(got, expected, strict=True):
        assert abs(value - other) <= 1e-4 + 1e-6 * abs(other)
        assert greedy == also


@pytest.mark.parametrize("case", SHARED)
def test_answers_are_lm_evals(case, make, tokenizer):
    model = make(case)
    requests = encoded(model)
    expected = theirs(model, tokenizer, requests)
    assert_equal(ours(model, requests), expected)
    assert {greedy for _, greedy in expected} == {True, False}
    made = Scorer(model, LONGEST)
    assert isinstance(made.parts, BodyAndHead)
    assert made.sharing.longest == SHARED[case]


@pytest.mark.parametrize(
    ("case", "configs"),
    [
        ("gpt_neox", SURGERY),
        ("gpt2", [*SURGERY, LoraConfig(target_modules=["c_attn"])]),
        ("llama", [*SURGERY, LORA]),
        ("gemma2", SURGERY),
        ("bloom", SURGERY),
        ("mistral_window", [*SURGERY, LORA]),
        ("falcon_h1", [LORA]),
    ],
)
def test_answers_are_lm_evals_on_patched_models(case, configs, make, tokenizer):
    model = make(case)
    requests = encoded(model)
    before = ours(model, requests)
    patch(model, configs).eval()
    assert families.perturb(model)
    expected = theirs(model, tokenizer, requests)
    assert max(abs(value - other) for (value, _), (other, _) in zip(before, expected, strict=True)) > 0.1
    assert_equal(ours(model, requests), expected)
    assert Scorer(model, LONGEST).sharing.longest == SHARED[case]


@pytest.mark.parametrize(("case", "at"), [("gpt_neox", "input"), ("llama", "qkv")])
def test_answers_are_lm_evals_where_a_method_reads_earlier_positions(case, at, make, tokenizer):
    """In a row with several endings the position before a token's is not that of the token before it."""
    model = patch(make(case), CanonConfig(at=at)).eval()
    made = Scorer(model, LONGEST)  # at init, where no probe would find it
    assert made.sharing.longest == 0
    assert "earlier positions" in made.sharing.reason
    assert families.perturb(model, std=0.3)
    requests = encoded(model, contexts=4)
    assert_equal(ours(model, requests), theirs(model, tokenizer, requests))


@pytest.mark.parametrize("kind", [kind for kind in OF_WHOLE_ROWS if kind in CONFIG_MAPPING])
def test_rows_are_scored_one_by_one_where_their_length_decides(kind, tokenizer, caplog):
    def make():
        config = shrink(CONFIG_MAPPING[kind]())
        for name, value in OF_WHOLE_ROWS[kind].items():
            setattr(config, name, value)
        return random_model(config)

    requests = encoded(families.make_model("llama"), contexts=8)  # rows of 1 to 40 tokens, across the limit of 20
    short = [number for number, (_, context, ending) in enumerate(requests) if len(context) + len(ending) <= 20]
    assert 0 < len(short) < len(requests)
    expected = theirs(make(), tokenizer, requests, batch_size=1)
    scorer._warn_once.cache_clear()
    assert_equal(ours(make(), requests), expected)
    assert "one by one" in caplog.text
    assert_equal(ours(make(), [requests[number] for number in short]), [expected[number] for number in short])


def test_what_a_short_probe_misses_a_long_one_finds(make, tokenizer, monkeypatch):
    monkeypatch.setattr(exactness, "_WINDOWS", ())  # as where a configuration has another name for it
    model = make("mistral_window")
    requests = encoded(model)
    made = Scorer(model, LONGEST, SMALL)
    assert made.sharing.longest == LONGEST
    assert_equal(ours(model, requests), theirs(model, tokenizer, requests))
    made.batches([TokenRequest.cut(context, ending, LONGEST) for _, context, ending in requests], SMALL)
    assert made.sharing.longest < LONGEST


def test_rows_without_a_limit_share_batches(make, caplog):
    model = make("gpt_neox")
    scorer._warn_once.cache_clear()
    made = Scorer(model, LONGEST, SMALL)
    requests = [TokenRequest.cut(context, ending, LONGEST) for _, context, ending in encoded(model)]
    assert max(map(len, made.batches(requests, SMALL))) > 1
    assert not caplog.records


def test_eager_attention_and_a_peft_model(make, tokenizer):
    from peft import get_peft_model

    model = make("llama")
    model.set_attn_implementation("eager")
    model = get_peft_model(model, LORA).eval()
    families.perturb(model)
    requests = encoded(model)
    assert_equal(ours(model, requests), theirs(model, tokenizer, requests))
    assert Scorer(model, LONGEST).sharing.longest == LONGEST


def test_virtual_tokens_in_front(make, tokenizer):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(make("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    requests = encoded(make("llama"))
    expected = theirs(model, tokenizer, requests)
    assert_equal(ours(model, requests), expected)
    assert isinstance(Scorer(model, LONGEST).parts, WholeModel)
    assert abs(expected[0][0] - ours(make("llama"), requests)[0][0]) > 1e-3


class RoundedProducts(TorchDispatchMode):
    """Rounds what matrix products take to TF32's 10 bits of mantissa."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.overloadpacket in PRODUCTS:
            arguments = [self.rounded(each) for each in arguments]
        return operator(*arguments, **(options or {}))

    @staticmethod
    def rounded(value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        return (value.detach().contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def test_decisions_are_those_of_the_products_that_the_model_computes(make, tokenizer):
    model = make("gpt_neox")
    requests = [(texts, context, ending[-1:]) for texts, context, ending in encoded(model, contexts=20)]
    exact = theirs(model, tokenizer, requests)
    with RoundedProducts():
        expected = theirs(model, tokenizer, requests)
        got = ours(model, requests)
    changed = [abs(value - other) for (value, _), (other, _) in zip(exact, expected, strict=True)]
    assert max(changed) > 1e-3
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    assert sum(greedy for _, greedy in got) >= 20


def test_neither_order_nor_budget_changes_a_decision(make):
    model = make("gpt_neox")
    requests = encoded(model)
    order = random.Random(1).sample(range(len(requests)), len(requests))
    first = ours(model, requests)
    shuffled = ours(model, [requests[index] for index in order])
    assert [first[index] for index in order] == shuffled  # bit for bit
    for limits in (BatchLimits(1, 1), BatchLimits(50, 100), BatchLimits(4000, 1 << 20)):
        assert_equal(ours(model, requests, limits), first)


class Doubled(GPT2LMHeadModel):
    """A model that does something to its logits that its configuration does not tell."""

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = output.logits * 2
        return output


def test_a_model_without_a_separable_head_is_scored_as_a_whole_with_a_warning(tokenizer, caplog):
    torch.manual_seed(0)
    model = Doubled(families.make_config("gpt2")).eval()
    requests = encoded(model)
    scorer._warn_once.cache_clear()
    assert_equal(ours(model, requests), theirs(model, tokenizer, requests))
    assert isinstance(Scorer(model, LONGEST).parts, WholeModel)
    assert [record.getMessage() for record in caplog.records] == [
        "Doubled: its head cannot be separated from its body; the logits of every position are computed"
    ]


def test_the_log_says_why_endings_do_not_share_a_row(make, caplog):
    scorer._warn_once.cache_clear()
    for case, why in [
        ("falcon_per_head", "ALiBi"),
        ("bloom", "position ids"),
        ("falcon_h1", "hybrid"),
        ("mistral_narrow", "a probe"),
        ("gpt_neox", None),
    ]:
        caplog.clear()
        Scorer(make(case), LONGEST)
        assert [why in record.getMessage() for record in caplog.records] == ([True] if why else [])


def test_of_a_broken_model_the_log_says_nothing_wrong(make, caplog):
    model = make("gpt_neox")
    torch.nn.init.constant_(model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight, float("nan"))
    scorer._warn_once.cache_clear()
    Scorer(model, LONGEST)
    assert not caplog.records


def test_known_requests_are_left_out_and_the_others_stay_bit_equal(make, monkeypatch):
    model = make("gpt_neox")
    requests = encoded(model)
    first = ours(model, requests)
    tokens = [TokenRequest.cut(context, ending, LONGEST) for _, context, ending in requests]
    made = Scorer(model, LONGEST, SMALL)
    rows = made.batches(tokens, SMALL)
    known = [index for tree in rows[0] for index, _ in tree.scored]
    answers = {}
    made.score(tokens, answers.update, known=known)
    assert set(answers) == set(range(len(requests))) - set(known)
    assert all(answers[index] == first[index] for index in answers)


class Memory:
    """Makes features as long as a batch is small enough."""

    def __init__(self, parts, tokens):
        self.parts, self.tokens = parts, tokens

    def __getattr__(self, name):
        return getattr(self.parts, name)

    def features(self, tokens, **inputs):
        if tokens.numel() > self.tokens:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")
        return self.parts.features(tokens, **inputs)


def test_a_quarter_is_tried_where_memory_is_too_small_and_nothing_is_lost(make):
    model = make("gpt_neox")
    requests = encoded(model)
    tokens = [TokenRequest.cut(context, ending, LONGEST) for _, context, ending in requests]
    expected = ours(model, requests)
    answers = {}
    made = Scorer(model, LONGEST, SMALL)
    made.parts = Memory(made.parts, 50)
    made.score(tokens, answers.update)
    assert_equal([answers[index] for index in range(len(tokens))], expected)
    made.parts = Memory(made.parts.parts, 30)
    with pytest.raises(HfpatchError, match="out of memory, even with 40 tokens at once"):
        made.score(tokens, answers.update)
    made.parts = Memory(made.parts.parts, 0)
    made.score(tokens, answers.update, known=range(len(tokens)))
