"""The document of an inspection: its tables, its page and what a terminal shows of it."""

import base64
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from reporting.test_html import Page

from hfpatch.analysis.ablation import Ablation, Ablations
from hfpatch.analysis.attention import HeadAttention
from hfpatch.analysis.inspection import Inspection, Text
from hfpatch.analysis.linearised import Linearised
from hfpatch.analysis.movement import Movement
from hfpatch.analysis.norms import LayerSize, QuerySize, SkipNorm
from hfpatch.analysis.relation import HeadRelation, Relation
from hfpatch.reporting.document import Table
from hfpatch.reporting.html import html
from hfpatch.reporting.inspection.document import inspection_document
from hfpatch.reporting.inspection.figures import figures
from hfpatch.results.parts import TrainResult
from hfpatch.surgery.bases import Base
from hfpatch.surgery.patch import PatchSummary

HOSTILE = "<script>alert(1)</script>"
OUTCOME = {"steps": 5, "final_loss": 1.5, "tokens": 100, "wall_s": 2.0, "tokens_per_s": 50.0, "peak_memory_bytes": 1}


def site(layer):
    projections = {"query": SimpleNamespace(path="q_proj")} if layer else {}
    path = f"layers.{layer}.attention"
    return SimpleNamespace(
        layer=layer, family="llama", path=path, exit_path=path if layer else "norm", projections=projections
    )


