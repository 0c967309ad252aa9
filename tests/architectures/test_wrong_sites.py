"""The sweep must fail where hfpatch is wrong: each mutation of what it finds in a model is caught."""

from dataclasses import replace

import pytest
from architectures import sweep

from hfpatch.sites import discovery
from hfpatch.sites.columns import Columns


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
    ],
)
def test_a_wrong_site_is_caught(monkeypatch, mutation, case, method):
    sweep.check(case, method)
    read = discovery.read_site
    monkeypatch.setattr(discovery, "read_site", lambda *args, **kwargs: mutation(read(*args, **kwargs)))
    with pytest.raises(AssertionError, match="another function than the formula"):
        sweep.check(case, method)
