"""Inputs for models of any kind, made from their configuration, and the one output that promises compare."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hfpatch.errors import HfpatchError, first_line
from hfpatch.sites import AttentionSite, codebooks, text_config
from hfpatch.support.modes import hooked

BATCH, LENGTH = 2, 9
FRAMES = 12  # of sound
GRID = 4  # patches on each side of an image whose model takes patches
MEDIA = ("pixel_values", "input_features", "input_values", "past_values")
DECODER = "decoder_input_ids"
_IDS = (DECODER, "input_ids")
RANDOM_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment")

Maker = Callable[[Any], Tensor]  # from a configuration
Inputs = Mapping[str, Any]
"""The arguments of ``forward`` by name."""


def example_tokens(model: Any) -> Tensor:
    """Return token ids ``(batch, seq)``; models of several codebooks take one row for each codebook."""
    rows = BATCH * codebooks(model)
    config = text_config(model)
    chunks = [getattr(config, name, None) or 1 for name in ("local_attn_chunk_length", "lsh_attn_chunk_length")]
    longest = getattr(config, "max_position_embeddings", None) or LENGTH
    length = math.lcm(*chunks) if max(chunks) > 1 else min(LENGTH, longest)  # Reformer trains on whole chunks only
    generator = torch.Generator().manual_seed(0)
    highest = config.vocab_size
    return torch.randint(min(3, highest - 1), highest, (rows, length), generator=generator).to(model.device)


def example_inputs(model: Any, sites: Sequence[AttentionSite]) -> Inputs:
    """Return the simplest inputs with which a model runs and calls the attention of every site.

    That is token ids alone, or what its configuration describes: token ids of encoder and decoder, images, sound, time
    series, images among tokens; or transformers' ``dummy_inputs`` of its class.

    Raises:
        HfpatchError: if it runs with none of them, with the reason of the last.
    """
    unmade, failed, reached = list[str](), list[str](), list[tuple[int, Inputs]]()
    for make in _candidates(model):
        try:
            inputs = make()
        except Exception as error:  # a part of a model that makes them may raise any
            unmade.append(first_line(error))
            continue
        try:
            called = _called(model, inputs, sites)
        except Exception as error:  # a model, too
            failed.append(first_line(error))
            continue
        if len(called) == len(sites):
            return inputs
        reached.append((len(called), inputs))
    if reached and not unmade and not failed:  # an attention that nothing calls is a verdict
        return max(reached, key=lambda pair: pair[0])[1]
    why = next(iter((*failed[::-1], *unmade)), "its forward takes none that check can make")
    raise HfpatchError(f"no inputs for {type(model).__name__}: {why}; call hfpatch.check(model, inputs={{...}})")


def checked_inputs(model: Any, inputs: Tensor | Inputs) -> Inputs:
    """Return inputs by name if a model runs with them; a tensor alone is its first argument.

    Raises:
        HfpatchError: with the model's reason, if it does not, or if every row is one token repeated, of which all
            attention weights give the same.
    """
    if isinstance(inputs, Tensor):
        inputs = {next(iter(inspect.signature(model.forward).parameters)): inputs}
    for name in (name for name in _IDS if name in inputs):
        ids = inputs[name]
        if ids.shape[-1] > 1 and bool((ids == ids[..., :1]).all()):
            raise HfpatchError(
                f"inputs: each row of {name} is one token repeated, of which any attention weights give the same, so "
                "that broken promises cannot show; give rows of different tokens"
            )
    try:
        logits(model, inputs)
    except Exception as error:  # a model may raise any
        raise HfpatchError(f"inputs: {type(model).__name__} does not take them: {first_line(error)}") from error
    return inputs


def _candidates(model: Any) -> Iterator[Callable[[], Inputs]]:
    """Yield functions that make inputs, which may fail; simple inputs first."""
    names, config = inspect.signature(model.forward).parameters, model.config
    is_pair = DECODER in names and bool(getattr(config, "is_encoder_decoder", False))

    def made(**makers: Maker) -> dict[str, Tensor]:
        return {name: make(config).to(model.device) for name, make in makers.items()}

    def tokens(config: Any) -> Tensor:
        return example_tokens(model)

    decoder = {DECODER: tokens} if is_pair else {}
    if "input_ids" in names:
        if is_pair:
            yield partial(made, input_ids=tokens, **decoder)
        yield partial(made, input_ids=tokens)
    for name in (medium for medium in MEDIA if medium in names):
        for make in _MAKERS[name]:
            if "input_ids" in names:
                yield partial(_with_tokens, model, name, make)
            else:
                yield partial(made, **{name: make}, **decoder)
    if "image_grid_thw" in names:
        yield partial(_with_patches, model)
    dummies = model.dummy_inputs
    if model.main_input_name != "input_ids" and dummies.keys() <= names.keys():
        yield lambda: {name: value.to(model.device) for name, value in dummies.items()}


def _called(model: Any, inputs: Inputs, sites: Sequence[AttentionSite]) -> set[str]:
    """Return the paths of the sites whose attention a forward pass calls."""
    called: set[str] = set()

    def note(path: str, *call: Any) -> None:
        called.add(path)

    with hooked(site.attention.register_forward_pre_hook(partial(note, site.path)) for site in sites):
        logits(model, inputs)
    return called


# Images, sound and time series


def _part(config: Any, *names: str) -> Any:
    """Return the configuration, or its first part, that has all of some values."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for part in (config, *parts):
        if all(getattr(part, name, None) is not None for name in names):
            return part
    raise HfpatchError(f"its configuration has no {' and '.join(names)}")


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _image(config: Any) -> Tensor:
    part = _part(config, "image_size")
    size = part.image_size
    height, width = (size, size) if isinstance(size, int) else size
    counts = (getattr(part, name, None) for name in ("num_channels", "in_channels", "in_chans"))
    return _noise(BATCH, next((count for count in counts if count), 3), height, width)


