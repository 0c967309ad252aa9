"""The citations of a report as BibTeX: hfpatch, the sources of the methods that ran, the evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources

from hfpatch.reporting.document import Code, Section, Text
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.folder import Results

_SOURCES = {
    "pre_projection": ("shinde2026preprojection",),
    "nonlinear_query": ("karbevski2026nonlinear",),
    "query_temperature": (),
    "output_gate": ("qiu2025gated",),
    "value_residual": ("zhou2024value",),
    "loreft": ("wu2024reft",),
    "parallel_adapter": ("he2021unified",),
    "nonlinear_lora": ("hu2021lora",),
    "canon": ("allenzhu2025canon", "so2021primer"),
    "lora": ("hu2021lora",),
}
"""Method -> keys in ``templates/citations.bib``; other methods are PEFT's."""


def citation_section(results: Iterable[Results]) -> Section:
    """Build the section with the BibTeX of all sources of results."""
    runs = list(results)
    commits = dict.fromkeys(str(run.provenance["commit"]) for run in runs if run.provenance.get("commit"))
    fields = {
        "title": "hfpatch: model surgery on the attention branch of causal language models",
        "author": "{The hfpatch authors}",
        **({"note": f"commit {', '.join(commit[:12] for commit in commits)}"} if commits else {}),
    }
    itself = ["@misc{hfpatch,", *(f"  {name} = {{{value}}}," for name, value in fields.items()), "}\n"]
    file = resources.files("hfpatch.reporting").joinpath("templates", "citations.bib").read_text(encoding="utf-8")
    entries = {re.findall(r"{(\w+),", entry)[0]: f"{entry}\n" for entry in file.rstrip().split("\n\n")}
    keys: list[str] = []
    for run in runs:
        match run:
            case ComparisonResults():
                for part in (part for method in run.methods.values() for part in method.parts):
                    keys += _SOURCES.get(str(part.get("type")), ("peft",))
                queries = {method.variant.query for method in run.methods.values() if method.variant is not None}
                keys += ["karbevski2026nonlinear"] if queries - {"Q = x W_Q", ""} else []
                keys += ["karbevski2025keyvalue"] if "Q = x" in queries else []
                keys += ["lmeval"] if run.tasks and run.study is None else []
            case EvaluationResults():
                keys.append("lmeval")
    cited = [entries[key] for key in dict.fromkeys(keys)]
    blocks = Text("The sources of these results, as BibTeX."), Code("\n".join(["\n".join(itself), *cited]), "bibtex")
    return Section("cite", "Cite", blocks)
