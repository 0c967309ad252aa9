"""Every method on every architecture, by formula; docs/architectures.md must say what comes out here.

``make architectures`` writes that page again.
"""

from functools import partial
from importlib.metadata import version

import pytest
from architectures import sweep, table, together
from architectures.catalogue import CASES, NOT_TRIED, TRIED, TYPES, WITHOUT_ATTENTION, WRITTEN_FOR

WITH_SITES = [case for case in CASES if not sweep.refusal(case, "pre-projection")]
COMMON = ("deepseek_v3", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt", "phi", "qwen3")
RARE = partial(pytest.param, marks=pytest.mark.slow)
PAGE = table.read() if table.FILE.exists() else {}
# The scope lets pytest run all tests of a case in a row, which then build its model once
each_case = pytest.mark.parametrize("case", CASES, scope="module")
each_with_sites = pytest.mark.parametrize("case", WITH_SITES, scope="module")


@each_with_sites
def test_sites(case):
    assert sweep.finds_the_sites(case) == PAGE[case][table.COLUMNS[1]]


@each_with_sites
def test_what_is_declared_is_what_the_model_computes(case):
    sweep.is_right_where_it_is_declared(case)


@pytest.mark.parametrize("method", sweep.METHODS)
@each_case
def test_method(case, method):
    assert sweep.check(case, method) == PAGE[case][method]


@pytest.mark.parametrize("control", sweep.CONTROLS)
@pytest.mark.parametrize("case", [case if case in COMMON else RARE(case) for case in CASES], scope="module")
def test_control(case, control):
    assert sweep.check_control(case, control) == PAGE[case][control]


@pytest.mark.parametrize("case", [case if case in COMMON else RARE(case) for case in WITH_SITES], scope="module")
def test_all_methods_together(case, tmp_path):
    assert together.promises(case, tmp_path) == (PAGE[case]["all together"], PAGE[case]["export"])


@pytest.mark.parametrize("method", sweep.METHODS)
@pytest.mark.parametrize("kind", sorted(WITHOUT_ATTENTION))
def test_a_model_without_attention_is_refused(kind, method):
    sweep.is_refused(kind, sweep.configuration(method))
    assert PAGE[kind][method] == "refused"


@each_case
def test_the_reasons_of_the_page(case):
    assert table.row_of(case, list(PAGE[case].values())[1:-1]) == PAGE[case]


@pytest.mark.skipif(version("transformers") != WRITTEN_FOR, reason="another version of transformers has other types")
def test_the_page_has_every_type_and_nothing_fails():
    assert (len(TYPES), len(TRIED), len({case.split("/")[0] for case in CASES})) == (189, 186, 181)
    assert set(TYPES) == {*TRIED, *NOT_TRIED}
    assert set(PAGE) == {*TYPES, *CASES}
    assert all(PAGE[row["type"]] == row for row in table.rows_without_cases())
    assert not [row for row in PAGE.values() if "FAILS" in str(row)]
    assert [table.counted(PAGE.values(), method) for method in sweep.METHODS] == [180, 174, 178, 178]
    assert not [words for words in table.further().values() if "FAILS" in str(words)]
    assert table.written(list(PAGE.values()), table.further()) == table.FILE.read_text(encoding="utf-8")
