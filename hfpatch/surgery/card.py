"""The Markdown cards of a patch, of an exported model and of one that was pretrained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.recipes.strict import write_yaml
from hfpatch.support.markup import block, escape, table
from hfpatch.surgery.gguf_files import SUFFIX
from hfpatch.surgery.manifest import Adapter, Base

TAGS = ["hfpatch"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_TINYWORLD = "tinyworld/"
_CODE_LICENCE = "`{}` is under the MIT licence, whose text it contains."


@dataclass(frozen=True)
class Measured:
    """The results of a patch in a comparison, as labelled lines and a table.

    Attributes:
        title: the method's name.
        method: its description, options and parameter count.
        data: the training text, the batches and the optimiser.
        headings: of the table of results.
        results: its rows.
        notes: one sentence each.
    """

    title: str
    method: Sequence[tuple[str, str]]
    data: Sequence[tuple[str, str]]
    headings: Sequence[str]
    results: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def patch_card(base: Base, adapters: Sequence[Adapter], measured: Measured | None = None) -> str:
    """Return the card of a patch: base, method, data, results (None: not measured), loading and the base's licence."""
    import transformers

    # The base, the parts of the stack, and what was measured
    name = shown_base(base.name or base.class_name)
    licence = base.licence or base_licence(base.name)
    facts = [
        ("Model", f"{name} ({base.class_name})"),
        ("Fingerprint", base.fingerprint.exact),
        ("Licence", licence or "not stated where this patch was made"),
    ]
    parts = [[f"`{part.name}`", escape(part.method), f"`{part.sha256[:16]}`"] for part in adapters]
    results = "None yet: `hfpatch eval --model BASE --patch FOLDER --tasks TASKS` measures it."
    if measured is not None and measured.results:
        rows = [list(map(escape, row)) for row in measured.results]
        notes = "\n".join(f"- {block(note)}" for note in measured.notes)
        results = f"{table(list(map(escape, measured.headings)), rows)}\n\n{notes}".strip()

    # How to load it
    modules = ["hfpatch", *sorted({part.module for part in adapters if part.module})]
    imports = [f"    import {module}" for module in modules]
    both = " and ".join(f"`import {module}`" for module in modules)
    kind = base.class_name if base.class_name in transformers.__all__ else "AutoModelForCausalLM"
    model = f"{kind}.from_pretrained({name!r})"
    if name.startswith(_TINYWORLD) or name.endswith(SUFFIX):
        model = f"hfpatch.load_base({name!r}).model"
    else:
        imports.append(f"    from transformers import {kind}")
    loading = [
        "With hfpatch (`pip install hfpatch`), the whole stack:\n",
        *imports,
        f'\n    model = {model}\n    hfpatch.load_patch(model, "this folder")\n',
        f"One adapter alone is a PEFT adapter. With {both} before it, PEFT and transformers know the method:",
        '`PeftModel.from_pretrained(model, "its folder")` or `model.load_adapter("its folder")`.',
    ]
    sections = [
        front({"library_name": "peft", "base_model": hub_id(name), "license": licence, "tags": TAGS}),
        f"# {escape(measured.title) + ' on' if measured else 'Patch for'} {escape(name)}",
        f"A stack of adapters for a frozen {escape(base.model_type)} model, made with hfpatch.",
        f"## Base\n\n{_list(facts)}",
        f"## Method\n\n{table(['adapter', 'method', 'SHA-256 of its tensors'], parts, numbers=[False] * 3)}",
        *([_list(measured.method)] if measured else []),
        f"## Data\n\n{_list(measured.data) if measured else 'Not recorded with this patch.'}",
        f"## Results\n\n{results}",
        "## How to load it\n\n" + "\n".join(loading),
        f"## Licence\n\n{_licence(licence)}",
    ]
    return "\n\n".join(sections) + "\n"


