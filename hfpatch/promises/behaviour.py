"""Promises about the patched model: its outputs, the tensors of its method, modes of running, and saved files."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hfpatch.errors import HfpatchError
from hfpatch.methods import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.promises.common import (
    NEW_TOKENS,
    NOT_OURS,
    Apart,
    changed_by,
    compared,
    gradients,
    leak,
    perturbed,
    relative,
    within,
)
from hfpatch.promises.inputs import DECODER, Inputs, logits, ordered, tokens_alone
from hfpatch.sites import AttentionSite
from hfpatch.support.modes import hooked, keeping_flags
from hfpatch.surgery.bases import hash_weights
from hfpatch.surgery.budget import attention_modules
from hfpatch.surgery.folder import load_patch, save_patch
from hfpatch.surgery.patch import patch, patch_summary, unpatch
from hfpatch.tuners.adapters import adapter_parameters, base_parameters
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite
from hfpatch.tuners.places import method_site

ALLOWED_FILES = {".safetensors", ".json", ".md"}
OTHER = "meta"  # as any device but the CPU, it takes no tensor of the CPU, but it needs no hardware
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


class Call(NamedTuple):
    """The first call of one of a method's places: its arguments after the parts, its result's dtype, its changes."""

    given: tuple[Any, ...]
    returned: torch.dtype
    in_place: bool


def results(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each place returns the dtype that it was given, and a new tensor: others may read the one that it was given."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    calls = _calls(model, config, inputs)
    for place, call in calls.items():
        if call.returned != call.given[0].dtype:
            return False, f"{place} returns {call.returned} where it was given {call.given[0].dtype}"
        if call.in_place:
            return False, f"{place} changes its argument in place; return a new tensor"
    return True, f"at {', '.join(calls)}"


def devices(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each place takes its parts and tensors on any device, and puts none of another one beside them."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    site, calls = method_site(changed_by(model, config)[0]), _calls(model, config, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True):  # computes shapes, dtypes and devices only
        with torch.device(OTHER):
            parts = config.build(site, config.seed)
        for place, call in calls.items():
            if type(call.given[-1]) is not MethodSite:  # it holds tensors of the forward pass
                continue
            arguments = [torch.empty_like(x, device=OTHER) if isinstance(x, Tensor) else x for x in call.given]
            try:
                getattr(config, place)(parts, *arguments)
            except (RuntimeError, HfpatchError) as error:
                if "device" in str(error) and "cpu" in str(error):
                    return False, f"{place} puts a tensor of the CPU beside its input; create it with device=x.device"
            except Exception:  # such as a decision by a value, which a fake tensor lacks
                continue
    return True, f"at {', '.join(calls)}"


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


def cache(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Greedy generation with and without K/V cache agrees, up to the rounding of its logits."""
    if not model.can_generate():
        return True, f"does not apply: {type(model).__name__} does not generate"
    if (tokens := tokens_alone(inputs)) is not None:
        prompt, options = [tokens], {"attention_mask": torch.ones_like(tokens)}
    else:
        prompt, options = [], {name: value for name, value in inputs.items() if name != DECODER}

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
    ways = [difference] if (name := ordered(model, inputs)) is None else [difference, lambda: leak(model, inputs, name)]
    return within(model, config, text, difference, *ways)


