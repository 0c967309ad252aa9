"""The places that the sweep holds for true, proved on transformers' models alone: nothing here is of hfpatch's."""

import copy
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from architectures.catalogue import (
    CASES,
    NOT_TRIED,
    TRIED,
    TYPES,
    WITHOUT_ATTENTION,
    WRITTEN_FOR,
    logits_of,
    make,
    settled,
    tokens_for,
)
from architectures.columns import QUERY_COLUMNS, all_columns, first
from architectures.formulas import apply_pre_projection
from architectures.measurements import acts_as_query, inputs, logits_without_attention, residuals, without_sinks
from architectures.places import PLACES, place_of, sites_of

AT = 4
ROUNDING = 1e-4
WITH_SITES = [case for case in CASES if "all" not in place_of(case).refused]
WITH_SKIP = [case for case in WITH_SITES if "content skip" not in place_of(case).refused]
# The rule of the first position does not hold where attention is not causal or x makes keys out of queries
WITH_ROLES = [case for case in WITH_SITES if case not in ("cpmant", "jetmoe", "zaya")]


def random_tensors(width, *, skip=False):
    names = ("up", "down", "skip") if skip else ("up", "down")
    return {name: torch.randn(width, width) * 0.5 * width**-0.5 for name in names}


def widths(model, sites, tokens):
    return {path: x.shape[-1] for path, x in inputs(model, sites, tokens).items()}


OTHER_TYPES = version("transformers") != WRITTEN_FOR


@pytest.mark.skipif(OTHER_TYPES, reason="another version of transformers has other types")
def test_every_type_is_here():
    with_attention = {case.split("/")[0] for case in CASES}
    assert set(TYPES) == set(TRIED) | set(NOT_TRIED)
    assert set(TRIED) == with_attention | set(WITHOUT_ATTENTION)
    assert (len(TYPES), len(TRIED), len(with_attention)) == (189, 186, 181)


@pytest.mark.parametrize("case", WITH_SITES, scope="module")  # all tests of a case in a row build its model once
def test_a_changed_attention_input_acts_through_the_attention_alone(case):
    base = settled(make(case))
    tokens, sites = tokens_for(base), sites_of(case, base)
    changed = copy.deepcopy(base)
    for site, width in zip(sites, widths(base, sites, tokens).values(), strict=True):
        apply_pre_projection(changed, site, random_tensors(width))
    assert (logits_of(changed, tokens) - logits_of(base, tokens)).abs().max() > 1e-3
    without = logits_without_attention(base, sites, tokens)
    assert (without - logits_of(base, tokens)).abs().max() > 1e-3
    assert torch.equal(without, logits_without_attention(changed, sites, tokens))


def arrival_error(case, change=lambda site: site):
    """How far what a skip adds to the residual is from x~ W_skip, relative to it; the worst site counts."""
    base = settled(make(case))
    tokens, sites = tokens_for(base), sites_of(case, base)
    worst = 0.0
    for site, width in zip(sites, widths(base, sites, tokens).values(), strict=True):
        tensors = random_tensors(width, skip=True)
        plain, skipped = copy.deepcopy(base), copy.deepcopy(base)
        apply_pre_projection(plain, site, {name: tensors[name] for name in ("up", "down")})
        received = apply_pre_projection(skipped, change(site), tensors)
        arrived = residuals(skipped, [site], tokens)[site.path] - residuals(plain, [site], tokens)[site.path]
        expected = (received[0] @ tensors["skip"].T).reshape(arrived.shape)
        worst = max(worst, float((arrived - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("case", WITH_SKIP, scope="module")
def test_what_is_added_at_the_exit_arrives_in_the_residual(case):
    assert arrival_error(case) < ROUNDING


@pytest.mark.parametrize("case", WITH_ROLES, scope="module")
def test_the_query_columns_act_as_a_query_and_no_others_do(case):
    model = settled(make(case))
    tokens = tokens_for(model, batch=1)
    with without_sinks(model):
        for site in (site for site in sites_of(case, model) if site.query):
            query, moves = acts_as_query(model, site, [site.columns], tokens, at=AT, size=1)
            assert query.all()
            assert moves.all()
            rest = sorted(set(all_columns(model.get_submodule(site.query), None)) - set(site.columns))
            if rest:
                single, _ = acts_as_query(model, site, [[i] for i in site.columns], tokens, at=AT, size=5)
                assert single.all()
                others, moves = acts_as_query(model, site, [[i] for i in rest], tokens, at=AT, size=1)
                assert not (others & moves).any()
                assert moves.float().mean() > 0.7  # a clamp hides a few


def test_the_measurements_tell_a_wrong_exit_and_a_forgotten_factor():
    assert arrival_error("gemma2", lambda site: replace(site, exit=site.path)) > 0.1
    assert arrival_error("granite", lambda site: replace(site, factor=1.0)) > 0.1
    assert arrival_error("bert", lambda site: replace(site, exit=site.path.rpartition(".")[0])) > 0.1


def test_the_measurements_tell_an_attention_that_holds_its_own_residual():
    base = make("bert")
    tokens, sites = tokens_for(base), sites_of("bert", base)
    wider = [replace(site, path=site.path.rpartition(".")[0]) for site in sites]
    changed = copy.deepcopy(base)
    for site in wider:
        apply_pre_projection(changed, site, random_tensors(64))
    without = (logits_without_attention(model, sites, tokens) for model in (base, changed))
    assert not torch.equal(*without)


@pytest.mark.parametrize("case", ["codegen", "gpt_neox", "falcon/new_decoder", "qwen3_next"])
def test_the_measurements_tell_a_wrong_layout(case):
    model = settled(make(case))
    site = sites_of(case, model)[0]
    columns = first(lambda config: len(site.columns))(None, None)
    assert columns != site.columns
    assert len(QUERY_COLUMNS[case](model.get_submodule(site.query), model.config.get_text_config())) == len(columns)
    query, _ = acts_as_query(model, site, [[i] for i in columns], tokens_for(model, batch=1), at=AT, size=5)
    assert not query.all()


@pytest.mark.skipif(OTHER_TYPES, reason="another version of transformers has other types")
def test_no_place_is_without_a_case():
    assert set(PLACES) <= set(CASES)
