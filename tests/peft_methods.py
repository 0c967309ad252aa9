"""Every PEFT method under hfpatch, alone and in a stack; ``python -m peft_methods`` writes docs/peft-methods.md."""

import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from families import assert_as_it_was, logits_of, make_model, make_tokens, state_of
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

import hfpatch
from hfpatch import HfpatchError, PreProjectionConfig
from hfpatch.export.write import write_model
from hfpatch.recipes.sizes import SIZES

FILE = Path(__file__).parents[1] / "docs" / "peft-methods.md"
COLUMNS = ("method", "alone", "in a stack", "on Conv1D", "starts as the base", "export", "size", "why not")
TARGETS = {
    "llama": ["q_proj", "v_proj"],  # grouped queries: v_proj is 32 -> 16
    "gpt_neox": ["query_key_value", "attention.dense"],
    "gpt2": ["attn.c_attn", "attn.c_proj"],  # Conv1D
}
NORMS = {"llama": ["input_layernorm"], "gpt_neox": ["input_layernorm"], "gpt2": ["ln_1"]}
EMBEDDINGS = {"llama": "embed_tokens", "gpt_neox": "embed_in", "gpt2": "wte"}
SOME = list(range(3, 40))  # tokens

PROMPT = {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}
OPTIONS = {  # small sizes; all other options are PEFT's own defaults
    "LORA": {"r": 2},
    "ADALORA": {"init_r": 3, "target_r": 2, "total_step": 10},
    "ADAMSS": {"r": 4, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
    "C3A": {"block_size": 8},
    "CPT": {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2], **PROMPT},
    "FOURIERFT": {"n_frequency": 20},
    "FROD": {"progressbar": False},
    "GRALORA": {"r": 4},
    "IA3": {"feedforward_modules": []},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 1, **PROMPT},
    "OFT": {"oft_block_size": 4},
    "OSF": {"effective_rank": 4},
    "P_TUNING": {"encoder_hidden_size": 8, **PROMPT},
    "POLY": {"r": 2, "n_skills": 2},
    "PSOFT": {"r": 4},
    "PVERA": {"r": 4},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHADOW": {"shadow_num_hidden_layers": 1},
    "TINYLORA": {"u": 4},
    "UNILORA": {"theta_d_length": 16},
    "VBLORA": {"num_vectors": 8, "vector_length": 8},
    "VERA": {"r": 4},
    "WAVEFT": {"n_frequency": 20},
    "XLORA": {"hidden_size": 32, "adapters": {"a": "folder"}, "task_type": "CAUSAL_LM"},
    **dict.fromkeys(["CARTRIDGE", "PREFIX_TUNING", "PROMPT_TUNING"], PROMPT),
}
OPTIONS |= {kind: {"r": 2} for kind in ("DEFT", "DELORA", "GLORA", "HIRA", "HRA", "LILY", "LOHA", "LOKR", "MISS")}
OPTIONS |= {kind: {"r": 2} for kind in ("PEANUT", "SHIRA")}
UNTARGETED = {"ADAPTION_PROMPT", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "XLORA", "CARTRIDGE", "PREFIX_TUNING"}
UNTARGETED |= {"PROMPT_TUNING", "TRAINABLE_TOKENS"}
VARIANTS = {  # more of LoRA: name -> its options for a family
    "LORA, use_dora": lambda case: {"use_dora": True},
    "LORA, modules_to_save": lambda case: {"modules_to_save": NORMS[case]},
    "LORA, trainable_token_indices": lambda case: {"trainable_token_indices": {EMBEDDINGS[case]: SOME}},
    "LORA, on the embedding": lambda case: {"target_modules": [EMBEDDINGS[case], *TARGETS[case]]},
    "LORA, target_parameters": lambda case: {
        "target_modules": [],
        "target_parameters": [f"{name}.weight" for name in TARGETS[case]],
    },
}
METHODS = [*(kind.value for kind in PeftType), *VARIANTS]
ORDERS = {"alone": lambda x, pre: [x], "before": lambda x, pre: [x, pre], "after": lambda x, pre: [pre, x]}


