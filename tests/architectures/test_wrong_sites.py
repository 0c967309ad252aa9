"""The sweep must fail where hfpatch is wrong: each mutation of what it finds in a model is caught."""

from dataclasses import replace

import pytest
from architectures import sweep

from hfpatch.sites import discovery
from hfpatch.sites.layouts import Columns


def with_query_columns(site, change):
    query = site.projections["query"]
    return replace(site, projections={**site.projections, "query": replace(query, columns=change(query.columns))})


def forgotten_factor(site):
    return replace(site, exit_factor=1.0)


def before_the_norm(site):
    return replace(site, exit=site.attention, exit_path=site.path)


def key_columns(site):
    return with_query_columns(site, lambda columns: replace(columns, start=columns.start + columns.length))


def first_columns(site):
    return with_query_columns(site, lambda columns: Columns(1, columns.groups * columns.width, 0, columns.size))


def half_of_the_columns(site):
    return with_query_columns(site, lambda columns: replace(columns, length=columns.length // 2))


def query_alone(site):
    return replace(site, entries=(site.projection_module("query"),))


def key_as_query_from_the_second_layer(site):
    key = site.projections["key"]
    return replace(site, projections={**site.projections, "query": key}) if site.layer else site


@pytest.mark.parametrize(
    ("mutation", "case", "method"),
    [
        (forgotten_factor, "granite", "content skip"),
        (forgotten_factor, "minimax", "content skip"),
        (before_the_norm, "gemma2", "content skip"),
        (before_the_norm, "olmo2", "content skip"),
        (key_columns, "gpt_neox", "nonlinear query"),
        (first_columns, "codegen/eight_heads", "nonlinear query"),
        (first_columns, "falcon/new_decoder", "nonlinear query"),
        (first_columns, "qwen3_next", "nonlinear query"),
        (half_of_the_columns, "gpt2", "nonlinear query"),
        (half_of_the_columns, "deepseek_v3", "nonlinear query"),
        (query_alone, "llama", "pre-projection"),
        (query_alone, "cohere", "content skip"),
        (key_as_query_from_the_second_layer, "starcoder2", "nonlinear query"),
    ],
)
def test_a_wrong_site_is_caught(monkeypatch, mutation, case, method):
    """By the formulas, and by what ``hfpatch check`` measures without them."""
    sweep.check(case, method)
    read = discovery.read_site
    monkeypatch.setattr(discovery, "read_site", lambda *args, **kwargs: mutation(read(*args, **kwargs)))
    with pytest.raises(AssertionError, match=r"another function than the formula|another width"):
        sweep.check(case, method)
    with pytest.raises(AssertionError, match=r"differs from x~ W_skip|does not reach|columns"):
        sweep.is_right_where_it_is_declared(case)
