"""How far log-likelihoods in fp32 are from those of the same model in fp64: no further than lm-eval's own."""

import copy
import random

import families
import pytest
import torch
from lm_eval.models.huggingface import HFLM

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.scorer import Scorer, TokenRequest

LONGEST = 64
CASES = ["gpt_neox", "gpt2", "llama", "gemma2", "opt", "bloom"]


@torch.no_grad()
def in_fp64(model, requests):
    """The log-likelihood of each request, from one row at a time."""
    exact = copy.deepcopy(model).double()
    values = []
    for _, context, targets in requests:
        tokens = [*context, *targets][-(LONGEST + 1) :]
        logs = exact(torch.tensor([tokens[:-1]])).logits[0, -len(targets) :].double().log_softmax(dim=-1)
        values.append(float(logs[torch.arange(len(targets)), torch.tensor(targets)].sum()))
    return torch.tensor(values, dtype=torch.float64)


def requests_of(seed=0, contexts=6):
    """Requests with shared contexts, and long ones, whose sums are large."""
    generator = random.Random(seed)

    def draw(count):
        return [generator.randrange(3, families.VOCABULARY) for _ in range(count)]

    made = []
    for number in range(contexts):
        context = draw(generator.choice([1, 5, 20]))
        made += [(("context", f"{number} {size}"), context, draw(size)) for size in (1, 4, 9, 40)]
    return made


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_further_from_fp64_than_lm_eval(case, patched, tokenizer):
    model = families.make_model(case)
    if patched:
        patch(model, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()]).eval()
        families.perturb(model)
    requests = requests_of()
    exact = in_fp64(model, requests)
    with quiet():
        theirs = HFLM(model, tokenizer=tokenizer, batch_size=8, max_length=LONGEST)
        lm_eval = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()  # of the largest value, once
    for weigh_trials in (True, False):
        found = {}
        scorer = Scorer(model, LONGEST, weigh_trials=weigh_trials)
        scorer.score([TokenRequest.cut(*request[1:], LONGEST) for request in requests], found.update)
        ours = [found[index] for index in range(len(requests))]
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in lm_eval]
        error, other = (
            (torch.tensor([value for value, _ in answers], dtype=torch.float64) - exact).abs()
            for answers in (ours, lm_eval)
        )
        assert error.max() <= other.max() + rounding
        assert error.square().mean().sqrt() <= other.square().mean().sqrt() + rounding