def config_of(method, case):
    """Return a new configuration of a method for a family."""
    kind = method.partition(",")[0]
    options = dict(OPTIONS.get(kind, {}))
    if kind == "TRAINABLE_TOKENS":
        options |= {"target_modules": [EMBEDDINGS[case]], "token_indices": SOME}
    elif kind == "LN_TUNING":
        options["target_modules"] = NORMS[case]
    elif kind not in UNTARGETED:
        options["target_modules"] = TARGETS[case]
    if method in VARIANTS:
        options |= VARIANTS[method](case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PEFT_TYPE_TO_CONFIG_MAPPING[kind](**options)


def patched(method, case, order, dtype=torch.float32):
    """Return a patched model, or the refusal: one line, with the model as it was."""
    model = make_model(case, dtype)
    before = state_of(model)
    parts = ORDERS[order](config_of(method, case), PreProjectionConfig(content_skip=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, on Conv1D and on norms
        try:
            return hfpatch.patch(model, parts)
        except HfpatchError as error:
            refusal = str(error)
    assert_as_it_was(model, before)
    return refusal


def step(model, tokens):
    """Take two steps of plain AdamW; every trained tensor must have moved."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.05)
    model.train()
    for _ in range(2):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert trained
    assert [name for name, p in trained.items() if torch.equal(before[name], p)] == []


def reload(model, case, folder):
    """Save a patched model and load it on another base; everything that was saved must be equal."""
    hfpatch.save_patch(model, folder)
    loaded = hfpatch.load_patch(make_model(case, model.dtype), folder, trainable=True)  # the same flags
    assert_as_it_was(loaded, state_of(model))
    assert torch.equal(logits_of(loaded, make_tokens(4, 10)), logits_of(model, make_tokens(4, 10)))
    return loaded


def life(method, order, folder):
    """Patch, compute, train, save, load, unpatch; return how far from the base it starts, or the refusal."""
    model = patched(method, "llama", order)
    if isinstance(model, str):
        return model
    base, tokens = make_model("llama"), make_tokens(4, 10)
    distance = (logits_of(model, tokens) - logits_of(base, tokens)).abs().max().item()
    step(model, tokens)
    assert not torch.allclose(logits_of(model, tokens), logits_of(base, tokens), atol=1e-3)
    for patched_model in (model, reload(model, "llama", folder)):
        hfpatch.unpatch(patched_model)
        assert_as_it_was(patched_model, state_of(base))
        assert torch.equal(logits_of(patched_model, tokens), logits_of(base, tokens))
    return distance


def exported(method, folder):
    """Export a trained method before a pre-projection: whether it is a part or merged, and why neither, if so."""
    model = patched(method, "llama", "before")
    if isinstance(model, str):
        model = patched(method, "llama", "alone")
    if isinstance(model, str):
        return "-", ""
    step(model, make_tokens(4, 10))
    folder.mkdir()
    try:
        return ("merged" if write_model(model, folder).merged else "part"), ""
    except HfpatchError as error:
        return "refused", f"export: {str(error).partition(': ')[2]}"


def row_of(method, folder):
    """Return the row of a method in the table."""
    alone, before, after = (life(method, order, folder / order) for order in ORDERS)
    assert type(before) is type(after), (before, after)
    conv = patched(method, "gpt2", "alone")
    texts = ["refused" if isinstance(value, str) else "yes" for value in (alone, before, conv)]
    start = "-" if isinstance(alone, str) else "yes" if alone < 1e-4 else "no"
    export, reason = exported(method, folder / "export")
    why = next((value for value in (alone, before) if isinstance(value, str)), reason)
    why = why.removeprefix(f"{method.lower()} ").removesuffix(", so it cannot be injected; use peft.get_peft_model")
    kind, _, variant = method.partition(", ")
    size = f"`{SIZES[kind.lower()].key}`" if kind.lower() in SIZES else "-"
    return dict(
        zip(COLUMNS, (f"`{kind.lower()}`{variant and f', {variant}'}", *texts, start, export, size, why), strict=True)
    )


HEADER = """# PEFT's methods

What `hfpatch.patch` does with each method of PEFT {peft}, written by `make peft-methods`.

- **alone**, **in a stack** (before and after a `PreProjectionConfig(content_skip=True)`): `yes` says that the method
  trains by plain AdamW, is saved whole, loads on another base with equal logits, and that `unpatch` restores the base
  bit for bit; `refused` that `patch` raises an error and leaves the model as it was (use `peft.get_peft_model`).
- **on Conv1D**: `patch` on GPT-2's projections; many of PEFT's layers take `torch.nn.Linear` alone.
- **starts as the base**: whether PEFT's default initialisation leaves the logits as they were, to 1e-4.
- **export**: an [exported](export.md) model has the trained method as a `part`, bit for bit, or `merged` into the
  weights by PEFT, to rounding.
- **size**: the option that [`match`](recipes.md#matching-parameters) solves for.

"""


def written(rows):
    """Return the page."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS), *(" | ".join(row.values()) for row in rows)]
    return HEADER.format(peft=version("peft")) + "\n".join(f"| {line} |" for line in lines) + "\n"


def main():
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(written([row_of(method, Path(folder) / method) for method in METHODS]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