def export_card(base: str, model_class: str, licence: str | None) -> str:
    """Return the card of a folder that contains a base and its patch."""
    sections = [
        front({"library_name": "transformers", "base_model": hub_id(base), "license": licence, "tags": TAGS}),
        f"# {escape(base)} with a patch",
        f"The weights of {escape(base)} and of a patch in its attention branches, made with hfpatch, in one folder. "
        f"`modeling_hfpatch.py` ({escape(model_class)}) is plain torch and transformers: neither hfpatch nor PEFT is "
        "needed. It is code, so transformers asks for your consent; read it first.",
        _loading(has_code=True),
        f"## Licence\n\n{_licence(licence)} {_CODE_LICENCE.format('modeling_hfpatch.py')}",
    ]
    return "\n\n".join(sections) + "\n"


def model_card(model_class: str, training: Sequence[tuple[str, str]], *, code: str | None) -> str:
    """Return the card of a pretrained model: labelled facts of its training, and how it is loaded, with its code."""
    licence = f" {_CODE_LICENCE.format(code)}" if code else ""
    sections = [
        front({"library_name": "transformers", "tags": TAGS}),
        f"# {escape(model_class)}",
        "A language model whose parameters were all trained with hfpatch.",
        f"## Training\n\n{_list(training)}",
        f"## How to load it\n\n{_loading(has_code=code is not None)}",
        f"## Licence\n\nNone is stated for the weights.{licence}",
    ]
    return "\n\n".join(sections) + "\n"


def _loading(*, has_code: bool) -> str:
    code = ", trust_remote_code=True" if has_code else ""
    return (
        "    from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        '    folder = "this folder"\n'
        f"    model = AutoModelForCausalLM.from_pretrained(folder{code})\n"
        "    tokenizer = AutoTokenizer.from_pretrained(folder)"
    )


def is_local(name: str) -> bool:
    """Return whether a base's name is a file or a folder with a model; results may be in one named after a hub id."""
    return Path(name).is_file() or Path(name, "config.json").is_file()


def shown_base(name: str) -> str:
    """Return a base's name for publication: a hub id unchanged, the last part of a local path."""
    path = Path(name)
    if path.is_absolute() or name.startswith((".", "~")) or is_local(name):
        ours = path.parent.parts[-2:] == ("tinyworld", "checkpoints")
        return f"{_TINYWORLD}{path.name}" if ours else path.name
    return name


def base_licence(name: str) -> str | None:
    """Return the licence that a base's own card states, from its folder or the hub's cache; None if not known."""
    if shown_base(name).startswith(_TINYWORLD):
        return "mit"  # it comes with hfpatch
    if not name:
        return None
    folder = Path(name).parent if name.endswith(SUFFIX) and Path(name).is_file() else Path(name)
    card: Any = folder / "README.md"
    if not card.is_file():
        from huggingface_hub import try_to_load_from_cache

        card = try_to_load_from_cache(repository, "README.md") if (repository := _repository(name)) else None
        if not isinstance(card, str):
            return None
    header = _FRONT.match(Path(card).read_text(encoding="utf-8", errors="replace"))
    stated = re.search(r"^license:\s*[\"']?([\w.+-]+)", header[1], re.MULTILINE) if header else None
    return stated[1] if stated else None


def hub_id(name: str) -> str | None:
    """Return the name if it is a repository on the hub, which a card may name as its base; else None."""
    name = _repository(name) or ""
    return name if "/" in name and not name.startswith(_TINYWORLD) else None


def _repository(name: str) -> str | None:
    """Return the hub repository of a base or of a GGUF file; None for other names."""
    repository = "/".join(name.split("/")[:2]) if name.endswith(SUFFIX) and name.count("/") > 1 else name
    return repository if _HUB_ID.fullmatch(repository) and not repository.endswith(SUFFIX) else None


def front(values: Mapping[str, Any]) -> str:
    """Return a card's YAML header, without None."""
    return f"---\n{write_yaml({key: value for key, value in values.items() if value is not None})}---"


def _list(facts: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {block(label)}: {escape(value)}" for label, value in facts)


def _licence(licence: str | None) -> str:
    if licence is None:
        return "The licence of the base, which its own page states, applies to what is made with it."
    return f"The base is under {escape(licence)}; its licence applies to what is made with it."
