"""What became of a run, by what it left on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def diverged_step(trained: Mapping[str, Any] | None) -> int | None:
    """Return the step at which a run, a training.json, diverged; None where it did not or nothing was trained."""
    return None if trained is None else trained.get("diverged_step")


def summarise(result: Mapping[str, Any]) -> str:
    """Return a run's result.json in one line: its scores, its losses, or that it diverged."""
    trained = result["train"]
    if (step := diverged_step(trained)) is not None:
        return f"diverged at step {step}"
    if "evaluation" in result:
        scores = result["evaluation"].items()
        return ", ".join(
            f"{task} {score['primary']} {score['metrics'][score['primary']]:.4g}" for task, score in scores
        )
    measured = trained.get("final_eval_loss")
    return f"loss {trained['final_loss']:.4f}" + (f", on held-out text {measured:.4f}" if measured is not None else "")
