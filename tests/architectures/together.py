"""All possible methods at once, under promises that need no formula."""

import torch
from architectures.catalogue import logits_of, make, model_type, tokens_for
from architectures.sweep import close, configuration, refusal
from families import perturb

import hfpatch

WITHOUT_GENERATION = {
    "blt": "transformers makes no cache for it",
    **dict.fromkeys(["musicgen", "musicgen_melody"], "generates with an encoder alone"),
}


def generated(model, tokens, *, use_cache):
    """Return the logits of a few greedy steps."""
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), use_cache=use_cache, output_logits=True,
        return_dict_in_generate=True, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return torch.stack(out.logits)


def agrees_with_its_cache(model, tokens):
    return close(*(generated(model, tokens, use_cache=use) for use in (True, False)))


def promises(case, folder):
    """Return in words which promises hold."""
    methods = [
        "pre-projection" if refusal(case, "content skip") else "content skip",
        "nonlinear query",
        "query temperature",
    ]
    model = hfpatch.patch(make(case), [configuration(method) for method in methods if not refusal(case, method)])
    perturb(model, std=0.1)
    tokens = tokens_for(model)
    hfpatch.save_patch(model, folder)
    loaded = hfpatch.load_patch(make(case), folder)
    assert torch.equal(logits_of(loaded, tokens), logits_of(model, tokens)), "another model comes back from the disk"
    if model_type(case) in WITHOUT_GENERATION:
        return f"save and load; {WITHOUT_GENERATION[model_type(case)]}"
    if not agrees_with_its_cache(model, tokens):
        assert not agrees_with_its_cache(make(case), tokens), "generation with and without cache disagree"
        return "save and load; the base itself disagrees with its cache"
    return "save and load, cache"
