"""The promises that a patch keeps, run on the user's own model."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from torch import Tensor, nn

from hfpatch.bases import hash_weights, load_base
from hfpatch.budget import attention_modules
from hfpatch.errors import HfpatchError
from hfpatch.nn import normal_
from hfpatch.patch_files import load_patch, save_patch
from hfpatch.patching import patch, patch_summary, unpatch
from hfpatch.tuners import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.tuners.adapters import adapter_parameters, base_parameters

BATCH, LENGTH, NEW_TOKENS = 2, 9, 6
ROUNDING = 1e-4  # relative to the largest logit or gradient, fp32
ALLOWED_FILES = {".safetensors", ".json", ".md"}


@dataclass(frozen=True)
class Verdict:
    """One promise: its name, whether it holds, and what was seen."""

    promise: str
    holds: bool
    seen: str


@dataclass(frozen=True)
class CheckReport:
    """The verdicts on one model and one configuration; ``str()`` is a table."""

    model: str
    method: str
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        """Whether every promise holds."""
        return all(verdict.holds for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        width = max(len(verdict.promise) for verdict in self.verdicts)
        lines = [f"{self.model}: {self.method}"]
        lines += [f"  {'ok  ' if v.holds else 'FAIL'}  {v.promise:<{width}}  {v.seen}" for v in self.verdicts]
        return "\n".join(lines)


def check(model_or_id: nn.Module | str, config: PeftConfig | None = None) -> CheckReport:
    """Run the promises on a model with a configuration; a model that is passed in is left as it was.

    Args:
        model_or_id: a causal language model without adapters, or what :func:`hfpatch.bases.load_base` takes.
        config: the method to inject; pre-projection with content skip by default.

    Raises:
        HfpatchError: if the method cannot be injected into the model at all.
    """
    model: Any = load_base(model_or_id).model if isinstance(model_or_id, str) else model_or_id
    config = config or PreProjectionConfig(content_skip=True)
    training = model.training
    model.eval()
    random_state = torch.get_rng_state()
    tokens = torch.randint(
        3, model.config.get_text_config().vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
    ).to(model.device)
    try:
        verdicts = [_run(promise, test, model, config, tokens) for promise, test in PROMISES]
    finally:
        unpatch(model)
        model.train(training)
        torch.set_rng_state(random_state)
    name = model_or_id if isinstance(model_or_id, str) else type(model).__name__
    return CheckReport(model=name, method=type(config).__name__, verdicts=verdicts)


Test = Callable[[Any, PeftConfig, Tensor], tuple[bool, str]]


def _run(promise: str, test: Test, model: Any, config: PeftConfig, tokens: Tensor) -> Verdict:
    try:
        holds, seen = test(model, config, tokens)
    except HfpatchError:
        raise
    except Exception as error:  # a promise that breaks with an error is a verdict, not a crash
        holds, seen = False, f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        unpatch(model)
    return Verdict(promise, holds, seen)


def _no_op(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    before = _logits(model, tokens)
    difference = _largest(before, _logits(patch(model, config), tokens))
    if _changes_at_init(config):
        return (
            difference > 0,
            f"changes the model at init, as its options ask: largest logit difference {difference:.2g}",
        )
    return difference == 0, f"largest logit difference {difference:.2g}"


def _unpatch_restores(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    logits, weights, names = _logits(model, tokens), hash_weights(model), list(model.state_dict())
    with _perturbed(model, config):
        changed = _largest(logits, _logits(model, tokens))
        same_weights = hash_weights(model) == weights
    restored = torch.equal(_logits(model, tokens), logits) and list(model.state_dict()) == names
    return (
        same_weights and restored and changed > 0,
        f"weights {weights[:8]} before and after; patch moved {changed:.2g}",
    )


def _cache(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    with _perturbed(model, config):
        with_cache, without = (_generate(model, tokens, use_cache=use) for use in (True, False))
    return torch.equal(with_cache, without), f"{NEW_TOKENS} greedy tokens with and without K/V cache"


def _padding(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    pad = 3
    mask = torch.ones_like(tokens)
    mask[:, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with _perturbed(model, config):
        accepts = "position_ids" in inspect.signature(model.forward).parameters  # sees through decorators
        extra = {"position_ids": positions} if accepts else {}
        padded = _logits(model, tokens, attention_mask=mask, **extra)[:, pad:]
        alone = _logits(model, tokens[:, pad:])
    difference = _largest(padded, alone) / float(alone.abs().max())
    return difference < ROUNDING, f"relative difference {difference:.1g}"


def _checkpointing(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    if not model.supports_gradient_checkpointing:
        return True, "the model does not support gradient checkpointing"
    with _perturbed(model, config), _training(model), _own_checkpointing(model):
        plain = _gradients(model, tokens)
        worst = 0.0
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # lets the inputs require gradients too
            again = _gradients(model, tokens)
            model.gradient_checkpointing_disable()
            worst = max(worst, *(_relative(plain[name], again[name]) for name in plain))
    return worst < ROUNDING, f"largest relative gradient difference {worst:.1g} (both kinds)"


def _compile(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    with _perturbed(model, config):
        eager = model(tokens, labels=tokens, use_cache=False).loss.item()
        torch.compiler.reset()
        compiled: Any = torch.compile(model, backend="aot_eager")
        loss = compiled(tokens, labels=tokens, use_cache=False).loss.item()
        torch.compiler.reset()
    return abs(loss - eager) <= ROUNDING * abs(eager), f"loss {loss:.6f} compiled, {eager:.6f} eager"


def _gradients_reach(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    patch(model, config)
    added = adapter_parameters(model)
    optimizer = torch.optim.SGD(added.values(), lr=1.0)
    reached: set[str] = set()
    for _ in range(2):
        optimizer.zero_grad()
        reached |= {name for name, gradient in _gradients(model, tokens).items() if gradient.abs().max() > 0}
        optimizer.step()
    base = [name for name, p in base_parameters(model).items() if p.grad is not None or p.requires_grad]
    missing = added.keys() - reached
    return not missing and not base, f"{len(reached)} of {len(added)} added tensors, {len(base)} base tensors"


def _save_and_load(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        with _perturbed(model, config):
            saved = _logits(model, tokens)
            save_patch(model, Path(folder) / "patch")
        kinds = {file.suffix for file in Path(folder).rglob("*") if file.is_file()}
        loaded = _logits(load_patch(model, Path(folder) / "patch"), tokens)
    return torch.equal(saved, loaded) and kinds <= ALLOWED_FILES, f"equal logits; files {', '.join(sorted(kinds))}"


def _init_independent(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    names = ["checked", "other"]
    other = LoraConfig(r=2, target_modules=attention_modules(model))
    states = []
    for order in (1, -1):
        patch(model, [config, other][::order], names=names[::order])
        states.append({n: p.detach().clone() for n, p in adapter_parameters(model).items() if ".checked." in n})
        unpatch(model)
    first, second = ({n.replace(".base_layer", ""): p for n, p in state.items()} for state in states)
    same = first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    return same, f"{len(first)} tensors, injected before and after a LoRA"


def _full_precision(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    patch(model, config)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in adapter_parameters(model).values()}
    trainable = patch_summary(model).trainable
    return dtypes == {"float32"}, f"{trainable:,} trainable parameters in {', '.join(dtypes)} on a {model.dtype} base"


PROMISES: list[tuple[str, Test]] = [
    ("no-op at init", _no_op),
    ("unpatch restores, base never changes", _unpatch_restores),
    ("generation with and without cache", _cache),
    ("left padding", _padding),
    ("gradient checkpointing", _checkpointing),
    ("torch.compile", _compile),
    ("gradients reach what was added, only that", _gradients_reach),
    ("save and load", _save_and_load),
    ("init independent of the rest", _init_independent),
    ("fp32 trainables", _full_precision),
]


@contextmanager
def _perturbed(model: Any, config: PeftConfig) -> Iterator[None]:
    """Patch a model with every added tensor moved off its initial value, and unpatch it again."""
    patch(model, config)
    try:
        for name, parameter in adapter_parameters(model).items():
            noise = normal_(torch.empty(parameter.shape), std=0.1, seed=0, name=name).to(parameter)
            parameter.data += noise
        yield
    finally:
        unpatch(model)


@contextmanager
def _training(model: Any) -> Iterator[None]:
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def _own_checkpointing(model: Any) -> Iterator[None]:
    """Start without gradient checkpointing and give back what the user had set."""
    attributes = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [(m, {a: vars(m)[a] for a in attributes if a in vars(m)}) for m in model.modules()]
    model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        for module, values in before:
            vars(module).update(values)


def _changes_at_init(config: PeftConfig) -> bool:
    if isinstance(config, PreProjectionConfig):
        return config.init != "identity"
    return isinstance(config, NonlinearQueryConfig) and config.form == "literal"


@torch.no_grad()
def _logits(model: Any, tokens: Tensor, **kwargs: Any) -> Tensor:
    logits: Tensor = model(tokens, use_cache=False, **kwargs).logits
    return logits


def _generate(model: Any, tokens: Tensor, *, use_cache: bool) -> Tensor:
    generated: Tensor = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated


def _gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of what was added; dropout, where it is on, drops the same in every call."""
    model.zero_grad()
    torch.manual_seed(0)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in adapter_parameters(model).items() if p.grad is not None}


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _relative(a: Tensor, b: Tensor) -> float:
    return _largest(a, b) / max(float(a.abs().max()), 1e-12)
