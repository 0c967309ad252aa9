"""Promises about the patched model: its outputs, the tensors of its method, modes of running, and saved files."""

from __future__ import annotations

import inspect
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from hfpatch.methods import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.promises.common import (
    NEW_TOKENS,
    Apart,
    changed_by,
    compared,
    gradients,
    leak,
    perturbed,
    relative,
    some,
    within,
)
from hfpatch.promises.inputs import DECODER, Inputs, logits, ordered, tokens_alone
from hfpatch.sites import AttentionSite, codebooks
from hfpatch.support.modes import hooked, keeping_flags, set_checkpointing
from hfpatch.surgery.bases import hash_weights
from hfpatch.surgery.budget import attention_modules
from hfpatch.surgery.folder import load_patch, save_patch
from hfpatch.surgery.patch import patch, patch_summary, unpatch
from hfpatch.tuners.adapters import adapter_parameters, base_parameters
from hfpatch.tuners.hidden_state import replace_first

ALLOWED_FILES = {".safetensors", ".json", ".md"}
CHANGED_SHARE = 1e-7  # of the largest logit: below it a patch has no effect


def no_op(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """With default init the logits equal those of the base, frozen as a patch freezes it, bit for bit."""
    with keeping_flags(model):
        model.requires_grad_(False)  # torch picks kernels by the flags
        before = logits(model, inputs)
        difference = float((before - logits(patch(model, config), inputs)).abs().max())
        unpatch(model)
    pre_projection = isinstance(config, PreProjectionConfig) and config.init != "identity"
    if pre_projection or (isinstance(config, NonlinearQueryConfig) and config.form == "literal"):
        text = f"changes the model at init, as its options ask: largest logit difference {difference:.2g}"
        return difference > 0, text
    advice = "" if difference == 0 else "; start from a no-op, such as a last matrix of zeros"
    return difference == 0, f"largest logit difference {difference:.2g}{advice}"


def unpatch_restores(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """After unpatching, logits, weights and names are the base's; meanwhile the patch had an effect."""
    before, weights, names = logits(model, inputs), hash_weights(model), list(model.state_dict())
    with perturbed(model, config):
        changed = relative(before, logits(model, inputs))
        same_weights = hash_weights(model) == weights
    restored = torch.equal(logits(model, inputs), before) and list(model.state_dict()) == names
    return (
        same_weights and restored and changed > CHANGED_SHARE,
        f"weights {weights[:8]} before and after; the patch changed logits by {changed:.2g} of the largest",
    )


def repeatable(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """The same inputs give the same outputs, whatever the adapters ran for before, in training too."""
    tokens = tokens_alone(inputs)
    others = inputs if tokens is None else {"input_ids": tokens.flip(1)}

    def difference() -> Apart:
        layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        first = logits(model, inputs)
        for layer in layers:
            layer.train()
        logits(model, others)
        for layer in layers:
            layer.eval()
        return Apart(relative(first, logits(model, inputs, seed=1)), 0.0)

    return within(model, config, "a second call differs by {:.1g} of the largest", difference)


def rows(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """A row of a batch gives the same alone."""
    if (tokens := tokens_alone(inputs)) is None:
        return True, f"does not apply: {type(model).__name__} reads other inputs than token ids"
    size = codebooks(model)
    batch = tokens if len(tokens) > size else torch.cat((tokens, tokens.flip(1)))

    def alone() -> Tensor:
        return torch.cat([logits(model, {"input_ids": batch[at : at + size]}) for at in range(0, len(batch), size)])

    def difference() -> Apart:
        return compared(model, partial(logits, model, {"input_ids": batch}), alone)

    return within(model, config, "a row alone differs by {:.1g} of the largest", difference)


def cache(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Greedy generation with and without K/V cache agrees, up to the rounding of its logits."""
    if not model.can_generate():
        return True, f"does not apply: {type(model).__name__} does not generate"
    if (tokens := tokens_alone(inputs)) is not None:
        prompt, options = [tokens], {"attention_mask": torch.ones_like(tokens)}
    else:
        prompt, options = [], {name: value for name, value in inputs.items() if name != DECODER}

    read: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        names = (DECODER, "input_ids", "inputs_embeds")
        read.extend(kwargs[name].shape[1] for name in names if kwargs.get(name) is not None)

    def generated(use_cache: bool) -> Any:
        torch.manual_seed(0)
        return model.generate(
            *prompt,
            **options,
            min_new_tokens=NEW_TOKENS,  # Whisper stops at its own end token
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=use_cache,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )

    def differences(one: Any, other: Any) -> list[float]:
        # Of every step up to the first at which rounding let another token win
        equal = (one.sequences == other.sequences).all(0)[-len(one.logits) :].tolist()
        steps = equal.index(False) + 1 if False in equal else len(equal)
        return [relative(torch.stack(one.logits[:steps]), torch.stack(other.logits[:steps]))]

    def difference() -> Apart:
        return compared(model, lambda: generated(False), lambda: generated(True), differences=differences)

    text = f"logits of {NEW_TOKENS} greedy tokens differ by {{:.1g}} of the largest"
    ways = [(text, difference)]
    if (name := ordered(model, inputs)) is not None:
        ways.append(("logits change by {:.1g} of the largest with later tokens", lambda: leak(model, inputs, name)))
    with hooked([model.register_forward_pre_hook(count, with_kwargs=True)]):
        verdict = within(model, config, text, difference, *ways)
    if verdict[0] and min(read, default=1) > 1:
        return True, f"does not apply: {type(model).__name__} reads all tokens again at every step, with use_cache=True"
    return verdict


def padding(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Left padding does not change a row's result beyond rounding."""
    if (tokens := tokens_alone(inputs)) is None:
        return True, f"does not apply: {type(model).__name__} reads other inputs than token ids"
    pad = 3
    mask, unpadded = torch.ones_like(tokens), {"input_ids": tokens[:, pad:]}
    mask[:, :pad] = 0
    accepts = "position_ids" in inspect.signature(model.forward).parameters  # sees through decorators
    extra: dict[str, Any] = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if accepts else {}

    def difference() -> Apart:
        padded = partial(logits, model, inputs, attention_mask=mask, **extra)
        return compared(model, partial(logits, model, unpadded), lambda: padded()[:, pad:])

    return within(model, config, "relative difference {:.1g}", difference)


def checkpointing(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Gradient checkpointing of both kinds gives the same gradients; excused where it does not for LoRA either."""
    if not model.supports_gradient_checkpointing:
        return True, "does not apply: the model does not support gradient checkpointing"

    def checkpointed(reentrant: bool) -> dict[str, Tensor]:
        set_checkpointing(model, reentrant=reentrant)  # and the inputs require gradients
        recomputed = gradients(model, inputs)
        set_checkpointing(model, reentrant=None)
        return recomputed

    def difference(reentrant: bool) -> Apart:
        settings = ("gradient_checkpointing", "_gradient_checkpointing_func")
        before = [(m, {key: vars(m)[key] for key in settings if key in vars(m)}) for m in model.modules()]
        set_checkpointing(model, reentrant=None)
        try:
            return compared(model, partial(gradients, model, inputs), partial(checkpointed, reentrant))
        finally:
            # The user's setting again
            set_checkpointing(model, reentrant=None)
            for module, values in before:
                vars(module).update(values)

    def with_lora(reentrant: bool) -> Apart:
        lora = LoraConfig(r=2, init_lora_weights=False, target_modules=attention_modules(model))
        with perturbed(model, lora):
            return difference(reentrant)

    verdicts: list[tuple[bool, str]] = []
    for reentrant in (False, True):
        text = f"gradients differ by {{:.1g}} of the largest with use_reentrant={reentrant}"
        ways = partial(difference, reentrant), (text, partial(with_lora, reentrant))
        verdicts.append(within(model, config, text, *ways))
    return all(holds for holds, _ in verdicts), "; ".join(measured for _, measured in verdicts)


def compiled(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """torch.compile gives the same logits, and so the same loss; excused where it does not without hfpatch either."""

    def by_compiled() -> Tensor:
        torch.compiler.reset()
        try:
            return logits(torch.compile(model, backend="aot_eager"), inputs)
        finally:
            torch.compiler.reset()

    def difference() -> Apart:
        return compared(model, partial(logits, model, inputs), by_compiled)

    return within(model, config, "logits differ by {:.1g} of the largest", difference)


def gradients_reach(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Every added parameter receives a gradient within two steps, and no base parameter does."""
    patch(model, config)
    added = adapter_parameters(model)
    optimizer = torch.optim.SGD(added.values(), lr=1.0)
    reached: set[str] = set()
    for _ in range(2):
        reached |= {name for name, gradient in gradients(model, inputs).items() if gradient.abs().max() > 0}
        optimizer.step()
    base = [name for name, p in base_parameters(model).items() if p.grad is not None or p.requires_grad]
    idle = [site.path for site in changed_by(model, config) if not _acts(model, site, inputs)]
    missing = {name for name in added.keys() - reached if not name.startswith(tuple(f"{path}." for path in idle))}
    wrong = f"; {some(sorted(missing))} received none" if missing else f"; {some(base)} did" if base else ""
    text = f"{len(reached)} of {len(added)} added tensors, {len(base)} base tensors{wrong}"
    return not wrong, text + (f"; nothing reads {some(idle)}, in the model without hfpatch, too" if idle else "")


def save_and_load(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """A saved patch loads to equal logits; its files are safetensors, JSON and a Markdown card."""
    with tempfile.TemporaryDirectory() as folder:
        with perturbed(model, config):
            with keeping_flags(model):
                model.requires_grad_(False)  # as what is loaded: torch picks kernels by the flags
                saved = logits(model, inputs)
            save_patch(model, Path(folder) / "patch")
        kinds = {file.suffix for file in Path(folder).rglob("*") if file.is_file()}
        loaded = logits(load_patch(model, Path(folder) / "patch"), inputs)
    is_equal = torch.equal(saved, loaded)
    text = f"{'equal' if is_equal else 'other'} logits; files {', '.join(sorted(kinds))}"
    return is_equal and kinds <= ALLOWED_FILES, text


def _acts(model: Any, site: AttentionSite, inputs: Inputs) -> bool:
    """Return whether anything that is compared depends on an attention."""

    def noisy(values: Tensor) -> Tensor:
        return values + torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)

    plain = logits(model, inputs)
    with hooked([site.attention.register_forward_hook(lambda _, args, output: replace_first(output, noisy))]):
        return not torch.equal(plain, logits(model, inputs))


def full_precision(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Trainables are fp32 on any base dtype."""
    patch(model, config)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in adapter_parameters(model).values()}
    trainable = patch_summary(model).trainable
    return dtypes == {"float32"}, f"{trainable:,} trainable parameters in {', '.join(dtypes)} on a {model.dtype} base"
