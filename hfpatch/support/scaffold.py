"""The files that a new method begins with: its module, its test and, for a package, its pyproject.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Q = "``(batch, seq, heads·size)``"
X = "``(batch, seq, hidden)``"


@dataclass(frozen=True)
class Place:
    """What a new method does at a place: it adds r A B to y.

    Args:
        arguments: of the place's function, after ``parts``; the first is y.
        read: r, one of the arguments.
        inputs: the width of r, as ``build`` computes it.
        outputs: the width of y.
        returned: what the function returns, for its docstring.
        by_hand: the hook by which an unpatched Llama computes the same, on ``layer``, with the weights of A and B.
    """

    arguments: str
    read: str
    inputs: str
    outputs: str
    returned: str
    by_hand: str


HIDDEN = "site.hidden_size"


def _projected(name: str, letter: str, module: str) -> Place:
    hook = f"""\
        layer.self_attn.{module}.register_forward_hook(
            lambda module, args, output, a=a, b=b: output + args[0] @ a.T @ b.T
        )"""
    arguments = f"{letter}: Tensor, x: Tensor"
    return Place(arguments, "x", HIDDEN, f'site.width("{name}")', f"the {name} ``(batch, seq, out)``", hook)


PLACES = {
    "entered": Place(
        "x: Tensor",
        "x",
        HIDDEN,
        HIDDEN,
        f"what enters the attention {X}",
        """\
        layer.input_layernorm.register_forward_hook(lambda module, args, output, a=a, b=b: output + output @ a.T @ b.T)\
""",
    ),
    "query": _projected("query", "q", "q_proj"),
    "key": _projected("key", "k", "k_proj"),
    "value": _projected("value", "v", "v_proj"),
    "heads": Place(
        "q: Tensor",
        "q",
        'site.width("query") // site.head_count',
        'site.width("query") // site.head_count',
        "the query ``(batch, seq, heads, size)``",
        """\
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, args, output, a=a, b=b: output + (output.unflatten(-1, (HEADS, -1)) @ a.T @ b.T).flatten(-2)
        )""",
    ),
    "mixed": Place(
        "a: Tensor, x: Tensor",
        "x",
        HIDDEN,
        "site.mixed_size or 0",
        f"what the output projection reads {Q}",
        """\
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, read=read, a=a, b=b: (args[0] + read[-1] @ a.T @ b.T,)
        )""",
    ),
    "output": Place(
        "o: Tensor, a: Tensor",
        "a",
        "site.mixed_size or 0",
        HIDDEN,
        f"what the output projection returns for a {X}",
        """\
        layer.self_attn.o_proj.register_forward_hook(
            lambda module, args, output, a=a, b=b: output + args[0] @ a.T @ b.T
        )""",
    ),
    "left": Place(
        "branch: Tensor, x: Tensor",
        "x",
        HIDDEN,
        HIDDEN,
        f"what joins the residual stream {X}",
        """\
        layer.self_attn.register_forward_hook(
            lambda module, args, output, read=read, a=a, b=b: (output[0] + read[-1] @ a.T @ b.T, *output[1:])
        )""",
    ),
    "stream": Place(
        "h: Tensor",
        "h",
        HIDDEN,
        HIDDEN,
        f"the residual stream {X}",
        """\
        layer.register_forward_hook(lambda module, args, output, a=a, b=b: output + output @ a.T @ b.T)""",
    ),
}
"""The places of :data:`hfpatch.tuners.hooks.PLACES`, in their order."""

_METHOD = '''\
"""A low-rank term in the attention branch: change the formula, and say here what it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfpatch import HfpatchError, MethodConfig, MethodSite, Parts, method
from hfpatch.nn import normal_
from torch import Tensor, nn