def _video(config: Any) -> Tensor:
    frames = int(_part(config, "num_frames").num_frames)
    return _image(config)[:, None].repeat(1, frames, 1, 1, 1)


def _mel(config: Any) -> Tensor:
    part = _part(config, "num_mel_bins", "max_source_positions")
    return _noise(BATCH, part.num_mel_bins, 2 * part.max_source_positions)  # its convolutions halve the frames


def _frames(config: Any) -> Tensor:
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        with suppress(HfpatchError):
            return _noise(BATCH, 4 * FRAMES, getattr(_part(config, name), name))
    raise HfpatchError("its configuration has no number of features of a frame")


def _spectrogram(config: Any) -> Tensor:
    part = _part(config, "num_mel_bins", "max_length")
    return _noise(BATCH, part.max_length, part.num_mel_bins)


def _wave(config: Any) -> Tensor:
    part = _part(config, "conv_kernel", "conv_stride")
    samples = FRAMES * int(getattr(part, "squeeze_factor", 1))
    for kernel, stride in zip(reversed(part.conv_kernel), reversed(part.conv_stride), strict=True):
        samples = (samples - 1) * stride + kernel
    return _noise(BATCH, samples)


def _channels(config: Any) -> Tensor:
    part = _part(config, "audio_channels", "upsampling_ratios")
    return _noise(BATCH, part.audio_channels, FRAMES * math.prod(part.upsampling_ratios))


def _series(config: Any) -> Tensor:
    part = _part(config, "context_length", "num_input_channels")
    return _noise(BATCH, part.context_length, part.num_input_channels)


_MAKERS: dict[str, tuple[Maker, ...]] = {
    "pixel_values": (_image, lambda config: _image(config)[:, None], _video),  # the second: several images in a row
    "input_features": (_mel, _frames),
    "input_values": (_wave, _spectrogram, _channels),
    "past_values": (_series,),
}