def relation(layer, head, symmetric):
    offsets = {offset: Relation(1.0 + offset, symmetric, 8, 8 - layer, 0.5, 12.5) for offset in (0, 1)}
    return HeadRelation(layer, head, head // 2, offsets)


def inspection(**analyses):
    model = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    base = Base("small/llama", None, model, None, "0123456789abcdef" * 4)
    sites = [site(0), site(1)]
    return Inspection(base, analyses.pop("patch", None), sites, PatchSummary(5, 40, 1600, {0: 30, 1: 10}), **analyses)


def whole():
    """Return an inspection with every analysis."""
    return inspection(
        patch=Path(HOSTILE) / "patch",
        text=Text("stories", 6, 2059),
        relations=[relation(0, 0, 0.25), relation(0, 1, 0.75), relation(1, 0, 0.5), relation(1, 1, math.nan)],
        relations_patched=[relation(0, 0, 0.5), relation(0, 1, 0.5)],
        attention=[HeadAttention(0, 0, 0.25, 1.5, 12.0), HeadAttention(0, 1, 0.75, 2.5, 4.0)],
        attention_patched=[HeadAttention(0, 0, 0.5, 1.5, 12.0)],
        skip_norms=[SkipNorm(0, "default", 2.5512, 0.0128), SkipNorm(0, "other", 3.0, 0.0128)],
        skip_sizes=[LayerSize(0, 0.224)],
        pre_projection_sizes=[LayerSize(1, 0.5)],
        query_sizes=[
            QuerySize(1, "default", "query", 0.0197, 0.1),
            QuerySize(1, "default", "key", 0.5, -0.25),
        ],
        linearised=[Linearised(1, None, (0.9, 0.8), (None, 0.5), 1152)],
        ablations=Ablations(0.9, 6, [Ablation(1, 1.0, 0.1, 0.02), Ablation(None, 0.8, -0.1, 0.03)]),
        movement=[
            Movement(0, "a.preproj_up.x.weight", 1000, 10, 3.0, 1.0, 1.0),
            Movement(1, "b.preproj_up.x.weight", 1000, 10, 4.0, 1.0, 1.0),
            Movement(1, "b.other.x.weight", 4, 4, 0.0, 2.0, 2.0),
        ],
        run=TrainResult(**OUTCOME, update_survival={"preproj_up": 0.75, "all": 0.5}),
        notes=["Something: not shown; & why."],
    )  # fmt: skip


@pytest.fixture(scope="module")
def inspected():
    return whole()


def tables_of(inspected):
    """The cells of each table by its title."""
    tables = [block for block in inspection_document(inspected).summary if isinstance(block, Table)]
    return {table.title: [row.cells for row in table.rows] for table in tables}


def test_tables_show_what_was_found(inspected):
    # columns of numbers are marked, so that they sort as numbers
    tables = {block.title: block for block in inspection_document(inspected).summary if isinstance(block, Table)}
    assert [column.number for column in tables["Attention branches"].columns] == [True, *[False] * 4, True]
    assert tables_of(inspected) == {
        "Attention branches": [
            ("0", "llama", "layers.N.attention", "–", "norm", "30"),
            ("1", "llama", "layers.N.attention", "q_proj", "itself", "10"),
        ],
        "What the patch adds": [
            ("0", "–", "2.55, 3.00", "0.0128", "0.224", "–", "–"),
            ("1", "0.500", "–", "–", "–", "0.0197, key 0.500", "0.100, key −0.250"),
        ],
        "Attention on the text": [("0", "0.50 [0.25, 0.75]", "2.00 [1.50, 2.50]", "8.0 [4.0, 12.0]")],
        "Attention with the patch": [("0", "0.50 [0.50, 0.50]", "1.50 [1.50, 1.50]", "12.0 [12.0, 12.0]")],
        "Q-K relation": [
            ("0", "2/1", "0.50 [0.25, 0.75]", "0.50 [0.50, 0.50]", "(8, 8)", "12.5 [12.5, 12.5]"),
            ("1", "2/1", "0.50 [0.50, 0.50]", "0.50 [0.50, 0.50]", "(8, 7)", "12.5 [12.5, 12.5]"),
        ],
        "Q-K relation with the patch": [
            ("0", "2/1", "0.50 [0.50, 0.50]", "0.50 [0.50, 0.50]", "(8, 8)", "12.5 [12.5, 12.5]")
        ],
        "Q-K relation by relative offset, patched": [("0", "0.50", "0.50")],
        "Linear stand-in": [("1", "0.850 [0.800, 0.900]", "0.500 [0.500, 0.500]", "1,152")],
        "Without one layer's adapters": [("1", "1.0000", "+0.1000", "0.0200"), ("all", "0.8000", "−0.1000", "0.0300")],
        "Training": [
            ("preproj_up", "2,000", "20 (1.0%)", "5.00", "1.41", "75.0%"),
            ("other", "4", "4 (100.0%)", "0", "2.00", "–"),
        ],
    }


def table_of(sites, per_layer):
    inspected = replace(inspection(), sites=sites, summary=PatchSummary(5, 40, 1600, per_layer))
    (table,) = (block for block in inspection_document(inspected).summary if isinstance(block, Table))
    return [row.cells for row in table.rows], table.caption


def test_layers_that_are_alike_are_one_row_and_those_that_differ_in_anything_are_not():
    rows, caption = table_of([site(layer) for layer in range(1, 31)], {})
    assert rows == [("1–30", "llama", "layers.N.attention", "q_proj", "itself", "0")]
    assert caption.startswith("30 layers, all alike. ")
    sites = [site(layer) for layer in (0, 1, 2, 3, 4, 6, 8, 9)]
    sites[-1].family = "other"
    rows, caption = table_of(sites, {2: 7, 3: 7})
    assert [(row[0], row[1], row[2], row[5]) for row in rows] == [
        ("0", "llama", "layers.N.attention", "0"),  # another exit, without a projection of the query
        ("1", "llama", "layers.N.attention", "0"),
        ("2, 3", "llama", "layers.N.attention", "7"),
        ("4, 6, 8", "llama", "layers.N.attention", "0"),  # between them blocks of another kind
        ("9", "other", "layers.N.attention", "0"),
    ]
    assert "alike" not in caption


def test_what_was_not_found_is_left_out():
    inspected = inspection(relations=[relation(0, 0, 0.25)])
    document = inspection_document(inspected, figures(inspected))
    assert list(tables_of(inspected)) == ["Attention branches", "Q-K relation", "Q-K relation by relative offset"]
    assert [section.name for section in document.parts[0].sections] == ["model", "relation"]
    assert list(document.parts[0].figures) == ["relation", "offsets"]
    of_queries = inspection(query_sizes=[QuerySize(1, "own", "query", 0.0197, 0.1)])
    assert list(tables_of(of_queries)) == ["Attention branches", "What f adds to its anchor"]


def test_the_terminal_shows_what_was_looked_at_and_what_is_not_shown(inspected, printed):
    document = inspection_document(inspected)
    assert document.parts[0].figures == {}
    lines = printed(document).splitlines()
    assert lines[:4] == [
        "Model: small/llama, llama, SHA-256 0123456789ab",
        f"Patch: {HOSTILE}/patch, 2.50% of the base's parameters",
        "Measured on: stories, 2,059 tokens of 6 documents",
        "Parameters: 1,600 of the base, 40 added, 5 trainable",
    ]
    assert lines[-1] == "· Something: not shown; & why."
    assert any("0.9000 with the whole patch" in line for line in lines)


def test_the_page_holds_all_figures_and_numbers_and_no_script_of_a_name(inspected):
    page = Page()
    page.feed(html(inspection_document(inspected, figures(inspected))))
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), tags.count("svg")) == (1, 8)
    assert len(page.ids) == len(set(page.ids))
    (download,) = (link for link in page.links if not link.startswith("#"))
    data = download.removeprefix("data:application/gzip;base64,")
    assert json.loads(gzip.decompress(base64.b64decode(data))) == inspected.to_json()
