"""Methods as a user writes them, right and wrong, and a registry that forgets them."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn

import hfpatch
from hfpatch.nn import normal_
from hfpatch.recipes import sizes

REGISTRIES = (
    PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, sizes.SIZES, sizes.NO_SIZE,
)  # fmt: skip


@contextmanager
def forgotten():
    """Forget every method that is registered meanwhile."""
    before = [dict(registry) for registry in REGISTRIES]
    try:
        yield
    finally:
        for registry, entries in zip(REGISTRIES, before, strict=True):
            registry.clear()
            registry.update(entries)


def installed(folder, group, module, text, **entries):
    """Write a module, and the entry points of its package: by name, what each names in the module."""
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    lines = [f"{name} = {module}:{what}\n" for name, what in entries.items()]
    (info / "entry_points.txt").write_text("".join([f"[{group}]\n", *lines]))
    (folder / f"{module}.py").write_text(text)


def low_rank(site, seed, outputs):
    """Return W_A, drawn, and W_B, zero."""
    parts = nn.ModuleDict({"a": nn.Linear(site.hidden_size, 2, bias=False), "b": nn.Linear(2, outputs, bias=False)})
    normal_(parts["a"].weight, std=0.1, seed=seed, name=f"{site.name}.a")
    nn.init.zeros_(parts["b"].weight)
    return parts


def defined(*, method="mine", annotations=None, base=hfpatch.MethodConfig, decorate=True, **members):
    """Define and register a method of the name; ``query`` and ``build`` are right unless members say otherwise."""
    right = {
        "build": lambda self, site, seed: low_rank(site, seed, site.width("query")),
        "query": lambda self, parts, q, x, site: q + parts["b"](parts["a"](x)),
    }
    annotated = {"__annotations__": annotations or {}, "__module__": __name__, "__qualname__": "Mine"}
    body = {name: value for name, value in ({**right, **annotated} | members).items() if name not in right or value}
    cls = type("Mine", (base,), body)
    return hfpatch.method(method)(dataclass(cls)) if decorate else cls


def leaking(self, parts, q, x, site):
    """A method whose query reads the mean over all positions, of padding and the future too."""
    return q + parts["b"](parts["a"](x.mean(1, keepdim=True)))


def on_the_cpu(self, parts, q, x, site):
    return q + parts["b"](parts["a"](x)) * torch.ones(q.shape[-1])


def by_torch(self, site, seed):
    parts = low_rank(site, seed, site.width("query"))
    nn.init.normal_(parts["a"].weight)
    return parts


def equal_layers(self, site, seed):
    return low_rank(replace(site, name="here"), seed, site.width("query"))


def changing(self, site, seed):
    parts = low_rank(site, seed, site.width("query"))
    nn.init.ones_(parts["b"].weight)
    return parts


def with_an_idle_part(self, site, seed):
    idle = nn.Linear(2, 2)
    for parameter in idle.parameters():
        nn.init.ones_(parameter)
    return nn.ModuleDict({**low_rank(site, seed, site.width("query")), "idle": idle})


def failing(self, parts, q, x, site):
    raise RuntimeError("no such\nkernel")
