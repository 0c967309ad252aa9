"""What a comparison found."""

from __future__ import annotations

from hfpatch.results.schema import ComparisonResults, Method


def control_for(results: ComparisonResults, name: str) -> str | None:
    """Return the plain LoRA method that a method's parameter count is compared with.

    The one matched to it comes first, then the nearest in parameters; None for a plain LoRA itself.
    """
    if _is_lora(results.methods[name]):
        return None
    plain = {other: method for other, method in results.methods.items() if _is_lora(method) and method.trainable}
    matched = next((other for other, method in plain.items() if method.match and method.match.to == name), None)
    if matched is not None or not plain:
        return matched
    return min(plain, key=lambda other: abs(plain[other].trainable - results.methods[name].trainable))


def _is_lora(method: Method) -> bool:
    return bool(method.parts) and all(part.get("type") == "lora" for part in method.parts)
