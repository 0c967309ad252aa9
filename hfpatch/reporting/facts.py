"""The facts behind results, as labelled lines: protocol, model, data, batches, settings and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hfpatch.reporting.document import Fact
from hfpatch.reporting.numbers import count, duration
from hfpatch.results.cautions import PRODUCTS
from hfpatch.results.comparison import ComparisonResults

PROTOCOLS = {
    "as_published": "as published: settings, evaluation sizes and scoring of the paper, its flaws included",
    "as_it_should_be": "as it should be: matched parameters, fp32 trainables, whole test sets, paired statistics",
    "custom": "custom: neither of the two named protocols",
}


def protocol_facts(results: ComparisonResults) -> list[Fact]:
    """Return protocol, model, data, batch plans, training and evaluation settings."""
    model, parameters = results.model, results.model.get("parameters")
    described = (
        _text(model.get("name")),
        _labelled("revision", model.get("revision")),
        _text(model.get("model_type")),
        f"{count(parameters)} parameters" if isinstance(parameters, int) else "",
        _text(model.get("dtype")),
        gguf_text(model.get("gguf") or {}),
        settings_text(model.get("loading") or {}),
        _labelled("SHA-256", digest(model.get("sha256"))),
    )
    labels = [f"{label} = {name}" for name, label in results.labels.items() if label != name]
    facts = [
        ("Protocol", PROTOCOLS.get(results.protocol, results.protocol)),
        ("Model", ", ".join(filter(None, described))),
        ("Architecture, common to all", settings_text(results.study.architecture) if results.study else ""),
        ("Tokenizer", settings_text(results.study.tokenizer) if results.study else ""),
        ("Methods, by their names in files", ", ".join(labels)),
        ("Data", data_text(results.data)),
    ]
    texts = results.retention.texts if results.retention is not None else {}
    facts += [(f"Text to keep, {name}", data_text(text)) for name, text in texts.items()]
    for seed, plan in results.plan.items():
        sizes = f"{plan.get('steps', '?')} steps of {plan.get('batch_size', '?')} blocks"
        facts.append((f"Batch plan, seed {seed}", f"{sizes}, SHA-256 {digest(plan.get('sha256')) or 'unknown'}"))
    facts += [("Training", settings_text(results.training)), ("Evaluation", evaluation_text(results.evaluation))]
    for name, task in results.tasks.items():
        version, documents = _labelled("version", task.version), _labelled("data SHA-256", digest(task.data_sha256))
        facts.append((f"Task {name}", ", ".join(filter(None, (version, documents)))))
    return [(label, value) for label, value in facts if value]


def gguf_text(gguf: Mapping[str, Any]) -> str:
    """Return the GGUF file of a model in words; nothing without one."""
    return f"{gguf['weights']} (SHA-256 of {gguf['file']} {digest(gguf['file_sha256'])})" if gguf else ""


def environment_facts(results: ComparisonResults) -> list[Fact]:
    """Return where and how the run was made, and the commits of its runs where they differ."""
    return provenance_facts(results.provenance, sorted(results.commits - {_text(results.provenance.get("commit"))}))


def provenance_facts(provenance: Mapping[str, Any], of_runs: Sequence[str] = ()) -> list[Fact]:
    """Return where and how a run was made, as :func:`hfpatch.support.provenance.provenance` recorded it.

    ``of_runs`` are the commits of its runs that are others.
    """
    commit, wall = _text(provenance.get("commit")), provenance.get("wall_s")
    device, threads = _text(provenance.get("device")), provenance.get("threads")
    uncommitted = ", with changes that were not committed" if commit and provenance.get("dirty") else ""
    facts = [
        ("Command", _text(provenance.get("command"))),
        ("Commit", f"{commit or 'unknown'}{uncommitted}"),
        ("Commit of the runs", ", ".join(of_runs)),
        ("Started", _text(provenance.get("started"))),
        ("Wall time", duration(wall) if isinstance(wall, int | float) else ""),
        ("Device", f"{device}, {threads} threads" if device and threads else device),
        ("Platform", _text(provenance.get("platform"))),
        ("Python", _text(provenance.get("python"))),
        ("Versions", settings_text(provenance.get("versions") or {})),
        ("Matrix products", PRODUCTS.get(_text(provenance.get("matmul")), "")),
    ]
    return [(label, value) for label, value in facts if value]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def data_text(data: Mapping[str, Any]) -> str:
    """Return the values of :meth:`hfpatch.data.blocks.TokenBlocks.to_json` as one line."""
    sizes = [f"{count(data[key])} {key}" for key in ("documents", "blocks", "tokens") if isinstance(data.get(key), int)]
    block = _labelled("blocks of", data.get("block_size"))
    parts = (
        _text(data.get("source")),
        _labelled("revision", data.get("revision")),
        *sizes,
        f"{block} tokens" if block else "",
        _labelled("layout", data.get("layout")),
        _labelled("SHA-256", digest(data.get("sha256"))),
    )
    return ", ".join(filter(None, parts))


def evaluation_text(settings: Mapping[str, Any]) -> str:
    """Return the settings of an evaluation as one line; tasks with options of their own have them in brackets."""
    tasks = settings.get("tasks")
    if isinstance(tasks, Mapping):
        texts = {name: settings_text(options or {}) for name, options in tasks.items()}
        settings = {**settings, "tasks": [f"{name} ({text})" if text else name for name, text in texts.items()]}
    return settings_text(settings)


def settings_text(settings: Any) -> str:
    """Return settings as one line without unset ones; any other value as text."""
    if not isinstance(settings, Mapping):
        return _value(settings)
    return ", ".join(f"{key} {_value(value)}" for key, value in settings.items() if value not in (None, [], {}))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + settings_text(value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _labelled(label: str, value: Any) -> str:
    return "" if value is None or value == "" else f"{label} {_value(value)}"


def digest(value: Any) -> str:
    """Return the first 16 digits of a hash; ``results.json`` has it whole."""
    text = _text(value)
    return f"{text[:16]}…" if len(text) > 16 else text