def padding(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Left padding does not change a row's result beyond rounding."""
    if (tokens := tokens_alone(inputs)) is None:
        return True, f"does not apply: {type(model).__name__} reads other inputs than token ids"
    pad = 3
    mask, unpadded = torch.ones_like(tokens), {"input_ids": tokens[:, pad:]}
    mask[:, :pad] = 0
    accepts = "position_ids" in inspect.signature(model.forward).parameters  # sees through decorators
    extra = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if accepts else {}

    def difference() -> Apart:
        padded = partial(logits, model, inputs, attention_mask=mask, **extra)
        return compared(model, partial(logits, model, unpadded), lambda: padded()[:, pad:])

    return within(model, config, "relative difference {:.1g}", difference)


def checkpointing(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Gradient checkpointing of both kinds gives the same gradients; excused where it does not for LoRA either."""
    if not model.supports_gradient_checkpointing:
        return True, "does not apply: the model does not support gradient checkpointing"

    def checkpointed(reentrant: bool) -> dict[str, Tensor]:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # and the inputs require gradients
        recomputed = gradients(model, inputs)
        model.gradient_checkpointing_disable()
        return recomputed

    def difference() -> Apart:
        settings = ("gradient_checkpointing", "_gradient_checkpointing_func")
        before = [(m, {key: vars(m)[key] for key in settings if key in vars(m)}) for m in model.modules()]
        model.gradient_checkpointing_disable()
        try:
            kinds = [partial(checkpointed, reentrant) for reentrant in (False, True)]
            return compared(model, partial(gradients, model, inputs), *kinds)
        finally:
            # The user's setting again
            model.gradient_checkpointing_disable()
            for module, values in before:
                vars(module).update(values)

    def with_lora() -> Apart:
        lora = LoraConfig(r=2, init_lora_weights=False, target_modules=attention_modules(model))
        with perturbed(model, lora):
            return difference()

    return within(model, config, "largest relative gradient difference {:.1g} (both kinds)", difference, with_lora)


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
    wrong = f"; {_some(sorted(missing))} received none" if missing else f"; {_some(base)} did" if base else ""
    text = f"{len(reached)} of {len(added)} added tensors, {len(base)} base tensors{wrong}"
    return not wrong, text + (f"; nothing reads {_some(idle)}, in the model without hfpatch, too" if idle else "")


def save_and_load(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """A saved patch loads to equal logits; its files are safetensors, JSON and a Markdown card."""
    with tempfile.TemporaryDirectory() as folder:
        with perturbed(model, config):
            saved = logits(model, inputs)
            save_patch(model, Path(folder) / "patch")
        kinds = {file.suffix for file in Path(folder).rglob("*") if file.is_file()}
        loaded = logits(load_patch(model, Path(folder) / "patch"), inputs)
    is_equal = torch.equal(saved, loaded)
    text = f"{'equal' if is_equal else 'other'} logits; files {', '.join(sorted(kinds))}"
    return is_equal and kinds <= ALLOWED_FILES, text


def init_independent(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Init depends only on seed, layer and name, and is independent of order and other adapters."""
    if isinstance(config, MethodConfig):
        first, *others = [method_site(site) for site in changed_by(model, config)]
        built, advice = _built(config, first), "draw by hfpatch.nn.normal_, with a name that begins with site.name"
        if drawn := _different(built, _built(config, first, generator=1)):
            why = f"build() draws {_some(drawn)} by torch's global generator, so values depend on earlier draws"
            return False, f"{why}; {advice}"
        drawn = _different(built, _built(config, first, seed=config.seed + 1))
        same = [set(drawn) - set(_different(built, _built(config, other))) for other in others]
        if equal := sorted(set.intersection(*same)) if same else []:
            return False, f"{_some(equal)} starts equal in every layer; {advice}"
    names = ["checked", "other"]
    lora = LoraConfig(r=2, target_modules=attention_modules(model))
    states: list[dict[str, Tensor]] = []
    for order in (1, -1):
        patch(model, [config, lora][::order], names=names[::order])
        added = {name.replace(".base_layer", ""): p for name, p in adapter_parameters(model).items()}
        states.append({name: p.detach().clone() for name, p in added.items() if ".checked." in name})
        unpatch(model)
    equal_names = states[0].keys() == states[1].keys()
    return equal_names and not _different(*states), f"{len(states[0])} tensors, injected before and after a LoRA"


def _acts(model: Any, site: AttentionSite, inputs: Inputs) -> bool:
    """Return whether anything that is compared depends on an attention."""

    def other(module: Any, args: Any, output: Any) -> Any:
        values = output if isinstance(output, Tensor) else output[0]
        values = values + torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
        return values if isinstance(output, Tensor) else (values, *output[1:])

    plain = logits(model, inputs)
    with hooked([site.attention.register_forward_hook(other)]):
        return not torch.equal(plain, logits(model, inputs))


def _calls(model: Any, config: MethodConfig, inputs: Inputs) -> dict[str, Call]:
    """Run the model with the method and return the first call at each place where the method acts."""
    calls: dict[str, Call] = {}

    def record(self: MethodConfig, place: str, function: Callable[..., Tensor], parts: Any, *arguments: Any) -> Tensor:
        before = [argument._version for argument in arguments if isinstance(argument, Tensor)]
        result = function(self, parts, *arguments)
        in_place = before != [argument._version for argument in arguments if isinstance(argument, Tensor)]
        calls.setdefault(place, Call(arguments, result.dtype, in_place))
        return result

    original = {place: getattr(type(config), place) for place in config.acts_at()}
    with perturbed(model, config):
        for place, function in original.items():
            setattr(type(config), place, partialmethod(record, place, function))
        try:
            logits(model, inputs)
        finally:
            for place, function in original.items():
                setattr(type(config), place, function)
    return calls


def _built(config: MethodConfig, site: MethodSite, *, generator: int = 0, seed: int | None = None) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator)
        return config.build(site, config.seed if seed is None else seed).state_dict()


def _different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if name not in b or a[name].shape != b[name].shape or not torch.equal(a[name], b[name])]


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def full_precision(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Trainables are fp32 on any base dtype."""
    patch(model, config)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in adapter_parameters(model).values()}
    trainable = patch_summary(model).trainable
    return dtypes == {"float32"}, f"{trainable:,} trainable parameters in {', '.join(dtypes)} on a {model.dtype} base"
