"""Where things are in models that are no causal language models, read in transformers' source, not asked from hfpatch.

A case is a model type; its model is the tiny random twin of ``AutoModel`` of the type's default configuration.
"""

from dataclasses import dataclass, field

import torch
from families import frozen
from transformers import CONFIG_MAPPING, AutoModel

from hfpatch.twins import shrink

IDS = {"input_ids": torch.arange(3, 19).reshape(2, 8)}
PAIR = {**IDS, "decoder_input_ids": torch.arange(5, 21).reshape(2, 8)}


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


PIXELS = {"pixel_values": noise(2, 3, 32, 32)}
SOUND = {"input_values": noise(2, 4000)}
MEL = {"input_features": noise(2, 16, 128), "decoder_input_ids": PAIR["decoder_input_ids"]}
PATCHES = {"hidden_states": noise(32, 192), "grid_thw": torch.tensor([[1, 4, 4]] * 2)}


@dataclass(frozen=True)
class Tower:
    """A tower's self-attentions: paths from the model, with ``{}`` for the index of the block.

    Args:
        attention: the attention module.
        exit: the module whose output is added to the residual stream; None: the attention.
        factor: by which that output is multiplied before.
        query: the query's projection, from the attention; None where it is refused.
        third: whether that projection holds queries, keys and values one after the other.
        argument: how the attention gets the hidden state: its position or its name.
        at: the part of the model that runs; its inputs.
        inputs: what it reads.
        named: whether ``target_modules`` has to name it, as the model has a language model beside it.
        inside: the projections that read the hidden state, where the attention adds the residual itself.
    """

    attention: str
    exit: str | None = None
    factor: float = 1.0
    query: str | None = "q_proj"
    third: bool = False
    argument: int | str = "hidden_states"
    at: str = ""
    inputs: dict = field(default_factory=lambda: IDS)
    named: bool = False
    inside: tuple[str, ...] = ()


BERT = Tower("encoder.layer.{}.attention.self", "encoder.layer.{}.attention.output.dense", query="query", argument=0)
ENCODER = Tower("encoder.layers.{}.self_attn", argument=0, inputs=PAIR, named=True)
CLIP = Tower("encoder.layers.{}.self_attn", inputs=PIXELS)
VIT = Tower("layers.{}.attention", argument=0, inputs=PIXELS)
WAV = Tower("encoder.layers.{}.attention", argument=0, inputs=SOUND)
DINO = "encoder.layer.{}.attention"

TOWERS = {
    # encoders
    "distilbert": [Tower("transformer.layer.{}.attention", query="q_lin", argument=0)],
    "electra": [BERT],
    "mpnet": [Tower("encoder.layer.{}.attention.attn", query="q", argument=0)],
    "albert": [
        Tower(
            "encoder.albert_layer_groups.0.albert_layers.0.attention",
            "encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
            query="query",
            inside=("query", "key", "value"),
        )
    ],
    "modernbert": [Tower("layers.{}.attn", query="Wqkv", third=True, argument=0)],
    "deberta": [Tower(BERT.attention, BERT.exit, query=None, argument=0)],
    "deberta-v2": [Tower(BERT.attention, BERT.exit, query=None, argument=0)],
    "esmc": [Tower("layers.{}.self_attn", factor=(2 / 36) ** -0.5, argument=0)],
    # encoders of encoder-decoders
    "bart": [ENCODER],
    "marian": [ENCODER],
    "t5": [Tower("encoder.block.{}.layer.0.SelfAttention", query="q", argument=0, inputs=PAIR, named=True)],
    "whisper": [Tower(ENCODER.attention, inputs=MEL, named=True)],
    # speech
    "wav2vec2": [WAV],
    "hubert": [WAV],
    "mimi_encoder": [
        Tower(
            "encoder_transformer.layers.{}.self_attn",
            "encoder_transformer.layers.{}.self_attn_layer_scale",
            at="encoder_transformer",
            inputs={"hidden_states": noise(2, 5, 64)},
        )
    ],
    # vision
    "vit": [VIT],
    "deit": [VIT],
    "beit": [Tower(VIT.attention, "layers.{}.drop_path", argument=0, inputs=PIXELS)],
    "dinov2": [Tower(DINO, "encoder.layer.{}.layer_scale1", argument=0, inputs=PIXELS)],
    "dinov3_vit": [Tower("model.layer.{}.attention", "model.layer.{}.layer_scale1", argument=0, inputs=PIXELS)],
    # two towers side by side
    "clip": [
        Tower("text_model.encoder.layers.{}.self_attn", inputs={**IDS, **PIXELS}),
        Tower("vision_model.encoder.layers.{}.self_attn", inputs={**IDS, **PIXELS}),
    ],
    "siglip_vision_model": [CLIP],
    # vision towers of multimodal language models
    "llava": [Tower("vision_tower.encoder.layers.{}.self_attn", at="vision_tower", inputs=PIXELS, named=True)],
    "gemma3": [Tower("vision_tower.encoder.layers.{}.self_attn", at="vision_tower", inputs=PIXELS, named=True)],
    "qwen2_vl": [
        Tower("visual.blocks.{}.attn", query="qkv", third=True, argument=0, at="visual", inputs=PATCHES, named=True)
    ],
    # time series
    "patchtst": [Tower("encoder.layers.{}.self_attn", inputs={"past_values": noise(2, 64, 1)})],
    "timesfm": [
        Tower(
            "layers.{}.self_attn",
            inputs={
                "past_values": noise(2, 64),
                "past_values_padding": torch.zeros(2, 64),
                "freq": torch.zeros(2, 1, dtype=torch.long),
            },
        )
    ],
}


def make(kind):
    """Return a new tiny model, the same for every call, with every parameter off its initial value."""
    torch.manual_seed(0)
    model = AutoModel.from_config(shrink(CONFIG_MAPPING[kind]())).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def outputs(model, tower):
    """Return every tensor of floats that the part of the model with the tower returns, as one vector."""
    with frozen(model):
        output = model.get_submodule(tower.at)(**tower.inputs)
    floats = [value for value in output.to_tuple() if torch.is_tensor(value) and value.is_floating_point()]
    return torch.cat([value.flatten() for value in floats])


def paths(model, tower):
    """Return the paths of attention and exit of every block."""
    names, pairs = {name for name, _ in model.named_modules()}, []
    for index in range(9):
        attention = tower.attention.format(index)
        if attention in names and attention not in dict(pairs):
            pairs.append((attention, (tower.exit or tower.attention).format(index)))
    return pairs
