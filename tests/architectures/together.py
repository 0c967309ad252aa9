"""All possible methods at once, under promises that need no formula."""

import elsewhere
import torch
from architectures.catalogue import logits_of, make, model_type, tokens_for
from architectures.sweep import ROUNDING, close, configuration, refusal
from families import perturb

import hfpatch
from hfpatch.export.parts import describe
from hfpatch.export.write import write_model

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
    """Save, load, generate and export all methods at once; return ``yes``, or why a cache is not compared."""
    pre = "pre-projection" if refusal(case, "content skip") else "content skip"
    methods = [pre, "nonlinear query", "query temperature"]
    model = hfpatch.patch(make(case), [configuration(method) for method in methods if not refusal(case, method)])
    perturb(model, std=0.1)
    tokens = tokens_for(model)
    hfpatch.save_patch(model, folder / "patch")
    loaded = hfpatch.load_patch(make(case), folder / "patch")
    assert torch.equal(logits_of(loaded, tokens), logits_of(model, tokens)), "another model comes back from the disk"
    computes_the_same_elsewhere(case, model, tokens, folder / "export")
    return keeps_its_cache(case, model, tokens)


def keeps_its_cache(case, model, tokens):
    if model_type(case) in WITHOUT_GENERATION:
        return WITHOUT_GENERATION[model_type(case)]
    if not agrees_with_its_cache(model, tokens):
        assert not agrees_with_its_cache(make(case), tokens), "generation with and without cache disagree"
        return "the base itself disagrees with its cache"
    return "yes"


def computes_the_same_elsewhere(case, model, tokens, folder):
    """A process without hfpatch and PEFT computes the same logits, gradients of the parts and new tokens."""
    reformer = model_type(case) == "reformer"  # it demands training mode and the full length; dropout is off
    trained = tokens_for(model, length=64) if reformer else tokens
    torch.manual_seed(0)
    logits = model.train(reformer)(trained, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
    gradients = {name: tensor.grad for name, tensor in describe(model.eval())[1].items()}
    steps = {} if model_type(case) in WITHOUT_GENERATION else {"steps": generated(model, tokens, use_cache=True)}
    folder.mkdir()
    write_model(model, folder)
    torch.manual_seed(0)
    expected = logits_of(model, tokens)
    options = {"new_tokens": 3 if steps else 0, "trained": trained, "training_mode": reformer}
    computed, _ = elsewhere.computed(folder, tokens, **options)
    assert torch.equal(computed.pop("logits"), expected), "the export computes other logits"
    computed.pop("written", None)
    for name, tensor in ({f"gradient {name}": g for name, g in gradients.items()} | steps).items():
        assert close(computed.pop(name), tensor, rounding=10 * ROUNDING), f"the export has another {name}"
    assert not computed
