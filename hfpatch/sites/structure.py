"""Reading the attention branch from the structure of a block, for types without a declaration.

It supports only common forms (separate projections or multi-head latent attention, norms with unambiguous names);
anything else has to be declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family
from hfpatch.sites.layouts import latent, out_features, separate
from hfpatch.sites.modules import features, has_module, submodule, unwrapped
from hfpatch.sites.site import joined

STRUCTURAL = "read from the structure"
OUTPUTS = ("o_proj", "out_proj", "dense", "Wo")
OTHER_MIXERS = re.compile(r"Linear|Delta|Lightning|Mamba|Conv|Recurrent|Cross|Vision|Audio")
OTHER_PATHS = re.compile(r"cross|encoder_att|vision|visual|image|audio|speech")

# The norms of a block, by name, and which of them the branch passes before it joins the residual stream.
EXITS: dict[frozenset[str], str | None] = {
    frozenset(norms): exit_
    for norms, exit_ in [
        # before attention and before the MLP, or one for both in parallel blocks
        (("input_layernorm",), None),
        (("input_layernorm", "post_attention_layernorm"), None),
        (("input_layernorm", "pre_feedforward_layernorm"), None),
        (("input_layernorm", "pre_ff_layernorm"), None),
        (("attention_layernorm", "feedforward_layernorm"), None),
        (("operator_norm", "ffn_norm"), None),
        (("attn_norm", "mlp_norm"), None),
        (("ln_1",), None),
        (("norm",), None),
        # decoders of encoder-decoder models, whose norms are before or after
        (("self_attn_layer_norm", "final_layer_norm"), None),
        (("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"), None),
        # around attention and around the MLP
        (
            ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
            "post_attention_layernorm",
        ),
        (
            ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            "post_attention_layernorm",
        ),
        (
            ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
            "post_self_attn_layernorm",
        ),
        (("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"), "post_operator_norm"),
        # only after them
        (("post_attention_layernorm", "post_feedforward_layernorm"), "post_attention_layernorm"),
    ]
}


def block_lists(tower: nn.Module) -> list[str]:
    """Return the paths of the outermost lists of blocks with attention, from the text tower."""
    found: list[str] = []
    for path, module in tower.named_modules():
        if not isinstance(module, nn.ModuleList) or OTHER_PATHS.search(path):
            continue
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and any(next(_attention_paths(block), None) for block in module):
            found.append(path)
    return found


def read_family(block: nn.Module) -> Family | None:
    """Return the declaration that is read from the structure of a block; None if it has no attention.

    Raises:
        HfpatchError: if the structure is ambiguous; the message says where.
    """
    paths = list(_attention_paths(block))
    if not paths:
        return None
    if len(paths) > 1:
        raise HfpatchError(f"{type(block).__name__} contains several attention modules ({', '.join(paths)})")
    attention = submodule(block, paths[0], of=type(block).__name__)
    output = next(name for name in OUTPUTS if has_module(attention, name))
    norms = frozenset(name for name, _ in block.named_children() if re.search(r"norm|^ln_\d", name))
    if norms not in EXITS:
        raise HfpatchError(
            f"{type(block).__name__} has the norms {', '.join(sorted(norms)) or '(none)'}, which do not show where the "
            "attention branch joins the residual stream"
        )
    is_latent = _is_latent(attention)
    if not is_latent:
        query, value = out_features(attention, "q_proj"), features(unwrapped(getattr(attention, output)))[0]
        if query != value:
            raise HfpatchError(
                f"{type(attention).__name__}: q_proj has {query} columns but {output} reads {value}, so that some of "
                "them may be something else than the query"
            )
    return Family(
        name=STRUCTURAL,
        model_types=(),
        layers="",
        attention=paths[0],
        qkv=latent if is_latent else separate(),
        output=output,
        exit=EXITS[norms],
        factor=attrgetter("residual_multiplier") if hasattr(block, "residual_multiplier") else None,
    )


def _attention_paths(block: nn.Module, *, depth: int = 2, at: str = "") -> Iterator[str]:
    for name, child in block.named_children():
        path = joined(at, name)
        if OTHER_PATHS.search(name) or OTHER_MIXERS.search(type(child).__name__):
            continue
        own = all(has_module(child, target) for target in ("q_proj", "k_proj", "v_proj"))
        if (own or _is_latent(child)) and any(has_module(child, output) for output in OUTPUTS):
            yield path
        elif depth > 1 and not isinstance(child, nn.ModuleList):
            yield from _attention_paths(child, depth=depth - 1, at=path)


def _is_latent(module: nn.Module) -> bool:
    query = has_module(module, "q_proj") or (has_module(module, "q_a_proj") and has_module(module, "q_b_proj"))
    return query and has_module(module, "kv_b_proj")
