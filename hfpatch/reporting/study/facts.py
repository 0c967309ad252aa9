"""What a study's report must name: data, tokenizer, batches, settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfpatch.reporting.facts import Fact, data_text, digest, settings_text
from hfpatch.reporting.numbers import NOTHING, count, duration
from hfpatch.reporting.study.results import StudyResults
from hfpatch.reporting.study.words import key_text, value_text


def study_facts(study: StudyResults) -> list[Fact]:
    """Return on what and how the variants were trained and measured."""
    facts = [
        ("Baseline", study.baseline),
        ("Data", data_text(study.data)),
        ("Evaluation data", data_text(study.evaluation_data or {})),
        ("Tokens a run", _tokens(study)),
        ("Tokenizer", _tokenizer(study.tokenizer)),
        *((f"Batch plan, seed {seed}", f"SHA-256 {digest(plan)}") for seed, plan in study.plans.items()),
        ("Architecture, common to all", settings_text(study.common_architecture)),
        ("Training", settings_text(study.training)),
        ("Sweep", _sweep(study)),
        ("Seeds", ", ".join(map(str, study.seeds))),
        ("Trained at commit", ", ".join(dict.fromkeys(run.commit for run in study.runs if run.commit))),
    ]
    return [(label, value) for label, value in facts if value]


def glance(study: StudyResults) -> list[Fact]:
    """Return the few facts that stand above everything else."""
    wall = study.provenance.get("wall_s")
    points = max((sum(row.variant == name for row in study.rows) for name in study.variants), default=0)
    return [
        ("Baseline", study.baseline),
        ("Variants", count(len(study.variants))),
        *([("Points a variant", count(points))] if study.sweep else []),
        ("Seeds", count(len(study.seeds))),
        ("Tokens a run", _tokens(study) or NOTHING),
        ("Wall time", duration(wall) if isinstance(wall, int | float) else NOTHING),
    ]


def _tokens(study: StudyResults) -> str:
    """Return how many tokens the runs that ended saw."""
    trained = [run.train for run in study.runs if run.outcome == "complete" and run.train is not None]
    seen = sorted({train.tokens for train in trained if train.tokens is not None})
    return " to ".join(count(tokens) for tokens in dict.fromkeys((seen[0], seen[-1]))) if seen else ""


def _tokenizer(tokenizer: Mapping[str, Any]) -> str:
    size, name = tokenizer.get("vocab_size"), tokenizer.get("path") or tokenizer.get("name")
    known = [str(name)] if name else []
    known += [f"{count(size)} tokens"] if isinstance(size, int) else []
    known += [f"SHA-256 {digest(tokenizer['sha256'])}"] if tokenizer.get("sha256") else []
    return ", ".join(known)


def _sweep(study: StudyResults) -> str:
    told = (f"{key_text(key)} {', '.join(map(value_text, values))}" for key, values in study.sweep.items())
    return " × ".join(told)
