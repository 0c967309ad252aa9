"""The scorer against the model in fp64 and lm-eval's decisions: every kind of attention, bare and patched models."""

import copy
import random

import families
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, GPT2LMHeadModel

from hfpatch import CanonConfig, NonlinearQueryConfig, PreProjectionConfig, patch
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.scorer import Scorer, TokenRequest, exactness, scorer
from hfpatch.evaluation.scorer.batching import BatchLimits
from hfpatch.evaluation.scorer.head import BodyAndHead, WholeModel
from hfpatch.twins import random_model, shrink

LONGEST = 40
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.linear}
SMALL = BatchLimits(tokens=160, logits=1 << 14)
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
MORE = {
    "mistral_window": ("mistral", {**families.LLAMA, "sliding_window": 22}),
    "mistral_narrow": ("mistral", {**families.LLAMA, "sliding_window": 6}),
    "granite": ("granite", {**families.LLAMA, "logits_scaling": 4.0}),
    "cohere": ("cohere", {**families.LLAMA, "logit_scale": 0.3}),
    "falcon_h1": ("falcon_h1", {**families.LLAMA, **MAMBA}),
    "lfm2": ("lfm2", {**families.LLAMA, **LFM2}),
}
# case -> longest row that endings share; 0 is none
SHARED = {
    **dict.fromkeys(("gpt_neox", "gpt2", "llama", "gemma2", "opt", "granite", "cohere"), LONGEST),
    "mistral_window": 22,
    **dict.fromkeys(("mistral_narrow", "falcon_per_head", "bloom", "falcon_h1", "lfm2"), 0),
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
    scorer.warn_once.cache_clear()
    monkeypatch.setattr(families, "CASES", {**families.CASES, **MORE})
    return families.make_model


def tokens_of(generator, count):
    return [generator.randrange(3, families.VOCABULARY) for _ in range(count)]


@torch.no_grad()
def encoded(model, contexts=7):
    """Requests of every kind: shared beginnings, one token, greedy, longer than the longest row, twice the same."""
    generator = random.Random(0)
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


def cut(requests, longest=LONGEST):
    return [TokenRequest.cut(context, ending, longest) for _, context, ending in requests]


def ours(model, requests, limits=SMALL):
    """Scores as of a large job, in which everything that is exact is done."""
    answers = {}
    Scorer(model, LONGEST, limits, weigh_trials=False).score(cut(requests), answers.update)
    return [answers[index] for index in range(len(requests))]


def plan_of(model, requests):
    return Scorer(model, LONGEST, SMALL, weigh_trials=False).plan(cut(requests), SMALL)


def theirs(model, tokenizer, requests, batch_size=4, longest=LONGEST, **options):
    with quiet():
        lm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=longest, **options)
        return lm._loglikelihood_tokens(requests, disable_tqdm=True)


@torch.no_grad()
def in_fp64(model, requests, longest=LONGEST):
    """The log-likelihoods of the model in fp64, one row at a time."""
    exact, values = copy.deepcopy(model).double(), []
    for request in cut(requests, longest):
        logs = exact(torch.tensor([request.tokens])).logits[0, -len(request.targets) :].double().log_softmax(dim=-1)
        values.append(float(logs.gather(1, torch.tensor(request.targets)[:, None]).sum()))
    return values


def reference(model, tokenizer, requests):
    """The log-likelihoods of the model in fp64, and lm-eval's decisions."""
    answers = theirs(model, tokenizer, requests, softmax_dtype="float32")
    return [(value, greedy) for value, (_, greedy) in zip(in_fp64(model, requests), answers, strict=True)]


def assert_equal(got, expected):
    for (value, greedy), (other, also) in zip(got, expected, strict=True):
        assert abs(value - other) <= 1e-4 + 1e-6 * abs(other)
        assert greedy == also


@pytest.mark.parametrize("case", SHARED)
def test_answers_are_lm_evals(case, make, tokenizer):
    model = make(case)
    requests = encoded(model)
    expected = reference(model, tokenizer, requests)
    assert_equal(ours(model, requests), expected)
    assert {greedy for _, greedy in expected} == {True, False}
    plan = plan_of(model, requests)
    assert isinstance(plan.parts, BodyAndHead)
    assert plan.sharing.longest == SHARED[case]
    assert any(not tree.is_chain for batch in plan.batches for tree in batch) is (SHARED[case] > 0)


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
    expected = reference(model, tokenizer, requests)
    assert max(abs(value - other) for (value, _), (other, _) in zip(before, expected, strict=True)) > 0.1
    assert_equal(ours(model, requests), expected)
    assert plan_of(model, requests).sharing.longest == SHARED[case]


