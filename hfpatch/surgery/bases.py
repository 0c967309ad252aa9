"""The frozen base: a causal language model and its tokenizer, from the hub, a folder, a GGUF file or tinyworld."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast, get_args

import torch
import xxhash
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, first_line, nearest
from hfpatch.models import register_scratch
from hfpatch.recipes.strict import Dtype
from hfpatch.sites import base_model, codebooks, family_of, input_device, text_config
from hfpatch.sites.families import BUILT_IN
from hfpatch.sites.family import NO_WEIGHTS, load_plugins
from hfpatch.support.code import hash_code
from hfpatch.support.provenance import PACKAGES
from hfpatch.surgery.gguf_cache import dequantised, keep_dequantised, read_dequantised
from hfpatch.surgery.gguf_files import (
    SUFFIX,
    GgufFile,
    as_plain,
    check_complete,
    find_gguf,
    gguf_loading,
    parsed_once,
    read_gguf,
)
from hfpatch.surgery.manifest import MODELS_OF_RUN, PATCHES_OF_RUN
from hfpatch.surgery.placement import require_devices, tensor_parallel_plan

TINYWORLD = "tinyworld/"
_SNAPSHOT = re.compile(r"[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]")
_HALVES = ("bfloat16", "float16")
_BODY = "body"
_PIECE = 1 << 18  # values that are rounded at once, so that the copy stays in the cache


@dataclass(frozen=True)
class Base:
    """A loaded checkpoint.

    Args:
        name: as the user gave it; for a GGUF file with the file.
        revision: the hub commit, where there is one.
        model: in evaluation mode.
        tokenizer: with a padding token.
        sha256: hash of the weights, see :func:`hash_weights`.
        placed: whether a device map, tensor parallelism or a quantiser chose its devices.
        gguf: the GGUF file that its weights were dequantised from.
    """

    name: str
    revision: str | None
    model: Any
    tokenizer: Any
    sha256: str
    placed: bool = False
    gguf: GgufFile | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The base in results: name, revision, hash of the weights, and the GGUF file where there is one."""
        gguf = {} if self.gguf is None else {"gguf": self.gguf.facts}
        return {"name": self.name, "revision": self.revision, "sha256": self.sha256, **gguf}