def _with_tokens(model: Any, name: str, make: Maker, rows: int = BATCH, **further: Tensor) -> dict[str, Any]:
    """Return an image, sound or series with tokens, among them as many of the image as the model replaces."""
    values, tokens, config = make(model.config).to(model.device), example_tokens(model)[:rows], text_config(model)
    if isinstance(end := getattr(config, "eos_token_id", None), int) and end < config.vocab_size:
        tokens[:, -1] = end  # where text is pooled
    ids = (getattr(model.config, key, None) for key in ("image_token_id", "image_token_index"))
    image = next((token for token in ids if isinstance(token, int)), None)
    if image is not None:
        with torch.no_grad():
            features: Any = model.get_image_features(values, **further)
        features = getattr(features, "pooler_output", features)
        images = features if isinstance(features, list | tuple) else [features]
        count = sum(part.numel() for part in images) // images[0].shape[-1] // rows
        tokens[tokens == image] = 3 if image != 3 else 4
        tokens = torch.cat((tokens.new_full((rows, count), image), tokens), 1)
        kinds = ("mm_token_type_ids", "token_type_ids")  # 1: of an image
        names = inspect.signature(model.forward).parameters
        further |= {kind: (tokens == image).long() for kind in kinds if kind in names}
    return {"input_ids": tokens, name: values, **further}


def _with_patches(model: Any) -> dict[str, Any]:
    """Return tokens with images that are given as a sequence of patches, as Qwen2-VL takes them."""
    part = _part(model.config, "patch_size", "temporal_patch_size")
    width = (getattr(part, "in_channels", None) or 3) * part.temporal_patch_size * part.patch_size**2
    grid = torch.tensor([[1, GRID, GRID]], device=model.device)
    return _with_tokens(model, "pixel_values", lambda _: _noise(GRID**2, width), rows=1, image_grid_thw=grid)


# The forward pass


@torch.no_grad()
def logits(model: Any, inputs: Inputs, *, seed: int = 0, **kwargs: Any) -> Tensor:
    """Return the output that is compared, see :func:`forward`, without gradients."""
    return forward(model, inputs, seed=seed, **kwargs)


def forward(model: Any, inputs: Inputs, *, seed: int = 0, **kwargs: Any) -> Tensor:
    """Return a model's logits; without, its last hidden state; without, all its outputs as one vector.

    A model that draws random numbers in evaluation draws the same ones in every call with a seed.
    """
    torch.manual_seed(seed)
    if model.can_generate() or "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False
    out = model(**{**inputs, **kwargs})
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(out, name, None), Tensor):
            return value
    values = out.values() if isinstance(out, Mapping) else out
    floats = [tensor.flatten() for tensor in values if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    if not floats:
        raise HfpatchError(f"{type(model).__name__} returns no tensor that could be compared")
    return torch.cat(floats)


def tokens_alone(inputs: Inputs) -> Tensor | None:
    """Return the token ids ``(batch, seq)`` of inputs that are nothing else; None of others."""
    return inputs["input_ids"] if inputs.keys() == {"input_ids"} else None


def lengths(inputs: Inputs) -> list[int]:
    """Return the numbers of token ids in a row."""
    return [inputs[name].shape[1] for name in _IDS if name in inputs]


def ordered(model: Any, inputs: Inputs) -> str | None:
    """Return the argument whose token ids the output follows, token by token; None if there is none."""
    name = next((name for name in _IDS if name in inputs), None)
    out = logits(model, inputs)
    return name if name is not None and out.dim() == 3 and out.shape[1] == inputs[name].shape[1] else None


@contextmanager
def no_random_layers(model: Any) -> Iterator[None]:
    """Let no layer be left out and no input be masked at random in training."""
    changed: list[tuple[Any, str, Any]] = []
    holders = chain.from_iterable((module, getattr(module, "config", None)) for module in model.modules())
    for holder in holders:
        for name in RANDOM_LAYERS:
            if isinstance(value := getattr(holder, name, None), bool | int | float) and value:
                changed.append((holder, name, value))
                setattr(holder, name, type(value)(0))
    try:
        yield
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)
