"""The frozen base: a causal language model and its tokenizer, from the hub, a folder or tinyworld."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.scratch import register_scratch
from hfpatch.settings import Dtype
from hfpatch.with_peft import peft_is_imported

TINYWORLD = "tinyworld/"
_SAMPLES_PER_TENSOR = 16


@dataclass(frozen=True)
class Base:
    """A loaded checkpoint.

    Args:
        name: as the user gave it.
        revision: the hub commit, where there is one.
        model: in evaluation mode.
        tokenizer: with a padding token.
        sha256: hash of the weights, see :func:`hash_weights`.
    """

    name: str
    revision: str | None
    model: Any
    tokenizer: Any
    sha256: str


def load_base(name: str, *, revision: str | None = None, dtype: str = "float32") -> Base:
    """Load a causal language model and its tokenizer; no remote code is run.

    Args:
        name: a hub id, a local folder, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``.
        revision: hub branch, tag or commit.
        dtype: float32, bfloat16 or float16.

    Raises:
        HfpatchError: if the model or its tokenizer cannot be found or loaded.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in get_args(Dtype):
        raise HfpatchError(
            f"dtype={dtype!r} is not one of {', '.join(get_args(Dtype))}{nearest(dtype, get_args(Dtype))}"
        )
    source = locate_base(name)
    try:
        register_scratch(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        tokenizer = _tokenizer_of(source, revision)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise HfpatchError(
            f"model {name!r} cannot be loaded: {_first_line(error)} Check the id, the network and HF_HUB_OFFLINE, or "
            "give a local folder"
        ) from error
    model.eval()
    return Base(
        name=name, revision=_commit(source, revision), model=model, tokenizer=tokenizer, sha256=hash_weights(model)
    )


def load_tokenizer(name: str, *, revision: str | None = None) -> Any:
    """Load a tokenizer; one without a padding token takes its end-of-text token for it. No remote code is run.

    Args:
        name: a hub id, a local folder with a tokenizer and perhaps no model, or a tinyworld name.
        revision: hub branch, tag or commit.

    Raises:
        HfpatchError: if it cannot be found or loaded.
    """
    source = name if Path(name).is_dir() else locate_base(name)
    try:
        return _tokenizer_of(source, revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise HfpatchError(
            f"tokenizer {name!r} cannot be loaded: {_first_line(error)} Check the id, the network and HF_HUB_OFFLINE, "
            "or give a local folder"
        ) from error


def load_config(name: str, *, revision: str | None = None) -> Any:
    """Load the configuration of a causal language model, without its weights; no remote code is run.

    Args:
        name: as :func:`load_base` takes it, or the path of a ``config.json``.
        revision: hub branch, tag or commit.

    Raises:
        HfpatchError: if it cannot be found or read.
    """
    from transformers import AutoConfig

    source = name if Path(name).is_file() else locate_base(name)
    try:
        register_scratch(source)
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfpatchError(f"the configuration of {name!r} cannot be loaded: {_first_line(error)}") from error


def locate_base(name: str) -> str:
    """Return what ``from_pretrained`` takes for a name: tinyworld names become folders, others stay.

    Raises:
        HfpatchError: if the name is a tinyworld name that does not exist, or a folder without a model.
    """
    if name.startswith(TINYWORLD):
        from hfpatch.tinyworld import checkpoint

        return str(checkpoint(name.removeprefix(TINYWORLD)))
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise HfpatchError(f"model folder {name!r} has no config.json; give the folder of a Hugging Face model")
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise HfpatchError(f"model folder {name!r} does not exist")
    return name


def hash_weights(model: nn.Module) -> str:
    """Return the SHA-256 over the names and the bytes of all base parameters, adapters left out."""
    return hash_tensors(_base_parameters(model))


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the names and the bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Return a fast SHA-256 that tells one base from another, whatever dtype it was loaded in.

    It covers every base parameter's name and shape and up to 16 evenly spaced values of each, rounded to bfloat16.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(_base_parameters(model).items()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(_sample(parameter.detach()).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the base by name, without importing PEFT where there can be no adapter."""
    if not peft_is_imported():
        return dict(model.named_parameters())
    from hfpatch.tuners.adapters import base_parameters

    return base_parameters(model)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
    return flat[::step][:_SAMPLES_PER_TENSOR].to(torch.bfloat16).contiguous()


def _commit(source: str, revision: str | None) -> str | None:
    """Return the commit of a model in the hub's cache, where the file's folder bears its name."""
    if Path(source).is_dir():
        return revision
    config = try_to_load_from_cache(source, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else revision


def _tokenizer_of(source: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