@method("{name}", size="rank")
@dataclass
class {cls}(MethodConfig):
    r"""Adds a low-rank term at {listed}.

    .. math::
        y + r A B                                      A: width of r -> rank;  B: rank -> width of y

    B = 0 at init: an exact no-op.

    Args:
        rank: width between A and B.

    Raises:
        HfpatchError: if a value is out of range.
    """

    rank: int = field(default=8, metadata={{"help": "Width between A and B."}})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise HfpatchError(f"rank={{self.rank}} must be at least 1")

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return A, drawn, and B, zero."""
        parts = nn.ModuleDict()
{built}
        return parts
{functions}'''
_BUILT = """\
        a = nn.Linear({inputs}, self.rank, bias=False)
        b = nn.Linear(self.rank, {outputs}, bias=False)
        normal_(a.weight, std=0.02, seed=seed, name=f"{{site.name}}.{name}.{part}a")
        nn.init.zeros_(b.weight)
        parts.update({{"{part}a": a, "{part}b": b}})"""
_FUNCTION = '''
    def {place}(self, parts: Parts, {arguments}, site: MethodSite) -> Tensor:
        """Return {returned}."""
        term: Tensor = parts["{part}b"](parts["{part}a"]({read}))
        return {y} + term
'''
_TEST = '''\
"""{cls} against its formula in plain torch, and the promises of every method."""

import re

import hfpatch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from {name} import {cls}

HEADS = 4
SIZES = {{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}}


def tiny() -> LlamaForCausalLM:
    """Return a small random model, the same in every call."""
    torch.manual_seed(0)
    heads = {{"num_attention_heads": HEADS, "num_key_value_heads": 2}}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, initializer_range=0.2)).eval()


def parts_of(model: LlamaForCausalLM) -> list[dict[str, torch.Tensor]]:
    """Return what the method added, by the name of the part, a mapping for each layer."""
    found: list[dict[str, torch.Tensor]] = [{{}} for _ in model.model.layers]
    for name, parameter in model.named_parameters():
        if match := re.search(r"layers\\.(\\d+)\\..*\\.{name}_(\\w+)\\.\\w+\\.weight$", name):
            found[int(match[1])][match[2]] = parameter
    return found


def by_hand(model: LlamaForCausalLM, parts: list[dict[str, torch.Tensor]]) -> None:
    """Let an unpatched model compute the formula."""
    for layer, own in zip(model.model.layers, parts, strict=True):
{hooks}


@torch.no_grad()
def test_formula() -> None:
    """The patched model computes what the formula says."""
    tokens = torch.arange(2, 20).reshape(2, 9)
    model = hfpatch.patch(tiny(), {cls}())
    parts = parts_of(model)
    for own in parts:
        for tensor in own.values():
            tensor += 0.1 * torch.randn(tensor.shape)
    expected = tiny()
    plain = expected(tokens).logits
    by_hand(expected, parts)
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)
    assert not torch.allclose(plain, expected(tokens).logits, atol=1e-3)


def test_promises() -> None:
    """All that hfpatch promises of a method holds."""
    report = hfpatch.check(tiny(), {cls}())
    assert report.passed, str(report)
'''
_KEEP_READ = """\
        read: list[torch.Tensor] = []
        layer.input_layernorm.register_forward_hook(lambda module, args, output, read=read: read.append(output))"""
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{project}"
version = "0.1.0"
dependencies = ["hfpatch"]

[project.entry-points."hfpatch.methods"]
{name} = "{name}:{cls}"

[tool.setuptools]
py-modules = ["{name}"]
"""


def class_name(name: str) -> str:
    """Return the name of the class of a method: ``OutputGate`` for ``output_gate``."""
    return "".join(word.capitalize() for word in name.split("_"))


def method_file(name: str, places: Sequence[str]) -> str:
    """Return the module of a new method that acts at some of :data:`PLACES`."""
    built, functions = [], []
    for place in places:
        at, part = PLACES[place], f"{place}_" if len(places) > 1 else ""
        built.append(_BUILT.format(part=part, inputs=at.inputs, outputs=at.outputs, name=name))
        y = at.arguments.partition(":")[0]
        filled = {"place": place, "part": part, "y": y, "arguments": at.arguments, "returned": at.returned}
        functions.append(_FUNCTION.format(**filled, read=at.read))
    texts = {"built": "\n".join(built), "functions": "".join(functions), "listed": _listed(places)}
    return _METHOD.format(name=name, cls=class_name(name), **texts)


def test_file(name: str, places: Sequence[str]) -> str:
    """Return its test: the formula by hooks on an unpatched model, and the promises."""
    hooks = []
    for place in places:
        part = f"{place}_" if len(places) > 1 else ""
        hooks.append(f'        a, b = own["{part}a"], own["{part}b"]\n{PLACES[place].by_hand}')
    if {"mixed", "left"} & {*places}:
        hooks.insert(int("entered" in places), _KEEP_READ)  # behind what changes x
    return _TEST.format(name=name, cls=class_name(name), hooks="\n".join(hooks))


def pyproject_file(name: str) -> str:
    """Return the pyproject.toml of a package of the one method, with its entry point."""
    return _PYPROJECT.format(name=name, cls=class_name(name), project=name.replace("_", "-"))


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