def load_base(
    name: str | Path,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    load_in_8bit: bool = False,
    load_in_4bit: bool = False,
    bnb_4bit_quant_type: str = "nf4",
    bnb_4bit_use_double_quant: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | dict[str, int | str] | None = None,
    tensor_parallel: int | None = None,
) -> Base:
    """Load a causal language model and its tokenizer; no remote code is run unless ``trust_remote_code`` is set.

    Args:
        name: a hub id, a local folder, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``; or a GGUF file, local or
            ``ORG/REPO/FILE.gguf``, whose weights are dequantised.
        gguf_file: the GGUF file in the hub repository or folder ``name``.
        revision: hub branch, tag or commit.
        dtype: float32, bfloat16 or float16, by name or as torch has it; of a quantised base the dtype of its products.
        load_in_8bit: quantise the linear layers to 8 bits with bitsandbytes.
        load_in_4bit: quantise them to 4 bits.
        bnb_4bit_quant_type: nf4 or fp4.
        bnb_4bit_use_double_quant: quantise the scales of 4 bits too.
        attn_implementation: eager, sdpa, ...; None: transformers chooses.
        trust_remote_code: run code that comes with the model or its tokenizer.
        device_map: the devices of its modules, as transformers takes it; None: the CPU, and the current accelerator
            for a quantised base.
        tensor_parallel: the number of processes that each load a piece of every large weight.

    Raises:
        HfpatchError: if the model or its tokenizer cannot be found or loaded, or a package is not installed.
    """
    from transformers import AutoModelForCausalLM

    name, dtype = os.fspath(name), str(dtype).removeprefix("torch.")
    if dtype not in (dtypes := get_args(Dtype)):
        raise HfpatchError(f"dtype={dtype!r} is not one of {', '.join(dtypes)}{nearest(dtype, dtypes)}")
    require_devices(device_map)

    # Where it is
    name = f"{name}/{gguf_file}" if gguf_file else name
    source, file = locate(name, revision)
    gguf = None if file is None else read_gguf(file)
    if gguf is not None and Path(name).is_dir():
        name = f"{name}/{gguf.path.name}"

    # How it is loaded
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    options |= {"output_loading_info": True, "revision": revision}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    read = partial(AutoModelForCausalLM.from_pretrained, **options)  # of a folder that hfpatch wrote
    placed = device_map is not None or tensor_parallel is not None or load_in_8bit or load_in_4bit
    if device_map is not None:
        options["device_map"] = device_map
    if load_in_8bit or load_in_4bit:
        options["quantization_config"] = _bits_config(
            dtype, load_in_8bit=load_in_8bit, quant_type=bnb_4bit_quant_type, double=bnb_4bit_use_double_quant
        )
    if gguf is not None:
        options |= {"gguf_file": str(file), **gguf_loading()}
    if tensor_parallel is not None:
        config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
        options["distributed_config"] = tensor_parallel_plan(config, tensor_parallel)

    # Model and tokenizer; of a GGUF file that was kept nothing is parsed, so that gguf need not be imported
    folder = None if gguf is None or placed else dequantised(gguf, dtype)
    kept = None if folder is None else read_dequantised(folder, read, hash_weights)
    model, tokenizer, sha256 = kept or (None, None, "")
    missing: list[str] = []
    if model is None or tokenizer is None:
        with loading(f"model {name!r}", gguf=gguf is not None):
            if model is None:
                register_scratch(source)
                model, report = AutoModelForCausalLM.from_pretrained(source, **options)
                missing = sorted(report["missing_keys"])
            tokenizer = _tokenizer_of(source, file, revision, trust_remote_code=trust_remote_code)

    # Whether it is whole, and its weights
    _require_complete(model, name, missing, gguf)
    if kept is not None:
        model.config.name_or_path = tokenizer.name_or_path = source
    else:
        sha256 = hash_weights(model)
        if folder is not None:
            keep_dequantised(folder, model, tokenizer, sha256)
    if getattr(model.config, "quantization_config", None) is not None:
        from hfpatch.tuners.quantised import keep_unpacked  # with PEFT, which a plain base does without

        keep_unpacked(model, training=False)
    return Base(
        name=name,
        revision=_commit(source, file, revision),
        model=model.eval(),
        tokenizer=tokenizer,
        sha256=sha256,
        placed=placed,
        gguf=gguf,
    )


def _require_complete(model: Any, name: str, missing: Sequence[str], gguf: GgufFile | None) -> None:
    """Refuse a model of whose weights some were not in its folder or file, such as the head of one saved without."""
    if gguf is not None:
        check_complete(as_plain(model), gguf)
        model.name_or_path = name
    elif missing:
        kinds = ", ".join(model.config.architectures or ["another model"])
        raise HfpatchError(
            f"{name} is no complete causal language model (it was saved as {kinds}): {len(missing)} weights, such as "
            f"{missing[0]}, would be random; load it by its own class, and patch that with hfpatch.patch or PEFT"
        )


@torch.no_grad()
def require_causal(model: Any, name: str) -> None:
    """Refuse a model in which a token changes the logits before it.

    Training on the next token and scoring of texts would see the future.

    Raises:
        HfpatchError: naming the model.
    """
    shape, generator = (codebooks(model), 8), torch.Generator().manual_seed(0)
    tokens = torch.randint(3, int(text_config(model).vocab_size), shape, generator=generator)
    other = tokens.clone()
    other[:, 4:] = tokens[:, 4:].flip(-1).roll(1, -1)
    logits = []
    try:
        for ids in (tokens, other):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                logits.append(model(ids.to(input_device(model)), use_cache=False).logits[:, :4])
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return  # it takes other inputs: whoever calls it next says so
    first, second = logits
    change = float((first - second).float().abs().max() / first.float().abs().max())
    if change > max(1e-5, 8 * torch.finfo(first.dtype).eps):
        raise HfpatchError(
            f"{name} ({type(model).__name__}) is not causal: a token changes logits before it, by {change:.1g} of the "
            "largest, so that training on the next token and scoring would see the future; use hfpatch.patch and "
            "transformers' Trainer, or a causal base"
        )


