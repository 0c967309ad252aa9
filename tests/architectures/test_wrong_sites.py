"""The sweep must fail where hfpatch is wrong: each mutation of what it finds in a model is caught."""

from dataclasses import replace

import pytest
from architectures import sweep

from hfpatch.sites import discovery
from hfpatch.sites.layouts import Columns


def with_query_columns(change):
    def mutation(site):
        query = site.projections["query"]
        return replace(site, projections={**site.projections, "query": replace(query, columns=change(query.columns))})

    return mutation


def key_as_query_from_the_second_layer(site):
    key = site.projections["key"]
    return replace(site, projections={**site.projections, "query": key}) if site.layer else site


MUTATIONS = {
    "forgotten factor": lambda site: replace(site, exit_factor=1.0),
    "before the norm": lambda site: replace(site, exit=site.attention, exit_path=site.path),
    "key columns": with_query_columns(lambda columns: replace(columns, start=columns.start + columns.length)),
    "first columns": with_query_columns(lambda columns: Columns(1, columns.groups * columns.width, 0, columns.size)),
    "half of the columns": with_query_columns(lambda columns: replace(columns, length=columns.length // 2)),
    "query alone": lambda site: replace(site, entries=(site.projection_module("query"),)),
    "key as query": key_as_query_from_the_second_layer,
}


@pytest.mark.parametrize(
    ("mutation", "case", "method"),
    [
        ("forgotten factor", "granite", "content skip"),
        ("forgotten factor", "minimax", "content skip"),
        ("before the norm", "gemma2", "content skip"),
        ("before the norm", "olmo2", "content skip"),
        ("key columns", "gpt_neox", "nonlinear query"),
        ("first columns", "codegen/eight_heads", "nonlinear query"),
        ("first columns", "falcon/new_decoder", "nonlinear query"),
        ("first columns", "qwen3_next", "nonlinear query"),
        ("half of the columns", "gpt2", "nonlinear query"),
        ("half of the columns", "deepseek_v3", "nonlinear query"),
        ("query alone", "llama", "pre-projection"),
        ("query alone", "cohere", "content skip"),
        ("key as query", "starcoder2", "nonlinear query"),
    ],
)
def test_a_wrong_site_is_caught(monkeypatch, mutation, case, method):
    """By the formulas, and by what ``hfpatch check`` measures without them."""
    sweep.check(case, method)
    read = discovery.read_site
    monkeypatch.setattr(discovery, "read_site", lambda *args, **kwargs: MUTATIONS[mutation](read(*args, **kwargs)))
    with pytest.raises(AssertionError, match=r"another function than the formula|another width"):
        sweep.check(case, method)
    with pytest.raises(AssertionError, match=r"differs from x~ W_skip|does not reach|columns"):
        sweep.is_right_where_it_is_declared(case)