@pytest.mark.parametrize("configs", [[], SURGERY])
@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama", "gemma2", "opt", "bloom"])
def test_in_fp32_it_is_no_further_from_fp64_than_lm_eval(case, configs, make, tokenizer):
    model, generator, requests, longest = make(case), random.Random(0), [], 64
    if configs:
        patch(model, configs).eval()
        families.perturb(model)
    for number in range(6):  # shared contexts, and long endings, whose sums are large
        context = tokens_of(generator, generator.choice([1, 5, 20]))
        requests += [(("context", f"{number} {n}"), context, tokens_of(generator, n)) for n in (1, 4, 9, 40)]
    exact = torch.tensor(in_fp64(model, requests, longest), dtype=torch.float64)
    lm_eval = theirs(model, tokenizer, requests, batch_size=8, longest=longest)
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()  # of the largest value, once
    for weigh_trials in (True, False):
        scores = {}
        Scorer(model, longest, weigh_trials=weigh_trials).score(cut(requests, longest), scores.update)
        answers = [scores[index] for index in range(len(requests))]
        assert [greedy for _, greedy in answers] == [greedy for _, greedy in lm_eval]
        error, other = (
            (torch.tensor([value for value, _ in side], dtype=torch.float64) - exact).abs()
            for side in (answers, lm_eval)
        )
        assert error.max() <= other.max() + rounding
        assert error.square().mean().sqrt() <= other.square().mean().sqrt() + rounding


@pytest.mark.parametrize(("case", "at"), [("gpt_neox", "input"), ("llama", "qkv")])
def test_answers_are_lm_evals_where_a_method_reads_earlier_positions(case, at, make, tokenizer):
    """In a row with several endings the position before a token's is not that of the token before it."""
    model = patch(make(case), CanonConfig(at=at)).eval()
    made = Scorer(model, LONGEST)  # at init, where no probe would find it
    assert made.declared.longest == 0
    assert "earlier positions" in made.declared.reason
    assert families.perturb(model, std=0.3)
    requests = encoded(model, contexts=4)
    assert_equal(ours(model, requests), reference(model, tokenizer, requests))


@pytest.mark.parametrize("kind", [kind for kind in OF_WHOLE_ROWS if kind in CONFIG_MAPPING])
def test_rows_are_scored_one_by_one_where_their_length_decides(kind, tokenizer, caplog):
    scorer.warn_once.cache_clear()

    def make():
        config = shrink(CONFIG_MAPPING[kind]())
        for name, value in OF_WHOLE_ROWS[kind].items():
            setattr(config, name, value)
        return random_model(config)

    requests = encoded(families.make_model("llama"), contexts=8)  # rows of 1 to 40 tokens, across the limit of 20
    short = [number for number, (_, context, ending) in enumerate(requests) if len(context) + len(ending) <= 20]
    assert 0 < len(short) < len(requests)
    expected = theirs(make(), tokenizer, requests, batch_size=1, softmax_dtype="float32")  # some have no fp64
    assert_equal(ours(make(), requests), expected)
    assert "one by one" in caplog.text
    assert_equal(ours(make(), [requests[number] for number in short]), [expected[number] for number in short])


def test_eager_attention_and_a_peft_model(make, tokenizer):
    model = make("llama")
    model.set_attn_implementation("eager")
    model = get_peft_model(model, LORA).eval()
    families.perturb(model)
    requests = encoded(model)
    assert_equal(ours(model, requests), reference(model, tokenizer, requests))
    assert plan_of(model, requests).sharing.longest == LONGEST


