"""Every method on every architecture, by formula; docs/architectures.md must say what comes out here.

``make architectures`` writes that page again.
"""

from functools import partial
from importlib.metadata import version
from itertools import product

import pytest
from architectures import sweep, table, together
from architectures.catalogue import CASES, NOT_TRIED, TRIED, TYPES, WITHOUT_ATTENTION, WRITTEN_FOR, model_type

from hfpatch.sites import family

WITH_SITES = [case for case in CASES if not sweep.refusal(case, "pre-projection")]
COMMON = ("deepseek_v3", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt", "phi", "qwen3")
RARE = partial(pytest.param, marks=pytest.mark.slow)
PAGE = table.read()


def agrees(check, case, word):
    """Return whether the page says so; it does not have the types of newer versions of transformers."""
    return PAGE[check].get(case, word) == word


# The scope lets pytest run all tests of a case in a row, which then build its model once
@pytest.mark.parametrize("case", WITH_SITES, scope="module")
def test_sites(case):
    assert agrees("attention", case, sweep.finds_the_sites(case))


# A rare type that needs no declaration is read as a common one is; the formulas show that it is read rightly
DECLARED = [case for case in WITH_SITES if case in COMMON or model_type(case) in family.DECLARED]


@pytest.mark.parametrize("case", [case if case in DECLARED else RARE(case) for case in WITH_SITES], scope="module")
def test_what_is_declared_is_what_the_model_computes(case):
    sweep.is_right_where_it_is_declared(case)


# A content skip's formula has the pre-projection's, which needs no test of its own on a rare case
PARTS = {(case, "pre-projection") for case in CASES if case not in COMMON and not sweep.refusal(case, "content skip")}
TRIALS = [RARE(*trial) if trial in PARTS else trial for trial in product(CASES, sweep.METHODS)]


@pytest.mark.parametrize(("case", "method"), TRIALS, scope="module")
def test_method(case, method):
    assert agrees(method, case, sweep.check(case, method))


@pytest.mark.parametrize("control", sweep.CONTROLS)
@pytest.mark.parametrize("case", [case if case in COMMON else RARE(case) for case in CASES], scope="module")
def test_control(case, control):
    assert agrees(control, case, sweep.check_control(case, control))


@pytest.mark.parametrize("case", [case if case in COMMON else RARE(case) for case in WITH_SITES], scope="module")
def test_all_methods_together(case, tmp_path):
    assert agrees("all together", case, together.promises(case, tmp_path))


@pytest.mark.parametrize("method", sweep.METHODS)
@pytest.mark.parametrize("kind", sorted(WITHOUT_ATTENTION))
def test_a_model_without_attention_is_refused(kind, method):
    sweep.is_refused(kind, sweep.configuration(method))


@pytest.mark.skipif(version("transformers") != WRITTEN_FOR, reason="another version of transformers has other types")
def test_the_page_has_every_type_and_nothing_fails():
    assert (len(TYPES), len(TRIED), len({case.split("/")[0] for case in CASES})) == (189, 186, 181)
    assert set(TYPES) == {*TRIED, *NOT_TRIED}
    assert list(PAGE) == list(table.CHECKS)
    assert not [words for words in PAGE.values() if "FAILS" in str(words)]
    assert [table.works(PAGE[method]) for method in sweep.METHODS] == [180, 174, 178, 178]
    assert table.written(PAGE) == table.FILE.read_text(encoding="utf-8")