def _bits_config(dtype: str, *, load_in_8bit: bool, quant_type: str, double: bool) -> Any:
    """Return transformers' configuration of bitsandbytes, which must be installed."""
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        bits = 8 if load_in_8bit else 4
        raise HfpatchError(f"model.load_in_{bits}bit needs bitsandbytes; pip install 'hfpatch[quantized]'")
    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def place_base(base: Base, device: torch.device) -> None:
    """Move a base to a device, unless it was loaded to where it is."""
    if not base.placed:
        base.model.to(device)


def check_place(base: Base, device: torch.device) -> None:
    """Raise :class:`HfpatchError` if a placed base has no weights on the device that this process trains on."""
    devices = {value.device for value in base.model.parameters() if not value.is_meta} if base.placed else set()
    if devices and not any((at.type, at.index or 0) == (device.type, device.index or 0) for at in devices):
        raise HfpatchError(
            f"the base is on {', '.join(sorted(map(str, devices)))} and this process trains on {device}; change "
            "model.device_map, or the process's device by CUDA_VISIBLE_DEVICES or ACCELERATE_USE_CPU=true"
        )


def load_tokenizer(name: str, *, revision: str | None = None) -> Any:
    """Load a tokenizer; the end-of-text token pads where there is no padding token. No remote code is run.

    Args:
        name: as :func:`load_base` takes it, or a local folder with a tokenizer and no model.
        revision: hub branch, tag or commit.

    Raises:
        HfpatchError: if it cannot be found or loaded.
    """
    _require_hub(name, revision)
    alone = Path(name).is_dir() and find_gguf(name) is None
    source, file = (name, None) if alone else locate(name, revision)
    with loading(f"tokenizer {name!r}", gguf=file is not None):
        return _tokenizer_of(source, file, revision)


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a causal language model, without its weights; no remote code is run unasked.

    Args:
        name: as :func:`load_base` takes it, or the path of a ``config.json``.
        revision: hub branch, tag or commit.
        trust_remote_code: run code that comes with it.

    Raises:
        HfpatchError: if it cannot be found or read.
    """
    from transformers import AutoConfig

    _require_hub(name, revision)
    is_json = Path(name).is_file() and not name.endswith(SUFFIX)
    source, file = (name, None) if is_json else locate(name, revision)
    options = {} if file is None else {"gguf_file": str(file)}
    with loading(f"the configuration of {name!r}", gguf=file is not None):
        register_scratch(source)
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code, **options)
        if getattr(config, "transformers_weights", None) == NO_WEIGHTS:  # an export, read without its patch
            raise ValueError(NO_WEIGHTS)
        return config


def locate(name: str, revision: str | None = None) -> tuple[str, Path | None]:
    """Return the argument of ``from_pretrained`` for a base's name, and the GGUF file to read there, if it is one.

    Raises:
        HfpatchError: if it is a tinyworld name or a file that does not exist, a file or folder without a model, or a
            folder or tinyworld with a revision.
    """
    _require_hub(name, revision)
    if (file := find_gguf(name, revision)) is not None:
        return str(file.parent), file
    if name.startswith(TINYWORLD):
        from hfpatch.tinyworld import checkpoint

        return str(checkpoint(name.removeprefix(TINYWORLD))), None
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise HfpatchError(
            f"model folder {name!r} has no config.json; give the folder of a model (a run's is "
            f"{MODELS_OF_RUN}); a patch (a run's is {PATCHES_OF_RUN}) goes with --patch of eval and inspect"
        )
    if folder.is_file():
        raise HfpatchError(f"model {name!r} is a file; give the folder of a model, a hub id or a .gguf file")
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise HfpatchError(f"model folder {name!r} does not exist")
    return name, None


def _require_hub(name: str, revision: str | None) -> None:
    """Refuse a revision of what is not on the hub, where it would have no effect."""
    if revision is not None and ((embedded := name.startswith(TINYWORLD)) or Path(name).exists()):
        kind = "embedded in hfpatch" if embedded else "local"
        raise HfpatchError(f"revision {revision}: {name} is {kind}, and only hub models have revisions; leave it out")


def hash_weights(model: nn.Module) -> str:
    """Return the SHA-256 over the names and the bytes of all base parameters, adapters and ties left out."""
    tied = dict(getattr(model, "all_tied_weights_keys", {}))
    distinct: dict[int, _BaseTensor] = {}
    for entry in _base_tensors(model):
        is_tie = entry.tensor.is_meta and entry.name in tied  # ties are not seen once accelerate has offloaded them
        if isinstance(entry.tensor, nn.Parameter) and not is_tie:
            distinct.setdefault(id(entry.tensor), entry)
    return hash_tensors({entry.name: entry.value for entry in distinct.values()})


def hash_tensors(tensors: Mapping[str, Tensor | Callable[[], Tensor]]) -> str:
    """Return the SHA-256 over the names and bytes of tensors, or of functions that return them, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(bytes_of(tensor if isinstance(tensor, Tensor) else tensor()))
    return digest.hexdigest()


