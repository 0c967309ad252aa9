"""What a paper that uses a report cites: hfpatch, the sources of the methods that ran, the evaluation, as BibTeX."""

from __future__ import annotations

from collections.abc import Iterable

from hfpatch.reporting.document import Code, Section, Text
from hfpatch.results.schema import ComparisonResults, EvaluationResults, Results, StudyResults

_Entry = tuple[str, str, tuple[tuple[str, str], ...]]
"""Kind, key and fields."""


def _arxiv(key: str, title: str, author: str, number: str) -> _Entry:
    fields = (("title", title), ("author", author), ("year", f"20{number[:2]}"), ("eprint", number))
    return "misc", key, (*fields, ("archivePrefix", "arXiv"), ("url", f"https://arxiv.org/abs/{number}"))


_PRE_PROJECTION = _arxiv(
    "shinde2026preprojection",
    "Position-Agnostic Pre-Projection for Transformer Attention: Nonlinear Feature Construction and Content Skip "
    "Before {Q/K/V}",
    "Shinde, Chirag",
    "2604.10791",
)
_NONLINEAR_QUERY = _arxiv(
    "karbevski2026nonlinear",
    "Beyond Linearity in Attention Projections: The Case for Nonlinear Queries",
    "Karbevski, Marko",
    "2603.13381",
)
_NO_QUERY = _arxiv(
    "karbevski2025keyvalue",
    "Key and Value Weights Are Probably All You Need: On the Necessity of the Query, Key, Value Weight Triplet in "
    "Decoder-Only Transformers",
    "Karbevski, Marko and Mijoski, Antonij",
    "2510.23912",
)
_LORA = _arxiv(
    "hu2021lora",
    "{LoRA}: Low-Rank Adaptation of Large Language Models",
    "Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and Wang, Shean and "
    "Wang, Lu and Chen, Weizhu",
    "2106.09685",
)
_OUTPUT_GATE = _arxiv(
    "qiu2025gated",
    "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
    "Qiu, Zihan and others",
    "2505.06708",
)
_VALUE_RESIDUAL = _arxiv("zhou2024value", "Value Residual Learning", "Zhou, Zhanchao and others", "2410.17897")
_REFT = _arxiv(
    "wu2024reft", "{ReFT}: Representation Finetuning for Language Models", "Wu, Zhengxuan and others", "2404.03592"
)
_PARALLEL_ADAPTER = _arxiv(
    "he2021unified",
    "Towards a Unified View of Parameter-Efficient Transfer Learning",
    "He, Junxian and others",
    "2110.04366",
)
_CANON: _Entry = (
    "misc",
    "allenzhu2025canon",
    (
        ("title", "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers"),
        ("author", "Allen-Zhu, Zeyuan"),
        ("year", "2025"),
    ),
)
_PRIMER = _arxiv(
    "so2021primer", "Primer: Searching for Efficient Transformers for Language Modeling", "So, David R. and others",
    "2109.08668",
)  # fmt: skip
_PEFT: _Entry = (
    "misc",
    "peft",
    (
        ("title", "{PEFT}: State-of-the-art Parameter-Efficient Fine-Tuning methods"),
        ("author", "Mangrulkar, Sourab and Gugger, Sylvain and Debut, Lysandre and Belkada, Younes and Paul, Sayak and "
         "Bossan, Benjamin"),
        ("year", "2022"),
        ("url", "https://github.com/huggingface/peft"),
    ),
)  # fmt: skip
_LM_EVAL: _Entry = (
    "misc",
    "lmeval",
    (
        ("title", "The Language Model Evaluation Harness"),
        ("author", "{EleutherAI}"),
        ("url", "https://github.com/EleutherAI/lm-evaluation-harness"),
    ),
)
_SOURCES = {
    "pre_projection": (_PRE_PROJECTION,),
    "nonlinear_query": (_NONLINEAR_QUERY,),
    "query_temperature": (),
    "output_gate": (_OUTPUT_GATE,),
    "value_residual": (_VALUE_RESIDUAL,),
    "loreft": (_REFT,),
    "parallel_adapter": (_PARALLEL_ADAPTER,),
    "nonlinear_lora": (_LORA,),
    "canon": (_CANON, _PRIMER),
    "lora": (_LORA,),
}
_STOCK_QUERY, _IDENTITY_QUERY = "Q = x W_Q", "Q = x"


def citation_section(results: Iterable[Results]) -> Section:
    """Build the section with the BibTeX of what results rest on."""
    runs = list(results)
    commits = dict.fromkeys(str(each.provenance["commit"]) for each in runs if each.provenance.get("commit"))
    note = [("note", f"commit {', '.join(commit[:12] for commit in commits)}")] if commits else []
    title = "hfpatch: model surgery on the attention branch of causal language models"
    own: _Entry = ("misc", "hfpatch", (("title", title), ("author", "{The hfpatch authors}"), *note))
    texts = []
    for kind, key, fields in dict.fromkeys([own, *(entry for each in runs for entry in _used(each))]):
        lines = [f"  {name} = {{{value}}}," for name, value in fields]
        texts.append("\n".join([f"@{kind}{{{key},", *lines, "}\n"]))
    blocks = (Text("What these results rest on, as BibTeX."), Code("\n".join(texts), "bibtex"))
    return Section("cite", "Cite", blocks)


def _used(results: Results) -> Iterable[_Entry]:
    """Yield what one run rests on."""
    match results:
        case ComparisonResults():
            for part in (part for method in results.methods.values() for part in method.parts):
                yield from _SOURCES.get(str(part.get("type")), (_PEFT,))
            yield from (_LM_EVAL,) if results.tasks else ()
        case StudyResults():
            queries = [variant.query for variant in results.variants.values()]
            yield from (_NONLINEAR_QUERY,) if any(query not in (_STOCK_QUERY, "") for query in queries) else ()
            yield from (_NO_QUERY,) if _IDENTITY_QUERY in queries else ()
        case EvaluationResults():
            yield _LM_EVAL
