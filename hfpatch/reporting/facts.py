"""What a result must name: protocol, model, data, batches, settings and environment, as labelled lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.reporting.document import Fact
from hfpatch.reporting.numbers import count, duration
from hfpatch.results.schema import ComparisonResults

PROTOCOLS = {
    "as_published": "as published: settings, evaluation sizes and scoring of the paper, its flaws included",
    "as_it_should_be": "as it should be: matched parameters, fp32 trainables, whole test sets, paired statistics",
    "custom": "custom: neither of the two named protocols",
}


def protocol_facts(results: ComparisonResults) -> list[Fact]:
    """Return what was compared on what: protocol, model, data, batch plans, training and evaluation settings."""
    facts = [
        ("Protocol", PROTOCOLS.get(results.protocol, results.protocol)),
        ("Model", _model(results.model)),
        ("Data", data_text(results.data)),
        *_plans(results.plan),
        ("Training", settings_text(results.training)),
        ("Evaluation", settings_text(results.evaluation)),
        *((f"Task {name}", _task(info.version, info.data_sha256)) for name, info in results.tasks.items()),
    ]
    return [(label, value) for label, value in facts if value]


def environment_facts(results: ComparisonResults) -> list[Fact]:
    """Return where and how the run was made."""
    return provenance_facts(results.provenance)


def provenance_facts(provenance: Mapping[str, Any]) -> list[Fact]:
    """Return what :func:`hfpatch.support.provenance.provenance` recorded."""
    versions = provenance.get("versions")
    facts = [
        ("Command", _text(provenance.get("command"))),
        ("Commit", _commit(provenance)),
        ("Started", _text(provenance.get("started"))),
        ("Wall time", _seconds(provenance.get("wall_s"))),
        ("Device", _device(provenance)),
        ("Platform", _text(provenance.get("platform"))),
        ("Python", _text(provenance.get("python"))),
        ("Versions", settings_text(versions) if isinstance(versions, Mapping) else ""),
    ]
    return [(label, value) for label, value in facts if value]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def _seconds(value: Any) -> str:
    return duration(value) if isinstance(value, int | float) else ""


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = _text(provenance.get("commit"))
    if not commit:
        return "unknown"
    return f"{commit}, with changes that were not committed" if provenance.get("dirty") else commit


def _device(provenance: Mapping[str, Any]) -> str:
    device, threads = _text(provenance.get("device")), provenance.get("threads")
    return f"{device}, {threads} threads" if device and threads else device


def _model(model: Mapping[str, Any]) -> str:
    parameters = model.get("parameters")
    parts = [
        _text(model.get("name")),
        _labelled("revision", model.get("revision")),
        _text(model.get("model_type")),
        f"{count(parameters)} parameters" if isinstance(parameters, int) else "",
        _text(model.get("dtype")),
        _labelled("SHA-256", digest(model.get("sha256"))),
    ]
    return ", ".join(part for part in parts if part)


def data_text(data: Mapping[str, Any]) -> str:
    """Return the values of :meth:`hfpatch.data.blocks.TokenBlocks.to_json` as one line."""
    sizes = [f"{count(data[key])} {key}" for key in ("documents", "blocks", "tokens") if isinstance(data.get(key), int)]
    block = _labelled("blocks of", data.get("block_size"))
    parts = [
        _text(data.get("source")),
        _labelled("revision", data.get("revision")),
        *sizes,
        f"{block} tokens" if block else "",
        _labelled("layout", data.get("layout")),
        _labelled("SHA-256", digest(data.get("sha256"))),
    ]
    return ", ".join(part for part in parts if part)


def _plans(plans: Mapping[str, Any]) -> Iterator[Fact]:
    for seed, plan in plans.items():
        if isinstance(plan, Mapping):
            sizes = f"{plan.get('steps', '?')} steps of {plan.get('batch_size', '?')} blocks"
            yield f"Batch plan, seed {seed}", f"{sizes}, SHA-256 {digest(plan.get('sha256')) or 'unknown'}"


def _task(version: object, sha256: str | None) -> str:
    parts = [_labelled("version", version), _labelled("data SHA-256", digest(sha256))]
    return ", ".join(part for part in parts if part)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as one line, what is not set left out."""
    return ", ".join(f"{key} {_value(value)}" for key, value in settings.items() if value not in (None, [], {}))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + settings_text(value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _labelled(label: str, value: Any) -> str:
    return "" if value is None or value == "" else f"{label} {_value(value)}"


def digest(value: Any) -> str:
    """Return the first 16 digits of a hash; ``results.json`` has it whole."""
    text = _text(value)
    return f"{text[:16]}…" if len(text) > 16 else text