def test_virtual_tokens_in_front(make, tokenizer):
    model = get_peft_model(make("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    requests = encoded(make("llama"))
    expected = reference(model, tokenizer, requests)
    assert_equal(ours(model, requests), expected)
    assert isinstance(Scorer(model, LONGEST).parts, WholeModel)
    assert abs(expected[0][0] - ours(make("llama"), requests)[0][0]) > 1e-3


class RoundedProducts(TorchDispatchMode):
    """Rounds what matrix products take to TF32's 10 bits of mantissa."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.overloadpacket in PRODUCTS:
            arguments = [self.rounded(argument) for argument in arguments]
        return operator(*arguments, **(options or {}))

    @staticmethod
    def rounded(value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        return (value.detach().contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def test_decisions_are_those_of_the_products_that_the_model_computes(make, tokenizer):
    model = make("gpt_neox")
    requests = [(texts, context, ending[-1:]) for texts, context, ending in encoded(model, contexts=20)]
    exact = theirs(model, tokenizer, requests, softmax_dtype="float32")
    with RoundedProducts():
        expected = theirs(model, tokenizer, requests, softmax_dtype="float32")
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
    scorer.warn_once.cache_clear()
    torch.manual_seed(0)
    model = Doubled(families.make_config("gpt2")).eval()
    requests = encoded(model)
    assert_equal(ours(model, requests), reference(model, tokenizer, requests))
    assert isinstance(Scorer(model, LONGEST).parts, WholeModel)
    (record,) = caplog.records
    assert record.getMessage().startswith("Doubled: its head cannot be separated")


def test_the_log_says_why_endings_do_not_share_a_row(make, caplog):
    requests = encoded(make("gpt_neox"))
    reasons = {"falcon_per_head": "ALiBi", "bloom": "position ids", "falcon_h1": "hybrid", "gpt_neox": None}
    assert max(map(len, plan_of(make("gpt_neox"), requests).batches)) > 1  # rows without a limit share batches
    for case, why in {**reasons, "mistral_narrow": "attention covers 6 tokens"}.items():
        caplog.clear()
        plan_of(make(case), requests)
        assert [why in record.getMessage() for record in caplog.records] == ([True] if why else [])
    caplog.clear()  # of a broken model nothing wrong is said
    model = make("gpt_neox")
    torch.nn.init.constant_(model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight, float("nan"))
    plan_of(model, requests)
    assert not caplog.records


def test_known_requests_are_left_out_and_the_others_stay_bit_equal(make):
    model = make("gpt_neox")
    requests = encoded(model)
    first = ours(model, requests)
    stored = [index for tree in plan_of(model, requests).batches[0] for index, _ in tree.scored]
    answers = {}
    Scorer(model, LONGEST, SMALL, weigh_trials=False).score(cut(requests), answers.update, scored=stored)
    assert set(answers) == set(range(len(requests))) - set(stored)
    assert all(answers[index] == first[index] for index in answers)


class Counting:
    """Counts the forward passes of a model, and their tokens."""

    def __init__(self, model):
        self.shapes = []
        model.base_model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _module, arguments, options):
        self.shapes.append(tuple((arguments[0] if arguments else options["input_ids"]).shape))

    @property
    def tokens(self):
        return sum(rows * size for rows, size in self.shapes)


def texts_of(sizes):
    """Whole texts that share their first token alone."""
    generator = random.Random(0)
    return [TokenRequest.cut([0], tokens_of(generator, size), LONGEST) for size in sizes]


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama", "mistral_window", "bloom", "falcon_h1"])
def test_a_small_job_makes_no_trial(case, make):
    model = make(case)
    requests = texts_of([5, 31])
    counting = Counting(model)
    Scorer(model, LONGEST).score(requests, {}.update)
    assert sorted(counting.shapes) == [(1, 5), (1, 31)]


def test_texts_that_share_their_first_token_alone_make_no_tree(make):
    requests = texts_of(range(18, 40))
    for weigh_trials in (True, False):
        plan = Scorer(make("gpt_neox"), LONGEST, weigh_trials=weigh_trials).plan(requests, SMALL)
        assert all(tree.is_chain for batch in plan.batches for tree in batch)
    assert max(map(len, plan.batches)) > 1


def test_a_trial_costs_what_is_counted(make):
    model = make("gpt_neox")
    parts = Scorer(model, LONGEST).parts
    for counted, trial in [
        (exactness.trial_of_padding(7, 33, 0), lambda: exactness.try_padding(model, parts, 7, 33).obstacle is None),
        (exactness.trial_of_trees(18, 12, 0), lambda: exactness.trees_are_exact(model, parts, 18, 12)),
        (exactness.trial_of_trees(40, 30, 0), lambda: exactness.trees_are_exact(model, parts, 18, 12)
         and exactness.trees_are_exact(model, parts, 40, 30)),
    ]:  # fmt: skip
        counting = Counting(model)
        with torch.no_grad():
            assert trial()
        assert 0 <= counted - counting.tokens <= 1


@pytest.mark.parametrize("documents", [1, 2, 3, 5, 8, 13, 30, 80])
@pytest.mark.parametrize("endings", [1, 4])
def test_trials_included_no_job_costs_more_than_rows_one_by_one(documents, endings, make):
    """Counted in tokens and in passes, of which each costs as much as some tokens."""
    generator = random.Random(documents)
    contexts = [tokens_of(generator, generator.randrange(8, 30)) for _ in range(documents)]
    requests = [
        TokenRequest.cut(context, tokens_of(generator, generator.randrange(1, 9)), LONGEST)
        for context in contexts
        for _ in range(endings)
    ]
    model = make("llama")
    counting, limits = Counting(model), BatchLimits(tokens=512, logits=1 << 14)
    Scorer(model, LONGEST, limits).score(requests, {}.update)
    alone = {request.tokens for request in requests}
    most = sum(map(len, alone)) + limits.overhead * len(alone) + 2 * (limits.overhead + 5)  # and the head's trial
    assert counting.tokens + limits.overhead * len(counting.shapes) <= most


def test_plans_do_not_depend_on_what_was_tried_and_nothing_is_tried_twice(make):
    model = make("llama")
    requests, scoring = cut(encoded(model, contexts=30)), Scorer(model, LONGEST, SMALL)
    made = scoring.plan(requests, SMALL)
    assert any(not tree.is_chain for batch in made.batches for tree in batch)
    counting = Counting(model)
    repeated = scoring.plan(requests, SMALL)
    assert counting.shapes == []
    rows = [[[tree.tokens for tree in batch] for batch in plan.batches] for plan in (repeated, made)]
    assert rows[0] == rows[1]
    assert (repeated.modules, repeated.sharing) == (made.modules, made.sharing)
    few = texts_of([5, 31])
    plans = [tried.plan(few, SMALL) for tried in (scoring, Scorer(model, LONGEST, SMALL))]
    assert [len(plan.batches) for plan in plans] == [2, 2]
    assert plans[0].parts == plans[1].parts


@pytest.mark.parametrize("window", [4, 7, 13, 19, 25, 31, 37])
def test_a_window_that_no_configuration_names_is_found(window, make, tokenizer, monkeypatch):
    """A window of any size changes no score, whether a row has one long text or many short ones."""
    monkeypatch.setattr(exactness, "_WINDOWS", ())
    model = make("mistral_window")
    model.config.sliding_window = window
    generator = random.Random(window)
    for size in (3, 12, 24, 34):
        contexts = [tokens_of(generator, size) for _ in range(12)]
        requests = [(("context", "ending"), c, tokens_of(generator, 1 + k)) for c in contexts for k in (2, 3, 5)]
        assert_equal(ours(model, requests), reference(model, tokenizer, requests))


class Memory:
    """Makes features as long as a batch is small enough."""

    def __init__(self, parts, tokens):
        self.parts, self.tokens = parts, tokens

    def __getattr__(self, name):
        return getattr(self.parts, name)

    def features(self, tokens, **inputs):
        if tokens.numel() > self.tokens:
            torch.empty(1 << 60)  # the error is torch's own on this system
        return self.parts.features(tokens, **inputs)


def test_a_quarter_is_tried_where_memory_is_too_small_and_nothing_is_lost(make):
    model = make("gpt_neox")
    requests = encoded(model)
    tokens = cut(requests)
    expected = ours(model, requests)
    answers = {}
    made = Scorer(model, LONGEST, SMALL, weigh_trials=False)
    made.plan(tokens, SMALL)
    made.parts = Memory(made.parts, 50)
    made.score(tokens, answers.update)
    assert_equal([answers[index] for index in range(len(tokens))], expected)
    made.parts = Memory(made.parts.parts, 30)
    with pytest.raises(HfpatchError, match="out of memory, even with 40 tokens at once"):
        made.score(tokens, answers.update)
    made.parts = Memory(made.parts.parts, 0)
    made.score(tokens, answers.update, scored=range(len(tokens)))


def test_where_memory_is_too_small_a_long_context_is_not_shared(make):
    """Its row with all endings is longer than a plain one, which fits."""
    model, generator = make("gpt_neox"), random.Random(0)
    context, limits = tokens_of(generator, 25), BatchLimits(tokens=64, logits=1 << 14, overhead=0)
    tokens = cut([(("", ""), context, tokens_of(generator, 4)) for _ in range(5)])
    answers, made = {}, Scorer(model, LONGEST, limits, weigh_trials=False)
    (batch,) = made.plan(tokens, limits).batches
    assert [len(tree) for tree in batch] == [25 + 5 * 3]
    made.parts = Memory(made.parts, 30)
    made.score(tokens, answers.update)
    assert sorted(answers) == [0, 1, 2, 3, 4]