def hash_model_code(model: nn.Module) -> str:
    """Return the hash of a model's code, see :func:`hfpatch.support.code.hash_code`.

    It covers the classes of its modules, functions that modules hold in public attributes, and the declaration of its
    family, if it is not hfpatch's own. Code of the packages whose versions results record is left out: the versions
    identify it, and its state differs from process to process.
    """
    load_plugins()
    roots: list[Any] = list({type(module) for module in model.modules()})
    for module in model.modules():
        held = (value for name, value in vars(module).items() if name != "forward" and not name.startswith("_"))
        roots += [value for value in held if isinstance(value, FunctionType)]
    family = family_of(str(getattr(getattr(base_model(model), "config", None), "model_type", "")))
    foreign = [root for root in roots if str(root.__module__).partition(".")[0] not in PACKAGES]
    if family is not None and not BUILT_IN.issuperset(family.model_types):
        foreign.append(("family", family))
    return hash_code(foreign)


def fingerprint(model: nn.Module, kinds: Sequence[str] = ("exact", *_HALVES)) -> dict[str, Any]:
    """Return the identity of a base as JSON values: hashes (XXH3, 128 bits) over every parameter and persistent buffer.

    ``exact`` is of the bytes as they are. Two more are of the weights rounded to bfloat16 and to float16, so that
    :func:`difference` also recognises the base loaded in another dtype. ``body`` is ``exact`` without the head (and the
    pooler, which some heads need), by the names of the headless model. Each tensor is read once.
    """
    digests = {kind: xxhash.xxh3_128() for kind in (*kinds, _BODY)}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    for entry in sorted(_base_tensors(model), key=lambda entry: entry.name):
        flat = entry.value().reshape(-1)
        for kind, digest in digests.items():
            rounded = kind in _HALVES and flat.is_floating_point()
            dtype = getattr(torch, kind) if rounded else flat.dtype
            name = entry.name
            if kind == _BODY:
                name = name.removeprefix(prefix)
                if not entry.name.startswith(prefix) or name.startswith("pooler."):
                    continue
            digest.update(f"{name} {tuple(entry.tensor.shape)} {dtype} ".encode())
            for piece in torch.split(flat, _PIECE):
                digest.update(bytes_of(piece.to(dtype)))
    return {"dtypes": _dtypes(model), **{kind: digest.hexdigest() for kind, digest in digests.items()}}


def difference(saved: Mapping[str, Any], model: nn.Module, *, head: bool = True) -> str:
    """Return how a model's weights differ from those of a saved fingerprint; an empty string if they do not.

    Without ``head`` it is enough that the bodies are the same, as those of a causal model and its ``AutoModel`` are.

    In the same dtypes every bit counts. In different ones the weights are compared after rounding to the half precision
    of one of them; bfloat16 and float16 copies of one float32 checkpoint cannot be compared.
    """
    before, now = saved["dtypes"], _dtypes(model)
    kinds = ["exact"] if before == now else [kind for kind in _HALVES if kind in before or kind in now]
    hashes = fingerprint(model, kinds)
    if any(saved.get(kind) == hashes[kind] for kind in (*kinds, *([] if head else [_BODY]))):
        return ""
    if before == now:
        return "its weights differ"
    return f"its weights, in {', '.join(now)}, do not match those in {', '.join(before)}"


def bytes_of(tensor: Tensor) -> Any:
    """Return a tensor's bytes as an array, without a copy where it is contiguous and on the CPU."""
    return whole(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all values where processes have pieces of it; all of them must call this."""
    return cast("Any", tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True)
class _BaseTensor:
    """A parameter or persistent buffer of the base: its name, and where it is."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor

    def value(self) -> Tensor:
        """Return the tensor with its values, also where accelerate keeps them on the CPU or on disk."""
        if not self.tensor.is_meta:
            return whole(self.tensor.detach())
        hook = getattr(self.module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            if self.key in (getattr(one, "weights_map", None) or {}):
                return cast("Tensor", one.weights_map[self.key])
        raise HfpatchError(f"{self.name} is on the meta device and has no values; load the model's weights first")


def _base_tensors(model: nn.Module) -> Iterator[_BaseTensor]:
    """Yield the parameters and persistent buffers of the base; before PEFT is imported no model has an adapter."""
    modules: Iterable[tuple[str, nn.Module]] = model.named_modules()
    if "peft" in sys.modules:
        from hfpatch.tuners.adapters import base_modules

        modules = base_modules(model)
    for at, module in modules:
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield _BaseTensor(f"{at}.{key}" if at else key, module, key, tensor)


def _dtypes(model: nn.Module) -> list[str]:
    return sorted({str(entry.tensor.dtype).removeprefix("torch.") for entry in _base_tensors(model)})


def _commit(source: str, file: Path | None, revision: str | None) -> str | None:
    """Return the commit of a model, read from its folder in the hub's cache; else ``revision``."""
    if file is None and not Path(source).is_dir():
        config = try_to_load_from_cache(source, "config.json", revision=revision)
        return Path(config).parent.name if isinstance(config, str) else revision
    snapshot = _SNAPSHOT.search(f"{file or source}/")
    return snapshot[1] if snapshot else revision


def _tokenizer_of(source: str, file: Path | None, revision: str | None, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    options = {} if file is None else {"gguf_file": str(file)}
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code, **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def loading(what: str, *, gguf: bool = False) -> Iterator[None]:
    """Turn the errors of transformers' loading into one line, and let it parse a GGUF file once."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError)
    advice = "Check the id, `hf auth login`, the network and HF_HUB_OFFLINE, or give a local folder"
    if gguf:
        kinds = (*kinds, RuntimeError, IndexError, struct.error)
        advice = "transformers cannot read this GGUF file; take the original model, or another conversion of it"
    try:
        with parsed_once() if gguf else nullcontext():
            yield
    except kinds as error:
        if "trust_remote_code" in str(error):
            raise HfpatchError(
                f"{what} contains code of its own, which hfpatch runs only on request; read it, then give eval, "
                "inspect or check --trust-remote-code (in a recipe: model.trust_remote_code=true)"
            ) from error
        if "backend tokenizer" in str(error):
            raise HfpatchError(
                f"{what} cannot be loaded: there is no tokenizer that transformers can read; save the model's own in "
                "its folder"
            ) from error
        raise HfpatchError(f"{what} cannot be loaded: {first_line(error)} {advice}") from error
